//! Random histories of a provider, played to the core and to a plain reference model, which must agree on every effect
//! and every timeout. Beside that a ledger that knows no rules checks what must hold whatever the rules are.
//!
//! `MODELRELAY_HISTORY_TRANSITIONS` says how many events to play at least.

mod ledger;
mod reference;

use std::cell::Cell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};

use self::ledger::Ledger;
use self::reference::Reference;
use super::harness::{settings, show};
use crate::dispatch::{
    AttemptFailure, CancelReason, Dispatch, Effect, Event, Failure, Grant, LoadFailure, LossCause,
    Model, NewRequest, NewWorker, RequestKey, Settings, WorkerKey,
};

const SHORTEST: usize = 60;
const LONGEST: usize = 240;

/// Something that may happen. Numbers pick among what exists at that time, so that shrinking leaves sense.
#[derive(Clone, Debug)]
enum Op {
    Submit {
        model: usize,
        bytes: u64,
        pin: Option<usize>,
        needs_core1: bool,
        resendable: bool,
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
    },
    Lose {
        worker: usize,
        cause: LossCause,
    },
    Models {
        worker: usize,
        models: usize,
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
    /// The response head of a running request goes to the client.
    Start {
        request: usize,
    },
    Complete {
        request: usize,
    },
    Fail {
        request: usize,
        failure: AttemptFailure,
    },
    /// An answer to something that does not run (any more).
    Stray {
        worker: usize,
        request: u64,
        attempt: u32,
    },
    Drain {
        worker: usize,
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

fn op() -> impl Strategy<Value = Op> {
    let any_index = || 0..64_usize;
    let submit = (
        0..3_usize,
        1..50_u64,
        prop::option::weighted(0.1, any_index()),
    )
        .prop_flat_map(|(model, bytes, pin)| {
            (prop::bool::weighted(0.15), prop::bool::weighted(0.95)).prop_map(
                move |(needs_core1, resendable)| Op::Submit {
                    model,
                    bytes,
                    pin,
                    needs_core1,
                    resendable,
                },
            )
        });
    let join = (1..8_usize, 1..4_u32, 0..2_u32, any::<bool>()).prop_map(
        |(models, max_concurrent, load, core1)| Op::Join {
            models,
            max_concurrent,
            load,
            core1,
        },
    );
    let lose = (any_index(), any::<bool>()).prop_map(|(worker, silent)| Op::Lose {
        worker,
        cause: if silent {
            LossCause::HeartbeatTimeout
        } else {
            LossCause::Disconnected
        },
    });
    let models =
        (any_index(), 0..8_usize, prop::option::of(0..4_u32)).prop_map(|(worker, models, load)| {
            Op::Models {
                worker,
                models,
                load,
            }
        });
    let grant =
        (any_index(), 0..4_u32, 0..3_u32, 1..3_u32).prop_map(|(worker, slots, others, links)| {
            Op::Grant {
                worker,
                grant: Grant {
                    slots,
                    others,
                    capacity: 6,
                    links,
                },
            }
        });
    let cancel = (
        any_index(),
        prop::sample::select(vec![
            CancelReason::ClientDisconnect,
            CancelReason::SlowClient,
            CancelReason::Admin,
        ]),
    )
        .prop_map(|(request, reason)| Op::Cancel { request, reason });
    let stray =
        (any_index(), 0..40_u64, 0..4_u32).prop_map(|(worker, request, attempt)| Op::Stray {
            worker,
            request,
            attempt,
        });
    let millis = prop::sample::select(vec![1, 10, 50, 100, 500, 1_000, 3_000]);
    prop_oneof![
        24 => submit,
        6 => cancel,
        6 => join,
        4 => lose,
        5 => models,
        4 => (any_index(), 0..4_u32).prop_map(|(worker, load)| Op::Load { worker, load }),
        10 => grant,
        5 => any_index().prop_map(|request| Op::Start { request }),
        12 => any_index().prop_map(|request| Op::Complete { request }),
        10 => (any_index(), failure()).prop_map(|(request, failure)| Op::Fail { request, failure }),
        1 => stray,
        1 => any_index().prop_map(|worker| Op::Drain { worker }),
        1 => limits().prop_map(Op::Settings),
        12 => millis.clone().prop_map(|millis| Op::Pass { millis }),
        1 => millis.prop_map(|millis| Op::Oversleep { millis }),
    ]
}

fn failure() -> impl Strategy<Value = AttemptFailure> {
    let (code, retry_after) = (
        LoadFailure::InsufficientMemory,
        Some(Duration::from_secs(4)),
    );
    prop::sample::select(vec![
        AttemptFailure::AtCapacity,
        AttemptFailure::AtCapacity,
        AttemptFailure::Draining,
        AttemptFailure::SeveredBySwap,
        AttemptFailure::SeveredBySwap,
        AttemptFailure::BackendUnreachable,
        AttemptFailure::BackendReset,
        AttemptFailure::LoadFailed { code, retry_after },
        AttemptFailure::Fatal,
    ])
}

/// Timeouts so short that many come due, and so round that many come due together.
fn limits() -> impl Strategy<Value = Settings> {
    let seconds = |choices: &[u64]| {
        let choices: Vec<_> = choices
            .iter()
            .map(|secs| Duration::from_secs(*secs))
            .collect();
        prop::sample::select(choices)
    };
    (
        prop::bool::weighted(0.9),
        0..8_usize,
        50..400_u64,
        seconds(&[0, 1, 2, 5, 30]),
        prop::option::of(seconds(&[1, 3, 10])),
        any::<bool>(),
        seconds(&[1, 2, 4, 10, 60]),
    )
        .prop_map(
            |(enabled, max_queue_len, max_queue_bytes, queue, cold, declared, request)| Settings {
                enabled,
                max_queue_len,
                max_queue_bytes,
                queue_timeout: queue,
                cold_timeout: cold,
                cold_models: declared.then(|| MODELS[0].into()).into_iter().collect(),
                request_timeout: request,
            },
        )
}

/// How a history ends: most go on for ever.
fn last_acts() -> impl Strategy<Value = Vec<Op>> {
    prop_oneof![
        6 => Just(vec![]),
        1 => Just(vec![Op::Deleted]),
        1 => Just(vec![Op::DrainBegun]),
        1 => Just(vec![Op::DrainBegun, Op::DrainDeadline]),
    ]
}

fn history() -> impl Strategy<Value = (Settings, Vec<Op>)> {
    let halves = (vec(op(), SHORTEST..LONGEST), last_acts(), vec(op(), 0..40));
    (limits(), halves).prop_map(|(limits, (mut ops, acts, rest))| {
        for act in acts {
            ops.push(act);
            ops.extend(rest.iter().cloned());
        }
        (
            Settings {
                enabled: true,
                ..limits
            },
            ops,
        )
    })
}

const MODELS: [&str; 3] = ["a", "b", "c"];

fn models(mask: usize) -> Vec<Model> {
    let chosen = MODELS
        .iter()
        .enumerate()
        .filter(|(bit, _)| mask & (1 << bit) != 0);
    chosen.map(|(_, name)| Model::from(*name)).collect()
}

/// The core, the reference and the ledger, side by side.
struct Play {
    core: Dispatch,
    reference: Reference,
    ledger: Ledger,
    start: Instant,
    next_key: u64,
    started: HashSet<RequestKey>,
    transitions: u64,
}

impl Play {
    fn new(settings: Settings) -> Self {
        Self {
            core: Dispatch::new(settings.clone()),
            reference: Reference::new(settings),
            ledger: Ledger::default(),
            start: Instant::now(),
            next_key: 0,
            started: HashSet::new(),
            transitions: 0,
        }
    }

    fn act(&mut self, op: Op) {
        match op {
            Op::Pass { millis } => self.pass(Duration::from_millis(millis)),
            Op::Oversleep { millis } => self.reference.pass(Duration::from_millis(millis)),
            op => {
                if let Some(event) = self.event(op) {
                    self.handle(event);
                }
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        let until = self.reference.now + time;
        while let Some(due) = self.core.next_timeout().map(|due| due - self.start)
            && due <= until
        {
            self.reference.pass(due.saturating_sub(self.reference.now));
            self.handle(Event::Tick);
        }
        self.reference
            .pass(until.saturating_sub(self.reference.now));
    }

    fn handle(&mut self, event: Event) {
        self.transitions += 1;
        let now = self.reference.now;
        let mut actual = Vec::new();
        self.core
            .handle(event.clone(), self.start + now, &mut actual);
        self.ledger.before(&event);
        for effect in &actual {
            self.ledger.record(effect, now);
        }
        let expected = self.reference.handle(event.clone());
        assert_eq!(
            in_order(actual),
            in_order(expected),
            "the effects of {event:?} at {now:?}"
        );
        let core = &self.core;
        self.ledger.check_demand(
            &self.reference,
            now,
            core.next_timeout().map(|t| t - self.start),
        );
        assert_eq!(core.queue_len(), self.reference.queued().count());
        assert_eq!(
            core.queue_len() + core.in_flight(),
            self.reference.requests.len()
        );
        self.ledger
            .check_alive(self.reference.requests.keys().copied());
    }

    fn event(&mut self, op: Op) -> Option<Event> {
        Some(match op {
            Op::Submit {
                model,
                bytes,
                pin,
                needs_core1,
                resendable,
            } => {
                let key = RequestKey(self.key());
                let model = Model::from(MODELS[model]);
                let pin = pin.map(|index| self.worker(index).unwrap_or(WorkerKey(0)));
                Event::Submit(NewRequest {
                    key,
                    model,
                    bytes,
                    pin,
                    needs_core1,
                    resendable,
                })
            }
            Op::Cancel { request, reason } => {
                let live = self.reference.requests.keys().copied().collect::<Vec<_>>();
                Event::Cancel {
                    request: pick(&live, request)?,
                    reason,
                }
            }
            Op::Join {
                models: mask,
                max_concurrent,
                load,
                core1,
            } => {
                let (key, models) = (WorkerKey(self.key()), models(mask));
                Event::WorkerJoined(NewWorker {
                    key,
                    models,
                    max_concurrent,
                    load,
                    core1,
                })
            }
            Op::Lose { worker, cause } => {
                let worker = self.worker(worker)?;
                let running = self.reference.running_on(worker);
                let started = running.filter(|key| self.started.contains(key)).collect();
                Event::WorkerLost {
                    worker,
                    started,
                    cause,
                }
            }
            Op::Models {
                worker,
                models: mask,
                load,
            } => Event::ModelsUpdated {
                worker: self.worker(worker)?,
                models: models(mask),
                load,
            },
            Op::Load { worker, load } => Event::LoadReported {
                worker: self.worker(worker)?,
                load,
            },
            Op::Grant { worker, grant } => Event::Granted {
                worker: self.worker(worker)?,
                grant,
            },
            Op::Start { request } => {
                let (_, key, _) = self.running(request)?;
                self.started.insert(key);
                return None;
            }
            Op::Complete { request } => {
                let (worker, request, attempt) = self.running(request)?;
                Event::Completed {
                    worker,
                    request,
                    attempt,
                }
            }
            Op::Fail { request, failure } => {
                let (worker, request, attempt) = self.running(request)?;
                if self.started.contains(&request) {
                    return None;
                }
                Event::AttemptFailed {
                    worker,
                    request,
                    attempt,
                    failure,
                }
            }
            Op::Stray {
                worker,
                request,
                attempt,
            } => {
                let (worker, request) = (self.worker(worker)?, RequestKey(request));
                Event::Completed {
                    worker,
                    request,
                    attempt,
                }
            }
            Op::Drain { worker } => Event::WorkerDraining {
                worker: self.worker(worker)?,
            },
            Op::Settings(settings) => Event::SettingsChanged(settings),
            Op::Deleted => Event::Deleted,
            Op::DrainBegun => Event::DrainBegun,
            Op::DrainDeadline => Event::DrainDeadline,
            Op::Pass { .. } | Op::Oversleep { .. } => return None,
        })
    }

    fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    fn worker(&self, index: usize) -> Option<WorkerKey> {
        let workers: Vec<_> = self.reference.workers.keys().copied().collect();
        pick(&workers, index)
    }

    fn running(&self, index: usize) -> Option<(WorkerKey, RequestKey, u32)> {
        let requests = self.reference.requests.iter();
        let running: Vec<_> = requests
            .filter_map(|(key, r)| r.worker.map(|w| (w, *key, r.attempts)))
            .collect();
        pick(&running, index)
    }
}

fn pick<T: Copy>(from: &[T], index: usize) -> Option<T> {
    (!from.is_empty()).then(|| from[index % from.len()])
}

/// Effects of one event in an order that does not depend on how they were found. Demands, which the ledger checks, are
/// left out, and so are estimates.
fn in_order(effects: Vec<Effect>) -> Vec<Effect> {
    let mut effects: Vec<_> = effects
        .into_iter()
        .filter(|effect| !matches!(effect, Effect::Demand { .. }))
        .collect();
    for effect in &mut effects {
        if let Effect::Fail {
            failure:
                Failure::QueueFull { retry_after_secs } | Failure::QueueTimeout { retry_after_secs },
            ..
        } = effect
        {
            assert!(*retry_after_secs <= 60);
            *retry_after_secs = 0;
        }
    }
    effects.sort_by_cached_key(show);
    effects
}

#[test]
fn random_histories_agree_with_the_reference() {
    let wanted = std::env::var("MODELRELAY_HISTORY_TRANSITIONS").map_or(20_000, |wanted| {
        wanted.parse::<u32>().expect("a number of transitions")
    });
    let transitions = Cell::new(0);
    while transitions.get() < u64::from(wanted) {
        let mut runner = TestRunner::new(Config {
            cases: wanted.div_ceil(200).min(500),
            failure_persistence: Some(Box::new(FileFailurePersistence::SourceParallel(
                "proptest-regressions",
            ))),
            source_file: Some(file!()),
            ..Config::default()
        });
        let outcome = runner.run(&history(), |(limits, ops)| {
            let mut play = Play::new(limits);
            for op in ops {
                play.act(op);
            }
            transitions.set(transitions.get() + play.transitions);
            Ok(())
        });
        if let Err(failure) = outcome {
            panic!("{failure}");
        }
    }
    assert!(settings().enabled, "the harness is used");
    #[expect(
        clippy::print_stdout,
        reason = "the number is what this test is asked for"
    )]
    {
        println!("{} transitions", transitions.get());
    }
}
