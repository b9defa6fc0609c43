//! A slot's human-readable history: its last swap, its last failures, its use of time.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

use modelrelay_protocol::message::{Slot, SlotState};
use serde_json::{Value, json};

use crate::Model;
use crate::effect::{SlotEvent, Swap};
use crate::machine::{DrainView, Machine, Requests};

/// The number of failures that are remembered.
const FAILURES: usize = 8;

/// A failure that is remembered.
#[derive(Clone, Debug)]
pub struct Noted {
    /// The time of the failure.
    pub at: SystemTime,
    /// The model that failed.
    pub model: Model,
    /// The description.
    pub what: String,
}

/// A slot's use of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// Time with running requests.
    pub serving: Duration,
    /// Time in which no model could serve, because one was being loaded or unloaded.
    pub swapping: Duration,
    /// All other time.
    pub idle: Duration,
}

/// The state of a slot and its history.
#[derive(Clone, Debug)]
pub struct Report {
    /// The state as reported to relays.
    pub slot: Slot,
    /// The drain in progress, if there is one.
    pub drain: Option<DrainView>,
    /// The time of the report.
    pub at: Instant,
    /// The last swap that passed its commit point.
    pub last_swap: Option<Swap>,
    /// The last failures, newest last.
    pub failures: Vec<Noted>,
    /// Each model's requests.
    pub requests: Vec<(Model, Requests)>,
    /// Its use of time.
    pub shares: Shares,
}

#[derive(Debug)]
pub(super) struct History {
    slot: String,
    last_swap: Option<Swap>,
    failures: VecDeque<Noted>,
    shares: Shares,
    doing: Doing,
    since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Serving,
    Swapping,
    Idle,
}

impl History {
    pub(super) fn new(machine: &Machine, now: Instant) -> Self {
        Self {
            slot: machine.snapshot(now).id,
            last_swap: None,
            failures: VecDeque::new(),
            shares: Shares::default(),
            doing: Doing::Idle,
            since: now,
        }
    }

    pub(super) fn slot(&self) -> &str {
        &self.slot
    }

    /// Adds the time that has passed, and updates the current activity.
    pub(super) fn pass(&mut self, machine: &Machine, now: Instant) {
        let passed = now.saturating_duration_since(self.since);
        match self.doing {
            Doing::Serving => self.shares.serving += passed,
            Doing::Swapping => self.shares.swapping += passed,
            Doing::Idle => self.shares.idle += passed,
        }
        self.since = now;
        self.doing = match machine.state() {
            _ if machine.is_serving() => Doing::Serving,
            SlotState::Draining
            | SlotState::Severing
            | SlotState::Evicting
            | SlotState::Loading
            | SlotState::RollingBack => Doing::Swapping,
            SlotState::Empty | SlotState::Ready | SlotState::Backoff | SlotState::Stopping | SlotState::Quarantined => {
                Doing::Idle
            }
        };
    }

    pub(super) fn note(&mut self, news: &SlotEvent) {
        match news {
            SlotEvent::SwapEnded(swap) => self.last_swap = Some(swap.clone()),
            SlotEvent::LoadFailed { model, error } => self.fail(model, error.to_string()),
            SlotEvent::WakeFailed { model, failure } => self.fail(model, format!("wake-up failed: {failure}")),
            SlotEvent::EvictFailed { model, detail } => self.fail(model, format!("unload failed: {detail}")),
            SlotEvent::MemoryNotFreed { model } => self.fail(model, "GPU memory not released".to_owned()),
            SlotEvent::Quarantined { model } => self.fail(model, "unload failed; slot quarantined".to_owned()),
            SlotEvent::BackendDown { model, leases, .. } => {
                self.fail(model, format!("backend lost, with {leases} running requests"));
            }
            SlotEvent::SwapBegun { .. }
            | SlotEvent::SwapAborted { .. }
            | SlotEvent::Held { .. }
            | SlotEvent::Coalesced { .. }
            | SlotEvent::LingerHit { .. }
            | SlotEvent::LingerMiss { .. }
            | SlotEvent::ResidencyEnded { .. }
            | SlotEvent::Adopted { .. }
            | SlotEvent::MaxWaitInfeasible { .. } => {}
        }
    }

    fn fail(&mut self, model: &Model, what: String) {
        if self.failures.len() == FAILURES {
            self.failures.pop_front();
        }
        self.failures.push_back(Noted { at: SystemTime::now(), model: Model::clone(model), what });
    }

    pub(super) fn report(&mut self, machine: &Machine, now: Instant) -> Report {
        self.pass(machine, now);
        Report {
            slot: machine.snapshot(now),
            drain: machine.drain(),
            at: now,
            last_swap: self.last_swap.clone(),
            failures: self.failures.iter().cloned().collect(),
            requests: machine.requests().map(|(model, requests)| (Model::clone(model), requests)).collect(),
            shares: self.shares,
        }
    }
}

impl Report {
    /// Returns the report for `/healthz`. Durations are in seconds; points in time are seconds since 1970.
    pub fn to_json(&self) -> Value {
        let mut value = json!(self.slot);
        let wall = SystemTime::now();
        value["drain"] = self.drain.map_or(Value::Null, |drain| {
            let ago = self.at.saturating_duration_since(drain.since);
            let remaining = drain.deadline.saturating_duration_since(self.at);
            json!({
                "started": unix(wall.checked_sub(ago)),
                "deadline": unix(wall.checked_add(remaining)),
                "remaining": remaining.as_secs_f64(),
                "leases": drain.leases,
            })
        });
        value["last_swap"] = self.last_swap.as_ref().map_or(Value::Null, |swap| {
            json!({
                "from": swap.from.as_deref(),
                "to": swap.to.as_deref(),
                "reason": swap.reason.as_str(),
                "drain_s": swap.drain.as_secs_f64(),
                "evict_s": swap.evict.as_secs_f64(),
                "load_s": swap.load.as_secs_f64(),
                "severed": swap.severed,
                "result": swap.result.as_str(),
            })
        });
        let failure = |noted: &Noted| json!({ "at": unix(Some(noted.at)), "model": &*noted.model, "what": noted.what });
        value["failures"] = self.failures.iter().map(failure).collect();
        value["requests"] = self
            .requests
            .iter()
            .map(|(model, requests)| {
                let Requests { held, waiting, leases } = *requests;
                json!({ "model": &**model, "held": held, "waiting": waiting, "leases": leases })
            })
            .collect();
        value
    }
}

fn unix(at: Option<SystemTime>) -> Option<f64> {
    Some(at?.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs_f64())
}
