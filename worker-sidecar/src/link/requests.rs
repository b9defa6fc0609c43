//! The requests of a link, from their first message to the last byte of their responses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use modelrelay_multiplexer::actor::CancelHandle;
use modelrelay_protocol::grant_step;
use modelrelay_protocol::message::{WorkerError, WorkerToRelay, encode};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::capacity::{Held, Slot};
use super::{AwaitedBytes, Link, LinkRequestKey, LinkState};
use crate::backend::Upload;

/// A request stops reading from its backend while this many bytes of its response are queued here.
const STREAM_HIGH_WATER: u64 = 32 << 10;

/// The same for all responses to a relay without credits, where only the socket itself applies back-pressure.
const TEXT_HIGH_WATER: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct RunningRequest {
    key: LinkRequestKey,
    task: Option<AbortHandle>,
    taken: Option<SlotGuard>,
    /// The part of the backlog that it is, until the first byte of its response.
    awaited: Option<AwaitedBytes>,
    /// The pieces of its response that the backend has sent.
    pieces: u64,
}

/// The capacity that a request occupies until it ends. A cancel frees it when it is read, before the next message.
#[derive(Debug)]
pub enum SlotGuard {
    /// A slot of a worker with one backend. Dropping it frees it.
    Slot(Slot),
    /// A place in a multiplexer. Freed with the lease if the request ends by itself.
    Place(CancelHandle),
}

#[derive(Debug)]
pub(super) struct StreamState {
    id: Arc<str>,
    upload: Upload,
    /// Notified when the writer has taken a part of its response.
    pub(super) written: Arc<Notify>,
}

impl Link {
    /// Adds a request that has arrived and has its place; `start` spawns the task that serves it. Returns `None` if its
    /// id is in use.
    pub fn begin(
        &self,
        id: &str,
        stream: Option<(u32, Upload)>,
        window: u64,
        taken: Option<SlotGuard>,
        awaited: AwaitedBytes,
        start: impl FnOnce(LinkRequestKey) -> AbortHandle,
    ) -> Option<()> {
        let mut state = self.lock();
        if state.requests.contains_key(id) {
            return None;
        }
        state.next_serial += 1;
        let id: Arc<str> = id.into();
        let number = stream.as_ref().map(|(number, _)| *number);
        let key = LinkRequestKey { id: Arc::clone(&id), stream: number, serial: state.next_serial };
        if let Some((number, upload)) = stream {
            state.outbox.open_stream(number, window);
            let written = Arc::new(Notify::new());
            state.streams.insert(number, StreamState { id: Arc::clone(&id), upload, written });
        }
        // The task takes this lock before it can send anything, so it always finds its request registered.
        let task = Some(start(key.clone()));
        state.requests.insert(id, RunningRequest { key, task, taken, awaited: Some(awaited), pieces: 0 });
        Some(())
    }

    /// Gives a held request its slot. Returns false, and drops the slot, if the request is gone.
    pub async fn wait_for_slot(&self, key: &LinkRequestKey, held: Held) -> bool {
        let Some(slot) = held.wait().await else { return false };
        let mut state = self.lock();
        let known = state.running(key);
        match known {
            Some(running) => {
                running.taken = Some(SlotGuard::Slot(slot));
                true
            }
            None => {
                drop(state);
                drop(slot);
                false
            }
        }
    }

    /// A piece of a request body arrived. Returns `None` if the stream does not exist.
    pub fn upload(&self, stream: u32) -> Option<(Arc<str>, Upload)> {
        let state = self.lock();
        let stream = state.streams.get(&stream)?;
        Some((Arc::clone(&stream.id), stream.upload.clone()))
    }

    /// The relay accepts more bytes of a response.
    pub fn add_credit(&self, stream: u32, bytes: u64) {
        self.lock().outbox.add_credit(stream, bytes);
        self.work.notify_one();
    }

    /// The backend has accepted a part of a request body.
    pub fn return_credit(&self, stream: u32, bytes: u64) {
        let mut state = self.lock();
        if state.streams.contains_key(&stream) {
            state.outbox.return_credit(stream, bytes);
            drop(state);
            self.work.notify_one();
        }
    }

    /// Queues a message about a request, if it is still registered.
    pub fn send_message(&self, key: &LinkRequestKey, message: &WorkerToRelay) {
        let mut state = self.lock();
        if let Some(running) = state.running(key) {
            if key.stream.is_none() {
                // The first chunk of its response.
                running.awaited = None;
            }
            state.outbox.push_text(encode(message));
            drop(state);
            self.work.notify_one();
        }
    }

    /// Queues the next bytes of a response. Returns true if so much is queued that the caller should stop reading.
    #[must_use]
    pub fn send_body(&self, key: &LinkRequestKey, bytes: Bytes) -> bool {
        let Some(number) = key.stream else { return false };
        let mut state = self.lock();
        let Some(running) = state.running(key) else { return false };
        running.pieces += 1;
        running.awaited = None;
        let waiting = state.outbox.push_body(number, bytes);
        drop(state);
        self.work.notify_one();
        waiting >= STREAM_HIGH_WATER
    }

    /// Waits while too many bytes of a response are queued. Returns the time waited.
    pub async fn wait_for_room(&self, key: &LinkRequestKey) -> Duration {
        let since = Instant::now();
        loop {
            let written = {
                let state = self.lock();
                let stream = key.stream.filter(|number| state.outbox.waiting_bytes(*number) >= STREAM_HIGH_WATER);
                stream.and_then(|number| state.streams.get(&number)).map(|stream| Arc::clone(&stream.written))
            };
            let Some(written) = written else { return since.elapsed() };
            written.notified().await;
        }
    }

    /// Waits while too much text is queued: the only back-pressure for a relay without credits.
    pub async fn wait_for_text_room(&self) {
        loop {
            let written = self.written.notified();
            if self.lock().outbox.text_bytes() < TEXT_HIGH_WATER {
                return;
            }
            written.await;
        }
    }

    /// The backend's response was read to its end: frees the slot, and queues `message` after the response's last byte.
    /// Returns when that is written.
    pub async fn finish(&self, key: &LinkRequestKey, message: &WorkerToRelay) {
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

    /// The request failed: frees the slot, drops the queued part of its response, and queues `message` ahead of it.
    pub fn fail(&self, key: &LinkRequestKey, message: &WorkerToRelay) {
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

    /// Aborts a request's task and removes the request; drops the queued part of its response and frees its slot.
    /// Returns `false` if it is not registered.
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
        grant_step!(if running.has_slot() => "frees", self.id.0, id = id);
        running.end();
        self.notify_changed();
        true
    }

    /// Returns the requests that wait for their backend, with the number of pieces that it has sent for each: requests
    /// with a slot whose pieces the relay has all accepted. Requests of older relays are omitted, because those receive
    /// whole responses.
    pub fn waiting_for_backend(&self) -> Vec<(LinkRequestKey, u64)> {
        let state = self.lock();
        let waits = |running: &&RunningRequest| {
            let taken = |number: u32| state.outbox.waiting_bytes(number) == 0;
            matches!(running.taken, Some(SlotGuard::Slot(_))) && running.key.stream.is_some_and(taken)
        };
        state.requests.values().filter(waits).map(|running| (running.key.clone(), running.pieces)).collect()
    }

    /// Ends a request and reports the error to its relay. Returns `false` if the request is no longer registered.
    pub fn break_off(&self, key: &LinkRequestKey, code: &str, message: &str) -> bool {
        let is_known = self.lock().running(key).is_some();
        let ended = is_known && self.cancel(&key.id);
        if ended {
            let (code, message) = (code.to_owned(), message.to_owned());
            let request_id = Some(key.id.to_string());
            grant_step!("errs", self.id.0, id = key.id);
            self.push(&WorkerToRelay::Error(WorkerError { request_id, code, message, retry_after_ms: None }));
        }
        ended
    }

    /// Ends all requests, because the socket is gone or the process stops. Returns their number.
    pub fn cancel_all(&self) -> usize {
        let all: Vec<RunningRequest> = {
            let mut state = self.lock();
            let LinkState { outbox, streams, requests, .. } = &mut *state;
            streams.drain().for_each(|(number, _)| outbox.discard(number));
            requests.drain().map(|(_, running)| running).collect()
        };
        let number = all.len();
        for running in all {
            grant_step!(if running.has_slot() => "frees", self.id.0, id = running.key.id);
            running.end();
        }
        number
    }

    /// Runs before the request's last message is queued, so that the resulting grant is sent first.
    fn free_slot(&self, key: &LinkRequestKey) {
        let taken = self.lock().running(key).and_then(|running| running.taken.take());
        grant_step!(if matches!(taken, Some(SlotGuard::Slot(_))) => "ends", self.id.0, id = key.id);
        // Freeing takes this same lock again, to queue the grant.
        drop(taken);
    }

    fn forget(&self, key: &LinkRequestKey) {
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
        self.notify_changed();
    }
}

impl LinkState {
    fn running(&mut self, key: &LinkRequestKey) -> Option<&mut RunningRequest> {
        self.requests.get_mut(&key.id).filter(|running| running.key.serial == key.serial)
    }
}

impl RunningRequest {
    #[cfg(feature = "simulation")]
    fn has_slot(&self) -> bool {
        matches!(self.taken, Some(SlotGuard::Slot(_)))
    }

    fn end(self) {
        if let Some(task) = &self.task {
            task.abort();
        }
        if let Some(SlotGuard::Place(ticket)) = self.taken {
            ticket.cancel();
        }
    }
}
