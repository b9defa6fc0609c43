//! Requests whose worker sends nothing: an engine that hangs while its health check succeeds.
//!
//! Such a request is moved to another worker, but only if that one has room now: a worker that reads a long prompt is
//! as silent as one that hangs, so its work is not thrown away for a place in the queue. Each move spends one of the
//! three requeues, and goes to a worker that the request was not revoked from before.

use crate::dispatch::Dispatch;
use crate::dispatch::model::effect::{Effect, RequeueReason};
use crate::dispatch::model::event::{CancelReason, RequestKey, WorkerKey};
use crate::dispatch::model::registry::Worker;
use crate::dispatch::model::request::{MAX_REQUEUES, RequestState};

impl Dispatch {
    /// Returns the attempt that [`Event::Silent`](crate::dispatch::Event::Silent) would end: that of a running request
    /// which another worker can serve now.
    pub fn can_move(&self, request: RequestKey) -> Option<u32> {
        self.worker_to_move_to(request)?;
        self.requests.get(&request).map(|request| request.attempts)
    }

    fn worker_to_move_to(&self, key: RequestKey) -> Option<WorkerKey> {
        let request = self.requests.get(&key)?;
        let RequestState::Running { worker: silent, .. } = request.state else { return None };
        if request.new.pin.is_some() || request.requeues == MAX_REQUEUES || self.refuses_waiting().is_some() {
            return None;
        }
        let suits =
            |worker: &Worker| worker.key != silent && !request.silent.contains(&worker.key) && !request.refuses(worker);
        self.best_of(request, suits)
    }

    pub(in super::super) fn handle_silent(&mut self, key: RequestKey) {
        let Some(to) = self.worker_to_move_to(key) else { return };
        self.revoke(key, CancelReason::Timeout);
        let Some(request) = self.requests.get_mut(&key) else { return };
        let RequestState::Running { worker: silent, .. } = request.state else { return };
        request.requeues += 1;
        request.silent.push(silent);
        request.state = RequestState::Queued { place: None, since: self.clock.now, cold_start: 0 };
        self.out.push(Effect::Requeued {
            request: key,
            reason: RequeueReason::FirstByteTimeout,
            attempt: request.attempts,
        });
        self.return_charge(key);
        self.send(key, to);
    }
}
