//! A worker's connections to the relays that share it: its slots, and its reports about one relay's requests to the
//! others.

use std::sync::Arc;
use std::time::Instant;

use modelrelay_protocol::grants::{Admission, GrantValues, LinkKind, SlotAllocator};
use modelrelay_protocol::homes::HomeTable;
use modelrelay_protocol::message::{ConversationKey, Homes};
use modelrelay_relay::dispatch::{Conversation, Grant};

/// The connections of one worker, by the number of the relay. Slots are divided and reports are made as the worker does
/// it, by the same code.
#[derive(Debug)]
pub struct Links {
    slots: SlotAllocator<usize>,
    homes: HomeTable<usize>,
    /// When each relay's next report is due without a change.
    reports_due: Vec<Option<Instant>>,
    model: Arc<str>,
}

impl Links {
    /// Connects a worker with this number of slots to relays, which may want reports.
    pub fn new(slots: u32, relays: usize, reports: bool, now: Instant) -> Self {
        let (mut slots, mut homes) = (SlotAllocator::new(slots), HomeTable::default());
        for relay in 0..relays {
            slots.add_link(relay, LinkKind::Granted, now);
            homes.attach(relay, reports);
        }
        Self { slots, homes, reports_due: vec![None; relays], model: "model".into() }
    }

    /// Handles a request. Returns the bytes that the conversation's last request did not have, or `None` if the worker
    /// has no slot for it.
    pub fn handle_request(
        &mut self,
        relay: usize,
        (conversation, bytes): (Conversation, u64),
        now: Instant,
    ) -> Option<u64> {
        if self.slots.on_request(relay, now) == Admission::AtCapacity {
            return None;
        }
        let conversation = (ConversationKey(conversation.0), Arc::clone(&self.model));
        Some(self.homes.handle_request(relay, Some(conversation), bytes))
    }

    /// Handles the first token of a response.
    pub fn handle_begun(&mut self, relay: usize, awaited: u64) {
        self.homes.handle_first_byte(relay, awaited);
    }

    /// Handles the end of a response.
    pub fn handle_end(&mut self, relay: usize, now: Instant) {
        self.slots.on_finished(relay, now);
    }

    /// Handles a relay's report of the requests that wait there.
    pub fn handle_demand(&mut self, relay: usize, waiting: u32, now: Instant) {
        self.slots.on_demand(relay, waiting, now);
    }

    /// Handles the timeout of the slots.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.slots.next_timeout().is_some_and(|at| at <= now) {
            self.slots.on_timeout(now);
        }
    }

    /// The grants that have changed, with their relays.
    pub fn next_grants(&mut self) -> Vec<(usize, Grant)> {
        let grant = |(relay, values)| {
            let GrantValues { slots, others, capacity, links } = values;
            (relay, Grant { slots, others, capacity, links })
        };
        self.slots.changes().into_iter().map(grant).collect()
    }

    /// The reports that are due, with their relays.
    pub fn next_reports(&mut self, now: Instant) -> Vec<(usize, Homes)> {
        let report = |(relay, due): (usize, &mut Option<Instant>)| {
            let (report, next) = self.homes.next_report(relay, now);
            *due = next;
            Some((relay, report?))
        };
        self.reports_due.iter_mut().enumerate().filter_map(report).collect()
    }

    /// The next time at which there is something to do without a message.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.slots.next_timeout().into_iter().chain(self.reports_due.iter().copied().flatten()).min()
    }
}

#[cfg(test)]
mod tests {
    use modelrelay_protocol::limits::HOMES_INTERVAL;

    use super::*;

    #[test]
    fn relay_gets_reports_on_other_relay() {
        let now = Instant::now();
        let report = |bytes, backlog| (1, Homes { homes: vec![(ConversationKey(7), bytes)], backlog });
        let mut links = Links::new(2, 2, true, now);
        assert_eq!(links.handle_request(0, (Conversation(7), 100), now), Some(100));
        assert_eq!(links.next_reports(now), [report(100, 100)]);
        assert_eq!(links.handle_request(0, (Conversation(7), 130), now), Some(30));
        links.handle_begun(0, 100);
        assert_eq!(links.next_reports(now), []);
        let due = now + HOMES_INTERVAL;
        assert_eq!(links.next_timeout(), Some(due));
        assert_eq!(links.next_reports(due), [report(130, 30)]);
        assert_eq!(links.next_reports(due + HOMES_INTERVAL), []);
        assert_eq!(links.next_timeout(), None);
    }

    #[test]
    fn relay_without_reports_learns_nothing() {
        let now = Instant::now();
        let mut links = Links::new(2, 2, false, now);
        assert_eq!(links.handle_request(0, (Conversation(7), 100), now), Some(100));
        assert_eq!((links.next_reports(now), links.next_timeout()), (Vec::new(), None));
    }

    #[test]
    fn request_beyond_slots_is_refused() {
        let now = Instant::now();
        let mut links = Links::new(1, 2, true, now);
        assert_eq!(links.handle_request(0, (Conversation(1), 10), now), Some(10));
        assert_eq!(links.handle_request(1, (Conversation(2), 10), now), None);
        links.handle_end(0, now);
        assert_eq!(links.handle_request(1, (Conversation(2), 10), now), Some(10));
    }
}
