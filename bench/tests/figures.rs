//! The required figures of the multiplexer. Each of them is measured with the worker's own slot machine.

use std::time::Duration;

use modelrelay_bench::simulation::report::{Keys, LENGTH, LOADS, Policy, SEEDS, one_key_beside_four};
use modelrelay_bench::simulation::rivals::Rule;
use modelrelay_bench::simulation::rng::Rng;
use modelrelay_bench::simulation::slot::Setup;
use modelrelay_bench::simulation::worker::WorkerSimulation;
use modelrelay_bench::simulation::workload::{Assistants, Busy, Kind, Planned, Workload};
use modelrelay_bench::simulation::{Job, ModelId, Scheduler, Time, run};
use modelrelay_multiplexer::config::{Knobs, Linger};
use modelrelay_multiplexer::event::LinkKind;
use modelrelay_multiplexer::policy;

const BOTH: [LinkKind; 2] = [LinkKind::Granted, LinkKind::Held];

fn secs(secs: f64) -> Duration {
    Duration::from_secs_f64(secs)
}

fn start_worker(models: usize, load: f64, relay: LinkKind) -> WorkerSimulation {
    Setup { relay, ..Setup::new(models, secs(load)) }.start()
}

fn job(at: f64, model: ModelId, service: f64) -> (Time, Job) {
    (secs(at), Job { client: 0, model, service: secs(service) })
}

/// Clients that stop after `left` requests.
struct Limited<W> {
    clients: W,
    left: usize,
}

impl<W: Workload> Workload for Limited<W> {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        let jobs = self.clients.begin();
        self.left -= jobs.len();
        jobs
    }

    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)> {
        let mut jobs = self.clients.after(answered, now);
        jobs.truncate(self.left);
        self.left -= jobs.len();
        jobs
    }
}

/// Six requests for each of models 0 and 1, alternating, behind one that runs.
fn twelve_behind_one_of(resident: ModelId) -> Planned {
    let twelve = (0..12).map(|n| job(10.0 + 0.01 * f64::from(n), (n % 2) as usize, 0.5));
    Planned(std::iter::once(job(0.0, resident, 20.0)).chain(twelve).collect())
}

#[test]
fn mixed_requests_behind_third_model_swap_twice() {
    for relay in BOTH {
        let mut ours = start_worker(3, 1.0, relay);
        let outcome = run(&mut twelve_behind_one_of(2), &mut ours, LENGTH);
        assert_eq!((outcome.done, outcome.loads - 1), (13, 2), "{relay:?}");
    }
}

#[test]
fn mixed_requests_behind_resident_swap_at_most_twice() {
    for relay in BOTH {
        let mut ours = start_worker(2, 1.0, relay);
        let outcome = run(&mut twelve_behind_one_of(0), &mut ours, LENGTH);
        assert_eq!(outcome.done, 13);
        assert!(outcome.loads - 1 <= 2, "{relay:?}: {} swaps", outcome.loads - 1);
    }
}

#[test]
fn eight_alternating_clients_need_at_most_25_loads() {
    for relay in BOTH {
        for at in [vec![0; 8], vec![0, 1, 0, 1, 0, 1, 0, 1], vec![0, 0, 0, 0, 0, 0, 0, 1]] {
            for seed in SEEDS {
                let assistants = Assistants { rng: Rng::new(seed), turns: vec![0, 1], at: at.clone(), thinking: false };
                let mut clients = Limited { clients: assistants, left: 160 };
                let outcome = run(&mut clients, &mut start_worker(2, 2.0, relay), LENGTH);
                assert_eq!(outcome.done, 160);
                assert!(outcome.loads <= 25, "{relay:?} {at:?} seed {seed}: {} loads", outcome.loads);
            }
        }
    }
}

/// Clients that never pause, and one request for another model at this time.
struct Lone {
    busy: Busy,
    at: f64,
    model: ModelId,
}

impl Workload for Lone {
    fn begin(&mut self) -> Vec<(Time, Job)> {
        let mut jobs = self.busy.begin();
        let client = self.busy.models.len();
        jobs.push((secs(self.at), Job { client, model: self.model, service: secs(3.0) }));
        jobs
    }

    fn after(&mut self, answered: &Job, now: Time) -> Vec<(Time, Job)> {
        let lone = answered.client == self.busy.models.len();
        if lone { Vec::new() } else { self.busy.after(answered, now) }
    }
}

/// Responses of model 0 in this time from the lone request's arrival on.
fn answers_of_the_busy_model(at: f64, load: f64, seed: u64, window: f64) -> (u32, u32, Duration) {
    let busy = || Busy { rng: Rng::new(seed), models: vec![0; 4] };
    let play = |length: f64| {
        let mut scheduler = Setup::new(2, secs(load)).start();
        let outcome = run(&mut Lone { busy: busy(), at, model: 1 }, &mut scheduler, secs(length));
        assert_eq!(scheduler.severed(), 0);
        outcome
    };
    let alone = |length: f64| run(&mut busy(), &mut Setup::new(2, secs(load)).start(), secs(length)).done_of(0);
    let with = play(at + window).done_of(0) - play(at).done_of(0);
    let without = alone(at + window) - alone(at);
    (with, without, play(600.0 + at).worst(1))
}

#[test]
fn lone_request_meets_bound_without_starving_saturated_model() {
    // Early and late in the resident's quantum.
    for at in [5.0, 60.0] {
        for load in [0.5, 3.0] {
            // One minute has 60 responses, plus or minus ten; the sum of many shows what is not chance.
            let (mut with, mut without) = (0, 0);
            for seed in 1..31 {
                let (one, other, waited) = answers_of_the_busy_model(at, load, seed, 60.0);
                (with, without) = (with + one, without + other);
                let quantum = policy::quantum(&Knobs::default(), secs(load));
                let bound = quantum + Knobs::default().drain_timeout + secs(load);
                assert!(waited <= bound, "load {load} at {at}: {waited:?} beyond {bound:?}");
            }
            assert!(f64::from(with) >= 0.7 * f64::from(without), "load {load} at {at}: {with} of {without}");
        }
    }
}

#[test]
fn saturated_model_keeps_most_throughput_despite_minutely_swaps() {
    for load in LOADS {
        for seed in SEEDS {
            let load = Duration::from_secs(load);
            let ours = Policy::Ours.simulate(Kind::Saturated, load, seed).done_of(0);
            let alone = Policy::Rival(Rule::StickyUntilIdle).simulate(Kind::Saturated, load, seed).done_of(0);
            assert!(f64::from(ours) >= 0.7 * f64::from(alone), "{load:?}: {ours} of {alone}");
        }
    }
}

/// The bound of the policy with all models saturated: a request right after its model was unloaded waits for all other
/// turns.
#[test]
fn saturated_models_wait_no_longer_than_their_bound() {
    for (models, load) in [(2, 3.0), (2, 15.0), (3, 3.0), (3, 15.0), (4, 3.0)] {
        for seed in SEEDS {
            let clients: Vec<_> = (0..4 * models).map(|client| client % models).collect();
            let mut busy = Busy { rng: Rng::new(seed), models: clients };
            let outcome = run(&mut busy, &mut start_worker(models, load, LinkKind::Granted), LENGTH);
            let knobs = Knobs::default();
            let candidate = policy::Candidate { waiting: 4, cost: secs(load), ..policy::Candidate::default() };
            let others = vec![candidate; models - 1];
            let bound = policy::bound(&knobs, true, &others, 0);
            for model in 0..models {
                let worst = outcome.worst(model);
                assert!(worst <= bound, "{models} models, load {load}: {worst:?} beyond {bound:?}");
            }
            let shares = (0..models).map(|model| outcome.done_of(model));
            let (least, most) = (shares.clone().min().unwrap_or(0), shares.max().unwrap_or(0));
            assert!(f64::from(least) > 0.7 * f64::from(most), "one of {models} gets {least}, another {most}");
        }
    }
}

/// Crowds have more waiting time per second of swapping than one request can ever have. Only its bound gets it served.
#[test]
fn lone_request_is_not_starved_by_two_crowds() {
    for load in [3.0, 15.0] {
        for at in [100.0, 333.0, 500.0] {
            let models = [vec![0; 40], vec![1; 40]].concat();
            let busy = Busy { rng: Rng::new(3), models };
            let outcome = run(&mut Lone { busy, at, model: 2 }, &mut start_worker(3, load, LinkKind::Granted), LENGTH);
            let knobs = Knobs::default();
            let waited = outcome.worst(2);
            let candidate = policy::Candidate { waiting: 1, cost: secs(load), ..policy::Candidate::default() };
            let longest = policy::longest_wait(&knobs, true, &[candidate; 2], 1);
            assert!(waited <= longest, "load {load} at {at}: {waited:?} beyond {longest:?}");
            assert_eq!(outcome.done_of(2), 1);
        }
    }
}

#[test]
fn cheap_swaps_leave_eight_ninths_for_serving() {
    let mut busy = Busy { rng: Rng::new(1), models: vec![0, 1, 0, 1, 0, 1, 0, 1] };
    let outcome = run(&mut busy, &mut start_worker(2, 3.0, LinkKind::Granted), LENGTH);
    let swapping = f64::from(outcome.loads) * 3.0 / 3600.0;
    assert!(swapping < 1.0 / 9.0, "{swapping}");
}

#[test]
fn waiter_leaving_before_commit_point_causes_no_swap() {
    for relay in BOTH {
        let mut ours = start_worker(2, 3.0, relay);
        let mut begin = Vec::new();
        let of = |model| job(0.0, model, 0.0).1;
        ours.arrive(0, &of(0), secs(0.0), &mut begin);
        ours.tick(secs(3.0), &mut begin);
        assert_eq!(begin, [0]);
        // It waits, and when the quantum is over the gate closes for it.
        ours.arrive(1, &of(1), secs(4.0), &mut begin);
        ours.tick(secs(28.0), &mut begin);
        ours.arrive(2, &of(0), secs(29.0), &mut begin);
        assert_eq!(begin, [0], "the gate is closed: {relay:?}");
        ours.cancel(1, secs(30.0), &mut begin);
        assert_eq!(begin, [0, 2], "and open again");
        ours.finish(0, secs(31.0), &mut begin);
        ours.finish(2, secs(32.0), &mut begin);
        assert_eq!((ours.loads(), ours.evictions(), ours.severed()), (1, 0, 0), "{relay:?}");
    }
}

#[test]
fn impossible_load_never_disturbs_resident() {
    let mut setup = Setup::new(2, secs(3.0));
    setup.config.memory = Some(24 << 30);
    setup.config.models[1].memory = Some(30 << 30);
    setup.relay = LinkKind::Held;
    let mut scheduler = setup.start();
    let mut clients = Kind::Saturated.clients(1);
    let outcome = run(clients.as_mut(), &mut scheduler, LENGTH);
    assert_eq!((scheduler.evictions(), scheduler.loads(), scheduler.severed()), (0, 1, 0));
    assert_eq!(scheduler.refused(), 60, "each of them is rejected at once");
    let alone = Policy::Rival(Rule::StickyUntilIdle).simulate(Kind::Saturated, secs(3.0), 1);
    assert_eq!(outcome.done_of(0), alone.done_of(0), "and the resident has noticed nothing");
}

#[test]
fn throughput_is_same_queued_at_relay_or_worker() {
    for kind in Kind::ALL {
        let play = |relay| {
            let mut clients = kind.clients(1);
            run(clients.as_mut(), &mut start_worker(kind.models(), 15.0, relay), LENGTH).done
        };
        let (at_the_relay, in_the_worker) = (f64::from(play(LinkKind::Granted)), f64::from(play(LinkKind::Held)));
        let ratio = at_the_relay / in_the_worker;
        assert!((0.95..1.05).contains(&ratio), "{}: {at_the_relay} and {in_the_worker}", kind.name());
    }
}

#[test]
fn adaptive_linger_helps_assistants_and_spares_strict_alternation() {
    let play = |kind: Kind, linger: Linger| {
        let mut setup = Setup::new(kind.models(), secs(15.0));
        setup.config.knobs.linger = linger;
        f64::from(run(kind.clients(1).as_mut(), &mut setup.start(), LENGTH).done)
    };
    for kind in [Kind::Orchestrators(1), Kind::Orchestrators(2), Kind::Assistants(2)] {
        let gain = play(kind, Linger::Auto) / play(kind, Linger::Off);
        assert!(gain >= 1.14, "{}: {gain}", kind.name());
    }
    assert_eq!(play(Kind::Alternating, Linger::Auto), play(Kind::Alternating, Linger::Off));
}

#[test]
fn policy_starves_no_model_and_stays_near_best() {
    for kind in Kind::ALL {
        for load in LOADS.map(Duration::from_secs) {
            let done = |policy: Policy| f64::from(policy.simulate(kind, load, 2).done);
            let ours = Policy::Ours.simulate(kind, load, 2);
            let rivals = Policy::ALL.into_iter().filter(|policy| *policy != Policy::Ours);
            // Sticky serves most of a saturated model by never serving the other.
            let fair =
                rivals.filter(|policy| kind != Kind::Saturated || *policy != Policy::Rival(Rule::StickyUntilIdle));
            let best = fair.map(done).fold(0.0, f64::max);
            assert!(f64::from(ours.done) >= 0.98 * best, "{} at {load:?}: {} of {best}", kind.name(), ours.done);
            assert!(ours.worst_of_all() < secs(600.0), "{} at {load:?}: {:?}", kind.name(), ours.worst_of_all());
        }
    }
}

#[test]
fn batch_delays_chats_for_other_model_briefly() {
    for load in LOADS.map(Duration::from_secs) {
        for seed in SEEDS.take(1) {
            let [(without, slow), (equal, _), (classed, fast)] = Keys::ALL.map(|keys| keys.simulate(load, seed));
            let (slowest, longest) = (slow[slow.len() - 1], fast[fast.len() - 1]);
            assert_eq!(equal, without, "load {load:?}: two keys of one class have equal turns");
            // The floor of the batch's turn, or the least residency, a response that ends, and two swaps.
            let bound = (3 * load).max(secs(5.0)) + 2 * load + secs(30.0);
            assert!(longest <= bound, "load {load:?}: a chat waits {longest:?}");
            assert!(load < secs(10.0) || longest < slowest.mul_f64(0.75), "load {load:?}: {longest:?} of {slowest:?}");
            assert!(f64::from(classed) >= 0.6 * f64::from(without), "load {load:?}: {classed} of {without}");
        }
    }
}

#[test]
fn keys_share_slot_by_service_whatever_their_models() {
    let load = secs(3.0);
    for seed in SEEDS.take(2) {
        let ratio = |has_keys| {
            let done = one_key_beside_four(has_keys, load, seed);
            f64::from(done[0]) / f64::from(done[1..].iter().sum::<u32>()) * 4.0
        };
        let (before, after) = (ratio(false), ratio(true));
        assert!(before > 3.0, "seed {seed}: the lone key gets {before} times the share of another");
        assert!(after < 0.6 * before, "seed {seed}: {after} of {before}");
    }
}
