//! The Pods of a Provider's own relays.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::cluster::cache::Caches;
use crate::resources::names;

/// Returns the Pods of a Provider's own relays that have not ended, including those that are being deleted.
pub(super) fn relay_pods(caches: &Caches, namespace: &str, name: &str) -> Vec<Arc<Pod>> {
    let is_own = |pod: &Arc<Pod>| {
        pod.metadata.namespace.as_deref() == Some(namespace)
            && pod.labels().get(names::PROVIDER_LABEL).is_some_and(|provider| provider == name)
            && !has_ended(pod)
    };
    caches.relay_pods.state().into_iter().filter(is_own).collect()
}

/// True if the Pod's containers have ended.
pub(super) fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}
