//! Authentication of clients by API key, or by the token of a tenant, if keys are required.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::request::Parts;
use http::{Extensions, HeaderMap};
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::headers::{bearer_token, is_own_key};
use modelrelay_protocol::paths::Endpoint;

use super::{class, tenant, text_header};
use crate::dispatch::{Allowed, Class, Model, Owner, QueueShare};
use crate::keys::{Key, KeyLease, TokenLimit};
use crate::net::budget::Holder;
use crate::net::lockout::network_of;
use crate::provider::Provider;
use crate::provider::request::input_estimate;
use crate::state::Relay;
use crate::telemetry::metrics::Realm;
use crate::telemetry::usage::{OTHER, RequestCounts, RowKey, UsageSums};

/// The caller of a request: an API key or a tenant, or any client if no key is required.
pub struct Caller {
    key: Option<Arc<Key>>,
}

impl Caller {
    /// Checks a request's key before any of its body is read. Only the token of a tenant may have to be waited for.
    pub async fn authenticate(relay: &Relay, headers: &HeaderMap, extensions: &Extensions) -> Result<Self, ApiError> {
        if !relay.shared.config.load().require_api_keys {
            return Ok(Self { key: None });
        }
        let refused = |message: &'static str| {
            relay.shared.metrics.login_failed(Realm::Client);
            ApiError::new(ErrorKind::InvalidApiKey, message)
        };
        let has_tenants = !relay.client_tokens.tenants.load().is_empty();
        let is_token = |value: &str| has_tenants && tenant::is_client_token(relay, value);
        let presented = presented_key(headers, is_token).ok_or_else(|| refused("API key required"))?;
        match relay.keys.verify(presented, SystemTime::now()) {
            Ok(key) => Ok(Self::of(key)),
            Err(_) if has_tenants && looks_like_token(presented) => {
                let address = relay.client_address(headers, extensions);
                // Boxed, because the future of every request would have its size.
                Box::pin(tenant::authenticate(relay, presented, address)).await.map(Self::of)
            }
            Err(rejection) => {
                tracing::debug!(%rejection, "API key refused");
                Err(refused("Invalid API key"))
            }
        }
    }

    fn of(key: Arc<Key>) -> Self {
        Self { key: Some(key) }
    }

    /// True if the caller may use a model by any of its names. A caller may use a worker's alias if it may use every
    /// model that workers serve under it.
    pub fn allows_model(&self, provider: &Provider, names: &[&str]) -> bool {
        let Some(key) = &self.key else { return true };
        let allows_all_of = |name: &&str| {
            let ids = provider.ids_of(name);
            !ids.is_empty() && ids.iter().all(|id| key.allows_model(id))
        };
        key.allows_provider(&provider.name)
            && (names.iter().any(|name| key.allows_model(name)) || names.iter().any(allows_all_of))
    }

    /// Rejects a model that the caller may not use. If the caller may use the name only because of the models that
    /// workers serve under it, returns the models that its key lists: another worker, or the same one later, may serve
    /// another model under that name.
    pub fn check_model(&self, provider: &Provider, names: &[&str]) -> Result<Option<Allowed>, ApiError> {
        if !self.allows_model(provider, names) {
            return Err(forbidden());
        }
        let listed = self.key.as_ref().and_then(|key| key.limits().models.as_ref());
        let by_meaning = listed.filter(|listed| !names.iter().any(|name| listed.iter().any(|listed| listed == name)));
        Ok(by_meaning.map(|listed| Arc::new(listed.iter().map(|id| Model::from(id.as_str())).collect())))
    }

    /// Returns the caller's error for a model that does not exist. A key that may not use the model does not learn
    /// whether it exists.
    pub fn hide_unknown_model(&self, model: &str, error: ApiError) -> ApiError {
        if self.key.as_ref().is_none_or(|key| key.allows_model(model)) { error } else { forbidden() }
    }

    /// Adds a request of this caller, until the lease is dropped. `is_free`: it uses no tokens.
    pub fn lease(&self, relay: &Relay, is_free: bool) -> Result<Option<KeyLease>, ApiError> {
        let Some(key) = &self.key else { return Ok(None) };
        let lease = key.acquire().map_err(|limit| ApiError::new(ErrorKind::KeyLimit, limit.to_string()))?;
        if !is_free {
            let now = SystemTime::now();
            let used_today = || relay.shared.usage.tokens_of(&key.shared_id(), now);
            key.check_tokens(now, used_today).map_err(token_limit)?;
        }
        Ok(Some(lease))
    }

    /// The part of a queue that the caller's requests may fill; `None` for all of it.
    pub fn queue_share(&self) -> Option<QueueShare> {
        let key = self.key.as_ref()?;
        key.limits().max_queue_percent.map(|percent| QueueShare { key: key.shared_id(), percent })
    }

    /// Counts a request of this caller in the ledger that ended before it had a route, and so a model.
    pub fn count_refused(&self, relay: &Relay) {
        let requests = RequestCounts { refused: 1, ..RequestCounts::default() };
        let sums = UsageSums { requests, ..UsageSums::default() };
        let name = self.key.as_ref().map(|key| key.name());
        relay.shared.usage.record(
            RowKey { key_id: self.key_id(), model: OTHER.into() },
            name,
            &sums,
            SystemTime::now(),
        );
    }

    /// Returns the key by which a request of this caller shares the workers with others, and the request's class.
    /// `None` for the usual request without a key.
    pub fn owner(&self, headers: &HeaderMap) -> Result<Option<Owner>, ApiError> {
        let (weight, of_key) = self.key.as_ref().map(|key| (key.weight(), key.class())).unwrap_or_default();
        let owner = Owner { key: self.key_id(), weight, class: class::of_request(headers, of_key)? };
        Ok(Some(owner).filter(|owner| owner.key.is_some() || owner.class != Class::default()))
    }

    /// The id of the caller's key; `None` where no key is required.
    pub fn key_id(&self) -> Option<Arc<str>> {
        self.key.as_ref().map(|key| key.shared_id())
    }

    /// The client to whose share of the memory budget the request's body is charged.
    pub fn holder(&self, relay: &Relay, parts: &Parts) -> Holder {
        let of_address = || Holder::Address(network_of(relay.client_address(&parts.headers, &parts.extensions)));
        self.key_id().map_or_else(of_address, Holder::Key)
    }
}

/// Charges a request with a body of this size to its key. Other requests may have used up the key's tokens since it
/// arrived.
pub fn charge(lease: Option<&mut KeyLease>, endpoint: Endpoint, body_bytes: usize) -> Result<(), ApiError> {
    let Some(lease) = lease else { return Ok(()) };
    lease.charge(input_estimate(endpoint, body_bytes as u64), SystemTime::now()).map_err(token_limit)
}

/// SDKs retry without telling their user. Beyond this time they report the limit instead.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

fn token_limit(limit: TokenLimit) -> ApiError {
    let error = ApiError::new(ErrorKind::TokenLimit, limit.to_string());
    let error = error.with_retry_after(limit.free_in).with_rate_limit(limit.rate);
    if limit.free_in > LONGEST_RETRY { error.lasting() } else { error }
}

fn forbidden() -> ApiError {
    ApiError::new(ErrorKind::ModelForbidden, "this API key may not use this provider or model")
}

/// The key in a request's `Authorization: Bearer` or `x-api-key` header. If both are present, the one in the relay's
/// format is used, or else a token for its clients; the other is for the backend.
fn presented_key(headers: &HeaderMap, is_token: impl Fn(&str) -> bool) -> Option<&str> {
    let value = |name| text_header(headers, name);
    let bearer = value("authorization").map(bearer_token);
    let presented = [bearer, value("x-api-key").map(str::trim)].into_iter().flatten().filter(|key| !key.is_empty());
    let (ours, theirs): (Vec<_>, Vec<_>) = presented.partition(|key| is_own_key(key));
    let token = theirs.iter().find(|value| theirs.len() > 1 && is_token(value)).copied();
    ours.into_iter().chain(token).chain(theirs).next()
}

/// True if a value has the form of a JWT, which starts with an object in base64.
fn looks_like_token(presented: &str) -> bool {
    presented.starts_with("eyJ") && presented.bytes().filter(|byte| *byte == b'.').count() == 2
}
