use super::*;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn secret(text: &str) -> Secret {
    Secret::new(text)
}

/// The cluster, to which plans are written as the controller writes them.
#[derive(Default)]
struct Cluster {
    known: Known,
}

impl Cluster {
    /// A Provider whose first pass is over, with the secret `one`.
    fn settled() -> Self {
        let mut cluster = Self::default();
        cluster.step(at(0), "one");
        cluster
    }

    /// One whose relays accept `two` beside `one`, which workers still present.
    fn rotating() -> Self {
        let mut cluster = Self::settled();
        cluster.known.annotation = Some("a".into());
        cluster.step(at(100), "two");
        cluster
    }

    /// One whose workers present `two` since 101.
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

fn shape(plan: &Plan) -> (&str, Option<&str>, &str, Option<News>) {
    let previous = plan.previous.as_ref().map(|previous| previous.value.expose());
    (plan.current.expose(), previous, plan.worker.expose(), plan.news)
}

#[test]
fn a_new_provider_gets_one_value_and_no_rotation() {
    let known = Known { annotation: Some("from the manifest".into()), ..Known::default() };
    let plan = plan(at(0), &known, &secret("one"));
    assert_eq!(shape(&plan), ("one", None, "one", None));
    assert_eq!(plan.acted_on.as_deref(), Some("from the manifest"));
}

#[test]
fn a_provider_made_again_keeps_what_its_workers_have() {
    let mut cluster = Cluster::settled();
    cluster.known.relay = None;
    let plan = cluster.step(at(50), "other");
    assert_eq!(shape(&plan), ("one", None, "one", None));
    assert_eq!(plan.worker_changed_at, at(0));
}

#[test]
fn nothing_asked_nothing_done() {
    let mut cluster = Cluster::settled();
    assert_eq!(shape(&cluster.step(at(1), "other")), ("one", None, "one", None));
}

#[test]
fn relays_accept_both_values_before_workers_change() {
    let mut cluster = Cluster::settled();
    cluster.known.annotation = Some("a".into());
    let started = cluster.step(at(100), "two");
    assert_eq!(shape(&started), ("two", Some("one"), "one", Some(News::Started)));
    assert!(started.awaits_relays());
    let waiting = cluster.step(at(130), "three");
    assert_eq!(shape(&waiting), ("two", Some("one"), "one", None));
    cluster.known.confirmed = true;
    let published = cluster.step(at(131), "three");
    assert_eq!(shape(&published), ("two", Some("one"), "two", Some(News::Published)));
    assert_eq!((published.wake_at, published.worker_changed_at), (Some(at(131 + 86_400)), at(131)));
    assert!(!published.awaits_relays());
}

#[test]
fn the_old_value_ends_after_a_day() {
    let mut cluster = Cluster::published();
    assert_eq!(shape(&cluster.step(at(101 + 86_399), "x")), ("two", Some("one"), "two", None));
    assert_eq!(shape(&cluster.step(at(101 + 86_400), "x")), ("two", None, "two", Some(News::Ended)));
    assert_eq!(shape(&cluster.step(at(101 + 86_401), "x")), ("two", None, "two", None));
}

#[test]
fn a_restart_in_any_step_repeats_nothing() {
    for mut cluster in [Cluster::settled(), Cluster::rotating(), Cluster::published()] {
        cluster.known.confirmed = false;
        let before = cluster.known.relay.clone().unwrap();
        let again = cluster.step(at(102), "never used");
        assert_eq!(again.news, None);
        assert_eq!(again.current, before.current);
        assert_eq!(again.previous.map(|previous| previous.until), before.previous.map(|previous| previous.until));
    }
}

#[test]
fn a_stop_between_the_two_writes_of_publishing_publishes_again() {
    let mut cluster = Cluster::rotating();
    cluster.known.confirmed = true;
    cluster.known.worker = Some(WorkerSide { value: secret("two"), changed_at: Some(at(101)) });
    let plan = cluster.step(at(105), "x");
    assert_eq!(shape(&plan), ("two", Some("one"), "two", Some(News::Published)));
    assert_eq!(plan.worker_changed_at, at(101));
}

#[test]
fn another_wish_while_relays_are_awaited_needs_no_other_value() {
    let mut cluster = Cluster::rotating();
    cluster.known.annotation = Some("b".into());
    let plan = cluster.step(at(110), "three");
    assert_eq!(shape(&plan), ("two", Some("one"), "one", None));
    assert_eq!(plan.acted_on.as_deref(), Some("b"));
}

#[test]
fn another_wish_right_after_publishing_waits_until_every_kubelet_has_the_value() {
    let mut cluster = Cluster::published();
    cluster.known.annotation = Some("b".into());
    let early = cluster.step(at(150), "three");
    assert_eq!(shape(&early), ("two", Some("one"), "two", None));
    assert_eq!((early.acted_on.as_deref(), early.wake_at), (Some("a"), Some(at(191))));
    assert_eq!(shape(&cluster.step(at(191), "three")), ("three", Some("two"), "two", Some(News::Started)));
}

#[test]
fn revoking_makes_a_new_value_and_ends_the_old_one_at_once() {
    let mut cluster = Cluster::settled();
    cluster.known.annotation = Some("revoke".into());
    assert_eq!(shape(&cluster.step(at(100), "two")), ("two", None, "two", Some(News::Revoked)));
    assert_eq!(shape(&cluster.step(at(101), "three")), ("two", None, "two", None));
    cluster.known.annotation = Some("revoke-2".into());
    assert_eq!(shape(&cluster.step(at(102), "three")), ("three", None, "three", Some(News::Revoked)));
}

#[test]
fn revoking_during_a_rotation_ends_the_old_value_and_keeps_the_new_one() {
    for (mut cluster, worker_had) in [(Cluster::rotating(), "one"), (Cluster::published(), "two")] {
        assert_eq!(cluster.known.worker.as_ref().unwrap().value.expose(), worker_had);
        cluster.known.annotation = Some("revoke".into());
        assert_eq!(shape(&cluster.step(at(120), "three")), ("two", None, "two", Some(News::Ended)));
    }
}

#[test]
fn the_same_wish_after_the_annotation_went_is_a_new_one() {
    let mut cluster = Cluster::settled();
    cluster.known.annotation = Some("revoke".into());
    cluster.step(at(100), "two");
    cluster.known.annotation = None;
    assert_eq!(shape(&cluster.step(at(101), "x")), ("two", None, "two", None));
    cluster.known.annotation = Some("revoke".into());
    assert_eq!(shape(&cluster.step(at(102), "three")), ("three", None, "three", Some(News::Revoked)));
}

#[test]
fn a_users_new_value_is_a_rotation() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    assert_eq!(shape(&cluster.step(at(0), "x")), ("mine", None, "mine", None));
    cluster.known.own = Some(secret("mine2"));
    assert_eq!(shape(&cluster.step(at(1), "x")), ("mine2", Some("mine"), "mine", Some(News::Started)));
    cluster.known.confirmed = true;
    assert_eq!(shape(&cluster.step(at(2), "x")), ("mine2", Some("mine"), "mine2", Some(News::Published)));
}

#[test]
fn an_annotation_alone_does_not_change_a_users_value() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    cluster.step(at(0), "x");
    for wish in ["a", "revoke"] {
        cluster.known.annotation = Some(wish.into());
        let plan = cluster.step(at(1), "x");
        assert_eq!(shape(&plan), ("mine", None, "mine", None));
        assert_eq!(plan.acted_on.as_deref(), Some(wish));
    }
    // A value that comes long after a revocation is rotated without haste.
    cluster.known.own = Some(secret("mine2"));
    assert_eq!(shape(&cluster.step(at(2), "x")), ("mine2", Some("mine"), "mine", Some(News::Started)));
}

#[test]
fn a_user_who_goes_back_before_workers_changed_leaves_them_as_they_are() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    cluster.step(at(0), "x");
    cluster.known.own = Some(secret("typo"));
    cluster.step(at(1), "x");
    cluster.known.own = Some(secret("mine"));
    assert_eq!(shape(&cluster.step(at(2), "x")), ("mine", Some("typo"), "mine", Some(News::Published)));
}

#[test]
fn a_user_who_is_faster_than_the_relays_replaces_what_nobody_presents() {
    let mut cluster = Cluster::default();
    cluster.known.own = Some(secret("mine"));
    cluster.step(at(0), "x");
    cluster.known.own = Some(secret("typo"));
    cluster.step(at(1), "x");
    cluster.known.own = Some(secret("right"));
    assert_eq!(shape(&cluster.step(at(2), "x")), ("right", Some("mine"), "mine", Some(News::Started)));
}

#[test]
fn taking_a_users_secret_over_a_generated_one_is_a_rotation_and_giving_it_up_is_none() {
    let mut cluster = Cluster::settled();
    cluster.known.own = Some(secret("mine"));
    assert_eq!(shape(&cluster.step(at(1), "x")), ("mine", Some("one"), "one", Some(News::Started)));
    cluster.known.confirmed = true;
    cluster.step(at(2), "x");
    cluster.known.own = None;
    assert_eq!(shape(&cluster.step(at(3), "x")), ("mine", Some("one"), "mine", None));
}

#[test]
fn the_workers_secret_comes_back_when_somebody_deletes_it() {
    let mut cluster = Cluster::settled();
    cluster.known.worker = None;
    let plan = cluster.step(at(60), "x");
    assert_eq!((plan.worker.expose(), plan.worker_changed_at), ("one", at(60)));
}
