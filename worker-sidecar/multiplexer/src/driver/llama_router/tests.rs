use std::sync::Mutex;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;

use super::*;
use crate::driver::tests::serve;

#[test]
fn model_status_includes_exit_code_of_failure() {
    let list = json!({"data": [
        {"id": "a", "status": {"value": "loaded"}},
        {"id": "b", "status": {"value": "unloaded", "failed": true, "exit_code": 1}},
        {"id": "c", "status": {"value": "downloading"}},
    ]});
    assert_eq!(status_in(&list, "a"), Some(ModelStatus::Loaded));
    assert_eq!(status_in(&list, "b"), Some(ModelStatus::Unloaded { exit_code: Some(1) }));
    assert_eq!(status_in(&list, "c"), Some(ModelStatus::Loading));
    assert_eq!(status_in(&list, "d"), None);
}

/// A fake router with the model `a`, and another one that is not used.
#[derive(Debug)]
struct Played {
    status: Mutex<&'static str>,
    told: Mutex<Vec<&'static str>>,
    /// Its response to a load, and the model's status after it.
    load: (StatusCode, &'static str),
    /// Its response to an unload, which it carries out unless it rejects the key.
    unload: StatusCode,
}

impl Played {
    fn new(status: &'static str) -> Self {
        let load = (StatusCode::OK, "loaded");
        Self { status: Mutex::new(status), told: Mutex::default(), load, unload: StatusCode::OK }
    }
}

async fn list(State(played): State<Arc<Played>>) -> Json<Value> {
    let status = *played.status.lock().unwrap();
    let others = json!({"id": "b", "status": {"value": "unloaded"}});
    Json(json!({"data": [others, {"id": "a", "status": {"value": status}}]}))
}

async fn load(State(played): State<Arc<Played>>) -> (StatusCode, Json<Value>) {
    let (answer, becomes) = played.load;
    played.told.lock().unwrap().push("load");
    *played.status.lock().unwrap() = becomes;
    (answer, Json(json!({"error": {"message": "as the test wants it"}})))
}

async fn unload(State(played): State<Arc<Played>>) -> (StatusCode, Json<Value>) {
    played.told.lock().unwrap().push("unload");
    if played.unload != StatusCode::UNAUTHORIZED {
        *played.status.lock().unwrap() = "unloaded";
    }
    (played.unload, Json(json!({"error": {"message": "as the test wants it"}})))
}

async fn play(played: Played) -> (Arc<Played>, LlamaRouter) {
    let played = Arc::new(played);
    let routes = Router::new().route("/models", get(list)).route("/models/load", post(load));
    let routes = routes.route("/models/unload", post(unload)).with_state(Arc::clone(&played));
    let url = serve(routes).await;
    (played, LlamaRouter::new(url, vec!["a".into()]))
}

async fn in_time<T>(call: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(5), call).await.expect("it does not wait indefinitely")
}

/// Returns the result of a load of `a`, and the calls that the router received.
async fn loaded(
    status: &'static str,
    load_answer: (StatusCode, &'static str),
) -> (Result<(), String>, Vec<&'static str>) {
    let (played, router) = play(Played { load: load_answer, ..Played::new(status) }).await;
    let result = in_time(router.load(&"a".into(), LoadKind::Cold)).await.map_err(|failure| failure.to_string());
    let told = played.told.lock().unwrap().clone();
    (result, told)
}

#[tokio::test]
async fn sleeping_model_is_unloaded_and_loaded_again() {
    let anew = loaded("sleeping", (StatusCode::OK, "loaded")).await;
    assert_eq!(anew, (Ok(()), vec!["unload", "load"]));
    let (asleep, _) = loaded("unloaded", (StatusCode::OK, "sleeping")).await;
    assert!(asleep.unwrap_err().contains("sleep-idle-seconds"));
}

#[tokio::test]
async fn concurrent_load_by_another_client_succeeds() {
    assert_eq!(loaded("unloaded", (StatusCode::BAD_REQUEST, "loaded")).await, (Ok(()), vec!["load"]));
    let (ended, _) = loaded("unloaded", (StatusCode::BAD_REQUEST, "unloaded")).await;
    assert!(ended.unwrap_err().contains("the router's log"));
}

#[tokio::test]
async fn router_refusal_is_reported() {
    let (refused, told) = loaded("unloaded", (StatusCode::UNAUTHORIZED, "unloaded")).await;
    let refused = refused.unwrap_err();
    assert!(refused.contains("401") && refused.contains("as the test wants it"), "{refused}");
    assert_eq!(told, ["load"]);
}

#[tokio::test]
async fn unloading_absent_model_succeeds_but_refusal_fails() {
    for (answer, fails) in [(StatusCode::OK, false), (StatusCode::BAD_REQUEST, false), (StatusCode::UNAUTHORIZED, true)]
    {
        let (played, router) = play(Played { unload: answer, ..Played::new("loaded") }).await;
        let evicted = in_time(router.evict(&"a".into())).await;
        assert_eq!(evicted.is_err(), fails, "{answer}: {evicted:?}");
        assert_eq!(*played.told.lock().unwrap(), ["unload"], "{answer}");
    }
}

#[tokio::test]
async fn probe_reports_status_of_its_model() {
    for (status, ready, gone) in [("loaded", true, false), ("loading", false, false), ("unloaded", false, true)] {
        let (_, router) = play(Played::new(status)).await;
        let probed = router.probe(&"a".into()).await.unwrap();
        assert_eq!((probed.ready, probed.gone), (ready, gone), "{status}");
    }
}
