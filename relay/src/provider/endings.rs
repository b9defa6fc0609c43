//! The ends of running requests that the relay learns of, with what their keys are charged for them.

use std::time::Instant;

use modelrelay_protocol::grant_step;

use super::{Provider, ProviderCore};
use crate::dispatch::{AttemptFailure, CancelReason, Event, RequestKey};
use crate::provider::request::RequestRecord;
use crate::provider::worker::link::{Attempt, WorkerLink};

impl Provider {
    /// Cancels a request. Has no effect if it has ended already.
    pub fn cancel(&self, request: RequestKey, reason: CancelReason) {
        self.cancel_in(&mut self.lock(), request, reason);
    }

    pub(super) fn cancel_in(&self, state: &mut ProviderCore, request: RequestKey, reason: CancelReason) {
        if let Some(record) = state.requests.get(&request).cloned() {
            self.settle(state, &record);
            self.handle(state, Event::Cancel { request, reason });
        }
    }

    /// Completes the worker's response. The link releases it under the same lock, so that a concurrent loss of the
    /// worker comes entirely before or after it.
    pub fn completed(&self, link: &WorkerLink, held: &Attempt) {
        let tokens = held.record.progress().token_counts;
        let cached = tokens.and_then(|tokens| tokens.cached_permille());
        tokens.iter().for_each(|tokens| link.count_prompt(tokens));
        let usage = held.record.usage();
        let mut state = self.lock();
        link.release(held.stream);
        grant_step!("reads_end", link.info.id, id = held.request_id);
        let (worker, request, attempt) = (link.info.key, held.record.key, held.attempt);
        self.handle(&mut state, Event::Completed { worker, request, attempt, cached, usage });
    }

    /// Fails an attempt of a request of which nothing was sent to the client.
    pub fn attempt_failed(&self, link: &WorkerLink, held: &Attempt, failure: AttemptFailure) {
        let mut state = self.lock();
        link.release(held.stream);
        let (worker, request, attempt) = (link.info.key, held.record.key, held.attempt);
        grant_step!(reply_to(&failure), link.info.id, id = held.request_id);
        held.response().detach(attempt);
        self.handle(&mut state, Event::AttemptFailed { worker, request, attempt, failure });
    }

    /// Settles the charges of the requests that the core ends at their time limit when it handles an event at `now`.
    pub(super) fn settle_running_out(state: &mut ProviderCore, now: Instant) {
        let Some((before, requests)) = state.core.running_out(now) else { return };
        for request in requests {
            if let Some(usage) = state.requests.get(&request).and_then(|record| record.usage()) {
                state.core.handle(Event::Used { request, usage }, before, &mut state.effects);
            }
        }
    }

    /// Settles the charge of a request that is about to end before its worker has completed it.
    pub(super) fn settle(&self, state: &mut ProviderCore, record: &RequestRecord) {
        if let Some(usage) = record.usage() {
            self.handle(state, Event::Used { request: record.key, usage });
        }
    }
}

/// Returns the step of the grants protocol that a failure is.
#[cfg(feature = "simulation")]
fn reply_to(failure: &AttemptFailure) -> &'static str {
    match failure {
        AttemptFailure::AtCapacity => "reads_refusal",
        AttemptFailure::Draining => "reads_draining",
        _ => "reads_end",
    }
}
