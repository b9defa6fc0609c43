//! API keys in a Kubernetes Secret (`API_KEYS_SECRET`) that several relays share.
//!
//! The relay reads the Secret at its mount (`API_KEYS_FILE`), each second and by content like the configuration, so that
//! the check of a key never depends on the API server. It writes through the API server: it reads, changes, and writes only
//! if there was no other write meanwhile; otherwise it starts again. Two relays can therefore both create keys and lose
//! none, and a time of last use from a relay that has not seen a revocation yet cannot undo it.
//!
//! The mount lags behind the Secret by up to a minute, so this relay's keys may be newer. If the mount lacks known keys, either
//! it is old, or the keys were removed from the Secret: the relay queries the API server in the background. Until then every
//! known key stays valid; a revocation is in effect as soon as it is seen anywhere, and permanently.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::{
    CreatedKey, KeyRecord, KeySet, KeyStore, KeyStoreError, MAX_KEYS, NewKey, StoreFuture, TOUCH_INTERVAL,
    forget_useless, stored,
};
use crate::system::file_watch::{Content, FileWatch};

mod api;
mod pace;

pub use api::ClusterAccess;

use api::{ApiError, SecretApi, StoredSecret};
use pace::Pace;

/// The name of the keys in the Secret's data, and so of the mounted file.
pub const DATA_KEY: &str = "keys.json";
/// Kubernetes' limit for all values of a Secret together.
const MAX_SECRET_BYTES: usize = 1 << 20;
/// The longest time that an admin waits for a change: the API server may be restarting, but a person does not wait for
/// long.
const CHANGE_PATIENCE: Duration = Duration::from_secs(8);
/// The first wait before the API server is queried about a mount that lacks keys, and the longest between two attempts.
const DOUBT_WAIT: Duration = Duration::from_secs(1);
const MAX_DOUBT_WAIT: Duration = Duration::from_secs(60);

/// Keys in a Secret.
#[derive(Clone)]
pub struct SecretKeyStore {
    shared: Arc<SecretState>,
}

struct SecretState {
    api: SecretApi,
    mount: PathBuf,
    keys: ArcSwap<KeySet>,
    /// Serializes changes, including the reading, writing and swapping.
    turn: tokio::sync::Mutex<()>,
    error: Mutex<Option<String>>,
}

/// The Secret's keys before a change.
struct Draft {
    records: Vec<KeyRecord>,
    /// The size of the Secret's other values.
    other_bytes: usize,
}

/// Why one attempt to change the Secret failed.
enum AttemptError {
    /// The next attempt may succeed.
    Passing(ApiError),
    Final(KeyStoreError),
}

impl SecretKeyStore {
    /// Reads the mounted keys, none if nothing is mounted yet, and follows them until the store is dropped. Does not call
    /// the API server. Needs a tokio runtime.
    pub fn open(mount: &Path, access: ClusterAccess) -> Result<Self, KeyStoreError> {
        let mut watch = FileWatch::new(mount, MAX_SECRET_BYTES as u64);
        let records = match watch.poll() {
            Some(Ok(text)) => decode(&text).map_err(|why| {
                KeyStoreError::Unavailable(format!("{}: {why}; the file is left unchanged", mount.display()))
            })?,
            // An optional mount is empty until keys exist.
            Some(Err(_)) | None => None,
        };
        let keys = ArcSwap::from_pointee(KeySet::default().renewed(records.unwrap_or_default()));
        let shared = Arc::new(SecretState {
            api: SecretApi::new(access),
            mount: mount.to_path_buf(),
            keys,
            turn: tokio::sync::Mutex::default(),
            error: Mutex::default(),
        });
        tokio::spawn(follow(Arc::downgrade(&shared), watch));
        Ok(Self { shared })
    }

    /// Runs a change. Once started, it is completed even if its future is dropped.
    fn run<T, F>(&self, change: impl FnOnce(Arc<SecretState>) -> F) -> StoreFuture<'_, T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, KeyStoreError>> + Send + 'static,
    {
        let done = tokio::spawn(change(Arc::clone(&self.shared)));
        Box::pin(async move {
            done.await.unwrap_or_else(|error| {
                Err(KeyStoreError::Unavailable(format!("the change did not complete: {error}")))
            })
        })
    }
}

impl KeyStore for SecretKeyStore {
    fn snapshot(&self) -> Arc<KeySet> {
        self.shared.keys.load_full()
    }

    fn create(&self, request: NewKey) -> StoreFuture<'_, CreatedKey> {
        self.run(|shared| async move { shared.create(request).await })
    }

    fn revoke<'a>(&'a self, id: &'a str) -> StoreFuture<'a, bool> {
        let id = id.to_owned();
        self.run(|shared| async move { shared.revoke(&id).await })
    }

    fn flush(&self) -> StoreFuture<'_, ()> {
        self.run(|shared| async move { shared.flush().await })
    }

    fn error(&self) -> Option<String> {
        self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl SecretState {
    async fn create(&self, request: NewKey) -> Result<CreatedKey, KeyStoreError> {
        let fresh = request.into_fresh()?;
        self.change(|draft| {
            // An earlier attempt may have been written although its response was lost.
            if draft.records.iter().any(|record| record.id == fresh.record.id) {
                return Ok((false, ()));
            }
            let now = SystemTime::now();
            if draft.records.len() >= MAX_KEYS && !forget_useless(&mut draft.records, now) {
                return Err(KeyStoreError::too_many());
            }
            draft.records.push(fresh.record.clone());
            while let Err(full) = self.check_size(draft) {
                if !forget_useless(&mut draft.records, now) {
                    return Err(full);
                }
            }
            Ok((true, ()))
        })
        .await?;
        self.keys.load().created(fresh)
    }

    async fn revoke(&self, id: &str) -> Result<bool, KeyStoreError> {
        let mut was_ours = false;
        self.change(|draft| {
            let key = draft.records.iter_mut().find(|record| record.id == id && !record.revoked);
            let changes = key.map(|record| record.revoked = true).is_some();
            was_ours |= changes;
            Ok((changes, was_ours))
        })
        .await
    }

    /// Writes times of last use only if they are a whole interval ahead of the stored ones. Of several relays that all see
    /// a key used, the first one writes and the others have nothing to do.
    async fn flush(&self) -> Result<(), KeyStoreError> {
        let keys = self.keys.load_full();
        if !keys.keys.values().any(|key| is_ahead(key.record_now().last_used_at, key.record.last_used_at)) {
            return Ok(());
        }
        self.change(|draft| {
            let ahead = draft.records.iter().any(|record| {
                let live = keys.lookup(&record.id).and_then(|key| key.record_now().last_used_at);
                is_ahead(live, record.last_used_at)
            });
            Ok((ahead, ()))
        })
        .await
    }

    /// Applies `edit` to the present keys of the Secret. `edit` returns whether anything must be written, and may be called
    /// again with newer keys.
    async fn change<T>(
        &self,
        mut edit: impl FnMut(&mut Draft) -> Result<(bool, T), KeyStoreError>,
    ) -> Result<T, KeyStoreError> {
        let mut pace = Pace::new(Instant::now() + CHANGE_PATIENCE);
        let late = || KeyStoreError::Unavailable("timed out waiting for other changes of the API keys".to_owned());
        let _turn = tokio::time::timeout_at(pace.deadline(), self.turn.lock()).await.map_err(|_| late())?;
        let mut before = None;
        loop {
            let error = match self.try_change(&mut edit, pace.deadline()).await {
                Ok(answer) => return Ok(answer),
                Err(AttemptError::Final(error)) => return Err(error),
                // The error of an attempt that the deadline cut short explains less than the one before it.
                Err(AttemptError::Passing(error)) if pace.is_over() => before.unwrap_or(error),
                Err(AttemptError::Passing(error)) => error,
            };
            if !pace.wait(error.retry_after()).await {
                return Err(self.unavailable(&error));
            }
            before = Some(error);
        }
    }

    async fn try_change<T>(
        &self,
        edit: &mut impl FnMut(&mut Draft) -> Result<(bool, T), KeyStoreError>,
        deadline: Instant,
    ) -> Result<T, AttemptError> {
        let secret = self.api.read(deadline).await.map_err(|error| self.judge(error))?;
        let records = self.records_in(&secret).map_err(AttemptError::Final)?;
        // Keys that were lost with their Secret are restored with the next change.
        let records = self.merged(records.unwrap_or_else(|| self.keys.load().records()));
        let mut draft = Draft { records, other_bytes: secret.other_bytes };
        let (is_changed, answer) = edit(&mut draft).map_err(AttemptError::Final)?;
        if is_changed {
            for record in &mut draft.records {
                let live = self.keys.load().lookup(&record.id).and_then(|key| key.record_now().last_used_at);
                record.last_used_at = record.last_used_at.max(live);
            }
            let text = stored::encode_compact(&draft.records)
                .map_err(|error| AttemptError::Final(KeyStoreError::Unavailable(error.to_string())))?;
            self.api.write(&secret.version, &text, deadline).await.map_err(|error| self.judge(error))?;
        }
        // Also without a change by this relay: changes by others, above all revocations, are in effect from here on.
        self.keep(draft.records);
        Ok(answer)
    }

    /// Decodes the keys; `None` if the Secret contains none, not even an empty list.
    fn records_in(&self, secret: &StoredSecret) -> Result<Option<Vec<KeyRecord>>, KeyStoreError> {
        let Some(text) = &secret.keys else { return Ok(None) };
        decode(text).map_err(|why| {
            KeyStoreError::Unavailable(format!(
                "{} in {}: {why}; the Secret is left unchanged",
                DATA_KEY,
                self.api.name()
            ))
        })
    }

    /// The stored keys, with the revocations that this relay knows.
    fn merged(&self, mut stored: Vec<KeyRecord>) -> Vec<KeyRecord> {
        let known = self.keys.load();
        for record in &mut stored {
            record.revoked |= known.lookup(&record.id).is_some_and(|key| key.record.revoked);
        }
        stored
    }

    fn keep(&self, records: Vec<KeyRecord>) {
        self.keys.store(Arc::new(self.keys.load().renewed(records)));
    }

    /// Checks the size. Each key will get a time of last use, which needs room too.
    fn check_size(&self, draft: &Draft) -> Result<(), KeyStoreError> {
        let mut largest = draft.records.clone();
        for record in &mut largest {
            record.last_used_at.get_or_insert(record.created_at);
        }
        let text = stored::encode_compact(&largest).map_err(|error| KeyStoreError::Unavailable(error.to_string()))?;
        if text.len() + draft.other_bytes <= MAX_SECRET_BYTES {
            return Ok(());
        }
        Err(KeyStoreError::Full(format!(
            "{} is full: another key would exceed the 1 MiB that Kubernetes allows; remove revoked keys from its {DATA_KEY}",
            self.api.name(),
        )))
    }

    fn judge(&self, error: ApiError) -> AttemptError {
        match error {
            ApiError::Conflict | ApiError::Passing { .. } => AttemptError::Passing(error),
            ApiError::Refused(_) => AttemptError::Final(self.unavailable(&error)),
        }
    }

    fn unavailable(&self, error: &ApiError) -> KeyStoreError {
        KeyStoreError::Unavailable(format!("{}: {error}", self.api.name()))
    }

    /// Adopts the mounted keys. True if known keys are missing there.
    async fn take_mount(&self, content: Content) -> bool {
        let _turn = self.turn.lock().await;
        let known = self.keys.load_full();
        let records = content.and_then(|text| decode(&text)).and_then(|records| match records {
            None if !known.is_empty() => Err("the file no longer contains API keys".to_owned()),
            None => Ok(Vec::new()),
            Some(records) => Ok(records),
        });
        match records {
            Ok(mut records) => {
                self.set_error(None);
                let mounted: HashSet<String> = records.iter().map(|record| record.id.clone()).collect();
                let lacking: Vec<KeyRecord> = known
                    .keys
                    .values()
                    .map(|key| key.record.clone())
                    .filter(|key| !mounted.contains(&key.id))
                    .collect();
                let lacks = !lacking.is_empty();
                records.extend(lacking);
                self.keep(self.merged(records));
                lacks
            }
            // Without keys, an optional mount is empty.
            Err(_) if known.is_empty() && !self.mount.exists() => false,
            Err(why) => {
                self.set_error(Some(why));
                false
            }
        }
    }

    /// Reads the keys from the API server.
    async fn fetch(&self) -> Result<(), KeyStoreError> {
        let _turn = self.turn.lock().await;
        let deadline = Instant::now() + CHANGE_PATIENCE;
        let secret = self.api.read(deadline).await.map_err(|error| self.unavailable(&error))?;
        if let Some(records) = self.records_in(&secret)? {
            self.keep(self.merged(records));
        }
        Ok(())
    }

    fn set_error(&self, now: Option<String>) {
        let file = self.mount.display();
        let mut error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        match &now {
            Some(why) => error!(%file, why, "API key reload failed; keeping previous keys"),
            None if error.is_some() => info!(%file, "API keys reloaded"),
            None => {}
        }
        *error = now.map(|why| format!("{file}: {why}"));
    }
}

/// Follows the mounted keys until the store is dropped.
async fn follow(store: Weak<SecretState>, mut watch: FileWatch) {
    let mut doubt: Option<Duration> = None;
    loop {
        let asking = async {
            match doubt {
                Some(wait) => tokio::time::sleep(wait).await,
                None => std::future::pending().await,
            }
        };
        let content = tokio::select! {
            content = watch.changed() => Some(content),
            () = asking => None,
        };
        let Some(shared) = store.upgrade() else { return };
        match (content, doubt) {
            (Some(content), _) => doubt = shared.take_mount(content).await.then_some(DOUBT_WAIT),
            (None, wait) => match shared.fetch().await {
                Ok(()) => doubt = None,
                Err(error) => {
                    warn!(%error, "cannot read the current API keys; keeping all known keys");
                    doubt = wait.map(|wait| (wait * 2).min(MAX_DOUBT_WAIT));
                }
            },
        }
    }
}

/// True if a time of last use has to be written.
fn is_ahead(live: Option<SystemTime>, stored: Option<SystemTime>) -> bool {
    match (live, stored) {
        (Some(live), Some(stored)) => live.duration_since(stored).is_ok_and(|ahead| ahead >= TOUCH_INTERVAL),
        (live, None) => live.is_some(),
        (None, Some(_)) => false,
    }
}

/// An empty Secret may have been created with an empty value for the keys.
fn decode(text: &[u8]) -> Result<Option<Vec<KeyRecord>>, String> {
    if text.trim_ascii().is_empty() { Ok(None) } else { stored::decode(text).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_use_is_written_once_per_interval() {
        let at = |seconds: u64| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert!(is_ahead(at(1000), None) && is_ahead(at(1060), at(1000)));
        assert!(!is_ahead(at(1059), at(1000)) && !is_ahead(at(900), at(1000)));
        assert!(!is_ahead(None, None) && !is_ahead(None, at(1000)));
    }

    #[test]
    fn empty_data_has_no_keys_and_garbage_fails() {
        assert_eq!(decode(b" \n"), Ok(None));
        assert_eq!(decode(br#"{"version":1,"keys":[]}"#), Ok(Some(Vec::new())));
        assert!(decode(b"garbage").is_err() && decode(br#"{"version":2,"keys":[]}"#).is_err());
    }
}
