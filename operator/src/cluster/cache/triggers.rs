//! Determines which objects a change concerns, and how much work it causes.
//!
//! There are three degrees, because most events in a cluster are reports and not changes. The relays of a Provider
//! report something, so its status may differ. Something that the Provider depends on changed, so its objects may have
//! to differ. One of its own objects changed, so that object has to be corrected, unless the operator made the change.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Now;
use crate::cluster::apply;
use crate::crd::{Provider, WorkerPool};
use crate::manifests;
use crate::resources::names;

/// Requests reconciliations. The controllers reconcile each name once, however often it was requested.
#[derive(Clone)]
pub struct Triggers {
    // Locked for a lookup or an insertion, never across an await.
    changes: Arc<Mutex<HashMap<ObjectRef<Provider>, Changes>>>,
    watched: Arc<Mutex<WatchedState>>,
    providers: UnboundedSender<ObjectRef<Provider>>,
    pools: UnboundedSender<ObjectRef<WorkerPool>>,
}

/// The last state that watches delivered, which saves reads of unchanged objects.
#[derive(Default)]
struct WatchedState {
    /// Content versions of the pools' objects, by namespace, and by kind and name.
    objects: HashMap<(String, String), String>,
    /// The number of changes of Deployments, by namespace.
    deployments: HashMap<String, u64>,
}

/// The receiving ends of [`Triggers`].
pub struct Requests {
    /// Providers to reconcile.
    pub providers: UnboundedReceiver<ObjectRef<Provider>>,
    /// WorkerPools to reconcile.
    pub pools: UnboundedReceiver<ObjectRef<WorkerPool>>,
}

/// The changes that concern a Provider since its last pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// True if the Provider itself, or something that it depends on, changed.
    pub itself: bool,
    /// True if the right of its relays to review tokens may have been lost.
    pub reviewers: bool,
    /// Its objects that changed, by kind and name.
    pub objects: HashMap<String, ObjectChange>,
}

/// The last state of an object that a watch delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectChange {
    /// The object exists, and its content has this version.
    At(String),
    /// The object is gone.
    Gone,
}

impl Triggers {
    /// Creates only the channels; [`super::start`] creates them along with everything else.
    #[expect(clippy::disallowed_methods, reason = "holds names until a controller takes them, which is at once")]
    pub fn channels() -> (Self, Requests) {
        let (providers, provider_requests) = unbounded_channel();
        let (pools, pool_requests) = unbounded_channel();
        (
            Self { changes: Arc::default(), watched: Arc::default(), providers, pools },
            Requests { providers: provider_requests, pools: pool_requests },
        )
    }

    /// Requests a reconciliation of a Provider that changed, or whose dependencies changed.
    pub fn provider(&self, namespace: &str, name: &str) {
        self.note(namespace, name, |changes| changes.itself = true);
    }

    /// Requests a reconciliation of a Provider whose relays may have lost the right to review tokens.
    pub fn provider_reviewers(&self, namespace: &str, name: &str) {
        self.note(namespace, name, |changes| changes.reviewers = true);
    }

    /// Requests a reconciliation of a Provider whose relays reported something new or changed state. Its objects are
    /// unchanged.
    pub fn provider_reported(&self, namespace: &str, name: &str) {
        // The receiver is dropped only when the process ends.
        let _ = self.providers.send(ObjectRef::new(name).within(namespace));
    }

    /// Returns and clears the changes of the Provider since the last call.
    pub fn take_changes(&self, reference: &ObjectRef<Provider>) -> Changes {
        self.lock().remove(reference).unwrap_or_default()
    }

    /// Requests a reconciliation of a pool.
    pub fn pool(&self, namespace: &str, name: &str) {
        let _ = self.pools.send(ObjectRef::new(name).within(namespace));
    }

    /// Handles a change of an object that the operator created: the owner in its labels is reconciled.
    pub(crate) fn object<K: Resource<DynamicType = ()>>(&self, object: &K, now: Now) {
        let namespace = object.namespace().unwrap_or_default();
        if let Some(pool) = object.labels().get(names::POOL_LABEL) {
            let key = (namespace.clone(), manifests::display(&K::kind(&()), &object.name_any()));
            match now {
                Now::There => self.watched().objects.insert(key, apply::content_version(object.meta())),
                Now::Gone => self.watched().objects.remove(&key),
            };
            self.pool(&namespace, pool);
        } else if let Some(provider) = object.labels().get(names::PROVIDER_LABEL) {
            let display = manifests::display(&K::kind(&()), &object.name_any());
            let seen = match now {
                Now::There => ObjectChange::At(apply::content_version(object.meta())),
                Now::Gone => ObjectChange::Gone,
            };
            self.note(&namespace, provider, |changes| {
                changes.objects.insert(display, seen);
            });
        }
    }

    /// Returns the content version of a pool's object that the watches delivered last.
    pub fn watched_version(&self, namespace: &str, display: &str) -> Option<String> {
        self.watched().objects.get(&(namespace.to_owned(), display.to_owned())).cloned()
    }

    /// Records a change of any Deployment.
    pub(crate) fn deployment_changed(&self, namespace: String) {
        *self.watched().deployments.entry(namespace).or_default() += 1;
    }

    /// Returns the number of changes of Deployments in a namespace.
    pub fn deployment_changes(&self, namespace: &str) -> u64 {
        self.watched().deployments.get(namespace).copied().unwrap_or_default()
    }

    /// Handles a change of a Pod that a template created: the owner in its labels has a change to report.
    pub(crate) fn pod(&self, pod: &impl ResourceExt) {
        let namespace = pod.namespace().unwrap_or_default();
        if let Some(pool) = pod.labels().get(names::POOL_LABEL) {
            self.pool(&namespace, pool);
        } else if let Some(provider) = pod.labels().get(names::PROVIDER_LABEL) {
            self.provider_reported(&namespace, provider);
        }
    }

    fn note(&self, namespace: &str, name: &str, change: impl FnOnce(&mut Changes)) {
        let reference = ObjectRef::new(name).within(namespace);
        change(self.lock().entry(reference.clone()).or_default());
        let _ = self.providers.send(reference);
    }

    fn watched(&self) -> MutexGuard<'_, WatchedState> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectRef<Provider>, Changes>> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the objects of an earlier list that a later one lacks: they were deleted during a gap of the watch.
pub(super) fn vanished<K: Resource<DynamicType = ()> + Clone>(before: &[Arc<K>], after: &[Arc<K>]) -> Vec<Arc<K>> {
    let there: HashSet<ObjectRef<K>> = after.iter().map(|object| ObjectRef::from_obj(object.as_ref())).collect();
    before.iter().filter(|object| !there.contains(&ObjectRef::from_obj(object.as_ref()))).cloned().collect()
}
