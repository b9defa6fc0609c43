//! The state of the slots of a pool's workers: for its status, and for Events about failed loads and quarantined slots.
//!
//! Slots change every few seconds, and a thousand workers that cannot load one model report it a thousand times. The
//! status therefore lists some and counts all, and an Event covers a model in a slot of that name, whichever workers
//! have it, once per [`AGAIN_AFTER`]. A failure's back-off may be over before a poll sees it, so relays remember the
//! last failure of each slot. That one is published too, unless a later Event already covers it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use crate::crd::WorkerPool;
use crate::crd::worker_pool::{SlotFailure, SlotState, SlotStatus, WorkerPoolStatus};
use crate::plural::counted;
use crate::relays::state::{LastFailure, RelaySnapshot, SAME_MOMENT};

/// The maximum number of slots in the status.
const LISTED: usize = 32;

/// The time for which an Event is not repeated. A failing load is retried every minute.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// The time for which an Event is remembered: the time without repetition, plus the time for which a relay may still
/// remember an earlier failure, plus a minute to spare.
const REMEMBERED_FOR: Duration = Duration::from_secs(600 + 600 + 60);

/// The maximum number of failures that are published and remembered: a pool has some hundred models at most.
const REMEMBERED: usize = 1024;

/// Event reason: a model could not be loaded.
const LOAD_FAILED: &str = "LoadFailed";
/// Event reason: the memory of a slot could not be freed.
const SLOT_QUARANTINED: &str = "SlotQuarantined";

/// All slots of a pool's workers, ordered by worker and slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// The slots of workers that are not draining.
    pub slots: Vec<SlotResidency>,
}

/// The state of one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotResidency {
    /// Its worker: the name of the Pod.
    pub worker: String,
    /// Its name.
    pub slot: String,
    /// Its state.
    pub state: SlotState,
    /// The model that it holds.
    pub resident: Option<String>,
    /// The model that it is loading or about to load.
    pub target: Option<String>,
    /// The start of the current state.
    pub since: Timestamp,
    /// Models that could not be loaded and are not retried yet.
    pub failures: Vec<SlotFailure>,
    /// The last failed load, perhaps minutes ago.
    pub last_failure: Option<LastFailure>,
}

/// The fields of the status.
pub(super) struct Summary {
    pub(super) listed: Vec<SlotStatus>,
    pub(super) count: Option<i32>,
    pub(super) quarantined: Option<i32>,
}

/// The published Events, with their times.
#[derive(Debug, Default)]
pub struct PublishedEvents {
    at: HashMap<Subject, Instant>,
}

/// The subject of an Event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Failure { slot: String, model: String, code: String },
    Quarantine { worker: String, slot: String },
}

impl Residency {
    /// Returns the slots of a pool, or `None` while no relay responds.
    pub fn of(pool: &str, snapshot: Option<&RelaySnapshot>) -> Option<Self> {
        let snapshot = snapshot?;
        if !snapshot.relays.is_empty() && snapshot.relays.values().all(Result::is_err) {
            return None;
        }
        let mut slots = Vec::new();
        for worker in snapshot.workers_of(pool).filter(|worker| !worker.draining) {
            slots.extend(worker.slots.iter().map(|slot| SlotResidency {
                worker: worker.name.clone(),
                slot: slot.id.clone(),
                state: slot.state,
                resident: slot.resident.clone(),
                target: slot.target.clone(),
                since: slot.since.0,
                failures: slot.failures.clone(),
                last_failure: slot.last_failure.clone(),
            }));
        }
        slots.sort_by(|one, other| (&one.worker, &one.slot).cmp(&(&other.worker, &other.slot)));
        Some(Self { slots })
    }

    /// Returns the quarantined slots.
    pub fn quarantined(&self) -> impl Iterator<Item = &SlotResidency> {
        self.slots.iter().filter(|slot| slot.state == SlotState::Quarantined)
    }

    /// Returns the fields of the status. Unknown values stay as they were.
    pub(super) fn status(known: Option<&Self>, pool: &WorkerPool, previous: &WorkerPoolStatus) -> Summary {
        let number = |count: usize| i32::try_from(count).ok();
        match known {
            _ if pool.spec.slots().is_none() => Summary { listed: Vec::new(), count: None, quarantined: None },
            Some(residency) => Summary {
                listed: residency.slots.iter().take(LISTED).map(|slot| slot.listed(previous)).collect(),
                count: number(residency.slots.len()),
                quarantined: number(residency.quarantined().count()),
            },
            None => Summary {
                listed: previous.slots.clone(),
                count: previous.slot_count.or(Some(0)),
                quarantined: previous.quarantined.or(Some(0)),
            },
        }
    }
}

/// Returns a hash that changes with everything that status and Events contain about slots.
pub(super) fn fingerprint(pool: &str, snapshot: Option<&RelaySnapshot>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for slot in Residency::of(pool, snapshot).into_iter().flat_map(|residency| residency.slots) {
        (slot.worker, slot.slot, slot.state, slot.resident, slot.target).hash(&mut hasher);
        let last = slot.last_failure.into_iter().map(|last| last.failure);
        for failure in slot.failures.into_iter().chain(last) {
            (failure.model, failure.code, failure.message).hash(&mut hasher);
        }
    }
    hasher.finish()
}

impl SlotResidency {
    fn listed(&self, previous: &WorkerPoolStatus) -> SlotStatus {
        let mut listed = SlotStatus {
            worker: self.worker.clone(),
            slot: self.slot.clone(),
            state: self.state,
            resident: self.resident.clone(),
            target: self.target.clone(),
            // In whole seconds, as the API stores them.
            since: Timestamp::from_second(self.since.as_second()).ok().map(Time),
            failure: self.last_failure.as_ref().map(|last| &last.failure).or(self.failures.first()).cloned(),
        };
        let before = previous.slots.iter().find(|before| before.worker == self.worker && before.slot == self.slot);
        if let Some(before) = before
            && (before.state, &before.resident, &before.target) == (listed.state, &listed.resident, &listed.target)
            && let Some(since) = &before.since
            && self.since.duration_since(since.0).abs() <= SAME_MOMENT
        {
            listed.since = Some(since.clone());
        }
        listed
    }

    /// Returns all known failures: those that are not retried yet, and the last other one with its time.
    fn failed(&self) -> impl Iterator<Item = (&SlotFailure, Option<Timestamp>)> {
        let is_current = |last: &&LastFailure| self.failures.iter().any(|current| is_same(current, &last.failure));
        let passed = self.last_failure.as_ref().filter(|last| !is_current(last));
        let current = self.failures.iter().map(|failure| (failure, None));
        current.chain(passed.map(|last| (&last.failure, Some(last.at))))
    }

    /// Returns the reason for the quarantine, if there is a message.
    fn reason(&self) -> Option<&str> {
        self.failed().map(|(failure, _)| failure.message.as_str()).find(|message| !message.is_empty())
    }
}

fn is_same(one: &SlotFailure, other: &SlotFailure) -> bool {
    (&one.model, &one.code) == (&other.model, &other.code)
}

impl PublishedEvents {
    /// Returns the Events to publish now, each with its reason and note. `clock` is the current time on the clock of
    /// the failures' times.
    pub fn new_events(&mut self, residency: &Residency, now: Instant, clock: Timestamp) -> Vec<(&'static str, String)> {
        self.at.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED_FOR);
        let mut events = Vec::new();
        for held in &residency.slots {
            for (failure, at) in held.failed() {
                let age = at.map(|at| Duration::try_from(clock.duration_since(at)).unwrap_or_default());
                let subject = Subject::Failure {
                    slot: held.slot.clone(),
                    model: failure.model.clone(),
                    code: failure.code.clone(),
                };
                if self.is_new(subject, age, now) {
                    events.push((LOAD_FAILED, failed(residency, held, failure, age)));
                }
            }
            let quarantine = Subject::Quarantine { worker: held.worker.clone(), slot: held.slot.clone() };
            if held.state == SlotState::Quarantined && self.is_new(quarantine, None, now) {
                let note = format!(
                    "slot {} of worker {} is quarantined: its memory could not be freed{}",
                    held.slot,
                    held.worker,
                    held.reason().map(|reason| format!(" ({reason})")).unwrap_or_default()
                );
                events.push((SLOT_QUARANTINED, note));
            }
        }
        events
    }

    /// True if no Event was published recently; and for a past failure of this age, if none was published since.
    fn is_new(&mut self, subject: Subject, age: Option<Duration>, now: Instant) -> bool {
        let is_new = match self.at.get(&subject).map(|at| now.saturating_duration_since(*at)) {
            Some(ago) => ago >= AGAIN_AFTER && age.is_none_or(|age| age + SAME_MOMENT.unsigned_abs() < ago),
            None => self.at.len() < REMEMBERED,
        };
        if is_new {
            self.at.insert(subject, now);
        }
        is_new
    }
}

fn failed(residency: &Residency, held: &SlotResidency, failure: &SlotFailure, age: Option<Duration>) -> String {
    let same = |other: &&SlotResidency| other.slot == held.slot && other.failed().any(|(one, _)| is_same(one, failure));
    let others = residency.slots.iter().filter(same).count() - 1;
    let more = if others > 0 { format!(" and {others} more") } else { String::new() };
    let minutes = age.map_or(0, |age| age.as_secs() / 60);
    let when = if minutes > 0 { format!(" {} ago", counted(minutes, "minute", "minutes")) } else { String::new() };
    let SlotFailure { model, code, message } = failure;
    let why = if message.is_empty() { code.clone() } else { format!("{code}: {message}") };
    let (slot, worker) = (&held.slot, &held.worker);
    format!("failed to load model {model} into slot {slot} of worker {worker}{more}{when}: {why}")
}

#[cfg(test)]
mod tests;
