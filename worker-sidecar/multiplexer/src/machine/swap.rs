//! From the decision to unload a resident to the commit point: draining, severing, and aborting.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Machine;
use super::entry::{Entry, FairPlace};
use super::state::{Draining, Evicting, Resident, Severing, State, Step, SwapRecord, Target, Then};
use crate::Model;
use crate::config::{EVICT_TIMEOUT, SEVER_GRACE};
use crate::effect::{Effect, LeaseEnd, Reason, SlotEvent};
use crate::estimate::prior;
use crate::policy::{self, Candidate, Decision, ResidentView, Why};

impl Machine {
    /// Nothing is resident: loads a requested model, or else the default when it is due.
    pub(super) fn advance_vacant(&mut self) -> bool {
        if let State::Backoff { until } = self.state
            && until <= self.now
        {
            self.enter(State::Empty);
            return true;
        }
        if self.starting {
            return self.advance_probe();
        }
        if self.is_bereft && self.advance_probe() {
            return true;
        }
        if self.preflight.is_some() {
            return false;
        }
        let (models, candidates) = self.candidates();
        if let Some(to) = policy::pick(&self.config.knobs, false, &candidates) {
            self.start_preflight(models[to].clone(), Reason::Wanted);
            return true;
        }
        self.advance_default()
    }

    /// The resident serves: decides whether it must, should, or may be unloaded.
    pub(super) fn advance_ready(&mut self) -> bool {
        let Some(resident) = self.ready() else { return false };
        let (model, idle_since) = (resident.model.clone(), resident.idle_since);
        if self.models.get(&model).is_none_or(|entry| entry.removed) {
            self.depart(Target { model: None, reason: Reason::Removed });
            return true;
        }
        if self.is_unload_pending(&model) {
            self.depart(Target { model: None, reason: Reason::Order });
            return true;
        }
        if self.advance_probe() {
            return true;
        }
        if self.preflight.is_some() {
            return false;
        }
        let (models, candidates) = self.candidates();
        if !candidates.is_empty() {
            return match self.decide(&candidates) {
                Decision::Leave { to, why } => {
                    self.start_preflight(models[to].clone(), reason_of(why));
                    true
                }
                Decision::Stay { lingering, .. } => {
                    if let State::Ready(resident) = &mut self.state {
                        resident.lingering = lingering;
                    }
                    false
                }
            };
        }
        if let State::Ready(resident) = &mut self.state {
            resident.lingering = false;
        }
        if idle_since.is_some() && self.ttl_due().is_some_and(|due| due <= self.now) {
            self.default_dismissed |= self.config.default.as_ref() == Some(&model);
            self.depart(Target { model: None, reason: Reason::Ttl });
            return true;
        }
        self.advance_default()
    }

    fn advance_default(&mut self) -> bool {
        match (self.default_due(), self.config.default.clone()) {
            (Some(due), Some(default)) if due <= self.now => {
                self.start_preflight(default, Reason::Default);
                true
            }
            _ => false,
        }
    }

    /// The time at which the idle resident reaches its `idle_ttl`.
    pub(super) fn ttl_due(&self) -> Option<Instant> {
        let resident = self.ready()?;
        let entry = self.models.get(&resident.model).filter(|entry| !entry.pinned)?;
        Some(resident.idle_since? + entry.config.idle_ttl?)
    }

    /// The time at which the default is loaded without a request.
    pub(super) fn default_due(&self) -> Option<Instant> {
        let default = self.config.default.as_ref()?;
        let entry = self.models.get(default).filter(|entry| !entry.removed)?;
        let after = match self.ready() {
            Some(resident) if resident.model == *default || self.is_pinned(&resident.model) => return None,
            Some(_) => self.config.return_to_default_after?,
            None if self.default_dismissed => return None,
            // The very first load does not wait.
            None if self.generation == 0 => Duration::ZERO,
            None => self.config.return_to_default_after?,
        };
        let due = self.quiet_since? + after;
        Some(entry.failure.as_ref().map_or(due, |failure| due.max(failure.until)))
    }

    pub(super) fn is_pinned(&self, model: &Model) -> bool {
        self.models.get(model).is_some_and(|entry| entry.pinned && !entry.removed)
    }

    /// Returns the models other than the resident that have waiting requests and may be loaded.
    pub(super) fn candidates(&self) -> (Vec<Model>, Vec<Candidate>) {
        let resident = self.state.resident().map(|resident| &resident.model);
        if resident.is_some_and(|model| self.is_pinned(model)) {
            return (Vec::new(), Vec::new());
        }
        let eligible = self.models.values().filter(|entry| {
            resident != Some(entry.model()) && !entry.removed && entry.is_wanted() && entry.failing(self.now).is_none()
        });
        let candidate = |entry: &Entry| {
            let waiting = entry.waiting(self.now);
            let FairPlace { class, rank } = waiting.place.unwrap_or_default();
            Candidate {
                waiting: waiting.count,
                age: entry.waiting_for_turn(&waiting, self.now),
                total_wait: waiting.sum,
                cost: self.swap_cost(entry.model()),
                class,
                rank,
                is_owed: self.state.resident().is_some_and(|resident| resident.owes.contains(entry.model())),
            }
        };
        eligible.map(|entry| (entry.model().clone(), candidate(entry))).unzip()
    }

    /// Returns the cost of the swap to this model: unloading the resident and loading the model.
    pub(super) fn swap_cost(&self, to: &Model) -> Duration {
        let evict = self.state.resident().and_then(|resident| self.models.get(&resident.model)?.costs.evict.value());
        evict.unwrap_or_default() + self.load_cost(to)
    }

    /// Returns the cost of loading this model in its current state.
    pub(super) fn load_cost(&self, model: &Model) -> Duration {
        let Some(entry) = self.models.get(model) else { return Duration::ZERO };
        let kind = entry.load_kind();
        let others = self.models.values().filter_map(|other| other.costs.load(kind).value());
        entry.costs.load(kind).value().unwrap_or_else(|| prior(self.config.priors.of(kind), others))
    }

    pub(super) fn decide(&self, candidates: &[Candidate]) -> Decision {
        match self.resident_view() {
            Some(resident) => policy::decide(&self.config.knobs, &resident, candidates, self.now),
            None => Decision::Stay { recheck: None, lingering: false },
        }
    }

    /// Returns the resident that serves, as the policy sees it.
    pub(super) fn resident_view(&self) -> Option<ResidentView<'_>> {
        self.view(self.ready()?)
    }

    fn view(&self, resident: &Resident) -> Option<ResidentView<'_>> {
        let entry = self.models.get(&resident.model)?;
        let running = self.leases.values().filter(|lease| !lease.unwanted).map(|lease| lease.class);
        let waiting = entry.waiting(self.now).place.map(|place| place.class);
        Some(ResidentView {
            since: resident.since,
            idle_since: resident.idle_since,
            gaps: &entry.gaps,
            concurrency: entry.concurrency.value(),
            class: running.chain(waiting).min().unwrap_or(entry.last_class),
        })
    }

    /// Returns the models of the same class whose keys have attained less service than those that wait for this one.
    pub(super) fn owed_by(&self, model: &Model) -> BTreeSet<Model> {
        let class = |entry: &Entry| entry.waiting(self.now).place.map(|place| place.class);
        let Some(own) = self.models.get(model) else { return BTreeSet::new() };
        let is_owed = |other: &&Entry| class(other) == class(own) && other.precedes_at_a_relay(own);
        self.models.values().filter(is_owed).map(|entry| entry.model().clone()).collect()
    }

    /// Closes the gate. Running requests may end.
    pub(super) fn depart(&mut self, target: Target) {
        let State::Ready(resident) = &self.state else { return };
        let mut resident = resident.clone();
        if std::mem::take(&mut resident.lingering) {
            self.news(SlotEvent::LingerMiss { model: resident.model.clone() });
        }
        self.preflight = None;
        self.close_gate(&resident.model);
        let (from, to) = (Some(resident.model.clone()), target.model.clone());
        self.news(SlotEvent::SwapBegun { from, to, reason: target.reason });
        let class = self.view(&resident).map(|view| view.class).unwrap_or_default();
        let deadline = self.after(self.config.knobs.drain_timeout);
        self.enter(State::Draining(Draining { resident, target, class, since: self.now, deadline }));
    }

    pub(super) fn advance_draining(&mut self) -> bool {
        let State::Draining(draining) = &self.state else { return false };
        let (target, deadline) = (draining.target.clone(), draining.deadline);
        let mut wanted = true;
        if matches!(target.reason, Reason::Idle | Reason::Quantum) {
            let (models, candidates) = self.candidates();
            if candidates.is_empty() || !self.is_turn_over(draining, &candidates) {
                self.reopen();
                return true;
            }
            wanted = target.model.as_ref().is_some_and(|to| models.contains(to));
            if wanted && self.leases.is_empty() {
                self.commit();
                return true;
            }
            let best = policy::pick(&self.config.knobs, true, &candidates).map(|best| models[best].clone());
            if best != target.model
                && self.preflight.is_none()
                && let Some(best) = best
            {
                self.start_preflight(best, target.reason);
                return true;
            }
        }
        if !wanted {
            // Another model is wanted, and its preflight is running; no request is severed for that.
            return false;
        }
        if self.leases.is_empty() {
            self.commit();
            return true;
        }
        if deadline <= self.now {
            self.sever();
            return true;
        }
        false
    }

    /// True if the turn of a resident that drains is over for one of the candidates that are left: the one for which it
    /// ended early may have gone. Requests that wait for the resident since then do not prolong its turn.
    fn is_turn_over(&self, draining: &Draining, candidates: &[Candidate]) -> bool {
        let Draining { resident, class, .. } = draining;
        let Some(view) = self.view(resident).filter(|_| resident.idle_since.is_none()) else { return true };
        let view = ResidentView { class: view.class.max(*class), ..view };
        let end = |to| policy::turn_end(&self.config.knobs, &view, candidates, to);
        (0..candidates.len()).any(|to| end(to) <= self.now)
    }

    /// No request that justifies the swap waits any more: aborts it.
    fn reopen(&mut self) {
        let State::Draining(draining) = &self.state else { return };
        let resident = draining.resident.clone();
        let from = resident.model.clone();
        self.preflight = None;
        self.enter(State::Ready(resident));
        self.news(SlotEvent::SwapAborted { from: from.clone() });
        self.open_gate(&from);
    }

    /// Cancels the requests that still run, and gives the backend a moment to notice.
    pub(super) fn sever(&mut self) {
        let State::Draining(draining) = &self.state else { return };
        let Draining { resident, target, since, .. } = draining.clone();
        self.preflight = None;
        let severed = self.cancel_leases(LeaseEnd::Swap, |_| true);
        let until = self.after(SEVER_GRACE);
        self.enter(State::Severing(Severing { resident, target, draining_since: since, severed, until }));
    }

    pub(super) fn advance_severing(&mut self) -> bool {
        let State::Severing(severing) = &self.state else { return false };
        if !self.leases.is_empty() && severing.until > self.now {
            return false;
        }
        self.end_leases(LeaseEnd::Swap);
        self.commit();
        true
    }

    /// Passes the commit point: unloads the resident.
    fn commit(&mut self) {
        let Some((model, then)) = self.leave() else { return };
        let op = self.next_op();
        let (deadline, since) = (self.after(EVICT_TIMEOUT), self.now);
        self.out.push(Effect::Evict { op, model: model.clone() });
        self.enter(State::Evicting(Evicting { model, step: Step::Evict, forced: false, op, deadline, since, then }));
    }

    /// Returns the resident to unload and the step to take once its memory is free.
    pub(super) fn leave(&mut self) -> Option<(Model, Then)> {
        let (resident, target, since, severed) = match &self.state {
            State::Draining(draining) => (&draining.resident, &draining.target, draining.since, 0),
            State::Severing(severing) => {
                (&severing.resident, &severing.target, severing.draining_since, severing.severed)
            }
            State::Empty
            | State::Ready(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Backoff { .. }
            | State::Quarantined { .. }
            | State::Stopping { .. } => return None,
        };
        let model = resident.model.clone();
        let then = match target.model.clone() {
            Some(to) => Then::Load { model: to, prior: Some(model.clone()) },
            None => Then::Rest,
        };
        self.swap = Some(SwapRecord {
            from: Some(model.clone()),
            to: target.model.clone(),
            reason: target.reason,
            drain: self.now.saturating_duration_since(since),
            evict: Duration::ZERO,
            severed,
        });
        self.preflight = None;
        Some((model, then))
    }
}

fn reason_of(why: Why) -> Reason {
    match why {
        Why::Idle => Reason::Idle,
        Why::Quantum => Reason::Quantum,
    }
}
