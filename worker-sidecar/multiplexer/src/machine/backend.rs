//! Changes of backends that the slot did not cause: probes, deaths, and models that probes find.

use std::time::Duration;

use super::preflight::LoadRefusal;
use super::state::{State, Then};
use super::{Machine, Probe};
use crate::Model;
use crate::config::RESYNC_INTERVAL;
use crate::effect::{Effect, LeaseEnd, SlotEvent};
use crate::error::LoadFailure;
use crate::event::{DownCause, Found, Generation, OpId};

/// The number of consecutive probes without a reply after which a backend is treated as dead.
const SILENT_LOOKS: u8 = 3;

/// Between two probes while the previously resident model is unknown. All requests wait for these.
const STARTING_INTERVAL: Duration = Duration::from_secs(1);

impl Machine {
    /// Probes before anything is loaded: the backend may have been running for days.
    pub(super) fn handle_started(&mut self) {
        self.start_probe(None);
    }

    /// A request could not connect: probes at once instead of waiting for the next scheduled probe.
    pub(super) fn handle_connect_failed(&mut self, generation: Generation) {
        if let State::Ready(resident) = &mut self.state
            && resident.generation == generation
        {
            resident.suspected = true;
            let model = resident.model.clone();
            if self.probe.is_none() {
                self.start_probe(Some(model));
            }
        }
    }

    /// Probes if a probe is due.
    pub(super) fn advance_probe(&mut self) -> bool {
        let due = self.next_probe.is_some_and(|due| due <= self.now);
        let model = self.ready().map(|resident| resident.model.clone());
        if !due || (model.is_none() && !self.starting && !self.is_bereft) {
            return false;
        }
        self.start_probe(model);
        true
    }

    fn start_probe(&mut self, model: Option<Model>) {
        let op = self.next_op();
        self.probe = Some(Probe { op, deadline: self.after(super::LOOK_TIMEOUT) });
        self.next_probe = None;
        self.out.push(Effect::Probe { op, model });
    }

    pub(super) fn handle_probed(&mut self, op: OpId, found: Found) {
        if self.probe.take_if(|probe| probe.op == op).is_none() {
            return;
        }
        self.next_probe = Some(self.after(RESYNC_INTERVAL));
        if self.starting {
            if found == Found::Silence && self.silent_starts + 1 < SILENT_LOOKS {
                self.silent_starts += 1;
                self.next_probe = Some(self.after(STARTING_INTERVAL));
                return;
            }
            self.starting = false;
            match found {
                Found::Serving(model) if self.models.get(&model).is_some_and(|entry| !entry.removed) => {
                    self.adopt(&model);
                }
                Found::Serving(_) | Found::Nothing | Found::Silence => {
                    let orders = std::mem::take(&mut self.pending);
                    self.reissue(orders);
                }
            }
            return;
        }
        let resident = match &mut self.state {
            State::Ready(resident) => resident,
            // An operator who restarts their own backend restarts it with its model.
            State::Empty | State::Backoff { .. } if self.is_bereft => return self.find_again(&found),
            State::Empty
            | State::Backoff { .. }
            | State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Quarantined { .. }
            | State::Stopping { .. } => return,
        };
        let generation = resident.generation;
        match found {
            Found::Serving(model) if model == resident.model => {
                resident.silent = 0;
                if std::mem::take(&mut resident.suspected) {
                    self.out.push(Effect::StillServes { model });
                }
            }
            Found::Serving(model) => {
                let known = self.models.get(&model).is_some_and(|entry| !entry.removed);
                if known {
                    self.replace(&model);
                } else {
                    self.lose(generation, DownCause::Gone, true);
                }
            }
            Found::Nothing => self.lose(generation, DownCause::Gone, true),
            Found::Silence => {
                resident.silent += 1;
                if resident.silent >= SILENT_LOOKS {
                    self.lose(generation, DownCause::Unresponsive, true);
                }
            }
        }
    }

    fn find_again(&mut self, found: &Found) {
        if let Found::Serving(model) = found
            && self.models.get(model).is_some_and(|entry| !entry.removed)
        {
            self.preflight = None;
            self.adopt(model);
        }
    }

    /// A found model supersedes no order: an order for another model continues from here.
    fn adopt(&mut self, model: &Model) {
        let orders = std::mem::take(&mut self.pending);
        self.news(SlotEvent::Adopted { model: model.clone() });
        self.begin_residency(model);
        self.reissue(orders);
    }

    /// The model was swapped by a third party.
    fn replace(&mut self, model: &Model) {
        let Some(resident) = self.ready() else { return };
        let old = resident.model.clone();
        let leases = self.end_leases(LeaseEnd::BackendLost);
        self.news(SlotEvent::BackendDown { model: old.clone(), cause: DownCause::Gone, leases });
        self.close_gate(&old);
        self.preflight = None;
        self.adopt(model);
    }

    /// A generation's backend is gone. Only its parent process knows for certain that nothing of it is left to kill.
    pub(super) fn handle_backend_down(&mut self, generation: Generation, cause: DownCause) {
        self.lose(generation, cause, cause == DownCause::Unresponsive);
    }

    /// A generation's backend is gone. This does not free its memory at the same instant, so the next load waits for
    /// the memory as after any other eviction. `kill`: first kill what may be left of it.
    fn lose(&mut self, generation: Generation, cause: DownCause, kill: bool) {
        let Some(resident) = self.state.resident().filter(|resident| resident.generation == generation) else { return };
        let (model, answered) = (resident.model.clone(), resident.answered);
        let then = match &self.state {
            State::Ready(_) => Then::Rest,
            State::Draining(_) | State::Severing(_) => match self.leave() {
                // The lost model is not loaded again if the next load fails.
                Some((_, Then::Load { model, .. })) => Then::Load { model, prior: None },
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
        self.news(SlotEvent::BackendDown { model: model.clone(), cause, leases });
        self.set_asleep(&model, false);
        self.is_bereft = true;
        // A probe in progress examines the previous state.
        self.probe = None;
        self.next_probe = Some(self.after(RESYNC_INTERVAL));
        if !answered {
            // Otherwise it would be loaded again indefinitely, only to die at once or on its first request.
            let refusal = LoadRefusal::Load(LoadFailure::DiedAtOnce);
            let retry_after = self.note_failure(&model, &refusal);
            self.fail_load(&model, &refusal.into_error(&model, retry_after));
        }
        if kill {
            self.force(model, then);
        } else {
            self.confirm_memory(model, then);
        }
    }
}
