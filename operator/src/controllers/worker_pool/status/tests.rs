use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::controllers::worker_pool::residency::SlotResidency;
use crate::crd::worker_pool::SlotState;
use crate::manifests::testing;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(second).unwrap())
}

fn pool(change: &Value) -> WorkerPool {
    let mut spec = json!({
        "provider": "local", "template": {"spec": {"containers": [{"name": "vllm"}]}},
        "scaling": {"minReplicas": 0, "maxReplicas": 4},
    });
    json_patch::merge(&mut spec, change);
    testing::pool(&spec)
}

fn injecting() -> WorkerPool {
    pool(&json!({"template": null, "scaling": null}))
}

fn known(connected: i32, models: &[&str]) -> Workers {
    let models = models.iter().map(|&model| model.to_owned()).collect();
    Workers::Known { connected, serving: connected, idle: 0, models }
}

fn rollout(desired: i32, done: bool) -> Option<Rollout> {
    Some(Rollout { scaled: true, desired, done, ..Rollout::default() })
}

fn counts(pods: i32) -> PodCounts {
    PodCounts { pods, ready: pods, settled: pods, injected: pods, ..PodCounts::default() }
}

/// A pool that serves with two Pods; each test changes the relevant fields.
struct Case {
    pool: WorkerPool,
    previous: WorkerPoolStatus,
    stall: Option<(Reason, String)>,
    provider: ProviderState,
    provider_problem: Option<String>,
    counts: PodCounts,
    workers: Workers,
    residency: Option<Residency>,
    rollout: Option<Rollout>,
    wakeable: bool,
    standing: ReplicaOwner,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            pool: pool(&json!({})),
            previous: WorkerPoolStatus::default(),
            stall: None,
            provider: ProviderState::Present,
            provider_problem: None,
            counts: counts(2),
            workers: known(2, &["m"]),
            residency: None,
            rollout: rollout(2, true),
            wakeable: true,
            standing: ReplicaOwner::Alone,
        }
    }
}

impl Case {
    fn status(&self) -> WorkerPoolStatus {
        let facts = PoolFacts {
            pool: &self.pool,
            previous: &self.previous,
            stall: self.stall.clone(),
            provider: self.provider,
            provider_problem: self.provider_problem.clone(),
            counts: &self.counts,
            not_created: None,
            workers: self.workers.clone(),
            residency: self.residency.clone(),
            rollout: self.rollout.clone(),
            wakeable: self.wakeable,
            standing: self.standing,
            dispute: None,
            outdated: 0,
        };
        status(&facts, &at(1))
    }

    /// Returns Ready, Reconciling and Stalled as `T`, `F` or `U` each, and the reason of Ready.
    fn ready_summary(&self) -> (String, String) {
        let status = self.status();
        let types: Vec<&str> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
        assert_eq!(types, [READY, RECONCILING, STALLED]);
        (status.conditions.iter().map(|one| &one.status[..1]).collect(), status.conditions[0].reason.clone())
    }

    fn is(&self, letters: &str, reason: Reason) {
        assert_eq!(self.ready_summary(), (letters.to_owned(), reason.as_str().to_owned()));
    }
}

#[test]
fn pool_with_worker_serves() {
    Case::default().is("TFF", Reason::Serving);
    let status = Case::default().status();
    assert_eq!(
        (status.replicas, status.connected, status.models, status.model_count, status.selector.as_deref()),
        (Some(2), Some(2), vec!["m".to_owned()], Some(1), Some("modelrelay.io/pool=llama"))
    );
}

#[test]
fn serving_pool_is_reconciling_while_pods_are_replaced() {
    Case { rollout: rollout(2, false), ..Case::default() }.is("TTF", Reason::Serving);
}

#[test]
fn pool_without_provider_waits() {
    let case = Case { provider: ProviderState::Missing, workers: Workers::Unknown, rollout: None, ..Case::default() };
    case.is("FTF", Reason::ProviderNotFound);
    Case { provider: ProviderState::Disabled, workers: known(0, &[]), ..Case::default() }
        .is("FFF", Reason::ProviderDisabled);
}

#[test]
fn pool_with_all_slots_quarantined_serves_nothing() {
    let held = |worker: &str, state| SlotResidency {
        worker: worker.to_owned(),
        slot: "gpu0".to_owned(),
        state,
        resident: None,
        target: None,
        since: Timestamp::UNIX_EPOCH,
        failures: Vec::new(),
        last_failure: None,
    };
    let of = |states: [SlotState; 2]| Case {
        residency: Some(Residency { slots: vec![held("w1", states[0]), held("w2", states[1])] }),
        ..Case::default()
    };
    of([SlotState::Ready, SlotState::Loading]).is("TFF", Reason::Serving);
    of([SlotState::Ready, SlotState::Quarantined]).is("TFF", Reason::SlotsQuarantined);
    let all = of([SlotState::Quarantined, SlotState::Quarantined]);
    all.is("FFF", Reason::SlotsQuarantined);
    let message = "2 slots are quarantined out of 2, slot gpu0 of worker w1 first: its memory could not be freed";
    assert_eq!(all.status().conditions[0].message, message);
    // The older Pods have no slots, and serve.
    let rolling = Case { workers: known(9, &["m"]), ..of([SlotState::Quarantined, SlotState::Quarantined]) };
    rolling.is("TFF", Reason::SlotsQuarantined);
    // Nothing new is known about it.
    let silent = Case { previous: all.status(), workers: Workers::Unknown, residency: None, ..Case::default() };
    silent.is("FFF", Reason::SlotsQuarantined);
}

#[test]
fn intentional_zero_is_ready() {
    let zero = || Case { rollout: rollout(0, true), counts: counts(0), workers: known(0, &[]), ..Case::default() };
    zero().is("TFF", Reason::ScaledToZero);
    Case { pool: pool(&json!({"scaling": null, "replicas": 0})), ..zero() }.is("TFF", Reason::ScaledToZero);
    Case { wakeable: false, ..zero() }.is("FFT", Reason::ModelsUnknown);
}

#[test]
fn models_are_kept_while_no_worker_advertises_any() {
    let previous = WorkerPoolStatus {
        models: vec!["a".into()],
        model_count: Some(40),
        connected: Some(3),
        ..WorkerPoolStatus::default()
    };
    for (workers, connected) in [(known(0, &[]), 0), (Workers::Unknown, 3), (Workers::Silent, 3)] {
        let status = Case { previous: previous.clone(), workers, ..Case::default() }.status();
        assert_eq!(
            (status.models, status.model_count, status.connected),
            (vec!["a".to_owned()], Some(40), Some(connected))
        );
    }
}

#[test]
fn first_32_models_are_listed_and_all_counted() {
    let models: Vec<String> = (0..40).map(|number| format!("m{number:02}")).collect();
    let workers = known(1, &models.iter().map(String::as_str).collect::<Vec<_>>());
    let status = Case { workers, ..Case::default() }.status();
    assert_eq!((status.models.len(), status.models[31].as_str(), status.model_count), (32, "m31", Some(40)));
}

#[test]
fn new_operator_without_reports_changes_nothing() {
    let before = Case::default().status();
    let mut case = Case { previous: before.clone(), workers: Workers::Unknown, ..Case::default() };
    assert_eq!(case.status(), before);
    case.previous = WorkerPoolStatus::default();
    case.is("UFF", Reason::RelaysUnknown);
    case.workers = Workers::Silent;
    case.is("UFF", Reason::RelaysUnreachable);
}

#[test]
fn unconnected_pods_are_first_treated_as_starting() {
    let loading = PodCounts { settled: 0, ..counts(2) };
    Case { workers: known(0, &[]), counts: loading, rollout: rollout(2, false), ..Case::default() }
        .is("FTF", Reason::WaitingForWorkers);
    Case { workers: known(0, &[]), ..Case::default() }.is("FFF", Reason::NotConnected);
}

#[test]
fn draining_worker_no_longer_serves() {
    let workers = Workers::Known { connected: 1, serving: 0, idle: 0, models: BTreeSet::new() };
    Case { workers, ..Case::default() }.is("FFF", Reason::NotConnected);
}

#[test]
fn workers_with_unresponsive_backends_serve_nothing() {
    use crate::relays::state::{RelayReport, WorkerReport};
    let linked = WorkerReport { pool: Some("llama".into()), ..WorkerReport::default() };
    let snapshot = RelaySnapshot {
        relays: [("r".into(), Ok(RelayReport::default()))].into(),
        workers: [("1".into(), linked.clone()), ("2".into(), linked)].into(),
        ..RelaySnapshot::default()
    };
    let workers = Workers::of("llama", Some(&snapshot));
    let loaded = Case { workers: workers.clone(), ..Case::default() };
    loaded.is("FFF", Reason::BackendsNotAnswering);
    assert_eq!(
        loaded.status().conditions[0].message,
        "2 of 2 Pods are ready; 2 workers are connected to Provider local, but their backends do not respond"
    );
    assert_eq!(loaded.status().connected, Some(2));
    let loading = PodCounts { ready: 0, settled: 0, ..counts(2) };
    Case { workers, counts: loading, ..Case::default() }.is("FTF", Reason::WaitingForWorkers);
}

#[test]
fn never_loading_backend_is_named_after_its_timeout() {
    let workers = Workers::Known { connected: 2, serving: 0, idle: 2, models: BTreeSet::new() };
    let waiting = |silent| Case {
        workers: workers.clone(),
        counts: PodCounts { ready: 0, settled: 0, silent, ..counts(2) },
        rollout: rollout(2, false),
        ..Case::default()
    };
    waiting(0).is("FTF", Reason::WaitingForWorkers);
    waiting(1).is("FTF", Reason::BackendsNotAnswering);
    assert_eq!(
        waiting(1).status().conditions[0].message,
        "0 of 2 Pods are ready; 2 workers are connected to Provider local, but their backends do not respond; 1 Pod has been \
         unready for over 10 minutes"
    );
    // The status of a DaemonSet, and of a Deployment that was complete before, does not show it.
    Case { rollout: rollout(2, true), ..waiting(2) }.is("FFF", Reason::BackendsNotAnswering);
    Case { workers: known(1, &["m"]), ..waiting(1) }.is("TTF", Reason::Serving);
}

#[test]
fn injecting_pool_reports_missing_and_uninjected_pods() {
    let inject = || Case { pool: injecting(), rollout: None, ..Case::default() };
    Case { counts: counts(0), workers: known(0, &[]), ..inject() }.is("FFF", Reason::NoPods);
    let lacking = |injected| PodCounts { injected, not_injected: vec!["a".into(), "b".into()], ..counts(2) };
    Case { counts: lacking(0), workers: known(0, &[]), ..inject() }.is("FFF", Reason::PodsNotInjected);
    let serving = Case { counts: lacking(1), workers: known(1, &["m"]), ..inject() };
    serving.is("TFF", Reason::PodsNotInjected);
    assert_eq!(serving.status().conditions[0].message, "2 of 2 Pods have no worker: a, b; delete them");
    let one = PodCounts { injected: 1, not_injected: vec!["a".into()], ..counts(2) };
    let serving = Case { counts: one, workers: known(1, &["m"]), ..inject() };
    assert_eq!(serving.status().conditions[0].message, "1 of 2 Pods has no worker: a; delete it");
}

#[test]
fn singular_is_used_for_one() {
    let message = |counts: PodCounts, workers: Workers| {
        Case { counts, workers, ..Case::default() }.status().conditions.swap_remove(0).message
    };
    let loading = || PodCounts { ready: 1, settled: 0, ..counts(2) };
    let idle = |idle| Workers::Known { connected: idle, serving: 0, idle, models: BTreeSet::new() };
    assert_eq!(
        message(loading(), idle(1)),
        "1 of 2 Pods is ready; 1 worker is connected to Provider local, but its backend does not respond yet"
    );
    assert_eq!(message(loading(), known(0, &[])), "1 of 2 Pods is ready, and no worker has registered yet");
    assert_eq!(message(counts(2), known(1, &["m"])), "1 worker is connected to Provider local");
}

#[test]
fn pod_creation_failure_is_reported() {
    let failed = Rollout { failure: Some("exceeded quota".into()), ..rollout(2, false).unwrap() };
    let case = Case { counts: counts(0), workers: known(0, &[]), rollout: Some(failed), ..Case::default() };
    case.is("FTF", Reason::PodsNotCreated);
}

#[test]
fn stalled_pool_with_serving_pods_is_not_ready() {
    let stall = Some((Reason::TemplateInvalid, "spec.containers: no".to_owned()));
    let case = Case { stall, ..Case::default() };
    case.is("FFT", Reason::TemplateInvalid);
    assert_eq!(case.status().conditions[2].message, "spec.containers: no");
}

#[test]
fn other_writer_is_named_and_persistent_one_stalls() {
    Case { standing: ReplicaOwner::Shared, ..Case::default() }.is("TFF", Reason::ScalingConflict);
    let loading = Case {
        standing: ReplicaOwner::Shared,
        workers: known(0, &[]),
        counts: PodCounts { settled: 0, ..counts(2) },
        ..Case::default()
    };
    loading.is("FTF", Reason::WaitingForWorkers);
    assert_eq!(loading.status().conditions[2].reason, "ScalingConflict");
    let yielding = Case { standing: ReplicaOwner::Yielding, ..Case::default() };
    yielding.is("TFT", Reason::Serving);
    assert_eq!(yielding.status().conditions[2].reason, "ScalingConflict");
}

#[test]
fn only_own_workers_of_reporting_relays_are_known() {
    use crate::relays::state::{RelayReport, WorkerReport};
    let worker = |pool: &str, draining| WorkerReport {
        pool: Some(pool.into()),
        draining,
        models: [pool.to_owned()].into(),
        ..WorkerReport::default()
    };
    let mut snapshot = RelaySnapshot::default();
    assert_eq!(Workers::of("llama", None), Workers::Unknown);
    snapshot.relays.insert("r1".into(), Err("no answer".into()));
    assert_eq!(Workers::of("llama", Some(&snapshot)), Workers::Silent);
    snapshot.relays.insert("r2".into(), Ok(RelayReport::default()));
    snapshot.workers = [
        ("1".into(), worker("llama", false)),
        ("2".into(), worker("llama", true)),
        ("3".into(), worker("other", false)),
    ]
    .into();
    let models = ["llama".to_owned()].into();
    assert_eq!(Workers::of("llama", Some(&snapshot)), Workers::Known { connected: 2, serving: 1, idle: 0, models });
}

#[test]
fn unresolvable_relay_is_named_as_cause() {
    let none = Workers::Known { connected: 0, serving: 0, idle: 0, models: BTreeSet::new() };
    for (settled, reason) in [(0, Reason::WaitingForWorkers), (2, Reason::NotConnected)] {
        let counts = PodCounts { settled, node_names: 2, ..counts(2) };
        let status = Case { counts, workers: none.clone(), ..Case::default() }.status();
        let ready = &status.conditions[0];
        assert_eq!(ready.reason, reason.as_str());
        assert!(ready.message.contains("ClusterFirstWithHostNet"), "{}", ready.message);
    }
}
