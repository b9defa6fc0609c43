//! One client's response on its way from a worker's socket to the client's connection.
//!
//! The socket's reader pushes, the HTTP body pulls; neither ever waits for the other. The worker's credit bounds the
//! pushed bytes, so a client that stops reading costs its window and slows no other client.
//!
//! A response belongs to one attempt. A worker whose request was requeued or cancelled may continue to push: its
//! attempt is no longer the current one, and everything it pushes is rejected.

mod hold;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, StatusCode};
use modelrelay_protocol::credit::ReceiveWindow;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::event_stream::DataLines;

use self::hold::HeldBytes;
pub use self::hold::Hold;
use crate::net::budget::{Budget, Purpose};
use crate::provider::worker::link::WorkerLink;

/// A smaller piece that arrives behind unread bytes is copied to their end, into blocks of this size: a backlog of tiny
/// pieces then costs only its bytes, and is written to the client in few writes.
const COALESCE_BYTES: usize = 16 << 10;

/// A piece or a head up to this size may use all of the memory if the client has read everything before it.
const PASSING_BYTES: u64 = 16 << 10;

/// A larger piece is accounted until the client's connection has written it; smaller ones are within the buffer of a
/// connection.
const BUFFERED_BYTES: usize = 64 << 10;

/// The memory of a header field in addition to its name and value.
const FIELD_BYTES: usize = 64;

/// The head of a response.
#[derive(Clone, Debug)]
pub struct Head {
    /// The backend's status.
    pub status: StatusCode,
    /// The backend's headers, filtered.
    pub headers: HeaderMap,
    /// The body's length, if the backend stated it.
    pub content_length: Option<u64>,
}

impl Head {
    /// True if no body follows, so the connection requests none.
    pub fn is_all(&self) -> bool {
        self.content_length == Some(0) || matches!(self.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
    }

    /// True if the body is an event stream that the relay can read: it cannot read a compressed one.
    pub fn is_event_stream(&self) -> bool {
        if self.headers.contains_key(http::header::CONTENT_ENCODING) {
            return false;
        }
        let content_type = self.headers.get(http::header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        content_type.get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"))
    }

    /// The memory of the head in bytes.
    fn bytes(&self) -> u64 {
        let fields = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD_BYTES);
        fields.sum::<usize>() as u64
    }
}

/// The part of a response that workers have sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    /// The status.
    pub status: Option<StatusCode>,
    /// The size of the body.
    pub bytes: u64,
    /// The number of its `data` lines, if it is an event stream.
    pub data_lines: u64,
    /// When the first byte of the body arrived.
    pub first_byte_at: Option<Instant>,
}

impl Received {
    /// True if the backend returned an error.
    pub fn is_error(&self) -> bool {
        self.status.is_some_and(|status| status.is_client_error() || status.is_server_error())
    }
}

/// The reason why a push was rejected; the caller fails the request and cancels it at the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// Not the current attempt, or already over: the caller drops it.
    Stale,
    /// A piece before the head, a second head, more bytes than announced, or more than the window.
    Broken(&'static str),
    /// The response is larger than the stream limit.
    StreamLimit,
    /// The client of a worker without credits left too many bytes unread.
    SlowClient,
    /// The relay's memory is full.
    NoMemory,
}

/// The progress of an attempt when it was detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// The client has received nothing: the request may be sent again.
    Unbegun,
    /// The head was handed over, or the pipe has ended: the request is never sent again.
    Begun,
}

/// A response without progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standstill {
    /// The time without progress.
    pub time: Duration,
    /// The party that must act next.
    pub party: Party,
}

/// The party that must act next in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// The client has read everything that the worker sent.
    Worker,
    /// The client has unread bytes.
    Client,
}

/// The destination of a stream's credit.
#[derive(Clone)]
pub struct CreditTarget {
    /// The worker's link.
    pub link: Arc<WorkerLink>,
    /// The stream on that link.
    pub stream: u32,
}

/// One client's response.
pub struct ResponsePipe {
    budget: Arc<Budget>,
    max_stream_bytes: u64,
    max_unread_bytes: u64,
    state: Mutex<PipeState>,
}

#[derive(Default)]
struct PipeState {
    attempt: u32,
    head: HeadState,
    chunks: VecDeque<Bytes>,
    tail: BytesMut,
    unread: u64,
    /// The head's bytes in the budget, until the pipe has ended: the connection keeps the head until it is written.
    head_bytes: u64,
    status: Option<StatusCode>,
    received: u64,
    /// `None` unless the response is an event stream.
    data_lines: Option<DataLines>,
    expected: Option<u64>,
    window: Option<ReceiveWindow>,
    credit: Option<CreditTarget>,
    end: Option<Result<(), ApiError>>,
    closed: bool,
    waker: Option<Waker>,
    first_byte_at: Option<Instant>,
    /// The time when a worker last sent bytes of the running attempt, or the client last read some.
    moved_at: Option<Instant>,
}

#[derive(Default)]
enum HeadState {
    #[default]
    Awaited,
    /// Body bytes have arrived, but no head.
    Held(HeldBytes),
    Ready(Head),
    Taken,
}

impl ResponsePipe {
    /// Creates a pipe for which no worker has been chosen yet.
    pub fn new(budget: Arc<Budget>, max_stream_bytes: u64, max_unread_bytes: u64) -> Arc<Self> {
        Arc::new(Self { budget, max_stream_bytes, max_unread_bytes, state: Mutex::default() })
    }

    /// Makes `attempt` the current attempt of the response.
    pub fn begin(&self, attempt: u32, flow: Option<(ReceiveWindow, CreditTarget)>) {
        let mut state = self.lock();
        state.attempt = attempt;
        state.moved_at = Some(Instant::now());
        (state.window, state.credit) = flow.unzip();
    }

    /// Detaches the response from `attempt`, so that another attempt may follow, if the client has received nothing.
    /// Decided here, under one lock with the head: a worker can be lost at the moment at which it begins to respond.
    pub fn detach(&self, attempt: u32) -> Detached {
        let mut state = self.lock();
        if state.end.is_some() || state.head.is_given() {
            return Detached::Begun;
        }
        // The end of an older attempt does not affect the current one.
        if state.attempt == attempt {
            state.attempt = 0;
            state.head = HeadState::Awaited;
            state.window = None;
            state.credit = None;
        }
        Detached::Unbegun
    }

    /// Hands over the head. From here on the request is never sent again.
    pub fn push_head(&self, attempt: u32, head: Head) -> Result<(), PushError> {
        let mut state = self.current(attempt)?;
        if !matches!(state.head, HeadState::Awaited) {
            return Err(PushError::Broken("a second response head"));
        }
        self.give_head(&mut state, head)?;
        wake(state);
        Ok(())
    }

    fn give_head(&self, state: &mut PipeState, head: Head) -> Result<(), PushError> {
        let bytes = head.bytes();
        if !self.budget.take_unread(bytes, purpose(state, bytes)) {
            return Err(PushError::NoMemory);
        }
        state.head_bytes = bytes;
        state.expected = head.content_length;
        state.status = Some(head.status);
        state.data_lines = head.is_event_stream().then(DataLines::default);
        state.moved_at = Some(Instant::now());
        state.head = HeadState::Ready(head);
        Ok(())
    }

    /// Hands over a piece of a `core1` worker's body.
    pub fn push_piece(&self, attempt: u32, piece: Bytes) -> Result<(), PushError> {
        let mut state = self.current(attempt)?;
        let len = piece.len() as u64;
        if matches!(state.head, HeadState::Awaited) {
            return Err(PushError::Broken("a response body before its head"));
        }
        if let Some(window) = &mut state.window
            && window.on_piece(len).is_err()
        {
            return Err(PushError::Broken("response bytes exceed the credit"));
        }
        self.take_bytes(state, piece)
    }

    /// Hands over bytes of a worker without credits. Fails if the client leaves too many unread.
    pub fn push_uncredited(&self, attempt: u32, bytes: Bytes) -> Result<(), PushError> {
        let state = self.current(attempt)?;
        if state.unread > 0 && state.unread + bytes.len() as u64 > self.max_unread_bytes {
            return Err(PushError::SlowClient);
        }
        self.take_bytes(state, bytes)
    }

    /// Hands over an old worker's whole body, which is in memory already: only the stream limit applies.
    pub fn push_whole(&self, attempt: u32, bytes: Bytes) -> Result<(), PushError> {
        let state = self.current(attempt)?;
        self.take_bytes(state, bytes)
    }

    /// Completes the response, if it has the announced length.
    pub fn finish(&self, attempt: u32) -> Result<(), PushError> {
        let mut state = self.current(attempt)?;
        if matches!(state.head, HeadState::Awaited) {
            return Err(PushError::Broken("the response ended before its head"));
        }
        if state.expected.is_some_and(|expected| expected != state.received) {
            return Err(PushError::Broken("fewer response bytes than announced"));
        }
        state.end = Some(Ok(()));
        state.credit = None;
        wake(state);
        Ok(())
    }

    /// Ends the pipe with an error of the relay. Only the first end has an effect.
    pub fn fail(&self, error: ApiError) {
        let mut state = self.lock();
        state.attempt = 0;
        state.credit = None;
        if state.end.is_none() {
            state.end = Some(Err(error));
        }
        wake(state);
    }

    /// Closes the pipe after the client disconnected: later pushes are rejected, and unread bytes are dropped.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.attempt = 0;
        state.credit = None;
        state.waker = None;
        self.give_back(&mut state);
        state.chunks = VecDeque::new();
        state.tail = BytesMut::new();
        if !state.head.is_given() {
            state.head = HeadState::Awaited;
        }
    }

    /// Returns how long a running attempt has made no progress, and which party must act.
    pub fn standstill(&self, now: Instant) -> Option<Standstill> {
        let state = self.lock();
        let moved_at = state.moved_at.filter(|_| state.attempt != 0 && state.end.is_none() && !state.closed)?;
        let party = if state.unread == 0 { Party::Worker } else { Party::Client };
        Some(Standstill { time: now.saturating_duration_since(moved_at), party })
    }

    /// Returns how the pipe ended.
    pub fn end(&self) -> Option<Result<(), ApiError>> {
        self.lock().end.clone()
    }

    /// Returns how much of the response workers have sent.
    pub fn received(&self) -> Received {
        let state = self.lock();
        let data_lines = state.data_lines.map_or(0, |lines| lines.count());
        Received { status: state.status, bytes: state.received, data_lines, first_byte_at: state.first_byte_at }
    }

    /// Waits for the head, or for the error instead of it. The head of a response without a body comes with its end.
    pub fn poll_head(&self, cx: &Context<'_>) -> Poll<Result<Head, ApiError>> {
        let mut state = self.lock();
        let may_go = match &state.head {
            HeadState::Ready(head) => !head.is_all() || matches!(state.end, Some(Ok(()))),
            HeadState::Awaited | HeadState::Held(_) | HeadState::Taken => false,
        };
        if may_go && let HeadState::Ready(head) = std::mem::replace(&mut state.head, HeadState::Taken) {
            return Poll::Ready(Ok(head));
        }
        match &state.end {
            Some(Err(error)) => Poll::Ready(Err(error.clone())),
            Some(Ok(())) => Poll::Ready(Err(internal("the head was taken twice"))),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Waits for body bytes. Errors come after all bytes that arrived before them. The last bytes of a response of
    /// announced length come with its end: once the connection has them it does not poll again, and the response would
    /// be treated as cancelled by the client.
    pub fn poll_chunk(&self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>> {
        let mut state = self.lock();
        let early = state.end.is_none() && holds_only_the_last(&state);
        if let Some(chunk) = (!early).then(|| next_chunk(&mut state)).flatten() {
            let len = chunk.len() as u64;
            state.unread -= len;
            let chunk = if chunk.len() > BUFFERED_BYTES {
                self.budget.adopt_unread(len).hold(chunk)
            } else {
                self.budget.give_back_unread(len);
                chunk
            };
            let tight = self.budget.is_tight();
            let now = Instant::now();
            state.moved_at = Some(now);
            let due = state.window.as_mut().and_then(|window| {
                if tight {
                    // Granted credit stays granted; no window grows while unread responses fill the memory.
                    window.set_max(0);
                }
                window.on_consumed(len, now)
            });
            let target = due.and_then(|due| Some((state.credit.clone()?, due)));
            drop(state);
            if let Some((target, due)) = target {
                target.link.return_credit(target.stream, due);
            }
            return Poll::Ready(Some(Ok(chunk)));
        }
        match &state.end {
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(error)) => Poll::Ready(Some(Err(error.clone()))),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn current(&self, attempt: u32) -> Result<MutexGuard<'_, PipeState>, PushError> {
        let state = self.lock();
        let current = attempt != 0 && state.attempt == attempt && state.end.is_none() && !state.closed;
        current.then_some(state).ok_or(PushError::Stale)
    }

    fn take_bytes(&self, mut state: MutexGuard<'_, PipeState>, bytes: Bytes) -> Result<(), PushError> {
        let len = bytes.len() as u64;
        let received = state.received + len;
        if state.expected.is_some_and(|expected| received > expected) {
            return Err(PushError::Broken("more response bytes than announced"));
        }
        if received > self.max_stream_bytes {
            return Err(PushError::StreamLimit);
        }
        if len == 0 {
            return Ok(());
        }
        if !self.budget.take_unread(len, purpose(&state, len)) {
            return Err(PushError::NoMemory);
        }
        state.received = received;
        if let Some(lines) = &mut state.data_lines {
            lines.follow(&bytes);
        }
        let now = Instant::now();
        state.first_byte_at.get_or_insert(now);
        state.moved_at = Some(now);
        store(&mut state, bytes);
        wake(state);
        Ok(())
    }

    fn give_back(&self, state: &mut PipeState) {
        let bytes = std::mem::take(&mut state.unread) + std::mem::take(&mut state.head_bytes);
        self.budget.give_back_unread(bytes);
    }

    /// Guards one response; held for moments, never over an await.
    fn lock(&self) -> MutexGuard<'_, PipeState> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for ResponsePipe {
    fn drop(&mut self) {
        self.give_back(&mut self.lock());
    }
}

/// The purpose of the memory for the next bytes.
fn purpose(state: &PipeState, bytes: u64) -> Purpose {
    if state.unread == 0 && bytes <= PASSING_BYTES { Purpose::Passing } else { Purpose::Bulk }
}

fn store(state: &mut PipeState, bytes: Bytes) {
    state.unread += bytes.len() as u64;
    let backlog = !state.chunks.is_empty() || !state.tail.is_empty();
    let small = backlog && bytes.len() < COALESCE_BYTES;
    // A single block that doubles would use up to twice its content, and leave half of that behind each time.
    let fits = small && state.tail.len() + bytes.len() <= COALESCE_BYTES;
    if !fits && !state.tail.is_empty() {
        let tail = std::mem::take(&mut state.tail).freeze();
        state.chunks.push_back(tail);
    }
    if small {
        state.tail.extend_from_slice(&bytes);
    } else {
        state.chunks.push_back(bytes);
    }
}

fn holds_only_the_last(state: &PipeState) -> bool {
    state.expected == Some(state.received) && state.chunks.len() + usize::from(!state.tail.is_empty()) == 1
}

fn next_chunk(state: &mut PipeState) -> Option<Bytes> {
    if let Some(chunk) = state.chunks.pop_front() {
        return Some(chunk);
    }
    // The tail is removed whole: the next small pieces get a buffer of their own size, not a share of a large one that
    // stays allocated.
    (!state.tail.is_empty()).then(|| std::mem::take(&mut state.tail).freeze())
}

fn wake(mut state: MutexGuard<'_, PipeState>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn internal(message: &'static str) -> ApiError {
    ApiError::new(ErrorKind::Internal, message)
}

#[cfg(test)]
mod tests;
