//! What the actor tells a slot's machine. Plain data; times come in beside the event.

use std::time::{Duration, Instant};

pub use modelrelay_protocol::grants::LinkKind;

use super::Model;
use super::config::SlotConfig;
use super::error::LoadFailure;
use super::memory::Reading;

/// Names one link to a relay. A relay that was lost and comes back has a new one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RelayKey(pub u64);

/// Names one request in this process; never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestKey(pub u64);

/// Names one call of the driver; never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u64);

/// Names one order of an operator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OrderId(pub u64);

/// Counts successful loads of a slot. A lease belongs to one.
pub type Generation = u64;

/// Something that happened outside the machine.
#[derive(Clone, Debug)]
pub enum Event {
    /// The worker has begun: find out what is resident, and load the default.
    Started,
    /// A link has registered.
    RelayJoined {
        /// The link.
        relay: RelayKey,
        /// Whether its relay keeps waiting requests itself.
        kind: LinkKind,
    },
    /// A relay sends nothing more over a link: what it has queued goes elsewhere, what has come is served.
    RelayLeaving {
        /// The link.
        relay: RelayKey,
    },
    /// A link is gone. What it had waiting here is forgotten without a word, what it has running is cancelled.
    RelayLost {
        /// The link.
        relay: RelayKey,
    },
    /// A request was read.
    Arrived(Arrival),
    /// A relay says what waits there for this worker: all of it.
    Demand {
        /// The link.
        relay: RelayKey,
        /// What waits; a model that is not here has nothing waiting.
        models: Vec<Demand>,
    },
    /// Any other message was read on a link.
    Heard {
        /// The link.
        relay: RelayKey,
    },
    /// A request is wanted no more. One that has its lease takes no place from now on; [`Event::Released`] still ends it.
    Cancelled {
        /// The request.
        request: RequestKey,
    },
    /// The holder of a lease has dropped it: the connection to the backend is closed, or can be used again.
    Released {
        /// The request.
        request: RequestKey,
        /// Whether the backend answered it to the end.
        answered: bool,
    },
    /// A call of the driver has ended.
    Done {
        /// The call.
        op: OpId,
        /// How.
        outcome: Outcome,
    },
    /// A generation's backend is gone.
    BackendDown {
        /// The generation.
        generation: Generation,
        /// How that was seen.
        cause: DownCause,
    },
    /// A request found nobody at its backend: time to look.
    ConnectFailed {
        /// The generation of its lease.
        generation: Generation,
    },
    /// An operator's order.
    Ordered {
        /// Names the answer.
        id: OrderId,
        /// What to do.
        order: Order,
    },
    /// The slot's configuration was replaced.
    ConfigChanged(Box<SlotConfig>),
    /// The next load of a model uses other settings.
    ModelChanged {
        /// The model.
        model: Model,
    },
    /// The worker ends.
    Stop {
        /// How long running requests may take.
        timeout: Duration,
    },
    /// Time has passed, to at least what [`next_timeout`](super::machine::Machine::next_timeout) said.
    Tick,
}

/// A request that was read.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The link.
    pub relay: RelayKey,
    /// Its name.
    pub request: RequestKey,
    /// The model, by its id.
    pub model: Model,
    /// When it came to the relay, or if that is not known, here.
    pub at: Instant,
}

/// What waits at a relay for one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The model.
    pub model: Model,
    /// Requests.
    pub waiting: u32,
    /// Age of the oldest.
    pub oldest: Duration,
    /// Sum of their ages.
    pub sum: Duration,
}

impl Demand {
    /// The same, a little later.
    #[must_use]
    pub fn aged(&self, by: Duration) -> Self {
        let (oldest, sum) = (self.oldest.saturating_add(by), self.sum.saturating_add(by.saturating_mul(self.waiting)));
        Self { model: Model::clone(&self.model), waiting: self.waiting, oldest, sum }
    }

    /// One of them waits no more. Which one is not known, so it was as old as most.
    pub fn take_one(&mut self) {
        self.sum -= self.sum / self.waiting.max(1);
        self.waiting = self.waiting.saturating_sub(1);
    }
}

/// How a call of the driver ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Of `Preflight`: what was measured, or why the driver can do nothing now.
    Preflight(Result<Reading, String>),
    /// Of `Evict`: what is left of the model, or why it could not be unloaded.
    Evicted(Result<Left, String>),
    /// Of `ForceEvict`.
    ForceEvicted(Result<(), String>),
    /// Of `CheckMemory`: whether it is back, which a driver that cannot see it answers with yes.
    MemoryChecked {
        /// Whether it is.
        freed: bool,
    },
    /// Of `Load`: ready, and the right model.
    Loaded(Result<(), LoadFailure>),
    /// Of `Probe`.
    Probed(Found),
}

/// What is left of an unloaded model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// A sleeping backend that is quickly woken.
    Asleep,
    /// A sleeping backend that reads its weights again to wake, which takes as long as that takes.
    Emptied,
}

/// What a look at the backend found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It serves this one.
    Serving(Model),
    /// Nothing is there, and that is certain.
    Nothing,
    /// It did not answer in time, refused the connection, or is not ready: it may still be there.
    Silence,
}

/// How a backend's end was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DownCause {
    /// Its process ended, or it says itself that it serves nothing.
    Gone,
    /// It does not answer any more: it has to be killed before its memory can be used.
    Unresponsive,
}

/// What an operator wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Make it resident, unless requests for others wait. Those that run have the drain timeout.
    Load(Model),
    /// Unload it. It comes back when it is asked for.
    Unload {
        /// The model.
        model: Model,
        /// Whether running requests are severed at once. In a quarantined slot: kill the backend, whatever is in it.
        now: bool,
    },
    /// Never unload it for another.
    Pin(Model),
    /// As before.
    Unpin(Model),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_waits_no_more_was_as_old_as_the_others() {
        let secs = Duration::from_secs;
        let mut demand = Demand { model: "a".into(), waiting: 3, oldest: secs(20), sum: secs(30) };
        demand.take_one();
        assert_eq!((demand.waiting, demand.sum), (2, secs(20)));
        demand.take_one();
        demand.take_one();
        assert_eq!((demand.waiting, demand.sum), (0, secs(0)));
        demand.take_one();
        assert_eq!((demand.waiting, demand.sum), (0, secs(0)));
    }
}
