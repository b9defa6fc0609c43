//! One timer for all that happens by itself.

use std::time::{Duration, Instant};

use super::Machine;
use super::preflight::Refusal;
use super::state::{Resident, State};
use crate::multiplexer::config::MEMORY_FREE_TIMEOUT;
use crate::multiplexer::effect::Effect;
use crate::multiplexer::error::{LoadFailure, SlotError};
use crate::multiplexer::estimate::LoadKind;
use crate::multiplexer::event::Found;
use crate::multiplexer::policy::{self, Decision};
use crate::multiplexer::{Model, config};

impl Machine {
    /// When [`Event::Tick`](crate::multiplexer::event::Event::Tick) is due, if nothing else happens before.
    pub fn next_timeout(&self) -> Option<Instant> {
        let questions = [self.preflight.as_ref().map(|preflight| preflight.deadline), self.probe.map(|p| p.deadline)];
        let own = self.state.deadline().into_iter().chain(questions.into_iter().flatten());
        let held = self.models.values().flat_map(|entry| &entry.held);
        let budgets = held.map(|waiter| waiter.at + self.hold_budget());
        let handed = self.models.values().filter_map(|entry| entry.divider.next_timeout());
        let failures = self.models.values().filter_map(|entry| entry.failing(self.now)).map(|failure| failure.until);
        own.chain(budgets).chain(handed).chain(failures).chain(self.next_decision()).min()
    }

    /// When waiting alone may change what is to be done with the resident, or with the vacant slot.
    fn next_decision(&self) -> Option<Instant> {
        match &self.state {
            State::Ready(_) => {
                let probe = self.next_probe.filter(|_| self.probe.is_none());
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
            State::Empty | State::Backoff { .. } if self.preflight.is_none() && !self.starting => self.default_due(),
            State::Empty
            | State::Backoff { .. }
            | State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Quarantined { .. }
            | State::Stopping { .. } => None,
        }
    }

    fn hold_budget(&self) -> Duration {
        self.config.knobs.hold_budget.min(super::NEVER)
    }

    /// Ends the waits that the worker may not prolong.
    pub(super) fn expire_held(&mut self) {
        let (now, budget) = (self.now, self.hold_budget());
        let expired: Vec<_> = self.models.values().flat_map(|entry| &entry.held).copied().collect();
        for waiter in expired.into_iter().filter(|waiter| waiter.at + budget <= now) {
            let model =
                self.models.values().find(|entry| entry.held.contains(&waiter)).map(|entry| entry.model().clone());
            let Some(model) = model else { continue };
            let (eta, waited) = (self.eta(&model).unwrap_or_default(), now.saturating_duration_since(waiter.at));
            if let Some(entry) = self.models.get_mut(&model) {
                entry.cancel(waiter.request, now);
            }
            let error = SlotError::HoldExpired { model, waited, eta };
            self.out.push(Effect::Fail { request: waiter.request, error });
        }
    }

    /// Passes on slots that their relay has not used.
    pub(super) fn expire_unused(&mut self) {
        let now = self.now;
        for entry in self.models.values_mut() {
            if entry.divider.next_timeout().is_some_and(|due| due <= now) {
                entry.divider.on_timeout(now);
            }
        }
    }

    /// A driver that does not answer a question cannot do it.
    pub(super) fn expire_questions(&mut self) -> bool {
        let now = self.now;
        if let Some(preflight) = self.preflight.take_if(|preflight| preflight.deadline <= now) {
            let refusal = Refusal::Load(LoadFailure::Driver("its driver does not answer".to_owned()));
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

    /// About how long until the model serves; `None` if nothing leads there.
    pub fn eta(&self, model: &Model) -> Option<Duration> {
        let cost = self.load_cost(model);
        let evict = |of: &Model| self.models.get(of).and_then(|entry| entry.costs.evict.value()).unwrap_or_default();
        let past = |since: Instant| self.now.saturating_duration_since(since);
        let under_way = self.state.target() == Some(model);
        match &self.state {
            State::Ready(resident) if resident.model == *model => Some(Duration::ZERO),
            State::Loading(loading) | State::RollingBack(loading) if under_way => {
                Some(cost.saturating_sub(past(loading.since)))
            }
            State::Evicting(evicting) if under_way => {
                Some(evict(&evicting.model).saturating_sub(past(evicting.since)) + cost)
            }
            State::Severing(severing) if under_way => Some(evict(&severing.resident.model) + cost),
            State::Draining(draining) if under_way => {
                let drain = draining.deadline.saturating_duration_since(self.now);
                Some(drain + evict(&draining.resident.model) + cost)
            }
            State::Ready(resident) => Some(self.eta_from(resident, model)),
            State::Empty | State::Backoff { .. } => Some(cost),
            State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_) => Some(self.turns_before(model)),
            State::Quarantined { .. } | State::Stopping { .. } => None,
        }
    }

    /// The model's bound by the policy, less what it has waited already.
    fn turns_before(&self, model: &Model) -> Duration {
        let (models, candidates) = self.candidates();
        let Some(index) = models.iter().position(|candidate| candidate == model) else {
            return self.swap_cost(model) + self.config.knobs.drain_timeout.min(super::NEVER);
        };
        policy::bound(&self.config.knobs, true, &candidates, index).saturating_sub(candidates[index].age)
    }

    fn eta_from(&self, resident: &Resident, model: &Model) -> Duration {
        let cost = self.swap_cost(model);
        let stays = match resident.idle_since {
            Some(_) => Duration::ZERO,
            None => {
                let quantum = policy::quantum(&self.config.knobs, cost);
                quantum.saturating_sub(self.now.saturating_duration_since(resident.since))
            }
        };
        stays + cost
    }

    /// How long a look at the memory may take, its answer included.
    pub(super) fn memory_deadline(&self) -> Instant {
        self.after(MEMORY_FREE_TIMEOUT + super::QUESTION_TIMEOUT)
    }

    /// What a load of this kind may take.
    pub(super) fn load_timeout(&self, kind: LoadKind) -> Duration {
        match kind {
            LoadKind::Cold => self.config.knobs.load_timeout,
            LoadKind::Wake => config::WAKE_TIMEOUT,
        }
    }
}
