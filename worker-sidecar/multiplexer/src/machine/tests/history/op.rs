//! The operations of a history, and their likelihood.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::Model;
use crate::config::{Knobs, Linger, ModelConfig, SlotConfig};
use crate::event::{DownCause, LinkKind, RequestClass};

const SHORTEST: usize = 60;
const LONGEST: usize = 240;

/// The last one is in no configuration.
pub(super) const MODELS: [&str; 5] = ["a", "b", "c", "d", "stranger"];

/// One operation. Numbers select among what exists at that time, so that shrunk histories stay meaningful.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// A request of any relay arrives, which has already waited there.
    Arrive {
        relay: usize,
        model: usize,
        waited: u64,
    },
    /// Requests arrive at a relay with a queue, and the relay reports them.
    Queue {
        relay: usize,
        model: usize,
        requests: u32,
    },
    /// From now on, a relay's requests for a model are of this class and rank.
    Classify {
        relay: usize,
        model: usize,
        class: RequestClass,
        rank: u32,
    },
    /// A relay sends a request that it may send.
    Send {
        relay: usize,
    },
    /// A relay's client disconnects before its request was sent.
    Withdraw {
        relay: usize,
    },
    Cancel {
        request: usize,
    },
    /// The client of a running request disconnects.
    Abandon {
        lease: usize,
    },
    Finish {
        lease: usize,
        answered: bool,
    },
    /// The driver returns from its latest call.
    Answer {
        fails: bool,
        /// If it fails: the kill and the memory check after it fail too.
        hopeless: bool,
        sleeps: bool,
    },
    /// The driver returns from a superseded call.
    AnswerLate {
        call: usize,
        fails: bool,
    },
    AnswerProbe {
        finds: Finds,
    },
    Crash {
        cause: DownCause,
        old: bool,
    },
    ConnectFailed,
    Join {
        kind: LinkKind,
    },
    Lose {
        relay: usize,
    },
    Leave {
        relay: usize,
    },
    Heard {
        relay: usize,
    },
    Load {
        model: usize,
    },
    Unload {
        model: usize,
        now: bool,
    },
    Pin {
        model: usize,
        pinned: bool,
    },
    Config(Box<SlotConfig>),
    /// The next load of a model uses other settings.
    Change {
        model: usize,
    },
    Stop {
        millis: u64,
    },
    /// Time passes, with a tick whenever one is due.
    Pass {
        millis: u64,
    },
    /// Time passes, and the timer is late.
    Oversleep {
        millis: u64,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Finds {
    Truth,
    Nothing,
    Other(usize),
    Silence,
}

fn any_index() -> std::ops::Range<usize> {
    0..64
}

fn known() -> std::ops::Range<usize> {
    0..MODELS.len() - 1
}

fn op() -> impl Strategy<Value = Op> {
    // Long times are rare: during them, silent drivers are treated as dead.
    let short = prop::sample::select(vec![1, 50, 500, 1_000, 2_000, 5_000]);
    let millis = prop_oneof![20 => short, 2 => Just(30_000_u64), 1 => Just(120_000_u64)];
    prop_oneof![
        40 => of_requests(),
        40 => of_the_driver(),
        6 => of_people(),
        18 => millis.clone().prop_map(|millis| Op::Pass { millis }),
        2 => millis.prop_map(|millis| Op::Oversleep { millis }),
    ]
}

fn of_requests() -> impl Strategy<Value = Op> {
    let waited = prop::sample::select(vec![0, 0, 100, 10_000, 400_000]);
    let kinds = prop::sample::select(vec![LinkKind::Held, LinkKind::Granted]);
    let classes = prop::sample::select(vec![RequestClass::Interactive, RequestClass::Normal, RequestClass::Batch]);
    prop_oneof![
        12 => (any_index(), 0..MODELS.len(), waited)
            .prop_map(|(relay, model, waited)| Op::Arrive { relay, model, waited }),
        6 => (any_index(), known(), 1..6_u32)
            .prop_map(|(relay, model, requests)| Op::Queue { relay, model, requests }),
        4 => (any_index(), 0..MODELS.len(), classes, 0..3_u32)
            .prop_map(|(relay, model, class, rank)| Op::Classify { relay, model, class, rank }),
        8 => any_index().prop_map(|relay| Op::Send { relay }),
        2 => any_index().prop_map(|relay| Op::Withdraw { relay }),
        2 => any_index().prop_map(|request| Op::Cancel { request }),
        6 => any_index().prop_map(|lease| Op::Abandon { lease }),
        6 => (any_index(), prop::bool::weighted(0.8)).prop_map(|(lease, answered)| Op::Finish { lease, answered }),
        2 => kinds.prop_map(|kind| Op::Join { kind }),
        1 => any_index().prop_map(|relay| Op::Lose { relay }),
        1 => any_index().prop_map(|relay| Op::Leave { relay }),
        1 => any_index().prop_map(|relay| Op::Heard { relay }),
    ]
}

fn of_the_driver() -> impl Strategy<Value = Op> {
    let finds = prop_oneof![
        12 => Just(Finds::Truth),
        1 => Just(Finds::Nothing),
        1 => (0..MODELS.len()).prop_map(Finds::Other),
        2 => Just(Finds::Silence),
    ];
    let causes = prop::sample::select(vec![DownCause::Gone, DownCause::Unresponsive]);
    prop_oneof![
        24 => (prop::bool::weighted(0.15), prop::bool::weighted(0.1), any::<bool>())
            .prop_map(|(fails, hopeless, sleeps)| Op::Answer { fails, hopeless, sleeps }),
        2 => (any_index(), any::<bool>()).prop_map(|(call, fails)| Op::AnswerLate { call, fails }),
        6 => finds.prop_map(|finds| Op::AnswerProbe { finds }),
        1 => (causes, prop::bool::weighted(0.2)).prop_map(|(cause, old)| Op::Crash { cause, old }),
        1 => Just(Op::ConnectFailed),
    ]
}

fn of_people() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..MODELS.len()).prop_map(|model| Op::Load { model }),
        6 => (0..MODELS.len(), prop::bool::weighted(0.7)).prop_map(|(model, now)| Op::Unload { model, now }),
        3 => (known(), prop::bool::weighted(0.4)).prop_map(|(model, pinned)| Op::Pin { model, pinned }),
        2 => config().prop_map(|config| Op::Config(Box::new(config))),
        2 => (0..MODELS.len()).prop_map(|model| Op::Change { model }),
    ]
}

/// Times so short that many deadlines are reached.
fn knobs() -> impl Strategy<Value = Knobs> {
    let secs = |choices: &[u64]| {
        let choices: Vec<_> = choices.iter().map(|secs| Duration::from_secs(*secs)).collect();
        prop::sample::select(choices)
    };
    let linger = prop_oneof![
        4 => Just(Linger::Auto),
        1 => Just(Linger::Off),
        1 => secs(&[1, 3]).prop_map(Linger::Fixed),
    ];
    let waits = (secs(&[0, 1, 30]), secs(&[5, 60, 600]), secs(&[5, 300, 300]), prop::option::of(secs(&[1, 60, 300])));
    (waits, secs(&[0, 5, 20]), linger, any::<bool>()).prop_map(
        |((drain_timeout, load_timeout, hold_budget, max_wait), min_residency, linger, rollback)| Knobs {
            drain_timeout,
            load_timeout,
            hold_budget,
            max_wait,
            min_residency,
            linger,
            rollback,
        },
    )
}

fn config() -> impl Strategy<Value = SlotConfig> {
    let secs = || prop::option::weighted(0.3, prop::sample::select(vec![5_u64, 60]).prop_map(Duration::from_secs));
    let model = (prop::bool::weighted(0.8), 1..4_u32, prop::bool::weighted(0.05), secs(), prop::option::of(1..40_u64));
    let models = vec(model, MODELS.len() - 1).prop_map(|models| {
        let there = models.into_iter().zip(MODELS).filter(|((there, ..), _)| *there);
        let made = there.map(|((_, capacity, pin, idle_ttl, memory), id)| ModelConfig {
            pin,
            idle_ttl,
            memory,
            ..ModelConfig::new(id, capacity)
        });
        made.collect::<Vec<_>>()
    });
    let default = prop::option::of(known());
    (models, knobs(), default, secs(), 1..6_usize, prop::option::of(Just(40))).prop_map(
        |(models, knobs, default, return_to_default_after, max_held_per_relay, memory)| SlotConfig {
            knobs,
            memory,
            default: default.map(|index| Model::from(MODELS[index])),
            return_to_default_after,
            max_held_per_relay,
            ..SlotConfig::new("gpu0", models)
        },
    )
}

pub(super) fn history() -> impl Strategy<Value = (SlotConfig, Vec<Op>)> {
    let end = prop::option::weighted(0.15, prop::sample::select(vec![0, 10_000_u64]));
    (config(), vec(op(), SHORTEST..LONGEST), end, vec(op(), 0..40)).prop_map(|(config, mut ops, end, rest)| {
        if let Some(millis) = end {
            ops.push(Op::Stop { millis });
            ops.extend(rest);
        }
        (config, ops)
    })
}
