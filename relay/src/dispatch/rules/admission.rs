//! Places in the queue: how many requests may wait, and which of them a request of a higher class displaces.
//!
//! If the queue is full, or the key's share of it, a request displaces the youngest one of a lower class, if that makes
//! room for it; of the lowest class first. Several are displaced only if their bodies are small.
//!
//! Each class that is in use keeps a tenth of the queue: higher classes neither occupy that part nor displace from it.
//! So however many requests of a higher class come, some of a lower one wait, and are [promoted](super::fair) in time.
//! A class is in use while its requests wait, and for a minute after the last one came: refused clients come back
//! within that time. Within the share of one key nothing is kept: its owner decides what is urgent.
//!
//! Displacing a request costs the logarithm of the queue's length.

use crate::dispatch::Dispatch;
use crate::dispatch::model::clock::Span;
use crate::dispatch::model::effect::Failure;
use crate::dispatch::model::event::RequestKey;
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::owner::Class;
use crate::dispatch::model::request::Request;

/// One of this number of places in the queue is reserved for requests that a worker can serve now.
const SERVED_PART: usize = 10;

/// A class in use keeps one of this number of places in the queue, and of its bytes.
const KEPT_PART: u128 = 10;

/// How long a class is in use after its last request: the longest `Retry-After`.
const IN_USE: Span = 60_000_000_000;

/// One limit of the queue, by number or by bytes, with the part of each class.
struct Limit {
    most: u128,
    /// The size of the new request.
    new: u128,
    held: [u128; Class::ALL.len()],
    kept: [u128; Class::ALL.len()],
}

impl Limit {
    /// True if there is no room for a request of this class, even if lower classes only had what they keep.
    fn refuses(&self, class: Class) -> bool {
        let (own, lower) = (class as usize, class as usize + 1);
        let taken: u128 = self.held[..=own].iter().chain(&self.kept[lower..]).sum();
        taken + self.new > self.most
    }

    /// Returns the class that has to make room for a request of this one: the lowest that has more than it keeps.
    /// `None` if no class has to.
    fn displaces(&self, class: Class) -> Option<Class> {
        let (own, lower) = (class as usize, class as usize + 1);
        let parts = self.held[lower..].iter().zip(&self.kept[lower..]).map(|(held, kept)| held.max(kept));
        if self.held[..=own].iter().chain(parts).sum::<u128>() + self.new <= self.most {
            return None;
        }
        let has_more = |lower: &&Class| self.held[**lower as usize] > self.kept[**lower as usize];
        Class::ALL[lower..].iter().rev().find(has_more).copied()
    }
}

impl Dispatch {
    /// Returns the failure of a request that may not wait, even if it displaced others.
    pub(super) fn refuses_place(&self, request: &Request) -> Option<Failure> {
        let reserved = self.is_unserved(request.model) && self.unserved_fill_the_queue();
        if reserved || self.is_full_for(request) {
            return Some(Failure::QueueFull { retry_after_secs: self.retry_after_secs(self.clock.now) });
        }
        let share = request.new.share.as_ref().filter(|_| self.share_is_full_for(request, request.class))?;
        Some(Failure::QueueShareFull { percent: share.percent })
    }

    /// Displaces requests of lower classes until there is room for this one.
    pub(super) fn make_room_for(&mut self, key: RequestKey, class: Class) {
        if self.queue.totals.len(class) == self.queue_len() {
            return;
        }
        if self.is_first_of_its_class(class) {
            self.begin_classes();
        }
        while let Some(displaced) = self.requests.get(&key).and_then(|request| self.displaced_by(request)) {
            let retry_after_secs = self.retry_after_secs(self.clock.now);
            let position = self.position(displaced, self.clock.now);
            self.dequeue(displaced);
            self.fail_at(displaced, Failure::Displaced { retry_after_secs }, position);
        }
    }

    /// Returns the next request that has to make room for this one.
    fn displaced_by(&self, request: &Request) -> Option<RequestKey> {
        if self.share_is_full_for(request, Class::Batch) {
            return self.queue.shares.youngest_below(request.new.share.as_ref()?, request.class);
        }
        let class = self.limits_for(request).iter().find_map(|limit| limit.displaces(request.class))?;
        self.queue.youngest_of(class)
    }

    /// True if there is no room for a request, even if it displaced others.
    fn is_full_for(&self, request: &Request) -> bool {
        let class = request.class;
        if Class::ALL[class as usize + 1..].iter().any(|lower| self.is_in_use(*lower)) {
            return self.limits_for(request).iter().any(|limit| limit.refuses(class));
        }
        // The usual case: all requests are of one class.
        self.queue_len() >= self.settings.max_queue_len
            || self.queue_bytes().saturating_add(request.new.bytes) > self.settings.max_queue_bytes
    }

    /// Returns the limits of places and of bytes, as they are for a new request.
    fn limits_for(&self, request: &Request) -> [Limit; 2] {
        let (totals, settings) = (&self.queue.totals, &self.settings);
        let limit = |most: u128, new: u128, held: fn((usize, u64)) -> u128| Limit {
            most,
            new,
            held: Class::ALL.map(|class| held(totals.of(class))),
            kept: Class::ALL.map(|class| if self.is_in_use(class) { most / KEPT_PART } else { 0 }),
        };
        [
            limit(settings.max_queue_len as u128, 1, |(count, _)| count as u128),
            limit(settings.max_queue_bytes.into(), request.new.bytes.into(), |(_, bytes)| bytes.into()),
        ]
    }

    /// True if requests of the class wait, or might come back.
    fn is_in_use(&self, class: Class) -> bool {
        let is_recent = |last| self.clock.now.since(last) <= IN_USE;
        // A large request may have all of an empty queue.
        let might_come_back =
            || self.queue_len() > 0 && self.queue.last_arrivals[class as usize].is_some_and(is_recent);
        self.queue.totals.of(class).0 > 0 || might_come_back()
    }

    /// True if the key's share has no room for a request next to those of this class and higher ones.
    fn share_is_full_for(&self, request: &Request, lowest: Class) -> bool {
        let is_full = |share| self.queue.shares.is_full_for(share, request.new.bytes, lowest, &self.settings);
        request.new.share.as_ref().is_some_and(is_full)
    }

    /// True if no worker could be sent the model, now or after other requests: a multiplexer has to load it, or its
    /// worker is disconnected.
    fn is_unserved(&self, model: ModelId) -> bool {
        self.models[model].open.is_empty()
    }

    /// True if such requests have filled all but a tenth of the queue, which is reserved for requests that workers can
    /// serve.
    fn unserved_fill_the_queue(&self) -> bool {
        let most = self.settings.max_queue_len - self.settings.max_queue_len / SERVED_PART;
        // They are few unless the queue is nearly full, so they need not be counted.
        if self.queue_len() < most || self.workers.values().all(|worker| worker.draining) {
            return false;
        }
        let unserved = self.models.iter().filter(|group| group.open.is_empty());
        unserved.map(|group| group.queue.len()).sum::<usize>() >= most
    }
}
