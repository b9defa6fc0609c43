//! The first bytes of a response without a head, until their kind is known.
//!
//! A published worker sends the body of a response first and the status last. Bytes that begin like an event stream
//! pass at once. Other bytes are the body of an error: they are held until the status arrives, because a client would
//! read them as a stream without events. They pass as a stream once they exceed the limit in size or time.

use std::sync::MutexGuard;

use bytes::{Bytes, BytesMut};
use modelrelay_protocol::event_stream;

use super::{Head, HeadState, PipeState, PushError, ResponsePipe};
use crate::net::budget::{Purpose, Reservation};

/// The number of bytes that are held of one response, more than any error has.
const MAX_HELD_BYTES: usize = 64 << 10;

/// The held bytes.
#[derive(Default)]
pub(super) struct HeldBytes {
    bytes: BytesMut,
    /// Their reservation in the budget.
    reservation: Option<Reservation>,
}

impl HeldBytes {
    /// True if the response must begin with these bytes: they are an event stream, or cannot be held.
    fn must_pass(&mut self, response: &ResponsePipe) -> bool {
        let len = self.bytes.len();
        if len > MAX_HELD_BYTES || event_stream::begins_with(&self.bytes) == Some(true) {
            return true;
        }
        match &mut self.reservation {
            Some(reservation) => reservation.grow(len as u64 - reservation.bytes(), Purpose::Bulk).is_err(),
            none @ None => {
                *none = response.budget.reserve(len as u64, Purpose::Bulk);
                none.is_none()
            }
        }
    }
}

/// The result of pushing a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It is held, as the first piece of its response.
    First,
    /// It is held behind others.
    Further,
    /// It was passed to the client, and so will be all that follow.
    Passed,
}

impl ResponsePipe {
    /// Pushes a piece of a response without a head. If it is an event stream, the response begins with `head`.
    pub fn hold(&self, attempt: u32, bytes: &Bytes, head: Head) -> Result<Hold, PushError> {
        let mut state = self.current(attempt)?;
        let mut held = match std::mem::take(&mut state.head) {
            HeadState::Awaited => HeldBytes::default(),
            HeadState::Held(held) => held,
            given @ (HeadState::Ready(_) | HeadState::Taken) => {
                state.head = given;
                drop(state);
                return self.push_uncredited(attempt, bytes.clone()).map(|()| Hold::Passed);
            }
        };
        let is_first = held.bytes.is_empty();
        held.bytes.extend_from_slice(bytes);
        if held.must_pass(self) {
            return self.pass(state, held, head).map(|()| Hold::Passed);
        }
        state.moved_at = Some(std::time::Instant::now());
        state.head = HeadState::Held(held);
        Ok(if is_first { Hold::First } else { Hold::Further })
    }

    /// Begins the response with the held bytes, if its status has not arrived yet; returns true if it did.
    pub fn pass_held(&self, attempt: u32, head: Head) -> bool {
        let Ok(mut state) = self.current(attempt) else { return false };
        match std::mem::take(&mut state.head) {
            HeadState::Held(held) => self.pass(state, held, head).is_ok(),
            other @ (HeadState::Awaited | HeadState::Ready(_) | HeadState::Taken) => {
                state.head = other;
                false
            }
        }
    }

    fn pass(&self, mut state: MutexGuard<'_, PipeState>, held: HeldBytes, head: Head) -> Result<(), PushError> {
        // From here on the bytes are counted as unread.
        drop(held.reservation);
        self.give_head(&mut state, head)?;
        self.take_bytes(state, held.bytes.freeze())
    }

    /// Returns the held bytes once the status has arrived, empty if nothing was sent; `None` if the response has begun.
    pub fn take_held(&self, attempt: u32) -> Option<Bytes> {
        let mut state = self.current(attempt).ok()?;
        match std::mem::take(&mut state.head) {
            HeadState::Held(held) => Some(held.bytes.freeze()),
            HeadState::Awaited => Some(Bytes::new()),
            begun @ (HeadState::Ready(_) | HeadState::Taken) => {
                state.head = begun;
                None
            }
        }
    }

    /// True if a head was handed over.
    pub fn has_head(&self) -> bool {
        self.lock().head.is_given()
    }
}

impl HeadState {
    /// True if the client has the head, or may have it.
    pub(super) fn is_given(&self) -> bool {
        matches!(self, Self::Ready(_) | Self::Taken)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{all, head, response};
    use super::*;

    fn hold(response: &ResponsePipe, piece: &str) -> Result<Hold, PushError> {
        response.hold(1, &Bytes::copy_from_slice(piece.as_bytes()), head(None))
    }

    #[test]
    fn event_stream_passes_once_recognised() {
        let response = response();
        assert_eq!(hold(&response, "da"), Ok(Hold::First));
        assert!(!response.has_head());
        assert_eq!(hold(&response, "ta: 1\n"), Ok(Hold::Passed));
        assert_eq!(hold(&response, "{}"), Ok(Hold::Passed));
        assert!(response.has_head() && response.take_held(1).is_none());
        assert_eq!((all(&response).0, response.budget.used()), (b"data: 1\n{}".to_vec(), 0));
    }

    #[test]
    fn other_bytes_are_held_and_counted_until_taken() {
        let response = response();
        assert_eq!((hold(&response, "{\"e"), hold(&response, "\"}")), (Ok(Hold::First), Ok(Hold::Further)));
        assert_eq!((all(&response).0.len(), response.budget.used()), (0, 5));
        assert_eq!(response.take_held(1).as_deref(), Some(&b"{\"e\"}"[..]));
        assert_eq!((response.take_held(1), response.budget.used()), (Some(Bytes::new()), 0));
    }

    #[test]
    fn held_bytes_pass_at_timeout_or_full_budget() {
        let response = response();
        assert!(!response.pass_held(1, head(None)), "nothing is held");
        assert_eq!(hold(&response, "{"), Ok(Hold::First));
        assert!(response.pass_held(1, head(None)) && !response.pass_held(1, head(None)));
        assert_eq!(all(&response).0, b"{");
        let budget = crate::net::budget::Budget::new(16);
        let _others = budget.reserve(14, Purpose::Bulk).unwrap();
        let full = ResponsePipe::new(budget, 1 << 20, 1 << 20);
        full.begin(1, None);
        assert_eq!(hold(&full, "{}"), Ok(Hold::Passed), "no room to hold them in");
        let response = ResponsePipe::new(crate::net::budget::Budget::new(1 << 20), 1 << 20, 1 << 20);
        response.begin(1, None);
        assert_eq!(hold(&response, &"x".repeat(MAX_HELD_BYTES)), Ok(Hold::First));
        assert_eq!(hold(&response, "x"), Ok(Hold::Passed), "longer than an error");
    }

    #[test]
    fn lost_attempt_discards_held_bytes() {
        let response = response();
        assert_eq!(hold(&response, "{"), Ok(Hold::First));
        assert_eq!(response.detach(1), super::super::Detached::Unbegun);
        assert_eq!(response.budget.used(), 0);
        response.begin(2, None);
        assert_eq!(hold(&response, "{"), Err(PushError::Stale));
        assert_eq!(response.take_held(2), Some(Bytes::new()));
    }
}
