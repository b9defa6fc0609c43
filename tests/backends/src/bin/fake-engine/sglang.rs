//! SGLang with `--enable-memory-saver`: docs.sglang.ai, "SGLang for RL systems".

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::Value;

use crate::{Engine, crash};

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(async |State(engine): State<Arc<Engine>>| engine.models()))
        .route("/v1/completions", post(complete))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume_generation))
        .route("/release_memory_occupation", post(release))
        .route("/resume_memory_occupation", post(resume))
        .route("/update_weights_from_disk", post(update_weights))
        .with_state(engine)
}

async fn health(State(engine): State<Arc<Engine>>) -> StatusCode {
    if engine.has("never-ready") { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

/// The default mode aborts what runs (docs, "Pause generation").
async fn pause(State(engine): State<Arc<Engine>>) -> StatusCode {
    engine.memory().is_paused = true;
    engine.wait_until_idle().await;
    StatusCode::OK
}

async fn resume_generation(State(engine): State<Arc<Engine>>) -> StatusCode {
    engine.memory().is_paused = false;
    StatusCode::OK
}

/// "This call asserts there are no ongoing requests" (docs, "Release memory"): a failed assertion ends the scheduler.
/// Without `--enable-weights-cpu-backup` the weights are lost ("Server flag").
async fn release(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> StatusCode {
    let mut memory = engine.memory();
    if engine.running() > 0 || !memory.has_weights || !names_both(&body) {
        drop(memory);
        crash("AssertionError: release_memory_occupation should be called only when server is idle");
        return StatusCode::INTERNAL_SERVER_ERROR;
    }
    (memory.has_weights, memory.has_cache) = (false, false);
    memory.weights_are_good &= !engine.has("no-backup");
    StatusCode::OK
}

/// What was not released is not in the set of released tags, and taking it from there is a `KeyError`.
async fn resume(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> StatusCode {
    let mut memory = engine.memory();
    if memory.has_weights || !names_both(&body) {
        drop(memory);
        crash("KeyError: 'kv_cache'");
        return StatusCode::INTERNAL_SERVER_ERROR;
    }
    (memory.has_weights, memory.has_cache) = (true, true);
    StatusCode::OK
}

async fn update_weights(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> StatusCode {
    let mut memory = engine.memory();
    if !memory.has_weights || !body["model_path"].is_string() {
        return StatusCode::BAD_REQUEST;
    }
    memory.weights_are_good = true;
    StatusCode::OK
}

/// Generation that is paused does not begin, and without memory it is the end of the scheduler.
async fn complete(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> Response {
    let (has_memory, is_paused) = {
        let memory = engine.memory();
        (memory.has_weights, memory.is_paused)
    };
    if !has_memory {
        crash("CUDA error: an illegal memory access was encountered");
    }
    if !has_memory || is_paused {
        std::future::pending::<()>().await;
    }
    engine.complete(&body).await
}

fn names_both(body: &Value) -> bool {
    let tags = body["tags"].as_array().map(Vec::as_slice).unwrap_or_default();
    tags.iter().any(|tag| tag == "weights") && tags.iter().any(|tag| tag == "kv_cache")
}
