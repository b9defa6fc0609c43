//! One timer for everything that happens by itself.

use std::time::{Duration, Instant};

use super::Machine;
use super::entry::Entry;
use super::preflight::LoadRefusal;
use super::state::State;
use crate::Model;
use crate::config::{MEMORY_FREE_TIMEOUT, WAKE_TIMEOUT};
use crate::effect::Effect;
use crate::error::{LoadFailure, SlotError};
use crate::estimate::LoadKind;
use crate::event::Found;
use crate::policy::Decision;

impl Machine {
    /// Returns when [`Event::Tick`](crate::event::Event::Tick) is due, if nothing else happens before.
    pub fn next_timeout(&self) -> Option<Instant> {
        let questions = [self.preflight.as_ref().map(|preflight| preflight.deadline), self.probe.map(|p| p.deadline)];
        // A drain whose time is over may still wait for the preflight of its new target.
        let over = |due: &Instant| matches!(self.state, State::Draining(_)) && *due <= self.now;
        let own = self.state.deadline().filter(|due| !over(due)).into_iter();
        let own = own.chain(questions.into_iter().flatten());
        let held = self.models.values().filter_map(|entry| entry.held.first());
        let budgets = held.map(|waiter| waiter.at + self.config.knobs.hold_budget);
        let handed = self.models.values().filter_map(|entry| entry.allocator.next_timeout());
        let failures = self.models.values().filter_map(|entry| entry.failing(self.now)).map(|failure| failure.until);
        own.chain(budgets).chain(handed).chain(failures).chain(self.next_decision()).min()
    }

    /// The time at which waiting alone may change what happens to the resident, or to the vacant slot.
    fn next_decision(&self) -> Option<Instant> {
        match &self.state {
            State::Ready(_) => {
                let probe = self.next_probe;
                if self.preflight.is_some() {
                    return probe;
                }
                let (_, candidates) = self.candidates();
                let leave = if candidates.is_empty() {
                    self.ttl_due().into_iter().chain(self.default_due()).min()
                } else if let Decision::Stay { recheck, .. } = self.decide(&candidates) {
                    recheck
                } else {
                    None
                };
                leave.into_iter().chain(probe).min()
            }
            State::Empty | State::Backoff { .. } if self.starting => self.next_probe,
            State::Empty | State::Backoff { .. } => {
                let probe = self.next_probe.filter(|_| self.is_bereft);
                let default = self.default_due().filter(|_| self.preflight.is_none());
                probe.into_iter().chain(default).min()
            }
            State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Quarantined { .. }
            | State::Stopping { .. } => None,
        }
    }

    /// Fails the requests that have waited for the whole hold budget.
    pub(super) fn expire_held(&mut self) {
        let now = self.now;
        let Some(until) = now.checked_sub(self.config.knobs.hold_budget) else { return };
        // The oldest is first.
        let is_due = |entry: &&Entry| entry.held.first().is_some_and(|waiter| waiter.at <= until);
        let due: Vec<_> = self.models.values().filter(is_due).map(|entry| entry.model().clone()).collect();
        for model in due {
            let eta = self.eta(&model, now).unwrap_or_default();
            let Some(entry) = self.models.get_mut(&model) else { continue };
            for waiter in entry.take_held_until(until, now) {
                let waited = now.saturating_duration_since(waiter.at);
                let error = SlotError::HoldExpired { model: model.clone(), waited, eta };
                self.out.push(Effect::Fail { request: waiter.request, error });
            }
        }
    }

    /// Passes on slots that their relay has not used.
    pub(super) fn expire_unused(&mut self) {
        let now = self.now;
        for entry in self.models.values_mut() {
            if entry.allocator.next_timeout().is_some_and(|due| due <= now) {
                entry.allocator.on_timeout(now);
            }
        }
    }

    /// Treats driver questions without a reply as failed.
    pub(super) fn expire_questions(&mut self) -> bool {
        let now = self.now;
        if let Some(preflight) = self.preflight.take_if(|preflight| preflight.deadline <= now) {
            let refusal = LoadRefusal::Load(LoadFailure::Driver("its driver does not respond".to_owned()));
            let retry_after = self.note_failure(&preflight.model, &refusal);
            self.fail_load(&preflight.model, &refusal.into_error(&preflight.model, retry_after));
            return true;
        }
        if let Some(probe) = self.probe.filter(|probe| probe.deadline <= now) {
            self.handle_probed(probe.op, Found::Silence);
            return true;
        }
        false
    }

    /// Returns the deadline of a memory check, including the driver's reply.
    pub(super) fn memory_deadline(&self) -> Instant {
        self.after(MEMORY_FREE_TIMEOUT + super::QUESTION_TIMEOUT)
    }

    /// Returns how long a load of this kind may take.
    pub(super) fn load_timeout(&self, model: &Model, kind: LoadKind) -> Duration {
        let reads_weights = self.models.get(model).is_some_and(|entry| entry.wakes_slowly);
        match kind {
            LoadKind::Wake if !reads_weights => WAKE_TIMEOUT,
            LoadKind::Cold | LoadKind::Wake => self.config.knobs.load_timeout,
        }
    }
}
