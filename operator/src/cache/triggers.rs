//! Whom a change concerns, and how much of it there is to do.
//!
//! Three degrees, because most of what happens in a cluster is news about objects and no change of them: a Provider's relays
//! report something (its status may differ), something that it depends on changed (its objects may have to differ), an object of
//! its own changed (that one object has to be put right, unless the change was the operator's).

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Now;
use crate::apply;
use crate::crd::{Provider, WorkerPool};
use crate::manifests;
use crate::names;

/// Asks for reconciliations. The controllers take each name once, however often it is asked for.
#[derive(Clone)]
pub struct Triggers {
    // Held for a look-up or an insertion, never over an await.
    changes: Arc<Mutex<HashMap<ObjectRef<Provider>, Changes>>>,
    providers: UnboundedSender<ObjectRef<Provider>>,
    pools: UnboundedSender<ObjectRef<WorkerPool>>,
}

/// The other ends.
pub struct Requests {
    /// Providers to reconcile.
    pub providers: UnboundedReceiver<ObjectRef<Provider>>,
    /// WorkerPools to reconcile.
    pub pools: UnboundedReceiver<ObjectRef<WorkerPool>>,
}

/// What changed for a Provider since its last pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Whether it was the Provider itself, or something that it depends on.
    pub itself: bool,
    /// Its objects that somebody touched, by kind and name.
    pub objects: HashMap<String, Seen>,
}

/// What a watch last showed of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It is there, and its content has this version.
    At(String),
    /// It is gone.
    Gone,
}

impl Triggers {
    /// The channels alone; [`super::start`] makes them with everything else.
    #[expect(clippy::disallowed_methods, reason = "holds names until a controller takes them, which is at once")]
    pub fn channels() -> (Self, Requests) {
        let (providers, provider_requests) = unbounded_channel();
        let (pools, pool_requests) = unbounded_channel();
        (
            Self { changes: Arc::default(), providers, pools },
            Requests { providers: provider_requests, pools: pool_requests },
        )
    }

    /// Asks for a Provider, because it changed, or something that it depends on.
    pub fn provider(&self, namespace: &str, name: &str) {
        self.note(namespace, name, |changes| changes.itself = true);
    }

    /// Asks for a Provider whose relays reported something new, or of whose relays something is new: its objects are as they were.
    pub fn provider_reported(&self, namespace: &str, name: &str) {
        // Nobody takes requests any more only when the process ends.
        let _ = self.providers.send(ObjectRef::new(name).within(namespace));
    }

    /// What changed of the Provider since this was last asked.
    pub fn take_changes(&self, reference: &ObjectRef<Provider>) -> Changes {
        self.lock().remove(reference).unwrap_or_default()
    }

    /// Asks for a pool.
    pub fn pool(&self, namespace: &str, name: &str) {
        let _ = self.pools.send(ObjectRef::new(name).within(namespace));
    }

    /// An object that the operator made was touched: whoever its labels name puts it right.
    pub(crate) fn object<K: Resource<DynamicType = ()>>(&self, object: &K, now: Now) {
        let namespace = object.namespace().unwrap_or_default();
        if let Some(pool) = object.labels().get(names::POOL_LABEL) {
            self.pool(&namespace, pool);
        } else if let Some(provider) = object.labels().get(names::PROVIDER_LABEL) {
            let display = manifests::display(&K::kind(&()), &object.name_any());
            let seen = match now {
                Now::There => Seen::At(apply::content_version(object.meta())),
                Now::Gone => Seen::Gone,
            };
            self.note(&namespace, provider, |changes| {
                changes.objects.insert(display, seen);
            });
        }
    }

    /// A Pod that a template made: whoever its labels name has something new to say.
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

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectRef<Provider>, Changes>> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Objects that are in an earlier list and not in a later one: their deletions fell into a gap of the watch.
pub(super) fn vanished<K: Resource<DynamicType = ()> + Clone>(before: &[Arc<K>], after: &[Arc<K>]) -> Vec<Arc<K>> {
    let there: HashSet<ObjectRef<K>> = after.iter().map(|object| ObjectRef::from_obj(object.as_ref())).collect();
    before.iter().filter(|object| !there.contains(&ObjectRef::from_obj(object.as_ref()))).cloned().collect()
}
