//! The part of a relay's `/admin/state` that the operator reads. Unknown fields are ignored, because relays may have
//! other versions.

use std::collections::HashSet;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use modelrelay_protocol::limits::MAX_MODEL_CHARS;
use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState as WireState};
use serde::Deserialize;

use crate::crd::worker_pool::{SlotFailure, SlotState};
use crate::relays::state::{LastFailure, RelayReport, RelaySnapshot, Since, SlotReport, UsageReport};

const MAX_SLOT_CHARS: usize = 64;
const MAX_CODE_CHARS: usize = 64;
const MAX_MESSAGE_CHARS: usize = 256;

/// The response of one relay.
#[derive(Debug, Deserialize)]
pub(super) struct RelayState {
    #[serde(default)]
    version: String,
    config_hash: Option<String>,
    config_error: Option<String>,
    #[serde(default)]
    phase: String,
    #[serde(default)]
    providers: Vec<ReportedProvider>,
}

#[derive(Debug, Deserialize)]
struct ReportedProvider {
    name: String,
    #[serde(default)]
    queue_depth: u64,
    #[serde(default)]
    in_flight: u64,
    /// Older relays do not report it.
    #[serde(default)]
    usage: Option<UsageReport>,
    #[serde(default)]
    models: Vec<ModelState>,
    #[serde(default)]
    workers: Vec<WorkerState>,
}

#[derive(Debug, Deserialize)]
struct ModelState {
    id: String,
    #[serde(default)]
    waiting: u64,
    #[serde(default)]
    in_flight: u64,
}

#[derive(Debug, Deserialize)]
struct WorkerState {
    worker_id: String,
    #[serde(default)]
    worker_name: String,
    #[serde(default)]
    models: Vec<String>,
    #[serde(default)]
    max_concurrent: u64,
    #[serde(default)]
    in_flight_count: u64,
    #[serde(default)]
    is_draining: bool,
    instance_id: Option<String>,
    pool: Option<String>,
    /// Present for a worker with a multiplexer.
    #[serde(default)]
    slots: Option<Vec<ReportedSlot>>,
}

/// A slot, with the relay's memory of its last failure.
#[derive(Debug, Deserialize)]
struct ReportedSlot {
    #[serde(flatten)]
    slot: Slot,
    /// Older relays do not remember failures.
    #[serde(default)]
    last_failure: Option<ReportedFailure>,
}

#[derive(Debug, Deserialize)]
struct ReportedFailure {
    model: String,
    code: Option<String>,
    message: Option<String>,
    #[serde(default)]
    age_ms: u64,
}

impl RelayState {
    /// Returns the state of the relay itself.
    pub(super) fn report(&self) -> RelayReport {
        RelayReport {
            config_hash: self.config_hash.clone(),
            config_error: self.config_error.clone(),
            phase: self.phase.clone(),
            version: self.version.clone(),
        }
    }

    /// Adds the state of the provider that the relay of this Pod reported. `staying` collects the workers to which at
    /// least one relay may still dispatch.
    pub(super) fn add_to(
        &self,
        provider: &str,
        pod: &str,
        snapshot: &mut RelaySnapshot,
        staying: &mut HashSet<String>,
    ) {
        for state in self.providers.iter().filter(|state| state.name == provider) {
            snapshot.queue_depth += state.queue_depth;
            snapshot.in_flight += state.in_flight;
            snapshot.usage = snapshot.usage.into_iter().chain(state.usage).reduce(UsageReport::plus);
            for model in &state.models {
                let sum = snapshot.models.entry(model.id.clone()).or_default();
                sum.waiting += model.waiting;
                sum.in_flight += model.in_flight;
            }
            for worker in &state.workers {
                worker.add_to(pod, snapshot, staying);
            }
        }
    }
}

impl WorkerState {
    /// Adds a worker. Workers of other programs state no instance; each of their connections is a worker of its own.
    fn add_to(&self, pod: &str, snapshot: &mut RelaySnapshot, staying: &mut HashSet<String>) {
        let instance = self.instance_id.as_ref().unwrap_or(&self.worker_id);
        if !self.is_draining {
            staying.insert(instance.clone());
        }
        let is_new = !snapshot.workers.contains_key(instance);
        let sum = snapshot.workers.entry(instance.clone()).or_default();
        for model in &self.models {
            if sum.models.insert(model.clone()) {
                snapshot.models.entry(model.clone()).or_default().workers += 1;
            }
        }
        if is_new {
            sum.name.clone_from(&self.worker_name);
            sum.pool.clone_from(&self.pool);
        }
        sum.max_concurrent = sum.max_concurrent.max(self.max_concurrent);
        sum.in_flight += self.in_flight_count;
        sum.links += 1;
        sum.relays.insert(pod.to_owned());
        // Every relay receives the same reports, at slightly different times: the newest one is used.
        let slots: Vec<SlotReport> = self.slots.iter().flatten().map(slot).collect();
        let began = |slots: &[SlotReport]| slots.iter().map(|slot| slot.since.0).max();
        let others = if began(&slots) > began(&sum.slots) { std::mem::replace(&mut sum.slots, slots) } else { slots };
        for other in others {
            let same = sum.slots.iter_mut().find(|slot| slot.id == other.id);
            if let (Some(slot), Some(last)) = (same, other.last_failure) {
                remember(slot, last);
            }
        }
    }
}

/// Adds a failure that another relay remembers. A relay that has just started remembers fewer than the others.
fn remember(slot: &mut SlotReport, last: LastFailure) {
    let is_over = slot.resident.as_ref() == Some(&last.failure.model);
    if !is_over && slot.last_failure.as_ref().is_none_or(|known| known.at < last.at) {
        slot.last_failure = Some(last);
    }
}

fn slot(seen: &ReportedSlot) -> SlotReport {
    let ReportedSlot { slot, last_failure } = seen;
    let last_failure = last_failure.as_ref().map(|last| LastFailure {
        failure: failure(&last.model, last.code.as_deref(), last.message.as_deref()),
        at: ago(last.age_ms),
    });
    let failed = slot.models.iter().filter(|model| model.status == SlotModelStatus::Failed);
    // Machine-readable snapshots contain the message of only one failure per slot.
    let with_words = |model: &SlotModel| {
        let current = failure(&model.id, model.code.as_deref(), model.message.as_deref());
        let last = last_failure.as_ref().map(|last| &last.failure);
        let known = last.filter(|last| (&last.model, &last.code) == (&current.model, &current.code));
        known.filter(|_| current.message.is_empty()).cloned().unwrap_or(current)
    };
    SlotReport {
        id: shorten(&slot.id, MAX_SLOT_CHARS),
        state: state(slot.state),
        resident: slot.resident.as_ref().map(|model| shorten(model, MAX_MODEL_CHARS)),
        target: slot.target.as_ref().map(|model| shorten(model, MAX_MODEL_CHARS)),
        since: Since(ago(slot.since_ms)),
        failures: failed.map(with_words).collect(),
        last_failure,
    }
}

fn failure(model: &str, code: Option<&str>, message: Option<&str>) -> SlotFailure {
    SlotFailure {
        model: shorten(model, MAX_MODEL_CHARS),
        code: shorten(code.unwrap_or("unknown"), MAX_CODE_CHARS),
        message: shorten(message.unwrap_or_default(), MAX_MESSAGE_CHARS),
    }
}

fn ago(millis: u64) -> Timestamp {
    let age = SignedDuration::from_millis(i64::try_from(millis).unwrap_or(i64::MAX));
    Timestamp::now().checked_sub(age).unwrap_or(Timestamp::UNIX_EPOCH)
}

fn state(state: WireState) -> SlotState {
    match state {
        WireState::Empty => SlotState::Empty,
        WireState::Ready => SlotState::Ready,
        WireState::Draining => SlotState::Draining,
        WireState::Severing => SlotState::Severing,
        WireState::Evicting => SlotState::Evicting,
        WireState::Loading => SlotState::Loading,
        WireState::RollingBack => SlotState::RollingBack,
        WireState::Backoff => SlotState::Backoff,
        WireState::Stopping => SlotState::Stopping,
        WireState::Quarantined => SlotState::Quarantined,
    }
}

/// Returns a single line of at most the length that the status's schema allows; a worker's text may be longer.
fn shorten(text: &str, longest: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(longest).collect()
}
