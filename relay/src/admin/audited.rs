//! The audit records of the admin routes: each change and each rejected login.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{Method, StatusCode};

use super::find;
use crate::http::problem::problem;
use crate::login::actor::{AuditActor, AuditDetail};
use crate::state::Relay;
use crate::telemetry::audit::Action;

/// Runs a change to its end, even if its client disconnects meanwhile, and records it.
pub(super) async fn changes(
    State(relay): State<Arc<Relay>>,
    params: Result<RawPathParams, RawPathParamsRejection>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let Some(action) = action(request.method(), request.uri().path()) else { return next.run(request).await };
    let actor = AuditActor::of(&relay, &request);
    let id = params.ok().and_then(|params| params.iter().find(|(name, _)| *name == "id").map(|(_, id)| id.to_owned()));
    let subject = id.filter(|id| exists(&relay, action, id));
    let run = tokio::spawn(async move {
        let answered = tokio::spawn(next.run(request)).await;
        let mut response = answered.unwrap_or_else(|_| failed());
        let detail = response.extensions_mut().remove::<AuditDetail>().unwrap_or_default();
        actor.note(&relay, action, response.status(), AuditDetail { subject: detail.subject.or(subject), ..detail });
        response
    });
    run.await.unwrap_or_else(|_| failed())
}

/// The change that a route of the admin router makes, by its path below `/admin`.
fn action(method: &Method, path: &str) -> Option<Action> {
    let segments: Vec<&str> = path.split('/').skip(1).take(4).collect();
    match (method.as_str(), &segments[..]) {
        ("POST", ["keys"]) => Some(Action::KeyCreate),
        ("PATCH", ["keys", _]) => Some(Action::KeyUpdate),
        ("DELETE", ["keys", _]) => Some(Action::KeyRevoke),
        ("POST", ["workers", _, "drain"]) => Some(Action::WorkerDrain),
        ("POST", ["workers", _, "refresh"]) => Some(Action::WorkerRefresh),
        ("POST", ["workers", _, "command"]) => Some(Action::WorkerCommand),
        ("POST", ["requests", _, "cancel"]) => Some(Action::RequestCancel),
        ("POST", ["setup", "secret"]) => Some(Action::SecretShow),
        _ => None,
    }
}

/// Checked before the change: a request that was cancelled is gone.
fn exists(relay: &Relay, action: Action, id: &str) -> bool {
    match action {
        Action::Login | Action::KeyCreate | Action::SecretShow => false,
        Action::KeyUpdate | Action::KeyRevoke => relay.keys.snapshot().lookup(id).is_some(),
        Action::WorkerDrain | Action::WorkerRefresh | Action::WorkerCommand => find(relay, id).is_some(),
        Action::RequestCancel => relay.all_providers().iter().any(|provider| provider.live_request(id).is_some()),
    }
}

fn failed() -> Response {
    problem(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "the change failed")
}
