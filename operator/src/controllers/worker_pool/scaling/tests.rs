use proptest::prelude::*;

use super::*;

const CONFIG: ScalingConfig = ScalingConfig { min: 0, max: 8, target: 16, delay: Duration::from_secs(600) };

/// A pool with its own clock that applies each decision.
struct Pool {
    config: ScalingConfig,
    history: History,
    now: Instant,
    current: i32,
    wakeable: bool,
}

impl Pool {
    fn at(current: i32) -> Self {
        Self { config: CONFIG, history: History::default(), now: Instant::now(), current, wakeable: true }
    }

    fn decide(&mut self, load: Option<Load>) -> ScalingDecision {
        let inputs = ScalingInputs { current: self.current, load, wakeable: self.wakeable };
        let decision = self.history.decide(self.now, &self.config, &inputs);
        self.current = decision.replicas;
        decision
    }

    /// Decides once per second.
    fn watch(&mut self, seconds: u64, load: Option<Load>) -> i32 {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.decide(load);
        }
        self.current
    }
}

fn load(waiting: u64, running: u64) -> Option<Load> {
    Some(Load { waiting, running, ending: 0, complete: true })
}

fn incomplete(waiting: u64) -> Option<Load> {
    Some(Load { waiting, complete: false, ..Load::default() })
}

#[test]
fn first_waiting_request_wakes_pool_at_zero() {
    let mut pool = Pool::at(0);
    assert_eq!(pool.decide(load(0, 0)).replicas, 0);
    assert_eq!(pool.decide(load(1, 0)), ScalingDecision { replicas: 1, why: Why::Load, next_decision: None });
}

#[test]
fn replicas_follow_target_of_queued_and_running_requests() {
    let mut pool = Pool::at(1);
    assert_eq!(pool.decide(load(0, 16)).replicas, 1);
    assert_eq!(pool.decide(load(1, 16)).replicas, 2);
    assert_eq!(pool.decide(load(40, 24)).replicas, 4);
    assert_eq!(pool.decide(load(1_000_000, 0)).replicas, 8);
}

#[test]
fn scale_down_waits_delay_and_uses_highest_need() {
    let mut pool = Pool::at(0);
    pool.watch(600, load(0, 100));
    assert_eq!(pool.current, 7);
    assert_eq!(pool.watch(300, load(0, 40)), 7);
    // The last need of 7 expires one second later than the last need of 3.
    assert_eq!(pool.watch(299, load(0, 10)), 7);
    assert_eq!(pool.watch(1, load(0, 10)), 3);
    assert_eq!(pool.watch(299, load(0, 10)), 3);
    assert_eq!(pool.watch(1, load(0, 10)), 1);
}

#[test]
fn burst_within_delay_restarts_delay() {
    let mut pool = Pool::at(4);
    pool.watch(599, load(0, 1));
    pool.watch(1, load(0, 64));
    assert_eq!(pool.watch(599, load(0, 1)), 4);
    assert_eq!(pool.watch(1, load(0, 1)), 1);
}

#[test]
fn new_leader_holds_for_whole_delay() {
    let mut pool = Pool::at(5);
    let first = pool.decide(load(0, 0));
    assert_eq!(first, ScalingDecision { replicas: 5, why: Why::Delay, next_decision: Some(CONFIG.delay) });
    assert_eq!(pool.watch(599, load(0, 0)), 5);
    assert_eq!(pool.watch(1, load(0, 0)), 0);
}

#[test]
fn unknown_load_scales_up_but_never_down() {
    let mut pool = Pool::at(3);
    assert_eq!(pool.watch(2000, None), 3);
    assert_eq!(pool.watch(2000, incomplete(0)), 3);
    assert_eq!(pool.watch(1, incomplete(100)), 7);
    // Time without knowledge is treated as time of need.
    assert_eq!(pool.watch(599, load(0, 0)), 7);
    assert_eq!(pool.watch(1, load(0, 0)), 0);
}

#[test]
fn observation_gap_restarts_delay() {
    let mut pool = Pool::at(3);
    pool.watch(500, load(0, 0));
    pool.now += Duration::from_secs(3600);
    assert_eq!(pool.decide(load(0, 0)).replicas, 3);
    assert_eq!(pool.watch(599, load(0, 0)), 3);
    assert_eq!(pool.watch(1, load(0, 0)), 0);
}

#[test]
fn running_requests_prevent_scaling_to_zero() {
    let mut pool = Pool::at(1);
    assert_eq!(pool.watch(2000, load(0, 1)), 1);
    let ending = Some(Load { ending: 1, complete: true, ..Load::default() });
    assert_eq!(pool.watch(2000, ending), 1);
}

#[test]
fn pool_without_known_models_does_not_sleep() {
    let mut pool = Pool::at(1);
    pool.wakeable = false;
    assert_eq!(pool.watch(2000, load(0, 0)), 1);
    assert_eq!(pool.decide(load(0, 0)).why, Why::ModelsUnknown);
    pool.current = 0;
    assert_eq!(pool.decide(load(0, 0)).replicas, 0);
}

#[test]
fn replicas_out_of_bounds_are_corrected_immediately() {
    let mut pool = Pool::at(20);
    assert_eq!(
        pool.decide(load(0, 0)),
        ScalingDecision { replicas: 8, why: Why::Bounds, next_decision: Some(CONFIG.delay) }
    );
    pool.config.min = 2;
    pool.current = 0;
    assert_eq!(pool.decide(None), ScalingDecision { replicas: 2, why: Why::Bounds, next_decision: None });
}

#[test]
fn externally_set_replicas_hold_for_whole_delay() {
    let mut pool = Pool::at(0);
    pool.watch(1000, load(0, 0));
    pool.current = 6;
    pool.history.begin_again(pool.now);
    assert_eq!(pool.watch(599, load(0, 0)), 6);
    assert_eq!(pool.watch(1, load(0, 0)), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Known(u64, u64, u64),
    Partly(u64),
    Nothing,
    Pause,
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let step = prop_oneof![
        6 => (0..300u64, 0..100u64, 0..3u64).prop_map(|(waiting, running, ending)| Step::Known(waiting, running, ending)),
        4 => Just(Step::Known(0, 0, 0)),
        1 => (0..300u64).prop_map(Step::Partly),
        1 => Just(Step::Nothing),
        1 => Just(Step::Pause),
    ];
    prop::collection::vec((1..90u64, step), 1..40)
}

proptest! {
    #[test]
    fn any_history_stays_in_bounds_and_respects_delay(
        min in 0..4i32, more in 1..8i32, start in 0..12i32, target in 1..20u32, delay in 1..120u64, steps in steps(),
    ) {
        let config = ScalingConfig { min, max: min + more, target, delay: Duration::from_secs(delay) };
        let mut pool = Pool { config, ..Pool::at(start) };
        // A reference that keeps everything: the time of each decision, and the need at it.
        let mut needs: Vec<(Instant, i32)> = Vec::new();
        for (seconds, step) in steps {
            let load = match step {
                Step::Known(waiting, running, ending) => Some(Load { waiting, running, ending, complete: true }),
                Step::Partly(waiting) => Some(Load { waiting, complete: false, ..Load::default() }),
                Step::Nothing => None,
                Step::Pause => { pool.now += Duration::from_secs(40); needs.clear(); continue }
            };
            for _ in 0..seconds {
                pool.now += Duration::from_secs(1);
                let before = pool.current;
                let after = pool.decide(load).replicas;
                prop_assert!((config.min..=config.max).contains(&after));
                let need = load.map_or(before, |load| needed(&config, &load)).clamp(config.min, config.max);
                let certain = load.is_some_and(|load| load.complete);
                prop_assert!(after >= need, "{after} Pods where {need} are needed");
                needs.push((pool.now, if certain { need } else { need.max(before.clamp(config.min, config.max)) }));
                if after < before && before <= config.max {
                    prop_assert!(certain);
                    let window = pool.now - config.delay;
                    let most = needs.iter().filter(|(at, _)| *at > window).map(|(_, need)| *need).max();
                    prop_assert_eq!(Some(after), most, "not the most that was needed");
                    prop_assert!(needs[0].0 <= window, "watched for less than the delay");
                }
                if after == 0 {
                    prop_assert!(load.is_none_or(|load| load.waiting + load.running + load.ending == 0));
                }
                // Always bounded.
                prop_assert!(pool.history.needs.len() as i64 <= i64::from(more) + 1);
            }
        }
    }
}
