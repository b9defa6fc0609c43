//! The admin API: connected workers, running requests, and the few actions that an administrator has.
//!
//! The token is checked before anything else of a request is read. Without a configured token, the API rejects all
//! requests.

mod audited;
mod commands;
mod keys;
mod residency;
mod token;
mod views;

use std::sync::Arc;
use std::time::SystemTime;

pub use token::AdminToken;
pub(crate) use token::read as read_token;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use http::header::{AUTHORIZATION, CACHE_CONTROL, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use modelrelay_protocol::headers::bearer_token;
use modelrelay_protocol::message::{ModelsRefresh, RelayToWorker};
use modelrelay_protocol::secret::Secret;
use serde_json::{Value, json};
use tracing::info;

pub(crate) use audited::{Asker, Told};

use crate::audit::Action;
use crate::blocking;
use crate::dashboard::{self, Refusal};
use crate::dispatch::CancelReason;
use crate::http::not_found;
use crate::metrics::{CONTENT_TYPE, Realm};
use crate::provider::Provider;
use crate::relay::Relay;
use crate::socket::link::WorkerLink;
use crate::socket::session::{ADMIN_DRAIN, DRAINED};

/// The message for an expired login.
const LOGIN_OVER: &str = "the login has expired; log in again";

/// `/admin/…` behind the token, and `/metrics`.
pub fn router(relay: Arc<Relay>) -> Router<Arc<Relay>> {
    let admin = Router::new()
        .route("/workers", get(views::workers))
        .route("/workers/{id}/drain", post(drain))
        .route("/workers/{id}/refresh", post(refresh))
        .route("/workers/{id}/command", post(commands::command))
        .route("/ops/{id}", get(commands::operation))
        .route("/stats", get(views::stats))
        .route("/state", get(views::state))
        .route("/requests", get(views::requests))
        .route("/requests/{id}/cancel", post(cancel))
        .route("/live", get(dashboard::live))
        .route("/setup", get(dashboard::overview))
        .route("/setup/secret", post(dashboard::secret))
        .route("/keys", get(keys::list).post(keys::create))
        .route("/keys/{id}", delete(keys::revoke))
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "not_found", "unknown path") })
        .method_not_allowed_fallback(|| async {
            problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "method not allowed for this path")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&relay), audited::changes))
        .layer(middleware::from_fn_with_state(relay, authenticate));
    Router::new().nest("/admin", admin.layer(middleware::map_response(unstored))).route("/metrics", get(metrics))
}

/// Keeps responses to admins out of caches, and keeps browsers from guessing their content type.
pub(crate) async fn unstored(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// An error for an admin, in the shape of the API's other errors.
pub(crate) fn problem(status: StatusCode, code: &str, message: impl Into<String>) -> Response {
    problem_in(status, code, message, None)
}

/// The same, with the name of the field at fault.
pub(crate) fn problem_in(status: StatusCode, code: &str, message: impl Into<String>, field: Option<&str>) -> Response {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let body = json!({ "error": { "message": message.into(), "type": kind, "param": field, "code": code } });
    (status, Json(body)).into_response()
}

async fn authenticate(State(relay): State<Arc<Relay>>, request: Request<Body>, next: Next) -> Response {
    match refusal(&relay, request.method(), request.headers()) {
        None => next.run(request).await,
        Some(message) => refuse(&relay, &request, message),
    }
}

/// Accepts client requests that a page sends, if it is logged in. Only the cookie matters here, because `Authorization` has
/// a client's key. Without a cookie the response is 404.
pub(crate) async fn authenticate_page(
    State(relay): State<Arc<Relay>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let token = relay.admin_token.current();
    let check = |token: &Secret| dashboard::check(token, request.method(), request.headers(), SystemTime::now());
    match token.as_deref().map_or(Err(Refusal::Absent), check) {
        Ok(()) => {
            // A browser also sends its credentials for a proxy in front of the relay. They are not for a backend.
            if request.headers().get(AUTHORIZATION).is_some_and(is_basic) {
                request.headers_mut().remove(AUTHORIZATION);
            }
            next.run(request).await
        }
        Err(Refusal::Absent) => not_found(request).await,
        Err(why) => refuse(&relay, &request, in_words(&relay, why)),
    }
}

fn refuse(relay: &Relay, request: &Request<Body>, message: &'static str) -> Response {
    // A page that was left open overnight does not guess tokens.
    if message != LOGIN_OVER {
        relay.shared.metrics.login_failed(Realm::Admin);
        Asker::of(relay, request).note(relay, Action::Login, StatusCode::FORBIDDEN, Told::default());
    }
    problem(StatusCode::FORBIDDEN, "forbidden", message)
}

/// Returns why a request is rejected: by its token or, without one, by the cookie of a login to the dashboard.
pub(crate) fn refusal(relay: &Relay, method: &Method, headers: &HeaderMap) -> Option<&'static str> {
    // A browser also sends its credentials for a proxy in front of the relay, which is no attempt at the admin token.
    let presented = headers.get(AUTHORIZATION).filter(|value| !is_basic(value));
    // As bytes: a token may contain letters outside ASCII.
    let presented = presented.map(|value| std::str::from_utf8(value.as_bytes()).unwrap_or_default());
    match (presented, relay.admin_token.current()) {
        (None, Some(token)) => {
            dashboard::check(&token, method, headers, SystemTime::now()).err().map(|why| in_words(relay, why))
        }
        (presented, _) => relay.admin_token.refusal(bearer_token(presented.unwrap_or_default())),
    }
}

fn is_basic(authorization: &HeaderValue) -> bool {
    authorization.as_bytes().get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"basic "))
}

fn in_words(relay: &Relay, refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::Absent => relay.admin_token.refusal("").unwrap_or_default(),
        Refusal::Ended => LOGIN_OVER,
        Refusal::Foreign => "the admin token has changed since the login; log in again",
        Refusal::NotOurPage => "a change authenticated by cookie requires the header x-modelrelay-dashboard",
    }
}

async fn metrics(State(relay): State<Arc<Relay>>) -> Response {
    aside(CONTENT_TYPE, move || relay.shared.metrics.render(&*relay)).await
}

/// Builds a response on another thread: with ten thousand workers it takes a tenth of a second, in which a runtime thread
/// would forward no token.
async fn aside(content_type: &'static str, build: impl FnOnce() -> String + Send + 'static) -> Response {
    match blocking::run(build).await {
        Ok(text) => ([(http::header::CONTENT_TYPE, content_type)], text).into_response(),
        Err(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "cannot build the response"),
    }
}

async fn drain(State(relay): State<Arc<Relay>>, Path(id): Path<String>) -> Response {
    let Some((provider, link)) = find(&relay, &id) else { return no_worker() };
    info!(worker = %link.info.name, worker_id = %link.info.id, "worker drained by an admin");
    // A `core1` worker responds with its own drain and closes when it is idle. The relay closes the link of an older one.
    let close = (!link.info.core1).then_some(DRAINED);
    provider.drain_worker(&link, ADMIN_DRAIN, close);
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
