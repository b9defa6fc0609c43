//! Frees a slot's memory and makes sure of it: unload, kill if that fails, check the memory, and never continue without
//! it.

use super::Machine;
use super::state::{Evicting, State, Step, Then};
use crate::Model;
use crate::config::EVICT_TIMEOUT;
use crate::effect::{Effect, OrderError, SlotEvent, SwapResult};
use crate::error::SlotError;
use crate::event::{Left, OpId};

impl Machine {
    /// Kills a model's backend, whatever its state, and continues with `then` once its memory is free.
    pub(super) fn force(&mut self, model: Model, then: Then) {
        let op = self.next_op();
        let (deadline, since) = (self.after(EVICT_TIMEOUT), self.now);
        self.out.push(Effect::ForceEvict { op, model: model.clone() });
        self.enter(State::Evicting(Evicting { model, step: Step::Force, forced: true, op, deadline, since, then }));
    }

    /// Only checks that the memory is free: the backend is already gone.
    pub(super) fn confirm_memory(&mut self, model: Model, then: Then) {
        let op = self.next_op();
        let deadline = self.memory_deadline();
        self.out.push(Effect::CheckMemory { op, model: model.clone() });
        let since = self.now;
        self.enter(State::Evicting(Evicting { model, step: Step::Memory, forced: true, op, deadline, since, then }));
    }

    fn evicting(&self, op: OpId) -> Option<Evicting> {
        match &self.state {
            State::Evicting(evicting) if evicting.op == op => Some(evicting.clone()),
            State::Evicting(_)
            | State::Empty
            | State::Ready(_)
            | State::Draining(_)
            | State::Severing(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Backoff { .. }
            | State::Quarantined { .. }
            | State::Stopping { .. } => None,
        }
    }

    pub(super) fn handle_evicted(&mut self, op: OpId, result: Result<Left, String>) {
        let Some(evicting) = self.evicting(op) else { return };
        match result {
            Ok(left) => {
                self.set_asleep(&evicting.model, left != Left::Nothing);
                if let Some(entry) = self.models.get_mut(&evicting.model) {
                    entry.wakes_slowly = left == Left::Emptied;
                }
                self.check_memory(evicting);
            }
            Err(detail) => {
                self.news(SlotEvent::EvictFailed { model: evicting.model.clone(), detail });
                self.escalate(evicting);
            }
        }
    }

    pub(super) fn handle_force_evicted(&mut self, op: OpId, result: Result<(), String>) {
        let Some(evicting) = self.evicting(op) else { return };
        self.set_asleep(&evicting.model, false);
        match result {
            Ok(()) => self.check_memory(evicting),
            Err(detail) => {
                self.news(SlotEvent::EvictFailed { model: evicting.model.clone(), detail });
                self.quarantine(evicting.model);
            }
        }
    }

    pub(super) fn handle_memory_checked(&mut self, op: OpId, freed: bool) {
        let Some(evicting) = self.evicting(op) else { return };
        if freed {
            self.finish_eviction(evicting);
        } else {
            self.memory_not_freed(evicting);
        }
    }

    /// Handles a driver call that has not returned in time.
    pub(super) fn advance_evicting(&mut self) -> bool {
        let State::Evicting(evicting) = &self.state else { return false };
        if evicting.deadline > self.now {
            return false;
        }
        let evicting = evicting.clone();
        match evicting.step {
            Step::Evict => {
                let detail = "it timed out".to_owned();
                self.news(SlotEvent::EvictFailed { model: evicting.model.clone(), detail });
                self.escalate(evicting);
            }
            Step::Force => self.quarantine(evicting.model),
            Step::Memory => self.memory_not_freed(evicting),
        }
        true
    }

    fn check_memory(&mut self, evicting: Evicting) {
        let (since, forced) = (evicting.since, evicting.forced);
        self.confirm_memory(evicting.model, evicting.then);
        if let State::Evicting(evicting) = &mut self.state {
            evicting.since = since;
            evicting.forced = forced;
        }
    }

    fn escalate(&mut self, evicting: Evicting) {
        let since = evicting.since;
        self.force(evicting.model, evicting.then);
        if let State::Evicting(evicting) = &mut self.state {
            evicting.since = since;
        }
    }

    fn memory_not_freed(&mut self, evicting: Evicting) {
        self.news(SlotEvent::MemoryNotFreed { model: evicting.model.clone() });
        if evicting.forced {
            self.quarantine(evicting.model);
        } else {
            self.escalate(evicting);
        }
    }

    /// The memory is free.
    fn finish_eviction(&mut self, evicting: Evicting) {
        let Evicting { model: gone, forced, since, then, .. } = evicting;
        let took = self.now.saturating_duration_since(since);
        if !forced && let Some(entry) = self.models.get_mut(&gone) {
            entry.costs.evict.record(took);
        }
        if let Some(swap) = &mut self.swap {
            swap.evict += took;
        }
        self.finish_unload_orders();
        let there = |model: &Model| self.models.get(model).is_some_and(|entry| !entry.removed);
        match then {
            Then::Load { model, prior } if there(&model) => self.start_load(model, prior),
            Then::RollBack { prior } if there(&prior) => self.start_rollback(prior),
            Then::Load { .. } | Then::RollBack { .. } | Then::Rest => self.rest(&gone),
        }
    }

    /// Nothing is resident, and nothing is in progress. Enters back-off if the unloaded model had failed.
    fn rest(&mut self, gone: &Model) {
        self.end_swap(SwapResult::Done);
        let failure = self.models.get(gone).and_then(|entry| entry.failing(self.now));
        let until = failure.map(|failure| failure.until);
        self.enter(until.map_or(State::Empty, |until| State::Backoff { until }));
        self.fail_superseded_orders();
    }

    /// Puts the slot out of use. Requests do not wait for an operator.
    fn quarantine(&mut self, model: Model) {
        self.news(SlotEvent::Quarantined { model: model.clone() });
        self.end_swap(SwapResult::Quarantined);
        self.enter(State::Quarantined { model });
        self.fail_all_waiting(&SlotError::Quarantined);
        self.fail_orders(&OrderError::Quarantined);
    }

    pub(super) fn set_asleep(&mut self, model: &Model, asleep: bool) {
        if let Some(entry) = self.models.get_mut(model) {
            entry.asleep = asleep;
        }
    }
}
