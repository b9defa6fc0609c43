//! Classes and ranks: which model comes next, and whose turn ends early for it.

use RequestClass::{Batch, Interactive, Normal};
use proptest::prelude::*;

use super::*;

impl Scene {
    /// Returns a candidate like the others of this class and rank.
    fn classed(&self, class: RequestClass, rank: u32) -> Candidate {
        Candidate { class, rank, ..self.candidate(1, 5, 10) }
    }

    /// Returns a busy resident of this age and class.
    fn busy<'a>(&self, gaps: &'a Gaps, age: u64, class: RequestClass) -> ResidentView<'a> {
        ResidentView { class, ..self.resident(gaps, age, None) }
    }
}

#[test]
fn higher_class_comes_before_longer_queue() {
    let scene = Scene::new();
    let crowd = |class| Candidate { class, ..scene.candidate(64, 60, 5) };
    for (class, lower) in [(Interactive, Normal), (Interactive, Batch), (Normal, Batch)] {
        let one = Candidate { class, ..scene.candidate(1, 1, 10) };
        assert_eq!(pick(&scene.knobs, true, &[crowd(lower), one]), Some(1), "{class:?} and {lower:?}");
        assert_eq!(pick(&scene.knobs, true, &[crowd(class), one]), Some(0), "of one class");
    }
}

#[test]
fn keys_with_less_service_come_first_in_class() {
    let scene = Scene::new();
    let crowd = Candidate { rank: 1, ..scene.candidate(64, 60, 5) };
    assert_eq!(pick(&scene.knobs, true, &[crowd, scene.candidate(1, 1, 10)]), Some(1));
    let other = [Candidate { class: Interactive, rank: 2, ..crowd }, scene.classed(Normal, 0)];
    assert_eq!(pick(&scene.knobs, true, &other), Some(0), "the class decides first");
    assert_eq!(pick(&scene.knobs, true, &[crowd, scene.classed(Normal, 1)]), Some(0), "the rest by waiting time");
}

#[test]
fn overdue_batch_comes_before_interactive() {
    let scene = Scene::new();
    let batch = |age| Candidate { class: Batch, rank: 1, ..scene.candidate(1, age, 5) };
    let bound = bound(&scene.knobs, true, &[batch(0), scene.classed(Interactive, 0)], 0).as_secs();
    assert_eq!(pick(&scene.knobs, true, &[batch(bound), scene.classed(Interactive, 0)]), Some(1));
    assert_eq!(pick(&scene.knobs, true, &[batch(bound + 1), scene.classed(Interactive, 0)]), Some(0));
}

#[test]
fn turn_of_lower_class_ends_after_three_costs() {
    let (scene, gaps) = (Scene::new(), Gaps::default());
    for (resident, class, turn) in [
        (Batch, Interactive, 30),
        (Batch, Normal, 30),
        (Normal, Interactive, 30),
        (Normal, Normal, 80),
        (Normal, Batch, 80),
        (Interactive, Interactive, 80),
    ] {
        let decide = |age| scene.decide(&scene.busy(&gaps, age, resident), &[scene.classed(class, 0)]);
        let recheck = Some(scene.now + secs(1));
        assert_eq!(decide(turn - 1), Decision::Stay { recheck, lingering: false }, "{resident:?} and {class:?}");
        assert_eq!(leaves(decide(turn)), Some((0, Why::Quantum)), "{resident:?} and {class:?}");
    }
}

#[test]
fn turn_of_lower_class_keeps_minimum_residency() {
    let (mut scene, gaps) = (Scene::new(), Gaps::default());
    scene.knobs.min_residency = secs(50);
    let decide = |age| leaves(scene.decide(&scene.busy(&gaps, age, Batch), &[scene.classed(Interactive, 0)]));
    assert_eq!((decide(49), decide(50)), (None, Some((0, Why::Quantum))));
}

#[test]
fn turn_at_expense_of_owed_keys_ends_early() {
    let (scene, gaps) = (Scene::new(), Gaps::default());
    let owed = |class| Candidate { is_owed: true, ..scene.classed(class, 0) };
    let decide = |age, class| leaves(scene.decide(&scene.busy(&gaps, age, Normal), &[owed(class)]));
    assert_eq!((decide(29, Normal), decide(30, Normal)), (None, Some((0, Why::Quantum))));
    assert_eq!(decide(79, Batch), None, "a lower class never shortens a turn");
}

#[test]
fn overdue_batch_does_not_prolong_turn_before_interactive() {
    let (scene, gaps) = (Scene::new(), Gaps::default());
    let late = Candidate { class: Batch, rank: 1, ..scene.candidate(1, 5_000, 20) };
    let candidates = [scene.classed(Interactive, 0), late];
    let decide = |age| leaves(scene.decide(&scene.busy(&gaps, age, Batch), &candidates));
    assert_eq!((decide(59), decide(60)), (None, Some((1, Why::Quantum))), "but it comes next");
}

#[test]
fn no_linger_before_request_of_higher_class() {
    let (mut scene, gaps) = (Scene::new(), gaps(&[millis(500); 16]));
    let lasting = |scene: &Scene, last, waiting| {
        let resident = ResidentView { class: last, ..scene.resident(&gaps, 2, Some(secs(0))) };
        linger(&scene.knobs, &resident, &[scene.classed(waiting, 0), scene.classed(Batch, 1)], secs(10))
    };
    for (last, waiting, expected) in [
        (Batch, Interactive, Duration::ZERO),
        (Normal, Interactive, Duration::ZERO),
        (Batch, Batch, millis(625)),
        (Interactive, Interactive, millis(625)),
        (Interactive, Normal, millis(625)),
    ] {
        assert_eq!(lasting(&scene, last, waiting), expected, "{last:?} and {waiting:?}");
    }
    scene.knobs.linger = Linger::Fixed(secs(3));
    assert_eq!(lasting(&scene, Batch, Interactive), Duration::ZERO);
    assert_eq!(lasting(&scene, Batch, Batch), secs(3));
}

/// The policy without classes and ranks, as plainly as its rules are.
fn plain(knobs: &Knobs, resident: &ResidentView<'_>, candidates: &[Candidate], now: Instant) -> Decision {
    let mut next = 0;
    for index in 1..candidates.len() {
        let is_late =
            |index: usize| candidates[index].age > bound(knobs, resident.idle_since.is_none(), candidates, index);
        let key = |index: usize| {
            let Candidate { age, total_wait, cost, .. } = candidates[index];
            let worth = total_wait.as_secs_f64() / cost.max(millis(1)).as_secs_f64();
            if is_late(index) { (1, age.as_secs_f64(), age) } else { (0, worth, age) }
        };
        if key(index).partial_cmp(&key(next)) == Some(std::cmp::Ordering::Greater) {
            next = index;
        }
    }
    if let Some(idle_since) = resident.idle_since {
        let until = idle_since + linger(knobs, resident, candidates, candidates[next].cost);
        return if until <= now {
            Decision::Leave { to: next, why: Why::Idle }
        } else {
            Decision::Stay { recheck: Some(until), lingering: true }
        };
    }
    let ends = candidates.iter().map(|candidate| resident.since + quantum(knobs, candidate.cost));
    let ends: Vec<_> = ends.collect();
    if ends[next] <= now {
        return Decision::Leave { to: next, why: Why::Quantum };
    }
    Decision::Stay { recheck: ends.into_iter().filter(|end| *end > now).min(), lingering: false }
}

proptest! {
    /// Whatever the class, if all have the same.
    #[test]
    fn equal_classes_and_ranks_change_nothing(
        candidates in candidates(),
        class in prop::sample::select(vec![Interactive, Normal, Batch]),
        rank in 0..3_u32,
        since in 0..600_u64,
        idle in prop::option::of(0..10_u64),
        max_wait in prop::option::of(1..300_u64),
        past in prop::collection::vec(0..8_000_u64, 0..16),
    ) {
        let mut scene = Scene::new();
        scene.knobs.max_wait = max_wait.map(secs);
        let gaps = gaps(&past.into_iter().map(millis).collect::<Vec<_>>());
        let resident = scene.resident(&gaps, since, idle.filter(|idle| *idle <= since).map(secs));
        let expected = plain(&scene.knobs, &resident, &candidates, scene.now);
        let classed: Vec<_> = candidates.into_iter().map(|candidate| Candidate { class, rank, ..candidate }).collect();
        prop_assert_eq!(scene.decide(&ResidentView { class, ..resident }, &classed), expected);
    }

    /// However classes and ranks are mixed, no turn is longer than without them, or shorter than three swaps.
    #[test]
    fn mixed_classes_only_shorten_turns_down_to_floor(
        candidates in candidates(),
        places in prop::collection::vec((0..3_usize, 0..3_u32, any::<bool>()), 6),
        own in 0..3_usize,
    ) {
        let (scene, gaps) = (Scene::new(), Gaps::default());
        let all = [Interactive, Normal, Batch];
        let place = |(candidate, (class, rank, is_owed)): (Candidate, (usize, u32, bool))| {
            Candidate { class: all[class], rank, is_owed, ..candidate }
        };
        let candidates: Vec<_> = candidates.into_iter().zip(places).map(place).collect();
        let resident = scene.busy(&gaps, 0, all[own]);
        for (to, candidate) in candidates.iter().enumerate() {
            let turn = turn_end(&scene.knobs, &resident, &candidates, to) - resident.since;
            let least = floor(&scene.knobs, candidate.cost);
            prop_assert!((least..=quantum(&scene.knobs, candidate.cost)).contains(&turn));
        }
    }
}
