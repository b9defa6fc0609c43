//! One live link: what waits to be written on it, and the requests that came over it.
//!
//! Reader, writer and requests meet here and nowhere else, under one short lock that is never held over an await. The
//! reader never waits for the writer or the backend: it only puts things here.
//!
//! A request is known by its [`RequestKey`]. It is known until its last byte is written or it was cancelled; whatever its
//! task says afterwards is dropped, so a late word can never meet a newer request.

mod backoff;
mod dial;
mod establish;
mod liveness;
mod session;
mod writer;

pub use backoff::{Backoff, EndKind, random};
pub use dial::Endpoint;
pub use establish::{End, Linked, establish};

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use modelrelay_protocol::frame::BodyKind;
use modelrelay_protocol::message::{Credit, ModelsUpdate, WorkerToRelay, encode};
use modelrelay_protocol::outbox::{Latest, Outbox};
use modelrelay_protocol::secret::Secret;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::backend::Upload;
use crate::capacity::{Held, Slot};

/// A request stops reading its backend while so much of its answer waits here.
const STREAM_HIGH_WATER: u64 = 64 << 10;

/// The same for all answers to a relay without credits, where only the socket itself slows us.
const TEXT_HIGH_WATER: usize = 1 << 20;

/// Tells the pong of [`Link::ping_behind`] from those of liveness.
const BARRIER: &[u8] = b"drain";

/// Numbers links in this process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u64);

/// Names one request on its link, even when a relay uses an id again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestKey {
    /// The relay's id.
    pub id: Arc<str>,
    /// The stream of its pieces; none towards a relay without `core1`.
    pub stream: Option<u32>,
    serial: u64,
}

/// A link, from `register_ack` to the end of its socket.
#[derive(Debug)]
pub struct Link {
    /// Which.
    pub id: LinkId,
    /// The relay's address, for people and metrics.
    pub relay: Arc<str>,
    /// The relay process, where it names itself.
    pub relay_id: Option<String>,
    /// Binary bodies, credits, grants, drain.
    pub core1: bool,
    /// What may be sent of each answer before credit comes.
    pub window: u64,
    /// What let it in.
    pub secret: Secret,
    state: Mutex<State>,
    /// Something is there to be written.
    work: Notify,
    /// The writer has written.
    written: Notify,
    /// Something changed that may let the link close; told only while somebody waits to close it.
    changed: Notify,
    watched: AtomicBool,
    succeeded: AtomicBool,
}

#[derive(Debug)]
struct State {
    outbox: Outbox,
    requests: HashMap<Arc<str>, Running>,
    streams: HashMap<u32, StreamState>,
    next_serial: u64,
    /// A WebSocket ping is due.
    ping: bool,
    /// One is due behind everything that waits.
    barrier: bool,
    /// The link closes once nothing more can be written.
    close: Option<(u16, &'static str)>,
    /// No models are advertised any more.
    muted: bool,
}

#[derive(Debug)]
struct Running {
    key: RequestKey,
    task: Option<AbortHandle>,
    slot: Option<Slot>,
}

#[derive(Debug)]
struct StreamState {
    id: Arc<str>,
    upload: Upload,
    written: Arc<Notify>,
}

/// What the writer shall do next.
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
    /// A new link with nothing to write.
    pub fn new(relay: Arc<str>, relay_id: Option<String>, core1: bool, window: u64, secret: Secret) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let state = State {
            outbox: Outbox::new(BodyKind::Response, credit_text),
            requests: HashMap::new(),
            streams: HashMap::new(),
            next_serial: 0,
            ping: false,
            barrier: false,
            close: None,
            muted: false,
        };
        Arc::new(Self {
            id: LinkId(NEXT.fetch_add(1, Ordering::Relaxed)),
            relay,
            relay_id,
            core1,
            window,
            secret,
            state: Mutex::new(state),
            work: Notify::new(),
            written: Notify::new(),
            changed: Notify::new(),
            watched: AtomicBool::new(false),
            succeeded: AtomicBool::new(false),
        })
    }

    /// Queues a message of the link itself.
    pub fn push(&self, message: &WorkerToRelay) {
        self.lock().outbox.push_text(encode(message));
        self.work.notify_one();
    }

    /// Queues the newest of a state.
    pub fn set_latest(&self, slot: Latest, text: String) {
        self.lock().outbox.set_latest(slot, text);
        self.work.notify_one();
    }

    /// Tells the relay which models are served, unless the link is muted.
    pub fn announce(&self, models: &[String], load: u32) {
        let update = WorkerToRelay::ModelsUpdate(ModelsUpdate { models: models.to_vec(), current_load: Some(load) });
        let mut state = self.lock();
        if !state.muted {
            state.outbox.set_latest(Latest::ModelsUpdate, encode(&update));
            drop(state);
            self.work.notify_one();
        }
    }

    /// Takes all models back for good: how a relay without `core1` is asked for no more requests.
    pub fn mute(&self) {
        self.announce(&[], 0);
        self.lock().muted = true;
    }

    /// Has the writer send a WebSocket ping, ahead of everything that waits.
    pub fn ping(&self) {
        self.lock().ping = true;
        self.work.notify_one();
    }

    /// Has the writer send a WebSocket ping behind everything that waits. A pong with [`BARRIER`] says that the relay has
    /// read all that.
    pub fn ping_behind(&self) {
        self.lock().barrier = true;
        self.work.notify_one();
    }

    /// Closes the link once everything is written that may be: an answer that waits for credit does not hold it.
    pub fn close(&self, code: u16, reason: &'static str) {
        self.lock().close.get_or_insert((code, reason));
        self.work.notify_one();
    }

    /// Requests that have not been answered to their last byte.
    pub fn unanswered(&self) -> usize {
        self.lock().requests.len()
    }

    /// Whether nothing is left to do or to write.
    pub fn is_idle(&self) -> bool {
        let state = self.lock();
        state.requests.is_empty() && state.outbox.is_empty()
    }

    /// From now on [`Link::changed`] tells: the link shall close when it is idle.
    pub fn watch(&self) {
        self.watched.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Another link has taken the place of this one, which shall only finish what it has.
    pub fn succeed(&self) {
        self.succeeded.store(true, Ordering::Relaxed);
        self.watch();
    }

    /// Whether another has taken its place.
    pub fn has_successor(&self) -> bool {
        self.succeeded.load(Ordering::Relaxed)
    }

    /// Waits for something that may let a watched link close.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// A request was read and has its place; `start` gives the task that answers it. `None` when its id is in use.
    pub fn begin(
        &self,
        id: &str,
        stream: Option<(u32, Upload)>,
        window: u64,
        slot: Option<Slot>,
        start: impl FnOnce(RequestKey) -> AbortHandle,
    ) -> Option<()> {
        let mut state = self.lock();
        if state.requests.contains_key(id) {
            return None;
        }
        state.next_serial += 1;
        let id: Arc<str> = id.into();
        let number = stream.as_ref().map(|(number, _)| *number);
        let key = RequestKey { id: Arc::clone(&id), stream: number, serial: state.next_serial };
        if let Some((number, upload)) = stream {
            state.outbox.open_stream(number, window);
            let written = Arc::new(Notify::new());
            state.streams.insert(number, StreamState { id: Arc::clone(&id), upload, written });
        }
        // The task takes this lock before it can say anything, so it always finds itself known.
        let task = Some(start(key.clone()));
        state.requests.insert(id, Running { key, task, slot });
        Some(())
    }

    /// Gives a held request its slot; it is dropped when the request is gone.
    pub async fn wait_for_slot(&self, key: &RequestKey, held: Held) -> bool {
        let Some(slot) = held.wait().await else { return false };
        let mut state = self.lock();
        let known = state.running(key);
        match known {
            Some(running) => {
                running.slot = Some(slot);
                true
            }
            None => {
                drop(state);
                drop(slot);
                false
            }
        }
    }

    /// A piece of a request body was read; `None` when nobody holds its stream.
    pub fn upload(&self, stream: u32) -> Option<(Arc<str>, Upload)> {
        let state = self.lock();
        let stream = state.streams.get(&stream)?;
        Some((Arc::clone(&stream.id), stream.upload.clone()))
    }

    /// The relay takes more of an answer.
    pub fn add_credit(&self, stream: u32, bytes: u64) {
        self.lock().outbox.add_credit(stream, bytes);
        self.work.notify_one();
    }

    /// The backend has taken a part of a request body.
    pub fn return_credit(&self, stream: u32, bytes: u64) {
        let mut state = self.lock();
        if state.streams.contains_key(&stream) {
            state.outbox.return_credit(stream, bytes);
            drop(state);
            self.work.notify_one();
        }
    }

    /// Queues a message about a request, if it is still known.
    pub fn say(&self, key: &RequestKey, message: &WorkerToRelay) {
        let mut state = self.lock();
        if state.running(key).is_some() {
            state.outbox.push_text(encode(message));
            drop(state);
            self.work.notify_one();
        }
    }

    /// Queues the next bytes of an answer and waits while too many wait already. Gives the time waited.
    pub async fn send_body(&self, key: &RequestKey, bytes: Bytes) -> Duration {
        let Some(number) = key.stream else { return Duration::ZERO };
        let (mut waiting, written) = {
            let mut state = self.lock();
            if state.running(key).is_none() {
                return Duration::ZERO;
            }
            let waiting = state.outbox.push_body(number, bytes);
            let written = state.streams.get(&number).map(|stream| Arc::clone(&stream.written));
            (waiting, written)
        };
        self.work.notify_one();
        let Some(written) = written.filter(|_| waiting >= STREAM_HIGH_WATER) else { return Duration::ZERO };
        let since = Instant::now();
        while waiting >= STREAM_HIGH_WATER {
            written.notified().await;
            waiting = self.lock().outbox.waiting_bytes(number);
        }
        since.elapsed()
    }

    /// Waits while too many texts wait: the only brake towards a relay without credits.
    pub async fn wait_for_text_room(&self) {
        loop {
            let written = self.written.notified();
            if self.lock().outbox.text_bytes() < TEXT_HIGH_WATER {
                return;
            }
            written.await;
        }
    }

    /// The backend's answer was read to its end: the slot is free, and `message` follows the answer's last byte. Returns
    /// when that is written.
    pub async fn finish(&self, key: &RequestKey, message: &WorkerToRelay) {
        self.free_slot(key);
        let written = {
            let mut state = self.lock();
            if state.running(key).is_none() {
                return;
            }
            match key.stream {
                Some(number) => state.outbox.finish(number, encode(message)),
                None => state.outbox.push_text(encode(message)),
            }
            key.stream.and_then(|number| state.streams.get(&number)).map(|stream| Arc::clone(&stream.written))
        };
        self.work.notify_one();
        if let (Some(number), Some(written)) = (key.stream, written) {
            while self.lock().outbox.waiting_bytes(number) > 0 {
                written.notified().await;
            }
        }
        self.forget(key);
    }

    /// The request failed: the slot is free, what waits of its answer is dropped, `message` goes at once.
    pub fn fail(&self, key: &RequestKey, message: &WorkerToRelay) {
        self.free_slot(key);
        let mut state = self.lock();
        if state.running(key).is_none() {
            return;
        }
        match key.stream {
            Some(number) => state.outbox.push_error(number, encode(message)),
            None => state.outbox.push_text(encode(message)),
        }
        drop(state);
        self.work.notify_one();
        self.forget(key);
    }

    /// Ends a request's task and forgets it; what waits of its answer is dropped and its slot is free. `false` when it is
    /// not known.
    pub fn cancel(&self, id: &str) -> bool {
        let running = {
            let mut state = self.lock();
            let Some(running) = state.requests.remove(id) else { return false };
            if let Some(number) = running.key.stream {
                state.outbox.discard(number);
                state.streams.remove(&number);
            }
            running
        };
        running.end();
        self.tell_changed();
        true
    }

    /// Ends all requests: the socket is gone, or the process is. Gives their number.
    pub fn cancel_all(&self) -> usize {
        let all: Vec<Running> = {
            let mut state = self.lock();
            let State { outbox, streams, requests, .. } = &mut *state;
            streams.drain().for_each(|(number, _)| outbox.discard(number));
            requests.drain().map(|(_, running)| running).collect()
        };
        let number = all.len();
        all.into_iter().for_each(Running::end);
        number
    }

    /// Comes before the request's last message is queued, so that the grant it causes goes first.
    fn free_slot(&self, key: &RequestKey) {
        let slot = self.lock().running(key).and_then(|running| running.slot.take());
        // Freeing takes this very lock again, to queue the grant.
        drop(slot);
    }

    fn forget(&self, key: &RequestKey) {
        let mut state = self.lock();
        if state.running(key).is_none() {
            return;
        }
        let gone = state.requests.remove(&key.id);
        if let Some(number) = key.stream {
            state.streams.remove(&number);
        }
        drop(state);
        drop(gone);
        self.tell_changed();
    }

    fn tell_changed(&self) {
        if self.watched.load(Ordering::Relaxed) {
            self.changed.notify_one();
        }
    }

    /// The writer's view: what to write now.
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

    /// The writer has flushed a batch.
    pub(crate) fn handle_written(&self) {
        self.written.notify_waiters();
        self.tell_changed();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn for_test(id: u64, core1: bool) -> Arc<Self> {
        let mut link = Self::new("test".into(), None, core1, 1024, Secret::new("test"));
        if let Some(link) = Arc::get_mut(&mut link) {
            link.id = LinkId(id);
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

impl State {
    fn running(&mut self, key: &RequestKey) -> Option<&mut Running> {
        self.requests.get_mut(&key.id).filter(|running| running.key.serial == key.serial)
    }
}

impl Running {
    fn end(self) {
        if let Some(task) = &self.task {
            task.abort();
        }
        drop(self.slot);
    }
}

fn credit_text(stream: u32, bytes: u64) -> String {
    encode(&WorkerToRelay::Credit(Credit { stream, bytes }))
}
