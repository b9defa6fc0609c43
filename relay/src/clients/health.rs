//! Probes: liveness, readiness, health.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

use crate::provider::Provider;
use crate::provider::shared::ProcessPhase;
use crate::state::Relay;

/// How long a fresh replica waits for its first worker, so that it does not respond 404 for every model.
const FIRST_WORKER_PATIENCE: Duration = Duration::from_secs(15);

/// `GET /health`, as the runbook shows it: numbers, no names.
pub async fn health(State(relay): State<Arc<Relay>>) -> Json<Value> {
    let providers = relay.providers.all();
    let workers = providers.iter().map(|provider| provider.worker_count()).sum::<usize>();
    Json(json!({
        "status": "ok",
        "version": env!("CARGO_PKG_VERSION"),
        "workers": workers,
        "workers_connected": workers,
        "queue_depth": providers.iter().map(|provider| provider.queue_depth()).sum::<usize>(),
        "uptime_secs": relay.shared.started_at.elapsed().as_secs_f64(),
    }))
}

/// `GET /livez`: never depends on another program.
pub async fn livez() -> &'static str {
    "ok\n"
}

/// `GET /readyz`: 200 or 503, with the reasons.
pub async fn readyz(State(relay): State<Arc<Relay>>) -> Response {
    let mut reasons = Vec::new();
    if relay.shared.phase() > ProcessPhase::Running {
        reasons.push("draining");
    }
    let config = relay.shared.config.load();
    let providers = relay.providers.all();
    let workers: usize = providers.iter().map(|provider| provider.worker_count()).sum();
    let is_full = |provider: &Provider| provider.queue_depth() >= provider.config().max_queue_len;
    if config.unready_when_saturated && providers.iter().any(|provider| is_full(provider)) {
        reasons.push("a queue is full");
    }
    if config.expect_workers && workers == 0 {
        reasons.push("no worker is attached");
    } else if workers == 0 && !relay.shared.had_worker() && relay.shared.started_at.elapsed() < FIRST_WORKER_PATIENCE {
        reasons.push("no worker has attached yet");
    }
    let status = relay.config_watch.status();
    let ready = reasons.is_empty();
    let mut body = json!({
        "ready": ready,
        "reasons": reasons,
        "config": { "hash": status.hash, "error": status.last_error },
        "api_keys": { "error": relay.keys.error() },
        "workers_connected": workers,
    });
    if let Some(tls) = &relay.tls {
        body["tls"] = json!({ "error": tls.error().as_deref() });
    }
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(body)).into_response()
}
