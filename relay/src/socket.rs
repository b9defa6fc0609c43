//! The door for workers: who may come in, and the upgrade.
//!
//! Checked in this order, so that a stranger learns nothing: a proper WebSocket handshake (400, 426), the lockout (429),
//! the secret (401, compared for an unknown provider too), the provider (404, 403).

pub mod failures;
pub mod io;
pub mod link;
mod read_ahead;
pub mod register;
pub mod session;
pub mod slots;
pub mod upgrade;
mod worker_info;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderValue, Request, StatusCode};
use hyper::upgrade::{OnUpgrade, Upgraded};
use tracing::{debug, warn};

use crate::http::peer::Peer;
use crate::lockout::{Verdict, client_address};
use crate::metrics::{ConnectionResult, Realm};
use crate::provider::Provider;
use crate::relay::Relay;
use crate::shared::Phase;
use io::Pulse;

/// What a worker showed at the door.
#[derive(Clone, Copy)]
pub struct Admission {
    /// Where it dialled from.
    pub address: IpAddr,
    /// SHA-256 of the secret that admitted it.
    pub secret: [u8; 32],
    /// When it came.
    pub at: Instant,
}

/// `GET /v1/worker/connect`
pub async fn connect(State(relay): State<Arc<Relay>>, mut request: Request<Body>) -> Response {
    let accept = match upgrade::accept(request.headers()) {
        Ok(accept) => accept,
        Err(refusal) => return *refusal,
    };
    if relay.shared.phase() >= Phase::Leaving {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "the relay is shutting down");
    }
    let (provider, admission) = match admit(&relay, &request) {
        Ok(admitted) => admitted,
        Err(refusal) => return *refusal,
    };
    let Some(upgrade) = request.extensions_mut().remove::<OnUpgrade>() else {
        return refuse(StatusCode::BAD_REQUEST, "this connection cannot be upgraded");
    };
    tokio::spawn(async move {
        match upgrade.await {
            Ok(upgraded) => serve(upgraded, provider, admission).await,
            Err(error) => debug!(%error, "worker upgrade failed"),
        }
    });
    upgrade::switching(accept)
}

async fn serve(upgraded: Upgraded, provider: Arc<Provider>, admission: Admission) {
    let pulse = Pulse::new();
    let Some((socket, _place)) = upgrade::open(upgraded, &pulse).await else {
        warn!("a worker's connection is of an unexpected kind");
        return;
    };
    session::serve(socket, pulse, provider, admission).await;
}

fn admit(relay: &Relay, request: &Request<Body>) -> Result<(Arc<Provider>, Admission), Box<Response>> {
    let config = relay.shared.config.load();
    let peer = request.extensions().get::<Peer>().map_or(SocketAddr::from(([0, 0, 0, 0], 0)), |peer| peer.0);
    let address = client_address(peer.ip(), request.headers(), &config.trusted_proxies);
    let query = Query::parse(request.uri().query().unwrap_or(""));
    let name = query.provider.as_deref().unwrap_or("local");
    let header = request.headers().get("x-worker-secret").and_then(|value| value.to_str().ok());
    let presented = header.or(query.worker_secret.as_deref()).unwrap_or("");
    let provider = relay.providers.named(name);
    let valid = admitted_by(relay, provider.as_deref(), presented);
    let count = |result| match &provider {
        Some(provider) => provider.series.worker_connected(result),
        None => relay.shared.metrics.worker_of_unknown_provider(result),
    };
    match relay.lockout.judge(address, valid, Instant::now()) {
        Verdict::Admitted => {}
        Verdict::Refused => {
            count(ConnectionResult::AuthFailed);
            relay.shared.metrics.login_failed(Realm::Worker);
            warn!(%address, provider = name.chars().take(64).collect::<String>(), "worker authentication failed");
            return Err(Box::new(refuse(StatusCode::UNAUTHORIZED, "worker authentication failed")));
        }
        Verdict::Locked { retry_after_secs } => {
            count(ConnectionResult::RateLimited);
            relay.shared.metrics.login_failed(Realm::Worker);
            let mut response = refuse(StatusCode::TOO_MANY_REQUESTS, "too many failed logins from this address");
            response.headers_mut().insert(http::header::RETRY_AFTER, retry_after_secs.into());
            return Err(Box::new(response));
        }
    }
    let Some(provider) = provider else {
        relay.shared.metrics.worker_of_unknown_provider(ConnectionResult::ProviderNotFound);
        return Err(Box::new(refuse(StatusCode::NOT_FOUND, "no provider of this name")));
    };
    if !provider.config().enabled {
        provider.series.worker_connected(ConnectionResult::ProviderDisabled);
        return Err(Box::new(refuse(StatusCode::FORBIDDEN, "Provider is currently disabled")));
    }
    let secret = modelrelay_protocol::secret::Secret::new(presented);
    Ok((provider, Admission { address, secret: *secret.digest(), at: Instant::now() }))
}

/// Whether the secret is the provider's; for an unknown provider, whether it is anybody's, so that who has no secret
/// cannot ask which providers there are.
fn admitted_by(relay: &Relay, provider: Option<&Provider>, presented: &str) -> bool {
    let now = SystemTime::now();
    match provider {
        Some(provider) => provider.config().admits(presented, now),
        None => relay.providers.all().iter().filter(|provider| provider.config().admits(presented, now)).count() > 0,
    }
}

/// The two query parameters that a worker's address may have.
#[derive(Debug, Default, PartialEq, Eq)]
struct Query {
    provider: Option<String>,
    worker_secret: Option<String>,
}

impl Query {
    fn parse(query: &str) -> Self {
        let mut parsed = Self::default();
        for pair in query.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "provider" => parsed.provider = Some(percent_decoded(value)),
                "worker_secret" => parsed.worker_secret = Some(percent_decoded(value)),
                _ => {}
            }
        }
        parsed
    }
}

fn percent_decoded(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let hex = (first == b'%').then(|| tail.get(..2)).flatten();
        let decoded = hex.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        rest = if decoded.is_some() { &tail[2..] } else { tail };
        bytes.push(decoded.unwrap_or(if first == b'+' { b' ' } else { first }));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A refusal that a worker's log, or a person with curl, can read.
fn refuse(status: StatusCode, message: &str) -> Response {
    let body = serde_json::json!({ "error": { "message": message, "code": status.as_u16() } }).to_string();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_is_decoded_and_the_rest_of_it_ignored() {
        let query = Query::parse("x=1&provider=a%20b&worker_secret=s%2Bs%zz+t&flag");
        assert_eq!(query.provider.as_deref(), Some("a b"));
        assert_eq!(query.worker_secret.as_deref(), Some("s+s%zz t"));
        assert_eq!(Query::parse(""), Query::default());
    }
}
