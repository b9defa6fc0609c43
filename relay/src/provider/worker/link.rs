//! One worker's connection, as the rest of the relay sees it: its outgoing messages and its requests.
//!
//! The link owns the map from its own streams and request ids to attempts. A reply to a request that this worker does
//! not hold finds no entry there, so it cannot reach any client; and a chunk needs no lock that is shared with another
//! worker.

mod models;
mod pauses;
mod prompts;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use modelrelay_protocol::credit::ReceiveWindow;
use modelrelay_protocol::frame::BodyKind;
use modelrelay_protocol::grant_step;
use modelrelay_protocol::limits::ANSWER_WINDOW_BYTES;
use modelrelay_protocol::message::{
    self as wire, Cancel, Credit, Demand, GracefulShutdown, RelayToWorker, Slot, encode,
};
use modelrelay_protocol::model_details::DetailsByModel;
use modelrelay_protocol::outbox::{Frame, Outbox};
use prometheus::IntCounter;
use tokio::sync::Notify;

use crate::dispatch::{CancelReason, Class, RequestKey};
use crate::provider::request::RequestRecord;
use crate::provider::response::{CreditTarget, ResponsePipe};
use crate::provider::worker::close::Close;
use crate::system::ids;

use super::failures::{Failures, SlotFailure};
use super::pace::{Lines, Updates};
pub use super::worker_info::WorkerInfo;
pub use prompts::PromptTokens;

/// Stream numbers are never reused; a link that has used nearly all of them is drained, and the worker connects again.
const LAST_STREAM: u32 = u32::MAX - 1_000_000;

/// Below this, other delays are longer than the round trip to a worker.
const SHORTEST_ROUND_TRIP: Duration = Duration::from_millis(1);

/// A request that this worker holds.
#[derive(Clone)]
pub struct Attempt {
    /// The request.
    pub record: Arc<RequestRecord>,
    /// The attempt.
    pub attempt: u32,
    /// Its number on this link.
    pub stream: u32,
    /// True if its response head went to the client.
    pub started: bool,
    /// True if bytes of its response body arrived.
    pub begun: bool,
    pub(in crate::provider) request_id: Arc<str>,
}

impl Attempt {
    /// The pipe of its response.
    pub fn response(&self) -> &ResponsePipe {
        &self.record.response
    }
}

/// One worker's connection.
pub struct WorkerLink {
    /// Its fixed properties.
    pub info: WorkerInfo,
    /// Counts the requests that are sent to workers of its zone and cluster.
    pub zone_requests: Option<IntCounter>,
    wake: Notify,
    drain: Notify,
    read_pause_millis: AtomicU32,
    state: Mutex<LinkState>,
}

struct LinkState {
    outbox: Outbox,
    held: HashMap<u32, Attempt>,
    by_request_id: HashMap<Arc<str>, u32>,
    by_key: HashMap<RequestKey, u32>,
    next_stream: u32,
    /// The models that the worker last advertised, before cleaning, because the catalogue may change.
    advertised: Vec<String>,
    /// The advertised models whose requests the backend fails.
    failing: BTreeSet<Arc<str>>,
    /// Limits and capabilities of those models.
    details: Arc<DetailsByModel>,
    /// The last valid slot report of a multiplexer, and when it arrived.
    slots: (Arc<[Slot]>, Instant),
    failures: Failures,
    slots_refused: Lines,
    /// Names that only rejected slots define; they are not advertised.
    meaningless: BTreeSet<String>,
    gates_refused: Lines,
    /// Log lines that the worker causes.
    reports: Lines,
    updates: Lines,
    pace: Updates,
    homes_pace: Updates,
    prompts: PromptTokens,
    heard_at: SystemTime,
    /// The duration of its last heartbeat, or of its registration before the first one.
    round_trip: Duration,
    ws_ping: bool,
    draining_since: Option<Instant>,
    /// The maximum duration of the drain, if the worker requested one.
    drain_allowed: Option<Duration>,
    /// True once the core has reported this draining worker as idle, which it does once.
    is_drained: bool,
    close_when_idle: Option<Close>,
    close: Option<Close>,
}

/// The next action of the writer.
pub enum Output {
    /// Write this frame.
    Frame(Frame),
    /// Write a WebSocket ping.
    Ping,
    /// Close; no output follows.
    Close(Close),
    /// Wait for [`WorkerLink::wait`].
    Nothing,
}

impl WorkerLink {
    /// Creates a link whose registration was accepted.
    pub fn new(info: WorkerInfo, advertised: Vec<String>, zone_requests: Option<IntCounter>) -> Arc<Self> {
        let credit_text = |stream, bytes| encode(&RelayToWorker::Credit(Credit { stream, bytes }));
        let state = LinkState {
            outbox: Outbox::new(BodyKind::Request, credit_text),
            held: HashMap::new(),
            by_request_id: HashMap::new(),
            by_key: HashMap::new(),
            next_stream: 1,
            advertised,
            failing: BTreeSet::new(),
            details: Arc::default(),
            slots: (Arc::from([]), Instant::now()),
            failures: Failures::default(),
            slots_refused: Lines::of_nonsense(),
            meaningless: BTreeSet::new(),
            gates_refused: Lines::of_nonsense(),
            reports: Lines::of_news(),
            updates: Lines::of_news(),
            pace: Updates::of_models(),
            homes_pace: Updates::of_homes(),
            prompts: PromptTokens::default(),
            heard_at: SystemTime::now(),
            round_trip: info.round_trip,
            ws_ping: false,
            draining_since: None,
            drain_allowed: None,
            is_drained: false,
            close_when_idle: None,
            close: None,
        };
        let (wake, drain, read_pause_millis) = (Notify::new(), Notify::new(), AtomicU32::new(0));
        Arc::new(Self { info, zone_requests, wake, drain, read_pause_millis, state: Mutex::new(state) })
    }

    /// Queues a request. Returns the id of this attempt on the wire.
    pub fn send(self: &Arc<Self>, record: &Arc<RequestRecord>, attempt: u32, class: Class) -> Arc<str> {
        let mut state = self.lock();
        let stream = state.next_stream;
        state.next_stream = stream.saturating_add(1);
        let request_id: Arc<str> = ids::wire_id(&record.id).into();
        grant_step!("sends", self.info.id, id = request_id);
        let held = Attempt {
            record: Arc::clone(record),
            attempt,
            stream,
            started: false,
            begun: false,
            request_id: Arc::clone(&request_id),
        };
        state.held.insert(stream, held);
        state.by_request_id.insert(Arc::clone(&request_id), stream);
        state.by_key.insert(record.key, stream);
        if self.info.core1 {
            let window = ANSWER_WINDOW_BYTES.min(self.info.max_unread_bytes).max(1);
            let announced = (window != ANSWER_WINDOW_BYTES).then_some(window);
            let flow = ReceiveWindow::new(window, self.info.max_unread_bytes.max(window));
            let flow = flow.with_round_trip(state.round_trip.max(SHORTEST_ROUND_TRIP));
            record.response.begin(attempt, Some((flow, CreditTarget { link: Arc::clone(self), stream })));
            let conversation = record.conversation.filter(|_| self.info.homes1);
            let class = if self.info.slots1 { class } else { Class::default() };
            let text = record.core1_text(&request_id, stream, announced, (conversation, class));
            let body = record.body.clone();
            state.outbox.push_request(stream, &request_id, text, body, self.info.request_window);
        } else {
            record.response.begin(attempt, None);
            let text = record.seed_text(&request_id);
            state.outbox.push_request(stream, &request_id, text, bytes::Bytes::new(), 0);
        }
        drop(state);
        self.wake.notify_one();
        request_id
    }

    /// Cancels a request that this worker holds; its late pieces are dropped.
    pub fn cancel(&self, key: RequestKey, reason: CancelReason) {
        let mut state = self.lock();
        let Some(held) = state.by_key.get(&key).copied().and_then(|stream| state.forget(stream)) else { return };
        grant_step!("cancels", self.info.id, id = held.request_id);
        let (reason, detail) = on_the_wire(reason);
        let cancel = Cancel { request_id: held.request_id.to_string(), reason, detail: detail.map(str::to_owned) };
        state.outbox.cancel(held.stream, encode(&RelayToWorker::Cancel(cancel)));
        drop(state);
        self.wake.notify_one();
    }

    /// Returns the request of this id, if this worker holds it.
    pub fn held(&self, request_id: &str) -> Option<Attempt> {
        let state = self.lock();
        state.by_request_id.get(request_id).and_then(|stream| state.held.get(stream)).cloned()
    }

    /// Returns the request of this stream, if this worker holds it.
    pub fn held_stream(&self, stream: u32) -> Option<Attempt> {
        self.lock().held.get(&stream).cloned()
    }

    /// Records that the head of this request's response went to the client.
    pub fn mark_started(&self, stream: u32) {
        if let Some(held) = self.lock().held.get_mut(&stream) {
            held.started = true;
        }
    }

    /// Records that bytes of this request's response body arrived. Returns false if they were recorded before.
    pub fn mark_begun(&self, stream: u32) -> bool {
        self.lock().held.get_mut(&stream).is_some_and(|held| !std::mem::replace(&mut held.begun, true))
    }

    /// Releases a request that the worker has completed or failed; waiting bytes of its body are dropped.
    pub fn release(&self, stream: u32) -> Option<Attempt> {
        let mut state = self.lock();
        let held = state.forget(stream)?;
        state.outbox.discard(stream);
        Some(held)
    }

    /// Releases all requests of a worker whose socket is closed or about to close. Their waiting bytes are dropped,
    /// because an older link that still writes must not begin requests that were given to other workers.
    pub fn release_all(&self) -> Vec<Attempt> {
        let mut state = self.lock();
        state.by_request_id.clear();
        state.by_key.clear();
        state.outbox.take_unwritten_requests();
        let streams: Vec<u32> = state.held.keys().copied().collect();
        for stream in streams {
            state.outbox.discard(stream);
        }
        state.held.drain().map(|(_, held)| held).collect()
    }

    /// Revokes the requests that were not written yet.
    pub fn take_unwritten(&self) -> Vec<Attempt> {
        let mut state = self.lock();
        let unwritten = state.outbox.take_unwritten_requests();
        unwritten.into_iter().filter_map(|(stream, _)| state.forget(stream)).collect()
    }

    /// Returns credit to the worker for this response.
    pub fn return_credit(&self, stream: u32, bytes: u64) {
        let mut state = self.lock();
        if state.held.contains_key(&stream) {
            state.outbox.return_credit(stream, bytes);
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Adds the worker's credit for this request body.
    pub fn add_credit(&self, stream: u32, bytes: u64) {
        self.lock().outbox.add_credit(stream, bytes);
        self.wake.notify_one();
    }

    /// Queues a text message.
    pub fn push(&self, message: &RelayToWorker) {
        self.lock().outbox.push_text(encode(message));
        self.wake.notify_one();
    }

    /// Queues the newest demand.
    pub fn set_demand(&self, demand: Demand) {
        grant_step!("reports", self.info.id, waiting = demand.models.iter().map(|model| model.waiting).sum::<u32>());
        self.lock().outbox.set_demand(encode(&RelayToWorker::Demand(demand)));
        self.wake.notify_one();
    }

    /// Sets the maximum duration of a drain that has not begun yet, instead of the usual one.
    pub fn allow_drain(&self, time: Duration) {
        let mut state = self.lock();
        if state.draining_since.is_none() {
            state.drain_allowed = Some(time);
        }
    }

    /// Queues `graceful_shutdown`; the caller has requeued the unwritten requests and sends no more.
    pub fn begin_drain(&self, reason: &str, timeout_secs: Option<u64>, close_when_idle: Option<Close>) {
        let message = GracefulShutdown { reason: Some(reason.to_owned()), drain_timeout_secs: timeout_secs };
        grant_step!("announces_leaving", self.info.id);
        let mut state = self.lock();
        state.draining_since.get_or_insert_with(Instant::now);
        state.close_when_idle = close_when_idle.or(state.close_when_idle);
        if state.is_drained {
            state.close = state.close.or(state.close_when_idle);
        }
        state.outbox.push_text(encode(&RelayToWorker::GracefulShutdown(message)));
        drop(state);
        self.wake.notify_one();
        self.drain.notify_one();
    }

    /// Resolves when a drain begins, so that the session can watch its deadline.
    pub async fn drain_begun(&self) {
        self.drain.notified().await;
    }

    /// Ends a drain at its deadline: the worker's requests are cancelled, then the socket closes. The requests are lost
    /// with it, and are requeued if nothing was sent to the client yet.
    pub fn end_drain(&self, close: Close) {
        let mut state = self.lock();
        let mut streams: Vec<u32> = state.held.keys().copied().collect();
        streams.sort_unstable();
        for stream in streams {
            let Some(held) = state.held.get(&stream) else { continue };
            let reason = wire::CancelReason::GracefulShutdown;
            grant_step!("cancels", self.info.id, id = held.request_id);
            let cancel = Cancel { request_id: held.request_id.to_string(), reason, detail: None };
            state.outbox.cancel(stream, encode(&RelayToWorker::Cancel(cancel)));
        }
        state.close.get_or_insert(close);
        drop(state);
        self.wake.notify_one();
    }

    /// Returns the deadline of a drain that has begun and not ended; `usual` is its duration if the worker requested
    /// none.
    pub fn drain_deadline(&self, usual: Duration) -> Option<Instant> {
        let state = self.lock();
        let since = state.draining_since.filter(|_| state.close.is_none())?;
        Some(since + state.drain_allowed.map_or(usual, |allowed| allowed.max(usual)))
    }

    /// The time since which the worker has been draining.
    pub fn draining_since(&self) -> Option<Instant> {
        self.lock().draining_since
    }

    /// Records that the draining worker holds no more requests.
    pub fn handle_drained(&self) {
        let mut state = self.lock();
        state.is_drained = true;
        state.close = state.close.or(state.close_when_idle);
        drop(state);
        self.wake.notify_one();
    }

    /// Closes the socket once the waiting output has been written.
    pub fn close(&self, close: Close) {
        let mut state = self.lock();
        state.close.get_or_insert(close);
        drop(state);
        self.wake.notify_one();
    }

    /// Sends a WebSocket ping.
    pub fn ping(&self) {
        self.lock().ws_ping = true;
        self.wake.notify_one();
    }

    /// Returns the last slot report of a multiplexer, and its age.
    pub fn slots(&self) -> (Arc<[Slot]>, Duration) {
        let state = self.lock();
        (Arc::clone(&state.slots.0), state.slots.1.elapsed())
    }

    /// Stores a multiplexer's slot report.
    pub fn set_slots(&self, slots: Vec<Slot>) {
        let (mut state, now) = (self.lock(), Instant::now());
        let LinkState { slots: (known, at), failures, meaningless, .. } = &mut *state;
        failures.note(known, &slots, now);
        (*known, *at) = (slots.into(), now);
        meaningless.clear();
    }

    /// Returns the last failed load in a slot, if it is still recent.
    pub fn last_failure(&self, slot: &str) -> Option<SlotFailure> {
        self.lock().failures.of(slot, Instant::now()).cloned()
    }

    /// Inherits the failures of `older`, the same worker's previous link, which gets no more slot reports.
    pub fn inherit_failures(&self, older: &Self) {
        let failures = std::mem::take(&mut older.lock().failures);
        let mut state = self.lock();
        let LinkState { slots: (slots, _), failures: own, .. } = &mut *state;
        own.inherit(failures, slots);
    }

    /// Records rejected slots; returns the number of unlogged rejections before, if this one is to be logged.
    pub fn note_slots_refused(&self) -> Option<u64> {
        self.lock().slots_refused.note(Instant::now())
    }

    /// Records a report of the worker; returns the number of unlogged reports before, if this one is to be logged.
    pub fn note_report(&self) -> Option<u64> {
        self.lock().reports.note(Instant::now())
    }

    /// The same for updates of its models.
    pub fn note_update(&self) -> Option<u64> {
        self.lock().updates.note(Instant::now())
    }

    /// The same for rejected gates.
    pub fn note_gates_refused(&self) -> Option<u64> {
        self.lock().gates_refused.note(Instant::now())
    }

    /// The time of the worker's last reply to a heartbeat.
    pub fn heard_at(&self) -> SystemTime {
        self.lock().heard_at
    }

    /// The duration of its last heartbeat, or of its registration before the first one.
    pub fn round_trip(&self) -> Duration {
        self.lock().round_trip
    }

    /// Records the worker's reply to a heartbeat, and its duration.
    pub fn mark_heard(&self, took: Option<Duration>) {
        let mut state = self.lock();
        state.heard_at = SystemTime::now();
        state.round_trip = took.unwrap_or(state.round_trip);
    }

    /// True if nearly all stream numbers are used.
    pub fn is_exhausted(&self) -> bool {
        self.lock().next_stream > LAST_STREAM
    }

    /// Returns the next output.
    pub fn next_output(&self) -> Output {
        let mut state = self.lock();
        if std::mem::take(&mut state.ws_ping) {
            return Output::Ping;
        }
        if let Some(frame) = state.outbox.next_frame() {
            return Output::Frame(frame);
        }
        state.close.map_or(Output::Nothing, Output::Close)
    }

    /// Waits until there may be output.
    pub async fn wait(&self) {
        self.wake.notified().await;
    }

    /// Held for moments, by this worker's tasks and by senders; never over an await.
    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LinkState {
    fn forget(&mut self, stream: u32) -> Option<Attempt> {
        let held = self.held.remove(&stream)?;
        self.by_request_id.remove(&held.request_id);
        self.by_key.remove(&held.record.key);
        Some(held)
    }
}

/// Returns the seed reason, and a further detail.
fn on_the_wire(reason: CancelReason) -> (wire::CancelReason, Option<&'static str>) {
    match reason {
        CancelReason::ClientDisconnect => (wire::CancelReason::ClientDisconnect, None),
        CancelReason::SlowClient => (wire::CancelReason::ClientDisconnect, Some("slow client")),
        CancelReason::StreamLimit => (wire::CancelReason::ClientDisconnect, Some("stream ceiling")),
        CancelReason::NoMemory => (wire::CancelReason::ClientDisconnect, Some("the relay's memory is full")),
        CancelReason::Admin => (wire::CancelReason::ClientDisconnect, Some("cancelled by an admin")),
        CancelReason::WorkerFault => (wire::CancelReason::ClientDisconnect, Some("the answer broke the protocol")),
        CancelReason::Timeout => (wire::CancelReason::Timeout, None),
        CancelReason::DrainDeadline => (wire::CancelReason::ServerShutdown, None),
    }
}

#[cfg(test)]
mod tests;
