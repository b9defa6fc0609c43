//! One live link: the queued output, and the requests that arrived over it.
//!
//! Reader, writer and requests meet only here, under one short lock that is never held over an await. The reader never
//! waits for the writer or the backend: it only adds entries here.
//!
//! A request is identified by its [`LinkRequestKey`]. It is registered until its last byte is written or it is
//! cancelled; anything that its task sends afterwards is dropped, so a late message can never affect a newer request.

mod advertised;
mod backoff;
mod capacity;
mod dial;
mod homes;
mod links;
pub(crate) mod liveness;
mod requests;
pub(crate) mod writer;

pub use advertised::{Advertised, naming};
pub use backoff::{Backoff, EndKind, random};
pub use capacity::{Capacity, CapacityAdmission, Held, Slot};
pub(crate) use dial::{DialError, dial};
pub use dial::{Endpoint, RelayRefusal, Way, try_dial};
pub use homes::{AwaitedBytes, Conversations, ModelLoads};
pub use links::Links;
pub use requests::SlotGuard;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use modelrelay_multiplexer::board::Peer;
use modelrelay_multiplexer::event::RelayKey;
use modelrelay_protocol::frame::BodyKind;
use modelrelay_protocol::grant_step;
use modelrelay_protocol::headers;
use modelrelay_protocol::limits::STREAM_WINDOW_BYTES;
use modelrelay_protocol::message::{Credit, ModelsUpdate, RegisterAck, WorkerToRelay, encode};
use modelrelay_protocol::names::Naming;
use modelrelay_protocol::outbox::{Latest, Outbox};
use modelrelay_protocol::version::{Capabilities, Capability};
use tokio::sync::Notify;

use crate::settings::Credential;
use liveness::Traffic;
use requests::{RunningRequest, StreamState};

/// Distinguishes the pong of [`Link::ping_behind`] from those of liveness pings.
pub(crate) const BARRIER: &[u8] = b"drain";

/// Queued text of a link whose relay reads slowly: more than one report on homes, which would otherwise pile up.
const CONGESTED_BYTES: usize = 64 << 10;

/// Identifies a link in this process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(test, derive(Default))]
pub struct LinkId(pub(crate) u64);

/// Identifies one request on its link, even if a relay uses an id again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkRequestKey {
    /// The relay's id.
    pub id: Arc<str>,
    /// The stream of its pieces; `None` for a relay without `core1`.
    pub stream: Option<u32>,
    pub(crate) serial: u64,
}

/// A link, from `register_ack` to the end of its socket.
#[derive(Debug)]
pub struct Link {
    /// Its id.
    pub id: LinkId,
    /// The relay's address, for logs and metrics.
    pub relay: Arc<str>,
    /// The id of the relay process, if it sends one.
    pub relay_id: Option<String>,
    /// True if the relay supports binary bodies, credits, grants and drain.
    pub core1: bool,
    /// True if the relay supports a multiplexer's slots.
    pub slots1: bool,
    /// True if the relay sends keys of conversations, and wants those of other relays.
    pub homes1: bool,
    /// The bytes of each response that may be sent before credit arrives.
    pub window: u64,
    /// Request headers that backends receive in addition to the usual ones.
    pub request_headers: Vec<String>,
    /// The credential with which the worker was admitted.
    pub credential: Credential,
    /// The multiplexer's key for the link, once it has joined.
    seat: OnceLock<RelayKey>,
    /// The traffic of its socket, once its session has begun.
    traffic: OnceLock<Arc<Traffic>>,
    state: Mutex<LinkState>,
    /// Notified when there may be something to write.
    work: Notify,
    /// Notified when the writer has written.
    written: Notify,
    /// Notified when the link may be able to close; only while the link is watched.
    changed: Notify,
    watched: AtomicBool,
    succeeded: AtomicBool,
}

#[derive(Debug)]
struct LinkState {
    outbox: Outbox,
    requests: HashMap<Arc<str>, RunningRequest>,
    streams: HashMap<u32, StreamState>,
    next_serial: u64,
    /// True if a WebSocket ping is due.
    ping: bool,
    /// True if a ping is due behind all queued output.
    barrier: bool,
    /// The close frame that is sent once nothing more can be written.
    close: Option<(u16, &'static str)>,
    /// True if no models are advertised any more.
    muted: bool,
}

/// The writer's next action.
pub(crate) enum Next {
    /// Write this frame.
    Frame(modelrelay_protocol::outbox::Frame),
    /// Write a WebSocket ping with this payload.
    Ping(&'static [u8]),
    /// Write a close frame and end.
    Close(u16, &'static str),
    /// Nothing now.
    Nothing,
}

impl Link {
    /// Creates a link with nothing to write.
    pub fn new(relay: Arc<str>, ack: &RegisterAck, capabilities: &Capabilities, credential: Credential) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let state = LinkState {
            outbox: Outbox::new(BodyKind::Response, credit_text),
            requests: HashMap::new(),
            streams: HashMap::new(),
            next_serial: 0,
            ping: false,
            barrier: false,
            close: None,
            muted: false,
        };
        let id = LinkId(NEXT.fetch_add(1, Ordering::Relaxed));
        grant_step!("acknowledged", id.0, name = ack.worker_id);
        Arc::new(Self {
            id,
            relay,
            relay_id: ack.relay_id.clone(),
            core1: capabilities.has(Capability::Core1),
            slots1: capabilities.has(Capability::Slots1),
            homes1: capabilities.has(Capability::Homes1),
            window: ack.limits.map_or(STREAM_WINDOW_BYTES, |limits| limits.stream_window_bytes),
            request_headers: further_headers(&ack.request_headers),
            credential,
            seat: OnceLock::new(),
            traffic: OnceLock::new(),
            state: Mutex::new(state),
            work: Notify::new(),
            written: Notify::new(),
            changed: Notify::new(),
            watched: AtomicBool::new(false),
            succeeded: AtomicBool::new(false),
        })
    }

    /// Returns the features of the multiplexer that the relay supports.
    pub fn peer(&self) -> Peer {
        match (self.slots1, self.core1) {
            (true, _) => Peer::Slots1,
            (false, true) => Peer::Core1,
            (false, false) => Peer::Old,
        }
    }

    /// Sets the multiplexer's key for the link.
    pub fn take_seat(&self, seat: RelayKey) {
        let _ = self.seat.set(seat);
    }

    /// Returns the multiplexer's key for the link; `None` without a multiplexer.
    pub fn seat(&self) -> Option<RelayKey> {
        self.seat.get().copied()
    }

    /// Sets the traffic, which records when the relay was last heard.
    pub(crate) fn follow(&self, traffic: Arc<Traffic>) {
        let _ = self.traffic.set(traffic);
    }

    /// True if the relay has been silent past the limit, so that the link is lost even if its session has not noticed
    /// yet.
    pub fn is_overdue(&self) -> bool {
        self.traffic.get().is_some_and(|traffic| traffic.is_silent(Instant::now()))
    }

    /// Queues a message of the link itself.
    pub fn push(&self, message: &WorkerToRelay) {
        self.lock().outbox.push_text(encode(message));
        self.work.notify_one();
    }

    /// Queues the newest value of a state; it replaces an older one.
    pub fn set_latest(&self, slot: Latest, text: String) {
        self.lock().outbox.set_latest(slot, text);
        self.work.notify_one();
    }

    /// Reports the served models to the relay, unless the link is muted. Only a `core1` relay receives more than their
    /// names.
    pub fn announce(&self, advertised: &Advertised, load: u32) {
        let Advertised { models, mut details, mut naming, mut failing } = advertised.clone();
        if !self.core1 {
            details.retain(|_| false);
            naming = Naming::Exact;
            failing.clear();
        }
        let update = ModelsUpdate { models, current_load: Some(load), model_details: details, naming, failing };
        let mut state = self.lock();
        if !state.muted {
            state.outbox.set_latest(Latest::ModelsUpdate, encode(&WorkerToRelay::ModelsUpdate(update)));
            drop(state);
            self.work.notify_one();
        }
    }

    /// Withdraws all models permanently, which stops a relay without `core1` from sending more requests.
    pub fn mute(&self) {
        self.announce(&Advertised::default(), 0);
        self.lock().muted = true;
    }

    /// Makes the writer send a WebSocket ping, ahead of all queued output.
    pub fn ping(&self) {
        self.lock().ping = true;
        self.work.notify_one();
    }

    /// Makes the writer send a WebSocket ping behind all queued output. A pong with [`BARRIER`] proves that the relay
    /// has read all of that.
    pub fn ping_behind(&self) {
        self.lock().barrier = true;
        self.work.notify_one();
    }

    /// Closes the link once everything that may be written is written. A response that waits for credit does not delay
    /// this.
    pub fn close(&self, code: u16, reason: &'static str) {
        self.lock().close.get_or_insert((code, reason));
        self.work.notify_one();
    }

    /// True if the relay reads so slowly that reports should wait.
    pub fn is_congested(&self) -> bool {
        self.lock().outbox.text_bytes() > CONGESTED_BYTES
    }

    /// Returns the number of requests that are not complete.
    pub fn unanswered(&self) -> usize {
        self.lock().requests.len()
    }

    /// True if nothing is left to do or to write.
    pub fn is_idle(&self) -> bool {
        let state = self.lock();
        state.requests.is_empty() && state.outbox.is_empty()
    }

    /// Activates [`Link::changed`]: the link must close when it is idle.
    pub fn watch(&self) {
        self.watched.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Marks the link as replaced by another one; it only finishes its requests.
    pub fn succeed(&self) {
        self.succeeded.store(true, Ordering::Relaxed);
        self.watch();
    }

    /// True if another link has replaced this one.
    pub fn has_successor(&self) -> bool {
        self.succeeded.load(Ordering::Relaxed)
    }

    /// Waits for a change that may let a watched link close.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    fn notify_changed(&self) {
        if self.watched.load(Ordering::Relaxed) {
            self.changed.notify_one();
        }
    }

    /// Returns the writer's next action.
    pub(crate) fn next(&self) -> Next {
        let mut state = self.lock();
        if std::mem::take(&mut state.ping) {
            return Next::Ping(b"");
        }
        if let Some(frame) = state.outbox.next_frame() {
            if let modelrelay_protocol::outbox::Frame::Binary { header: [_, _, a, b, c, d], .. } = &frame
                && let Some(stream) = state.streams.get(&u32::from_be_bytes([*a, *b, *c, *d]))
            {
                stream.written.notify_one();
            }
            return Next::Frame(frame);
        }
        if std::mem::take(&mut state.barrier) {
            return Next::Ping(BARRIER);
        }
        state.close.map_or(Next::Nothing, |(code, reason)| Next::Close(code, reason))
    }

    /// Waits until there may be something to write.
    pub(crate) async fn work(&self) {
        self.work.notified().await;
    }

    /// Called after the writer has flushed a batch.
    pub(crate) fn handle_written(&self) {
        self.written.notify_waiters();
        self.notify_changed();
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn for_test(id: u64, core1: bool) -> Arc<Self> {
        let capabilities = Capabilities::new(core1.then_some(Capability::Core1));
        let secret = Credential::Secret(modelrelay_protocol::secret::Secret::new("test"));
        let mut link = Self::new("test".into(), &RegisterAck::default(), &capabilities, secret);
        if let Some(link) = Arc::get_mut(&mut link) {
            link.id = LinkId(id);
            link.window = 1024;
        }
        link
    }

    #[cfg(test)]
    pub(crate) fn drain_texts(&self) -> Vec<String> {
        std::iter::from_fn(|| match self.next() {
            Next::Frame(modelrelay_protocol::outbox::Frame::Text(text)) => Some(text),
            Next::Frame(_) | Next::Ping(_) | Next::Close(..) | Next::Nothing => None,
        })
        .collect()
    }
}

/// Returns those of a relay's further headers that this worker forwards, too.
fn further_headers(names: &[String]) -> Vec<String> {
    names.iter().filter(|name| headers::may_be_request_header(name)).cloned().collect()
}

fn credit_text(stream: u32, bytes: u64) -> String {
    encode(&WorkerToRelay::Credit(Credit { stream, bytes }))
}
