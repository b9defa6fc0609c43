//! What the caches know of a Provider's relays at one moment.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use crate::cache::Caches;
use crate::context::Context;
use crate::crd::WorkerPool;
use crate::names;
use crate::relay_state::RelaySnapshot;

/// One moment.
pub(super) struct Look {
    /// Relay Pods that are to stay.
    pub(super) relay_pods: Vec<Arc<Pod>>,
    /// The relay's Deployment.
    pub(super) deployment: Option<Arc<Deployment>>,
    /// Pools of the Provider.
    pub(super) pools: Vec<Arc<WorkerPool>>,
    /// What the relays last reported.
    pub(super) reported: Option<Arc<RelaySnapshot>>,
}

impl Look {
    pub(super) fn now(ctx: &Context, caches: &Caches, namespace: &str, provider: &str) -> Self {
        let is_relay = |pod: &Arc<Pod>| {
            pod.metadata.namespace.as_deref() == Some(namespace)
                && pod.labels().get(names::PROVIDER_LABEL).map(String::as_str) == Some(provider)
                && is_staying(pod)
        };
        Self {
            relay_pods: caches.relay_pods.state().into_iter().filter(is_relay).collect(),
            deployment: caches.deployments.get(&ObjectRef::new(&names::relay(provider)).within(namespace)),
            pools: caches.pools_of(namespace, provider),
            reported: ctx.relays.of(namespace, provider),
        }
    }

    /// Pods that should run the newest configuration.
    pub(super) fn pod_names(&self) -> BTreeSet<String> {
        self.relay_pods.iter().map(|pod| pod.name_any()).collect()
    }

    /// Whether every relay accepts what the configuration with this hash says. A Pod that has no node yet will start with it.
    pub(super) fn is_confirmed(&self, hash: &str) -> bool {
        let has_node = |pod: &&Arc<Pod>| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        let started: Vec<String> = self.relay_pods.iter().filter(has_node).map(|pod| pod.name_any()).collect();
        started.is_empty() || self.reported.as_ref().is_some_and(|reported| reported.all_run(&started, hash))
    }
}

fn is_staying(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && !matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether the Pod's own condition says so.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
