//! Policies that choose the worker of a request.

use std::collections::BTreeMap;

use modelrelay_relay::dispatch::Placement;

use super::Time;
use super::cases::Case;
use super::relays::{Relays, Sharing};
use super::rivals::oracle::Oracle;
use super::rivals::{BoundedHash, Immediate, PrefixTree};
use super::worker::Served;
use super::workload::Turn;

/// A request that was sent to a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sent {
    /// The request: requests are numbered in the order of their arrival.
    pub id: usize,
    /// The worker.
    pub worker: usize,
}

/// Decides when requests are sent, and to which worker.
pub trait Router {
    /// Handles an arrived request. Appends the requests that are sent now, as the other methods do.
    fn arrive(&mut self, id: usize, turn: &Turn, now: Time, sent: &mut Vec<Sent>);
    /// Handles the first token of a response.
    fn begin(&mut self, _id: usize, _now: Time, _sent: &mut Vec<Sent>) {}
    /// Handles the end of a response.
    fn end(&mut self, id: usize, turn: &Turn, served: &Served, now: Time, sent: &mut Vec<Sent>);
    /// Handles the timeout.
    fn tick(&mut self, _now: Time, _sent: &mut Vec<Sent>) {}
    /// The next timeout.
    fn next_timeout(&self) -> Option<Time> {
        None
    }
    /// The number of requests that were sent while an earlier one waited.
    fn overtakes(&self) -> u64 {
        0
    }
    /// The number of requests that the policy did not send to their conversation's home, by reason.
    fn reasons(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }
}

/// A policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// The relay's core, by load.
    LeastLoad,
    /// The relay's core, by cache.
    Cache,
    /// Two relays' cores, by cache, which know only their own requests.
    TwoApart,
    /// Two relays' cores, by cache, with reports of the workers to each about the other's requests.
    TwoReported,
    /// Consistent hashing with bounded loads.
    BoundedHash,
    /// The rule of sglang's router.
    PrefixTree,
    /// One relay that knows each worker's cache and the end of its computations.
    Oracle,
}

impl Policy {
    /// All policies, in the table's order.
    pub const ALL: [Self; 7] = [
        Self::LeastLoad,
        Self::Cache,
        Self::TwoApart,
        Self::TwoReported,
        Self::BoundedHash,
        Self::PrefixTree,
        Self::Oracle,
    ];

    /// The name on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::LeastLoad => "least-load",
            Self::Cache => "cache",
            Self::TwoApart => "cache-2-apart",
            Self::TwoReported => "cache-2",
            Self::BoundedHash => "chwbl",
            Self::PrefixTree => "sglang",
            Self::Oracle => "oracle",
        }
    }

    /// Starts the policy with the workers of a case.
    pub fn start(self, case: &Case, seed: u64) -> Box<dyn Router> {
        match self {
            Self::LeastLoad => Box::new(Relays::new(Placement::LeastLoad, Sharing::One, case, seed)),
            Self::Cache => Box::new(Relays::new(Placement::Cache, Sharing::One, case, seed)),
            Self::TwoApart => Box::new(Relays::new(Placement::Cache, Sharing::Apart, case, seed)),
            Self::TwoReported => Box::new(Relays::new(Placement::Cache, Sharing::Reported, case, seed)),
            Self::BoundedHash => Box::new(Immediate::new(BoundedHash::new(case.workers))),
            Self::PrefixTree => Box::new(Immediate::new(PrefixTree::new(case.workers))),
            Self::Oracle => Box::new(Oracle::new(case)),
        }
    }
}
