//! API keys: the clients that may call the relay, and their limits.
//!
//! A key is `mr-<id>-<secret>`. The id finds it, so that a check costs one lookup regardless of the number of keys.
//! Only the SHA-256 of the whole key is stored and compared, in constant time; with 160 random bits nothing slower is
//! needed. The request path reads a snapshot and takes no lock but that of its key's tokens. A [`KeyStore`] stores keys
//! beyond the process: in a file here, elsewhere on other platforms. A revoked key stays listed, because a name in an
//! old log should still be found.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use modelrelay_protocol::rate_limit::RateLimit;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::dispatch::{Class, Weight};
use crate::system::unix_time::unix_millis;

pub(crate) mod edit;
pub mod file;
mod forget;
mod generate;
mod record;
pub mod secret;
mod stored;
mod tenants;
mod tokens;

pub use edit::{KeyEdits, KeyFields, NewKey};
pub use file::FileKeyStore;
pub use record::KeyRecord;
pub use secret::SecretKeyStore;
pub use tenants::{Tenant, Tenants};
pub use tokens::TokenLimit;

use tokens::TokenUse;

/// The prefix of every key; a value with it is never forwarded to a backend.
pub const KEY_PREFIX: &str = "mr-";

/// The shortest interval at which `last_used_at` is written.
pub const TOUCH_INTERVAL: Duration = Duration::from_secs(60);

/// The most keys that a store holds, including revoked ones. Beyond it, the oldest revoked or expired one is deleted.
pub const MAX_KEYS: usize = 10_000;

/// The result of a store's slow operations; boxed so that stores can be chosen at run time.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, KeyStoreError>> + Send + 'a>>;

/// The storage of keys.
pub trait KeyStore: Send + Sync {
    /// All keys at this moment; takes no lock.
    fn snapshot(&self) -> Arc<KeySet>;

    /// Creates and stores a key; its secret is in the result and nowhere else. After an error no such key exists.
    fn create(&self, request: NewKey) -> StoreFuture<'_, CreatedKey>;

    /// Changes a key and stores it; `None` if no key has this id, or if it was revoked. The change applies to requests
    /// that arrive from now on. After an error the key is unchanged.
    fn update<'a>(&'a self, id: &'a str, edits: KeyEdits) -> StoreFuture<'a, Option<KeyInfo>>;

    /// Revokes a key, at once and permanently; `false` if no key has this id, or if it was revoked before.
    fn revoke<'a>(&'a self, id: &'a str) -> StoreFuture<'a, bool>;

    /// Stores the latest times of last use, if any changed, and forgets keys that were revoked long ago. Called at the
    /// start, once a minute and at the end.
    fn flush(&self) -> StoreFuture<'_, ()>;

    /// Why the stored keys cannot be used; `None` if they can. Meanwhile the last valid keys stay in effect.
    fn error(&self) -> Option<String> {
        None
    }

    /// Every key, including revoked ones, oldest first.
    fn list(&self) -> Vec<KeyInfo> {
        let snapshot = self.snapshot();
        let mut keys: Vec<KeyInfo> = snapshot.keys.values().map(|key| key.info()).collect();
        keys.sort_by(|a, b| (&a.created, &a.id).cmp(&(&b.created, &b.id)));
        keys
    }

    /// Returns the key that equals `presented`, and records its use.
    fn verify(&self, presented: &str, now: SystemTime) -> Result<Arc<Key>, KeyRejection> {
        self.snapshot().verify(presented, now)
    }
}

/// Calls [`KeyStore::flush`] now and each [`TOUCH_INTERVAL`], until all other owners have dropped the store.
pub async fn flush_regularly(store: std::sync::Weak<dyn KeyStore>) {
    loop {
        let Some(store) = store.upgrade() else { return };
        if let Err(error) = store.flush().await {
            tracing::warn!(%error, "cannot update the stored API keys");
        }
        drop(store);
        tokio::time::sleep(TOUCH_INTERVAL).await;
    }
}

/// All keys at one moment.
#[derive(Debug, Default)]
pub struct KeySet {
    keys: HashMap<String, Arc<Key>>,
}

/// One key.
pub struct Key {
    record: KeyRecord,
    id: Arc<str>,
    usage: Arc<Usage>,
}

/// The live state of a key; shared by all snapshots that contain it.
#[derive(Debug, Default)]
struct Usage {
    in_flight: AtomicU32,
    /// Milliseconds since 1970; 0 if it was never used.
    last_used: AtomicU64,
    tokens: Mutex<TokenUse>,
}

impl Usage {
    /// Locks the tokens, for the time of a calculation.
    fn tokens(&self) -> MutexGuard<'_, TokenUse> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The limits of a key; an absent one does not limit anything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyLimits {
    /// The providers that it may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub providers: Option<Vec<String>>,
    /// The models that it may use, by id or alias.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
    /// The time from which on it is invalid; RFC 3339, UTC.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "record::optional_time")]
    pub expires_at: Option<SystemTime>,
    /// The most requests in flight at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_in_flight: Option<u32>,
    /// The part of a provider's queue that its waiting requests may fill, by number and by bytes, in percent; one may
    /// always wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_queue_percent: Option<u8>,
    /// The most tokens of its requests within a minute, input and output together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<u64>,
    /// The most tokens of its requests within a day, input and output together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_day: Option<u64>,
}

/// A new key.
#[derive(Clone)]
pub struct CreatedKey {
    /// The stored part of it.
    pub info: KeyInfo,
    /// The whole key. It is shown once, and cannot be recovered afterwards.
    pub secret: String,
}

/// A key as listed by `/admin/keys`. Its times are included twice: in the format of the published relay, and
/// human-readable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyInfo {
    /// The unique id.
    pub id: String,
    /// The name from the admin.
    pub name: String,
    /// The beginning of the key: enough to recognise it, too little to use it.
    pub prefix: String,
    /// Creation, in seconds of Unix time.
    pub created_at: u64,
    /// The same in RFC 3339, with milliseconds.
    pub created: String,
    /// Last use, in seconds of Unix time; `null` if it was never used.
    pub last_used_at: Option<u64>,
    /// The same in RFC 3339, with milliseconds.
    pub last_used: Option<String>,
    /// True if it was revoked.
    pub revoked: bool,
    /// The time of the revocation, in RFC 3339, with milliseconds.
    pub revoked_at: Option<String>,
    /// Its weight among keys of one class.
    pub weight: Weight,
    /// The class of its requests.
    pub class: Class,
    /// Its limits.
    #[serde(flatten)]
    pub limits: KeyLimits,
    /// The present number of requests in flight.
    pub in_flight: u32,
}

/// Why a presented key is rejected. The client's error is the same for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyRejection {
    /// It is not a key of this relay, or its secret is wrong.
    #[error("unknown API key")]
    Unknown,
    /// It was revoked.
    #[error("revoked API key")]
    Revoked,
    /// It has expired.
    #[error("expired API key")]
    Expired,
}

/// A key has reached its limit of requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the API key's limit of {max_in_flight} requests in flight is reached")]
pub struct KeyLimit {
    /// The limit.
    pub max_in_flight: u32,
}

/// Why a key could not be created, changed, revoked or stored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyStoreError {
    /// The admin's request is invalid: 400.
    #[error("{0}")]
    Invalid(String),
    /// The store has no room for another key, or for the change: 409.
    #[error("{0}")]
    Full(String),
    /// The store cannot be written, or has other content: 503. Nothing was changed or lost.
    #[error("{0}")]
    Unavailable(String),
}

impl KeyStoreError {
    fn too_many() -> Self {
        Self::Full(format!("the limit of {MAX_KEYS} keys is reached, and none of them is revoked or expired"))
    }
}

/// One request in flight with a key; dropping it releases the place, and the tokens that were charged and not settled.
#[derive(Debug)]
pub struct KeyLease {
    key: Arc<Key>,
    /// The tokens that are charged until the request ends.
    charged: Option<u64>,
}

impl KeyLease {
    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Charges the estimated tokens of the request, unless a limit of the key is reached.
    pub fn charge(&mut self, estimate: u64, now: SystemTime) -> Result<(), TokenLimit> {
        self.key.tokens().charge(estimate, now)?;
        self.charged = Some(estimate);
        Ok(())
    }

    /// Replaces what was charged, if anything was, with the tokens that the request used.
    pub fn settle(&mut self, used: u64, now: SystemTime) {
        if let Some(estimate) = self.charged.take() {
            self.key.tokens().settle(estimate, used, now);
        }
    }
}

impl Drop for KeyLease {
    fn drop(&mut self) {
        self.settle(0, SystemTime::now());
        self.key.usage.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

impl KeySet {
    /// The key with this id.
    pub fn lookup(&self, id: &str) -> Option<&Arc<Key>> {
        self.keys.get(id)
    }

    /// The number of keys, including revoked ones.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// True if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the key that equals `presented`, and records its use.
    pub fn verify(&self, presented: &str, now: SystemTime) -> Result<Arc<Key>, KeyRejection> {
        let id = generate::id_of(presented).ok_or(KeyRejection::Unknown)?;
        let key = self.lookup(id).ok_or(KeyRejection::Unknown)?;
        let digest: [u8; 32] = Sha256::digest(presented.as_bytes()).into();
        if !bool::from(digest.ct_eq(&key.record.sha256)) {
            return Err(KeyRejection::Unknown);
        }
        if key.record.revoked {
            return Err(KeyRejection::Revoked);
        }
        if key.record.limits.expires_at.is_some_and(|end| now >= end) {
            return Err(KeyRejection::Expired);
        }
        key.touch(now);
        Ok(Arc::clone(key))
    }

    /// The keys of `records`, with the live state of keys that existed before.
    fn renewed(&self, records: Vec<KeyRecord>) -> Self {
        let now = SystemTime::now();
        let keys = records.into_iter().map(|record| {
            let usage = self.keys.get(&record.id).map(|key| Arc::clone(&key.usage)).unwrap_or_default();
            let stored = record.last_used_at.map_or(0, unix_millis);
            usage.last_used.fetch_max(stored, Ordering::Relaxed);
            usage.tokens().set_limits(&record.limits, now);
            (record.id.clone(), Arc::new(Key { id: record.id.as_str().into(), record, usage }))
        });
        Self { keys: keys.collect() }
    }

    /// The result for the creator of a key that is stored by now.
    fn created(&self, fresh: edit::FreshRecord) -> Result<CreatedKey, KeyStoreError> {
        let key = self.lookup(&fresh.record.id);
        let key = key.ok_or_else(|| KeyStoreError::Unavailable("the new key was removed concurrently".to_owned()))?;
        Ok(CreatedKey { info: key.info(), secret: fresh.whole })
    }

    /// The view of an active key that was just changed.
    fn updated(&self, id: &str) -> Option<KeyInfo> {
        self.lookup(id).filter(|key| !key.record.revoked).map(|key| key.info())
    }

    /// The records to store: every key with its last use so far, oldest first.
    fn records(&self) -> Vec<KeyRecord> {
        let mut records: Vec<KeyRecord> = self.keys.values().map(|key| key.record_now()).collect();
        records.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        records
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    unix_millis(time) / 1000
}

impl Key {
    /// The id, for logs.
    pub fn id(&self) -> &str {
        &self.record.id
    }

    /// The id, to be kept.
    pub fn shared_id(&self) -> Arc<str> {
        Arc::clone(&self.id)
    }

    /// The name from the admin.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// The limits.
    pub fn limits(&self) -> &KeyLimits {
        &self.record.limits
    }

    /// The weight among keys of one class.
    pub fn weight(&self) -> Weight {
        self.record.weight
    }

    /// The class of its requests.
    pub fn class(&self) -> Class {
        self.record.class
    }

    /// True if it has a limit of tokens.
    pub fn limits_tokens(&self) -> bool {
        let limits = self.limits();
        limits.tokens_per_minute.is_some() || limits.tokens_per_day.is_some()
    }

    /// True if it may use this provider.
    pub fn allows_provider(&self, provider: &str) -> bool {
        self.limits().providers.as_ref().is_none_or(|allowed| allowed.iter().any(|name| name == provider))
    }

    /// True if it may use a model by this name. A caller checks the client's name and the id behind it: the key may
    /// list either.
    pub fn allows_model(&self, model: &str) -> bool {
        self.limits().models.as_ref().is_none_or(|allowed| allowed.iter().any(|name| name == model))
    }

    /// Adds a request in flight, if the limit allows it.
    pub fn acquire(self: &Arc<Self>) -> Result<KeyLease, KeyLimit> {
        let limit = self.limits().max_in_flight;
        let room = |count: u32| limit.is_none_or(|most| count < most).then(|| count + 1);
        match self.usage.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, room) {
            Ok(_) => Ok(KeyLease { key: Arc::clone(self), charged: None }),
            Err(_) => Err(KeyLimit { max_in_flight: limit.unwrap_or(u32::MAX) }),
        }
    }

    /// Returns the limit of tokens that is reached, if one is. `used_today` returns the tokens that the key had used
    /// today when the relay started; it is called once.
    pub fn check_tokens(&self, now: SystemTime, used_today: impl FnOnce() -> u64) -> Result<(), TokenLimit> {
        let mut tokens = self.tokens();
        tokens.resume(now, used_today);
        tokens.check(now)
    }

    /// The limit of tokens with the fewest free ones; `None` without one.
    pub fn token_limit(&self, now: SystemTime) -> Option<RateLimit> {
        self.tokens().tighter(now)
    }

    fn tokens(&self) -> MutexGuard<'_, TokenUse> {
        self.usage.tokens()
    }

    /// The view of the admin API.
    pub fn info(&self) -> KeyInfo {
        let record = self.record_now();
        KeyInfo {
            prefix: format!("{KEY_PREFIX}{}", record.id),
            created_at: unix_seconds(record.created_at),
            created: record::format_time(record.created_at),
            last_used_at: record.last_used_at.map(unix_seconds),
            last_used: record.last_used_at.map(record::format_time),
            id: record.id,
            name: record.name,
            revoked: record.revoked,
            revoked_at: record.revoked_at.map(record::format_time),
            weight: record.weight,
            class: record.class,
            limits: record.limits,
            in_flight: self.usage.in_flight.load(Ordering::Relaxed),
        }
    }

    fn touch(&self, now: SystemTime) {
        self.usage.last_used.fetch_max(unix_millis(now), Ordering::Relaxed);
    }

    fn record_now(&self) -> KeyRecord {
        let millis = self.usage.last_used.load(Ordering::Relaxed);
        let last_used_at = (millis > 0).then(|| UNIX_EPOCH + Duration::from_millis(millis));
        KeyRecord { last_used_at, ..self.record.clone() }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("id", &self.record.id)
            .field("revoked", &self.record.revoked)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for CreatedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CreatedKey").field("info", &self.info).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
