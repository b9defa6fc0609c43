//! All slots of a worker: the interface for links, probes and the shutdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::message::{self, Command, CommandResult, SlotState, Slots, WorkerError};
use serde_json::{Value, json};

use super::Model;
use super::actor::history::Report;
use super::actor::{PendingLease, SlotHandle, now};
use super::board::{Peer, RelayNotifier, RelaySink};
use super::config::SlotConfig;
use super::driver::slot::SlotDriver;
use super::error::SlotError;
use super::event::{Arrival, Demand, Event, Order, RelayKey, RequestClass, RequestKey};
use super::machine::{Jitter, Machine};
use super::metrics::MultiplexerMetrics;

/// A worker's slots. Dropping it ends their tasks, once the last lease is gone.
#[derive(Debug)]
pub struct Multiplexer {
    slots: Vec<SlotHandle>,
    ids: Vec<String>,
    board: Arc<RelayNotifier>,
    metrics: Arc<MultiplexerMetrics>,
    next_key: AtomicU64,
}

/// How a rejected request is reported to its relay.
#[derive(Debug)]
pub enum Refusal {
    /// By an `error` with a code that the relay acts on. Its `request_id` is still to be filled in.
    Code(WorkerError),
    /// By a response, which the client receives unchanged.
    Answer(ApiError),
}

impl Multiplexer {
    /// Starts a task for each slot. `seed` spreads retries that would otherwise happen at the same time.
    pub fn start(slots: Vec<(SlotConfig, Arc<SlotDriver>)>, metrics: Arc<MultiplexerMetrics>, seed: u64) -> Self {
        let jitter = |index: usize| Jitter::Seeded(seed.wrapping_add(index as u64));
        Self::start_with(slots, metrics, jitter)
    }

    fn start_with(
        slots: Vec<(SlotConfig, Arc<SlotDriver>)>,
        metrics: Arc<MultiplexerMetrics>,
        jitter: impl Fn(usize) -> Jitter,
    ) -> Self {
        let now = now();
        let (machines, drivers): (Vec<_>, Vec<_>) = slots
            .into_iter()
            .enumerate()
            .map(|(index, (config, driver))| (Machine::new(config, jitter(index), now), driver))
            .unzip();
        let snapshots: Vec<_> = machines.iter().map(|machine| machine.snapshot(now)).collect();
        let ids = snapshots.iter().map(|slot| slot.id.clone()).collect();
        let board = RelayNotifier::new(snapshots, now);
        let start = |(index, (machine, driver))| {
            SlotHandle::start(index, machine, driver, Arc::clone(&board), Arc::clone(&metrics))
        };
        let slots: Vec<_> = machines.into_iter().zip(drivers).enumerate().map(start).collect();
        board.connect(slots.iter().map(SlotHandle::mailbox).collect());
        Self { slots, ids, board, metrics, next_key: AtomicU64::new(1) }
    }

    #[cfg(test)]
    pub(super) fn start_unjittered(
        slots: Vec<(SlotConfig, Arc<SlotDriver>)>,
        metrics: Arc<MultiplexerMetrics>,
    ) -> Self {
        Self::start_with(slots, metrics, |_| Jitter::None)
    }

    /// A link has registered. Its sink receives the slots and a grant before this returns.
    pub fn join(&self, peer: Peer, sink: Arc<dyn RelaySink>) -> RelayKey {
        let relay = RelayKey(self.next_key());
        self.board.join(relay, peer, sink, now());
        self.send_to_all(|| Event::RelayJoined { relay, kind: peer.kind() });
        relay
    }

    /// A link is gone. Its waiting requests are dropped, its running requests are cancelled.
    pub fn leave(&self, relay: RelayKey) {
        self.board.leave(relay);
        self.send_to_all(|| Event::RelayLost { relay });
    }

    /// A request arrived, which its relay received at `at`. It is queued when this returns; dropping the future cancels
    /// it.
    pub fn arrive(&self, relay: RelayKey, (model, class): (&str, RequestClass), at: Instant) -> PendingLease {
        let request = RequestKey(self.next_key());
        let Some(place) = self.board.enter(relay, model, now()) else {
            let (model, known) = (Model::from(model), self.board.names());
            return PendingLease::refused(request, SlotError::UnknownModel { model, known });
        };
        let model = Model::clone(place.model());
        self.slots[place.slot()].arrive(Arrival { relay, request, model, at, class }, place)
    }

    /// A relay reported its waiting requests.
    pub fn handle_demand(&self, relay: RelayKey, demand: &message::Demand) {
        let stated = |model: &message::ModelDemand| Demand {
            model: model.id.as_str().into(),
            waiting: model.waiting,
            oldest: Duration::from_millis(model.oldest_ms),
            sum: Duration::from_millis(model.sum_ms),
            class: model.class,
            rank: model.rank,
        };
        let stated: Vec<_> = demand.models.iter().map(stated).collect();
        self.board.handle_demand(relay, &stated, now());
    }

    /// A relay sends no more requests over a link: those in its queue go elsewhere, those that arrived are served.
    pub fn handle_leaving(&self, relay: RelayKey) {
        self.board.forget_demand(relay);
        self.send_to_all(|| Event::RelayLeaving { relay });
    }

    /// The worker is about to stop: gives back at once the waiting requests of relays that can send them elsewhere.
    /// Requests of other relays keep waiting, because those relays would treat them as lost.
    pub fn give_back_held(&self) {
        self.slots.iter().for_each(SlotHandle::give_back_held);
    }

    /// Any other message arrived on a link.
    pub fn handle_message(&self, relay: RelayKey) {
        self.slots.iter().for_each(|slot| slot.hear(relay));
    }

    /// A relay forwards an operator's order. The result goes to its sink.
    pub fn handle_command(&self, relay: RelayKey, command: &Command) {
        let op_id = command.op_id.clone();
        match self.read_command(command) {
            Ok((slot, order)) => {
                let id = self.board.note_order(slot, relay, op_id);
                self.slots[slot].send_event(Event::Ordered { id, order });
            }
            Err(error) => self.board.answer_command(relay, CommandResult { op_id, ok: false, error: Some(error) }),
        }
    }

    fn read_command(&self, command: &Command) -> Result<(usize, Order), String> {
        let model = self.board.id(&command.model).unwrap_or_else(|| command.model.as_str().into());
        let order = match (command.command.as_str(), command.mode.as_deref()) {
            ("load", _) => Order::Load(model.clone()),
            ("unload", None | Some("drain")) => Order::Unload { model: model.clone(), now: false },
            ("unload", Some("now")) => Order::Unload { model: model.clone(), now: true },
            ("unload", Some(other)) => return Err(format!("unknown mode {other}: expected drain or now")),
            ("pin", _) => Order::Pin(model.clone()),
            ("unpin", _) => Order::Unpin(model.clone()),
            (other, _) => return Err(format!("unknown command {other}: expected load, unload, pin or unpin")),
        };
        Ok((self.slot_for(command, &model)?, order))
    }

    fn slot_for(&self, command: &Command, model: &Model) -> Result<usize, String> {
        if let Some(named) = &command.slot {
            let slot = self.ids.iter().position(|id| id == named);
            return slot.ok_or_else(|| format!("no slot {named}; available: {}", self.ids.join(", ")));
        }
        match *self.board.slots_of(model) {
            [slot] => Ok(slot),
            [] => Err(format!("no slot has model {}", command.model)),
            ref several => {
                let ids: Vec<_> = several.iter().map(|slot| self.ids[*slot].as_str()).collect();
                Err(format!("model {} is in slots {}: specify one", command.model, ids.join(", ")))
            }
        }
    }

    /// Replaces the configuration of one slot; returns `false` if there is no such slot. The slot's driver already has
    /// it, and uses different settings for the next load of the models in `changed`.
    pub fn reconfigure(&self, config: SlotConfig, changed: &[Model]) -> bool {
        let Some(slot) = self.ids.iter().position(|id| *id == config.id) else { return false };
        self.slots[slot].send_event(Event::ConfigChanged(Box::new(config)));
        for model in changed {
            self.slots[slot].send_event(Event::ModelChanged { model: Model::clone(model) });
        }
        true
    }

    /// Accepts no more requests. Returns when none is running any more, or the timeout has passed, and the worker's own
    /// backends have ended.
    pub async fn stop(&self, timeout: Duration) {
        join_all(self.slots.iter().map(|slot| slot.stop(timeout))).await;
    }

    /// Returns the models to advertise: all, whatever is resident, by all of their names.
    pub fn models(&self) -> Vec<String> {
        self.board.names().iter().map(ToString::to_string).collect()
    }

    /// Returns the `max_concurrent` to register.
    pub fn capacity(&self) -> u32 {
        self.board.capacity()
    }

    /// Returns the slots to register.
    pub fn slots(&self) -> Slots {
        self.board.slots(now())
    }

    /// Returns the resident models, each with its slot and the number of its load there.
    pub fn residents(&self) -> Vec<(String, u64, String)> {
        self.board.residents()
    }

    /// True if no slot is quarantined, for `/readyz`.
    pub fn is_ready(&self) -> bool {
        self.slots().slots.iter().all(|slot| slot.state != SlotState::Quarantined)
    }

    /// Returns each slot's report.
    pub async fn reports(&self) -> Vec<Report> {
        join_all(self.slots.iter().map(SlotHandle::report)).await.into_iter().flatten().collect()
    }

    /// Returns the slots' part of `/healthz`.
    pub async fn health(&self) -> Value {
        let reports: Vec<_> = self.reports().await.iter().map(Report::to_json).collect();
        json!({ "slots": reports })
    }

    /// Updates the gauges before the metrics are read.
    pub async fn observe(&self) {
        self.metrics.observe(&self.reports().await);
    }

    fn send_to_all(&self, event: impl Fn() -> Event) {
        for slot in &self.slots {
            slot.send_event(event());
        }
    }

    fn next_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }
}

impl Refusal {
    /// Chooses the form for this relay: a code if the relay acts on it, which requeues the request or tries another
    /// worker. All other codes would become a plain 502 there, so the worker responds itself.
    pub fn new(error: &SlotError, peer: Peer) -> Self {
        let acted_on = match error {
            SlotError::InsufficientMemory { .. }
            | SlotError::LoadFailed { .. }
            | SlotError::Quarantined
            | SlotError::AtCapacity
            | SlotError::Severed
            | SlotError::BackendLost
            | SlotError::Draining => peer != Peer::Old,
            SlotError::UnknownModel { .. } | SlotError::HoldExpired { .. } | SlotError::QueueFull { .. } => false,
        };
        if !acted_on {
            return Self::Answer(error.api_error());
        }
        let retry_after = error.retry_after().map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
        Self::Code(WorkerError {
            request_id: None,
            code: error.code().to_owned(),
            message: error.for_clients(),
            retry_after_ms: retry_after,
        })
    }
}
