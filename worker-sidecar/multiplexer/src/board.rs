//! The messages to relays: the grants, snapshots and results of all slots, merged for each link.
//!
//! The slots make the decisions; this module only collects their state. All messages are absolute, so each link gets
//! the newest state and nothing in between.
//!
//! If several slots have the same model, this module also chooses the slot for a request. The choice need not be right:
//! a slot that cannot serve a request rejects it, and the relay sends it again.
//!
//! Locks: the board's lock is acquired before a link's, never after, and is not held over an await. So neither a lease
//! nor a place may be dropped under a link's lock.

mod choice;
mod grants;
mod names;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use modelrelay_protocol::grants::{GrantValues, LinkKind};
use modelrelay_protocol::message::{CommandResult, Grant, Slot, SlotModelStatus, SlotState, Slots};

use super::Model;
use super::actor::Mailbox;
use super::effect::OrderError;
use super::error::SlotError;
use super::event::{Demand, OrderId, RelayKey};

/// The message for a slot whose task is gone.
const FAILED: &str = "the worker failed; restart it";

/// The protocol features that a relay supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// No capabilities: the original messages only, without grants and errors.
    Old,
    /// Grants and errors, but not slots: its requests wait here.
    Core1,
    /// Everything: it keeps its requests until a gate opens.
    Slots1,
}

/// The multiplexer's interface to one link. Called under the board's lock: implementations queue the message and return
/// at once.
pub trait RelaySink: fmt::Debug + Send + Sync {
    /// Queues the newest `grant`.
    fn grant(&self, grant: Grant);

    /// Queues the newest `slots`. Only for relays that support them.
    fn slots(&self, slots: Slots);

    /// Queues the newest `models_update`: all names of all models, even if none is new.
    fn models(&self, names: &[Model]);

    /// Queues the result of a `command`.
    fn command_result(&self, result: CommandResult);
}

/// A slot's update, in addition to its snapshot.
#[derive(Clone, Debug)]
pub(super) enum SlotUpdate {
    Gate { model: Model, open: bool },
    Grant { relay: RelayKey, model: Model, values: GrantValues },
    Order { id: OrderId, result: Result<(), OrderError> },
    StillServes,
}

/// All slots, as relays see them.
#[derive(Debug)]
pub struct RelayNotifier {
    inner: Mutex<Inner>,
}

/// A request's place at a slot, from its arrival to its end.
#[derive(Debug)]
pub(super) struct Place {
    board: Arc<RelayNotifier>,
    slot: usize,
    relay: RelayKey,
    model: Model,
}

#[derive(Debug)]
struct Inner {
    slots: Vec<SlotView>,
    /// Deliver each slot's demand. They are used under the lock, so that demand arrives in the order in which it was
    /// divided.
    mailboxes: Vec<Mailbox>,
    relays: BTreeMap<RelayKey, RelayView>,
    orders: HashMap<OrderId, OrderView>,
    next_order: u64,
    /// The slot that was last sent a relay's demand for a model whose gate is closed everywhere.
    chosen: HashMap<(RelayKey, Model), usize>,
}

/// The link that awaits an order's result, and the order's name there.
#[derive(Debug)]
struct OrderView {
    slot: usize,
    relay: RelayKey,
    op_id: String,
}

#[derive(Debug)]
struct SlotView {
    /// As of `at`.
    snapshot: Slot,
    at: Instant,
    open: BTreeSet<Model>,
}

#[derive(Debug)]
struct RelayView {
    peer: Peer,
    sink: Arc<dyn RelaySink>,
    /// The newest values of each slot's models. They are in effect while the gate is open.
    grants: BTreeMap<(usize, Model), GrantValues>,
    /// The number of its requests that are here.
    own: BTreeMap<(usize, Model), u32>,
    /// The requests that wait there, as reported at `stated`, less those that have arrived since.
    demand: Vec<Demand>,
    stated: Instant,
    /// The models whose demand each slot was sent.
    parts: Vec<BTreeSet<Model>>,
    sent: Option<Grant>,
}

impl Peer {
    /// How a slot treats its requests.
    pub fn kind(self) -> LinkKind {
        match self {
            Self::Slots1 => LinkKind::Granted,
            Self::Core1 | Self::Old => LinkKind::Held,
        }
    }

    /// True if its grant changes with every request of others. To other relays, the slots report that.
    fn receives_load(self) -> bool {
        self == Self::Core1
    }
}

impl RelayNotifier {
    /// `snapshots`: each slot's state at `now`.
    pub(super) fn new(snapshots: Vec<Slot>, now: Instant) -> Arc<Self> {
        let slots = snapshots.into_iter().map(|snapshot| SlotView { snapshot, at: now, open: BTreeSet::new() });
        let (relays, orders) = (BTreeMap::new(), HashMap::new());
        let (slots, mailboxes, chosen) = (slots.collect(), Vec::new(), HashMap::new());
        let inner = Inner { slots, mailboxes, relays, orders, next_order: 0, chosen };
        Arc::new(Self { inner: Mutex::new(inner) })
    }

    /// Connects the slots' tasks, in the order of the snapshots.
    pub(super) fn connect(&self, mailboxes: Vec<Mailbox>) {
        self.lock().mailboxes = mailboxes;
    }

    /// A link has registered. It receives the slots and its first grant before any slot is notified of it.
    pub(super) fn join(&self, relay: RelayKey, peer: Peer, sink: Arc<dyn RelaySink>, now: Instant) {
        let mut inner = self.lock();
        if peer == Peer::Slots1 {
            sink.slots(inner.slots_at(now));
        }
        let (grants, own, demand, parts) = (BTreeMap::new(), BTreeMap::new(), Vec::new(), Vec::new());
        let view = RelayView { peer, sink, grants, own, demand, stated: now, parts, sent: None };
        inner.relays.insert(relay, view);
        inner.send_grants(|_| true);
    }

    /// A link is gone.
    pub(super) fn leave(&self, relay: RelayKey) {
        let mut inner = self.lock();
        inner.relays.remove(&relay);
        inner.chosen.retain(|(of, _), _| *of != relay);
        inner.orders.retain(|_, order| order.relay != relay);
        inner.send_grants(|_| true);
    }

    /// Finds the slot for a request, by any name of its model. `None`: no slot has the model.
    pub(super) fn enter(self: &Arc<Self>, relay: RelayKey, name: &str, now: Instant) -> Option<Place> {
        let mut inner = self.lock();
        let model = inner.id(name)?;
        let slot = inner.choose(relay, &model, now)?;
        if let Some(view) = inner.relays.get_mut(&relay) {
            *view.own.entry((slot, Model::clone(&model))).or_default() += 1;
            view.demand.iter_mut().filter(|stated| stated.model == model).for_each(Demand::take_one);
            view.demand.retain(|stated| stated.waiting > 0);
        }
        inner.send_grants(Peer::receives_load);
        Some(Place { board: Arc::clone(self), slot, relay, model })
    }

    /// A relay reported its waiting requests. The slots are notified before this returns.
    pub(super) fn handle_demand(&self, relay: RelayKey, demand: &[Demand], now: Instant) {
        let mut inner = self.lock();
        let demand = inner.by_id(demand);
        inner.handle_demand(relay, demand, now);
    }

    /// A relay sends no more requests: those that wait there go elsewhere.
    pub(super) fn forget_demand(&self, relay: RelayKey) {
        let mut inner = self.lock();
        inner.chosen.retain(|(of, _), _| *of != relay);
        if let Some(view) = inner.relays.get_mut(&relay) {
            view.demand.clear();
        }
    }

    /// Returns the features that the relay supports, while it is connected.
    pub(super) fn peer(&self, relay: RelayKey) -> Option<Peer> {
        self.lock().relays.get(&relay).map(|view| view.peer)
    }

    /// Returns all names of all models of all slots: the ids, then the aliases.
    pub(super) fn names(&self) -> Vec<Model> {
        self.lock().names()
    }

    /// Returns the id of the model with this name.
    pub(super) fn id(&self, name: &str) -> Option<Model> {
        self.lock().id(name)
    }

    pub(super) fn slots_of(&self, model: &str) -> Vec<usize> {
        self.lock().slots_of(model).collect()
    }

    /// Returns the most requests that run at once: the sum of each slot's largest capacity.
    pub(super) fn capacity(&self) -> u32 {
        self.lock().capacity()
    }

    /// Returns all slots as they are at `now`.
    pub(super) fn slots(&self, now: Instant) -> Slots {
        self.lock().slots_at(now)
    }

    /// Returns the resident models, each with its slot and the number of its load there.
    pub(super) fn residents(&self) -> Vec<(String, u64, String)> {
        let inner = self.lock();
        let slots = inner.slots.iter().map(|slot| &slot.snapshot);
        slots.filter_map(|slot| Some((slot.id.clone(), slot.generation, slot.resident.clone()?))).collect()
    }

    /// Registers an order to a slot whose result goes to this relay.
    pub(super) fn note_order(&self, slot: usize, relay: RelayKey, op_id: String) -> OrderId {
        let mut inner = self.lock();
        inner.next_order += 1;
        let id = OrderId(inner.next_order);
        inner.orders.insert(id, OrderView { slot, relay, op_id });
        id
    }

    /// Sends the result of a command that needs no slot.
    pub(super) fn answer_command(&self, relay: RelayKey, result: CommandResult) {
        if let Some(view) = self.lock().relays.get(&relay) {
            view.sink.command_result(result);
        }
    }

    /// Publishes a slot's updates. `snapshot`: its new state, if that has changed.
    pub(super) fn publish(&self, slot: usize, updates: Vec<SlotUpdate>, snapshot: Option<Slot>, now: Instant) {
        if updates.is_empty() && snapshot.is_none() {
            return;
        }
        let mut inner = self.lock();
        let looks_different = snapshot.is_some();
        if let Some(snapshot) = snapshot {
            inner.show(slot, snapshot, now);
        }
        let mut answers = Vec::new();
        for update in updates {
            match update {
                SlotUpdate::Gate { model, open: true } => {
                    inner.slots[slot].open.insert(model);
                }
                SlotUpdate::Gate { model, open: false } => {
                    inner.slots[slot].open.remove(&model);
                }
                SlotUpdate::Grant { relay, model, values } => {
                    if let Some(view) = inner.relays.get_mut(&relay) {
                        view.grants.insert((slot, model), values);
                    }
                }
                SlotUpdate::Order { id, result } => answers.push((id, result)),
                SlotUpdate::StillServes => {
                    let names = inner.names();
                    inner.relays.values().for_each(|view| view.sink.models(&names));
                }
            }
        }
        if looks_different {
            inner.divide_again(now);
        }
        inner.send_grants(|_| true);
        for (id, result) in answers {
            inner.answer_order(id, result.err().map(|error| error.to_string()));
        }
    }

    /// A slot's task is gone because of a bug: the slot accepts nothing any more.
    pub(super) fn fail(&self, slot: usize, now: Instant) {
        let mut inner = self.lock();
        let mut snapshot = inner.slots[slot].snapshot.clone();
        (snapshot.state, snapshot.since_ms, snapshot.idle_ms) = (SlotState::Quarantined, 0, 0);
        (snapshot.resident, snapshot.target, snapshot.eta_ms) = (None, None, None);
        for model in &mut snapshot.models {
            model.status = SlotModelStatus::Failed;
            model.code = Some(SlotError::Quarantined.code().to_owned());
            model.message = Some(FAILED.to_owned());
            model.retry_ms = None;
        }
        inner.slots[slot].open.clear();
        inner.show(slot, snapshot, now);
        inner.divide_again(now);
        inner.send_grants(|_| true);
        let of_it = inner.orders.iter().filter(|(_, order)| order.slot == slot);
        for id in of_it.map(|(id, _)| *id).collect::<Vec<_>>() {
            inner.answer_order(id, Some(FAILED.to_owned()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn slots_of(&self, model: &str) -> impl Iterator<Item = usize> {
        let has = move |slot: &SlotView| slot.snapshot.models.iter().any(|known| known.id == model);
        self.slots.iter().enumerate().filter(move |(_, slot)| has(slot)).map(|(index, _)| index)
    }

    fn slots_at(&self, now: Instant) -> Slots {
        let slots = self.slots.iter().map(|slot| aged(&slot.snapshot, now.saturating_duration_since(slot.at)));
        Slots { slots: slots.collect() }
    }

    fn show(&mut self, slot: usize, snapshot: Slot, now: Instant) {
        self.slots[slot].snapshot = snapshot;
        self.slots[slot].at = now;
        let slots = self.slots_at(now);
        for view in self.relays.values().filter(|view| view.peer == Peer::Slots1) {
            view.sink.slots(slots.clone());
        }
    }

    fn answer_order(&mut self, id: OrderId, error: Option<String>) {
        let Some(OrderView { relay, op_id, .. }) = self.orders.remove(&id) else { return };
        let Some(view) = self.relays.get(&relay) else { return };
        view.sink.command_result(CommandResult { op_id, ok: error.is_none(), error });
    }
}

impl Place {
    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    pub(super) fn relay(&self) -> RelayKey {
        self.relay
    }

    pub(super) fn model(&self) -> &Model {
        &self.model
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.board.lock();
        if let Some(view) = inner.relays.get_mut(&self.relay) {
            let key = (self.slot, Model::clone(&self.model));
            if let Some(own) = view.own.get_mut(&key) {
                *own -= 1;
                if *own == 0 {
                    view.own.remove(&key);
                }
            }
        }
        inner.send_grants(Peer::receives_load);
    }
}

/// Returns the slot as it is `by` later.
fn aged(snapshot: &Slot, by: Duration) -> Slot {
    let by = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
    let mut slot = snapshot.clone();
    slot.since_ms = slot.since_ms.saturating_add(by);
    // 0 means not idle.
    slot.idle_ms = if slot.idle_ms > 0 { slot.idle_ms.saturating_add(by) } else { 0 };
    slot.eta_ms = slot.eta_ms.map(|eta| eta.saturating_sub(by));
    for model in &mut slot.models {
        model.retry_ms = model.retry_ms.map(|retry| retry.saturating_sub(by));
    }
    slot
}
