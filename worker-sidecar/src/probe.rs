//! The probe server: `/livez`, `/readyz`, `/backendz`, `/healthz`, `/metrics` and `/drain`, for kubelet and for
//! operators.

mod permission;
mod server;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use modelrelay_platform::sockets;
use serde_json::json;
use tokio::net::TcpListener;

use crate::settings::{ProbeAddr, SettingError};
use crate::shutdown::{Cause, DrainState};
use crate::worker::Worker;

/// Opens the listener. If the default address is in use, a free port is used instead; a configured one must be free.
pub async fn bind(probe: ProbeAddr) -> Result<TcpListener, SettingError> {
    match sockets::listen(probe.addr, sockets::BACKLOG) {
        Ok(listener) => Ok(listener),
        Err(error) if probe.explicit => Err(refused(probe.addr, &error)),
        Err(error) => {
            let free = SocketAddr::new(probe.addr.ip(), 0);
            tracing::info!(address = %probe.addr, %error, "the default probe address is in use; using a free port");
            sockets::listen(free, sockets::BACKLOG).map_err(|error| refused(free, &error))
        }
    }
}

fn refused(addr: SocketAddr, error: &std::io::Error) -> SettingError {
    SettingError::new("PROBE_ADDR", addr.to_string(), format!("an address that is free on this machine ({error})"))
}

/// Serves until the process ends.
pub async fn serve(listener: TcpListener, worker: Arc<Worker>) {
    if let Ok(addr) = listener.local_addr() {
        tracing::info!("probe server listening on http://{addr}");
    }
    let app = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/backendz", get(backendz))
        .route("/healthz", get(healthz))
        .route("/metrics", get(metrics))
        .route("/drain", get(drain).post(drain))
        .with_state(worker);
    server::serve(listener, app).await;
}

/// Ready means configured. The state of relay and backend does not matter: restarting this Pod would fix neither. A
/// slot whose memory cannot be freed is an exception: an operator has to intervene.
async fn readyz(State(worker): State<Arc<Worker>>) -> (StatusCode, Json<serde_json::Value>) {
    let ready = worker.serving.is_ready();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "ready": ready, "config_error": worker.config_error() })))
}

/// For rollouts, which must not continue with the next Pod before this one's backend has loaded its model. Once it
/// could serve, an outage changes nothing here: relays are notified at once, and a Pod that becomes unready again would
/// only block a rollout.
async fn backendz(State(worker): State<Arc<Worker>>) -> (StatusCode, String) {
    match worker.serving.never_served() {
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        None => (StatusCode::OK, "ok\n".to_owned()),
    }
}

async fn healthz(State(worker): State<Arc<Worker>>) -> Json<serde_json::Value> {
    let links: Vec<_> = worker
        .links
        .all()
        .iter()
        .map(|link| {
            json!({
                "relay": &*link.relay,
                "core1": link.core1,
                "unanswered": link.unanswered(),
                "waiting": worker.serving.waiting(link),
            })
        })
        .collect();
    let drain = match worker.drain.state() {
        DrainState::Serving => None,
        DrainState::Draining(order) => Some(json!({
            "cause": order.cause.as_str(),
            "remaining_ms": order.deadline.saturating_duration_since(Instant::now()).as_millis() as u64,
        })),
    };
    let advertised = worker.serving.advertised();
    let mut health = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "name": worker.settings.name,
        "provider": worker.live.load().provider,
        "models": advertised.models,
        "failing_models": advertised.failing,
        "running": worker.serving.running(),
        "max_concurrency": worker.serving.max_concurrency(),
        "links": links,
        "drain": drain,
        "config_error": worker.config_error(),
        "secret_error": worker.secret_error(),
        "uptime_secs": worker.started.elapsed().as_secs(),
    });
    worker.serving.add_health(&mut health).await;
    Json(health)
}

async fn metrics(State(worker): State<Arc<Worker>>) -> Response {
    worker.observe().await;
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], worker.metrics.render()).into_response()
}

/// Drains, and responds when no request is running any more or the timeout has passed. A preStop hook waits here.
async fn drain(State(worker): State<Arc<Worker>>, method: Method, headers: HeaderMap) -> Response {
    if let Some(why) = permission::refusal(worker.settings.drain_token.as_ref(), &method, &headers) {
        return (StatusCode::FORBIDDEN, why).into_response();
    }
    let timeout = worker.settings.shutdown_timeout;
    let order = worker.begin_drain(Cause::Probe, timeout);
    // A repeated request during a drain, or after its deadline, gets a full timeout of its own.
    let deadline = order.deadline.max(Instant::now() + timeout);
    let mut unlinked = worker.unlinked.subscribe();
    let idle = unlinked.wait_for(|unlinked| *unlinked);
    let drained = tokio::time::timeout_at(deadline.into(), idle).await.is_ok();
    let running = worker.links.unanswered();
    if !drained {
        tracing::warn!(running, "drain timeout reached");
    }
    let status = if drained { StatusCode::OK } else { StatusCode::GATEWAY_TIMEOUT };
    (status, Json(json!({ "drained": drained, "running": running }))).into_response()
}
