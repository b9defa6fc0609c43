//! Applies a pool's objects, and leaves up-to-date ones alone.
//!
//! A pool is reconciled whenever one of its Pods changes, and most reconciliations change nothing. Each applied object
//! is therefore remembered with its resulting version: while both the desired object and the live version are the same,
//! nothing is sent. Content that the API server rejected is not sent again either, until it changes.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use kube::api::{Api, DynamicObject, ObjectMeta};

use super::PoolContext;
use super::memory::{AppliedVersion, Attempt, AttemptResult};
use crate::cluster::apply::{self, ApplyError, Owner};
use crate::crd::WorkerPool;
use crate::manifests::Manifest;
use crate::manifests::backend::RENDERED_ANNOTATION;
use crate::resources::names;

/// The result of applying an object.
#[derive(Debug)]
pub struct EnsuredObject {
    /// The object, unless it was not read because nothing had to change.
    pub object: Option<DynamicObject>,
    /// True if a request was sent.
    pub applied: bool,
}

/// Applies an object that has not been read yet. It is not read either if its watch delivered the version that was
/// applied last.
pub async fn unread(shared: &PoolContext, pool: &WorkerPool, manifest: &Manifest) -> Result<EnsuredObject, ApplyError> {
    let (key, _, before) = last_attempt(shared, pool, manifest);
    if let Some(AttemptResult::Done(applied)) = before
        && shared.caches.triggers.watched_version(&manifest.namespace, &key) == Some(applied.content)
    {
        return Ok(EnsuredObject { object: None, applied: false });
    }
    let api: Api<DynamicObject> =
        Api::namespaced_with(shared.ctx.client.clone(), &manifest.namespace, &manifest.resource);
    let there =
        api.get_metadata_opt(&manifest.name).await.map_err(|error| ApplyError::api(manifest.display(), error))?;
    ensure(shared, pool, manifest, there.map(|there| there.metadata).as_ref()).await
}

/// Applies an object whose metadata is known.
pub async fn ensure(
    shared: &PoolContext,
    pool: &WorkerPool,
    manifest: &Manifest,
    there: Option<&ObjectMeta>,
) -> Result<EnsuredObject, ApplyError> {
    let (key, desired, before) = last_attempt(shared, pool, manifest);
    match before {
        Some(AttemptResult::Refused { code, message }) => {
            return Err(ApplyError::Refused { object: key, code, message });
        }
        Some(AttemptResult::Done(version)) if there.is_some_and(|there| self::version(there) == version) => {
            return Ok(EnsuredObject { object: None, applied: false });
        }
        Some(AttemptResult::Done(_)) | None => {}
    }
    let applied = apply::apply(&shared.ctx.client, owner(pool), manifest).await;
    let result = match &applied {
        Ok(object) => Some(AttemptResult::Done(version(&object.metadata))),
        // A policy's decision may change; other rejections depend only on the content.
        Err(error @ ApplyError::Refused { code, message, .. }) if !error.is_forbidden() => {
            Some(AttemptResult::Refused { code: *code, message: message.clone() })
        }
        Err(_) => None,
    };
    shared.memory.with(pool, |entry| {
        entry.absent.remove(&key);
        match result {
            Some(result) => entry.applied.insert(key, Attempt { desired, result }),
            None => entry.applied.remove(&key),
        }
    });
    applied.map(|object| EnsuredObject { object: Some(object), applied: true })
}

/// Returns the key of an object, the hash of its desired content, and the result of applying the same content before.
fn last_attempt(shared: &PoolContext, pool: &WorkerPool, manifest: &Manifest) -> (String, u64, Option<AttemptResult>) {
    let (key, desired) = (manifest.display(), hash(&manifest.value.to_string()));
    let last = shared.memory.with(pool, |entry| entry.applied.get(&key).cloned());
    let same = last.filter(|attempt| attempt.desired == desired);
    (key, desired, same.map(|attempt| attempt.result))
}

/// Deletes an object of the pool. This happens once: if the object is created again, that is intended.
pub async fn gone(shared: &PoolContext, pool: &WorkerPool, manifest: &Manifest) -> Result<(), ApplyError> {
    let key = manifest.display();
    if shared.memory.with(pool, |entry| entry.absent.contains(&key)) {
        return Ok(());
    }
    apply::delete(&shared.ctx.client, owner(pool), manifest).await?;
    shared.memory.with(pool, |entry| {
        entry.applied.remove(&key);
        entry.absent.insert(key);
    });
    Ok(())
}

pub(super) fn owner(pool: &WorkerPool) -> Owner<'_> {
    Owner { kind: "WorkerPool", label: names::POOL_LABEL, name: pool.metadata.name.as_deref().unwrap_or_default() }
}

fn version(meta: &ObjectMeta) -> AppliedVersion {
    let annotation = |all: &BTreeMap<String, String>| all.get(RENDERED_ANNOTATION).cloned();
    AppliedVersion { content: apply::content_version(meta), rendered: meta.annotations.as_ref().and_then(annotation) }
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}
