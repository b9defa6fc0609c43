//! The audit records of the admin routes: each change and each rejected login.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{Method, StatusCode};

use super::{find, problem};
use crate::audit::{self, Action, Event, Outcome};
use crate::http::peer::Peer;
use crate::http::respond::Client;
use crate::lockout::client_address;
use crate::relay::Relay;

/// Details of a change that are not in the request's path. A route puts them into the extensions of its response.
#[derive(Debug, Clone, Default)]
pub(crate) struct Told {
    /// The id of the created object.
    pub(crate) subject: Option<String>,
    /// The order.
    pub(crate) detail: Option<String>,
}

/// The origin of an event.
pub(crate) struct Asker {
    client: IpAddr,
    request_id: String,
}

impl Asker {
    pub(crate) fn of(relay: &Relay, request: &Request<Body>) -> Self {
        let peer = request.extensions().get::<Peer>().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.0.ip());
        let client = client_address(peer, request.headers(), &relay.shared.config.load().trusted_proxies);
        Self { client, request_id: Client::of(request).request_id }
    }

    /// The client's address.
    pub(crate) fn address(&self) -> IpAddr {
        self.client
    }

    /// Records the action and the status of its response.
    pub(crate) fn note(self, relay: &Relay, action: Action, status: StatusCode, told: Told) {
        let Self { client, request_id } = self;
        let (status, Told { subject, detail }) = (status.as_u16(), told);
        let outcome = Outcome::of(status);
        relay.audit.record(&Event { time: audit::now(), action, outcome, status, subject, detail, client, request_id });
    }
}

/// Runs a change to its end, even if its client disconnects meanwhile, and records it.
pub(super) async fn changes(
    State(relay): State<Arc<Relay>>,
    params: Result<RawPathParams, RawPathParamsRejection>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let Some(action) = action(request.method(), request.uri().path()) else { return next.run(request).await };
    let asker = Asker::of(&relay, &request);
    let id = params.ok().and_then(|params| params.iter().find(|(name, _)| *name == "id").map(|(_, id)| id.to_owned()));
    let subject = id.filter(|id| exists(&relay, action, id));
    let run = tokio::spawn(async move {
        let answered = tokio::spawn(next.run(request)).await;
        let mut response = answered.unwrap_or_else(|_| failed());
        let told = response.extensions_mut().remove::<Told>().unwrap_or_default();
        asker.note(&relay, action, response.status(), Told { subject: told.subject.or(subject), ..told });
        response
    });
    run.await.unwrap_or_else(|_| failed())
}

/// The change that a route of the admin router makes, by its path below `/admin`.
fn action(method: &Method, path: &str) -> Option<Action> {
    let segments: Vec<&str> = path.split('/').skip(1).take(4).collect();
    match (method.as_str(), &segments[..]) {
        ("POST", ["keys"]) => Some(Action::KeyCreate),
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
        Action::KeyRevoke => relay.keys.snapshot().lookup(id).is_some(),
        Action::WorkerDrain | Action::WorkerRefresh | Action::WorkerCommand => find(relay, id).is_some(),
        Action::RequestCancel => relay.all_providers().iter().any(|provider| provider.live_request(id).is_some()),
    }
}

fn failed() -> Response {
    problem(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "the change failed")
}
