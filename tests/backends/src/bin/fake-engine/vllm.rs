//! vLLM 0.32 with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`. Routes, bodies and statuses follow its source:
//! `vllm/entrypoints/serve/dev` and `vllm/v1/engine/core.py`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::Engine;

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
            .route("/reset_prefix_cache", post(async || Json(json!({"success": true}))))
    };
    router.with_state(engine)
}

/// A sleeping server returns 200 too: its API server is healthy, whatever the state of the engine.
async fn health(State(engine): State<Arc<Engine>>) -> StatusCode {
    if engine.has("never-ready") { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

/// `is_scheduler_paused() or model_executor.is_sleeping`: true from the start of `/sleep`, before it has released
/// anything.
async fn is_sleeping(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let memory = engine.memory();
    Json(json!({"is_sleeping": memory.is_paused || !memory.is_resident()}))
}

async fn metrics(State(engine): State<Arc<Engine>>) -> String {
    let labels = format!("engine=\"0\",model_name=\"{}\"", engine.model);
    let now = engine.running();
    let before = engine.counted.swap(now, Ordering::SeqCst);
    let running = if engine.has("stale-count") { before } else { now };
    let requests =
        format!("vllm:num_requests_running{{{labels}}} {running}.0\nvllm:num_requests_waiting{{{labels}}} 0.0\n");
    if engine.has("no-sleep-state") {
        return requests;
    }
    let level = engine.memory().sleep_level;
    let states = [("awake", None), ("weights_offloaded", Some(1)), ("discard_all", Some(2))];
    let gauge = |(state, of_level)| {
        let value = u8::from(level == of_level);
        format!("vllm:engine_sleep_state{{{labels},sleep_state=\"{state}\"}} {value}.0\n")
    };
    states.into_iter().map(gauge).fold(requests, |page, line| page + &line)
}

/// Reads parameters from the query, never from the body. It responds once memory is released, and only then does the
/// gauge change. A repeated call waits with the first one, and does nothing if the weights are already released.
async fn sleep(State(engine): State<Arc<Engine>>, RawQuery(query): RawQuery) -> Response {
    let level = match values(query.as_deref(), "level").last().copied().unwrap_or("1") {
        "0" => 0,
        "1" => 1,
        "2" => 2,
        _ => return invalid("query.level: Input should be less than or equal to 2"),
    };
    let mode = values(query.as_deref(), "mode").last().copied().unwrap_or("abort").to_owned();
    if !["abort", "wait", "keep"].contains(&mode.as_str()) {
        return invalid("query.mode: Input should be 'abort', 'wait' or 'keep'");
    }
    let slept = Json(json!({"status": "sleeping", "level": level}));
    if engine.has("deaf") {
        return slept.into_response();
    }
    // It continues after its client has disconnected.
    tokio::spawn(async move { fall_asleep(&engine, level, &mode).await }).await.ok();
    slept.into_response()
}

async fn fall_asleep(engine: &Engine, level: u8, mode: &str) {
    engine.memory().is_paused = true;
    if mode == "abort" {
        engine.abort();
    }
    let releases = engine.memory().releases;
    while engine.running() > 0 {
        #[expect(clippy::disallowed_methods, reason = "blocks as vLLM does, which is stopped when it takes too long")]
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut memory = engine.memory();
    // All waiting calls end at the same moment: none puts a server to sleep again that was woken since.
    if memory.releases != releases {
        return;
    }
    memory.sleep_level = Some(level);
    if level == 0 || !memory.has_weights {
        return;
    }
    memory.releases += 1;
    (memory.has_weights, memory.has_cache) = (false, false);
    // Level 2 discards the weights, which are garbage until they are read again (docs.vllm.ai, "Sleep levels").
    memory.weights_are_good &= level != 2;
}

/// Tags are in the query, repeated; none means all. Only a server that has all its memory again schedules requests, and
/// only then does the gauge change.
async fn wake_up(State(engine): State<Arc<Engine>>, RawQuery(query): RawQuery) -> Json<Value> {
    let tags: Vec<_> = values(query.as_deref(), "tags").into_iter().map(str::to_owned).collect();
    let tags = (!tags.is_empty()).then_some(tags);
    if engine.has("slow-wake") {
        tokio::spawn(wake_slowly(Arc::clone(&engine))).await.ok();
    } else {
        wake(&engine, tags.as_deref());
    }
    let status = if engine.memory().is_resident() { "awake" } else { "sleeping" };
    Json(json!({"status": status, "tags": tags}))
}

fn wake(engine: &Engine, tags: Option<&[String]>) {
    let has = |tag: &str| tags.is_none_or(|tags| tags.iter().any(|known| known == tag));
    let mut memory = engine.memory();
    memory.has_weights |= has("weights");
    memory.has_cache |= has("kv_cache");
    if memory.is_resident() {
        (memory.is_paused, memory.sleep_level) = (false, None);
    }
}

/// The server continues after its client has disconnected.
#[allow(clippy::print_stdout)]
async fn wake_slowly(engine: Arc<Engine>) {
    #[expect(clippy::disallowed_methods, reason = "the pace of the engine that is played")]
    tokio::time::sleep(Duration::from_millis(500)).await;
    wake(&engine, None);
    println!("woken");
}

async fn collective_rpc(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> Response {
    let mut memory = engine.memory();
    if body["method"] == "reload_weights" && memory.has_weights && !engine.has("no-reload") {
        memory.weights_are_good = true;
        return Json(json!({"results": [null]})).into_response();
    }
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

/// A request to a paused or sleeping server is queued until it wakes.
async fn complete(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> Response {
    engine.wait_until_scheduling().await;
    engine.complete(&body).await
}

fn values<'a>(query: Option<&'a str>, name: &str) -> Vec<&'a str> {
    let pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(key, _)| *key == name).map(|(_, value)| value).collect()
}

fn invalid(why: &str) -> Response {
    let error =
        json!({"message": format!("1 validation error:\n  {why}"), "type": "Bad Request", "param": null, "code": 400});
    (StatusCode::BAD_REQUEST, Json(json!({"error": error}))).into_response()
}
