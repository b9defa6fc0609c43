//! A snapshot of the cached state of a Provider's relays.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use super::relay_pods::{has_ended, relay_pods};
use super::reviewers::{self, Reviewers};
use crate::cluster::cache::Caches;
use crate::context::Context;
use crate::crd::{Provider, WorkerPool};
use crate::manifests::{relay, sidecar};
use crate::relays::state::RelaySnapshot;
use crate::resources::names::{self, ObjectKey};
use crate::spec::sharing::{self, SharingError};

/// The time that a Pod may take, from the moment its kubelet first sees it, until its relay runs or fails. Pulling a
/// large image over a slow line takes minutes.
const STARTS_WITHIN: SignedDuration = SignedDuration::from_mins(10);

/// The time for which a relay is unready because no worker has connected yet, plus a little for its kubelet to check
/// and report.
pub(super) const AWAITS_FIRST_WORKER: Duration = Duration::from_secs(20);

/// A snapshot of the cached state.
pub(super) struct ClusterView {
    /// Relay Pods that are neither being deleted nor finished.
    pub(super) relay_pods: Vec<Arc<Pod>>,
    /// The relay's Deployment.
    pub(super) deployment: Option<Arc<Deployment>>,
    /// Pools of the Provider.
    pub(super) pools: Vec<Arc<WorkerPool>>,
    /// The relays' last report.
    pub(super) reported: Option<Arc<RelaySnapshot>>,
    /// Relays of the namespace that review workers' tokens.
    pub(super) reviewers: Reviewers,
    /// The Provider whose relay serves this one, if it is another; or the reason that none does.
    pub(super) relay: Result<Option<Arc<Provider>>, SharingError>,
    /// Other Providers that the relay serves, with their pools. One that has a relay of its own is among them once its
    /// move has begun.
    pub(super) sharers: Vec<(Arc<Provider>, Vec<Arc<WorkerPool>>)>,
    /// Names at the relay of Providers that cannot be parsed and may refer to this one.
    pub(super) unreadable: Vec<String>,
    /// The relays of its own of a Provider that refers to another one.
    pub(super) own: Option<OwnRelays>,
}

/// The relays of a Provider that is moving to those of another one.
#[derive(Debug, Default)]
pub(super) struct OwnRelays {
    /// Their Deployment; `None` if it has no replicas any more.
    pub(super) deployment: Option<Arc<Deployment>>,
    /// The Pods that have not ended, including those that are being deleted.
    pub(super) pods: Vec<Arc<Pod>>,
    /// The last report of the other Provider's relays, which includes their configuration.
    pub(super) reported_by_others: Option<Arc<RelaySnapshot>>,
    /// The ready Pods of its pools that have a worker.
    pub(super) workers: Vec<Arc<Pod>>,
    /// The pools that have or await Pods, and no ready worker.
    pub(super) starting: Vec<String>,
    /// Providers that referred to this one before its move began.
    pub(super) referring: Vec<String>,
}

impl ClusterView {
    pub(super) fn now(ctx: &Context, caches: &Caches, provider: &Provider) -> Self {
        let (namespace, name) = sharing::key(provider);
        let relay = caches.relay_of(provider);
        let is_own = provider.spec.relay_ref.is_none();
        let (relay_namespace, relay_name) = sharing::relay_key(provider);
        let staying_relays =
            || relay_pods(caches, &relay_namespace, &relay_name).into_iter().filter(|pod| is_staying(pod)).collect();
        let with_pools = |sharer: Arc<Provider>| {
            let (namespace, name) = sharing::key(&sharer);
            (sharer, caches.pools_of(&namespace, &name))
        };
        let sharers = caches.sharers(provider).into_iter().filter(|sharer| !sharing::awaits_move(sharer));
        let pools = caches.pools_of(&namespace, &name);
        let may_refer = |key: &ObjectKey| is_own && sharing::grants(provider, key);
        let unreadable = caches.unreadable_providers.all().into_iter().filter(may_refer);
        Self {
            unreadable: unreadable.map(|key| sharing::name_in(&namespace, &key)).collect(),
            own: if is_own { None } else { OwnRelays::of(ctx, caches, provider, &pools) },
            relay_pods: if relay.is_ok() { staying_relays() } else { Vec::new() },
            deployment: is_own.then(|| caches.relay_deployment(provider)).flatten(),
            pools,
            reported: ctx.relays.of(&namespace, &name),
            reviewers: reviewers::of(caches, &namespace),
            sharers: sharers.map(with_pools).collect(),
            relay,
        }
    }

    /// True if the relay's Pods have a token for the API server.
    pub(super) fn has_api_access(&self) -> bool {
        let template = || self.deployment.as_ref()?.spec.as_ref()?.template.spec.as_ref();
        template().is_some_and(|pod| pod.volumes.iter().flatten().any(|volume| volume.name == relay::API_ACCESS))
    }

    /// Returns the names of the Pods that should run the newest configuration.
    pub(super) fn pod_names(&self) -> BTreeSet<String> {
        self.relay_pods.iter().map(|pod| pod.name_any()).collect()
    }

    /// True if every relay that may run an older configuration runs the one with this hash.
    pub(super) fn is_confirmed(&self, hash: &str, now: Timestamp) -> bool {
        let pods: Vec<String> =
            self.relay_pods.iter().filter(|pod| may_hold_older(pod, now)).map(|pod| pod.name_any()).collect();
        pods.is_empty() || self.relay_reports().is_some_and(|reported| reported.all_run(&pods, hash))
    }

    /// Returns the last report of the relays in `relay_pods`.
    pub(super) fn relay_reports(&self) -> Option<&RelaySnapshot> {
        let of_others = self.own.as_ref().and_then(|own| own.reported_by_others.as_deref());
        of_others.or(self.reported.as_deref())
    }
}

impl OwnRelays {
    fn of(ctx: &Context, caches: &Caches, provider: &Provider, pools: &[Arc<WorkerPool>]) -> Option<Self> {
        let (namespace, name) = sharing::key(provider);
        let has_label = |pod: &Pod, label: &str, value: &str| {
            pod.metadata.namespace.as_deref() == Some(&namespace)
                && pod.labels().get(label).is_some_and(|name| name == value)
        };
        let deployment =
            caches.relay_deployment(provider).filter(|deployment| sharing::runs_relays(provider, deployment));
        let pods = relay_pods(caches, &namespace, &name);
        if deployment.is_none() && pods.is_empty() {
            return None;
        }
        let is_worker = |pod: &Arc<Pod>| {
            pools.iter().any(|pool| has_label(pod, names::POOL_LABEL, &pool.name_any()))
                && is_staying(pod)
                && sidecar::worker_of(pod).is_some()
        };
        let (workers, unready): (Vec<_>, Vec<_>) =
            caches.pool_pods.state().into_iter().filter(is_worker).partition(|pod| is_ready(pod));
        let is_starting = |pool: &&Arc<WorkerPool>| {
            let has_any =
                |pods: &[Arc<Pod>]| pods.iter().any(|pod| has_label(pod, names::POOL_LABEL, &pool.name_any()));
            let is_wanted = pool.spec.replicas.is_some_and(|replicas| replicas > 0);
            (is_wanted || has_any(&unready)) && !has_any(&workers)
        };
        let relay = sharing::relay_key(provider);
        let key = (namespace.clone(), name.clone());
        let refers = |other: &Arc<Provider>| sharing::refers_to(other, &key) && sharing::key(other) != key;
        // One that refers to it afterwards is chained.
        let has_begun = provider.status.as_ref().is_some_and(|status| status.moving.is_some());
        let others = if has_begun { Vec::new() } else { caches.providers.state() };
        Some(Self {
            deployment,
            pods,
            reported_by_others: ctx.relays.of(&relay.0, &relay.1),
            starting: pools.iter().filter(is_starting).map(|pool| pool.name_any()).collect(),
            workers,
            referring: others.iter().filter(|it| refers(it)).map(|it| it.name_any()).collect(),
        })
    }
}

/// True if the Pod's relay may run, or may be about to run, with a configuration that it read before the newest was
/// written. Other Pods are not waited for: a Pod that cannot start would otherwise block every rotation.
///
/// - Without a node, nothing is mounted yet.
/// - A relay that runs, or that just ended and is restarted at once, holds what it read.
/// - A relay that is being started (`ContainerCreating`, or no state yet) may already have its files mounted, and may
///   start with them before the kubelet has refreshed them. This ends: it starts, or it fails for a reason that is
///   shown. If neither happens within [`STARTS_WITHIN`], as with a volume that cannot be mounted, the kubelet retries
///   continuously.
/// - Any other waiting reason (`ImagePullBackOff`, `CreateContainerConfigError`, `CrashLoopBackOff`) is a failure with
///   a back-off in the kubelet. No relay runs then, and each time the kubelet handles the Pod again, which the
///   annotation with the newest hash also triggers, its files are refreshed. Between two crashes the relay does run,
///   and is waited for like any other.
fn may_hold_older(pod: &Pod, now: Timestamp) -> bool {
    if pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none()) {
        return false;
    }
    let Some(status) = &pod.status else { return true };
    let state = relay_state(pod);
    if state.is_some_and(|state| state.running.is_some() || state.terminated.is_some()) {
        return true;
    }
    let reason = state.and_then(|state| state.waiting.as_ref()?.reason.as_deref());
    let is_starting = reason.is_none_or(|reason| ["ContainerCreating", "PodInitializing"].contains(&reason));
    let taken_at = status.start_time.as_ref().map(|time| time.0);
    is_starting && taken_at.is_none_or(|taken_at| now.duration_since(taken_at) < STARTS_WITHIN)
}

fn relay_state(pod: &Pod) -> Option<&ContainerState> {
    let mut containers = pod.status.as_ref()?.container_statuses.iter().flatten();
    containers.find(|container| container.name == names::RELAY_CONTAINER)?.state.as_ref()
}

/// True if the relay may still be waiting for its first worker.
pub(super) fn has_just_started(pod: &Pod, now: Timestamp) -> bool {
    let started = || relay_state(pod)?.running.as_ref()?.started_at.as_ref();
    started().is_some_and(|at| {
        Duration::try_from(now.duration_since(at.0)).map_or(true, |since| since < AWAITS_FIRST_WORKER)
    })
}

fn is_staying(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && !has_ended(pod)
}

/// True if the Pod's `Ready` condition is true.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::relays::state::RelayReport;

    fn at(minutes: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + minutes * 60).unwrap()
    }

    fn pod(node: Option<&str>, status: &Value) -> Arc<Pod> {
        let pod = json!({"metadata": {"name": "b"}, "spec": {"nodeName": node, "containers": []}, "status": status});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    /// The kubelet saw the Pod at minute 0.
    fn with_relay(state: &Value) -> Arc<Pod> {
        let of = |name: &str, state: &Value| json!({"name": name, "state": state, "ready": false, "restartCount": 9, "image": "", "imageID": ""});
        let proxy = of("proxy", &json!({"running": {}}));
        pod(Some("n"), &json!({"startTime": at(0).to_string(), "containerStatuses": [proxy, of("relay", state)]}))
    }

    /// True if a configuration is confirmed that relay `a` runs, while this Pod reports nothing.
    fn is_confirmed_with_silent_pod(pod: Arc<Pod>, minutes: i64) -> bool {
        let value = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "n", "containers": []}});
        let report = RelayReport { config_hash: Some("new".to_owned()), ..RelayReport::default() };
        let relays = [("a".to_owned(), Ok(report)), ("b".to_owned(), Err("connection failed".to_owned()))];
        let reported = Some(Arc::new(RelaySnapshot { relays: relays.into(), ..RelaySnapshot::default() }));
        let pods = vec![Arc::new(serde_json::from_value(value).unwrap()), pod];
        ClusterView { reported, ..view(pods, None) }.is_confirmed("new", at(minutes))
    }

    fn view(relay_pods: Vec<Arc<Pod>>, deployment: Option<Arc<Deployment>>) -> ClusterView {
        ClusterView {
            reviewers: Reviewers::default(),
            relay: Ok(None),
            own: None,
            unreadable: Vec::new(),
            sharers: Vec::new(),
            relay_pods,
            deployment,
            pools: Vec::new(),
            reported: None,
        }
    }

    #[test]
    fn running_or_just_ended_relay_is_awaited() {
        for state in [json!({"running": {}}), json!({"terminated": {"exitCode": 1}})] {
            assert!(!is_confirmed_with_silent_pod(with_relay(&state), 1), "{state}");
            assert!(!is_confirmed_with_silent_pod(with_relay(&state), 10_000), "{state}");
        }
    }

    #[test]
    fn relay_failing_to_start_is_not_awaited() {
        for reason in ["ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "CrashLoopBackOff"] {
            assert!(is_confirmed_with_silent_pod(with_relay(&json!({"waiting": {"reason": reason}})), 0), "{reason}");
        }
    }

    #[test]
    fn starting_relay_is_awaited_for_limited_time() {
        let creating = |reason| with_relay(&json!({"waiting": {"reason": reason}}));
        for reason in ["ContainerCreating", "PodInitializing"] {
            assert!(!is_confirmed_with_silent_pod(creating(reason), 9), "{reason}");
            assert!(is_confirmed_with_silent_pod(creating(reason), 10), "{reason}");
        }
        let silent = pod(Some("n"), &json!({"startTime": at(0).to_string()}));
        assert!(!is_confirmed_with_silent_pod(silent.clone(), 9) && is_confirmed_with_silent_pod(silent, 10));
        // The kubelet has not seen it yet.
        assert!(!is_confirmed_with_silent_pod(pod(Some("n"), &json!({})), 10_000));
    }

    #[test]
    fn token_of_relays_is_found_in_their_deployment() {
        let has_token = |volumes: Value| {
            let spec = json!({"selector": {}, "template": {"spec": {"containers": [], "volumes": volumes}}});
            let deployment = serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap();
            view(Vec::new(), Some(Arc::new(deployment))).has_api_access()
        };
        assert!(has_token(json!([{"name": "config"}, {"name": "api-access"}])));
        assert!(!has_token(json!([{"name": "config"}])) && !view(Vec::new(), None).has_api_access());
    }

    #[test]
    fn relay_without_node_is_not_awaited() {
        assert!(is_confirmed_with_silent_pod(pod(None, &json!({})), 0));
    }
}
