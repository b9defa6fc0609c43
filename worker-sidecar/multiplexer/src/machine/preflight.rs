//! Checks that a model can be loaded before anything is changed for it: a swap that cannot succeed disrupts no request.

use std::time::Duration;

use super::Machine;
use super::state::{Preflight, State, SwapRecord, Target};
use crate::Model;
use crate::effect::{Effect, Reason, SlotEvent};
use crate::error::{LoadFailure, SlotError};
use crate::event::OpId;
use crate::memory::{self, Reading, Size};
use crate::policy::{self, Decision, Why};

impl Machine {
    /// Starts the check that the model can be loaded, before anything is changed for it.
    pub(super) fn start_preflight(&mut self, model: Model, reason: Reason) {
        let cost = self.swap_cost(&model);
        if policy::is_infeasible(&self.config.knobs, cost)
            && let Some(entry) = self.models.get_mut(&model)
            && !std::mem::replace(&mut entry.warned, true)
        {
            self.news(SlotEvent::MaxWaitInfeasible { model: model.clone(), cost });
        }
        let op = self.next_op();
        let deadline = self.after(super::QUESTION_TIMEOUT);
        self.preflight = Some(Preflight { op, model: model.clone(), reason, deadline });
        self.out.push(Effect::Preflight { op, model });
    }

    pub(super) fn handle_preflight(&mut self, op: OpId, result: Result<Reading, String>) {
        let Some(preflight) = self.preflight.take_if(|preflight| preflight.op == op) else { return };
        let model = preflight.model.clone();
        match self.check_preflight(&model, result) {
            Ok(()) => self.follow_preflight(preflight),
            Err(refusal) => {
                let retry_after = self.note_failure(&model, &refusal);
                let error = refusal.into_error(&model, retry_after);
                self.fail_load(&model, &error);
            }
        }
    }

    fn check_preflight(&mut self, model: &Model, result: Result<Reading, String>) -> Result<(), LoadRefusal> {
        let reading = result.map_err(|detail| LoadRefusal::Load(LoadFailure::Driver(detail)))?;
        if let Some(resident) = self.state.resident()
            && let Some(entry) = self.models.get_mut(&resident.model)
            && reading.held.is_some()
            && !entry.is_outdated
        {
            entry.measured = reading.held;
        }
        let Some(entry) = self.models.get(model) else { return Ok(()) };
        let size = Size { declared: entry.config.memory, measured: entry.measured };
        memory::check(size, self.config.memory, &reading).map_err(LoadRefusal::Memory)
    }

    /// The model can be loaded. Checks again that it still should be, because the preflight took time.
    fn follow_preflight(&mut self, preflight: Preflight) {
        let Preflight { model, reason, .. } = preflight;
        if self.models.get(&model).is_none_or(|entry| entry.removed) {
            return;
        }
        if let State::Draining(draining) = &self.state {
            let reason = draining.target.reason;
            // An operator's decision is not undone by an earlier preflight.
            if reason != Reason::Order
                && self.candidates().0.contains(&model)
                && let State::Draining(draining) = &mut self.state
            {
                draining.target = Target { model: Some(model), reason };
            }
            return;
        }
        let mut ordered = reason == Reason::Order && self.is_load_pending(&model);
        if ordered && let Some(obstacle) = self.obstacle_to_order(&model) {
            ordered = false;
            self.fail_load_orders(&model, &obstacle);
        }
        let reason = if ordered { Some(Reason::Order) } else { self.reason_to_load(&model) };
        let Some(reason) = reason else { return };
        if self.ready().is_some() {
            self.depart(Target { model: Some(model), reason });
        } else {
            self.swap = Some(SwapRecord {
                from: None,
                to: Some(model.clone()),
                reason,
                drain: Duration::ZERO,
                evict: Duration::ZERO,
                severed: 0,
            });
            self.news(SlotEvent::SwapBegun { from: None, to: Some(model.clone()), reason });
            self.start_load(model, None);
        }
    }

    /// Returns why a model that fits should be loaded now, if it should. The best model may change with every
    /// preflight; it is enough that this one is wanted and its own quantum is over. A preflight changes neither, so
    /// preflights do not repeat indefinitely.
    fn reason_to_load(&self, model: &Model) -> Option<Reason> {
        let (models, candidates) = self.candidates();
        if candidates.is_empty() {
            let due = self.default_due().is_some_and(|due| due <= self.now);
            return (due && self.config.default.as_ref() == Some(model)).then_some(Reason::Default);
        }
        let index = models.iter().position(|candidate| candidate == model)?;
        let Some(resident) = self.resident_view() else { return Some(Reason::Wanted) };
        match self.decide(&candidates) {
            Decision::Leave { why: Why::Idle, .. } => Some(Reason::Idle),
            Decision::Leave { why: Why::Quantum, .. } => {
                let end = policy::turn_end(&self.config.knobs, &resident, &candidates, index);
                (self.now >= end).then_some(Reason::Quantum)
            }
            Decision::Stay { .. } => None,
        }
    }
}

/// The reason why a model is not loaded, before the time of the next try is known.
#[derive(Clone, Debug)]
pub(super) enum LoadRefusal {
    Memory(memory::Shortage),
    Load(LoadFailure),
}

impl LoadRefusal {
    pub(super) fn into_error(self, model: &Model, retry_after: Duration) -> SlotError {
        let model = model.clone();
        match self {
            Self::Memory(shortage) => SlotError::InsufficientMemory { model, shortage, retry_after },
            Self::Load(failure) => SlotError::LoadFailed { model, failure, retry_after },
        }
    }
}
