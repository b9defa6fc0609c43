//! Draining a worker: it gets no new requests, and finishes its running ones.

use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::grant_step;
use modelrelay_protocol::message::GracefulShutdown;
use tracing::info;

use super::worker::close::Close;
use super::{Provider, ProviderCore};
use crate::dispatch::{AttemptFailure, Event};
use crate::provider::worker::link::WorkerLink;

/// The time that a draining worker may need to disconnect after its own deadline.
const DRAIN_MARGIN: Duration = Duration::from_secs(5);

impl Provider {
    /// Handles a worker's own drain: it gets the barrier, after which no request follows, and the time that it
    /// requested. No request runs longer than the request timeout, so that is the maximum.
    pub fn worker_requested_drain(&self, link: &Arc<WorkerLink>, requested: Option<Duration>) {
        if let Some(requested) = requested {
            link.allow_drain(requested.min(self.config().request_timeout()) + DRAIN_MARGIN);
        }
        self.drain_link(link, GracefulShutdown::DRAIN, None, None);
    }

    /// Drains one worker, at an admin's request or because its secret was removed.
    pub fn drain_worker(&self, link: &Arc<WorkerLink>, reason: &str, close: Option<Close>) {
        let timeout = self.shared.config.load().drain_timeout.as_secs();
        self.drain_link(link, reason, Some(timeout), close);
    }

    pub(super) fn drain_link(&self, link: &Arc<WorkerLink>, reason: &str, timeout: Option<u64>, close: Option<Close>) {
        self.drain_locked(&mut self.lock(), link, reason, timeout, close);
    }

    pub(super) fn drain_locked(
        &self,
        state: &mut ProviderCore,
        link: &Arc<WorkerLink>,
        reason: &str,
        timeout: Option<u64>,
        close: Option<Close>,
    ) {
        info!(provider = %self.name, worker = %link.info.name, worker_id = %link.info.id, reason, "graceful shutdown");
        self.stop_sending(state, link);
        link.begin_drain(reason, timeout, close);
        self.execute_all(state);
        self.arm(state);
    }

    /// Sends no more requests over this link; unwritten ones are requeued.
    pub(super) fn stop_sending(&self, state: &mut ProviderCore, link: &WorkerLink) {
        let worker = link.info.key;
        grant_step!("stops", link.info.id);
        self.handle_quietly(state, Event::WorkerDraining { worker });
        for held in link.take_unwritten() {
            let (request, attempt) = (held.record.key, held.attempt);
            grant_step!("unsends", link.info.id, id = held.request_id);
            held.response().detach(attempt);
            let failure = AttemptFailure::Draining;
            self.handle_quietly(state, Event::AttemptFailed { worker, request, attempt, failure });
        }
    }
}
