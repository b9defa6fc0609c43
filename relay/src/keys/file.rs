//! API keys in a JSON file (`API_KEYS_FILE`) that survives a crash at any point.
//!
//! Each change writes a whole new file next to the old one, syncs it, renames it over the old one, and syncs the
//! folder: after any failure, a reader sees either the old keys or the new ones. Memory follows the disk, never the
//! reverse, so a full disk causes an error for an admin but loses no key. A file that cannot be parsed is never
//! overwritten. Before each change the file is read again: a key that another writer added (a second relay, an
//! operator) is adopted, not lost. The regular [`KeyStore::flush`] reads it too, so that a key revoked elsewhere is
//! rejected here within a minute.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use modelrelay_platform::files;
use tracing::info;

use super::forget::{forget_revoked, forget_useless};
use super::record::active;
use super::{
    CreatedKey, KeyEdits, KeyInfo, KeyRecord, KeySet, KeyStore, KeyStoreError, MAX_KEYS, NewKey, StoreFuture, stored,
};
use crate::system::blocking;

/// The largest file. [`MAX_KEYS`] of the largest keys would be more; but a larger file was not written by a relay.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Keys in a file.
#[derive(Clone)]
pub struct FileKeyStore {
    shared: Arc<FileState>,
}

struct FileState {
    path: PathBuf,
    keys: ArcSwap<KeySet>,
    /// Serializes changes, including the reading, writing and swapping; only locked on a thread that may block.
    change: Mutex<()>,
    /// How long revoked keys are kept; `None` keeps them all.
    revoked_kept: Option<Duration>,
}

impl FileKeyStore {
    /// Reads the file; a missing one is empty. Revoked keys are kept for `revoked_kept`, or indefinitely. An error
    /// names the file and the problem.
    pub fn open(path: &Path, revoked_kept: Option<Duration>) -> Result<Self, KeyStoreError> {
        // A link is followed now: a rename over it would replace the link, not its target.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let records = read(&path)?.unwrap_or_default();
        let keys = ArcSwap::from_pointee(KeySet::default().renewed(records));
        Ok(Self { shared: Arc::new(FileState { path, keys, change: Mutex::new(()), revoked_kept }) })
    }
}

/// Reads the keys as a start does, and creates and removes a file as a change does: an error states why keys could not
/// be stored.
pub fn check(path: &Path) -> Result<(), KeyStoreError> {
    let store = FileKeyStore::open(path, None)?;
    let path = &store.shared.path;
    let mut probe = temporary_path(path).into_os_string();
    probe.push(".check");
    let probe = PathBuf::from(probe);
    let created = files::create_private(&probe).and_then(|file| file.sync_all());
    let written = created.and_then(|()| fs::remove_file(&probe));
    written.map_err(|error| {
        let folder = files::folder_of(path).display();
        KeyStoreError::Unavailable(format!(
            "{}: cannot store keys: no file can be written in {folder}: {error}",
            path.display()
        ))
    })
}

impl KeyStore for FileKeyStore {
    fn snapshot(&self) -> Arc<KeySet> {
        self.shared.keys.load_full()
    }

    fn create(&self, request: NewKey) -> StoreFuture<'_, CreatedKey> {
        self.run(move |shared| shared.create(request))
    }

    fn update<'a>(&'a self, id: &'a str, edits: KeyEdits) -> StoreFuture<'a, Option<KeyInfo>> {
        let id = id.to_owned();
        self.run(move |shared| shared.update(&id, &edits))
    }

    fn revoke<'a>(&'a self, id: &'a str) -> StoreFuture<'a, bool> {
        let id = id.to_owned();
        self.run(move |shared| shared.revoke(&id))
    }

    fn flush(&self) -> StoreFuture<'_, ()> {
        self.run(FileState::flush)
    }
}

impl FileKeyStore {
    /// Runs a change on a thread that may block, because a disk may take seconds. Once started, it is completed even if
    /// its future is dropped.
    fn run<T: Send + 'static>(
        &self,
        change: impl FnOnce(&FileState) -> Result<T, KeyStoreError> + Send + 'static,
    ) -> StoreFuture<'_, T> {
        let shared = Arc::clone(&self.shared);
        let done = blocking::run(move || change(&shared));
        Box::pin(async move {
            done.await.unwrap_or_else(|error| {
                Err(KeyStoreError::Unavailable(format!("the change did not complete: {error}")))
            })
        })
    }
}

impl FileState {
    fn create(&self, request: NewKey) -> Result<CreatedKey, KeyStoreError> {
        let fresh = request.into_fresh()?;
        self.change(|records| {
            if records.len() >= MAX_KEYS && !forget_useless(records, &fresh.record.id, SystemTime::now()) {
                return Err(KeyStoreError::too_many());
            }
            records.push(fresh.record.clone());
            Ok((true, ()))
        })?;
        self.keys.load().created(fresh)
    }

    fn update(&self, id: &str, edits: &KeyEdits) -> Result<Option<KeyInfo>, KeyStoreError> {
        let found = self.change(|records| {
            let key = active(records, id);
            Ok(key.map_or((false, false), |record| (edits.apply(record), true)))
        })?;
        Ok(found.then(|| self.keys.load().updated(id)).flatten())
    }

    fn revoke(&self, id: &str) -> Result<bool, KeyStoreError> {
        self.change(|records| {
            let found = active(records, id).is_some_and(|record| record.revoke(SystemTime::now()));
            Ok((found, found))
        })
    }

    fn flush(&self) -> Result<(), KeyStoreError> {
        let known = self.keys.load();
        let newer = |stored: &KeyRecord| {
            let ours = known.lookup(&stored.id).map(|key| key.record_now().last_used_at);
            ours.is_some_and(|last_used| last_used > stored.last_used_at)
        };
        let used = match read(&self.path)? {
            Some(stored) => stored.iter().any(newer),
            None => !known.is_empty(),
        };
        let forgotten = self.change(|records| {
            let before = records.len();
            let forgets = forget_revoked(records, self.revoked_kept, SystemTime::now());
            Ok((used || forgets, before - records.len()))
        })?;
        if forgotten > 0 {
            info!(forgotten, "revoked API keys forgotten");
        }
        Ok(())
    }

    /// Applies `edit` to the merged keys of file and memory. `edit` returns whether it changed anything; only then is
    /// the file written. Memory adopts the state of the disk.
    fn change<T>(
        &self,
        edit: impl FnOnce(&mut Vec<KeyRecord>) -> Result<(bool, T), KeyStoreError>,
    ) -> Result<T, KeyStoreError> {
        let _one_at_a_time = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut records = self.merged(read(&self.path)?);
        let (changed, answer) = edit(&mut records)?;
        let renamed = match changed {
            true => Some(replace(&self.path, &records).map_err(|error| {
                KeyStoreError::Unavailable(format!("{}: cannot write the API keys: {error}", self.path.display()))
            })?),
            false => None,
        };
        // Also without a change by this relay: changes by others, above all revocations, are in effect from here on.
        self.keys.store(Arc::new(self.keys.load().renewed(records)));
        renamed.map_or(Ok(()), |renamed| renamed.sync_folder(&self.path))?;
        Ok(answer)
    }

    /// The keys of the file, with this process's times of last use. Without a file, the keys in memory, so that a
    /// deleted file is restored.
    fn merged(&self, stored: Option<Vec<KeyRecord>>) -> Vec<KeyRecord> {
        let known = self.keys.load();
        let Some(mut stored) = stored else { return known.records() };
        for record in &mut stored {
            if let Some(known) = known.lookup(&record.id).map(|key| key.record_now()) {
                record.last_used_at = record.last_used_at.max(known.last_used_at);
                record.adopt_revocation(&known);
            }
        }
        stored
    }
}

/// The new file is in place, but its name may not be on disk yet.
struct Renamed;

impl Renamed {
    fn sync_folder(self, path: &Path) -> Result<(), KeyStoreError> {
        files::sync_folder(files::folder_of(path)).map_err(|error| {
            KeyStoreError::Unavailable(format!(
                "{}: the API keys were written but may not survive a crash: {error}",
                path.display()
            ))
        })
    }
}

/// Reads the file; `None` if it does not exist yet.
fn read(path: &Path) -> Result<Option<Vec<KeyRecord>>, KeyStoreError> {
    let shown = path.display();
    let unavailable = |why: String| KeyStoreError::Unavailable(format!("{shown}: {why}; the file is left unchanged"));
    let size = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unavailable(format!("cannot read the API keys: {error}"))),
    };
    if size > MAX_FILE_BYTES {
        return Err(unavailable(format!("cannot read the API keys: the file exceeds {MAX_FILE_BYTES} bytes")));
    }
    let text = fs::read(path).map_err(|error| unavailable(format!("cannot read the API keys: {error}")))?;
    stored::decode(&text).map(Some).map_err(unavailable)
}

/// Writes the file, up to and including the rename; after an error the old file is unchanged.
fn replace(path: &Path, records: &[KeyRecord]) -> io::Result<Renamed> {
    let text = stored::encode_pretty(records)?;
    files::replace_private(path, &temporary_path(path), |file| file.write_all(&text)).map(|_| Renamed)
}

/// The temporary file: in the same folder, so that the rename stays on one file system, with one name, so that crashes
/// leave one file at most.
fn temporary_path(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    files::folder_of(path).join(name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::SystemTime;

    use serde_json::{Value, json};

    use super::super::KeyFields;
    use super::*;

    fn wanted(fields: Value) -> NewKey {
        NewKey::try_from(serde_json::from_value::<KeyFields>(fields).expect("fields")).expect("valid")
    }

    fn new_key(name: &str) -> NewKey {
        wanted(json!({ "name": name }))
    }

    fn edits(fields: Value) -> KeyEdits {
        KeyEdits::try_from(serde_json::from_value::<KeyFields>(fields).expect("fields")).expect("valid")
    }

    fn open(path: &Path) -> FileKeyStore {
        FileKeyStore::open(path, None).expect("opens")
    }

    #[tokio::test]
    async fn keys_survive_restart() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let fields = json!({
            "name": "kept", "providers": ["local"], "models": ["m"], "expires_at": "2096-10-02T07:06:40Z", "max_in_flight": 2,
            "max_queue_percent": 50,
        });
        let store = open(&path);
        assert!(store.snapshot().is_empty() && !path.exists());
        let kept = store.create(wanted(fields)).await.expect("created");
        let revoked = store.create(new_key("revoked")).await.expect("created");
        assert_eq!(store.revoke(&revoked.info.id).await, Ok(true));
        store.verify(&kept.secret, SystemTime::now()).expect("valid");
        store.flush().await.expect("flushed");

        let again = open(&path);
        let mut listed = again.list();
        assert_eq!(listed, store.list());
        // Both may have been created in the same millisecond.
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(
            (&listed[0].name, &listed[0].limits, listed[0].last_used_at.is_some()),
            (&"kept".to_owned(), &kept.info.limits, true)
        );
        assert!(listed[1].revoked);
        let now = SystemTime::now();
        assert!(again.verify(&kept.secret, now).is_ok());
        assert_eq!(again.verify(&revoked.secret, now).expect_err("revoked"), super::super::KeyRejection::Revoked);
    }

    #[tokio::test]
    async fn changed_key_survives_restart_with_its_use() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let store = open(&path);
        let key =
            store.create(wanted(json!({"name": "k", "models": ["m"], "max_in_flight": 2}))).await.expect("created");
        let _lease = store.verify(&key.secret, SystemTime::now()).expect("valid").acquire().expect("room");
        let changed = store.update(&key.info.id, edits(json!({"name": "new", "models": null}))).await.expect("stored");
        let changed = changed.expect("a key");
        assert_eq!((&*changed.name, &changed.limits.models, changed.limits.max_in_flight), ("new", &None, Some(2)));
        assert_eq!((changed.in_flight, changed.last_used.is_some()), (1, true));
        assert_eq!(open(&path).list(), [KeyInfo { in_flight: 0, ..changed }]);
    }

    #[tokio::test]
    async fn unknown_or_revoked_key_cannot_be_changed() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(&folder.path().join("keys.json"));
        let key = store.create(new_key("k")).await.expect("created");
        let rename = || edits(json!({"name": "new"}));
        assert_eq!(store.update("unknown", rename()).await, Ok(None));
        assert_eq!(store.revoke(&key.info.id).await, Ok(true));
        assert_eq!(store.update(&key.info.id, rename()).await, Ok(None));
        assert_eq!(store.list()[0].name, "k");
    }

    #[tokio::test]
    async fn plain_key_is_stored_without_new_fields() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        open(&path).create(new_key("k")).await.expect("created");
        let stored: Value = serde_json::from_slice(&fs::read(&path).expect("bytes")).expect("JSON");
        let fields: Vec<&String> = stored["keys"][0].as_object().expect("an object").keys().collect();
        assert_eq!(fields, ["created_at", "id", "limits", "name", "revoked", "sha256"]);
        assert_eq!(stored["keys"][0]["limits"], json!({}));
    }

    #[tokio::test]
    async fn key_file_is_private_and_contains_no_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let created = open(&path).create(new_key("a")).await.expect("created");
        let mode = fs::metadata(&path).expect("a file").permissions().mode();
        let text = fs::read_to_string(&path).expect("text");
        let secret = created.secret.rsplit('-').next().expect("a secret");
        assert_eq!(mode & 0o777, 0o600);
        assert!(!text.contains(secret) && text.contains(&created.info.id));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }

    #[tokio::test]
    async fn unreadable_key_file_is_rejected_and_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        for text in [
            "",
            "{",
            "[]",
            r#"{"version":2,"keys":[]}"#,
            r#"{"version":1,"keys":[{"id":"x"}]}"#,
            r#"{"version":1,"keys":[],"more":1}"#,
        ] {
            fs::write(&path, text).expect("written");
            let error = FileKeyStore::open(&path, None).err().expect("an error").to_string();
            assert!(error.contains("keys.json") && !error.contains('\n'), "{error}");
            assert_eq!(fs::read_to_string(&path).expect("text"), text);
        }
    }

    #[tokio::test]
    async fn key_file_corrupted_at_runtime_is_not_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let store = open(&path);
        let key = store.create(new_key("a")).await.expect("created");
        fs::write(&path, "garbage").expect("written");
        assert!(matches!(store.create(new_key("b")).await, Err(KeyStoreError::Unavailable(_))));
        assert!(matches!(store.revoke(&key.info.id).await, Err(KeyStoreError::Unavailable(_))));
        assert_eq!(fs::read_to_string(&path).expect("text"), "garbage");
        assert!(store.verify(&key.secret, SystemTime::now()).is_ok());
    }

    #[tokio::test]
    async fn failed_write_loses_no_key() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let store = open(&path);
        let key = store.create(new_key("a")).await.expect("created");
        let before = fs::read(&path).expect("bytes");
        // Nothing can be written next to the file: a non-empty folder is in the way.
        fs::create_dir_all(temporary_path(&path).join("x")).expect("a folder");
        assert!(matches!(store.create(new_key("b")).await, Err(KeyStoreError::Unavailable(_))));
        assert!(matches!(store.revoke(&key.info.id).await, Err(KeyStoreError::Unavailable(_))));
        assert_eq!((store.list().len(), fs::read(&path).expect("bytes")), (1, before));
        assert!(store.verify(&key.secret, SystemTime::now()).is_ok());
        fs::remove_dir_all(temporary_path(&path)).expect("removed");
        assert_eq!(store.revoke(&key.info.id).await, Ok(true));
    }

    #[tokio::test]
    async fn temporary_file_of_crash_is_ignored() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let store = open(&path);
        store.create(new_key("a")).await.expect("created");
        // The state after a crash before the rename: half a new file.
        fs::write(temporary_path(&path), "{\"version\":1,\"ke").expect("written");
        assert_eq!(open(&path).list().len(), 1);
        store.create(new_key("b")).await.expect("created");
        assert_eq!(open(&path).list().len(), 2);
    }

    #[tokio::test]
    async fn two_relays_sharing_file_lose_no_key() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let (one, two) = (open(&path), open(&path));
        let a = one.create(new_key("a")).await.expect("created");
        let b = two.create(new_key("b")).await.expect("created");
        assert_eq!(two.revoke(&a.info.id).await, Ok(true));
        one.create(new_key("c")).await.expect("created");
        let now = SystemTime::now();
        assert!(one.verify(&a.secret, now).is_err() && one.verify(&b.secret, now).is_ok());
        assert_eq!(open(&path).list().len(), 3);
    }

    #[tokio::test]
    async fn unused_key_causes_no_write() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.json");
        let store = open(&path);
        let key = store.create(new_key("a")).await.expect("created");
        let written = |path: &Path| fs::metadata(path).expect("a file").modified().expect("a time");
        let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).expect("a file"));
        let before = (written(&path), inode(&path));
        let content = fs::read(&path).expect("a file");
        store.flush().await.expect("flushed");
        assert_eq!((written(&path), inode(&path)), before);
        store.verify(&key.secret, SystemTime::now()).expect("valid");
        store.flush().await.expect("flushed");
        // Not by its modification time: two writes may fall into one tick of the file system's clock.
        assert_ne!(fs::read(&path).expect("a file"), content);
    }

    #[tokio::test]
    async fn symbolic_link_is_preserved() {
        let folder = tempfile::tempdir().expect("a folder");
        let (link, target) = (folder.path().join("link.json"), folder.path().join("target.json"));
        fs::write(&target, r#"{"version":1,"keys":[]}"#).expect("written");
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        open(&link).create(new_key("a")).await.expect("created");
        assert!(fs::symlink_metadata(&link).expect("a link").is_symlink());
        assert_eq!(open(&target).list().len(), 1);
    }
}
