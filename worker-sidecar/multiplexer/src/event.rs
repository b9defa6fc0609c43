//! The events that the actor sends to a slot's machine. Plain data; the time is passed alongside.

use std::time::{Duration, Instant};

pub use modelrelay_protocol::grants::LinkKind;
pub use modelrelay_protocol::message::RequestClass;

use super::Model;
use super::config::SlotConfig;
use super::error::LoadFailure;
use super::memory::Reading;

/// Identifies one link to a relay. A relay that reconnects gets a new key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RelayKey(pub u64);

/// Identifies one request in this process; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestKey(pub u64);

/// Identifies one driver call; never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);

/// Identifies one order of an operator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OrderId(pub u64);

/// The number of successful loads of a slot so far. Each lease belongs to one generation.
pub type Generation = u64;

/// Something that happened outside the machine.
#[derive(Clone, Debug)]
pub enum Event {
    /// The worker has started: find the resident model, and load the default.
    Started,
    /// A link has registered.
    RelayJoined {
        /// The link.
        relay: RelayKey,
        /// The kind of link: it determines if the relay keeps waiting requests itself.
        kind: LinkKind,
    },
    /// A relay sends no more requests over a link: those in its queue go elsewhere, those that arrived are served.
    RelayLeaving {
        /// The link.
        relay: RelayKey,
    },
    /// A link is gone. Its waiting requests are dropped silently, its running requests are cancelled.
    RelayLost {
        /// The link.
        relay: RelayKey,
    },
    /// A request arrived.
    Arrived(Arrival),
    /// A relay reported all requests that wait there for this worker.
    Demand {
        /// The link.
        relay: RelayKey,
        /// The waiting requests; no request waits for a model that is missing here.
        models: Vec<Demand>,
    },
    /// Any other message arrived on a link.
    Heard {
        /// The link.
        relay: RelayKey,
    },
    /// A request is no longer wanted. If it has a lease, it no longer occupies capacity, but [`Event::Released`] still
    /// ends it.
    Cancelled {
        /// The request.
        request: RequestKey,
    },
    /// The holder of a lease has dropped it: the connection to the backend is closed, or can be reused.
    Released {
        /// The request.
        request: RequestKey,
        /// True if the backend responded completely.
        answered: bool,
    },
    /// A driver call has ended.
    Done {
        /// The call.
        op: OpId,
        /// Its outcome.
        outcome: Outcome,
    },
    /// A generation's backend is gone.
    BackendDown {
        /// The generation.
        generation: Generation,
        /// How its end was detected.
        cause: DownCause,
    },
    /// A request could not connect to its backend: probe it.
    ConnectFailed {
        /// The generation of its lease.
        generation: Generation,
    },
    /// An operator's order.
    Ordered {
        /// Identifies the order in its result.
        id: OrderId,
        /// The order.
        order: Order,
    },
    /// The slot's configuration was replaced.
    ConfigChanged(Box<SlotConfig>),
    /// The next load of a model uses different settings.
    ModelChanged {
        /// The model.
        model: Model,
    },
    /// The worker is stopping.
    Stop {
        /// How long running requests may take.
        timeout: Duration,
    },
    /// Time has passed, at least to the result of [`next_timeout`](super::machine::Machine::next_timeout).
    Tick,
}

/// A request that arrived.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The link.
    pub relay: RelayKey,
    /// Its key.
    pub request: RequestKey,
    /// The model's id.
    pub model: Model,
    /// When it arrived at the relay, or here if that is not known.
    pub at: Instant,
    /// Its class.
    pub class: RequestClass,
}

/// The requests that wait at a relay for one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The model.
    pub model: Model,
    /// The number of waiting requests.
    pub waiting: u32,
    /// Age of the oldest one.
    pub oldest: Duration,
    /// Sum of their ages.
    pub sum: Duration,
    /// Their highest class.
    pub class: RequestClass,
    /// The model's place in this relay's fair order, from 0. Models may share a place.
    pub rank: u32,
}

impl Demand {
    /// Returns the demand as it is `by` later.
    #[must_use]
    pub fn aged(&self, by: Duration) -> Self {
        let (oldest, sum) = (self.oldest.saturating_add(by), self.sum.saturating_add(by.saturating_mul(self.waiting)));
        Self { model: Model::clone(&self.model), oldest, sum, ..*self }
    }

    /// Removes one waiting request. Which one is unknown, so it is assumed to have the average age.
    pub fn take_one(&mut self) {
        self.sum -= self.sum / self.waiting.max(1);
        self.waiting = self.waiting.saturating_sub(1);
    }
}

/// The outcome of a driver call.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Of `Preflight`: the measurement, or why the driver cannot work now.
    Preflight(Result<Reading, String>),
    /// Of `Evict`: what is left of the model, or why it could not be unloaded.
    Evicted(Result<Left, String>),
    /// Of `ForceEvict`.
    ForceEvicted(Result<(), String>),
    /// Of `CheckMemory`. A driver that cannot measure memory reports it as freed.
    MemoryChecked {
        /// True if the memory is free.
        freed: bool,
    },
    /// Of `Load`: the right model is ready, or the failure.
    Loaded(Result<(), LoadFailure>),
    /// Of `Probe`.
    Probed(Found),
}

/// The remains of an unloaded model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// A sleeping backend that wakes quickly.
    Asleep,
    /// A sleeping backend that reads its weights again to wake, which takes as long as reading them.
    Emptied,
}

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The backend serves this model.
    Serving(Model),
    /// The backend certainly serves nothing.
    Nothing,
    /// The backend did not respond in time, refused the connection, or is not ready. It may still be running.
    Silence,
}

/// How a backend's end was detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DownCause {
    /// Its process ended, or it reports that it serves nothing.
    Gone,
    /// It no longer responds: it must be killed before its memory can be used.
    Unresponsive,
}

/// An order of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Load the model, unless requests for others wait. Running requests have the drain timeout to end.
    Load(Model),
    /// Unload the model. It is loaded again when it is requested.
    Unload {
        /// The model.
        model: Model,
        /// True to sever running requests at once and, in a quarantined slot, to kill whatever backend it holds.
        now: bool,
    },
    /// Never unload this model for another.
    Pin(Model),
    /// Undo `Pin`.
    Unpin(Model),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_request_reduces_total_by_average_age() {
        let secs = Duration::from_secs;
        let (model, class) = ("a".into(), RequestClass::Normal);
        let mut demand = Demand { model, waiting: 3, oldest: secs(20), sum: secs(30), class, rank: 0 };
        demand.take_one();
        assert_eq!((demand.waiting, demand.sum), (2, secs(20)));
        demand.take_one();
        demand.take_one();
        assert_eq!((demand.waiting, demand.sum), (0, secs(0)));
        demand.take_one();
        assert_eq!((demand.waiting, demand.sum), (0, secs(0)));
    }
}
