//! What the slots of a pool's workers hold: for its status, and for Events where a load failed or a slot takes nothing any more.
//!
//! Slots change every few seconds, and a thousand workers that cannot load one model say it a thousand times. So the status lists
//! some and counts all, and an Event is about a model in a slot of that name, whichever workers have it, once in
//! [`AGAIN_AFTER`]. A failure's back-off may be over before anybody looks, so relays remember the last one of each slot: that is
//! told too, unless an Event that came after it has.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use crate::crd::WorkerPool;
use crate::crd::worker_pool::{SlotFailure, SlotState, SlotStatus, WorkerPoolStatus};
use crate::relay_state::{LastFailure, RelaySnapshot, SAME_MOMENT};
use crate::words::counted;

/// Slots that the status lists.
const LISTED: usize = 32;

/// How long nothing more is said of what was said. A load that fails is tried again every minute.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// How long it is known that something was said: then nothing more, and then for as long as a relay may still remember a failure
/// from before, with a minute to spare.
const REMEMBERED_FOR: Duration = Duration::from_secs(600 + 600 + 60);

/// Failures of which something is said at once, and remembered: a pool has at most some hundred models.
const REMEMBERED: usize = 1024;

/// Event: a model could not be loaded.
const LOAD_FAILED: &str = "LoadFailed";
/// Event: the memory of a slot could not be freed.
const SLOT_QUARANTINED: &str = "SlotQuarantined";

/// All slots of a pool's workers, by worker and slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// Those of workers that stay.
    pub slots: Vec<Held>,
}

/// One slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its worker: the name of the Pod.
    pub worker: String,
    /// Its name.
    pub slot: String,
    /// What it does.
    pub state: SlotState,
    /// The model that it holds.
    pub resident: Option<String>,
    /// The model that it is going to hold.
    pub target: Option<String>,
    /// Since when it does that.
    pub since: Timestamp,
    /// Models that could not be loaded, and are not tried again yet.
    pub failures: Vec<SlotFailure>,
    /// The last load that failed, perhaps minutes ago.
    pub last_failure: Option<LastFailure>,
}

/// The part of the status.
pub(super) struct Summary {
    pub(super) listed: Vec<SlotStatus>,
    pub(super) count: Option<i32>,
    pub(super) quarantined: Option<i32>,
}

/// What was said, and when.
#[derive(Debug, Default)]
pub struct Told {
    at: HashMap<Subject, Instant>,
}

/// What an Event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Failure { slot: String, model: String, code: String },
    Quarantine { worker: String, slot: String },
}

impl Residency {
    /// Of a pool; nothing while no relay answers.
    pub fn of(pool: &str, snapshot: Option<&RelaySnapshot>) -> Option<Self> {
        let snapshot = snapshot?;
        if !snapshot.relays.is_empty() && snapshot.relays.values().all(Result::is_err) {
            return None;
        }
        let mut slots = Vec::new();
        for worker in snapshot.workers_of(pool).filter(|worker| !worker.draining) {
            slots.extend(worker.slots.iter().map(|slot| Held {
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

    /// Those that take nothing.
    pub fn quarantined(&self) -> impl Iterator<Item = &Held> {
        self.slots.iter().filter(|slot| slot.state == SlotState::Quarantined)
    }

    /// What the status says. What is not known stays as it was.
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

/// Changes with everything that status and Events say of slots.
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

impl Held {
    fn listed(&self, previous: &WorkerPoolStatus) -> SlotStatus {
        let mut listed = SlotStatus {
            worker: self.worker.clone(),
            slot: self.slot.clone(),
            state: self.state,
            resident: self.resident.clone(),
            target: self.target.clone(),
            // Of whole seconds, as the API keeps them.
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

    /// All that is known of loads that failed: those that are not tried again yet, and when the last of the others was.
    fn failed(&self) -> impl Iterator<Item = (&SlotFailure, Option<Timestamp>)> {
        let is_current = |last: &&LastFailure| self.failures.iter().any(|current| is_same(current, &last.failure));
        let passed = self.last_failure.as_ref().filter(|last| !is_current(last));
        let current = self.failures.iter().map(|failure| (failure, None));
        current.chain(passed.map(|last| (&last.failure, Some(last.at))))
    }

    /// Why it takes nothing any more, as far as that has words.
    fn reason(&self) -> Option<&str> {
        self.failed().map(|(failure, _)| failure.message.as_str()).find(|message| !message.is_empty())
    }
}

fn is_same(one: &SlotFailure, other: &SlotFailure) -> bool {
    (&one.model, &one.code) == (&other.model, &other.code)
}

impl Told {
    /// What is worth an Event now, which is `clock` where failures have their times from: its reason and what it says.
    pub fn news(&mut self, residency: &Residency, now: Instant, clock: Timestamp) -> Vec<(&'static str, String)> {
        self.at.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED_FOR);
        let mut news = Vec::new();
        for held in &residency.slots {
            for (failure, at) in held.failed() {
                let age = at.map(|at| Duration::try_from(clock.duration_since(at)).unwrap_or_default());
                let subject = Subject::Failure {
                    slot: held.slot.clone(),
                    model: failure.model.clone(),
                    code: failure.code.clone(),
                };
                if self.is_new(subject, age, now) {
                    news.push((LOAD_FAILED, failed(residency, held, failure, age)));
                }
            }
            let quarantine = Subject::Quarantine { worker: held.worker.clone(), slot: held.slot.clone() };
            if held.state == SlotState::Quarantined && self.is_new(quarantine, None, now) {
                let note = format!(
                    "slot {} of worker {} takes nothing any more: its memory could not be freed{}",
                    held.slot,
                    held.worker,
                    held.reason().map(|reason| format!(" ({reason})")).unwrap_or_default()
                );
                news.push((SLOT_QUARANTINED, note));
            }
        }
        news
    }

    /// Whether it was not said lately; and of what is over, and happened so long ago: whether it was not said since.
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

fn failed(residency: &Residency, held: &Held, failure: &SlotFailure, age: Option<Duration>) -> String {
    let same = |other: &&Held| other.slot == held.slot && other.failed().any(|(one, _)| is_same(one, failure));
    let others = residency.slots.iter().filter(same).count() - 1;
    let more = if others > 0 { format!(" and {others} more") } else { String::new() };
    let minutes = age.map_or(0, |age| age.as_secs() / 60);
    let when = if minutes > 0 { format!(" {} ago", counted(minutes, "minute", "minutes")) } else { String::new() };
    let SlotFailure { model, code, message } = failure;
    let why = if message.is_empty() { code.clone() } else { format!("{code}: {message}") };
    let (slot, worker) = (&held.slot, &held.worker);
    format!("model {model} could not be loaded into slot {slot} of worker {worker}{more}{when}: {why}")
}

#[cfg(test)]
mod tests;
