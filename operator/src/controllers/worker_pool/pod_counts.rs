//! Counts a pool's Pods by state: pure.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::crd::WorkerPool;
use crate::manifests::sidecar;
use crate::resources::conditions::STALLED;
use crate::resources::names;

/// The counts of the pool's Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodCounts {
    /// Pods that are neither leaving nor finished.
    pub pods: i32,
    /// Those of them that are ready.
    pub ready: i32,
    /// Those that have been ready for longer than [`SETTLED`].
    pub settled: i32,
    /// Unready Pods whose worker is connected but has had nothing to serve for longer than [`LOADED`].
    pub silent: i32,
    /// The time until the next Pod becomes silent.
    pub silent_in: Option<Duration>,
    /// Pods with a worker.
    pub injected: i32,
    /// Those whose worker cannot resolve the name of the relay's Service.
    pub node_names: i32,
    /// Those whose worker differs from the one that they would get now.
    pub outdated: i32,
    /// Sorted names of Pods that lack the worker and should have it.
    pub not_injected: Vec<String>,
    /// Pods that wait because there was no pool.
    pub gated: Vec<Gated>,
}

/// A Pod that cannot be scheduled until it is recreated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gated {
    /// Its name.
    pub name: String,
    /// Its uid, which distinguishes it from a successor of the same name.
    pub uid: String,
}

impl Gated {
    fn of(pod: &Pod) -> Self {
        let meta = &pod.metadata;
        Self { name: meta.name.clone().unwrap_or_default(), uid: meta.uid.clone().unwrap_or_default() }
    }
}

/// The time that the worker of a ready Pod may take to register before this is reported.
pub const SETTLED: Duration = Duration::from_secs(30);

/// The time that a worker's backend may take to load its model before this is reported. Many take longer, so it is only
/// reported.
pub const LOADED: Duration = Duration::from_secs(600);

/// A Pod that was created with the gate this long after its pool became usable did not get it from the operator's
/// webhook, and its replacement would have it too.
const LATE: Duration = Duration::from_secs(60);

/// The values that Pods are compared with.
#[derive(Clone, Copy, Debug)]
pub struct Measure<'a> {
    /// Hash of the worker as Pods would get it now.
    pub hash: &'a str,
    /// Its image, for Pods without a hash: those that an older operator injected.
    pub image: &'a str,
    /// The time since which the pool is usable; Pods that were gated before waited for that. `None` while it is not, or
    /// was not until now.
    pub usable: Option<Timestamp>,
    /// Names of Pods whose workers are connected and have nothing to serve.
    pub idle: &'a BTreeSet<String>,
    /// The current time.
    pub now: Timestamp,
}

/// Returns the Pods that wait for a pool which selected them. Without that pool, nothing releases them, and their
/// creators did not request a worker.
pub fn orphans<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> Vec<Gated> {
    let waits = |pod: &&Pod| {
        let annotations = pod.metadata.annotations.as_ref();
        pod.metadata.deletion_timestamp.is_none()
            && is_gated(pod)
            && has_controller(pod)
            && annotations.is_some_and(|annotations| annotations.contains_key(names::SELECTED_ANNOTATION))
    };
    pods.into_iter().filter(waits).map(Gated::of).collect()
}

/// Counts the Pods.
pub fn take<'a>(pods: impl IntoIterator<Item = &'a Pod>, measure: Measure<'_>) -> PodCounts {
    let mut counts = PodCounts::default();
    for pod in pods {
        if pod.metadata.deletion_timestamp.is_some() || is_over(pod) {
            continue;
        }
        count(&mut counts, pod, measure);
    }
    counts.not_injected.sort();
    counts
}

fn count(counts: &mut PodCounts, pod: &Pod, measure: Measure<'_>) {
    let name = pod.metadata.name.clone().unwrap_or_default();
    if is_gated(pod) && has_controller(pod) && !is_late(pod, measure.usable) {
        counts.gated.push(Gated::of(pod));
        return;
    }
    counts.pods += 1;
    if let Some(ready) = ready(pod) {
        counts.ready += 1;
        let since = ready.last_transition_time.as_ref().map(|time| measure.now.duration_since(time.0));
        counts.settled += i32::from(since.is_none_or(|since| since >= signed(SETTLED)));
    } else if let Some(since) = unready_since(pod).filter(|_| measure.idle.contains(&name)) {
        match Duration::try_from(signed(LOADED) - measure.now.duration_since(since)) {
            Ok(left) if !left.is_zero() => {
                counts.silent_in = Some(counts.silent_in.map_or(left, |soonest| soonest.min(left)));
            }
            Ok(_) | Err(_) => counts.silent += 1,
        }
    }
    match sidecar::worker_of(pod) {
        Some(worker) => {
            let used = worker.image.as_deref().unwrap_or_default();
            counts.injected += 1;
            counts.node_names += i32::from(uses_node_names(pod));
            // By the hash if there is one: another webhook may have rewritten the image since.
            let same = worker_hash(pod).map_or(used == measure.image, |hash| hash == measure.hash);
            counts.outdated += i32::from(!same);
        }
        None if is_exempt(pod) => {}
        None => counts.not_injected.push(name),
    }
}

fn uses_node_names(pod: &Pod) -> bool {
    let policy = |spec: &PodSpec| sidecar::uses_node_names(spec.host_network == Some(true), spec.dns_policy.as_deref());
    pod.spec.as_ref().is_some_and(policy)
}

fn worker_hash(pod: &Pod) -> Option<&str> {
    pod.metadata.annotations.as_ref()?.get(names::WORKER_HASH_ANNOTATION).map(String::as_str)
}

fn is_exempt(pod: &Pod) -> bool {
    let labels = serde_json::to_value(&pod.metadata.labels).ok();
    sidecar::exemption(labels.as_ref()).is_some()
}

fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref());
    gates.into_iter().flatten().any(|gate| gate.name == names::NO_SUCH_POOL_GATE)
}

fn is_late(pod: &Pod, usable: Option<Timestamp>) -> bool {
    let (Some(pod), Some(usable)) = (&pod.metadata.creation_timestamp, usable) else { return false };
    pod.0.duration_since(usable) > signed(LATE)
}

/// Returns the time since which a pool is usable, by its conditions: its creation, or the end of its last stall.
pub fn usable_since(pool: &WorkerPool, conditions: &[Condition]) -> Option<Timestamp> {
    let created = pool.metadata.creation_timestamp.as_ref().map(|time| time.0);
    match conditions.iter().find(|condition| condition.type_ == STALLED) {
        Some(stalled) if stalled.status == "True" => None,
        Some(stalled) => created.max(Some(stalled.last_transition_time.0)),
        None => created,
    }
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

/// True if a controller recreates the Pod after it is deleted.
fn has_controller(pod: &Pod) -> bool {
    pod.metadata.owner_references.iter().flatten().any(|owner| owner.controller == Some(true))
}

fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn ready(pod: &Pod) -> Option<&PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Returns the time since which a Pod whose containers may run is not ready. A sidecar is part of its initialization.
fn unready_since(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let since = |type_: &str, status: &str| {
        let condition = conditions.iter().find(|condition| condition.type_ == type_ && condition.status == status)?;
        condition.last_transition_time.as_ref().map(|time| time.0)
    };
    since("Ready", "False").max(since("Initialized", "True"))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::{Value, json};

    use super::*;

    fn worker_setting() -> Value {
        json!({"name": "WORKER_CONFIG", "value": sidecar::CONFIG_FILE})
    }

    fn pod(name: &str, change: &Value) -> Pod {
        let mut pod = json!({
            "metadata": {
                "name": name, "uid": format!("uid-{name}"), "labels": {"modelrelay.io/pool": "llama"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u", "controller": true}],
            },
            "spec": {
                "containers": [{"name": "vllm"}],
                "initContainers": [{
                    "name": "modelrelay-worker", "image": "worker:1", "restartPolicy": "Always", "env": [worker_setting()],
                }],
            },
        });
        json_patch::merge(&mut pod, change);
        serde_json::from_value(pod).unwrap()
    }

    fn counted(pods: &[Pod]) -> PodCounts {
        let at = |second| Timestamp::from_second(second).unwrap();
        let idle = ["idle", "late", "loading"].map(str::to_owned).into();
        take(pods, Measure { hash: "f00d", image: "worker:1", usable: Some(at(100)), idle: &idle, now: at(1000) })
    }

    fn ready_since(second: i64) -> Value {
        let time = Timestamp::from_second(second).unwrap().to_string();
        json!({"status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": time}]}})
    }

    #[test]
    fn worker_is_recognized_by_its_container() {
        let lacking = json!({"spec": {"initContainers": null}, "metadata": {"annotations": {"injected": "true"}}});
        let plain = |env: Value| {
            let worker = json!([{"name": "modelrelay-worker", "image": "worker:1", "env": env}]);
            pod("c", &json!({"spec": {"initContainers": null, "containers": worker}}))
        };
        let counts =
            counted(&[pod("z", &lacking), pod("b", &lacking), plain(json!([worker_setting()])), pod("d", &json!({}))]);
        assert_eq!((counts.pods, counts.injected, counts.not_injected), (4, 2, vec!["b".to_owned(), "z".to_owned()]));
        // Another program of the same name is no worker.
        let counts = counted(&[plain(json!([])), plain(json!([{"name": "WORKER_CONFIG", "value": "/w.yaml"}]))]);
        assert_eq!((counts.injected, counts.outdated, counts.not_injected), (0, 0, vec!["c".to_owned(); 2]));
    }

    #[test]
    fn leaving_and_finished_pods_are_excluded() {
        let leaving = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let counts = counted(&[pod("a", &leaving), pod("b", &json!({"status": {"phase": "Failed"}}))]);
        assert_eq!(counts, PodCounts::default());
    }

    #[test]
    fn worker_of_other_hash_or_image_is_outdated() {
        let of = |annotations: Value, image: &str| {
            let worker = json!([{"name": "modelrelay-worker", "image": image, "env": [worker_setting()]}]);
            counted(&[pod("a", &json!({"metadata": {"annotations": annotations}, "spec": {"initContainers": worker}}))])
        };
        let hash = |hash: &str| json!({"modelrelay.io/worker-hash": hash});
        assert_eq!(of(hash("f00d"), "mirror.example/worker:1").outdated, 0);
        assert_eq!(of(hash("beef"), "worker:1").outdated, 1);
        assert_eq!(of(json!({}), "worker:1").outdated, 0);
        assert_eq!(of(json!({}), "worker:0").outdated, 1);
    }

    #[test]
    fn controlled_gated_pods_are_listed_for_deletion() {
        let gated =
            json!({"spec": {"schedulingGates": [{"name": "modelrelay.io/no-such-pool"}], "initContainers": null}});
        let mut alone = pod("b", &gated);
        alone.metadata.owner_references = None;
        let mut late = pod("d", &gated);
        late.metadata.creation_timestamp = Some(Time(Timestamp::from_second(161).unwrap()));
        let foreign = json!({"spec": {"schedulingGates": [{"name": "example.com/quota"}]}});
        let counts = counted(&[pod("a", &gated), alone, pod("c", &foreign), late]);
        assert_eq!(counts.gated, [Gated { name: "a".into(), uid: "uid-a".into() }]);
        assert_eq!((counts.pods, counts.not_injected), (3, vec!["b".to_owned(), "d".to_owned()]));
    }

    #[test]
    fn members_without_requests_lack_nothing() {
        let member = json!({
            "metadata": {"labels": {"leaderworkerset.sigs.k8s.io/worker-index": "1"}}, "spec": {"initContainers": null},
        });
        assert_eq!(counted(&[pod("a", &member)]).not_injected, Vec::<String>::new());
    }

    #[test]
    fn backend_unready_for_ten_minutes_is_silent() {
        let waits = |name: &str, initialized: i64, unready: i64| {
            let condition = |type_: &str, status: &str, second| {
                let time = Timestamp::from_second(second).unwrap().to_string();
                json!({"type": type_, "status": status, "lastTransitionTime": time})
            };
            let conditions = [condition("Initialized", "True", initialized), condition("Ready", "False", unready)];
            pod(name, &json!({"status": {"conditions": conditions}}))
        };
        let silence = |pods: &[Pod]| {
            let counts = counted(pods);
            (counts.silent, counts.silent_in.map(|left| left.as_secs()))
        };
        assert_eq!(silence(&[waits("late", 400, 0)]), (1, None));
        assert_eq!(silence(&[waits("loading", 401, 0)]), (0, Some(1)));
        // It was ready before.
        assert_eq!(silence(&[waits("loading", 0, 500)]), (0, Some(100)));
        assert_eq!(silence(&[waits("late", 0, 1), waits("loading", 0, 500), waits("idle", 0, 450)]), (1, Some(50)));
        assert_eq!(silence(&[waits("no-worker-of-it-is-idle", 0, 0), pod("idle", &json!({}))]), (0, None));
        assert_eq!(silence(&[pod("idle", &ready_since(0))]), (0, None));
    }

    #[test]
    fn workers_with_names_of_node_are_counted() {
        let spec = |spec: Value| counted(&[pod("a", &json!({"spec": spec}))]).node_names;
        assert_eq!(spec(json!({"hostNetwork": true, "dnsPolicy": "ClusterFirst"})), 1);
        assert_eq!(spec(json!({"hostNetwork": true})), 1);
        assert_eq!(spec(json!({"dnsPolicy": "Default"})), 1);
        assert_eq!(spec(json!({"hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"})), 0);
        assert_eq!(spec(json!({"hostNetwork": true, "dnsPolicy": "None"})), 0);
        assert_eq!(spec(json!({"dnsPolicy": "ClusterFirst"})), 0);
    }

    #[test]
    fn pod_settles_half_minute_after_ready() {
        let counts = counted(&[pod("a", &ready_since(999)), pod("b", &ready_since(970)), pod("c", &json!({}))]);
        assert_eq!((counts.ready, counts.settled), (2, 1));
    }
}
