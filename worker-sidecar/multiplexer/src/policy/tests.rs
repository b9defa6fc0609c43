mod fair;

use proptest::prelude::*;

use super::*;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Ten minutes into an invented history, so that events can lie in the past.
struct Scene {
    now: Instant,
    knobs: Knobs,
}

impl Scene {
    fn new() -> Self {
        Self { now: Instant::now() + secs(600), knobs: Knobs::default() }
    }

    fn ago(&self, ago: Duration) -> Instant {
        self.now.checked_sub(ago).expect("within the history")
    }

    /// Returns a model with this many requests, all of this age.
    fn candidate(&self, waiting: u32, age: u64, cost: u64) -> Candidate {
        let (age, cost) = (secs(age), secs(cost));
        Candidate { waiting, age, total_wait: age * waiting, cost, ..Candidate::default() }
    }

    fn decide(&self, resident: &ResidentView<'_>, candidates: &[Candidate]) -> Decision {
        decide(&self.knobs, resident, candidates, self.now)
    }

    /// Returns a resident of this age, which has work unless it has been idle for `idle`.
    fn resident<'a>(&self, gaps: &'a Gaps, age: u64, idle: Option<Duration>) -> ResidentView<'a> {
        let idle_since = idle.map(|idle| self.ago(idle));
        let (since, class) = (self.ago(secs(age)), RequestClass::Normal);
        ResidentView { since, idle_since, gaps, concurrency: 1.0, class }
    }
}

fn gaps(of: &[Duration]) -> Gaps {
    let mut gaps = Gaps::default();
    let mut now = Instant::now();
    for gap in of {
        gaps.handle_idle(now);
        now += *gap;
        gaps.handle_wanted(now);
    }
    gaps
}

fn leaves(decision: Decision) -> Option<(usize, Why)> {
    match decision {
        Decision::Leave { to, why } => Some((to, why)),
        Decision::Stay { .. } => None,
    }
}

// The quantum.

#[test]
fn quantum_is_eight_costs_within_max_wait() {
    let knobs = Knobs::default();
    assert_eq!(quantum(&knobs, secs(3)), secs(24));
    assert_eq!(quantum(&knobs, secs(15)), secs(120), "max_wait is ten costs here");
    assert_eq!(quantum(&knobs, secs(40)), secs(320));
    let short = Knobs { max_wait: Some(secs(60)), ..knobs };
    assert_eq!(quantum(&short, secs(10)), secs(50), "the rest is needed for the swap itself");
}

#[test]
fn quantum_is_at_least_three_costs() {
    let knobs = Knobs { max_wait: Some(secs(1)), ..Knobs::default() };
    assert_eq!(quantum(&knobs, secs(30)), secs(90));
    assert!(is_infeasible(&knobs, secs(30)));
    assert!(is_infeasible(&Knobs { max_wait: Some(secs(119)), ..Knobs::default() }, secs(30)));
    let enough = Knobs { max_wait: Some(secs(120)), ..Knobs::default() };
    assert!(!is_infeasible(&enough, secs(30)));
    assert!(!is_infeasible(&Knobs::default(), secs(3000)), "without a setting it grows with the cost");
}

#[test]
fn quantum_is_at_least_minimum_residency() {
    assert_eq!(quantum(&Knobs::default(), Duration::ZERO), secs(5));
    assert_eq!(quantum(&Knobs { min_residency: secs(60), ..Knobs::default() }, secs(3)), secs(60));
}

#[test]
fn busy_resident_stays_until_its_quantum_ends() {
    let scene = Scene::new();
    let gaps = Gaps::default();
    let waiting = [scene.candidate(50, 500, 3)];
    let decision = scene.decide(&scene.resident(&gaps, 23, None), &waiting);
    let due = scene.now + secs(1);
    assert_eq!(decision, Decision::Stay { recheck: Some(due), lingering: false });
    let decision = scene.decide(&scene.resident(&gaps, 24, None), &waiting);
    assert_eq!(leaves(decision), Some((0, Why::Quantum)));
}

#[test]
fn unpicked_candidate_triggers_no_immediate_recheck() {
    let scene = Scene::new();
    let gaps = Gaps::default();
    // The second has more waiting time per second of swapping; the first one's shorter quantum is over at this instant.
    let waiting = [scene.candidate(1, 1, 3), scene.candidate(50, 20, 10)];
    let decision = scene.decide(&scene.resident(&gaps, 24, None), &waiting);
    assert_eq!(decision, Decision::Stay { recheck: Some(scene.now + secs(56)), lingering: false });
}

#[test]
fn idle_resident_without_history_leaves_at_once() {
    let scene = Scene::new();
    let gaps = Gaps::default();
    let decision = scene.decide(&scene.resident(&gaps, 0, Some(secs(0))), &[scene.candidate(1, 0, 40)]);
    assert_eq!(leaves(decision), Some((0, Why::Idle)));
}

#[test]
fn resident_stays_while_no_request_waits() {
    let scene = Scene::new();
    let gaps = Gaps::default();
    let decision = scene.decide(&scene.resident(&gaps, 500, Some(secs(500))), &[]);
    assert_eq!(decision, Decision::Stay { recheck: None, lingering: false });
}

// The linger.

#[test]
fn linger_is_used_when_requests_usually_return_soon() {
    let scene = Scene::new();
    let gaps = gaps(&[millis(400), millis(800), millis(600)]);
    let waiting = [scene.candidate(1, 9, 10)];
    let resident = scene.resident(&gaps, 2, Some(millis(500)));
    let decision = scene.decide(&resident, &waiting);
    let until = scene.now + millis(500);
    assert_eq!(decision, Decision::Stay { recheck: Some(until), lingering: true }, "1.25 times the longest gap");
    let decision = scene.decide(&scene.resident(&gaps, 2, Some(secs(1))), &waiting);
    assert_eq!(leaves(decision), Some((0, Why::Idle)));
}

#[test]
fn strict_alternation_costs_no_linger() {
    let scene = Scene::new();
    let gaps = gaps(&[secs(20); 16]);
    let resident = scene.resident(&gaps, 2, Some(secs(0)));
    assert_eq!(linger(&scene.knobs, &resident, &[scene.candidate(1, 0, 10)], secs(10)), Duration::ZERO);
}

#[test]
fn linger_that_pays_too_rarely_is_not_used() {
    let scene = Scene::new();
    let mut mixed = vec![secs(20); 15];
    mixed.push(millis(900));
    // One hit saves 2 x 5 s less 0.9 s; fifteen misses cost 0.9 s each.
    let mostly_long = gaps(&mixed);
    let resident = scene.resident(&mostly_long, 2, Some(secs(0)));
    assert_eq!(linger(&scene.knobs, &resident, &[], secs(5)), Duration::ZERO);
    // With swaps of 10 s the same hit is worth more than the misses.
    assert_eq!(linger(&scene.knobs, &resident, &[], secs(10)), millis(900).mul_f64(1.25));
}

#[test]
fn linger_has_to_save_more_than_it_costs() {
    let scene = Scene::new();
    let linger_for = |gaps: Gaps| linger(&scene.knobs, &scene.resident(&gaps, 2, None), &[], secs(4));
    // One hit saves 2 x 4 s less its own 2 s; each miss costs 2 s.
    assert_eq!(linger_for(gaps(&[secs(2), secs(20), secs(20)])), millis(2500));
    assert_eq!(linger_for(gaps(&[secs(2), secs(20), secs(20), secs(20)])), Duration::ZERO);
}

#[test]
fn linger_needs_three_gaps_and_has_upper_limit() {
    let scene = Scene::new();
    let two = gaps(&[millis(1); 2]);
    assert_eq!(linger(&scene.knobs, &scene.resident(&two, 2, None), &[], secs(10)), Duration::ZERO);
    let long = gaps(&[secs(6); 16]);
    assert_eq!(linger(&scene.knobs, &scene.resident(&long, 2, None), &[], secs(100)), Duration::ZERO);
    let two_seconds = gaps(&[secs(2); 16]);
    assert_eq!(linger(&scene.knobs, &scene.resident(&two_seconds, 2, None), &[], secs(3)), Duration::ZERO);
    assert_eq!(linger(&scene.knobs, &scene.resident(&two_seconds, 2, None), &[], secs(4)), millis(2500));
}

#[test]
fn no_linger_when_waiters_exceed_usual_concurrency() {
    let scene = Scene::new();
    let gaps = gaps(&[millis(500); 16]);
    let mut resident = scene.resident(&gaps, 2, Some(secs(0)));
    resident.concurrency = 1.8;
    let two = [scene.candidate(2, 1, 10)];
    assert_eq!(linger(&scene.knobs, &resident, &two, secs(10)), millis(625));
    resident.concurrency = 1.75;
    assert_eq!(linger(&scene.knobs, &resident, &two, secs(10)), millis(625), "a quarter more is usual, too");
    let three = [scene.candidate(1, 1, 10), scene.candidate(3, 1, 10)];
    assert_eq!(linger(&scene.knobs, &resident, &three, secs(10)), Duration::ZERO);
}

#[test]
fn linger_may_be_switched_off_or_fixed() {
    let scene = Scene::new();
    let gaps = gaps(&[millis(500); 16]);
    let resident = scene.resident(&gaps, 2, Some(secs(0)));
    let with = |linger| Knobs { linger, ..Knobs::default() };
    assert_eq!(linger(&with(Linger::Off), &resident, &[], secs(10)), Duration::ZERO);
    assert_eq!(linger(&with(Linger::Fixed(secs(3))), &resident, &[], secs(10)), secs(3));
}

// The pick.

#[test]
fn pick_maximises_waiting_time_per_swap_second() {
    let scene = Scene::new();
    let pick = |candidates: &[Candidate]| pick(&scene.knobs, false, candidates);
    assert_eq!(pick(&[]), None);
    assert_eq!(pick(&[scene.candidate(1, 10, 5), scene.candidate(4, 3, 5)]), Some(1), "12 s against 10 s");
    assert_eq!(pick(&[scene.candidate(1, 10, 5), scene.candidate(4, 3, 20)]), Some(0), "but at four times the cost");
}

#[test]
fn oldest_of_equals_and_overdue_models_come_first() {
    let scene = Scene::new();
    let pick = |candidates: &[Candidate]| pick(&scene.knobs, false, candidates);
    let newer = Candidate { age: secs(1), total_wait: secs(4), ..scene.candidate(2, 0, 5) };
    let older = Candidate { age: secs(3), total_wait: secs(4), ..scene.candidate(2, 0, 5) };
    assert_eq!(pick(&[newer, older]), Some(1));
    // A crowd of 50 waits 500 s altogether, a lone request 130 s; its bound is (40 + 5 + 30) + 5 + 30 = 110 s.
    let (crowd, lone) = (scene.candidate(50, 10, 5), scene.candidate(1, 110, 5));
    assert_eq!(pick(&[crowd, lone]), Some(0));
    assert_eq!(pick(&[crowd, scene.candidate(1, 111, 5)]), Some(1));
}

#[test]
fn bound_is_turns_of_others_plus_own_swap() {
    let scene = Scene::new();
    let candidates = [scene.candidate(1, 0, 5), scene.candidate(1, 0, 10)];
    let bound = |busy, index| bound(&scene.knobs, busy, &candidates, index);
    assert_eq!(bound(false, 0), secs(80 + 10 + 30) + secs(5 + 30));
    assert_eq!(bound(false, 1), secs(40 + 5 + 30) + secs(10 + 30));
    assert_eq!(bound(true, 1), bound(false, 1) + secs(80 + 10 + 30));
}

#[test]
fn longest_wait_adds_begun_turn_and_own_swap() {
    let scene = Scene::new();
    let candidates = [scene.candidate(1, 0, 5), scene.candidate(1, 0, 10)];
    let longest = |busy, index| longest_wait(&scene.knobs, busy, &candidates, index);
    let bound = |busy, index| bound(&scene.knobs, busy, &candidates, index);
    assert_eq!(longest(true, 0), bound(true, 0) + secs(80 + 10 + 30) + secs(5 + 30));
    assert_eq!(longest(false, 0), bound(false, 0), "after the only other turn its own comes");
}

#[test]
fn free_swaps_do_not_divide_by_zero() {
    let scene = Scene::new();
    assert_eq!(pick(&scene.knobs, true, &[scene.candidate(1, 1, 0)]), Some(0));
}

// Any number of waiting requests, of any age, at any cost.

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let millis = || (0..400_000_u64).prop_map(millis);
    let candidate = (1..50_u32, millis(), 0.0..1.0_f64, millis()).prop_map(|(waiting, age, mean, cost)| {
        let total_wait = age + age.mul_f64(mean) * (waiting - 1);
        Candidate { waiting, age, total_wait, cost: cost / 4, ..Candidate::default() }
    });
    prop::collection::vec(candidate, 1..6)
}

proptest! {
    #[test]
    fn resident_leaves_only_when_idle_or_past_quantum(
        candidates in candidates(),
        since in 0..600_u64,
        idle in prop::option::of(0..10_u64),
        max_wait in prop::option::of(1..300_u64),
        past in prop::collection::vec(0..8_000_u64, 0..16),
    ) {
        let mut scene = Scene::new();
        scene.knobs.max_wait = max_wait.map(secs);
        let gaps = gaps(&past.into_iter().map(millis).collect::<Vec<_>>());
        let resident = scene.resident(&gaps, since, idle.filter(|idle| *idle <= since).map(secs));
        match scene.decide(&resident, &candidates) {
            Decision::Stay { recheck, lingering } => {
                prop_assert!(recheck.is_some_and(|recheck| recheck > scene.now), "no request waits indefinitely");
                prop_assert_eq!(lingering, resident.idle_since.is_some());
            }
            Decision::Leave { to, why: Why::Idle } => {
                prop_assert!(to < candidates.len() && resident.idle_since.is_some());
            }
            Decision::Leave { to, why: Why::Quantum } => {
                let cost = candidates[to].cost;
                prop_assert!(resident.idle_since.is_none());
                prop_assert!(secs(since) >= (cost * 3).max(scene.knobs.min_residency));
            }
        }
        let cost = candidates[0].cost;
        let linger = linger(&scene.knobs, &resident, &candidates, cost);
        prop_assert!(linger <= (cost / 2).min(secs(5)).mul_f64(1.25) + millis(1));
    }

    #[test]
    fn oldest_overdue_candidate_is_picked_first(candidates in candidates()) {
        let scene = Scene::new();
        let picked = pick(&scene.knobs, true, &candidates).expect("a request waits");
        let late = |index: usize| candidates[index].age > bound(&scene.knobs, true, &candidates, index);
        let oldest = (0..candidates.len()).filter(|index| late(*index)).map(|index| candidates[index].age).max();
        if let Some(oldest) = oldest {
            prop_assert!(late(picked));
            prop_assert_eq!(candidates[picked].age, oldest);
        }
    }
}
