//! What becomes of backends without our doing: looks at them, their death, what is found in them.

use super::preflight::Refusal;
use super::state::{State, Then};
use super::{Machine, Probe};
use crate::multiplexer::Model;
use crate::multiplexer::config::RESYNC_INTERVAL;
use crate::multiplexer::effect::{Effect, LeaseEnd, News};
use crate::multiplexer::error::LoadFailure;
use crate::multiplexer::event::{DownCause, Found, Generation, OpId};

/// Looks in a row without an answer after which a backend is taken to be dead.
const SILENT_LOOKS: u8 = 3;

/// Late results of loads that were given up, of which so many are known.
const ABANDONED: usize = 8;

impl Machine {
    /// Looks what is there before anything is loaded: the backend may have been running for days.
    pub(super) fn handle_started(&mut self) {
        if self.starting && self.probe.is_none() {
            self.start_probe(None);
        }
    }

    /// A request found nobody: looks at once, not only when it is time.
    pub(super) fn handle_connect_failed(&mut self, generation: Generation) {
        if let State::Ready(resident) = &self.state
            && resident.generation == generation
            && self.probe.is_none()
        {
            let model = resident.model.clone();
            self.start_probe(Some(model));
        }
    }

    /// Looks when it is time.
    pub(super) fn advance_probe(&mut self) -> bool {
        let due = self.next_probe.is_some_and(|due| due <= self.now);
        let model = self.ready().map(|resident| resident.model.clone());
        if !due || self.probe.is_some() || model.is_none() {
            return false;
        }
        self.start_probe(model);
        true
    }

    fn start_probe(&mut self, model: Option<Model>) {
        let op = self.next_op();
        // Asked three questions at most, 5 s each.
        self.probe = Some(Probe { op, deadline: self.after(super::QUESTION_TIMEOUT) });
        self.next_probe = None;
        self.out.push(Effect::Probe { op, model });
    }

    pub(super) fn handle_probed(&mut self, op: OpId, found: Found) {
        if self.probe.take_if(|probe| probe.op == op).is_none() {
            return;
        }
        self.next_probe = Some(self.after(RESYNC_INTERVAL));
        if std::mem::take(&mut self.starting) {
            if let Found::Serving(model) = found
                && self.models.get(&model).is_some_and(|entry| !entry.removed)
            {
                self.adopt(&model);
            }
            return;
        }
        let State::Ready(resident) = &mut self.state else { return };
        let generation = resident.generation;
        match found {
            Found::Serving(model) if model == resident.model => resident.silent = 0,
            Found::Serving(model) => {
                let known = self.models.get(&model).is_some_and(|entry| !entry.removed);
                if known {
                    self.replace(&model);
                } else {
                    self.handle_backend_down(generation, DownCause::Gone);
                }
            }
            Found::Nothing => self.handle_backend_down(generation, DownCause::Gone),
            Found::Silence => {
                resident.silent += 1;
                if resident.silent >= SILENT_LOOKS {
                    self.handle_backend_down(generation, DownCause::Unresponsive);
                }
            }
        }
    }

    fn adopt(&mut self, model: &Model) {
        self.news(News::Adopted { model: model.clone() });
        self.begin_residency(model);
    }

    /// Somebody else has swapped the model behind our back.
    fn replace(&mut self, model: &Model) {
        let Some(resident) = self.ready() else { return };
        let old = resident.model.clone();
        let leases = self.end_leases(LeaseEnd::BackendLost);
        self.news(News::BackendDown { model: old.clone(), cause: DownCause::Gone, leases });
        self.close_gate(&old);
        self.preflight = None;
        self.adopt(model);
    }

    /// A generation's backend is gone. That it is, does not free its memory in the same instant, so the next load waits for
    /// that as after any other eviction.
    pub(super) fn handle_backend_down(&mut self, generation: Generation, cause: DownCause) {
        let Some(resident) = self.state.resident().filter(|resident| resident.generation == generation) else { return };
        let (model, answered) = (resident.model.clone(), resident.answered);
        let then = match &self.state {
            State::Ready(_) => Then::Rest,
            State::Draining(_) | State::Severing(_) => match self.leave() {
                // It is not worth coming back to.
                Some((_, Then::Load { model, attempt, .. })) => Then::Load { model, prior: None, attempt },
                Some((_, then @ (Then::RollBack { .. } | Then::Rest))) => then,
                None => return,
            },
            State::Empty
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Backoff { .. }
            | State::Quarantined { .. }
            | State::Stopping { .. } => return,
        };
        self.preflight = None;
        self.close_gate(&model);
        let leases = self.end_leases(LeaseEnd::BackendLost);
        self.news(News::BackendDown { model: model.clone(), cause, leases });
        self.set_asleep(&model, false);
        if leases > 0 && !answered {
            // It would be loaded for ever, only to die of its first request.
            let refusal = Refusal::Load(LoadFailure::DiedAtOnce);
            let retry_after = self.note_failure(&model, &refusal);
            self.fail_load(&model, &refusal.into_error(&model, retry_after));
        }
        match cause {
            DownCause::Gone => self.confirm_memory(model, then),
            DownCause::Unresponsive => self.force(model, then),
        }
    }

    /// A load was given up. Should it succeed nevertheless, that is not what anybody wants.
    pub(super) fn abandon(&mut self, op: OpId, model: &Model) {
        if self.abandoned.len() == ABANDONED {
            self.abandoned.pop_front();
        }
        self.abandoned.push_back((op, model.clone()));
    }

    /// A load that was given up has succeeded. While its backend is being killed, or loaded once more, that is all the same.
    pub(super) fn discard_late(&mut self, op: OpId) {
        let Some(index) = self.abandoned.iter().position(|(abandoned, _)| *abandoned == op) else { return };
        let Some((_, model)) = self.abandoned.remove(index) else { return };
        let busy_with_it = match &self.state {
            State::Evicting(evicting) => evicting.model == model,
            State::Loading(loading) | State::RollingBack(loading) => loading.model == model,
            State::Ready(_) | State::Draining(_) | State::Severing(_) => {
                self.state.resident().is_some_and(|resident| resident.model == model)
            }
            State::Quarantined { .. } | State::Empty | State::Backoff { .. } | State::Stopping { .. } => false,
        };
        if !busy_with_it {
            self.out.push(Effect::Discard { model });
        }
    }
}
