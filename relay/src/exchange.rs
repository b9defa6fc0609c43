//! One client's answer on its way from a worker's socket to the client's connection.
//!
//! The socket's reader pushes, the HTTP body pulls; neither ever waits for the other. What may be pushed is bounded by
//! the credit that the worker was given, so a client that stops reading costs its window and slows nobody else.
//!
//! An answer belongs to one attempt. A worker whose request was requeued or cancelled can push as much as it likes: its
//! attempt is no longer the current one, and nothing of it is taken.

mod hold;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode};
use modelrelay_protocol::credit::ReceiveWindow;
use modelrelay_protocol::error::{ApiError, ErrorKind};

use self::hold::Held;
pub use self::hold::Hold;
use crate::budget::{Budget, Purpose};
use crate::socket::link::WorkerLink;

/// Below this, a piece that arrives behind unread bytes is copied to their end, into blocks of this size: a backlog of tiny
/// pieces then costs what its bytes cost, and is written to the client in few writes.
const COALESCE_BYTES: usize = 16 << 10;

/// A piece or a head up to this size may use all of the memory when the client has read everything before it.
const PASSING_BYTES: u64 = 16 << 10;

/// A larger piece is counted until the client's connection has written it; smaller ones are within what a connection may buffer.
const BUFFERED_BYTES: usize = 64 << 10;

/// Bytes that a header field takes in addition to its name and value.
const FIELD_BYTES: usize = 64;

/// The head of an answer.
#[derive(Clone, Debug)]
pub struct Head {
    /// The backend's status.
    pub status: StatusCode,
    /// The backend's headers, filtered.
    pub headers: HeaderMap,
    /// The body's length, where the backend said it.
    pub content_length: Option<u64>,
}

impl Head {
    /// Whether nothing follows it, so that the connection asks for no body.
    pub fn is_all(&self) -> bool {
        self.content_length == Some(0) || matches!(self.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
    }

    /// The memory that it takes.
    fn bytes(&self) -> u64 {
        let fields = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD_BYTES);
        fields.sum::<usize>() as u64
    }
}

/// Why a push was refused; the caller fails the request and tells the worker to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// Not the current attempt, or already over: to be dropped and counted.
    Stale,
    /// A piece before the head, a second head, more bytes than announced, or more than the window.
    Broken(&'static str),
    /// The answer is larger than the stream ceiling.
    StreamLimit,
    /// An old worker's client left too much unread.
    SlowClient,
    /// The relay's memory is full.
    NoMemory,
}

/// What an attempt had come to when it was taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// Nothing was handed over: the request may be sent again.
    Unbegun,
    /// The head was, or the exchange has ended: never to be sent again.
    Begun,
}

/// An answer that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standstill {
    /// For how long.
    pub time: Duration,
    /// Who is waited for.
    pub party: Party,
}

/// Who moves next in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// The client has taken everything that the worker sent.
    Worker,
    /// The client leaves unread what there is.
    Client,
}

/// Where the credit for a stream's bytes goes.
#[derive(Clone)]
pub struct CreditTarget {
    /// The worker's link.
    pub link: Arc<WorkerLink>,
    /// The stream on it.
    pub stream: u32,
}

/// One client's answer.
pub struct Exchange {
    budget: Arc<Budget>,
    max_stream_bytes: u64,
    max_unread_bytes: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    attempt: u32,
    head: HeadState,
    chunks: VecDeque<Bytes>,
    tail: BytesMut,
    unread: u64,
    /// What the head takes of the budget, until the exchange is over: the connection keeps it until it is written.
    head_bytes: u64,
    received: u64,
    expected: Option<u64>,
    window: Option<ReceiveWindow>,
    credit: Option<CreditTarget>,
    end: Option<Result<(), ApiError>>,
    closed: bool,
    waker: Option<Waker>,
    first_byte_at: Option<Instant>,
    /// When a worker last sent something of the running attempt, or the client last took something.
    moved_at: Option<Instant>,
}

#[derive(Default)]
enum HeadState {
    #[default]
    Awaited,
    /// Body bytes are there, and the head is not.
    Held(Held),
    Ready(Head),
    Taken,
}

impl Exchange {
    /// An exchange for which no worker has been chosen yet.
    pub fn new(budget: Arc<Budget>, max_stream_bytes: u64, max_unread_bytes: u64) -> Arc<Self> {
        Arc::new(Self { budget, max_stream_bytes, max_unread_bytes, state: Mutex::default() })
    }

    /// From now on the answer is that of `attempt`.
    pub fn begin(&self, attempt: u32, flow: Option<(ReceiveWindow, CreditTarget)>) {
        let mut state = self.lock();
        state.attempt = attempt;
        state.moved_at = Some(Instant::now());
        (state.window, state.credit) = flow.unzip();
    }

    /// Takes the answer away from `attempt`, so that another may be made, if nothing of it has been handed over. Decided
    /// here, under one lock with the head: a worker can be lost in the instant in which it begins to answer.
    pub fn detach(&self, attempt: u32) -> Detached {
        let mut state = self.lock();
        if state.end.is_some() || state.head.is_given() {
            return Detached::Begun;
        }
        // An older attempt's end says nothing about the one that runs now.
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

    fn give_head(&self, state: &mut State, head: Head) -> Result<(), PushError> {
        let bytes = head.bytes();
        if !self.budget.take_unread(bytes, purpose(state, bytes)) {
            return Err(PushError::NoMemory);
        }
        state.head_bytes = bytes;
        state.expected = head.content_length;
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
            return Err(PushError::Broken("more response bytes than were granted"));
        }
        self.take_bytes(state, piece)
    }

    /// Hands over bytes of a worker without credits, which are cut off when the client leaves too many unread.
    pub fn push_uncredited(&self, attempt: u32, bytes: Bytes) -> Result<(), PushError> {
        let state = self.current(attempt)?;
        if state.unread > 0 && state.unread + bytes.len() as u64 > self.max_unread_bytes {
            return Err(PushError::SlowClient);
        }
        self.take_bytes(state, bytes)
    }

    /// Hands over an old worker's whole body, which is in memory already: only the stream ceiling counts.
    pub fn push_whole(&self, attempt: u32, bytes: Bytes) -> Result<(), PushError> {
        let state = self.current(attempt)?;
        self.take_bytes(state, bytes)
    }

    /// The answer is complete, if it is as long as it was said to be.
    pub fn finish(&self, attempt: u32) -> Result<(), PushError> {
        let mut state = self.current(attempt)?;
        if matches!(state.head, HeadState::Awaited) {
            return Err(PushError::Broken("the answer ended before its head"));
        }
        if state.expected.is_some_and(|expected| expected != state.received) {
            return Err(PushError::Broken("fewer response bytes than announced"));
        }
        state.end = Some(Ok(()));
        state.credit = None;
        wake(state);
        Ok(())
    }

    /// Ends the exchange with an error of ours; the first end counts.
    pub fn fail(&self, error: ApiError) {
        let mut state = self.lock();
        state.attempt = 0;
        state.credit = None;
        if state.end.is_none() {
            state.end = Some(Err(error));
        }
        wake(state);
    }

    /// The client is gone: nothing is taken any more, and what is unread is forgotten.
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

    /// How long a running attempt has not moved, and who is waited for.
    pub fn standstill(&self, now: Instant) -> Option<Standstill> {
        let state = self.lock();
        let moved_at = state.moved_at.filter(|_| state.attempt != 0 && state.end.is_none() && !state.closed)?;
        let party = if state.unread == 0 { Party::Worker } else { Party::Client };
        Some(Standstill { time: now.saturating_duration_since(moved_at), party })
    }

    /// How the exchange ended, and how many body bytes had come, and when the first of them.
    pub fn summary(&self) -> (Option<Result<(), ApiError>>, u64, Option<Instant>) {
        let state = self.lock();
        (state.end.clone(), state.received, state.first_byte_at)
    }

    /// Waits for the head, or for the error that came instead. The head of an answer without a body comes with its end.
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

    /// Waits for body bytes. Errors come after all bytes that arrived before them. The last bytes of an answer of
    /// announced length come with its end: the connection asks for nothing more once it has them, and would take the
    /// answer for one that the client gave up.
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
                    // What was granted stays granted; nothing grows while unread answers fill the memory.
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

    fn current(&self, attempt: u32) -> Result<MutexGuard<'_, State>, PushError> {
        let state = self.lock();
        let current = attempt != 0 && state.attempt == attempt && state.end.is_none() && !state.closed;
        current.then_some(state).ok_or(PushError::Stale)
    }

    fn take_bytes(&self, mut state: MutexGuard<'_, State>, bytes: Bytes) -> Result<(), PushError> {
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
        let now = Instant::now();
        state.first_byte_at.get_or_insert(now);
        state.moved_at = Some(now);
        store(&mut state, bytes);
        wake(state);
        Ok(())
    }

    fn give_back(&self, state: &mut State) {
        let bytes = std::mem::take(&mut state.unread) + std::mem::take(&mut state.head_bytes);
        self.budget.give_back_unread(bytes);
    }

    /// Guards one answer; held for moments, never over an await.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.give_back(&mut self.lock());
    }
}

/// What the memory of the next bytes is for.
fn purpose(state: &State, bytes: u64) -> Purpose {
    if state.unread == 0 && bytes <= PASSING_BYTES { Purpose::Passing } else { Purpose::Bulk }
}

fn store(state: &mut State, bytes: Bytes) {
    state.unread += bytes.len() as u64;
    let backlog = !state.chunks.is_empty() || !state.tail.is_empty();
    let small = backlog && bytes.len() < COALESCE_BYTES;
    // One block that doubles would take up to twice of what it holds, and leave half of that behind each time.
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

fn holds_only_the_last(state: &State) -> bool {
    state.expected == Some(state.received) && state.chunks.len() + usize::from(!state.tail.is_empty()) == 1
}

fn next_chunk(state: &mut State) -> Option<Bytes> {
    if let Some(chunk) = state.chunks.pop_front() {
        return Some(chunk);
    }
    // Taken whole: the next small pieces get a buffer of their own size, not a share of a large one that lives on.
    (!state.tail.is_empty()).then(|| std::mem::take(&mut state.tail).freeze())
}

fn wake(mut state: MutexGuard<'_, State>) {
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
