//! The pages for a browser: the state of the fleet, adding a machine, and connecting a program.
//!
//! The pages contain no data and need no login. All data comes from `/admin`, authenticated by a login cookie in place of the
//! token.

mod frame;
mod history;
pub mod journal;
mod live;
mod pages;
mod session;
mod setup;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::extract::{Request, State};
use axum::middleware;
use axum::response::{AppendHeaders, IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::header::{ACCEPT, RETRY_AFTER, SET_COOKIE};
use http::{HeaderMap, Method, StatusCode};
use http_body_util::{BodyExt, Limited};
use modelrelay_protocol::secret::Secret;
use serde::Deserialize;
use serde_json::json;

pub(crate) use history::record;
pub use journal::Journal;
pub(crate) use session::{Refusal, check};
pub(crate) use setup::{overview, secret};

use crate::admin::{Asker, Told, authenticate_page, problem, unstored};
use crate::audit::Action;
use crate::http::{inference, models, not_found};
use crate::lockout::Lockout;
use crate::metrics::Realm;
use crate::relay::Relay;
use crate::unix_time::unix_millis;

/// The largest body of a login; a token is one line.
const MAX_BODY_BYTES: usize = 64 << 10;

/// The data of the pages other than the relay's state.
#[derive(Default)]
pub struct Dashboard {
    history: history::History,
    journal: Journal,
    addresses: Addresses,
    live: live::Live,
    /// Failed logins with the admin token.
    logins: Lockout,
}

/// The addresses of the relay's listeners.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addresses {
    /// The listener for clients.
    pub clients: Option<SocketAddr>,
    /// The listener for workers: their own, if there is one.
    pub workers: Option<SocketAddr>,
}

impl Dashboard {
    /// Creates the data with the journal that the log writes to and the relay's addresses.
    pub fn new(journal: Journal, addresses: Addresses) -> Self {
        Self { journal, addresses, ..Self::default() }
    }
}

/// The pages, login and logout.
pub fn router() -> Router<Arc<Relay>> {
    Router::new()
        .route("/", get(begin))
        .route("/dashboard/session", get(session))
        .route("/dashboard/login", post(login))
        .route("/dashboard/logout", post(logout))
        .layer(middleware::map_response(unstored))
        .merge(pages::router())
}

/// The routes for the pages' test boxes if clients have a separate listener. They require a client's credentials and also a
/// login, because this listener is for admins.
pub fn test_boxes(relay: &Arc<Relay>) -> Router<Arc<Relay>> {
    Router::new()
        .route("/v1/chat/completions", post(inference::by_model).fallback(not_found))
        .route("/v1/models", get(models::list).fallback(not_found))
        .layer(middleware::from_fn_with_state(Arc::clone(relay), authenticate_page))
}

/// `GET /admin/live`
pub(crate) async fn live(State(relay): State<Arc<Relay>>, request: Request) -> Response {
    let (asked, asking) = (Arc::clone(&relay), request.into_parts().0);
    live::stream(relay, move || crate::admin::refusal(&asked, &asking.method, &asking.headers).is_none()).await
}

/// Redirects a browser that opens the relay's address to the dashboard. Programs get 404.
async fn begin(State(relay): State<Arc<Relay>>, request: Request) -> Response {
    let accepts = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match accepts.contains("text/html") {
        true => Redirect::to(&format!("{}/dashboard", relay.shared.config.load().base_path())).into_response(),
        false => not_found(request).await,
    }
}

/// Reports only on the cookie: checking a token here would bypass the lockout.
async fn session(State(relay): State<Arc<Relay>>, headers: HeaderMap) -> Response {
    let token = relay.admin_token.current();
    let is_good = |token: &Secret| check(token, &Method::GET, &headers, SystemTime::now()).is_ok();
    let config = relay.shared.config.load();
    Json(json!({
        "logged_in": token.as_deref().is_some_and(is_good),
        "admin_enabled": token.is_some(),
        "require_api_keys": config.require_api_keys,
        "clients_elsewhere": config.admin_listen_addr.is_some(),
        "version": env!("CARGO_PKG_VERSION"),
    }))
    .into_response()
}

async fn login(State(relay): State<Arc<Relay>>, request: Request) -> Response {
    #[derive(Deserialize)]
    struct Asked {
        token: String,
    }
    // Without this check, any page that an admin opens could send wrong tokens from the admin's address until it is locked.
    if !request.headers().contains_key(session::CHANGE_HEADER) {
        return not_our_page();
    }
    let asker = Asker::of(&relay, &request);
    let is_encrypted = is_encrypted(&relay, request.headers());
    let body =
        Limited::new(request.into_body(), MAX_BODY_BYTES).collect().await.map(http_body_util::Collected::to_bytes);
    let Some(Asked { token }) = body.ok().and_then(|body| serde_json::from_slice(&body).ok()) else {
        return problem(StatusCode::BAD_REQUEST, "invalid_json", "the body must be {\"token\": \"ADMIN TOKEN\"}");
    };
    let response = match try_token(&relay, asker.address(), &token) {
        Ok(token) => {
            let cookie = session::set_cookie(&session::issue(&token, SystemTime::now()), is_encrypted);
            ([(SET_COOKIE, cookie)], StatusCode::NO_CONTENT).into_response()
        }
        Err(refused) => {
            relay.shared.metrics.login_failed(Realm::Admin);
            *refused
        }
    };
    asker.note(&relay, Action::Login, response.status(), Told::default());
    response
}

/// Unlike a worker's secret, a valid token from a locked address is rejected: tokens may be chosen by hand and can be guessed.
fn try_token(relay: &Relay, address: IpAddr, presented: &str) -> Result<Arc<Secret>, Box<Response>> {
    let (logins, now) = (&relay.dashboard.logins, Instant::now());
    if let Some(seconds) = logins.locked_for(address, now) {
        let message = format!("too many wrong tokens from this address; try again in {seconds} s");
        let refused = problem(StatusCode::TOO_MANY_REQUESTS, "too_many_logins", message);
        return Err(Box::new(([(RETRY_AFTER, seconds.to_string())], refused).into_response()));
    }
    let refusal = relay.admin_token.refusal(presented);
    match relay.admin_token.current() {
        Some(token) if refusal.is_none() => Ok(token),
        token => {
            if token.is_some() {
                logins.judge(address, false, now);
            }
            let message = refusal.unwrap_or("the admin token is missing or wrong");
            Err(Box::new(problem(StatusCode::FORBIDDEN, "forbidden", message)))
        }
    }
}

async fn logout(State(relay): State<Arc<Relay>>, headers: HeaderMap) -> Response {
    if !headers.contains_key(session::CHANGE_HEADER) {
        return not_our_page();
    }
    let cookies = session::clear_cookies(is_encrypted(&relay, &headers));
    (AppendHeaders(cookies.into_iter().map(|cookie| (SET_COOKIE, cookie))), StatusCode::NO_CONTENT).into_response()
}

fn not_our_page() -> Response {
    let message = "this route is for the relay's own pages, which send the header x-modelrelay-dashboard";
    problem(StatusCode::FORBIDDEN, "forbidden", message)
}

/// True if the browser's connection is encrypted, to the relay or to the proxy in front of it, as reported by the proxy. A client
/// that forges the header harms only itself.
fn is_encrypted(relay: &Relay, headers: &HeaderMap) -> bool {
    relay.tls.is_some() || headers.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes() == b"https")
}

/// Rounds to the second: a time that is computed from an age differs slightly each time.
fn unix_millis_rounded(at: SystemTime) -> u64 {
    (unix_millis(at) + 500) / 1000 * 1000
}
