//! The admin API: connected workers, running requests, and the few actions that an administrator has.
//!
//! The token is checked before anything else of a request is read. Without a configured token, the API rejects all
//! requests.

mod audited;
mod commands;
mod keys;
mod residency;
mod usage;
mod views;

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch, post};
use axum::{Json, Router};
use http::StatusCode;
use modelrelay_protocol::message::{GracefulShutdown, ModelsRefresh, RelayToWorker};
use serde_json::{Value, json};
use tracing::info;

use crate::dispatch::CancelReason;
use crate::http::problem::{problem, unstored};
use crate::login::authenticate;
use crate::provider::Provider;
use crate::provider::worker::close::DRAINED;
use crate::provider::worker::link::WorkerLink;
use crate::state::Relay;
use crate::system::blocking;
use crate::telemetry::metrics::CONTENT_TYPE;

/// `/admin/…` behind the token, with `more` routes below it, and `/metrics`.
pub fn router(relay: Arc<Relay>, more: Router<Arc<Relay>>) -> Router<Arc<Relay>> {
    let admin = Router::new()
        .route("/workers", get(views::workers))
        .route("/workers/{id}/drain", post(drain))
        .route("/workers/{id}/refresh", post(refresh))
        .route("/workers/{id}/command", post(commands::command))
        .route("/ops/{id}", get(commands::operation))
        .route("/stats", get(views::stats))
        .route("/state", get(views::state))
        .route("/requests", get(views::requests))
        .route("/usage", get(usage::usage))
        .route("/requests/{id}/cancel", post(cancel))
        .merge(more)
        .route("/keys", get(keys::list).post(keys::create))
        .route("/keys/{id}", patch(keys::update).delete(keys::revoke))
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "not_found", "unknown path") })
        .method_not_allowed_fallback(|| async {
            problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "method not allowed for this path")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&relay), audited::changes))
        .layer(middleware::from_fn_with_state(relay, authenticate));
    Router::new().nest("/admin", admin.layer(middleware::map_response(unstored))).route("/metrics", get(metrics))
}

async fn metrics(State(relay): State<Arc<Relay>>) -> Response {
    aside(CONTENT_TYPE, move || relay.shared.metrics.render(&*relay)).await
}

/// Builds a response on another thread: with ten thousand workers it takes a tenth of a second, in which a runtime
/// thread would forward no token.
async fn aside(content_type: &'static str, build: impl FnOnce() -> String + Send + 'static) -> Response {
    match blocking::run(build).await {
        Ok(text) => ([(http::header::CONTENT_TYPE, content_type)], text).into_response(),
        Err(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "cannot build the response"),
    }
}

async fn drain(State(relay): State<Arc<Relay>>, Path(id): Path<String>) -> Response {
    let Some((provider, link)) = find(&relay, &id) else { return no_worker() };
    info!(worker = %link.info.name, worker_id = %link.info.id, "worker drained by an admin");
    // A `core1` worker responds with its own drain and closes when it is idle. The relay closes the link of an older
    // one.
    let close = (!link.info.core1).then_some(DRAINED);
    provider.drain_worker(&link, GracefulShutdown::WORKER_DRAIN, close);
    let note = match link.info.core1 {
        true => "the worker finishes its requests, disconnects and stays disconnected until it is restarted",
        false => "the worker finishes its requests and disconnects; its older version reconnects after 2 s",
    };
    accepted(json!({ "worker_id": &*link.info.id, "draining": true, "stays_away": link.info.core1, "note": note }))
}

async fn refresh(State(relay): State<Arc<Relay>>, Path(id): Path<String>) -> Response {
    let Some((_, link)) = find(&relay, &id) else { return no_worker() };
    link.push(&RelayToWorker::ModelsRefresh(ModelsRefresh { reason: Some("admin".to_owned()) }));
    accepted(json!({ "worker_id": &*link.info.id }))
}

async fn cancel(State(relay): State<Arc<Relay>>, Path(id): Path<String>) -> Response {
    for provider in relay.all_providers() {
        if let Some(key) = provider.live_request(&id) {
            info!(request_id = id, "request cancelled by an admin");
            provider.cancel(key, CancelReason::Admin);
            return accepted(json!({ "request_id": id, "cancelled": true }));
        }
    }
    problem(StatusCode::NOT_FOUND, "request_not_found", "no live request has this id")
}

fn find(relay: &Relay, id: &str) -> Option<(Arc<Provider>, Arc<WorkerLink>)> {
    relay.all_providers().into_iter().find_map(|provider| {
        let link = provider.link(id)?;
        Some((provider, link))
    })
}

fn no_worker() -> Response {
    problem(StatusCode::NOT_FOUND, "worker_not_found", "no connected worker has this id")
}

fn accepted(body: Value) -> Response {
    (StatusCode::ACCEPTED, Json(body)).into_response()
}
