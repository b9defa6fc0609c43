//! The observations of all hosts, in chronological order.

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
    /// The time since the start.
    pub at: Duration,
    /// The event.
    pub event: Event,
}

/// The kinds of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A client sends a request.
    Sent {
        /// The request.
        nonce: usize,
    },
    /// A client has the first byte of a response's body whose status is 200.
    FirstByte {
        /// The request.
        nonce: usize,
    },
    /// A client's request ended.
    Ended {
        /// The request.
        nonce: usize,
        /// The result.
        how: Ending,
    },
    /// A backend begins to work on a request.
    Began {
        /// The request.
        nonce: usize,
        /// The worker of the backend.
        worker: usize,
        /// The number of this backend's execution.
        execution: usize,
    },
    /// A backend has finished an execution, or its connection is gone.
    Finished {
        /// The worker of the backend.
        worker: usize,
        /// The number of this backend's execution.
        execution: usize,
    },
    /// A violation that was detected immediately.
    Wrong(String),
    /// A host starts, for the first time or again.
    Started(String),
    /// A host is gone: killed or ended.
    Gone(String),
    /// A fault begins.
    Fault(String),
}

/// How a client's request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// A complete response.
    Answered,
    /// The backend's own error.
    BackendError,
    /// A relay's error, by its code, instead of a response.
    Failed(String),
    /// An error frame after a part of the response: its code, or its message without one.
    BrokenStream(String),
    /// The body ended prematurely after a part of the response.
    BrokenOff,
    /// The client disconnected.
    Left,
    /// There was no connection, or it broke without a response.
    Unconnected,
    /// Nothing more arrived.
    Hung,
}

impl Ending {
    /// True if the body may have ended, also after an error frame, so that its connection is reused.
    pub fn keeps_the_connection(&self) -> bool {
        matches!(self, Self::Answered | Self::BackendError | Self::Failed(_) | Self::BrokenStream(_))
    }
}

impl Ledger {
    /// Records an event at the current time.
    pub fn note(&self, event: Event) {
        self.0.borrow_mut().push(Entry { at: determinism::elapsed(), event });
    }

    /// Returns all events.
    pub fn entries(&self) -> Vec<Entry> {
        self.0.borrow().clone()
    }
}
