//! Orders of operators, new configurations, and shutdown.

use std::time::Duration;

use super::Machine;
use super::entry::Entry;
use super::state::{Draining, State, Target, Then};
use crate::Model;
use crate::config::SlotConfig;
use crate::effect::{Effect, LeaseEnd, OrderError, Reason};
use crate::error::SlotError;
use crate::event::{Order, OrderId};

/// An order that takes time.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    id: OrderId,
    order: Order,
}

impl Machine {
    pub(super) fn handle_ordered(&mut self, id: OrderId, order: Order) {
        let done = match &order {
            Order::Load(model) => self.order_load(model),
            Order::Unload { model, now } => self.order_unload(model, *now),
            Order::Pin(model) => self.order_pin(model, true),
            Order::Unpin(model) => self.order_pin(model, false),
        };
        match done {
            Ok(true) => self.out.push(Effect::OrderDone { id, result: Ok(()) }),
            Ok(false) => self.pending.push(Pending { id, order }),
            Err(error) => self.out.push(Effect::OrderDone { id, result: Err(error) }),
        }
    }

    /// Issues orders again that were given when less was known.
    pub(super) fn reissue(&mut self, orders: Vec<Pending>) {
        for Pending { id, order } in orders {
            self.handle_ordered(id, order);
        }
    }

    fn order_pin(&mut self, model: &Model, pinned: bool) -> Result<bool, OrderError> {
        let entry = self.models.get_mut(model).filter(|entry| !entry.removed).ok_or(OrderError::UnknownModel)?;
        entry.pinned = pinned;
        Ok(true)
    }

    /// Returns true if it is done, false if it is in progress.
    fn order_load(&mut self, model: &Model) -> Result<bool, OrderError> {
        if self.models.get(model).is_none_or(|entry| entry.removed) {
            return Err(OrderError::UnknownModel);
        }
        match &mut self.state {
            State::Stopping { .. } => return Err(OrderError::Stopping),
            State::Quarantined { .. } => return Err(OrderError::Quarantined),
            State::Ready(resident) if resident.model == *model => return Ok(true),
            State::Draining(draining) if draining.target.model.as_ref() == Some(model) => {
                // From now on it is not aborted if the requests that caused it leave.
                draining.target.reason = Reason::Order;
                self.preflight = None;
                return Ok(false);
            }
            State::Empty | State::Backoff { .. } | State::Ready(_) => {}
            State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_) => {
                return if self.state.target() == Some(model) { Ok(false) } else { Err(OrderError::Busy) };
            }
        }
        if let Some(obstacle) = self.obstacle_to_order(model) {
            return Err(obstacle);
        }
        self.fail_superseded_orders();
        if self.starting {
            // It may be loaded already: the order waits for the first probe.
            return Ok(false);
        }
        // An operator who orders a load may have fixed the cause of the failure.
        if let Some(entry) = self.models.get_mut(model) {
            entry.failure = None;
        }
        self.start_preflight(model.clone(), Reason::Order);
        Ok(false)
    }

    /// Returns why a model is not loaded despite an operator's order.
    pub(super) fn obstacle_to_order(&self, model: &Model) -> Option<OrderError> {
        let pinned = self.ready().map(|resident| &resident.model).filter(|resident| self.is_pinned(resident));
        if let Some(resident) = pinned {
            return Some(OrderError::Pinned(resident.clone()));
        }
        let others = self.models.values().find(|entry| entry.model() != model && entry.is_wanted());
        others.map(|other| OrderError::OthersWait(other.model().clone()))
    }

    fn order_unload(&mut self, model: &Model, now: bool) -> Result<bool, OrderError> {
        if let State::Quarantined { model: stuck } = &self.state {
            if !now {
                return Err(OrderError::Quarantined);
            }
            let stuck = stuck.clone();
            self.force(stuck, Then::Rest);
            return Ok(false);
        }
        if self.models.get(model).is_none_or(|entry| entry.removed) {
            return Err(OrderError::UnknownModel);
        }
        if self.is_pinned(model) {
            return Err(OrderError::Pinned(model.clone()));
        }
        let default = self.config.default.as_ref() == Some(model);
        match &mut self.state {
            State::Stopping { .. } => return Err(OrderError::Stopping),
            State::Ready(resident) if resident.model == *model => {
                self.depart(Target { model: None, reason: Reason::Order });
                self.expire_deadline(now);
            }
            // It is unloaded anyway, and is not loaded again if its successor is no longer wanted.
            State::Draining(draining) if draining.resident.model == *model => {
                draining.target.reason = Reason::Order;
                self.expire_deadline(now);
            }
            State::Severing(severing) if severing.resident.model == *model => {}
            State::Evicting(evicting) if evicting.model == *model => {}
            State::Loading(loading) | State::RollingBack(loading) if loading.model == *model => {
                if now {
                    self.end_swap(crate::effect::SwapResult::Done);
                    self.force(model.clone(), Then::Rest);
                }
            }
            // It may be loaded: the order waits for the first probe.
            State::Empty if self.starting => return Ok(false),
            State::Empty
            | State::Ready(_)
            | State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Backoff { .. }
            | State::Quarantined { .. } => return Err(OrderError::NotResident),
        }
        self.default_dismissed |= default;
        Ok(false)
    }

    /// Ends the time of running requests, if `now` is set.
    fn expire_deadline(&mut self, now: bool) {
        if let State::Draining(Draining { deadline, .. }) = &mut self.state
            && now
        {
            *deadline = self.now;
        }
    }

    pub(super) fn is_load_pending(&self, model: &Model) -> bool {
        self.pending.iter().any(|pending| matches!(&pending.order, Order::Load(wanted) if wanted == model))
    }

    pub(super) fn is_unload_pending(&self, model: &Model) -> bool {
        self.pending.iter().any(|pending| matches!(&pending.order, Order::Unload { model: gone, .. } if gone == model))
    }

    /// A model is resident: orders for it are done, orders for another one are superseded.
    pub(super) fn finish_load_orders(&mut self, model: &Model) {
        self.end_orders(|order| match order {
            Order::Load(wanted) => Some(if wanted == model { Ok(()) } else { Err(OrderError::Superseded) }),
            Order::Unload { .. } | Order::Pin(_) | Order::Unpin(_) => None,
        });
    }

    pub(super) fn fail_load_orders(&mut self, model: &Model, error: &OrderError) {
        self.end_orders(|order| match order {
            Order::Load(wanted) if wanted == model => Some(Err(error.clone())),
            Order::Load(_) | Order::Unload { .. } | Order::Pin(_) | Order::Unpin(_) => None,
        });
    }

    /// No load that was ordered before is in progress any more.
    pub(super) fn fail_superseded_orders(&mut self) {
        self.end_orders(|order| match order {
            Order::Load(_) => Some(Err(OrderError::Superseded)),
            Order::Unload { .. } | Order::Pin(_) | Order::Unpin(_) => None,
        });
    }

    /// The memory is free, so all pending unloads are done, including the one that ends a quarantine.
    pub(super) fn finish_unload_orders(&mut self) {
        self.end_orders(|order| match order {
            Order::Unload { .. } => Some(Ok(())),
            Order::Load(_) | Order::Pin(_) | Order::Unpin(_) => None,
        });
    }

    pub(super) fn fail_orders(&mut self, error: &OrderError) {
        self.end_orders(|_| Some(Err(error.clone())));
    }

    fn end_orders(&mut self, how: impl Fn(&Order) -> Option<Result<(), OrderError>>) {
        let out = &mut self.out;
        self.pending.retain(|pending| {
            let Some(result) = how(&pending.order) else { return true };
            out.push(Effect::OrderDone { id: pending.id, result });
            false
        });
    }

    /// Applies a new configuration. Requests for removed models fail; a removed resident is drained and unloaded.
    pub(super) fn handle_config(&mut self, config: SlotConfig) {
        let config = config.within_reason();
        for model in &config.models {
            match self.models.get_mut(&model.id) {
                Some(entry) => entry.reconfigure(model.clone(), self.now),
                None => {
                    let mut entry = Entry::new(model.clone());
                    for (relay, kind) in &self.relays {
                        entry.allocator.add_link(*relay, *kind, self.now);
                    }
                    self.models.insert(model.id.clone(), entry);
                }
            }
        }
        let kept = |model: &Model| config.models.iter().any(|kept| kept.id == *model);
        let gone: Vec<_> = self.models.keys().filter(|model| !kept(model)).cloned().collect();
        self.config = config;
        for model in gone {
            if let Some(entry) = self.models.get_mut(&model) {
                entry.removed = true;
            }
            let error = self.unknown_model(&model);
            self.fail_waiting(&model, &error);
            self.fail_load_orders(&model, &OrderError::UnknownModel);
        }
    }

    /// Failures and sizes of the previous settings do not apply to the next load, and a sleeping backend cannot be used
    /// for it.
    pub(super) fn handle_model_changed(&mut self, model: &Model) {
        let is_needed = self.state.needs(model);
        let Some(entry) = self.models.get_mut(model) else { return };
        entry.failure = None;
        entry.failures = 0;
        entry.measured = None;
        entry.is_outdated = true;
        if entry.asleep && !is_needed {
            entry.asleep = false;
            self.out.push(Effect::Discard { model: model.clone() });
        }
    }

    /// Forgets models that are no longer in the configuration, once they are neither in the slot nor about to be.
    pub(super) fn forget_removed(&mut self) {
        let (state, out) = (&self.state, &mut self.out);
        self.models.retain(|model, entry| {
            let keep = !entry.removed || state.needs(model);
            if !keep {
                let model = model.clone();
                out.push(if entry.asleep { Effect::Discard { model } } else { Effect::Forget { model } });
            }
            keep
        });
    }

    pub(super) fn handle_stop(&mut self, timeout: Duration) {
        if matches!(self.state, State::Stopping { .. }) {
            return;
        }
        if let Some(resident) = self.state.resident() {
            let model = resident.model.clone();
            self.close_gate(&model);
        }
        self.preflight = None;
        self.probe = None;
        self.starting = false;
        let deadline = self.after(timeout);
        self.enter(State::Stopping { deadline, stopped: false });
        self.fail_all_waiting(&SlotError::Draining);
        self.fail_orders(&OrderError::Stopping);
    }

    pub(super) fn advance_stopping(&mut self) -> bool {
        let State::Stopping { deadline, stopped: false } = self.state else { return false };
        if !self.leases.is_empty() && deadline > self.now {
            return false;
        }
        self.end_leases(LeaseEnd::Shutdown);
        self.state = State::Stopping { deadline, stopped: true };
        self.out.push(Effect::Stopped);
        true
    }
}
