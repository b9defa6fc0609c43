//! A worker moves to another link: the newer one gets all that is new, the older one finishes what it has.
//!
//! The two are sockets of their own, and nothing orders what is written to one after what is written to the other. An idle
//! older link could be closed before the worker has read that the newer one is good, and a worker that loses its only
//! link gives up the one that it is making. So the older one is told to go at the newer one's first grant, which no worker
//! sends before it has read its acknowledgement.

use std::sync::Arc;

use modelrelay_protocol::message::GracefulShutdown;

use super::{Provider, State};
use crate::dispatch::{Event, WorkerKey};
use crate::socket::link::WorkerLink;
use crate::socket::session::DRAINED;

impl Provider {
    /// `newer` takes the place of `older`, which is sent nothing more.
    pub(super) fn begin_succession(&self, state: &mut State, older: &Arc<WorkerLink>, newer: &WorkerLink) {
        let newer_key = newer.info.key;
        self.handle_quietly(state, Event::WorkerSucceeded { older: older.info.key, newer: newer_key });
        self.stop_sending(state, older);
        self.execute_all(state);
        self.arm(state);
        state.succeeded.insert(newer_key, Arc::clone(older));
        if !newer.info.core1 {
            // It will never grant anything.
            self.end_succession(state, newer_key);
        }
    }

    /// The newer link has spoken, or is lost: the older one goes once it is idle.
    pub(super) fn end_succession(&self, state: &mut State, newer: WorkerKey) {
        let Some(older) = state.succeeded.remove(&newer) else { return };
        if older.draining_since().is_some() || !state.links.contains_key(&older.info.key) {
            return;
        }
        // Whatever runs there was let in by a link as good as the newer one.
        let time = self.shared.config.load().drain_timeout.max(self.config().request_timeout());
        older.allow_drain(time);
        self.drain_locked(state, &older, GracefulShutdown::SUCCEEDED, Some(time.as_secs()), Some(DRAINED));
    }
}
