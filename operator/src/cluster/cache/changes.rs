//! Determines which objects a change of a Provider, a pool or a relay's Pod concerns.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::reflector::{ObjectRef, Store};

use super::{Caches, Now, Triggers};
use crate::crd::{Provider, WorkerPool};
use crate::resources::names::{self, ObjectKey};
use crate::spec::sharing;

/// A change of a Provider triggers the Provider, and those that share a relay with it: the relay's owner, whose
/// configuration contains it, or those that refer to it.
pub(super) fn provider_changes(
    triggers: &Triggers,
    providers: Store<Provider>,
) -> impl FnMut(&Provider, Now) + Send + 'static {
    let triggers = triggers.clone();
    let mut seen = Fingerprints::default();
    move |provider, now| {
        // The relay's owner adds a Provider that moves to it, and the step decides who is served.
        let served = provider.status.as_ref().map(|status| (status.moving, &status.relay));
        if seen.is_new(provider, &served, now) {
            let key = sharing::key(provider);
            triggers.provider(&key.0, &key.1);
            let relay = sharing::relay_key(provider);
            if relay != key {
                triggers.provider(&relay.0, &relay.1);
            }
            for sharer in referring(&providers, &key) {
                triggers.provider(&sharer.0, &sharer.1);
            }
        }
    }
}

/// A change of a pool triggers the pool, its Provider, whose relay must know which models may be at zero, and the pools
/// that may name the same Deployments.
pub(super) fn pool_changes(triggers: &Triggers, caches: &Caches) -> impl FnMut(&WorkerPool, Now) + Send + 'static {
    let (triggers, pools, providers) = (triggers.clone(), caches.pools.clone(), caches.providers.clone());
    let mut seen = Fingerprints::default();
    move |pool, now| {
        // A request may wake a pool for the models that it last advertised.
        if seen.is_new(pool, &pool.status.as_ref().map(|status| &status.models), now) {
            let namespace = pool.namespace().unwrap_or_default();
            triggers.pool(&namespace, &pool.name_any());
            triggers.provider(&namespace, &pool.spec.provider);
            let provider = providers.get(&ObjectRef::new(&pool.spec.provider).within(&namespace));
            if let Some(provider) = provider.filter(|provider| provider.spec.relay_ref.is_some()) {
                let relay = sharing::relay_key(&provider);
                triggers.provider(&relay.0, &relay.1);
            }
            let beside = |other: &Arc<WorkerPool>| {
                other.metadata.namespace == pool.metadata.namespace
                    && other.metadata.name != pool.metadata.name
                    && (other.spec.scales_deployments() || other.spec.target().is_some())
            };
            for other in pools.state().into_iter().filter(beside) {
                triggers.pool(&namespace, &other.name_any());
            }
        }
    }
}

/// Distinguishes external changes from statuses that the operator wrote.
#[derive(Default)]
struct Fingerprints {
    by_uid: HashMap<String, u64>,
}

impl Fingerprints {
    fn is_new(&mut self, object: &impl ResourceExt, more: &impl Hash, now: Now) -> bool {
        let meta = object.meta();
        let uid = meta.uid.clone().unwrap_or_default();
        if now == Now::Gone || meta.deletion_timestamp.is_some() {
            self.by_uid.remove(&uid);
            return true;
        }
        let mut hasher = DefaultHasher::new();
        (meta.generation, &meta.annotations, &meta.labels).hash(&mut hasher);
        more.hash(&mut hasher);
        let now = hasher.finish();
        self.by_uid.insert(uid, now) != Some(now)
    }
}

/// A change of a relay's Pod concerns all Providers that the relay serves.
pub(super) fn relay_pod_changes(triggers: &Triggers, caches: &Caches) -> impl FnMut(&Pod, Now) + Send + use<> {
    let (triggers, providers) = (triggers.clone(), caches.providers.clone());
    move |pod, _| {
        triggers.pod(pod);
        let Some(name) = pod.labels().get(names::PROVIDER_LABEL) else { return };
        let relay = (pod.namespace().unwrap_or_default(), name.clone());
        for sharer in referring(&providers, &relay) {
            triggers.provider_reported(&sharer.0, &sharer.1);
        }
    }
}

/// Returns the Providers that name this one in `relayRef`, whether they may or not.
fn referring(providers: &Store<Provider>, relay: &ObjectKey) -> Vec<ObjectKey> {
    let state = providers.state();
    state.iter().filter(|provider| sharing::refers_to(provider, relay)).map(|provider| sharing::key(provider)).collect()
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector;
    use serde_json::json;

    use super::*;

    #[test]
    fn begun_move_requests_pass_of_relay_owner() {
        let (triggers, mut requests) = Triggers::channels();
        let (providers, _writer) = reflector::store();
        let mut changed = provider_changes(&triggers, providers);
        let mut requested = |status: &serde_json::Value| {
            let provider: Provider = serde_json::from_value(json!({
                "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
                "metadata": {"name": "chat", "namespace": "llm", "uid": "u", "generation": 2},
                "spec": {"relayRef": {"name": "front"}}, "status": status,
            }))
            .unwrap();
            changed(&provider, Now::There);
            let mut names = Vec::new();
            while let Ok(request) = requests.providers.try_recv() {
                names.push(request.name);
            }
            names
        };
        let cases = [
            (json!({"relay": "chat"}), true),
            (json!({"relay": "chat", "moving": "WaitingForRelay"}), true),
            (json!({"relay": "chat", "moving": "WaitingForRelay", "queueDepth": 3}), false),
            (json!({"relay": "chat"}), true),
        ];
        for (status, is_new) in cases {
            assert_eq!(requested(&status).contains(&"front".to_owned()), is_new, "{status}");
        }
    }
}
