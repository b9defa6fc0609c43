//! The logins of admins: the token of `/admin`, or the cookie of a login to the dashboard.

pub(crate) mod actor;
pub(crate) mod session;

use std::sync::Arc;
use std::time::SystemTime;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use modelrelay_protocol::headers::bearer_token;
use modelrelay_protocol::secret::Secret;

use crate::http::fallback::not_found;
use crate::http::problem::problem;
use crate::state::Relay;
use crate::telemetry::audit::Action;
use crate::telemetry::metrics::Realm;
use actor::{AuditActor, AuditDetail};
use session::LoginRefusal;

/// The message for an expired login.
const LOGIN_OVER: &str = "the login has expired; log in again";

/// Rejects requests without the token or a login.
pub(crate) async fn authenticate(State(relay): State<Arc<Relay>>, request: Request<Body>, next: Next) -> Response {
    match refusal(&relay, request.method(), request.headers()) {
        None => next.run(request).await,
        Some(message) => refuse(&relay, &request, message),
    }
}

/// Accepts client requests that a page sends, if it is logged in. Only the cookie matters here, because `Authorization`
/// has a client's key. Without a cookie the response is 404.
pub(crate) async fn authenticate_page(
    State(relay): State<Arc<Relay>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let token = relay.admin_token.current();
    let check = |token: &Secret| session::check(token, request.method(), request.headers(), SystemTime::now());
    match token.as_deref().map_or(Err(LoginRefusal::Absent), check) {
        Ok(()) => {
            // A browser also sends its credentials for a proxy in front of the relay. They are not for a backend.
            if request.headers().get(AUTHORIZATION).is_some_and(is_basic) {
                request.headers_mut().remove(AUTHORIZATION);
            }
            next.run(request).await
        }
        Err(LoginRefusal::Absent) => not_found(request).await,
        Err(why) => refuse(&relay, &request, in_words(&relay, why)),
    }
}

fn refuse(relay: &Relay, request: &Request<Body>, message: &'static str) -> Response {
    // A page that was left open overnight does not guess tokens.
    if message != LOGIN_OVER {
        relay.shared.metrics.login_failed(Realm::Admin);
        AuditActor::of(relay, request).note(relay, Action::Login, StatusCode::FORBIDDEN, AuditDetail::default());
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
            session::check(&token, method, headers, SystemTime::now()).err().map(|why| in_words(relay, why))
        }
        (presented, _) => relay.admin_token.refusal(bearer_token(presented.unwrap_or_default())),
    }
}

fn is_basic(authorization: &HeaderValue) -> bool {
    authorization.as_bytes().get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"basic "))
}

fn in_words(relay: &Relay, refusal: LoginRefusal) -> &'static str {
    match refusal {
        LoginRefusal::Absent => relay.admin_token.refusal("").unwrap_or_default(),
        LoginRefusal::Ended => LOGIN_OVER,
        LoginRefusal::Foreign => "the admin token has changed since the login; log in again",
        LoginRefusal::NotOurPage => "a change authenticated by cookie requires the header x-modelrelay-dashboard",
    }
}
