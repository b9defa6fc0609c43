//! The sending half of one body: its waiting bytes, its credit, and the text that ends it.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use crate::limits::MAX_PIECE_BYTES;

/// Parts up to this size are copied into one buffer when others already wait. A message per 200-byte event would cost
/// more than the copy; larger parts are never copied.
const SMALL_PART: usize = 4_096;

#[derive(Debug)]
pub(super) struct SendStream {
    /// True if the outbox's ring holds this stream. Set by the outbox.
    pub(super) in_ring: bool,
    parts: VecDeque<Bytes>,
    /// Small parts joined, after all of `parts`.
    tail: BytesMut,
    waiting: u64,
    credit: u64,
    end: End,
}

#[derive(Debug)]
enum End {
    /// More parts may be appended.
    Open,
    /// The body is complete, and nothing follows it.
    Silent,
    /// The body is complete, and this text follows it.
    Text(String),
}

impl SendStream {
    pub(super) fn open(window: u64) -> Self {
        Self {
            in_ring: false,
            parts: VecDeque::new(),
            tail: BytesMut::new(),
            waiting: 0,
            credit: window,
            end: End::Open,
        }
    }

    /// Creates a stream whose first part is its whole body.
    pub(super) fn whole(window: u64) -> Self {
        Self { end: End::Silent, ..Self::open(window) }
    }

    pub(super) fn waiting(&self) -> u64 {
        self.waiting
    }

    pub(super) fn can_send(&self) -> bool {
        self.waiting > 0 && self.credit > 0
    }

    pub(super) fn is_drained_to_its_end(&self) -> bool {
        self.waiting == 0 && !matches!(self.end, End::Open)
    }

    /// Appends a part and returns the number of bytes accepted.
    pub(super) fn push(&mut self, data: Bytes) -> u64 {
        let accepts = match self.end {
            End::Open => true,
            End::Silent => self.waiting == 0,
            End::Text(_) => false,
        };
        if !accepts || data.is_empty() {
            return 0;
        }
        let len = data.len() as u64;
        if data.len() <= SMALL_PART && self.waiting > 0 {
            if self.tail.len() + data.len() > MAX_PIECE_BYTES {
                self.seal_tail();
            }
            self.tail.extend_from_slice(&data);
        } else {
            self.seal_tail();
            self.parts.push_back(data);
        }
        self.waiting += len;
        len
    }

    /// Sets the text that follows the body, and returns the one it replaces.
    pub(super) fn end_with(&mut self, text: String) -> Option<String> {
        match std::mem::replace(&mut self.end, End::Text(text)) {
            End::Text(replaced) => Some(replaced),
            End::Open | End::Silent => None,
        }
    }

    pub(super) fn into_completion(self) -> Option<String> {
        match self.end {
            End::Text(text) => Some(text),
            End::Open | End::Silent => None,
        }
    }

    pub(super) fn add_credit(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_add(bytes);
    }

    /// Returns the next piece, within the credit left.
    pub(super) fn take_piece(&mut self) -> Option<Bytes> {
        if self.parts.is_empty() {
            self.seal_tail();
        }
        let part = self.parts.front_mut()?;
        let most = usize::try_from(self.credit).unwrap_or(usize::MAX).min(MAX_PIECE_BYTES);
        let piece = part.split_to(part.len().min(most));
        if part.is_empty() {
            self.parts.pop_front();
        }
        if piece.is_empty() {
            return None;
        }
        self.waiting -= piece.len() as u64;
        self.credit -= piece.len() as u64;
        Some(piece)
    }

    fn seal_tail(&mut self) {
        if !self.tail.is_empty() {
            self.parts.push_back(self.tail.split().freeze());
        }
    }
}
