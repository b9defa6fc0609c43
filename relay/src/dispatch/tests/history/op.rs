//! The events of a history, and their probabilities.

mod busy;
mod crowded;
mod slots;

use std::fmt::Debug;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use modelrelay_protocol::message::Slot;

use crate::dispatch::tests::harness::report;
use crate::dispatch::{
    AttemptFailure, CancelReason, Class, Distance, Fairness, Gate, Grant, LoadFailure, LossCause, Model, Placement,
    Settings, Spill,
};

const SHORTEST: usize = 60;
const LONGEST: usize = 240;

/// A possible event. Numbers select among the existing objects, so that a shrunk history stays meaningful.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Submit {
        model: usize,
        bytes: u64,
        pin: Option<usize>,
        needs_core1: bool,
        /// The models that may serve it, as a mask.
        allowed: Option<usize>,
        /// One of a few keys, and the percentage of the queue that it may fill.
        share: Option<(u8, u8)>,
        /// One of a few for each model.
        conversation: Option<u8>,
        owner: Option<OwnerOp>,
    },
    Cancel {
        request: usize,
        reason: CancelReason,
    },
    Join {
        models: usize,
        max_concurrent: u32,
        load: u32,
        core1: bool,
        /// The models that its backend fails, as a mask.
        failing: usize,
        /// The slots of its multiplexer, if it has one.
        slots: Option<Vec<Slot>>,
        /// One of a few worker processes; `None`: one that does not name itself.
        process: Option<u8>,
        /// How far it is.
        distance: Option<Distance>,
    },
    Lose {
        worker: usize,
        cause: LossCause,
    },
    Models {
        worker: usize,
        models: usize,
        /// The models that its backend fails, as a mask.
        failing: usize,
        load: Option<u32>,
    },
    Load {
        worker: usize,
        load: u32,
    },
    Grant {
        worker: usize,
        grant: Grant,
    },
    /// A multiplexer opens the gates of these models, and closes all others.
    Gates {
        worker: usize,
        models: usize,
        gate: Gate,
    },
    Slots {
        worker: usize,
        slots: Vec<Slot>,
    },
    /// The response head of a running request goes to the client.
    Start {
        request: usize,
    },
    Complete {
        request: usize,
        /// The share of the prompt that was cached, in permille.
        cached: Option<u16>,
        /// The input and output tokens that it has used.
        used: Option<(u64, u64)>,
    },
    /// A running request has used tokens.
    Use {
        request: usize,
        input: u64,
        output: u64,
    },
    /// The prompt of a running request is computed.
    Begin {
        request: usize,
    },
    /// A worker reports conversations, by model and number, with their bytes, and its backlog for other relays.
    Homes {
        worker: usize,
        homes: Vec<(usize, u8, u64)>,
        backlog: u64,
    },
    /// The worker of a running request sends nothing.
    Silent {
        request: usize,
    },
    Fail {
        request: usize,
        failure: AttemptFailure,
    },
    /// A completion or failure of an attempt that does not run (any more).
    Stray {
        worker: usize,
        request: u64,
        attempt: u32,
        failure: Option<AttemptFailure>,
    },
    Drain {
        worker: usize,
    },
    Succeed {
        older: usize,
        newer: usize,
    },
    Settings(Settings),
    Deleted,
    DrainBegun,
    DrainDeadline,
    /// Time passes, with a tick whenever one is due.
    Pass {
        millis: u64,
    },
    /// Time passes, and the timer is late.
    Oversleep {
        millis: u64,
    },
}

/// One of a few keys, its weight in hundredths, and a class.
#[derive(Clone, Debug)]
pub(super) struct OwnerOp {
    /// 0: without a key.
    pub(super) key: u8,
    pub(super) weight: u16,
    pub(super) class: Class,
}

/// The parts of a history that concern placement and fair shares.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Kind {
    /// None.
    Plain,
    /// Requests have conversations, and both placements are used.
    Placed,
    /// The same, and workers are near or far.
    Zoned,
    /// The same as placed, and requests have owners.
    Shared,
    /// A few keys want more than the workers can do.
    Crowded,
}

impl Kind {
    /// Draws an optional part of the placement. A plain history must draw nothing, because its effects are pinned.
    fn draw<T: Clone + Debug + 'static>(self, part: impl Strategy<Value = T> + 'static) -> BoxedStrategy<Option<T>> {
        self.draw_in(&[Self::Placed, Self::Zoned, Self::Shared], part)
    }

    /// Draws an optional part of fair shares.
    fn draw_shared<T: Clone + Debug + 'static>(
        self,
        part: impl Strategy<Value = T> + 'static,
    ) -> BoxedStrategy<Option<T>> {
        self.draw_in(&[Self::Shared], part)
    }

    /// Draws an optional part of zones.
    fn draw_zones<T: Clone + Debug + 'static>(
        self,
        part: impl Strategy<Value = T> + 'static,
    ) -> BoxedStrategy<Option<T>> {
        self.draw_in(&[Self::Zoned], part)
    }

    fn draw_in<T: Clone + Debug + 'static>(
        self,
        kinds: &[Self],
        part: impl Strategy<Value = T> + 'static,
    ) -> BoxedStrategy<Option<T>> {
        if kinds.contains(&self) { prop::option::weighted(0.8, part).boxed() } else { Just(None).boxed() }
    }
}

fn op(kind: Kind) -> BoxedStrategy<Op> {
    let millis = prop::sample::select(vec![1, 10, 50, 100, 500, 1_000, 3_000]);
    let op = prop_oneof![
        44 => of_a_request(kind),
        31 => of_a_worker(kind),
        1 => limits(kind).prop_map(Op::Settings),
        1 => Just(Op::Pass { millis: 61_000 }),
        12 => millis.clone().prop_map(|millis| Op::Pass { millis }),
        1 => millis.prop_map(|millis| Op::Oversleep { millis }),
    ];
    match kind {
        Kind::Plain | Kind::Crowded => op.boxed(),
        Kind::Placed | Kind::Zoned => prop_oneof![12 => op, 1 => begin(), 1 => homes()].boxed(),
        Kind::Shared => prop_oneof![12 => op, 1 => begin(), 1 => homes(), 2 => use_tokens()].boxed(),
    }
}

fn begin() -> impl Strategy<Value = Op> {
    any_index().prop_map(|request| Op::Begin { request })
}

fn use_tokens() -> impl Strategy<Value = Op> {
    let tokens = (any_index(), 0..20_u64, 0..20_u64);
    tokens.prop_map(|(request, input, output)| Op::Use { request, input, output })
}

fn owner() -> impl Strategy<Value = OwnerOp> {
    let weight = prop::sample::select(vec![1, 100, 100, 100, 250, 10_000]);
    let class = prop::sample::select(vec![Class::Interactive, Class::Normal, Class::Batch]);
    (0..4_u8, weight, class).prop_map(|(key, weight, class)| OwnerOp { key, weight, class })
}

fn homes() -> impl Strategy<Value = Op> {
    let homes = vec((0..MODELS.len(), 0..CONVERSATIONS, 1..50_u64), 0..3);
    let backlog = prop::sample::select(vec![0, 0, 10, 100]);
    (any_index(), homes, backlog).prop_map(|(worker, homes, backlog)| Op::Homes { worker, homes, backlog })
}

/// The share of a prompt that was cached.
fn cached() -> impl Strategy<Value = u16> {
    prop::sample::select(vec![0, 500, 1000])
}

fn distance() -> impl Strategy<Value = Distance> {
    prop::sample::select(Distance::ALL.to_vec())
}

fn spill() -> impl Strategy<Value = Spill> {
    let parts = (prop::sample::select(vec![0, 1, 3, u32::MAX]), prop::sample::select(vec![0, 10, 40, 1_000]));
    parts.prop_map(|(requests, bytes)| Spill { requests, bytes })
}

/// Selects among all existing objects.
fn any_index() -> std::ops::Range<usize> {
    0..64
}

fn of_a_request(kind: Kind) -> impl Strategy<Value = Op> {
    let pin = prop::option::weighted(0.1, any_index());
    let allowed = prop::option::weighted(0.2, 1..ALL_MODELS);
    let share = prop::option::of((0..3_u8, prop::sample::select(vec![1, 20, 50, 80, 100])));
    let conversation = kind.draw(0..CONVERSATIONS);
    let owner = kind.draw_shared(owner());
    let submit = (0..MODELS.len(), 1..50_u64, pin, prop::bool::weighted(0.15), allowed, share, conversation, owner)
        .prop_map(|(model, bytes, pin, needs_core1, allowed, share, conversation, owner)| Op::Submit {
            model,
            bytes,
            pin,
            needs_core1,
            allowed,
            share,
            conversation,
            owner,
        });
    let complete = (any_index(), kind.draw(cached()), kind.draw_shared((0..20_u64, 0..20_u64)))
        .prop_map(|(request, cached, used)| Op::Complete { request, cached, used });
    let reasons = [CancelReason::ClientDisconnect, CancelReason::SlowClient, CancelReason::Admin];
    let cancel = (any_index(), prop::sample::select(reasons.to_vec()))
        .prop_map(|(request, reason)| Op::Cancel { request, reason });
    prop_oneof![
        24 => submit,
        6 => cancel,
        5 => any_index().prop_map(|request| Op::Start { request }),
        12 => complete,
        3 => any_index().prop_map(|request| Op::Silent { request }),
        10 => (any_index(), failure()).prop_map(|(request, failure)| Op::Fail { request, failure }),
    ]
}

fn of_a_worker(kind: Kind) -> impl Strategy<Value = Op> {
    let multiplexer = prop::option::weighted(0.5, slots::slots());
    // May include models that are not advertised.
    let failing = prop_oneof![2 => Just(0), 1 => 1..ALL_MODELS];
    let join = (
        1..ALL_MODELS,
        1..4_u32,
        0..2_u32,
        any::<bool>(),
        failing.clone(),
        multiplexer,
        kind.draw(0..3_u8),
        kind.draw_zones(distance()),
    )
        .prop_map(|(models, max_concurrent, load, core1, failing, slots, process, distance)| Op::Join {
            models,
            max_concurrent,
            load,
            core1,
            failing,
            slots,
            process,
            distance,
        });
    let causes = [LossCause::Disconnected, LossCause::HeartbeatTimeout];
    let lose =
        (any_index(), prop::sample::select(causes.to_vec())).prop_map(|(worker, cause)| Op::Lose { worker, cause });
    let models = (any_index(), 0..ALL_MODELS, failing, prop::option::of(0..4_u32))
        .prop_map(|(worker, models, failing, load)| Op::Models { worker, models, failing, load });
    let grant =
        (0..4_u32, 0..3_u32, 1..3_u32).prop_map(|(slots, others, links)| Grant { slots, others, capacity: 6, links });
    let stray = (any_index(), 0..40_u64, 0..4_u32, prop::option::of(failure()))
        .prop_map(|(worker, request, attempt, failure)| Op::Stray { worker, request, attempt, failure });
    prop_oneof![
        6 => join,
        4 => lose,
        5 => models,
        4 => (any_index(), 0..4_u32).prop_map(|(worker, load)| Op::Load { worker, load }),
        14 => slots::of_a_multiplexer(),
        10 => (any_index(), grant).prop_map(|(worker, grant)| Op::Grant { worker, grant }),
        1 => stray,
        1 => any_index().prop_map(|worker| Op::Drain { worker }),
        1 => (any_index(), any_index()).prop_map(|(older, newer)| Op::Succeed { older, newer }),
    ]
}

fn failure() -> impl Strategy<Value = AttemptFailure> {
    let (code, retry_after) = (LoadFailure::InsufficientMemory, Some(Duration::from_secs(4)));
    let (load, fatal) = (report("the load failed"), report("the request failed"));
    prop::sample::select(vec![
        AttemptFailure::AtCapacity,
        AttemptFailure::AtCapacity,
        AttemptFailure::Draining,
        AttemptFailure::SeveredBySwap,
        AttemptFailure::SeveredBySwap,
        AttemptFailure::BackendUnreachable,
        AttemptFailure::BackendReset,
        AttemptFailure::LoadFailed { code, retry_after, report: load },
        AttemptFailure::Fatal(fatal),
    ])
}

/// Timeouts so short that many come due, and so round that many come due together.
fn limits(kind: Kind) -> impl Strategy<Value = Settings> {
    let seconds = |choices: &[u64]| {
        let choices: Vec<_> = choices.iter().map(|secs| Duration::from_secs(*secs)).collect();
        prop::sample::select(choices)
    };
    (
        prop::bool::weighted(0.9),
        prop_oneof![3 => 0..8_usize, 1 => 10..13_usize],
        50..400_u64,
        seconds(&[0, 1, 2, 5, 30]),
        prop::option::weighted(0.3, seconds(&[1, 3, 10])),
        prop::option::of(seconds(&[1, 3, 10])),
        any::<bool>(),
        seconds(&[1, 2, 4, 10, 60]),
        kind.draw(prop::sample::select(vec![0, 1, 2, 3, 10, 10, 100])),
        kind.draw_shared(prop::sample::select(vec![None, Some(0), Some(500), Some(500), Some(3_000)])),
        kind.draw_zones(spill()),
    )
        .prop_map(
            |(enabled, max_queue_len, max_queue_bytes, queue, absent, cold, declared, request, homes, after, spill)| {
                Settings {
                    enabled,
                    max_queue_len,
                    max_queue_bytes,
                    queue_timeout: queue,
                    absent_timeout: absent,
                    cold_timeout: cold,
                    cold_models: declared.then(|| MODELS[0].into()).into_iter().collect(),
                    request_timeout: request,
                    placement: if homes.is_some() { Placement::Cache } else { Placement::LeastLoad },
                    spill: spill.unwrap_or_default(),
                    max_homes: homes.unwrap_or(100),
                    fairness: fairness(after),
                }
            },
        )
}

/// `Some(None)`: by arrival; otherwise the milliseconds until a request is promoted.
fn fairness(drawn: Option<Option<u64>>) -> Fairness {
    let shared = |after| Fairness::Shared { promote_after: Duration::from_millis(after) };
    drawn.map_or(Fairness::default(), |after| after.map_or(Fairness::Fifo, shared))
}

/// The end of a history: most have none.
fn last_acts() -> impl Strategy<Value = Vec<Op>> {
    prop_oneof![
        6 => Just(vec![]),
        1 => Just(vec![Op::Deleted]),
        1 => Just(vec![Op::DrainBegun]),
        1 => Just(vec![Op::DrainBegun, Op::DrainDeadline]),
    ]
}

pub(super) fn history(kind: Kind) -> BoxedStrategy<(Settings, Vec<Op>)> {
    match kind {
        Kind::Plain => any_history(kind).boxed(),
        Kind::Crowded => crowded::history().boxed(),
        Kind::Placed | Kind::Zoned | Kind::Shared => {
            prop_oneof![3 => any_history(kind), 1 => busy::history(kind)].boxed()
        }
    }
}

fn any_history(kind: Kind) -> impl Strategy<Value = (Settings, Vec<Op>)> {
    let halves = (vec(op(kind), SHORTEST..LONGEST), last_acts(), vec(op(kind), 0..40));
    (limits(kind), halves).prop_map(|(limits, (mut ops, acts, rest))| {
        for act in acts {
            ops.push(act);
            ops.extend(rest.iter().cloned());
        }
        (Settings { enabled: true, ..limits }, ops)
    })
}

/// The last one is never the id of a slot's model.
pub(super) const MODELS: [&str; 4] = ["a", "b", "c", "z"];

/// The number of conversations for each model.
const CONVERSATIONS: u8 = 3;

/// Every subset of them, as a mask.
const ALL_MODELS: usize = 1 << MODELS.len();

pub(super) fn models(mask: usize) -> Vec<Model> {
    let chosen = MODELS.iter().enumerate().filter(|(bit, _)| mask & (1 << bit) != 0);
    chosen.map(|(_, name)| Model::from(*name)).collect()
}
