//! The keys of conversations, and reports from workers about the conversations of other relays.

use std::sync::Arc;

use modelrelay_protocol::message::Homes;

use super::Provider;
use super::conversation::HashKey;
use crate::dispatch::{Conversation, Event};
use crate::provider::worker::link::WorkerLink;
use crate::settings::config::ProviderConfig;

impl Provider {
    /// The secret key with which its conversations are hashed.
    pub fn conversation_key(&self) -> HashKey {
        **self.conversation_key.load()
    }

    /// Derives that key from new settings. Without a secret, the previous one stays.
    pub(super) fn renew_conversation_key(&self, config: &ProviderConfig) {
        if let Some(key) = HashKey::of_provider(config) {
            self.conversation_key.store(Arc::new(key));
        }
    }

    /// Records the conversations that other relays have sent to a worker, and the bytes that wait there.
    pub fn homes_reported(&self, link: &WorkerLink, report: &Homes) {
        link.pace_homes();
        let homes = report.homes.iter().map(|(key, bytes)| (Conversation(key.0), *bytes)).collect();
        self.apply(Event::HomesReported { worker: link.info.key, homes, backlog: report.backlog });
    }
}
