//! Places in the queue: how many requests may wait, and which of them a request of a higher class displaces.
//!
//! If the queue is full, or the key's share of it, a request displaces the youngest one of the lowest class that is lower
//! than its own, if that makes room for it. Several are displaced only if their bodies are small.

use crate::dispatch::Dispatch;
use crate::dispatch::model::effect::Failure;
use crate::dispatch::model::event::RequestKey;
use crate::dispatch::model::fairness::Class;
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::request::Request;

/// One of this number of places in the queue is reserved for requests that a worker can serve now.
const SERVED_PART: usize = 10;

impl Dispatch {
    /// Returns the failure of a request that may not wait, even if it displaced others.
    pub(super) fn refuses_place(&self, request: &Request) -> Option<Failure> {
        let reserved = self.is_unserved(request.model) && self.unserved_fill_the_queue();
        if reserved || self.is_full_for(request, request.class) {
            return Some(Failure::QueueFull { retry_after_secs: self.retry_after_secs(self.clock.now) });
        }
        let share = request.new.share.as_ref().filter(|_| self.share_is_full_for(request, request.class))?;
        Some(Failure::QueueShareFull { percent: share.percent })
    }

    /// Displaces requests of lower classes until there is room for this one.
    pub(super) fn make_room_for(&mut self, key: RequestKey) {
        while let Some(displaced) = self.requests.get(&key).and_then(|request| self.displaced_by(request)) {
            let retry_after_secs = self.retry_after_secs(self.clock.now);
            self.dequeue(displaced);
            self.fail(displaced, Failure::Displaced { retry_after_secs });
        }
    }

    /// Returns the next request that has to make room for this one.
    fn displaced_by(&self, request: &Request) -> Option<RequestKey> {
        if self.share_is_full_for(request, Class::Batch) {
            return self.queue.shares.youngest_below(request.new.share.as_ref()?, request.class);
        }
        self.is_full_for(request, Class::Batch).then(|| self.youngest_below(request.class)).flatten()
    }

    /// Returns the youngest request of the lowest class, if that class is lower than this one. The queue is full, so all
    /// lanes are searched rather than kept in order.
    fn youngest_below(&self, class: Class) -> Option<RequestKey> {
        let lanes = self.models.iter().flat_map(|group| group.queue.lanes());
        let lower = lanes.map(|(_, id, lane)| (id.key.class, lane.youngest())).filter(|(lower, _)| *lower > class);
        lower.max()?.1
    }

    /// True if the queue has no room for a request next to those of this class and higher ones.
    fn is_full_for(&self, request: &Request, lowest: Class) -> bool {
        let totals = &self.queue.totals;
        totals.len(lowest) >= self.settings.max_queue_len
            || totals.bytes(lowest).saturating_add(request.new.bytes) > self.settings.max_queue_bytes
    }

    /// The same for the share of its key.
    fn share_is_full_for(&self, request: &Request, lowest: Class) -> bool {
        let is_full = |share| self.queue.shares.is_full_for(share, request.new.bytes, lowest, &self.settings);
        request.new.share.as_ref().is_some_and(is_full)
    }

    /// True if no worker could be sent the model, now or after other requests: a multiplexer has to load it, or its
    /// worker is disconnected.
    fn is_unserved(&self, model: ModelId) -> bool {
        self.models[model].open.is_empty()
    }

    /// True if such requests have filled all but a tenth of the queue, which is reserved for requests that workers can
    /// serve.
    fn unserved_fill_the_queue(&self) -> bool {
        let most = self.settings.max_queue_len - self.settings.max_queue_len / SERVED_PART;
        // They are few unless the queue is nearly full, so they need not be counted.
        if self.queue_len() < most || self.workers.values().all(|worker| worker.draining) {
            return false;
        }
        let unserved = self.models.iter().filter(|group| group.open.is_empty());
        unserved.map(|group| group.queue.waiting().count as usize).sum::<usize>() >= most
    }
}
