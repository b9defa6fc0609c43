//! API keys in a Kubernetes Secret (`API_KEYS_SECRET`) that several relays share.
//!
//! The relay reads the Secret at its mount (`API_KEYS_FILE`), each second and by content like the configuration, so
//! that the check of a key never depends on the API server. It writes through the API server: it reads, changes, and
//! writes only if there was no other write meanwhile; otherwise it starts again. Two relays can therefore both create
//! keys and lose none, and a time of last use from a relay that has not seen a revocation yet cannot undo it.
//!
//! The mount lags behind the Secret by up to a minute, so this relay's keys may be newer. If the mount lacks known
//! keys, either it is old, or the keys were removed from the Secret: the relay queries the API server in the
//! background. Until then every known key stays valid; a revocation is in effect as soon as it is seen anywhere, and
//! permanently. The same applies to a mount with an earlier revision of a key: until the API server has responded, the
//! latest known revision stays in effect.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::forget::{forget_revoked, forget_useless, is_due};
use super::record::active;
use super::{
    CreatedKey, Key, KeyEdits, KeyInfo, KeyRecord, KeySet, KeyStore, KeyStoreError, MAX_KEYS, NewKey, StoreFuture,
    TOUCH_INTERVAL, stored,
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
    /// How long revoked keys are kept; `None` keeps them all.
    revoked_kept: Option<Duration>,
}

/// The Secret's keys before a change.
struct Draft {
    records: Vec<KeyRecord>,
    /// The size of the Secret's other values.
    other_bytes: usize,
}

impl Draft {
    /// The size of the Secret's values, in bytes, with room for the times of last use and of revocation that keys will
    /// get.
    fn size(&self) -> Result<usize, KeyStoreError> {
        let mut largest = self.records.clone();
        for record in &mut largest {
            record.last_used_at.get_or_insert(record.created_at);
            record.revoked_at.get_or_insert(record.created_at);
        }
        let text = stored::encode_compact(&largest).map_err(|error| KeyStoreError::Unavailable(error.to_string()))?;
        Ok(text.len() + self.other_bytes)
    }
}

/// Why one attempt to change the Secret failed.
enum AttemptError {
    /// The next attempt may succeed.
    Passing(ApiError),
    Final(KeyStoreError),
}

impl SecretKeyStore {
    /// Reads the mounted keys, none if nothing is mounted yet, and follows them until the store is dropped. Does not
    /// call the API server. Revoked keys are kept for `revoked_kept`, or indefinitely. Needs a tokio runtime.
    pub fn open(mount: &Path, access: ClusterAccess, revoked_kept: Option<Duration>) -> Result<Self, KeyStoreError> {
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
            revoked_kept,
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

    fn update<'a>(&'a self, id: &'a str, edits: KeyEdits) -> StoreFuture<'a, Option<KeyInfo>> {
        let id = id.to_owned();
        self.run(|shared| async move { shared.update(&id, &edits).await })
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
            if draft.records.len() >= MAX_KEYS
                && !forget_useless(&mut draft.records, &fresh.record.id, SystemTime::now())
            {
                return Err(KeyStoreError::too_many());
            }
            let before = draft.size()?;
            draft.records.push(fresh.record.clone());
            self.make_room(draft, &fresh.record.id, before)?;
            Ok((true, ()))
        })
        .await?;
        self.keys.load().created(fresh)
    }

    async fn update(&self, id: &str, edits: &KeyEdits) -> Result<Option<KeyInfo>, KeyStoreError> {
        let found = self
            .change(|draft| {
                let before = draft.size()?;
                let Some(record) = active(&mut draft.records, id) else { return Ok((false, false)) };
                // Without an effect, an earlier attempt may have been written although its response was lost.
                if !edits.apply(record) {
                    return Ok((false, true));
                }
                self.make_room(draft, id, before)?;
                Ok((true, true))
            })
            .await?;
        Ok(found.then(|| self.keys.load().updated(id)).flatten())
    }

    async fn revoke(&self, id: &str) -> Result<bool, KeyStoreError> {
        let mut was_ours = false;
        self.change(|draft| {
            let changes = active(&mut draft.records, id).is_some_and(|record| record.revoke(SystemTime::now()));
            was_ours |= changes;
            Ok((changes, was_ours))
        })
        .await
    }

    /// Writes times of last use only if they are a whole interval ahead of the stored ones. Of several relays that all
    /// see a key used, or one to forget, the first one writes and the others have nothing to do.
    async fn flush(&self) -> Result<(), KeyStoreError> {
        let (keys, now) = (self.keys.load_full(), SystemTime::now());
        let is_pending = |key: &Arc<Key>| {
            is_ahead(key.record_now().last_used_at, key.record.last_used_at)
                || is_due(&key.record, self.revoked_kept, now)
        };
        if !keys.keys.values().any(is_pending) {
            return Ok(());
        }
        let forgotten = self
            .change(|draft| {
                let ahead = draft.records.iter().any(|record| {
                    let live = keys.lookup(&record.id).and_then(|key| key.record_now().last_used_at);
                    is_ahead(live, record.last_used_at)
                });
                let before = draft.records.len();
                let forgets = forget_revoked(&mut draft.records, self.revoked_kept, now);
                Ok((ahead || forgets, before - draft.records.len()))
            })
            .await?;
        if forgotten > 0 {
            info!(forgotten, "revoked API keys forgotten");
        }
        Ok(())
    }

    /// Applies `edit` to the present keys of the Secret. `edit` returns whether anything must be written, and may be
    /// called again with newer keys.
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
            if let Some(known) = known.lookup(&record.id) {
                record.adopt_revocation(&known.record);
            }
        }
        stored
    }

    fn keep(&self, records: Vec<KeyRecord>) {
        self.keys.store(Arc::new(self.keys.load().renewed(records)));
    }

    /// Deletes useless keys other than `kept` until the Secret has room for the draft. A draft that is no larger than
    /// `before` is always allowed.
    fn make_room(&self, draft: &mut Draft, kept: &str, before: usize) -> Result<(), KeyStoreError> {
        let allowed = before.max(MAX_SECRET_BYTES);
        while draft.size()? > allowed {
            if !forget_useless(&mut draft.records, kept, SystemTime::now()) {
                return Err(KeyStoreError::Full(format!(
                    "{} is full: with this change it would exceed the 1 MiB that Kubernetes allows; remove revoked keys from its {DATA_KEY}",
                    self.api.name(),
                )));
            }
        }
        Ok(())
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

    /// Adopts the mounted keys. True if known keys are missing there, or have an earlier revision.
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
                let is_behind = keep_newer(&mut records, &known);
                self.keep(self.merged(records));
                is_behind
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

/// Adds known keys that the mounted ones lack, and replaces those with an earlier revision. True if there were any.
fn keep_newer(mounted: &mut Vec<KeyRecord>, known: &KeySet) -> bool {
    let mut is_behind = false;
    let mut lacking: HashMap<&str, &Arc<Key>> = known.keys.iter().map(|(id, key)| (id.as_str(), key)).collect();
    for record in mounted.iter_mut() {
        let Some(key) = lacking.remove(record.id.as_str()) else { continue };
        if key.record.revision > record.revision {
            is_behind = true;
            let mounted = std::mem::replace(record, key.record.clone());
            record.adopt_revocation(&mounted);
        }
    }
    is_behind |= !lacking.is_empty();
    mounted.extend(lacking.into_values().map(|key| key.record.clone()));
    is_behind
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
    fn outdated_mount_keeps_newer_keys_and_its_revocations() {
        let record = |id: &str, revision: u64, revoked: bool| {
            let digest = "0f".repeat(32);
            let text = format!(
                r#"{{"id":"{id}","name":"r{revision}","sha256":"{digest}","created_at":"2026-01-01T00:00:00Z","revision":{revision},"revoked":{revoked}}}"#
            );
            serde_json::from_str::<KeyRecord>(&text).expect("a key")
        };
        let known = KeySet::default().renewed(vec![record("changed", 2, false), record("same", 1, false)]);
        let mut mounted = vec![record("changed", 1, true), record("same", 1, false), record("new", 0, false)];
        assert!(keep_newer(&mut mounted, &known));
        let state = |record: &KeyRecord| (record.id.clone(), record.revision, record.revoked);
        let expected = [("changed", 2, true), ("same", 1, false), ("new", 0, false)];
        assert_eq!(
            mounted.iter().map(state).collect::<Vec<_>>(),
            expected.map(|(id, revision, revoked)| (id.to_owned(), revision, revoked))
        );
        let mut mounted = vec![record("changed", 3, false)];
        assert!(keep_newer(&mut mounted, &known), "a key is missing");
        assert_eq!((mounted[0].revision, mounted.len()), (3, 2));
        assert!(!keep_newer(&mut vec![record("changed", 2, false), record("same", 1, false)], &known));
    }

    #[test]
    fn empty_data_has_no_keys_and_garbage_fails() {
        assert_eq!(decode(b" \n"), Ok(None));
        assert_eq!(decode(br#"{"version":1,"keys":[]}"#), Ok(Some(Vec::new())));
        assert!(decode(b"garbage").is_err() && decode(br#"{"version":2,"keys":[]}"#).is_err());
    }
}
