//! One slot's task: the only part that uses tasks and the clock.
//!
//! The task alone owns the slot's [`Machine`]; all events arrive through one mailbox, in order. The machine's effects
//! are executed in order too, with one exception: rejected requests are notified last, because a relay that requeues a
//! request reads its capacity from the grant that came before.
//!
//! The task waits only for its mailbox and its timer: driver calls run in parallel and end as messages, and messages to
//! relays are put into their queues. The mailbox itself is unbounded. Its sources are bounded: requests by their
//! relays' grants and by the registered concurrency, everything else by the rate at which links are read.

mod calls;
pub mod history;
mod lease;
mod news;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::{mpsc, oneshot, watch};

pub use self::lease::{CancelHandle, ConnectFailureReport, Lease, PendingLease};

use self::calls::{Calls, SlotCall};
use self::history::{History, Report};
use self::lease::LeasedBackend;
use super::Model;
use super::board::{Peer, Place, RelayNotifier, SlotUpdate};
use super::driver::slot::SlotDriver;
use super::effect::{Effect, LeaseEnd};
use super::error::SlotError;
use super::event::{Arrival, Event, Generation, RelayKey, RequestKey};
use super::machine::Machine;
use super::metrics::MultiplexerMetrics;

/// The least time between two ticks: timers are no finer.
const FINEST: Duration = Duration::from_millis(1);

/// A message in the mailbox.
#[derive(Debug)]
enum Message {
    Event(Event),
    Arrived { arrival: Arrival, place: Place, answer: oneshot::Sender<Result<Lease, SlotError>> },
    Cancelled(RequestKey),
    Released { request: RequestKey, answered: bool, seen: Option<oneshot::Sender<()>> },
    GiveBackHeld,
    Stop { timeout: Duration, stopped: oneshot::Sender<()> },
    Report(oneshot::Sender<Report>),
}

/// The sending side of a slot's mailbox. The task ends when all of these, and all leases, are gone.
#[derive(Clone, Debug)]
pub(super) struct SlotHandle {
    mailbox: mpsc::UnboundedSender<Message>,
    /// True if a message that does not concern the slot would change anything there. Such messages are frequent, and
    /// seldom change anything.
    is_listening: Arc<AtomicBool>,
}

/// The same, without keeping the task alive.
#[derive(Clone, Debug)]
pub(super) struct Mailbox(mpsc::WeakUnboundedSender<Message>);

struct SlotTask {
    index: usize,
    machine: Machine,
    mailbox: mpsc::UnboundedReceiver<Message>,
    own: mpsc::WeakUnboundedSender<Message>,
    calls: Calls,
    board: Arc<RelayNotifier>,
    metrics: Arc<MultiplexerMetrics>,
    history: History,
    waiting: HashMap<RequestKey, WaitingRequest>,
    /// Ends the leases that are in use.
    leases: HashMap<RequestKey, watch::Sender<Option<LeaseEnd>>>,
    /// Events that result from executing effects.
    next: VecDeque<Event>,
    stop: Vec<oneshot::Sender<()>>,
    stopped: bool,
    is_listening: Arc<AtomicBool>,
}

/// A request without a result yet.
struct WaitingRequest {
    place: Place,
    answer: oneshot::Sender<Result<Lease, SlotError>>,
}

/// Returns the time of the clock that tests can advance.
pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl SlotHandle {
    /// Starts the slot's task. `index`: the slot's index on the board.
    #[expect(
        clippy::disallowed_methods,
        reason = "each message is of a request or a call that is counted elsewhere, and `drop` sends some"
    )]
    pub(super) fn start(
        index: usize,
        machine: Machine,
        driver: Arc<SlotDriver>,
        board: Arc<RelayNotifier>,
        metrics: Arc<MultiplexerMetrics>,
    ) -> Self {
        let (sender, mailbox) = mpsc::unbounded_channel();
        let own = sender.downgrade();
        let of_all = Arc::clone(&board);
        let is_listening = Arc::new(AtomicBool::new(false));
        let slot = SlotTask {
            index,
            mailbox,
            calls: Calls::new(driver, own.clone()),
            own,
            board,
            history: History::new(&machine, now()),
            machine,
            metrics,
            waiting: HashMap::new(),
            leases: HashMap::new(),
            next: VecDeque::new(),
            stop: Vec::new(),
            stopped: false,
            is_listening: Arc::clone(&is_listening),
        };
        drop(tokio::spawn(async move {
            // Callers that await the task notice its end because their channels are dropped; relays must be notified
            // too.
            if AssertUnwindSafe(slot.run()).catch_unwind().await.is_err() {
                tracing::error!(
                    slot = index,
                    "the task of a slot panicked; the slot is unavailable until the worker restarts"
                );
                of_all.fail(index, now());
            }
        }));
        Self { mailbox: sender, is_listening }
    }

    /// Puts an event into the mailbox.
    pub(super) fn send_event(&self, event: Event) {
        let _ = self.mailbox.send(Message::Event(event));
    }

    /// A relay has sent a message that does not concern the slot.
    pub(super) fn hear(&self, relay: RelayKey) {
        if self.is_listening.load(Ordering::Relaxed) {
            self.send_event(Event::Heard { relay });
        }
    }

    /// A request arrived. It is in the mailbox when this returns, thus behind everything that arrived before.
    pub(super) fn arrive(&self, arrival: Arrival, place: Place) -> PendingLease {
        let (answer, answered) = oneshot::channel();
        let request = arrival.request;
        let _ = self.mailbox.send(Message::Arrived { arrival, place, answer });
        PendingLease::new(request, answered, self.mailbox.clone())
    }

    /// Returns a mailbox that does not keep the task alive.
    pub(super) fn mailbox(&self) -> Mailbox {
        Mailbox(self.mailbox.downgrade())
    }

    /// Rejects the requests that wait here for relays that can send them elsewhere.
    pub(super) fn give_back_held(&self) {
        let _ = self.mailbox.send(Message::GiveBackHeld);
    }

    /// Accepts no more requests. Completes when none is running any more, or the timeout has passed, and the worker's
    /// own backends have ended.
    pub(super) fn stop(&self, timeout: Duration) -> impl Future<Output = ()> + Send + 'static {
        let (stopped, until_stopped) = oneshot::channel();
        let _ = self.mailbox.send(Message::Stop { timeout, stopped });
        async move {
            let _ = until_stopped.await;
        }
    }

    /// Returns the slot's report; `None` if its task is gone.
    pub(super) fn report(&self) -> impl Future<Output = Option<Report>> + Send + 'static {
        let (sender, report) = oneshot::channel();
        let _ = self.mailbox.send(Message::Report(sender));
        async move { report.await.ok() }
    }
}

impl Mailbox {
    /// Puts an event into the mailbox, if the task still runs.
    pub(super) fn send_event(&self, event: Event) {
        let _ = self.0.upgrade().map(|mailbox| mailbox.send(Message::Event(event)));
    }
}

impl SlotTask {
    async fn run(mut self) {
        self.handle(Event::Started);
        let mut earliest = now();
        loop {
            let due = self.machine.next_timeout().map(|due| due.max(earliest));
            let timer = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Events that have happened precede what is only due; the machine handles what is due with every event.
                biased;
                message = self.mailbox.recv() => match message {
                    Some(message) => self.handle_message(message),
                    None => return,
                },
                () = timer => {
                    self.handle(Event::Tick);
                    earliest = now() + FINEST;
                }
            }
        }
    }

    fn handle_message(&mut self, message: Message) {
        match message {
            Message::Event(event) => {
                let lost = if let Event::RelayLost { relay } = event { Some(relay) } else { None };
                self.handle(event);
                // The machine has dropped these requests silently, but their callers still await a result.
                let of_it = self.waiting.extract_if(|_, waiting| Some(waiting.place.relay()) == lost);
                for (_, waiting) in of_it {
                    let _ = waiting.answer.send(Err(SlotError::AtCapacity));
                }
            }
            Message::Arrived { arrival, place, answer } => {
                self.waiting.insert(arrival.request, WaitingRequest { place, answer });
                self.handle(Event::Arrived(arrival));
            }
            Message::Cancelled(request) => {
                self.waiting.remove(&request);
                self.handle(Event::Cancelled { request });
            }
            Message::Released { request, answered, seen } => {
                self.leases.remove(&request);
                self.handle(Event::Released { request, answered });
                // The grants are queued.
                seen.map(|seen| seen.send(()));
            }
            Message::GiveBackHeld => self.give_back_held(),
            Message::Stop { timeout, stopped } => {
                if self.stopped {
                    let _ = stopped.send(());
                    return;
                }
                self.stop.push(stopped);
                self.handle(Event::Stop { timeout });
            }
            Message::Report(report) => {
                let _ = report.send(self.history.report(&self.machine, now()));
            }
        }
    }

    /// Gives back requests of relays that cannot hold requests themselves but can requeue one that a stopping worker
    /// rejects.
    fn give_back_held(&mut self) {
        let can_move = |waiting: &WaitingRequest| self.board.peer(waiting.place.relay()) == Some(Peer::Core1);
        let movable: Vec<_> = self.waiting.extract_if(|_, waiting| can_move(waiting)).collect();
        for (request, waiting) in movable {
            self.handle(Event::Cancelled { request });
            let _ = waiting.answer.send(Err(SlotError::Draining));
        }
    }

    /// Passes an event to the machine, executes the effects, and handles the events that result.
    fn handle(&mut self, event: Event) {
        self.next.push_back(event);
        while let Some(event) = self.next.pop_front() {
            self.step(event);
        }
    }

    fn step(&mut self, event: Event) {
        let now = now();
        let effects = self.machine.handle(event, now);
        let (mut updates, mut refused, mut changed) = (Vec::new(), Vec::new(), false);
        for effect in effects {
            news::announce(self.history.slot(), &effect);
            match effect {
                Effect::Lease { request, model, generation } => self.hand_over(request, model, generation),
                Effect::Fail { request, error } => refused.push((request, error)),
                Effect::CancelLease { request, why } => self.end_lease(request, why),
                Effect::OpenGate { model } => {
                    self.calls.watch(self.machine.generation(), Model::clone(&model));
                    updates.push(SlotUpdate::Gate { model, open: true });
                }
                Effect::CloseGate { model } => updates.push(SlotUpdate::Gate { model, open: false }),
                Effect::Grant { relay, model, values } => updates.push(SlotUpdate::Grant { relay, model, values }),
                Effect::Preflight { op, model } => {
                    let resident = self.machine.resident().map(Model::clone);
                    self.calls.start(op, SlotCall::Preflight { model, resident });
                }
                Effect::Evict { op, model } => self.calls.start(op, SlotCall::Evict(model)),
                Effect::ForceEvict { op, model } => self.calls.start(op, SlotCall::ForceEvict(model)),
                Effect::CheckMemory { op, model } => self.calls.start(op, SlotCall::CheckMemory(model)),
                Effect::Load { op, model, kind } => self.calls.start(op, SlotCall::Load(model, kind)),
                Effect::Probe { op, model } => self.calls.probe(op, model),
                Effect::StillServes { .. } => updates.push(SlotUpdate::StillServes),
                Effect::Discard { model } => self.calls.discard(model),
                Effect::Forget { model } => self.calls.driver().forget(&model),
                Effect::OrderDone { id, result } => updates.push(SlotUpdate::Order { id, result }),
                Effect::Changed => changed = true,
                Effect::SlotEvent(news) => {
                    self.history.note(&news);
                    self.metrics.note(&news);
                    news::log(self.history.slot(), &news, &self.machine);
                }
                Effect::Stopped => self.finish(),
            }
        }
        self.is_listening.store(self.machine.is_listening(), Ordering::Relaxed);
        self.history.pass(&self.machine, now);
        let snapshot = changed.then(|| self.machine.snapshot(now));
        self.board.publish(self.index, updates, snapshot, now);
        for (request, error) in refused {
            if let Some(waiting) = self.waiting.remove(&request) {
                let _ = waiting.answer.send(Err(error));
            }
        }
    }

    /// Creates the lease. If its receiver is gone, the lease returns through the mailbox.
    fn hand_over(&mut self, request: RequestKey, model: Model, generation: Generation) {
        let waiting = self.waiting.remove(&request);
        let (Some(waiting), Some(mailbox)) = (waiting, self.own.upgrade()) else {
            self.next.push_back(Event::Released { request, answered: false });
            return;
        };
        let Some(url) = self.calls.driver().driver().url(&model) else {
            // The backend ended at this instant: the slot probes at once, and the relay tries another worker.
            self.next.push_back(Event::Released { request, answered: false });
            self.next.push_back(Event::ConnectFailed { generation });
            let _ = waiting.answer.send(Err(SlotError::BackendLost));
            return;
        };
        let (end, ended) = watch::channel(None);
        self.leases.insert(request, end);
        let (key, name) = (self.calls.driver().key().now(), self.calls.driver().driver().backend_name(&model));
        let backend = LeasedBackend { url, key, name };
        let lease = Lease::new((request, model, generation), backend, ended, mailbox, waiting.place);
        let _ = waiting.answer.send(Ok(lease));
    }

    fn end_lease(&self, request: RequestKey, why: LeaseEnd) {
        if let Some(end) = self.leases.get(&request) {
            end.send_replace(Some(why));
        }
    }

    /// Nothing is running any more: ends the backends and reports that the slot has stopped.
    fn finish(&mut self) {
        self.stopped = true;
        let (ending, stop) = (self.calls.stop(), std::mem::take(&mut self.stop));
        drop(tokio::spawn(async move {
            ending.await;
            for stopped in stop {
                let _ = stopped.send(());
            }
        }));
    }
}
