//! The order in which the waiting requests of a model would be sent, from which positions are read.
//!
//! Sorting a queue costs far more than any event, and a full queue rejects thousands of requests a second. An order is
//! therefore used for a second; in a long queue for longer, so that sorting takes at most a hundredth of the time. It
//! is replaced earlier once the queue has grown or shrunk by an eighth, which costs each request that comes or goes a
//! constant number of steps. The order of fewer than eight requests is replaced whenever their number changes.

use std::collections::BTreeMap;

use modelrelay_protocol::queue_position::QueuePosition;

use super::clock::{Moment, Span};
use super::event::RequestKey;
use super::flows::FlowId;
use super::owner::{Class, Service};

/// How long an order is used, in addition to [`KEPT_PER_REQUEST`] for each request.
const KEPT: Span = 1_000_000_000;

/// A hundred times the cost of sorting a request, which is less than a microsecond.
const KEPT_PER_REQUEST: Span = 100_000;

/// The part of the queue that may come or go before the order is computed again.
const CHANGED_PART: usize = 8;

/// A waiting request at its place in the order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Start {
    pub(crate) class: Class,
    /// The service that its key will have attained when it is sent.
    pub(crate) service: Service,
    pub(crate) key: RequestKey,
}

/// The waiting requests of a model in their order.
#[derive(Clone, Debug)]
pub(crate) struct QueueOrder {
    sorted_at: Moment,
    starts: Vec<Start>,
    positions: BTreeMap<RequestKey, usize>,
    /// The service that a key will have attained when all its requests of a class and the higher ones are sent.
    ends: BTreeMap<(FlowId, Class), Service>,
}

impl QueueOrder {
    /// Sorts these requests.
    pub(crate) fn new(mut starts: Vec<Start>, ends: BTreeMap<(FlowId, Class), Service>, now: Moment) -> Self {
        starts.sort_unstable();
        let positions = starts.iter().map(|start| start.key).zip(1..).collect();
        Self { sorted_at: now, starts, positions, ends }
    }

    /// True if the order may still be used for a queue of this length.
    pub(crate) fn is_fresh(&self, len: usize, now: Moment) -> bool {
        let sorted = self.starts.len();
        let kept = Span::try_from(sorted).unwrap_or(Span::MAX).saturating_mul(KEPT_PER_REQUEST).saturating_add(KEPT);
        now.since(self.sorted_at) < kept && len.abs_diff(sorted).saturating_mul(CHANGED_PART) <= sorted
    }

    /// The position of each request, from 1.
    pub(crate) fn into_positions(self) -> BTreeMap<RequestKey, usize> {
        self.positions
    }

    /// Returns the position of a request that was sorted.
    pub(crate) fn position(&self, key: RequestKey) -> Option<QueuePosition> {
        let position = self.positions.get(&key)?;
        Some(QueuePosition::behind(position - 1, self.starts.len()))
    }

    /// Returns the service that a key will have attained when all its requests of this class and higher ones are sent.
    /// `None` if none was waiting.
    pub(crate) fn end(&self, flow: FlowId, class: Class) -> Option<Service> {
        let own = (flow, Class::Interactive)..=(flow, class);
        self.ends.range(own).next_back().map(|(_, service)| *service)
    }

    /// Returns the position of a request that was not sorted: behind all that start before it.
    pub(crate) fn position_at(&self, start: Start) -> QueuePosition {
        let ahead = self.starts.partition_point(|other| *other < start);
        QueuePosition::behind(ahead, self.starts.len())
    }
}
