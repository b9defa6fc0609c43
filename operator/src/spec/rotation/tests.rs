use super::*;

mod history;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn secret(text: &str) -> Secret {
    Secret::new(text)
}

/// The cluster, to which plans are applied as the controller would.
#[derive(Default)]
struct Cluster {
    known: Known,
}

impl Cluster {
    /// A Provider after its first pass, with the secret `one`.
    fn settled() -> Self {
        let mut cluster = Self::default();
        cluster.step(at(0), "one");
        cluster
    }

    /// A Provider whose relays accept `two` alongside `one`, which workers still present.
    fn rotating() -> Self {
        let mut cluster = Self::settled();
        cluster.known.annotation = Some("a".into());
        cluster.step(at(100), "two");
        cluster
    }

    /// A Provider whose workers have presented `two` since 101.
    fn published() -> Self {
        let mut cluster = Self::rotating();
        cluster.known.confirmed = true;
        cluster.step(at(101), "unused");
        cluster
    }

    fn step(&mut self, now: Timestamp, fresh: &str) -> Plan {
        let plan = plan(now, &self.known, &secret(fresh));
        self.known.worker = Some(WorkerSide { value: plan.worker.clone(), changed_at: Some(plan.worker_changed_at) });
        self.known.relay = Some(RelaySide {
            current: plan.current.clone(),
            previous: plan.previous.clone(),
            acted_on: plan.acted_on.clone(),
        });
        plan
    }
}

/// Returns the newest value, the previous one, the workers' value, and the step's events.
fn shape(plan: &Plan) -> (&str, Option<&str>, &str, Option<RotationEvent>) {
    assert!(plan.events.len() <= 1, "{:?}", plan.events);
    let previous = plan.previous.first().map(|previous| previous.value.expose());
    (plan.current.expose(), previous, plan.worker.expose(), plan.events.first().copied())
}

/// Returns every old value that relays accept, with its end in seconds.
fn old(plan: &Plan) -> Vec<(&str, Option<i64>)> {
    let seconds = |until: Timestamp| until.as_second() - at(0).as_second();
    plan.previous.iter().map(|previous| (previous.value.expose(), previous.until.map(seconds))).collect()
}

#[test]
fn new_provider_gets_one_value_without_rotation() {
    let known = Known { annotation: Some("from the manifest".into()), ..Known::default() };
    let plan = plan(at(0), &known, &secret("one"));
    assert_eq!(shape(&plan), ("one", None, "one", None));
    assert_eq!(plan.acted_on.as_deref(), Some("from the manifest"));
}

#[test]
fn recreated_provider_keeps_worker_value() {
    let mut cluster = Cluster::settled();
    cluster.known.relay = None;
    let plan = cluster.step(at(50), "other");
    assert_eq!(shape(&plan), ("one", None, "one", None));
    assert_eq!(plan.worker_changed_at, at(0));
}

#[test]
fn unchanged_annotation_causes_no_rotation() {
    let mut cluster = Cluster::settled();
    assert_eq!(shape(&cluster.step(at(1), "other")), ("one", None, "one", None));
}

#[test]
fn relays_accept_both_values_before_workers_change() {
    let mut cluster = Cluster::settled();
    cluster.known.annotation = Some("a".into());
    let started = cluster.step(at(100), "two");
    assert_eq!(shape(&started), ("two", Some("one"), "one", Some(RotationEvent::Started)));
    assert!(started.awaits_relays());
    let waiting = cluster.step(at(130), "three");
    assert_eq!(shape(&waiting), ("two", Some("one"), "one", None));
    cluster.known.confirmed = true;
    let published = cluster.step(at(131), "three");
    assert_eq!(shape(&published), ("two", Some("one"), "two", Some(RotationEvent::Published)));
    assert_eq!((published.wake_at, published.worker_changed_at), (Some(at(131 + 86_400)), at(131)));
    assert!(!published.awaits_relays());
}

#[test]
fn previous_value_expires_after_one_day() {
    let mut cluster = Cluster::published();
    assert_eq!(shape(&cluster.step(at(101 + 86_399), "x")), ("two", Some("one"), "two", None));
    assert_eq!(shape(&cluster.step(at(101 + 86_400), "x")), ("two", None, "two", Some(RotationEvent::Ended)));
    assert_eq!(shape(&cluster.step(at(101 + 86_401), "x")), ("two", None, "two", None));
}

#[test]
fn restart_in_any_step_repeats_nothing() {
    for mut cluster in [Cluster::settled(), Cluster::rotating(), Cluster::published()] {
        cluster.known.confirmed = false;
        let before = cluster.known.relay.clone().unwrap();
        let again = cluster.step(at(102), "never used");
        assert_eq!(again.events, []);
        assert_eq!(again.current, before.current);
        let untils = |previous: &[Previous]| previous.iter().map(|previous| previous.until).collect::<Vec<_>>();
        assert_eq!(untils(&again.previous), untils(&before.previous));
    }
}

#[test]
fn workers_receive_new_value_before_old_one_expires() {
    let mut cluster = Cluster::settled();
    assert!(!cluster.step(at(1), "x").updates_workers_first());
    cluster.known.annotation = Some("a".into());
    assert!(!cluster.step(at(100), "two").updates_workers_first());
    cluster.known.confirmed = true;
    assert!(cluster.step(at(101), "x").updates_workers_first());
    cluster.known.annotation = Some("revoke".into());
    assert!(!cluster.step(at(102), "x").updates_workers_first());
}

#[test]
fn interrupted_publishing_is_repeated() {
    let mut cluster = Cluster::rotating();
    // A relay that has just started has not reported yet, which revokes nothing from workers.
    cluster.known.confirmed = false;
    cluster.known.worker = Some(WorkerSide { value: secret("two"), changed_at: Some(at(101)) });
    let plan = cluster.step(at(105), "x");
    assert_eq!(shape(&plan), ("two", Some("one"), "two", Some(RotationEvent::Published)));
    assert_eq!(plan.worker_changed_at, at(101));
}

#[test]
fn second_rotation_while_awaiting_relays_keeps_value() {
    let mut cluster = Cluster::rotating();
    cluster.known.annotation = Some("b".into());
    let plan = cluster.step(at(110), "three");
    assert_eq!(shape(&plan), ("two", Some("one"), "one", None));
    assert_eq!(plan.acted_on.as_deref(), Some("b"));
}

#[test]
fn rotation_after_publishing_waits_for_kubelets() {
    let mut cluster = Cluster::published();
    cluster.known.annotation = Some("b".into());
    let early = cluster.step(at(150), "three");
    assert_eq!(shape(&early), ("two", Some("one"), "two", None));
    assert_eq!((early.acted_on.as_deref(), early.wake_at), (Some("a"), Some(at(191))));
    assert_eq!(shape(&cluster.step(at(191), "three")), ("three", Some("two"), "two", Some(RotationEvent::Started)));
}

/// A cluster whose relays confirm at once, after a rotation to each of these values, at 100 s intervals from 100 on.
fn rotated_to(values: &[&str]) -> (Cluster, Plan) {
    let mut cluster = Cluster::settled();
    cluster.known.confirmed = true;
    let mut published = None;
    for (turn, value) in (1_i32..).zip(values) {
        let now = i64::from(turn) * 100;
        cluster.known.annotation = Some(format!("turn {turn}"));
        cluster.step(at(now), value);
        published = Some(cluster.step(at(now), "unused"));
    }
    (cluster, published.unwrap())
}

#[test]
fn each_rotated_value_expires_after_its_own_day() {
    let (mut cluster, published) = rotated_to(&["two", "three"]);
    assert_eq!(shape(&published), ("three", Some("two"), "three", Some(RotationEvent::Published)));
    assert_eq!(old(&published), [("two", Some(200 + 86_400)), ("one", Some(100 + 86_400))]);
    assert_eq!(published.wake_at, Some(at(100 + 86_400)));
    let later = cluster.step(at(100 + 86_400), "x");
    assert_eq!((old(&later), &later.events[..]), (vec![("two", Some(200 + 86_400))], &[RotationEvent::Ended][..]));
    let last = cluster.step(at(200 + 86_400), "x");
    assert_eq!((old(&last), &last.events[..], last.wake_at), (vec![], &[RotationEvent::Ended][..], None));
}

#[test]
fn older_values_keep_expiry_while_awaiting_relays() {
    let (mut cluster, _) = rotated_to(&["two"]);
    cluster.known.confirmed = false;
    cluster.known.annotation = Some("next".into());
    let started = cluster.step(at(300), "three");
    assert_eq!(old(&started), [("two", None), ("one", Some(100 + 86_400))]);
    assert!(started.awaits_relays());
}

#[test]
fn revoking_ends_every_previous_value() {
    let (mut cluster, _) = rotated_to(&["two", "three"]);
    cluster.known.annotation = Some("revoke".into());
    let revoked = cluster.step(at(300), "x");
    assert_eq!((old(&revoked), shape(&revoked)), (vec![], ("three", None, "three", Some(RotationEvent::Ended))));
}

#[test]
fn excess_rotations_end_oldest_value_with_event() {
    let values = ["2", "3", "4", "5", "6", "7", "8", "9"];
    let (mut cluster, published) = rotated_to(&values);
    assert_eq!((published.previous.len(), published.previous[7].value.expose()), (MAX_PREVIOUS, "one"));
    cluster.known.annotation = Some("one too many".into());
    let started = cluster.step(at(1000), "10");
    assert_eq!(started.events, [RotationEvent::Started, RotationEvent::Crowded]);
    assert_eq!((started.previous.len(), old(&started)[0], old(&started)[7].0), (MAX_PREVIOUS, ("9", None), "2"));
}

#[test]
fn user_returning_to_old_value_keeps_promised_expiries() {
    let mut cluster = Cluster::default();
    for (now, own) in [(0, "a"), (100, "b")] {
        cluster.known.own = Some(secret(own));
        cluster.step(at(now), "x");
    }
    cluster.known.confirmed = true;
    cluster.step(at(101), "x");
    cluster.known.confirmed = false;
    for (now, own) in [(300, "a"), (301, "c")] {
        cluster.known.own = Some(secret(own));
        cluster.step(at(now), "x");
    }
    let plan = cluster.step(at(302), "x");
    assert_eq!((plan.current.expose(), old(&plan)), ("c", vec![("b", None), ("a", Some(101 + 86_400))]));
}

#[test]
fn clock_error_neither_extends_expiry_nor_blocks_rotation() {
    let mut cluster = Cluster::published();
    let month = 30 * 86_400;
    let relay = cluster.known.relay.as_mut().unwrap();
    relay.previous[0].until = Some(at(month));
    assert_eq!(old(&cluster.step(at(500), "x")), [("one", Some(500 + 86_400))]);
    // Half an hour back is within the clock tolerance.
    assert_eq!(old(&cluster.step(at(500 - 1800), "x")), [("one", Some(500 + 86_400))]);
    cluster.known.annotation = Some("b".into());
    assert_eq!(
        shape(&cluster.step(at(500 - 1800), "three")),
        ("three", Some("two"), "two", Some(RotationEvent::Started))
    );
}

#[test]
fn revoking_creates_new_value_and_ends_old_one() {
    let mut cluster = Cluster::settled();
    cluster.known.annotation = Some("revoke".into());
    assert_eq!(shape(&cluster.step(at(100), "two")), ("two", None, "two", Some(RotationEvent::Revoked)));
    assert_eq!(shape(&cluster.step(at(101), "three")), ("two", None, "two", None));
    cluster.known.annotation = Some("revoke-2".into());
    assert_eq!(shape(&cluster.step(at(102), "three")), ("three", None, "three", Some(RotationEvent::Revoked)));
}

#[test]
fn revoking_during_rotation_keeps_new_value() {
    for (mut cluster, worker_had) in [(Cluster::rotating(), "one"), (Cluster::published(), "two")] {
        assert_eq!(cluster.known.worker.as_ref().unwrap().value.expose(), worker_had);
        cluster.known.annotation = Some("revoke".into());
        assert_eq!(shape(&cluster.step(at(120), "three")), ("two", None, "two", Some(RotationEvent::Ended)));
    }
}

#[test]
fn repeated_annotation_after_removal_is_new_request() {
    let mut cluster = Cluster::settled();
    cluster.known.annotation = Some("revoke".into());
    cluster.step(at(100), "two");
    cluster.known.annotation = None;
    assert_eq!(shape(&cluster.step(at(101), "x")), ("two", None, "two", None));
    cluster.known.annotation = Some("revoke".into());
    assert_eq!(shape(&cluster.step(at(102), "three")), ("three", None, "three", Some(RotationEvent::Revoked)));
}

#[test]
fn changed_user_value_starts_rotation() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    assert_eq!(shape(&cluster.step(at(0), "x")), ("mine", None, "mine", None));
    cluster.known.own = Some(secret("mine2"));
    assert_eq!(shape(&cluster.step(at(1), "x")), ("mine2", Some("mine"), "mine", Some(RotationEvent::Started)));
    cluster.known.confirmed = true;
    assert_eq!(shape(&cluster.step(at(2), "x")), ("mine2", Some("mine"), "mine2", Some(RotationEvent::Published)));
}

#[test]
fn annotation_alone_does_not_change_user_value() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    cluster.step(at(0), "x");
    for wish in ["a", "revoke"] {
        cluster.known.annotation = Some(wish.into());
        let plan = cluster.step(at(1), "x");
        assert_eq!(shape(&plan), ("mine", None, "mine", None));
        assert_eq!(plan.acted_on.as_deref(), Some(wish));
    }
    // A value set long after a revocation is rotated as usual.
    cluster.known.own = Some(secret("mine2"));
    assert_eq!(shape(&cluster.step(at(2), "x")), ("mine2", Some("mine"), "mine", Some(RotationEvent::Started)));
}

#[test]
fn user_reverting_before_rollout_leaves_workers_unchanged() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    cluster.step(at(0), "x");
    cluster.known.own = Some(secret("typo"));
    cluster.step(at(1), "x");
    cluster.known.own = Some(secret("mine"));
    assert_eq!(shape(&cluster.step(at(2), "x")), ("mine", Some("typo"), "mine", Some(RotationEvent::Published)));
}

#[test]
fn second_user_change_replaces_undistributed_value() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    cluster.step(at(0), "x");
    cluster.known.own = Some(secret("typo"));
    cluster.step(at(1), "x");
    cluster.known.own = Some(secret("right"));
    assert_eq!(shape(&cluster.step(at(2), "x")), ("right", Some("mine"), "mine", Some(RotationEvent::Started)));
}

#[test]
fn adopting_user_secret_rotates_and_releasing_does_not() {
    let mut cluster = Cluster::settled();
    cluster.known.own = Some(secret("mine"));
    assert_eq!(shape(&cluster.step(at(1), "x")), ("mine", Some("one"), "one", Some(RotationEvent::Started)));
    cluster.known.confirmed = true;
    cluster.step(at(2), "x");
    cluster.known.own = None;
    assert_eq!(shape(&cluster.step(at(3), "x")), ("mine", Some("one"), "mine", None));
}

#[test]
fn deleted_worker_secret_is_restored() {
    let mut cluster = Cluster::settled();
    cluster.known.worker = None;
    let plan = cluster.step(at(60), "x");
    assert_eq!((plan.worker.expose(), plan.worker_changed_at), ("one", at(60)));
}
