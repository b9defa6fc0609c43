//! Moves a worker to another link: the newer link gets all new requests, the older one finishes its own.
//!
//! The two are separate sockets, and no order exists between writes to one and to the other. If an idle older link were
//! closed before the worker has read that the newer one was accepted, the worker would lose its only link and give up
//! the one that it is establishing. So the older link is drained at the newer one's first grant, which no worker sends
//! before it has read its acknowledgement.

use std::sync::Arc;

use modelrelay_protocol::message::GracefulShutdown;

use super::worker::close::DRAINED;
use super::{Provider, ProviderCore};
use crate::dispatch::{Event, WorkerKey};
use crate::provider::worker::link::WorkerLink;

impl Provider {
    /// Makes `newer` the successor of `older`, which is sent no more requests.
    pub(super) fn begin_succession(&self, state: &mut ProviderCore, older: &Arc<WorkerLink>, newer: &WorkerLink) {
        let newer_key = newer.info.key;
        self.handle_quietly(state, Event::WorkerSucceeded { older: older.info.key, newer: newer_key });
        self.stop_sending(state, older);
        self.execute_all(state);
        self.arm(state);
        state.succeeded.insert(newer_key, Arc::clone(older));
        if !newer.info.core1 {
            // It will never send a grant.
            self.end_succession(state, newer_key);
        }
    }

    /// Drains the older link once the newer one has sent a grant, or is lost.
    pub(super) fn end_succession(&self, state: &mut ProviderCore, newer: WorkerKey) {
        let Some(older) = state.succeeded.remove(&newer) else { return };
        if older.draining_since().is_some() || !state.links.contains_key(&older.info.key) {
            return;
        }
        // The requests there were admitted by a link as valid as the newer one.
        let time = self.shared.config.load().drain_timeout.max(self.config().request_timeout());
        older.allow_drain(time);
        self.drain_locked(state, &older, GracefulShutdown::SUCCEEDED, Some(time.as_secs()), Some(DRAINED));
    }
}
