//! A worker's connections to the relays that share it: its slots, and its reports about one relay's requests to the
//! others.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use modelrelay_protocol::grants::{Admission, GrantValues, LinkKind, SlotAllocator};
use modelrelay_protocol::limits::HOMES_INTERVAL;
use modelrelay_relay::dispatch::{Conversation, Grant};

/// Conversations with the size of each one's last body, and the bytes whose response has not begun.
pub type Report = (Vec<(Conversation, u64)>, u64);

/// The connections of one worker. The slots are divided as the worker divides them, by the same code.
#[derive(Debug)]
pub struct Links {
    slots: SlotAllocator<usize>,
    /// By relay.
    links: Vec<Link>,
    /// The size of each conversation's last body.
    bodies: HashMap<Conversation, u64>,
}

#[derive(Clone, Debug, Default)]
struct Link {
    /// Bytes of this relay's requests whose response has not begun.
    awaited: u64,
    /// Conversations of other relays that are not reported to this one yet.
    homes: BTreeMap<Conversation, u64>,
    /// The backlog of the last report, and its time.
    reported: (u64, Option<Instant>),
}

impl Links {
    /// Connects a worker with this number of slots to relays.
    pub fn new(slots: u32, relays: usize, now: Instant) -> Self {
        let mut slots = SlotAllocator::new(slots);
        for relay in 0..relays {
            slots.add_link(relay, LinkKind::Granted, now);
        }
        Self { slots, links: vec![Link::default(); relays], bodies: HashMap::new() }
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
        let known = self.bodies.insert(conversation, bytes).unwrap_or(0);
        let awaited = bytes.saturating_sub(known);
        for (other, link) in self.links.iter_mut().enumerate() {
            if other == relay {
                link.awaited += awaited;
            } else {
                link.homes.insert(conversation, bytes);
            }
        }
        Some(awaited)
    }

    /// Handles the first token of a response.
    pub fn handle_begun(&mut self, relay: usize, awaited: u64) {
        self.links[relay].awaited -= awaited;
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
    pub fn next_reports(&mut self, now: Instant) -> Vec<(usize, Report)> {
        let due: Vec<_> = self.due_reports().filter(|(_, due)| due.is_none_or(|due| due <= now)).collect();
        let report = |(relay, _)| {
            let backlog = self.backlog_except(relay);
            let link: &mut Link = &mut self.links[relay];
            link.reported = (backlog, Some(now));
            (relay, (std::mem::take(&mut link.homes).into_iter().collect(), backlog))
        };
        due.into_iter().map(report).collect()
    }

    /// The next time at which there is something to do without a message.
    pub fn next_timeout(&self, reports: bool) -> Option<Instant> {
        let reports = self.due_reports().filter(|_| reports).filter_map(|(_, due)| due).min();
        self.slots.next_timeout().into_iter().chain(reports).min()
    }

    /// The relays for which there is a report, with the time at which it may be sent; `None`: at once.
    fn due_reports(&self) -> impl Iterator<Item = (usize, Option<Instant>)> {
        let links = self.links.iter().enumerate();
        let changed =
            links.filter(|(relay, link)| !link.homes.is_empty() || self.backlog_except(*relay) != link.reported.0);
        changed.map(|(relay, link)| (relay, link.reported.1.map(|at| at + HOMES_INTERVAL)))
    }

    fn backlog_except(&self, relay: usize) -> u64 {
        let others = self.links.iter().enumerate().filter(|(other, _)| *other != relay);
        others.map(|(_, link)| link.awaited).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relay_gets_reports_on_other_relay() {
        let now = Instant::now();
        let mut links = Links::new(2, 2, now);
        assert_eq!(links.handle_request(0, (Conversation(7), 100), now), Some(100));
        assert_eq!(links.next_reports(now), [(1, (vec![(Conversation(7), 100)], 100))]);
        assert_eq!(links.handle_request(0, (Conversation(7), 130), now), Some(30));
        links.handle_begun(0, 100);
        assert_eq!(links.next_reports(now), []);
        let due = now + HOMES_INTERVAL;
        assert_eq!((links.next_timeout(true), links.next_timeout(false)), (Some(due), None));
        assert_eq!(links.next_reports(due), [(1, (vec![(Conversation(7), 130)], 30))]);
        assert_eq!(links.next_timeout(true), None);
    }

    #[test]
    fn request_beyond_slots_is_refused() {
        let now = Instant::now();
        let mut links = Links::new(1, 2, now);
        assert_eq!(links.handle_request(0, (Conversation(1), 10), now), Some(10));
        assert_eq!(links.handle_request(1, (Conversation(2), 10), now), None);
        links.handle_end(0, now);
        assert_eq!(links.handle_request(1, (Conversation(2), 10), now), Some(10));
    }
}
