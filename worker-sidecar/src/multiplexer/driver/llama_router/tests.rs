use std::sync::Mutex;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;

use super::*;

#[test]
fn a_models_status_is_read_with_the_exit_code_of_a_failure() {
    let list = json!({"data": [
        {"id": "a", "status": {"value": "loaded"}},
        {"id": "b", "status": {"value": "unloaded", "failed": true, "exit_code": 1}},
        {"id": "c", "status": {"value": "downloading"}},
    ]});
    assert_eq!(status_in(&list, "a"), Some(Status::Loaded));
    assert_eq!(status_in(&list, "b"), Some(Status::Unloaded { exit_code: Some(1) }));
    assert_eq!(status_in(&list, "c"), Some(Status::Loading));
    assert_eq!(status_in(&list, "d"), None);
}

/// A router of one model, `a`.
#[derive(Debug)]
struct Played {
    status: Mutex<&'static str>,
    told: Mutex<Vec<&'static str>>,
    /// How it answers a load, and what becomes of the model then.
    load: (StatusCode, &'static str),
}

async fn list(State(played): State<Arc<Played>>) -> Json<Value> {
    let status = *played.status.lock().unwrap();
    Json(json!({"data": [{"id": "a", "status": {"value": status}}]}))
}

async fn load(State(played): State<Arc<Played>>) -> (StatusCode, Json<Value>) {
    let (answer, becomes) = played.load;
    played.told.lock().unwrap().push("load");
    *played.status.lock().unwrap() = becomes;
    (answer, Json(json!({"error": {"message": "as the test wants it"}})))
}

async fn unload(State(played): State<Arc<Played>>) -> Json<Value> {
    played.told.lock().unwrap().push("unload");
    *played.status.lock().unwrap() = "unloaded";
    Json(json!({"success": true}))
}

/// What comes of a load of `a`, and what the router was told.
async fn loaded(
    status: &'static str,
    load_answer: (StatusCode, &'static str),
) -> (Result<(), String>, Vec<&'static str>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let played = Arc::new(Played { status: Mutex::new(status), told: Mutex::default(), load: load_answer });
    let routes = Router::new().route("/models", get(list)).route("/models/load", post(load));
    let routes = routes.route("/models/unload", post(unload)).with_state(Arc::clone(&played));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let router = LlamaRouter::new(url, vec!["a".into()]);
    let model = "a".into();
    let loading = tokio::time::timeout(Duration::from_secs(5), router.load(&model, LoadKind::Cold));
    let result = loading.await.expect("it does not wait for ever").map_err(|failure| failure.to_string());
    let told = played.told.lock().unwrap().clone();
    (result, told)
}

#[tokio::test]
async fn a_model_that_sleeps_in_the_router_is_loaded_anew() {
    let anew = loaded("sleeping", (StatusCode::OK, "loaded")).await;
    assert_eq!(anew, (Ok(()), vec!["unload", "load"]));
    let (asleep, _) = loaded("unloaded", (StatusCode::OK, "sleeping")).await;
    assert!(asleep.unwrap_err().contains("sleep-idle-seconds"));
}

#[tokio::test]
async fn somebody_else_was_faster_is_no_failure() {
    assert_eq!(loaded("unloaded", (StatusCode::BAD_REQUEST, "loaded")).await, (Ok(()), vec!["load"]));
    let (ended, _) = loaded("unloaded", (StatusCode::BAD_REQUEST, "unloaded")).await;
    assert!(ended.unwrap_err().contains("the router's log"));
}

#[tokio::test]
async fn a_routers_refusal_is_told() {
    let (refused, told) = loaded("unloaded", (StatusCode::UNAUTHORIZED, "unloaded")).await;
    let refused = refused.unwrap_err();
    assert!(refused.contains("401") && refused.contains("as the test wants it"), "{refused}");
    assert_eq!(told, ["load"]);
}
