use std::sync::Arc;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;

use super::*;
use crate::driver::tests::serve;

#[test]
fn latest_tag_is_implied() {
    assert!(is_same("tiny:latest", "tiny") && is_same("tiny", "tiny:latest"));
    assert!(!is_same("tiny:q8", "tiny") && !is_same("tiny2:latest", "tiny"));
    assert!(is_same("host:5000/a/tiny:latest", "host:5000/a/tiny"));
}

#[test]
fn model_matches_every_name_that_ollama_accepts() {
    for name in ["TINY", "library/tiny", "registry.ollama.ai/library/tiny", "Registry.Ollama.AI/library/Tiny:LATEST"] {
        assert!(is_same("tiny:latest", name), "{name}");
    }
    for other in ["other/tiny", "hf.co/library/tiny", "library/tiny2", "librarytiny", "registry.ollama.ai/me/tiny"] {
        assert!(!is_same("tiny:latest", other), "{other}");
    }
    assert!(is_same("me/tiny:latest", "registry.ollama.ai/me/tiny"));
}

#[tokio::test]
async fn silent_server_error_names_address_within_timeout() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let driver = Ollama::new(url.parse().unwrap(), vec!["tiny".into()]);
    let model = "tiny".into();
    let checking = tokio::time::timeout(Duration::from_secs(20), driver.check(&model));
    let error = checking.await.expect("it does not wait indefinitely").unwrap_err().to_string();
    assert!(error.contains(&url) && error.contains("/api/show"), "{error}");
}

/// A fake Ollama with the loaded models that the test sets.
#[derive(Debug, Default)]
struct Played {
    loaded: Mutex<Vec<String>>,
    told: Mutex<Vec<String>>,
    /// The error that it returns instead of generating.
    refusal: Option<&'static str>,
    /// The duration of a load, which is not cancelled when its client leaves.
    takes: Duration,
}

impl Played {
    fn load(self: &Arc<Self>, model: &str) -> impl Future<Output = ()> + use<> {
        let (played, model) = (Arc::clone(self), format!("{model}:latest"));
        let loading = tokio::spawn(async move {
            tokio::time::sleep(played.takes).await;
            played.loaded.lock().unwrap().push(model);
        });
        async { loading.await.unwrap() }
    }

    fn loaded(&self) -> Vec<String> {
        self.loaded.lock().unwrap().clone()
    }
}

async fn list(State(played): State<Arc<Played>>) -> Json<Value> {
    Json(json!({"models": played.loaded().iter().map(|name| json!({"name": name})).collect::<Vec<_>>()}))
}

async fn generate(State(played): State<Arc<Played>>, Json(body): Json<Value>) -> (StatusCode, Json<Value>) {
    let model = body["model"].as_str().unwrap();
    played.told.lock().unwrap().push(format!("generate {model} {}", body["keep_alive"]));
    if body["keep_alive"] == 0 {
        played.loaded.lock().unwrap().retain(|name| !is_same(name, model));
        return (StatusCode::OK, Json(json!({"done_reason": "unload"})));
    }
    if let Some(refusal) = played.refusal {
        return (StatusCode::BAD_REQUEST, Json(json!({"error": refusal})));
    }
    played.load(model).await;
    (StatusCode::OK, Json(json!({"done": true})))
}

async fn embed(State(played): State<Arc<Played>>, Json(body): Json<Value>) -> Json<Value> {
    let model = body["model"].as_str().unwrap();
    played.told.lock().unwrap().push(format!("embed {model} {}", body["keep_alive"]));
    played.load(model).await;
    Json(json!({"embeddings": []}))
}

async fn play(played: Played) -> (Arc<Played>, Ollama, Model) {
    let played = Arc::new(played);
    let routes = Router::new().route("/api/ps", get(list));
    let routes = routes.route("/api/generate", post(generate)).route("/api/embed", post(embed));
    let url = serve(routes.with_state(Arc::clone(&played))).await;
    (played, Ollama::new(url, vec!["tiny".into()]), "tiny".into())
}

#[tokio::test]
async fn embedding_model_is_loaded_by_embedding_and_kept() {
    let refusal = Some("\"tiny\" does not support generate");
    let (played, ollama, model) = play(Played { refusal, ..Played::default() }).await;
    ollama.load(&model, LoadKind::Cold).await.unwrap();
    assert_eq!(*played.told.lock().unwrap(), ["generate tiny -1", "embed tiny -1"]);
    assert_eq!(played.loaded(), ["tiny:latest"]);
}

#[tokio::test]
async fn refused_load_returns_ollama_message_without_retry() {
    let refusal = Some("invalid model name");
    let (played, ollama, model) = play(Played { refusal, ..Played::default() }).await;
    let error = ollama.load(&model, LoadKind::Cold).await.unwrap_err().to_string();
    assert!(error.contains("invalid model name"), "{error}");
    assert_eq!(*played.told.lock().unwrap(), ["generate tiny -1"]);
}

#[tokio::test]
async fn unloaded_model_is_gone() {
    let (played, ollama, model) = play(Played::default()).await;
    let gone = ollama.probe(&model).await.unwrap();
    assert!(gone.gone && !gone.ready, "{gone:?}");
    played.loaded.lock().unwrap().push("other:latest".to_owned());
    let gone = ollama.probe(&model).await.unwrap();
    assert!(gone.gone && !gone.ready, "{gone:?}");
    played.loaded.lock().unwrap().push("tiny:latest".to_owned());
    let there = ollama.probe(&model).await.unwrap();
    assert!(there.ready && !there.gone, "{there:?}");
}

#[tokio::test]
async fn abandoned_load_is_unloaded_before_eviction_completes() {
    let (played, ollama, model) = play(Played { takes: Duration::from_secs(1), ..Played::default() }).await;
    let given_up = tokio::time::timeout(Duration::from_millis(200), ollama.load(&model, LoadKind::Cold)).await;
    assert!(given_up.is_err());
    ollama.force_evict(&model).await.unwrap();
    assert_eq!(played.loaded(), Vec::<String>::new());
    let told = played.told.lock().unwrap().clone();
    assert_eq!(told, ["generate tiny -1", "generate tiny 0"], "it was loaded, and then unloaded");
}
