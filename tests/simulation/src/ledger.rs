//! What everybody saw, in the order in which it happened.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use crate::determinism;

/// Shared by all hosts of a simulation, which run on one thread.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Rc<RefCell<Vec<Entry>>>);

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// When, since the begin.
    pub at: Duration,
    /// What.
    pub event: Event,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A client asks.
    Sent {
        /// Which request.
        nonce: usize,
    },
    /// A client has the first byte of an answer's body whose status is 200.
    FirstByte {
        /// Which request.
        nonce: usize,
    },
    /// A client's request ended.
    Ended {
        /// Which request.
        nonce: usize,
        /// How.
        how: Ending,
    },
    /// A backend begins to work on a request.
    Began {
        /// Which request.
        nonce: usize,
        /// Whose backend.
        worker: usize,
        /// Of this backend's work.
        execution: usize,
    },
    /// A backend is done with it, or its connection is gone.
    Finished {
        /// Whose backend.
        worker: usize,
        /// Of this backend's work.
        execution: usize,
    },
    /// Something that must not be, seen at once.
    Wrong(String),
    /// A host starts, again or for the first time.
    Started(String),
    /// A host is gone: killed, or at its end.
    Gone(String),
    /// A fault begins.
    Fault(String),
}

/// How a client's request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The whole answer.
    Answered,
    /// The backend's own error.
    BackendError,
    /// A relay's error, by its code, in place of an answer.
    Failed(String),
    /// An error frame's code, or its message where it has none, behind a part of the answer.
    BrokenStream(String),
    /// The body broke off behind a part of the answer.
    BrokenOff,
    /// The client left.
    Left,
    /// There was no connection, or it broke without an answer.
    Unconnected,
    /// Nothing more came.
    Hung,
}

impl Ending {
    /// Whether the body may have come to its end, also behind an error frame, so that its connection is used again.
    pub fn keeps_the_connection(&self) -> bool {
        matches!(self, Self::Answered | Self::BackendError | Self::Failed(_) | Self::BrokenStream(_))
    }
}

impl Ledger {
    /// Notes what happens now.
    pub fn note(&self, event: Event) {
        self.0.borrow_mut().push(Entry { at: determinism::elapsed(), event });
    }

    /// All of it.
    pub fn entries(&self) -> Vec<Entry> {
        self.0.borrow().clone()
    }
}
