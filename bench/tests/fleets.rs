//! Fleets: several relays and several multiplexers, between which messages take time. Whichever worker is assigned a
//! load, every request is served, a model is loaded once however many requests need it, and a fleet with a place for
//! each model stops swapping.

use std::time::Duration;

use modelrelay_bench::simulation::fleet::{Fault, Fleet};
use modelrelay_bench::simulation::slot::Setup;
use modelrelay_bench::simulation::workload::{Planned, Workload};
use modelrelay_bench::simulation::{Job, ModelId, Outcome, Time, run};
use modelrelay_multiplexer::estimate::Priors;
use proptest::collection::vec;
use proptest::prelude::*;

const MODELS: usize = 3;
const CAPACITY: u32 = 2;
const LOAD: Duration = Duration::from_millis(300);
const WAKE: Duration = Duration::from_millis(60);
const SERVICE: Duration = Duration::from_millis(40);
/// The least time that a model stays loaded while requests for others wait.
const RESIDENCY: Duration = Duration::from_millis(900);

fn worker() -> Setup {
    let mut setup = Setup { wake: Some(WAKE), ..Setup::new(MODELS, LOAD) };
    setup.config.models.iter_mut().for_each(|model| model.capacity = CAPACITY);
    setup.config.knobs.min_residency = RESIDENCY;
    setup.config.priors = Priors { cold: LOAD, wake: WAKE };
    setup
}

fn fleet(relays: usize, workers: usize, seed: u64) -> Fleet {
    Fleet::start(relays, &vec![worker(); workers], Some(seed))
}

fn millis(millis: usize) -> Duration {
    Duration::from_millis(millis as u64)
}

fn job(client: usize, model: ModelId) -> Job {
    Job { client, model, service: SERVICE }
}

#[derive(Clone, Debug)]
enum Op {
    Submit { relay: usize, model: usize },
    Fault(Fault),
    Pass { millis: usize },
}

fn op(relays: usize, links: usize) -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (0..relays, 0..MODELS).prop_map(|(relay, model)| Op::Submit { relay, model }),
        2 => (0..relays, 0..64_usize).prop_map(|(relay, index)| Op::Fault(Fault::Cancel { relay, index })),
        1 => (0..links).prop_map(|link| Op::Fault(Fault::Break { link })),
        8 => prop::sample::select(vec![1, 5, 60, 400, 1_500]).prop_map(|millis| Op::Pass { millis }),
    ]
}

fn history() -> impl Strategy<Value = (usize, usize, Vec<Op>)> {
    (1..4_usize, 1..5_usize)
        .prop_flat_map(|(relays, workers)| (Just(relays), Just(workers), vec(op(relays, relays * workers), 10..120)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_request_is_served_despite_competing_models(
        (relays, workers, ops) in history(),
        broken in prop::option::of((0..4_usize, 0..MODELS)),
        seed: u64,
    ) {
        let mut setups = vec![worker(); workers];
        // One worker may be unable to load a model that two others can: links break one at a time.
        if let Some((worker, model)) = broken.filter(|_| workers > 2) {
            setups[worker % workers].broken = Some(model);
        }
        let mut fleet = Fleet::start(relays, &setups, Some(seed));
        let (mut now, mut jobs) = (Time::ZERO, Vec::new());
        for op in ops {
            match op {
                Op::Submit { relay, model } => jobs.push((now, job(relay, model))),
                Op::Fault(fault) => fleet.plan([(now, fault)]),
                Op::Pass { millis: time } => now += millis(time),
            }
        }
        run(&mut Planned(jobs), &mut fleet, now + Duration::from_secs(60));
        prop_assert_eq!(fleet.pending(), 0, "requests starve");
    }
}

#[test]
fn model_demanded_by_many_relays_loads_once() {
    for seed in 0..50 {
        let jobs = (0..60).map(|request| (millis(5 * request), job(request, 0)));
        let outcome = run(&mut Planned(jobs.collect()), &mut fleet(3, 4, seed), Duration::from_secs(5));
        assert_eq!((outcome.done, outcome.loads), (60, 1), "seed {seed}");
    }
}

#[test]
fn fleet_with_slot_per_model_stops_loading() {
    for seed in 0..20 {
        let jobs = (0..400).map(|turn| (millis(50 * turn), job(turn, turn * 7 % 5 % MODELS)));
        let mut jobs = Planned(jobs.collect());
        let mut loads_by = |time| run(&mut jobs, &mut fleet(2, MODELS, seed), time).loads;
        assert_eq!(loads_by(millis(20_000)), loads_by(millis(10_000)), "seed {seed}: models go back and forth");
    }
}

/// Clients that wait for each response before their next request, alternating between two models.
struct Crowd {
    seed: u64,
    answers: [usize; 8],
}

impl Crowd {
    fn new(seed: u64) -> Self {
        Self { seed, answers: [0; 8] }
    }

    /// Neither in step with each other nor in strict alternation.
    fn job(&self, client: usize) -> Job {
        job(client, (client / 2 + self.answers[client] / (1 + client % 3)) % 2)
    }
}

impl Workload for Crowd {
    /// Within some milliseconds, in any order.
    fn begin(&mut self) -> Vec<(Time, Job)> {
        let chance = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = |client: usize| Duration::from_millis((chance >> (5 * client + 3)) % 12);
        (0..self.answers.len()).map(|client| (at(client), self.job(client))).collect()
    }

    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)> {
        self.answers[answered.client] += 1;
        vec![(now + millis(10), self.job(answered.client))]
    }
}

/// Each meets the requests in a different order, and chooses before it can learn of the other's choice.
#[test]
fn relays_with_different_choices_agree_before_next_swap() {
    let mut once_more = 0;
    for seed in 0..60 {
        let run_for = |secs| run(&mut Crowd::new(seed), &mut fleet(2, 2, seed), Duration::from_secs(secs));
        let (first, both): (Outcome, Outcome) = (run_for(2), run_for(4));
        assert!(both.done > first.done, "seed {seed}: requests are served");
        assert_eq!(both.loads, first.loads, "seed {seed}: models go back and forth");
        assert!(first.loads <= 3, "seed {seed}: {} loads of two models by two workers", first.loads);
        once_more += u32::from(first.loads > 2);
    }
    assert!(once_more > 0, "they never chose differently");
}
