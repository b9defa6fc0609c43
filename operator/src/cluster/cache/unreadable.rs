//! The objects of users that exist and cannot be parsed.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::ResourceExt;

use crate::resources::names::ObjectKey;

/// The names of these objects. A process that never parsed such an object does not have it in a store, and must not
/// take it for deleted.
#[derive(Clone, Debug, Default)]
pub struct UnreadableObjects {
    // Locked for a lookup or an insertion, never across an await.
    names: Arc<Mutex<Names>>,
}

#[derive(Debug, Default)]
struct Names {
    now: BTreeSet<ObjectKey>,
    /// Those of a list that is being received: others are gone.
    listed: Option<BTreeSet<ObjectKey>>,
}

impl UnreadableObjects {
    /// Returns namespaces and names.
    pub fn all(&self) -> BTreeSet<ObjectKey> {
        self.lock().now.clone()
    }

    /// Records an object that a watch delivered.
    pub(crate) fn note(&self, object: &impl ResourceExt, is_readable: bool) {
        let key = (object.namespace().unwrap_or_default(), object.name_any());
        let names = &mut *self.lock();
        for set in std::iter::once(&mut names.now).chain(&mut names.listed) {
            if is_readable {
                set.remove(&key);
            } else {
                set.insert(key.clone());
            }
        }
    }

    /// Begins a list of all objects.
    pub(super) fn begin_list(&self) {
        self.lock().listed = Some(BTreeSet::new());
    }

    /// Ends a list of all objects.
    pub(super) fn end_list(&self) {
        let names = &mut *self.lock();
        if let Some(listed) = names.listed.take() {
            names.now = listed;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
