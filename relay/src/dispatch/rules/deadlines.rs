//! Timeouts of waiting and running requests.

use crate::dispatch::Dispatch;
use crate::dispatch::model::clock::{Axis, Moment, duration};
use crate::dispatch::model::effect::Failure;
use crate::dispatch::model::event::{CancelReason, RequestKey};
use crate::dispatch::model::queue::{Expired, LaneRef};
use crate::dispatch::model::request::{Expiry, LastFailure};

impl Dispatch {
    /// Returns when the next deadline expires or the next demand report is due.
    pub(in super::super) fn next_moment(&self) -> Option<Moment> {
        let running = self.running.first().map(|(due, _)| *due);
        let marked = self.marked.first().map(|(at, _)| *at);
        let assignment = self.models.assignment_dues.first().map(|(due, _)| *due);
        self.queue.next_due().into_iter().chain(running).chain(marked).chain(assignment).min()
    }

    /// Ends all requests whose time is over. Waiting requests first: an expired deadline is not undone by the slot that
    /// another request frees in the same instant.
    pub(in super::super) fn expire(&mut self) {
        loop {
            if let Some((_, lane)) = self.queue.dues.first().filter(|(due, _)| *due <= self.clock.now) {
                self.expire_waiting(*lane);
            } else if let Some((_, key)) = self.running.first().filter(|(due, _)| *due <= self.clock.now) {
                self.expire_running(*key);
                self.settle();
            } else {
                return;
            }
        }
    }

    fn expire_waiting(&mut self, (model, lane): LaneRef) {
        let Some(Expired { key, axis }) = self.models[model].queue.expired(lane, self.clock.now) else {
            self.refresh_lane(model, lane);
            return;
        };
        let expiry = match axis {
            Axis::Warm => self.requests.get(&key).map_or(Expiry::Waiting, |request| request.warm_failure()),
            Axis::Cold | Axis::Wall => Expiry::Waiting,
        };
        self.expire_queued(key, expiry);
    }

    /// Ends a waiting request. If its backend was unreachable, or its model could not be loaded, that is the reason:
    /// the timeout only shows that the problem lasted.
    fn expire_queued(&mut self, key: RequestKey, expiry: Expiry) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let last_failure = request.last_failure.as_ref().map(LastFailure::failure);
        let waits = self.waits_for_load(&self.models[request.model], request.new.pin, &request.lane());
        let loading = waits.then(|| self.eta(request.model, request.new.pin).map(duration));
        let position = self.position(key, self.clock.now);
        self.dequeue(key);
        let failure = match (last_failure, expiry) {
            (Some(failure), _) => failure,
            (None, Expiry::Request) => Failure::RequestTimeout,
            (None, Expiry::Waiting) => match loading {
                Some(retry_after) => Failure::ModelLoading { retry_after },
                None => Failure::QueueTimeout { retry_after_secs: self.retry_after_secs(self.clock.now) },
            },
        };
        self.fail_at(key, failure, position);
    }

    fn expire_running(&mut self, key: RequestKey) {
        self.revoke(key, CancelReason::Timeout);
        self.fail(key, Failure::RequestTimeout);
    }
}
