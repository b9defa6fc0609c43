//! The small worlds: their workers and requests, and how often something may happen.

use std::time::Duration;

use crate::dispatch::tests::harness;
use crate::dispatch::{Class, Fairness, Placement, Settings};

/// A small world.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) relays: usize,
    pub(super) workers: &'static [Kind],
    /// The number of workers that are connected at the start.
    pub(super) up: usize,
    /// The requests, in the order in which they arrive.
    pub(super) requests: &'static [Template],
    pub(super) budget: Budget,
    pub(super) failures: &'static [Failing],
    /// True if a worker may report that a response has begun.
    pub(super) begins: bool,
    /// True if the timer may be late: the next event comes after a deadline.
    pub(super) oversleeps: bool,
    pub(super) placement: Placement,
    /// The largest number of waiting requests.
    pub(super) queue: usize,
    /// How long a request waits for a worker. Its whole time is half as long again.
    pub(super) wait: Duration,
    /// How long a request waits for a load.
    pub(super) cold: Duration,
    /// Of this many states, one is examined for whether its requests end in time.
    pub(super) sample: u128,
}

/// A worker process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It supports only the seed messages, and serves this number of requests.
    Seed(u32),
    /// It grants this number of requests to all relays together.
    Granting(u32),
    /// It has a multiplexer with one slot, for one request of one of two models.
    Swapping,
}

/// A request, before it arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Template {
    pub(super) relay: usize,
    /// The index of the model's name.
    pub(super) model: usize,
    /// One of a few keys; 0: none.
    pub(super) key: u8,
    pub(super) class: Class,
    pub(super) conversation: Option<u8>,
    /// The only worker that may serve it.
    pub(super) pin: Option<usize>,
    pub(super) needs_core1: bool,
    /// The models that may serve it, as a mask.
    pub(super) allowed: Option<usize>,
}

/// How an attempt may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failing {
    AtCapacity,
    Draining,
    SeveredBySwap,
    BackendUnreachable,
    BackendReset,
    LoadFailed,
    Fatal,
}

/// How often something may still happen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// An attempt fails, or a load.
    pub(super) failures: u8,
    /// A worker sends nothing of a response.
    pub(super) silences: u8,
    /// A late reply on an attempt that is over.
    pub(super) late: u8,
    pub(super) cancels: u8,
    /// A worker's connection to a relay is lost.
    pub(super) losses: u8,
    pub(super) drains: u8,
    /// A worker that has one relay changes its grant, or reports load.
    pub(super) grants: u8,
    /// A worker withdraws a model, or advertises it again, or its backend begins or stops to fail it.
    pub(super) updates: u8,
    /// The relay drains, or its provider is deleted or disabled.
    pub(super) stops: u8,
}

const PLAIN: Template = Template {
    relay: 0,
    model: 0,
    key: 0,
    class: Class::Normal,
    conversation: None,
    pin: None,
    needs_core1: false,
    allowed: None,
};

/// A request for the second model.
const OTHER: Template = Template { model: 1, ..PLAIN };

/// A request for the first model by another name.
const ALIAS: Template = Template { model: 2, ..PLAIN };

pub(super) const NONE: Budget =
    Budget { failures: 0, silences: 0, late: 0, cancels: 0, losses: 0, drains: 0, grants: 0, updates: 0, stops: 0 };

const ALL: &[Failing] = &[
    Failing::AtCapacity,
    Failing::Draining,
    Failing::SeveredBySwap,
    Failing::BackendUnreachable,
    Failing::BackendReset,
    Failing::LoadFailed,
    Failing::Fatal,
];

/// Three requests for two workers that grant one each.
pub(super) const THREE: Scenario = Scenario {
    name: "three requests",
    relays: 1,
    workers: &[Kind::Granting(1), Kind::Granting(1)],
    up: 2,
    requests: &[PLAIN, PLAIN, PLAIN],
    budget: NONE,
    failures: ALL,
    begins: false,
    oversleeps: false,
    placement: Placement::LeastLoad,
    queue: 3,
    wait: Duration::from_millis(100),
    cold: Duration::from_millis(200),
    sample: 20,
};

/// Two relays that share a worker.
const SHARED: Scenario = Scenario {
    name: "two relays share a worker",
    relays: 2,
    workers: &[Kind::Granting(1)],
    up: 1,
    requests: &[PLAIN, Template { relay: 1, ..PLAIN }],
    ..THREE
};

const SWAPS: Scenario =
    Scenario { name: "swaps", workers: &[Kind::Swapping, Kind::Swapping], requests: &[PLAIN, OTHER], ..THREE };

const CLASSES: &[Template] = &[
    Template { class: Class::Batch, key: 1, ..PLAIN },
    PLAIN,
    Template { class: Class::Interactive, key: 2, ..PLAIN },
];

const KEYS: &[Template] = &[Template { key: 1, ..PLAIN }, Template { key: 1, ..PLAIN }, Template { key: 2, ..PLAIN }];

const CONVERSATIONS: &[Template] = &[
    Template { conversation: Some(0), ..PLAIN },
    Template { conversation: Some(1), ..PLAIN },
    Template { conversation: Some(0), ..PLAIN },
];

const PINNED: &[Template] = &[Template { pin: Some(0), ..PLAIN }, PLAIN];

/// By a name that only a multiplexer means as the one model that the key may use; and one that every worker serves.
const NAMES: &[Template] = &[Template { allowed: Some(1), ..ALIAS }, ALIAS];

/// Only workers with `core1` may serve the first one.
const NEEDS: &[Template] = &[Template { needs_core1: true, ..PLAIN }, PLAIN, PLAIN];

const TWO: &[Template] = &[PLAIN, PLAIN];

/// The second one at another relay.
const OF_TWO_RELAYS: &[Template] = &[PLAIN, Template { relay: 1, ..PLAIN }, PLAIN];

const ONE: &[Kind] = &[Kind::Granting(1)];

/// A world with this budget.
const fn with(name: &'static str, budget: Budget) -> Scenario {
    Scenario { name, budget, ..THREE }
}

/// Small enough to be explored completely with the tests.
pub(super) fn small() -> Vec<Scenario> {
    let losses = Budget { losses: 1, late: 1, ..NONE };
    let failures = Budget { failures: 1, ..NONE };
    let attempts = Budget { failures: 5, ..NONE };
    let refusals: &[_] = &[Failing::BackendReset, Failing::AtCapacity];
    let severed: &[_] = &[Failing::SeveredBySwap];
    vec![
        Scenario { workers: ONE, up: 1, requests: &[PLAIN], failures: refusals, ..with("attempts", attempts) },
        Scenario { workers: ONE, up: 1, requests: CLASSES, queue: 2, ..with("classes, full queue", NONE) },
        Scenario { workers: ONE, up: 1, requests: KEYS, ..with("keys, cancel", Budget { cancels: 1, ..NONE }) },
        Scenario { placement: Placement::Cache, begins: true, requests: CONVERSATIONS, ..with("placement", NONE) },
        Scenario { workers: &[Kind::Swapping, Kind::Granting(1)], requests: NAMES, ..with("names", NONE) },
        SHARED,
        Scenario { begins: true, requests: TWO, ..with("loss, late reply", losses) },
        with("failure", failures),
        Scenario { requests: TWO, ..with("drain, stop", Budget { drains: 1, stops: 1, ..NONE }) },
        Scenario { oversleeps: true, ..with("late timer, loss", Budget { losses: 1, ..NONE }) },
        Scenario { requests: CLASSES, queue: 2, ..with("classes, full queue, loss", Budget { losses: 1, ..NONE }) },
        Scenario { workers: &[Kind::Swapping], up: 1, failures: severed, budget: failures, ..SWAPS },
        Scenario { name: "two multiplexers", requests: &[PLAIN], ..SWAPS },
        Scenario {
            name: "two names of one model",
            workers: &[Kind::Swapping],
            up: 1,
            requests: &[PLAIN, ALIAS],
            ..SWAPS
        },
    ]
}

/// Explored by hand, for minutes.
pub(super) fn large() -> Vec<Scenario> {
    let one =
        Budget { failures: 1, silences: 1, late: 1, cancels: 1, losses: 1, drains: 1, grants: 1, updates: 1, stops: 1 };
    let seed: &[_] = &[Kind::Seed(1), Kind::Granting(1)];
    let both: &[_] = &[Kind::Granting(1), Kind::Granting(1)];
    let severed: &[_] = &[Failing::SeveredBySwap];
    let loss = Budget { losses: 1, ..NONE };
    let failures = Budget { failures: 1, ..NONE };
    let short = Scenario { wait: Duration::from_millis(50), requests: OF_TWO_RELAYS, ..SHARED };
    vec![
        Scenario { begins: true, ..with("loss, late reply", Budget { late: 1, ..loss }) },
        with("failure, loss", Budget { losses: 1, ..failures }),
        Scenario { begins: true, ..with("silence, failing backend, loss", Budget { silences: 1, updates: 1, ..loss }) },
        Scenario { oversleeps: true, ..with("late timer, loss, cancel", Budget { cancels: 1, ..loss }) },
        Scenario {
            requests: CLASSES,
            queue: 2,
            ..with("classes, full queue, loss, failure", Budget { losses: 1, ..failures })
        },
        Scenario {
            placement: Placement::Cache,
            begins: true,
            requests: CONVERSATIONS,
            ..with("placement, loss, failure", Budget { losses: 1, ..failures })
        },
        Scenario { requests: PINNED, ..with("pin, drain, update, loss", Budget { drains: 1, updates: 1, ..loss }) },
        Scenario { workers: seed, requests: NEEDS, ..with("old worker, loss, load", Budget { grants: 1, ..loss }) },
        Scenario { begins: true, requests: TWO, ..with("everything once", one) },
        Scenario { requests: &[PLAIN, OTHER, ALIAS], failures: severed, budget: failures, ..SWAPS },
        Scenario { name: "slow loads", cold: Duration::from_secs(130), wait: Duration::from_millis(50), ..SWAPS },
        Scenario { name: "two relays, two workers", workers: both, up: 2, ..short.clone() },
        Scenario { name: "two relays, loss, cancel", budget: Budget { losses: 1, cancels: 1, ..NONE }, ..short },
    ]
}

impl Scenario {
    /// Times so short that a few steps of the pace of demand reports reach them.
    pub(super) fn settings(&self) -> Settings {
        Settings {
            max_queue_len: self.queue,
            queue_timeout: self.wait,
            cold_timeout: Some(self.cold),
            request_timeout: self.wait * 3 / 2,
            placement: self.placement,
            max_homes: 2,
            fairness: Fairness::Shared { promote_after: Duration::from_millis(50) },
            ..harness::settings()
        }
    }
}
