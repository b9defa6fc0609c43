//! What relays are told: the grants, snapshots and answers of all slots, put together for each link.
//!
//! Slots decide, each for itself; here their words are only collected. What goes out is absolute, so each link is told the
//! newest state and nothing in between.
//!
//! Where several slots have the same model, here is also chosen which of them is asked. That is no decision: a slot that is
//! asked in vain refuses, and the relay asks again.
//!
//! Locks: this one is taken before a link's, never after, and is not held over an await. So neither a lease nor a place may
//! be dropped under a link's lock.

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

/// What is said of a slot whose task is gone.
const FAILED: &str = "the worker failed; it has to be restarted";

/// What a relay understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The seeds' messages only: no grants, no errors.
    Old,
    /// Grants and errors, but nothing of slots: its requests wait here.
    Core1,
    /// Everything: it keeps its requests until a gate opens.
    Slots1,
}

/// One link, as far as the multiplexer speaks to it. Called under the board's lock: queues, and returns at once.
pub trait RelaySink: fmt::Debug + Send + Sync {
    /// The newest `grant`.
    fn grant(&self, grant: Grant);

    /// The newest `slots`. Only told to relays that know them.
    fn slots(&self, slots: Slots);

    /// The newest `models_update`: all names of all models, though none may be new.
    fn models(&self, names: &[Model]);

    /// The answer to a `command`.
    fn command_result(&self, result: CommandResult);
}

/// What a slot has to tell, beside its snapshot.
#[derive(Clone, Debug)]
pub(super) enum Told {
    Gate { model: Model, open: bool },
    Grant { relay: RelayKey, model: Model, values: GrantValues },
    Order { id: OrderId, result: Result<(), OrderError> },
    StillServes,
}

/// All slots, as the relays see them.
#[derive(Debug)]
pub struct Board {
    inner: Mutex<Inner>,
}

/// A request's place at a slot, from its arrival to its end.
#[derive(Debug)]
pub(super) struct Place {
    board: Arc<Board>,
    slot: usize,
    relay: RelayKey,
    model: Model,
}

#[derive(Debug)]
struct Inner {
    slots: Vec<SlotView>,
    /// How each slot is told what waits at relays. In the order in which that is decided, hence under the lock.
    mailboxes: Vec<Mailbox>,
    relays: BTreeMap<RelayKey, RelayView>,
    orders: HashMap<OrderId, OrderView>,
    next_order: u64,
    /// Which slot was last told of what waits at a relay for a model whose gate is open nowhere.
    chosen: HashMap<(RelayKey, Model), usize>,
}

/// Who waits for an order's answer, under which name.
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
    /// The newest numbers of each slot's models. They count while the gate is open.
    grants: BTreeMap<(usize, Model), GrantValues>,
    /// Its requests that are here.
    own: BTreeMap<(usize, Model), u32>,
    /// What waits there, as it said at `stated`, less what has come since.
    demand: Vec<Demand>,
    stated: Instant,
    /// Of which models each slot was told that they wait there.
    parts: Vec<BTreeSet<Model>>,
    told: Option<Grant>,
}

impl Peer {
    /// How a slot treats its requests.
    pub fn kind(self) -> LinkKind {
        match self {
            Self::Slots1 => LinkKind::Granted,
            Self::Core1 | Self::Old => LinkKind::Held,
        }
    }

    /// Whether its grant changes with every request of others. Elsewhere the slots say so.
    fn is_told_load(self) -> bool {
        self == Self::Core1
    }
}

impl Board {
    /// `snapshots`: what each slot looks like at `now`.
    pub(super) fn new(snapshots: Vec<Slot>, now: Instant) -> Arc<Self> {
        let slots = snapshots.into_iter().map(|snapshot| SlotView { snapshot, at: now, open: BTreeSet::new() });
        let (relays, orders) = (BTreeMap::new(), HashMap::new());
        let (slots, mailboxes, chosen) = (slots.collect(), Vec::new(), HashMap::new());
        let inner = Inner { slots, mailboxes, relays, orders, next_order: 0, chosen };
        Arc::new(Self { inner: Mutex::new(inner) })
    }

    /// The slots' tasks are there, in the same order.
    pub(super) fn connect(&self, mailboxes: Vec<Mailbox>) {
        self.lock().mailboxes = mailboxes;
    }

    /// A link has registered. It is told the slots and its first grant, before any slot has heard of it.
    pub(super) fn join(&self, relay: RelayKey, peer: Peer, sink: Arc<dyn RelaySink>, now: Instant) {
        let mut inner = self.lock();
        if peer == Peer::Slots1 {
            sink.slots(inner.slots_at(now));
        }
        let (grants, own, demand, parts) = (BTreeMap::new(), BTreeMap::new(), Vec::new(), Vec::new());
        let view = RelayView { peer, sink, grants, own, demand, stated: now, parts, told: None };
        inner.relays.insert(relay, view);
        inner.tell_grants(|_| true);
    }

    /// A link is gone.
    pub(super) fn leave(&self, relay: RelayKey) {
        let mut inner = self.lock();
        inner.relays.remove(&relay);
        inner.chosen.retain(|(of, _), _| *of != relay);
        inner.orders.retain(|_, order| order.relay != relay);
        inner.tell_grants(|_| true);
    }

    /// Finds the slot for a request, by whichever of its model's names. `None`: no slot has the model.
    pub(super) fn enter(self: &Arc<Self>, relay: RelayKey, name: &str, now: Instant) -> Option<Place> {
        let mut inner = self.lock();
        let model = inner.id(name)?;
        let slot = inner.choose(relay, &model, now)?;
        if let Some(view) = inner.relays.get_mut(&relay) {
            *view.own.entry((slot, Model::clone(&model))).or_default() += 1;
            view.demand.iter_mut().filter(|stated| stated.model == model).for_each(Demand::take_one);
            view.demand.retain(|stated| stated.waiting > 0);
        }
        inner.tell_grants(Peer::is_told_load);
        Some(Place { board: Arc::clone(self), slot, relay, model })
    }

    /// A relay says what waits there. The slots are told before this returns.
    pub(super) fn handle_demand(&self, relay: RelayKey, demand: &[Demand], now: Instant) {
        let mut inner = self.lock();
        let demand = inner.by_id(demand);
        inner.handle_demand(relay, demand, now);
    }

    /// A relay sends nothing more: what waits there goes elsewhere.
    pub(super) fn forget_demand(&self, relay: RelayKey) {
        let mut inner = self.lock();
        inner.chosen.retain(|(of, _), _| *of != relay);
        if let Some(view) = inner.relays.get_mut(&relay) {
            view.demand.clear();
        }
    }

    /// What the relay understands, while it is there.
    pub(super) fn peer(&self, relay: RelayKey) -> Option<Peer> {
        self.lock().relays.get(&relay).map(|view| view.peer)
    }

    /// All names of all models that some slot has: the ids, then the others.
    pub(super) fn names(&self) -> Vec<Model> {
        self.lock().names()
    }

    /// The id of the model that a name stands for.
    pub(super) fn id(&self, name: &str) -> Option<Model> {
        self.lock().id(name)
    }

    /// The slots that have this model.
    pub(super) fn slots_of(&self, model: &str) -> Vec<usize> {
        self.lock().slots_of(model).collect()
    }

    /// Requests that run at once at most: of each slot its largest model's.
    pub(super) fn capacity(&self) -> u32 {
        self.lock().capacity()
    }

    /// All slots as they are at `now`.
    pub(super) fn slots(&self, now: Instant) -> Slots {
        self.lock().slots_at(now)
    }

    /// Names an order to a slot whose answer goes to this relay.
    pub(super) fn note_order(&self, slot: usize, relay: RelayKey, op_id: String) -> OrderId {
        let mut inner = self.lock();
        inner.next_order += 1;
        let id = OrderId(inner.next_order);
        inner.orders.insert(id, OrderView { slot, relay, op_id });
        id
    }

    /// Answers a command that no slot has to be asked about.
    pub(super) fn answer_command(&self, relay: RelayKey, result: CommandResult) {
        if let Some(view) = self.lock().relays.get(&relay) {
            view.sink.command_result(result);
        }
    }

    /// A slot has something to tell. `snapshot`: if it looks different.
    pub(super) fn publish(&self, slot: usize, told: Vec<Told>, snapshot: Option<Slot>, now: Instant) {
        if told.is_empty() && snapshot.is_none() {
            return;
        }
        let mut inner = self.lock();
        let looks_different = snapshot.is_some();
        if let Some(snapshot) = snapshot {
            inner.show(slot, snapshot, now);
        }
        let mut answers = Vec::new();
        for told in told {
            match told {
                Told::Gate { model, open: true } => {
                    inner.slots[slot].open.insert(model);
                }
                Told::Gate { model, open: false } => {
                    inner.slots[slot].open.remove(&model);
                }
                Told::Grant { relay, model, values } => {
                    if let Some(view) = inner.relays.get_mut(&relay) {
                        view.grants.insert((slot, model), values);
                    }
                }
                Told::Order { id, result } => answers.push((id, result)),
                Told::StillServes => {
                    let names = inner.names();
                    inner.relays.values().for_each(|view| view.sink.models(&names));
                }
            }
        }
        if looks_different {
            inner.divide_again(now);
        }
        inner.tell_grants(|_| true);
        for (id, result) in answers {
            inner.answer_order(id, result.err().map(|error| error.to_string()));
        }
    }

    /// A slot's task is gone, by a fault of ours: it takes nothing any more.
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
        inner.tell_grants(|_| true);
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
        inner.tell_grants(Peer::is_told_load);
    }
}

/// The same slot, a little later.
fn aged(snapshot: &Slot, by: Duration) -> Slot {
    let by = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
    let mut slot = snapshot.clone();
    slot.since_ms = slot.since_ms.saturating_add(by);
    // Zero: it is not idle.
    slot.idle_ms = if slot.idle_ms > 0 { slot.idle_ms.saturating_add(by) } else { 0 };
    slot.eta_ms = slot.eta_ms.map(|eta| eta.saturating_sub(by));
    for model in &mut slot.models {
        model.retry_ms = model.retry_ms.map(|retry| retry.saturating_sub(by));
    }
    slot
}
