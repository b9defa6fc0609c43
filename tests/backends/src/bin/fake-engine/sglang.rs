//! SGLang 0.5.23 with `--enable-memory-saver`. Routes, bodies and statuses follow its source:
//! `entrypoints/http_server.py`, `managers/tokenizer_manager.py` and `managers/scheduler_components/weight_updater.py`
//! below `sglang/srt`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::{Engine, crash};

/// `/health` checks for a result once a second, up to a timeout.
const HEALTH_PAUSE: Duration = Duration::from_secs(1);

const ALL_TAGS: [&str; 3] = ["kv_cache", "weights", "cuda_graph"];

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let admin = Router::new()
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume_generation))
        .route("/release_memory_occupation", post(release))
        .route("/resume_memory_occupation", post(resume))
        .route("/update_weights_from_disk", post(update_weights))
        .layer(from_fn_with_state(Arc::clone(&engine), require_admin_key));
    let normal = Router::new()
        .route("/v1/models", get(async |State(engine): State<Arc<Engine>>| engine.models()))
        .route("/v1/completions", post(complete))
        .layer(from_fn_with_state(Arc::clone(&engine), require_key));
    let router = admin.merge(normal).route("/health", get(health));
    // Older versions lack this route.
    let router = if engine.has("no-ready") { router } else { router.route("/ready", get(ready)) };
    router.with_state(engine)
}

async fn require_key(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    check_key(engine.argument("--api-key"), request, next).await
}

/// If there is an admin key, the API key is not valid for these endpoints (`decide_request_auth`).
async fn require_admin_key(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    check_key(engine.argument("--admin-api-key").or(engine.argument("--api-key")), request, next).await
}

async fn check_key(key: Option<&str>, request: Request, next: Next) -> Response {
    let shown = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    if key.is_some_and(|key| shown != Some(&format!("Bearer {key}"))) {
        return (StatusCode::UNAUTHORIZED, Json(json!({"error": "Unauthorized"}))).into_response();
    }
    next.run(request).await
}

/// Generates nothing. A paused server is not ready, nor is one whose last health check failed.
async fn ready(State(engine): State<Arc<Engine>>) -> StatusCode {
    let memory = engine.memory();
    if engine.has("never-ready") || memory.is_paused || memory.is_unhealthy {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    StatusCode::OK
}

/// Generates a token, which a paused server does not: it then responds after 20 s, and the server is considered
/// unhealthy. That happens even if the client has disconnected.
async fn health(State(engine): State<Arc<Engine>>) -> StatusCode {
    if engine.has("never-ready") {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    let check = tokio::spawn(async move {
        let token = async {
            #[expect(clippy::disallowed_methods, reason = "the pace of the engine that is played")]
            tokio::time::sleep(HEALTH_PAUSE).await;
            until_scheduled(&engine).await;
        };
        let is_healthy = tokio::time::timeout(health_timeout(), token).await.is_ok();
        engine.memory().is_unhealthy = !is_healthy;
        is_healthy
    });
    if check.await.is_ok_and(|is_healthy| is_healthy) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn health_timeout() -> Duration {
    let seconds = std::env::var("SGLANG_HEALTH_CHECK_TIMEOUT").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(20))
}

/// The default mode aborts running requests, and checks once a second whether they have ended.
async fn pause(State(engine): State<Arc<Engine>>) -> Json<Value> {
    engine.memory().is_paused = true;
    engine.abort();
    while engine.running() > 0 {
        #[expect(clippy::disallowed_methods, reason = "the pace of the engine that is played")]
        tokio::time::sleep(Duration::from_secs(1)).await;
        engine.abort();
    }
    Json(json!({"message": "Generation paused successfully.", "status": "ok"}))
}

async fn resume_generation(State(engine): State<Arc<Engine>>) -> Json<Value> {
    engine.memory().is_paused = false;
    Json(json!({"message": "Generation continued successfully.", "status": "ok"}))
}

/// "release_memory_occupation should be called only when server is idle": a failed assertion ends the scheduler, and so
/// does reading released weights. Without `--enable-weights-cpu-backup` the weights are lost.
async fn release(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> Response {
    let mut memory = engine.memory();
    let tags = tags(&body);
    if engine.running() > 0 || tags.iter().any(|tag| memory.released.contains(tag)) {
        drop(memory);
        crash("AssertionError: release_memory_occupation should be called only when server is idle.");
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    memory.weights_are_good &= !(engine.has("no-backup") && tags.contains("weights"));
    memory.released.extend(tags);
    Json(Value::Null).into_response()
}

/// Removing a tag that was not released from the set of released tags is a `KeyError`.
async fn resume(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> Response {
    let mut memory = engine.memory();
    if tags(&body).iter().all(|tag| memory.released.remove(tag)) {
        return Json(Value::Null).into_response();
    }
    drop(memory);
    crash("KeyError: 'kv_cache'");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

async fn update_weights(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> (StatusCode, Json<Value>) {
    let mut memory = engine.memory();
    let success = !memory.released.contains("weights") && body["model_path"].is_string();
    memory.weights_are_good |= success;
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    (status, Json(json!({"success": success, "message": "", "num_paused_requests": 0})))
}

async fn complete(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> Response {
    until_scheduled(&engine).await;
    engine.complete(&body).await
}

/// A request to a paused server waits; without memory, a starting request crashes the scheduler.
async fn until_scheduled(engine: &Engine) {
    engine.wait_until_scheduling().await;
    if engine.memory().released.is_empty() {
        return;
    }
    crash("CUDA error: an illegal memory access was encountered");
    std::future::pending::<()>().await;
}

/// Returns the tags of a request; none means all.
fn tags(body: &Value) -> BTreeSet<String> {
    let given = body["tags"].as_array().map(Vec::as_slice).unwrap_or_default();
    let given: BTreeSet<_> = given.iter().filter_map(|tag| tag.as_str().map(str::to_owned)).collect();
    if given.is_empty() { ALL_TAGS.map(str::to_owned).into() } else { given }
}
