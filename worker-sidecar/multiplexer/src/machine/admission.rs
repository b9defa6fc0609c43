//! Requests and relays: which requests wait, get a lease, or are rejected.

use modelrelay_protocol::grants::{Admission, LinkKind};

use super::entry::{Entry, Waiter};
use super::state::State;
use super::{LeaseState, Machine};
use crate::Model;
use crate::effect::{Effect, LeaseEnd, SlotEvent};
use crate::error::SlotError;
use crate::event::{Arrival, Demand, RelayKey, RequestKey};

impl Machine {
    pub(super) fn handle_relay_joined(&mut self, relay: RelayKey, kind: LinkKind) {
        self.relays.insert(relay, kind);
        for entry in self.models.values_mut() {
            entry.allocator.add_link(relay, kind, self.now);
        }
    }

    /// A link is gone. Its waiting requests are dropped silently; its running requests are cancelled, and occupy
    /// capacity until they end.
    pub(super) fn handle_relay_lost(&mut self, relay: RelayKey) {
        self.relays.remove(&relay);
        for entry in self.models.values_mut() {
            entry.remove_relay(relay, self.now);
        }
        self.cancel_leases(LeaseEnd::RelayLost, |lease| lease.relay == relay);
    }

    /// A link has sent something. If it let a slot pass for a model, it is considered waiting for it again.
    pub(super) fn handle_heard(&mut self, relay: RelayKey) {
        for entry in self.models.values_mut() {
            entry.allocator.on_message(relay, self.now);
        }
    }

    pub(super) fn handle_arrived(&mut self, arrival: &Arrival) {
        self.handle_heard(arrival.relay);
        match self.admit(arrival) {
            Ok(Admission::Run) => self.lease(&arrival.model, Waiter::from(arrival)),
            Ok(Admission::AtCapacity) => {}
            Err(error) => self.out.push(Effect::Fail { request: arrival.request, error }),
        }
    }

    /// Admits a request. Returns `AtCapacity` if it waits here.
    fn admit(&mut self, arrival: &Arrival) -> Result<Admission, SlotError> {
        let Arrival { relay, model, .. } = arrival;
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let now = self.now;
        let under_way = self.state.target() == Some(model);
        let own = self.requests_of(*relay);
        let Some(entry) = self.models.get_mut(model).filter(|entry| !entry.removed) else {
            return Err(self.unknown_model(model));
        };
        if let Some(failure) = entry.failing(now) {
            return Err(failure.error_at(now));
        }
        // A request of a link that is gone does not wait.
        let kind = *self.relays.get(relay).ok_or(SlotError::AtCapacity)?;
        if kind == LinkKind::Held && own >= self.config.max_held_per_relay {
            return Err(SlotError::QueueFull { limit: self.config.max_held_per_relay });
        }
        note_wanted(entry, &mut self.state, now, &mut self.out);
        let admission = entry.handle_request(Waiter::from(arrival), kind, now);
        if admission == Admission::AtCapacity {
            if under_way {
                self.news(SlotEvent::Coalesced { model: model.clone() });
            }
            if kind == LinkKind::Granted {
                return Err(SlotError::AtCapacity);
            }
        }
        Ok(admission)
    }

    /// Returns the reason why this slot accepts no requests at all, if it does not.
    pub(super) fn refusal(&self) -> Option<SlotError> {
        match &self.state {
            State::Stopping { .. } => Some(SlotError::Draining),
            State::Quarantined { .. } => Some(SlotError::Quarantined),
            State::Empty
            | State::Ready(_)
            | State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Backoff { .. } => None,
        }
    }

    pub(super) fn unknown_model(&self, model: &Model) -> SlotError {
        let known = self.models.values().filter(|entry| !entry.removed).map(|entry| entry.model().clone());
        SlotError::UnknownModel { model: model.clone(), known: known.collect() }
    }

    /// The number of one relay's requests that run or wait here.
    fn requests_of(&self, relay: RelayKey) -> usize {
        let running = self.leases.values().filter(|lease| lease.relay == relay && !lease.unwanted).count();
        let waiting = self.models.values().flat_map(|entry| &entry.held);
        running + waiting.filter(|waiter| waiter.relay == relay).count()
    }

    /// Creates a lease of the resident generation. Only called while its gate is open.
    fn lease(&mut self, model: &Model, waiter: Waiter) {
        let Waiter { request, relay, class, .. } = waiter;
        let generation = self.generation;
        debug_assert!(self.ready().is_some_and(|resident| resident.model == *model), "a lease needs an open gate");
        self.leases
            .insert(request, LeaseState { model: model.clone(), relay, class, cancelled: false, unwanted: false });
        if let Some(entry) = self.models.get_mut(model) {
            let running = self.leases.values().filter(|lease| !lease.unwanted).count();
            let running = u32::try_from(running).unwrap_or(u32::MAX);
            entry.last_class = class;
            entry.concurrency.record(running.saturating_add(entry.waiting(self.now).count));
        }
        self.out.push(Effect::Lease { request, model: model.clone(), generation });
    }

    /// Starts the requests that wait here and may run now.
    pub(super) fn lease_held(&mut self) {
        let Some(model) = self.ready().map(|resident| resident.model.clone()) else { return };
        while let Some(waiter) = self.models.get_mut(&model).and_then(|entry| entry.next_held(self.now)) {
            self.lease(&model, waiter);
            let waited = self.now.saturating_duration_since(waiter.at);
            self.news(SlotEvent::Held { model: model.clone(), waited });
        }
    }

    pub(super) fn handle_demand(&mut self, relay: RelayKey, demand: &[Demand]) {
        if self.relays.get(&relay) != Some(&LinkKind::Granted) {
            return;
        }
        let refused = self.refusal().is_some();
        for (model, entry) in &mut self.models {
            let deaf = refused || entry.removed || entry.failing(self.now).is_some();
            let stated = demand.iter().find(|stated| stated.model == *model && !deaf);
            entry.handle_demand(relay, stated, self.now);
            if entry.allocator.awaited(relay) > 0 {
                note_wanted(entry, &mut self.state, self.now, &mut self.out);
            }
        }
    }

    /// The capacity of a cancelled running request is free at once, as its relay assumes: otherwise the request that
    /// the relay sends after the cancel would be rejected, although its last grant allows it, and no other grant would
    /// follow. The lease stays until its connection is closed; no swap happens before that.
    pub(super) fn handle_cancelled(&mut self, request: RequestKey) {
        for entry in self.models.values_mut() {
            if entry.cancel(request, self.now) {
                return;
            }
        }
        let Some(lease) = self.leases.get_mut(&request).filter(|lease| !lease.unwanted) else { return };
        lease.unwanted = true;
        if let Some(entry) = self.models.get_mut(&lease.model) {
            entry.allocator.on_finished(lease.relay, self.now);
        }
    }

    /// The holder of a lease has dropped it. A lease that was severed, or whose backend is gone, has already been
    /// removed.
    pub(super) fn handle_released(&mut self, request: RequestKey, answered: bool) {
        let Some(lease) = self.leases.remove(&request) else { return };
        if let Some(entry) = self.models.get_mut(&lease.model) {
            if !lease.unwanted {
                entry.allocator.on_finished(lease.relay, self.now);
            }
            if answered {
                entry.failures = 0;
            }
        }
        if let Some(resident) = self.state.resident_mut() {
            resident.answered |= answered;
        }
    }

    /// Notifies the holders of these leases to end them, each once. They occupy capacity until they are released.
    pub(super) fn cancel_leases(&mut self, why: LeaseEnd, which: impl Fn(&LeaseState) -> bool) -> u32 {
        let mut count = 0;
        for (request, lease) in &mut self.leases {
            if which(lease) && !lease.cancelled {
                lease.cancelled = true;
                count += 1;
                self.out.push(Effect::CancelLease { request: *request, why });
            }
        }
        count
    }

    /// Ends all leases. Later releases of them are ignored.
    pub(super) fn end_leases(&mut self, why: LeaseEnd) -> u32 {
        self.cancel_leases(why, |_| true);
        let leases = std::mem::take(&mut self.leases);
        for lease in leases.values().filter(|lease| !lease.unwanted) {
            if let Some(entry) = self.models.get_mut(&lease.model) {
                entry.allocator.on_finished(lease.relay, self.now);
            }
        }
        u32::try_from(leases.len()).unwrap_or(u32::MAX)
    }

    /// Fails all requests that wait for a model, with the same error.
    pub(super) fn fail_waiting(&mut self, model: &Model, error: &SlotError) {
        let Some(entry) = self.models.get_mut(model) else { return };
        let held = entry.take_held(self.now);
        entry.forget_demand(self.now);
        self.out.extend(held.into_iter().map(|waiter| Effect::Fail { request: waiter.request, error: error.clone() }));
    }

    /// Fails all requests that wait for any model, with the same error.
    pub(super) fn fail_all_waiting(&mut self, error: &SlotError) {
        let models: Vec<_> = self.models.keys().cloned().collect();
        for model in models {
            self.fail_waiting(&model, error);
        }
    }

    pub(super) fn open_gate(&mut self, model: &Model) {
        if let Some(entry) = self.models.get_mut(model).filter(|entry| !entry.gate_open && !entry.removed) {
            entry.open_gate(self.now);
            self.out.push(Effect::OpenGate { model: model.clone() });
        }
    }

    pub(super) fn close_gate(&mut self, model: &Model) {
        if let Some(entry) = self.models.get_mut(model).filter(|entry| entry.gate_open) {
            entry.close_gate(self.now);
            self.out.push(Effect::CloseGate { model: model.clone() });
        }
    }

    /// Updates since when the resident and the slot are idle.
    pub(super) fn note_idleness(&mut self) {
        let now = self.now;
        let anybody_waits = self.models.values().any(Entry::is_wanted);
        let mut idle = self.leases.is_empty();
        if let Some(resident) = self.state.resident_mut()
            && let Some(entry) = self.models.get_mut(&resident.model)
        {
            idle &= !entry.is_wanted();
            if idle {
                resident.idle_since.get_or_insert(now);
                entry.gaps.handle_idle(now);
            } else {
                resident.idle_since = None;
            }
        }
        if idle && !anybody_waits {
            self.quiet_since.get_or_insert(now);
        } else {
            self.quiet_since = None;
        }
    }
}

/// A request for the model has arrived, here or at a relay.
fn note_wanted(entry: &mut Entry, state: &mut State, now: std::time::Instant, out: &mut Vec<Effect>) {
    entry.gaps.handle_wanted(now);
    if let Some(resident) = state.resident_mut()
        && resident.model == *entry.model()
        && std::mem::take(&mut resident.lingering)
    {
        out.push(Effect::SlotEvent(SlotEvent::LingerHit { model: resident.model.clone() }));
    }
}
