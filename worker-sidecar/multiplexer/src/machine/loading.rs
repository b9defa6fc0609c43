//! Loads a model into free memory, handles the failure of a load, and records its result.

use std::time::Duration;

use super::Machine;
use super::preflight::LoadRefusal;
use super::state::{LastFailure, Loading, Resident, State, SwapRecord, Then};
use crate::Model;
use crate::config::{FIRST_BACKOFF, LONGEST_BACKOFF, RESYNC_INTERVAL};
use crate::effect::{Effect, OrderError, SlotEvent, Swap, SwapResult};
use crate::error::{LoadFailure, SlotError};
use crate::estimate::LoadKind;
use crate::event::OpId;

/// After this many doublings the back-off is already at its maximum.
const MOST_DOUBLINGS: u32 = 8;

impl Machine {
    /// The memory is free: loads a model into it. `prior` can be loaded again if that fails.
    pub(super) fn start_load(&mut self, model: Model, prior: Option<Model>) {
        let loading = self.loading(model, prior);
        self.enter(State::Loading(loading));
    }

    pub(super) fn start_rollback(&mut self, prior: Model) {
        let loading = self.loading(prior, None);
        self.enter(State::RollingBack(loading));
    }

    fn loading(&mut self, model: Model, prior: Option<Model>) -> Loading {
        self.preflight = None;
        self.is_bereft = false;
        let entry = self.models.get_mut(&model);
        let kind = entry.map_or(LoadKind::Cold, |entry| {
            entry.is_outdated = false;
            entry.load_kind()
        });
        let timeout = self.load_timeout(&model, kind);
        let op = self.next_op();
        self.out.push(Effect::Load { op, model: model.clone(), kind });
        Loading { model, prior, kind, since: self.now, op, deadline: self.after(timeout) }
    }

    fn current_load(&self) -> Option<&Loading> {
        match &self.state {
            State::Loading(loading) | State::RollingBack(loading) => Some(loading),
            State::Empty
            | State::Ready(_)
            | State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Backoff { .. }
            | State::Quarantined { .. }
            | State::Stopping { .. } => None,
        }
    }

    pub(super) fn handle_loaded(&mut self, op: OpId, result: Result<(), LoadFailure>) {
        let Some(loading) = self.current_load().filter(|loading| loading.op == op).cloned() else { return };
        match result {
            Ok(()) => self.finish_load(&loading),
            Err(failure) => self.fail_loading(loading, failure),
        }
    }

    pub(super) fn advance_loading(&mut self) -> bool {
        let Some(loading) = self.current_load().filter(|loading| loading.deadline <= self.now) else { return false };
        let loading = loading.clone();
        let timeout = loading.deadline.saturating_duration_since(loading.since);
        self.fail_loading(loading, LoadFailure::TimedOut(timeout));
        true
    }

    /// The model is ready. Its waiting requests get their leases in this very step, before anything else is considered.
    fn finish_load(&mut self, loading: &Loading) {
        let took = self.now.saturating_duration_since(loading.since);
        if let Some(entry) = self.models.get_mut(&loading.model) {
            entry.costs.record_load(loading.kind, took);
        }
        let result =
            if matches!(self.state, State::RollingBack(_)) { SwapResult::LoadFailed } else { SwapResult::Done };
        self.end_swap(result);
        self.begin_residency(&loading.model);
    }

    /// A model is resident from now on: either loaded, or found by a probe.
    pub(super) fn begin_residency(&mut self, model: &Model) {
        self.generation += 1;
        self.is_bereft = false;
        if let Some(entry) = self.models.get_mut(model) {
            entry.asleep = false;
            entry.failure = None;
        }
        if self.config.default.as_ref() != Some(model) {
            self.default_dismissed = false;
        }
        let (generation, since, owes) = (self.generation, self.now, self.owed_by(model));
        // A probe in progress examines the previous state.
        self.probe = None;
        self.next_probe = Some(self.after(RESYNC_INTERVAL));
        self.quiet_since = None;
        self.enter(State::Ready(Resident {
            model: model.clone(),
            generation,
            since,
            idle_since: None,
            answered: false,
            lingering: false,
            silent: 0,
            suspected: false,
            owes,
        }));
        self.open_gate(model);
        self.finish_load_orders(model);
        self.lease_held();
    }

    fn fail_loading(&mut self, loading: Loading, failure: LoadFailure) {
        let rolling_back = matches!(self.state, State::RollingBack(_));
        let Loading { model, prior, kind, .. } = loading;
        if kind == LoadKind::Wake && !rolling_back {
            self.news(SlotEvent::WakeFailed { model: model.clone(), failure });
            // A killed backend no longer sleeps, so the next load is a cold one.
            self.force(model.clone(), Then::Load { model, prior });
            return;
        }
        let refusal = LoadRefusal::Load(failure);
        let retry_after = self.note_failure(&model, &refusal);
        self.fail_load(&model, &refusal.into_error(&model, retry_after));
        let then = match prior.filter(|_| self.config.knobs.rollback) {
            Some(prior) => Then::RollBack { prior },
            None => {
                self.end_swap(SwapResult::LoadFailed);
                Then::Rest
            }
        };
        self.force(model, then);
    }

    /// Records that a model could not be loaded, and returns how long it is not tried again.
    pub(super) fn note_failure(&mut self, model: &Model, refusal: &LoadRefusal) -> Duration {
        let now = self.now;
        let Some(entry) = self.models.get_mut(model) else { return Duration::ZERO };
        let doubled = FIRST_BACKOFF * 2u32.pow(entry.failures.min(MOST_DOUBLINGS));
        let wait = self.jitter.apply(doubled.min(LONGEST_BACKOFF));
        entry.failures = entry.failures.saturating_add(1);
        let error = refusal.clone().into_error(model, wait);
        entry.failure = Some(LastFailure { error, until: now + wait });
        wait
    }

    /// Fails all requests and orders that wait for a model: one failure for all.
    pub(super) fn fail_load(&mut self, model: &Model, error: &SlotError) {
        self.news(SlotEvent::LoadFailed { model: model.clone(), error: error.clone() });
        self.fail_waiting(model, error);
        self.fail_load_orders(model, &OrderError::Failed(error.clone()));
    }

    pub(super) fn end_swap(&mut self, result: SwapResult) {
        let Some(swap) = self.swap.take() else { return };
        let load = match self.current_load() {
            Some(loading) => self.now.saturating_duration_since(loading.since),
            None => Duration::ZERO,
        };
        let SwapRecord { from, to, reason, drain, evict, severed } = swap;
        self.news(SlotEvent::SwapEnded(Swap { from, to, reason, drain, evict, load, severed, result }));
    }
}

impl LastFailure {
    /// Returns the error as reported at `now`, with the rest of the wait.
    pub(super) fn error_at(&self, now: std::time::Instant) -> SlotError {
        let left = self.until.saturating_duration_since(now);
        let mut error = self.error.clone();
        match &mut error {
            SlotError::InsufficientMemory { retry_after, .. } | SlotError::LoadFailed { retry_after, .. } => {
                *retry_after = left;
            }
            SlotError::UnknownModel { .. }
            | SlotError::HoldExpired { .. }
            | SlotError::QueueFull { .. }
            | SlotError::Quarantined
            | SlotError::AtCapacity
            | SlotError::Severed
            | SlotError::BackendLost
            | SlotError::Draining => {}
        }
        error
    }
}
