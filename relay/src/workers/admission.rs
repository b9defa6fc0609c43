//! Authentication of workers.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::body::Body;
use axum::response::Response;
use http::{Request, StatusCode};
use modelrelay_protocol::names::printable;
use modelrelay_protocol::secret::Secret;
use tracing::warn;

use super::refuse;
use crate::kubernetes::identity::Denial;
use crate::net::lockout::LockoutOutcome;
use crate::provider::Provider;
use crate::settings::worker_credential::Credential;
use crate::state::Relay;
use crate::telemetry::metrics::{ConnectionResult, Realm};

const FAILED: &str = "worker authentication failed";

/// The number of characters of a presented provider name that are logged.
const MAX_LOGGED_NAME_CHARS: usize = 64;

/// An authenticated worker.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The address from which it connected.
    pub address: IpAddr,
    /// Its credential.
    pub credential: Credential,
    /// The time of its authentication.
    pub at: Instant,
}

/// The fields of a worker's handshake.
pub(super) struct WorkerHandshake {
    address: IpAddr,
    provider: String,
    secret: String,
    token: Option<String>,
}

impl WorkerHandshake {
    pub(super) fn of(relay: &Relay, request: &Request<Body>) -> Self {
        let query = Query::parse(request.uri().query().unwrap_or(""));
        let headers = request.headers();
        // Read as bytes, because a secret may have letters outside ASCII.
        let text = |name: &str| headers.get(name).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
        Self {
            address: relay.client_address(headers, request.extensions()),
            provider: query.provider.unwrap_or_else(|| "local".to_owned()),
            secret: text("x-worker-secret").map(str::to_owned).or(query.worker_secret).unwrap_or_default(),
            token: text("authorization").and_then(bearer).map(str::to_owned),
        }
    }
}

/// Admits a worker, or returns the rejection.
pub(super) async fn admit(
    relay: &Relay,
    handshake: WorkerHandshake,
) -> Result<(Arc<Provider>, Admission), Box<Response>> {
    let provider = relay.providers.named(&handshake.provider);
    let shown = credential(relay, provider.as_deref(), &handshake).await;
    let credential = judge(relay, provider.as_deref(), &handshake, shown)?;
    let Some(provider) = provider else {
        relay.shared.metrics.worker_of_unknown_provider(ConnectionResult::ProviderNotFound);
        let name = printable(&handshake.provider, MAX_LOGGED_NAME_CHARS);
        warn!(address = %handshake.address, provider = name, "a worker requested an unknown provider");
        return Err(Box::new(refuse(StatusCode::NOT_FOUND, "no provider has this name")));
    };
    if !provider.config().enabled {
        provider.series.worker_connected(ConnectionResult::ProviderDisabled);
        return Err(Box::new(refuse(StatusCode::FORBIDDEN, "Provider is currently disabled")));
    }
    Ok((provider, Admission { address: handshake.address, credential, at: Instant::now() }))
}

fn judge(
    relay: &Relay,
    provider: Option<&Provider>,
    handshake: &WorkerHandshake,
    shown: Result<Credential, Denial>,
) -> Result<Credential, Box<Response>> {
    let count = |result| match provider {
        Some(provider) => provider.series.worker_connected(result),
        None => relay.shared.metrics.worker_of_unknown_provider(result),
    };
    let why = match shown {
        Ok(credential) => return Ok(credential),
        // Not the worker's fault, so it is not counted as a failed login.
        Err(Denial::Unknown(why)) => {
            count(ConnectionResult::Unverified);
            return Err(refuse_for(1, StatusCode::SERVICE_UNAVAILABLE, &why));
        }
        Err(Denial::Refused(why)) => why,
    };
    relay.shared.metrics.login_failed(Realm::Worker);
    if let LockoutOutcome::Locked { retry_after_secs } = relay.lockout.judge(handshake.address, false, Instant::now()) {
        count(ConnectionResult::RateLimited);
        let why = "too many failed logins from this address";
        return Err(refuse_for(retry_after_secs, StatusCode::TOO_MANY_REQUESTS, why));
    }
    count(ConnectionResult::AuthFailed);
    let name = printable(&handshake.provider, MAX_LOGGED_NAME_CHARS);
    // For the log only: an attacker who guesses must not learn that a guess is close.
    let hint = provider.and_then(|provider| provider.config().near_miss(&handshake.secret, SystemTime::now()));
    warn!(address = %handshake.address, provider = name, reason = why, hint, "worker authentication failed");
    Err(Box::new(refuse(StatusCode::UNAUTHORIZED, &why)))
}

fn refuse_for(seconds: u64, status: StatusCode, why: &str) -> Box<Response> {
    let mut response = refuse(status, why);
    response.headers_mut().insert(http::header::RETRY_AFTER, seconds.into());
    Box::new(response)
}

/// Returns the credential that admits this worker: the secret, or else the token. For an unknown provider it checks all
/// providers, so that a peer without a credential cannot find out which providers exist.
async fn credential(
    relay: &Relay,
    provider: Option<&Provider>,
    handshake: &WorkerHandshake,
) -> Result<Credential, Denial> {
    if admits(relay, provider, &handshake.secret) {
        return Ok(Credential::Secret(*Secret::new(handshake.secret.as_str()).digest()));
    }
    let failed = |why: &str| Denial::Refused(why.to_owned());
    let Some(token) = &handshake.token else { return Err(failed(FAILED)) };
    let all = relay.providers.all();
    if all.iter().all(|provider| provider.config().worker_accounts.is_empty()) {
        return Err(failed(
            "this relay accepts no worker tokens: workerServiceAccounts (WORKER_SERVICE_ACCOUNTS) is empty",
        ));
    }
    let listed = |account: &_| all.iter().any(|provider| provider.config().worker_accounts.contains(account));
    let suspect = relay.lockout.locked_for(handshake.address, Instant::now()).is_some();
    let identity = relay.identities.identify(token, listed, suspect).await?;
    let may_come_in = match provider {
        Some(provider) => provider.config().worker_accounts.contains(&identity.account),
        None => listed(&identity.account),
    };
    if may_come_in {
        return Ok(Credential::Token(identity));
    }
    Err(failed(&format!("workerServiceAccounts of this provider do not include ServiceAccount {}", identity.account)))
}

fn admits(relay: &Relay, provider: Option<&Provider>, secret: &str) -> bool {
    let now = SystemTime::now();
    match provider {
        Some(provider) => provider.config().admits(secret, now),
        None => relay.providers.all().iter().filter(|provider| provider.config().admits(secret, now)).count() > 0,
    }
}

fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, token) = authorization.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_is_decoded_and_unknown_parameters_ignored() {
        let query = Query::parse("x=1&provider=a%20b&worker_secret=s%2Bs%zz+t&flag");
        assert_eq!(query.provider.as_deref(), Some("a b"));
        assert_eq!(query.worker_secret.as_deref(), Some("s+s%zz t"));
        assert_eq!(Query::parse(""), Query::default());
    }
}
