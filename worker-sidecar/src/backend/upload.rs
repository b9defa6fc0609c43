//! A request body on its way to the backend: pieces arrive from the relay, hyper reads them.
//!
//! The body's length is known from the start. Bytes that hyper reads return credit to the relay. On a kept connection
//! the pieces are kept until the response begins, so that the request can be sent again.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use modelrelay_protocol::credit::{BodyCounter, ReceiveWindow};
use modelrelay_protocol::limits::{STREAM_WINDOW_BYTES, WORKER_MAX_OUTSTANDING_BYTES};
use modelrelay_protocol::rename::Renamer;

use super::spare::{Spare, SpareMemory};

/// The error of a piece; its request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UploadError {
    /// It exceeds the granted credit.
    Overrun,
    /// It exceeds the announced length.
    TooLong,
    /// It does not name the requested model, and would not have the length that was sent to the backend.
    Misnamed,
}

/// Returns credit to the sender.
pub(crate) type ReturnCredit = Box<dyn Fn(u64) + Send + Sync>;

/// The two ends of one body. Clones are the same body.
#[derive(Clone)]
pub struct Upload(Arc<Shared>);

struct Shared {
    state: Mutex<UploadState>,
    return_credit: Option<ReturnCredit>,
}

struct UploadState {
    /// The length that the backend is sent.
    length: u64,
    /// Renames the model in the arriving pieces, until the end of the body.
    renamer: Option<Renamer>,
    waiting: VecDeque<Bytes>,
    /// The pieces that were already read, while they may have to be sent again.
    kept: Option<Vec<Bytes>>,
    taken: u64,
    /// The read bytes for which credit was returned: sending them again returns none.
    counted: u64,
    counter: BodyCounter,
    window: ReceiveWindow,
    /// Its share of the memory that all requests share. A body that arrived whole has none.
    spare: Option<Spare>,
    /// The bytes of `spare` for sending the body again.
    kept_spare: u64,
    /// The number of the current attempt: a body of an earlier one reads nothing any more.
    sending: u32,
    /// True if the backend has rejected the request and accepts no more of it.
    stopped: bool,
    /// True if a piece broke the rules.
    is_broken: bool,
    waker: Option<Waker>,
}

impl UploadState {
    /// Records `bytes` that the backend has read. Returns the credit to return, if any. The window grows only within
    /// the memory that all requests share.
    fn consume(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        let Some(spare) = &mut self.spare else { return self.window.on_consumed(bytes, now) };
        let window = self.window.window();
        let growth = window.min(WORKER_MAX_OUTSTANDING_BYTES.saturating_sub(window));
        let lent = if spare.grow(growth) { growth } else { 0 };
        self.window.set_max(window + lent);
        let credit = self.window.on_consumed(bytes, now);
        spare.shrink(window + lent - self.window.window());
        credit
    }

    /// Acquires shared memory for a whole body that is longer than the initial window of every request.
    fn take_spare_to_keep(&mut self) -> bool {
        let bytes = if self.length > STREAM_WINDOW_BYTES { self.length } else { 0 };
        let fits = self.spare.as_mut().is_none_or(|spare| spare.grow(bytes));
        self.kept_spare = if fits && self.spare.is_some() { bytes } else { 0 };
        fits
    }

    fn take_in(&mut self, piece: Bytes) -> Result<(), UploadError> {
        let len = piece.len() as u64;
        self.counter.on_piece(len).map_err(|_| UploadError::TooLong)?;
        self.window.on_piece(len).map_err(|_| UploadError::Overrun)?;
        let Some(renamer) = &mut self.renamer else {
            if !piece.is_empty() {
                self.waiting.push_back(piece);
            }
            return Ok(());
        };
        let waiting = &mut self.waiting;
        let mut pass = |piece| waiting.push_back(piece);
        renamer.push(piece, &mut pass);
        if self.counter.is_complete() {
            renamer.finish(&mut pass);
            if self.taken + bytes_of(&self.waiting) != self.length {
                return Err(UploadError::Misnamed);
            }
        }
        Ok(())
    }
}

impl Upload {
    /// Creates a body of `length` bytes, of which the sender may send [`STREAM_WINDOW_BYTES`] at first, and more if the
    /// backend reads fast and `memory` has room.
    pub fn new(length: u64, memory: Arc<SpareMemory>, return_credit: ReturnCredit) -> Self {
        let window = ReceiveWindow::new(STREAM_WINDOW_BYTES, WORKER_MAX_OUTSTANDING_BYTES);
        Self::with(length, window, Some(memory.open()), Some(return_credit))
    }

    /// Creates a body that is complete.
    pub fn whole(body: Bytes) -> Self {
        let length = body.len() as u64;
        let upload = Self::with(length, ReceiveWindow::new(length, length), None, None);
        let mut state = upload.lock();
        // The length always matches.
        let _ = state.counter.on_piece(length);
        if !body.is_empty() {
            state.waiting.push_back(body);
        }
        drop(state);
        upload
    }

    /// Creates an empty body.
    pub fn empty() -> Self {
        Self::whole(Bytes::new())
    }

    fn with(length: u64, window: ReceiveWindow, spare: Option<Spare>, return_credit: Option<ReturnCredit>) -> Self {
        let state = UploadState {
            length,
            renamer: None,
            waiting: VecDeque::new(),
            kept: None,
            taken: 0,
            counted: 0,
            counter: BodyCounter::new(Some(length)),
            window,
            spare,
            kept_spare: 0,
            sending: 0,
            stopped: false,
            is_broken: false,
            waker: None,
        };
        Self(Arc::new(Shared { state: Mutex::new(state), return_credit }))
    }

    /// Returns the length of the whole body in bytes.
    pub fn length(&self) -> u64 {
        self.lock().length
    }

    /// Makes the body name another model, from its first byte on. Must be called before any of it is read.
    pub fn rename(&self, mut renamer: Renamer) {
        let mut state = self.lock();
        let length = renamer.length(state.length);
        let mut renamed = VecDeque::new();
        let mut pass = |piece| renamed.push_back(piece);
        state.waiting.iter().for_each(|piece| renamer.push(piece.clone(), &mut pass));
        if state.counter.is_complete() {
            renamer.finish(&mut pass);
            if bytes_of(&renamed) != length {
                // It does not name the requested model, so it is sent unchanged.
                return;
            }
        } else {
            state.renamer = Some(renamer);
        }
        (state.waiting, state.length) = (renamed, length);
    }

    /// Adds the next piece.
    pub fn push(&self, piece: Bytes) -> Result<(), UploadError> {
        let mut state = self.lock();
        if let Err(error) = state.take_in(piece) {
            state.is_broken = true;
            return Err(error);
        }
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// True if a piece of it broke the rules.
    pub fn is_broken(&self) -> bool {
        self.lock().is_broken
    }

    /// True if the backend has received all of it.
    pub fn is_sent(&self) -> bool {
        let state = self.lock();
        state.taken == state.length
    }

    /// Sends the backend no more of it: it has already rejected the request, and a write that it resets would lose its
    /// response.
    pub fn stop(&self) {
        self.lock().stopped = true;
    }

    /// Keeps the pieces that the backend reads, so that they can be sent again. Returns false if there is no memory for
    /// that.
    #[must_use]
    pub(super) fn keep_for_replay(&self) -> bool {
        let mut state = self.lock();
        let keeps = state.take_spare_to_keep();
        state.kept = keeps.then(Vec::new);
        keeps
    }

    pub(super) fn forget_replay(&self) {
        let mut state = self.lock();
        // Rewound pieces wait to be sent again, and hold their memory until the request ends.
        if state.kept.take().is_some() {
            let bytes = std::mem::take(&mut state.kept_spare);
            if let Some(spare) = &mut state.spare {
                spare.shrink(bytes);
            }
        }
    }

    /// Starts again with the kept pieces.
    pub(super) fn rewind(&self) {
        let mut state = self.lock();
        let kept = state.kept.take().unwrap_or_default();
        for piece in kept.into_iter().rev() {
            state.waiting.push_front(piece);
        }
        state.taken = 0;
        state.sending += 1;
    }

    pub(super) fn body(&self) -> UploadBody {
        UploadBody { sending: self.lock().sending, upload: self.clone() }
    }

    fn take(&self, sending: u32, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut state = self.lock();
        if sending != state.sending {
            return Poll::Pending;
        }
        if state.taken == state.length {
            return Poll::Ready(None);
        }
        let next = if state.stopped { None } else { state.waiting.pop_front() };
        let Some(piece) = next else {
            state.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        state.taken += piece.len() as u64;
        if let Some(kept) = &mut state.kept {
            kept.push(piece.clone());
        }
        let news = state.taken.saturating_sub(state.counted);
        state.counted += news;
        let credit = if news > 0 { state.consume(news, Instant::now()) } else { None };
        drop(state);
        if let (Some(bytes), Some(return_credit)) = (credit, &self.0.return_credit) {
            return_credit(bytes);
        }
        Poll::Ready(Some(piece))
    }

    fn lock(&self) -> MutexGuard<'_, UploadState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload").field("length", &self.length()).finish_non_exhaustive()
    }
}

fn bytes_of(pieces: &VecDeque<Bytes>) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

/// The end that hyper reads.
pub(super) struct UploadBody {
    upload: Upload,
    sending: u32,
}

impl Body for UploadBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.upload.take(self.sending, cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.upload.is_sent()
    }

    fn size_hint(&self) -> SizeHint {
        let state = self.upload.lock();
        SizeHint::with_exact(state.length - state.taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn taken(upload: &Upload) -> Option<Vec<u8>> {
        let sending = upload.lock().sending;
        match upload.take(sending, &mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(piece)) => Some(piece.to_vec()),
            Poll::Ready(None) | Poll::Pending => None,
        }
    }

    #[test]
    fn consumed_bytes_return_credit_once() {
        let returned = Arc::new(AtomicU64::new(0));
        let sink = Arc::clone(&returned);
        let upload = Upload::with(
            8,
            ReceiveWindow::new(4, 4),
            None,
            Some(Box::new(move |bytes| {
                sink.fetch_add(bytes, Ordering::Relaxed);
            })),
        );
        assert!(upload.keep_for_replay());
        upload.push(Bytes::from_static(b"abcd")).unwrap();
        assert_eq!(upload.push(Bytes::from_static(b"e")), Err(UploadError::Overrun));
        assert_eq!(taken(&upload).unwrap(), b"abcd");
        upload.rewind();
        assert_eq!(taken(&upload).unwrap(), b"abcd");
        assert_eq!(returned.load(Ordering::Relaxed), 4);
    }

    /// A body of 8 MiB, of which the backend has read everything that was sent.
    fn large(memory: &Arc<SpareMemory>) -> Upload {
        Upload::new(8 << 20, Arc::clone(memory), Box::new(|_| ()))
    }

    /// Makes the backend read `bytes` as soon as they arrive, so that the window grows if there is memory. Returns the
    /// window.
    fn read(upload: &Upload, bytes: usize) -> u64 {
        for _ in 0..bytes / 65_536 {
            upload.push(Bytes::from(vec![0; 65_536])).unwrap();
            assert_eq!(taken(upload).map(|piece| piece.len()), Some(65_536));
        }
        upload.lock().window.window()
    }

    #[test]
    fn windows_share_memory_for_growth() {
        let memory = SpareMemory::new(STREAM_WINDOW_BYTES);
        let first = large(&memory);
        assert_eq!(read(&first, 4 << 20), 2 * STREAM_WINDOW_BYTES);
        let second = large(&memory);
        assert_eq!(read(&second, 4 << 20), STREAM_WINDOW_BYTES);
        drop(first);
        assert_eq!(read(&second, 4 << 20), 2 * STREAM_WINDOW_BYTES);
    }

    #[test]
    fn window_grows_no_further_than_its_maximum() {
        let memory = SpareMemory::new(64 << 20);
        let upload = Upload::new(64 << 20, Arc::clone(&memory), Box::new(|_| ()));
        assert_eq!(read(&upload, 32 << 20), WORKER_MAX_OUTSTANDING_BYTES);
        assert!(memory.open().grow((64 << 20) + STREAM_WINDOW_BYTES - WORKER_MAX_OUTSTANDING_BYTES));
    }

    #[test]
    fn large_body_is_kept_only_within_spare_memory() {
        let memory = SpareMemory::new(1 << 20);
        let kept = |length| Upload::new(length, Arc::clone(&memory), Box::new(|_| ()));
        let (first, second, small) = (kept(600 << 10), kept(600 << 10), kept(STREAM_WINDOW_BYTES));
        assert!(first.keep_for_replay() && !second.keep_for_replay() && small.keep_for_replay());
        first.forget_replay();
        assert!(second.keep_for_replay());
    }

    #[test]
    fn body_ends_at_declared_length() {
        let upload = Upload::with(4, ReceiveWindow::new(100, 100), None, Some(Box::new(|_| ())));
        upload.push(Bytes::from_static(b"abc")).unwrap();
        assert_eq!(upload.push(Bytes::from_static(b"de")), Err(UploadError::TooLong));
        let whole = Upload::whole(Bytes::from_static(b"xy"));
        assert_eq!(taken(&whole).unwrap(), b"xy");
        assert!(whole.is_sent() && Upload::empty().is_sent());
    }

    #[test]
    fn renamed_body_has_new_length_and_original_credit() {
        let (before, after) = (r#"{"n":[],"model":"q"}"#, r#"{"n":[],"model":"long"}"#);
        let returned = Arc::new(AtomicU64::new(0));
        let sink = Arc::clone(&returned);
        let length = before.len() as u64;
        let upload = Upload::with(
            length,
            ReceiveWindow::new(length, length),
            None,
            Some(Box::new(move |bytes| {
                sink.fetch_add(bytes, Ordering::Relaxed);
            })),
        );
        upload.push(Bytes::from_static(&before.as_bytes()[..9])).unwrap();
        upload.rename(Renamer::new(None, "q", "long"));
        assert_eq!(upload.length(), after.len() as u64);
        assert!(upload.keep_for_replay());
        let all = |upload: &Upload| std::iter::from_fn(|| taken(upload)).flatten().collect::<Vec<u8>>();
        assert_eq!(all(&upload), b"{\"n\":[],\"");
        upload.push(Bytes::from_static(&before.as_bytes()[9..])).unwrap();
        assert_eq!(all(&upload), &after.as_bytes()[9..]);
        assert!(upload.is_sent());
        assert!((length / 2..=length).contains(&returned.load(Ordering::Relaxed)), "no more than came");
        upload.rewind();
        assert_eq!(all(&upload), after.as_bytes());
    }

    #[test]
    fn form_for_another_model_passes_unchanged_or_fails() {
        let form = b"--B\r\nContent-Disposition: form-data; name=\"n\"\r\n\r\nq\r\n--B--\r\n";
        let renamer = || Renamer::new(Some("multipart/form-data; boundary=B"), "q", "long");
        let whole = Upload::whole(Bytes::from_static(form));
        whole.rename(renamer());
        assert_eq!(taken(&whole).unwrap(), form);
        assert!(whole.is_sent());
        let length = form.len() as u64;
        let pieces = Upload::with(length, ReceiveWindow::new(length, length), None, Some(Box::new(|_| ())));
        pieces.rename(renamer());
        assert_eq!(pieces.push(Bytes::from_static(form)), Err(UploadError::Misnamed));
    }

    #[test]
    fn stopped_body_yields_no_data() {
        let upload = Upload::with(4, ReceiveWindow::new(100, 100), None, Some(Box::new(|_| ())));
        upload.push(Bytes::from_static(b"abcd")).unwrap();
        upload.stop();
        assert_eq!(taken(&upload), None);
        assert!(!upload.is_sent());
    }
}
