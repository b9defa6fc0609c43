//! The pages for a browser: the state of the fleet, adding a machine, and connecting a program.
//!
//! The pages contain no data and need no login. All data comes from `/admin`, authenticated by a login cookie in place
//! of the token.

mod frame;
mod history;
mod live;
mod pages;
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
use modelrelay_protocol::secret::Secret;
use serde::Deserialize;
use serde_json::json;

pub(crate) use history::record;

use crate::http::body::read_small;
use crate::http::fallback::not_found;
use crate::http::problem::{problem, unstored};
use crate::login::actor::{AuditActor, AuditDetail};
use crate::login::{refusal, session};
use crate::net::lockout::Lockout;
use crate::state::Relay;
use crate::system::unix_time::unix_millis;
use crate::telemetry::audit::Action;
use crate::telemetry::journal::Journal;
use crate::telemetry::metrics::Realm;

/// The largest body of a login; a token is one line.
const MAX_BODY_BYTES: usize = 64 << 10;

/// The pages' own data, and the relay that they show.
pub struct Dashboard {
    relay: Arc<Relay>,
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
    pub fn new(relay: Arc<Relay>, journal: Journal, addresses: Addresses) -> Arc<Self> {
        let (history, live, logins) = (history::History::default(), live::Live::default(), Lockout::default());
        Arc::new(Self { relay, history, journal, addresses, live, logins })
    }
}

/// The routes of the pages' data below `/admin`, behind the token.
pub fn admin_routes(dashboard: &Arc<Dashboard>) -> Router<Arc<Relay>> {
    Router::new()
        .route("/live", get(live))
        .route("/setup", get(setup::overview))
        .route("/setup/secret", post(setup::secret))
        .with_state(Arc::clone(dashboard))
}

/// The pages, login and logout.
pub fn router(dashboard: &Arc<Dashboard>) -> Router<Arc<Relay>> {
    Router::new()
        .route("/", get(begin))
        .route("/dashboard/session", get(login_status))
        .route("/dashboard/login", post(login))
        .route("/dashboard/logout", post(logout))
        .layer(middleware::map_response(unstored))
        .merge(pages::router())
        .with_state(Arc::clone(dashboard))
}

/// `GET /admin/live`
async fn live(State(dashboard): State<Arc<Dashboard>>, request: Request) -> Response {
    let (relay, head) = (Arc::clone(&dashboard.relay), request.into_parts().0);
    live::stream(dashboard, move || refusal(&relay, &head.method, &head.headers).is_none()).await
}

/// Redirects a browser that opens the relay's address to the dashboard. Programs get 404.
async fn begin(State(dashboard): State<Arc<Dashboard>>, request: Request) -> Response {
    let relay = &dashboard.relay;
    let accepts = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match accepts.contains("text/html") {
        true => Redirect::to(&format!("{}/dashboard", relay.shared.config.load().base_path())).into_response(),
        false => not_found(request).await,
    }
}

/// Reports only on the cookie: checking a token here would bypass the lockout.
async fn login_status(State(dashboard): State<Arc<Dashboard>>, headers: HeaderMap) -> Response {
    let relay = &dashboard.relay;
    let token = relay.admin_token.current();
    let is_good = |token: &Secret| session::check(token, &Method::GET, &headers, SystemTime::now()).is_ok();
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

async fn login(State(dashboard): State<Arc<Dashboard>>, request: Request) -> Response {
    let relay = &dashboard.relay;
    #[derive(Deserialize)]
    struct LoginBody {
        token: String,
    }
    // Without this check, any page that an admin opens could send wrong tokens from the admin's address until it is
    // locked.
    if !request.headers().contains_key(session::CHANGE_HEADER) {
        return not_our_page();
    }
    let actor = AuditActor::of(relay, &request);
    let is_encrypted = is_encrypted(relay, request.headers());
    let body = read_small(request.into_body(), MAX_BODY_BYTES).await;
    let Some(LoginBody { token }) = body.and_then(|body| serde_json::from_slice(&body).ok()) else {
        return problem(StatusCode::BAD_REQUEST, "invalid_json", "the body must be {\"token\": \"ADMIN TOKEN\"}");
    };
    let response = match try_token(&dashboard, actor.address(), &token) {
        Ok(token) => {
            let cookie = session::set_cookie(&session::issue(&token, SystemTime::now()), is_encrypted);
            ([(SET_COOKIE, cookie)], StatusCode::NO_CONTENT).into_response()
        }
        Err(refused) => {
            relay.shared.metrics.login_failed(Realm::Admin);
            *refused
        }
    };
    actor.note(relay, Action::Login, response.status(), AuditDetail::default());
    response
}

/// Unlike a worker's secret, a valid token from a locked address is rejected: tokens may be chosen by hand and can be
/// guessed.
fn try_token(dashboard: &Dashboard, address: IpAddr, presented: &str) -> Result<Arc<Secret>, Box<Response>> {
    let Dashboard { relay, logins, .. } = dashboard;
    let now = Instant::now();
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

async fn logout(State(dashboard): State<Arc<Dashboard>>, headers: HeaderMap) -> Response {
    if !headers.contains_key(session::CHANGE_HEADER) {
        return not_our_page();
    }
    let cookies = session::clear_cookies(is_encrypted(&dashboard.relay, &headers));
    (AppendHeaders(cookies.into_iter().map(|cookie| (SET_COOKIE, cookie))), StatusCode::NO_CONTENT).into_response()
}

fn not_our_page() -> Response {
    let message = "this route is for the relay's own pages, which send the header x-modelrelay-dashboard";
    problem(StatusCode::FORBIDDEN, "forbidden", message)
}

/// True if the browser's connection is encrypted, to the relay or to the proxy in front of it, as reported by the
/// proxy. A client that forges the header harms only itself.
fn is_encrypted(relay: &Relay, headers: &HeaderMap) -> bool {
    relay.tls.is_some() || headers.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes() == b"https")
}

/// Rounds to the second: a time that is computed from an age differs slightly each time.
fn unix_millis_rounded(at: SystemTime) -> u64 {
    (unix_millis(at) + 500) / 1000 * 1000
}
