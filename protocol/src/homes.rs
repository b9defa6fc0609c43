//! What a worker remembers of conversations, and reports to each of the relays that share it.
//!
//! - A report to a relay has the conversations that *other* links have sent since its last report, the oldest first,
//!   and the backlog of the other links. It is sent only if something changed, and at most every [`HOMES_INTERVAL`].
//! - The number of conversations is bounded; the one without a request for the longest time is dropped.
//! - A conversation counts while its model stays loaded. A swap is not reported here: relays read of it in `slots`.

#![warn(clippy::disallowed_types, clippy::iter_over_hash_type)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use crate::limits::{HOMES_INTERVAL, MAX_HOMES_PER_MESSAGE};
use crate::message::{ConversationKey, Homes};

/// Conversations of one worker: many times as many as its cache has room for. About a megabyte.
const MAX_CONVERSATIONS: usize = 10_000;

/// The most conversations that a new link gets.
const MAX_FOR_NEW_LINK: usize = 4096;

/// The loads of models that are in place, each with the slot, its number there, and the model; `None`: all models.
pub type ModelLoads = BTreeSet<(String, u64, Option<Arc<str>>)>;

/// The conversations of a worker, by the link of each one's last request. `L` identifies a link.
#[derive(Debug)]
pub struct HomeTable<L> {
    conversations: HashMap<ConversationKey, Home<L>>,
    /// The same by the number of their last requests.
    order: BTreeMap<u64, ConversationKey>,
    /// The number of the last request.
    last: u64,
    loads: ModelLoads,
    links: BTreeMap<L, LinkBytes>,
}

#[derive(Debug)]
struct Home<L> {
    number: u64,
    /// The length of the last body.
    bytes: u64,
    /// The link of the last request.
    from: L,
    model: Arc<str>,
}

#[derive(Debug)]
struct LinkBytes {
    /// The bytes of its requests of whose responses no byte has come.
    awaited: u64,
    /// The reports, if its relay wants them.
    reports: Option<SentReports>,
}

#[derive(Debug)]
struct SentReports {
    /// The number of the last request that they cover.
    covered: u64,
    backlog: u64,
    at: Option<Instant>,
}

impl<L> Default for HomeTable<L> {
    fn default() -> Self {
        Self {
            conversations: HashMap::new(),
            order: BTreeMap::new(),
            last: 0,
            loads: ModelLoads::new(),
            links: BTreeMap::new(),
        }
    }
}

impl<L: Copy + Ord> HomeTable<L> {
    /// Adds a link; with `reports`, its relay wants them, and first gets the newest conversations.
    pub fn attach(&mut self, link: L, reports: bool) {
        let covered = self.order.keys().rev().nth(MAX_FOR_NEW_LINK).copied().unwrap_or(0);
        let reports = reports.then_some(SentReports { covered, backlog: 0, at: None });
        self.links.insert(link, LinkBytes { awaited: 0, reports });
    }

    /// Removes a link, whose requests have ended.
    pub fn detach(&mut self, link: L) {
        self.links.remove(&link);
    }

    /// A request with a body of this length arrived; `conversation` is its key and its model's id, if it has a key.
    /// Returns the bytes that wait for their computation: those that the conversation's last request did not have.
    pub fn handle_request(&mut self, link: L, conversation: Option<(ConversationKey, Arc<str>)>, bytes: u64) -> u64 {
        let known = conversation.and_then(|(key, model)| self.record(key, model, link, bytes));
        let awaited = bytes.saturating_sub(known.unwrap_or(0));
        if let Some(link) = self.links.get_mut(&link) {
            link.awaited = link.awaited.saturating_add(awaited);
        }
        awaited
    }

    /// Makes a conversation the newest, and returns the length of its last body.
    fn record(&mut self, key: ConversationKey, model: Arc<str>, from: L, bytes: u64) -> Option<u64> {
        self.last += 1;
        self.order.insert(self.last, key);
        let former = self.conversations.insert(key, Home { number: self.last, bytes, from, model });
        if let Some(former) = &former {
            self.order.remove(&former.number);
        } else if self.order.len() > MAX_CONVERSATIONS
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.conversations.remove(&oldest);
        }
        former.map(|former| former.bytes)
    }

    /// The first byte of a response came, or its request ended.
    pub fn handle_first_byte(&mut self, link: L, awaited: u64) {
        if let Some(link) = self.links.get_mut(&link) {
            link.awaited = link.awaited.saturating_sub(awaited);
        }
    }

    /// Replaces the loads of models. The conversations of a load that is gone are removed: its cache is gone, too.
    pub fn handle_loads(&mut self, loads: ModelLoads) {
        if loads == self.loads {
            return;
        }
        let former = std::mem::replace(&mut self.loads, loads);
        for (_, _, model) in former.difference(&self.loads) {
            let Self { conversations, order, .. } = self;
            order.retain(|_, key| {
                let is_gone = |home: &Home<L>| model.as_ref().is_none_or(|model| *model == home.model);
                let stays = !conversations.get(key).is_none_or(is_gone);
                if !stays {
                    conversations.remove(key);
                }
                stays
            });
        }
    }

    /// True if a link other than this one gets reports.
    pub fn is_reported_beyond(&self, link: L) -> bool {
        self.links.iter().any(|(id, other)| *id != link && other.reports.is_some())
    }

    /// Returns what to send to the relay behind `link` now, and when to call this again; `None`: after the next change.
    pub fn next_report(&mut self, link: L, now: Instant) -> (Option<Homes>, Option<Instant>) {
        let others = self.links.iter().filter(|(id, _)| **id != link);
        let backlog = others.fold(0_u64, |sum, (_, other)| sum.saturating_add(other.awaited));
        let Some(reports) = self.links.get_mut(&link).and_then(|link| link.reports.as_mut()) else {
            return (None, None);
        };
        let unreported = self.order.range(reports.covered.saturating_add(1)..);
        let home = |(number, key): (&u64, &ConversationKey)| {
            let home = self.conversations.get(key).filter(|home| home.from != link)?;
            Some((*number, (*key, home.bytes)))
        };
        let (numbers, homes): (Vec<u64>, Vec<_>) = unreported.filter_map(home).take(MAX_HOMES_PER_MESSAGE).unzip();
        if homes.is_empty() && backlog == reports.backlog {
            reports.covered = self.last;
            return (None, None);
        }
        let due = reports.at.map(|at| at + HOMES_INTERVAL);
        if let Some(due) = due.filter(|due| *due > now) {
            return (None, Some(due));
        }
        let is_full = homes.len() == MAX_HOMES_PER_MESSAGE;
        let covered = numbers.last().copied().filter(|_| is_full).unwrap_or(self.last);
        *reports = SentReports { covered, backlog, at: Some(now) };
        (Some(Homes { homes, backlog }), Some(now + HOMES_INTERVAL))
    }
}

#[cfg(test)]
mod tests;
