//! vLLM ≥ 0.17 with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`: docs.vllm.ai, "Sleep Mode".

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::{Engine, crash};

type Asked = Query<HashMap<String, String>>;

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let router = Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(async |State(engine): State<Arc<Engine>>| engine.models()))
        .route("/v1/completions", post(complete));
    // The endpoints exist only in developer mode (docs.vllm.ai, "Sleep Mode", "Server Mode").
    let router = if engine.has("no-dev-mode") {
        router
    } else {
        router
            .route("/sleep", post(sleep))
            .route("/wake_up", post(wake_up))
            .route("/is_sleeping", get(is_sleeping))
            .route("/collective_rpc", post(collective_rpc))
            .route("/reset_prefix_cache", post(async || StatusCode::OK))
    };
    router.with_state(engine)
}

/// 200 in its sleep too: the API server is well, whatever the engine does (vllm#14311 asked for `/is_sleeping` because
/// nothing else told).
async fn health(State(engine): State<Arc<Engine>>) -> StatusCode {
    if engine.has("never-ready") { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

async fn is_sleeping(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let memory = engine.memory();
    Json(json!({"is_sleeping": !(memory.has_weights && memory.has_cache)}))
}

async fn metrics(State(engine): State<Arc<Engine>>) -> String {
    let labels = format!("{{engine=\"0\",model_name=\"{}\"}}", engine.model);
    format!("vllm:num_requests_running{labels} {}.0\nvllm:num_requests_waiting{labels} 0.0\n", engine.running())
}

/// Level and mode are read from the query, never from the body, and the default mode is `abort`
/// (`vllm/entrypoints/serve/sleep/api_router.py`).
async fn sleep(State(engine): State<Arc<Engine>>, Query(asked): Asked) -> StatusCode {
    let level = asked.get("level").map_or("1", String::as_str);
    let mode = asked.get("mode").map_or("abort", String::as_str);
    if engine.has("deaf") {
        return StatusCode::OK;
    }
    if mode == "wait" {
        engine.wait_until_idle().await;
    } else if engine.running() > 0 {
        // vllm#45520: with requests in mid-decode the engine dies of an illegal access, and the call answers 200 all the
        // same.
        crash("CUDA error: an illegal memory access was encountered");
        return StatusCode::OK;
    }
    let mut memory = engine.memory();
    (memory.has_weights, memory.has_cache) = (false, false);
    // Level 2 discards the weights, which are garbage until they are read again (docs.vllm.ai, "Sleep levels").
    memory.weights_are_good &= level != "2";
    StatusCode::OK
}

/// Tags are in the query, repeated (docs.vllm.ai, "Sleep Mode"); none means all.
async fn wake_up(State(engine): State<Arc<Engine>>, Query(asked): Asked) -> StatusCode {
    let tag = asked.get("tags").map(String::as_str);
    if engine.has("slow-wake") {
        tokio::spawn(wake_slowly(Arc::clone(&engine))).await.ok();
        return StatusCode::OK;
    }
    let mut memory = engine.memory();
    memory.has_weights |= tag.is_none_or(|tag| tag == "weights");
    memory.has_cache |= tag.is_none_or(|tag| tag == "kv_cache");
    StatusCode::OK
}

/// A server goes on when its client is gone.
#[allow(clippy::print_stdout)]
async fn wake_slowly(engine: Arc<Engine>) {
    #[expect(clippy::disallowed_methods, reason = "the pace of the engine that is played")]
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut memory = engine.memory();
    (memory.has_weights, memory.has_cache) = (true, true);
    println!("woken");
}

async fn collective_rpc(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> StatusCode {
    let mut memory = engine.memory();
    if body["method"] == "reload_weights" && memory.has_weights {
        memory.weights_are_good = true;
        return StatusCode::OK;
    }
    StatusCode::BAD_REQUEST
}

/// vllm#15483: a request to a sleeping engine is the end of it (newer versions let it hang, vllm#45326).
async fn complete(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> (StatusCode, Json<Value>) {
    let is_asleep = {
        let memory = engine.memory();
        !(memory.has_weights && memory.has_cache)
    };
    if is_asleep {
        crash("CUDA error: an illegal memory access was encountered");
        std::future::pending::<()>().await;
    }
    engine.complete(&body).await
}
