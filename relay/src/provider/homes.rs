//! Reports from workers about the conversations of other relays.

use modelrelay_protocol::message::Homes;

use super::Provider;
use crate::dispatch::{Conversation, Event};
use crate::provider::worker::link::WorkerLink;

impl Provider {
    /// Records the conversations that other relays have sent to a worker, and the bytes that wait there.
    pub fn homes_reported(&self, link: &WorkerLink, report: &Homes) {
        link.pace_homes();
        let homes = report.homes.iter().map(|(key, bytes)| (Conversation(key.0), *bytes)).collect();
        self.apply(Event::HomesReported { worker: link.info.key, homes, backlog: report.backlog });
    }
}
