//! All messages that wait to be written on one worker socket, in the order in which they are sent.
//!
//! Both programs write by the same rules (`Writer` in the wire description):
//!
//! 1. One first-in-first-out queue of text messages goes before any body piece, so a cancel or an error never waits
//!    behind megabytes of body.
//! 2. Then the streams that have both bytes and credit take turns, one piece of at most
//!    [`MAX_PIECE_BYTES`](crate::limits::MAX_PIECE_BYTES) bytes each. A stream without credit is not in the ring:
//!    finding the next frame never visits a stream that cannot send.
//! 3. A completion text follows its stream's last piece; an error or a cancel overtakes the pieces and drops them.
//! 4. State of which only the newest value matters waits once, see [`Latest`] and [`Outbox::set_demand`]; credit to
//!    return is summed per stream until it is written.
//!
//! Nothing here does I/O. The shell writes frames while [`Outbox::next_frame`] returns some, then flushes once. No call
//! panics, whatever the order of calls.

mod stream;

use std::collections::{BTreeMap, HashMap, VecDeque};

use bytes::Bytes;

use self::stream::SendStream;
use crate::frame::{BodyKind, HEADER_BYTES, encode_header};

/// The number of entries of forgotten streams that the ring may hold before it is cleaned.
const STALE_RING_ENTRIES: usize = 64;

/// One WebSocket message to write.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A text message.
    Text(String),
    /// A binary message: the header's six bytes, then the payload.
    Binary {
        /// Kind, zero, and the stream number.
        header: [u8; HEADER_BYTES],
        /// At least one and at most [`MAX_PIECE_BYTES`](crate::limits::MAX_PIECE_BYTES) bytes.
        payload: Bytes,
    },
}

/// Messages that carry a whole state, of which only the newest may wait.
///
/// A newer text replaces the older one at its place in the queue. So it is never later than the error or completion
/// that was queued because of the older one: a relay that reads `at_capacity` has read a grant that is no older than
/// the refusal, and `models_update` precedes its error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latest {
    /// `grant`
    Grant,
    /// `slots`
    Slots,
    /// `models_update`
    ModelsUpdate,
}

/// The result of [`Outbox::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The request had not been written: the peer receives neither it nor the cancel.
    RemovedUnsent,
    /// The request has been written: the cancel follows it.
    Queued,
}

/// The outgoing queue of one socket.
#[derive(Debug)]
pub struct Outbox {
    kind: BodyKind,
    credit_text: fn(u32, u64) -> String,
    /// Keyed by arrival, so that an entry can be removed or replaced in place.
    texts: BTreeMap<u64, Entry>,
    next_seq: u64,
    /// The entry of a stream's unwritten request.
    requests: HashMap<u32, u64>,
    newest_request: Option<u64>,
    /// The entry of a stream's waiting credit, and its sum.
    credits: HashMap<u32, (u64, u64)>,
    latest: [Option<u64>; 3],
    demand: Option<u64>,
    streams: HashMap<u32, SendStream>,
    /// Streams with bytes and credit. May hold entries of forgotten streams, which are skipped.
    ring: VecDeque<u32>,
    /// The number of streams that have `in_ring` set.
    ready: usize,
    text_bytes: usize,
    body_bytes: u64,
}

#[derive(Debug)]
enum Entry {
    Text(String),
    Request { stream: u32, request_id: String, text: String },
    Credit(u32),
    Latest(Latest, String),
    Demand(String),
}

impl Outbox {
    /// Creates an empty outbox. `credit_text` builds the `credit` message from a stream and a number of bytes.
    #[must_use]
    pub fn new(kind: BodyKind, credit_text: fn(u32, u64) -> String) -> Self {
        Self {
            kind,
            credit_text,
            texts: BTreeMap::new(),
            next_seq: 0,
            requests: HashMap::new(),
            newest_request: None,
            credits: HashMap::new(),
            latest: [None; 3],
            demand: None,
            streams: HashMap::new(),
            ring: VecDeque::new(),
            ready: 0,
            text_bytes: 0,
            body_bytes: 0,
        }
    }

    /// Queues a text message behind all texts before it and before every piece.
    pub fn push_text(&mut self, text: String) {
        self.push_entry(Entry::Text(text));
    }

    /// Queues a request and its whole body, of which `window` bytes may be sent before the peer returns credit. The
    /// stream is forgotten after the body's last byte.
    ///
    /// Peers without streams receive their body within `text`; they too need a number of their own here, by which
    /// [`Outbox::cancel`] finds the request.
    pub fn push_request(&mut self, stream: u32, request_id: &str, text: String, body: Bytes, window: u64) {
        let request_id = request_id.to_owned();
        let seq = self.push_entry(Entry::Request { stream, request_id, text });
        self.requests.insert(stream, seq);
        self.newest_request = Some(seq);
        if !body.is_empty() {
            self.insert_stream(stream, SendStream::whole(window));
            self.push_body(stream, body);
        }
    }

    /// Opens a stream for a body that arrives in parts; `window` bytes may be sent before the peer returns credit.
    pub fn open_stream(&mut self, stream: u32, window: u64) {
        self.insert_stream(stream, SendStream::open(window));
    }

    /// Appends to a stream's body and returns the number of bytes that wait there now. Small parts are joined to
    /// waiting ones. A stream that is not open, or already finished, drops them: an aborted request's bytes may still
    /// arrive from the backend.
    pub fn push_body(&mut self, stream: u32, data: Bytes) -> u64 {
        let Some(state) = self.streams.get_mut(&stream) else {
            return 0;
        };
        self.body_bytes += state.push(data);
        let waiting = state.waiting();
        self.enter_ring(stream);
        waiting
    }

    /// The number of waiting bytes of this stream; a reader of the backend or client pauses above a bound of its own.
    #[must_use]
    pub fn waiting_bytes(&self, stream: u32) -> u64 {
        self.streams.get(&stream).map_or(0, SendStream::waiting)
    }

    /// Queues `text` to follow the stream's last piece, after which the stream is forgotten. If the stream is not open,
    /// or has nothing waiting, the text is queued like any other.
    pub fn finish(&mut self, stream: u32, text: String) {
        match self.streams.get_mut(&stream) {
            Some(state) if state.waiting() > 0 => {
                self.text_bytes += text.len();
                if let Some(replaced) = state.end_with(text) {
                    self.text_bytes -= replaced.len();
                }
            }
            Some(_) | None => {
                self.discard(stream);
                self.push_text(text);
            }
        }
    }

    /// Drops the stream with its waiting bytes and its completion text: the other side has completed, failed or
    /// cancelled its request.
    pub fn discard(&mut self, stream: u32) {
        let Some(state) = self.streams.remove(&stream) else {
            return;
        };
        self.body_bytes -= state.waiting();
        if state.in_ring {
            self.ready -= 1;
        }
        if let Some(text) = state.into_completion() {
            self.text_bytes -= text.len();
        }
        if self.ring.len() > 2 * self.ready + STALE_RING_ENTRIES {
            let streams = &self.streams;
            self.ring.retain(|stream| streams.get(stream).is_some_and(|state| state.in_ring));
        }
    }

    /// Queues an error text at once and discards the stream, whose pieces are no longer needed.
    pub fn push_error(&mut self, stream: u32, text: String) {
        self.discard(stream);
        self.forget_credit(stream);
        self.push_text(text);
    }

    /// Cancels a request: an unwritten request is removed with its body; otherwise `text` is queued and the waiting
    /// pieces are dropped.
    pub fn cancel(&mut self, stream: u32, text: String) -> CancelOutcome {
        self.discard(stream);
        self.forget_credit(stream);
        if let Some(seq) = self.requests.get(&stream).copied() {
            self.remove_entry(seq);
            return CancelOutcome::RemovedUnsent;
        }
        self.push_text(text);
        CancelOutcome::Queued
    }

    /// Adds the peer's credit of `bytes` for this stream. Unknown streams are ignored, because credit may cross the
    /// end.
    pub fn add_credit(&mut self, stream: u32, bytes: u64) {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.add_credit(bytes);
            self.enter_ring(stream);
        }
    }

    /// Queues credit for the peer's pieces of `stream`; waiting credit is summed into one message.
    pub fn return_credit(&mut self, stream: u32, bytes: u64) {
        if bytes == 0 {
            return;
        }
        if let Some((_, sum)) = self.credits.get_mut(&stream) {
            *sum = sum.saturating_add(bytes);
            return;
        }
        let seq = self.push_entry(Entry::Credit(stream));
        self.credits.insert(stream, (seq, bytes));
    }

    /// Queues the newest value of a state, in the place of an older one that still waits.
    pub fn set_latest(&mut self, slot: Latest, text: String) {
        if let Some(seq) = self.latest[slot as usize] {
            self.replace_entry(seq, Entry::Latest(slot, text));
        } else {
            self.latest[slot as usize] = Some(self.push_entry(Entry::Latest(slot, text)));
        }
    }

    /// Queues the newest demand. It describes the state after all requests before it, so it replaces an older one only
    /// if no request was queued in between. Otherwise it goes to the end.
    pub fn set_demand(&mut self, text: String) {
        if let Some(seq) = self.demand {
            if self.newest_request.is_none_or(|request| request < seq) {
                self.replace_entry(seq, Entry::Demand(text));
                return;
            }
            self.remove_entry(seq);
        }
        self.demand = Some(self.push_entry(Entry::Demand(text)));
    }

    /// Removes all unwritten requests with their bodies, oldest first, for the caller to requeue before it sends
    /// `graceful_shutdown`. A demand that waits is then outdated; the caller sets it again.
    pub fn take_unwritten_requests(&mut self) -> Vec<(u32, String)> {
        let mut waiting: Vec<u64> = self.requests.values().copied().collect();
        waiting.sort_unstable();
        let mut taken = Vec::with_capacity(waiting.len());
        for seq in waiting {
            if let Some(Entry::Request { stream, request_id, text: _ }) = self.remove_entry(seq) {
                self.discard(stream);
                self.forget_credit(stream);
                taken.push((stream, request_id));
            }
        }
        taken
    }

    /// Returns the next frame to write, or `None` if nothing may be sent now.
    pub fn next_frame(&mut self) -> Option<Frame> {
        self.next_text().map(Frame::Text).or_else(|| self.next_piece())
    }

    /// True if [`Outbox::next_frame`] would return a frame.
    #[must_use]
    pub fn has_frame(&self) -> bool {
        !self.texts.is_empty() || self.ready > 0
    }

    /// True if nothing waits, not even for credit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty() && self.body_bytes == 0
    }

    /// The length of all waiting texts in bytes, including completions but not credit that is not yet rendered.
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        self.text_bytes
    }

    /// The length of all waiting bodies in bytes.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    fn next_text(&mut self) -> Option<String> {
        let (&seq, _) = self.texts.first_key_value()?;
        let text = match self.remove_entry(seq)? {
            Entry::Text(text) | Entry::Request { text, .. } | Entry::Latest(_, text) | Entry::Demand(text) => text,
            Entry::Credit(stream) => {
                let bytes = self.credits.remove(&stream).map_or(0, |(_, sum)| sum);
                (self.credit_text)(stream, bytes)
            }
        };
        Some(text)
    }

    fn next_piece(&mut self) -> Option<Frame> {
        loop {
            let stream = self.ring.pop_front()?;
            // The stream was forgotten after it entered the ring.
            let Some(state) = self.streams.get_mut(&stream).filter(|state| state.in_ring) else {
                continue;
            };
            state.in_ring = false;
            self.ready -= 1;
            let Some(payload) = state.take_piece() else {
                continue;
            };
            self.body_bytes -= payload.len() as u64;
            if state.is_drained_to_its_end() {
                self.close_drained(stream);
            } else {
                self.enter_ring(stream);
            }
            return Some(Frame::Binary { header: encode_header(self.kind, stream), payload });
        }
    }

    /// Queues the completion as the next frame: no text waits while pieces are written.
    fn close_drained(&mut self, stream: u32) {
        if let Some(text) = self.streams.remove(&stream).and_then(SendStream::into_completion) {
            self.text_bytes -= text.len();
            self.push_text(text);
        }
    }

    fn enter_ring(&mut self, stream: u32) {
        if let Some(state) = self.streams.get_mut(&stream)
            && state.can_send()
            && !state.in_ring
        {
            state.in_ring = true;
            self.ready += 1;
            self.ring.push_back(stream);
        }
    }

    fn insert_stream(&mut self, stream: u32, state: SendStream) {
        self.discard(stream);
        self.streams.insert(stream, state);
    }

    fn forget_credit(&mut self, stream: u32) {
        if let Some((seq, _)) = self.credits.remove(&stream) {
            self.texts.remove(&seq);
        }
    }

    fn push_entry(&mut self, entry: Entry) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.text_bytes += entry.len();
        self.texts.insert(seq, entry);
        seq
    }

    fn replace_entry(&mut self, seq: u64, entry: Entry) {
        self.text_bytes += entry.len();
        if let Some(replaced) = self.texts.insert(seq, entry) {
            self.text_bytes -= replaced.len();
        }
    }

    /// Removes an entry and all references to it. The sum of a credit is kept for its reader.
    fn remove_entry(&mut self, seq: u64) -> Option<Entry> {
        let entry = self.texts.remove(&seq)?;
        if self.texts.is_empty() {
            // An empty map keeps a node for eleven entries: a sixteenth of an idle worker's memory.
            self.texts = BTreeMap::new();
        }
        self.text_bytes -= entry.len();
        match &entry {
            Entry::Request { stream, .. } => {
                if self.requests.get(stream) == Some(&seq) {
                    self.requests.remove(stream);
                }
            }
            Entry::Latest(slot, _) => self.latest[*slot as usize] = None,
            Entry::Demand(_) => self.demand = None,
            Entry::Text(_) | Entry::Credit(_) => {}
        }
        Some(entry)
    }
}

impl Entry {
    fn len(&self) -> usize {
        match self {
            Entry::Text(text) | Entry::Request { text, .. } | Entry::Latest(_, text) | Entry::Demand(text) => {
                text.len()
            }
            Entry::Credit(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests;
