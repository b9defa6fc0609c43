//! Fair shares again, as plainly as possible: every choice is a walk through all candidates.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Reference, Request};
use crate::dispatch::{Class, Fairness, Model, NewRequest, RequestKey, Settings, TokenUsage, WorkerKey};

/// A key; `None`: all requests without one.
pub(in super::super) type Flow = Option<Arc<str>>;

/// What each key has attained. No key is ever forgotten.
#[derive(Clone, Default)]
pub(super) struct Accounts {
    service: BTreeMap<Flow, u64>,
    /// In hundredths.
    weights: BTreeMap<Flow, u64>,
    floor: u64,
    /// When the last request of each class came.
    last_arrivals: BTreeMap<Class, Duration>,
    /// Occurrences in this event.
    pub(super) seen: Vec<&'static str>,
}

impl Accounts {
    fn of(&self, flow: &Flow) -> u64 {
        self.service.get(flow).copied().unwrap_or(0)
    }

    fn charge(&mut self, flow: &Flow, before: u64, tokens: u64) -> u64 {
        let charge = tokens * 10_000 / self.weights.get(flow).copied().unwrap_or(100);
        *self.service.entry(flow.clone()).or_default() += charge;
        *self.service.get_mut(flow).unwrap() -= before;
        charge
    }
}

impl Reference {
    pub(super) fn share_of(&mut self, new: &NewRequest) -> (Flow, Class) {
        let (flow, class) = self.flow_of(new);
        self.accounts.last_arrivals.insert(class, self.now);
        (flow, class)
    }

    fn flow_of(&mut self, new: &NewRequest) -> (Flow, Class) {
        match &new.owner {
            Some(owner) if self.settings.fairness != Fairness::Fifo => {
                let flow = owner.key.clone();
                if flow.is_some() {
                    self.accounts.weights.insert(flow.clone(), u64::from(owner.weight.hundredths()));
                }
                (flow, owner.class)
            }
            Some(_) | None => (None, Class::Normal),
        }
    }

    /// The least service of a key with waiting requests, without estimates, is the floor from now on.
    pub(super) fn raise_floor(&mut self) {
        let least = self.queued().map(|key| self.settled(&self.requests[&key].flow)).min();
        self.accounts.floor = self.accounts.floor.max(least.unwrap_or(0));
    }

    /// A request was admitted; a key without others in the queue has no credit.
    pub(super) fn arrive(&mut self, key: RequestKey) {
        let flow = self.requests[&key].flow.clone();
        let others = || self.queued().filter(|other| *other != key);
        let is_alone = others().next().is_none();
        let is_active = others().any(|other| self.requests[&other].flow == flow);
        let settled = self.settled(&flow);
        let lift = if is_active { 0 } else { self.accounts.floor.saturating_sub(settled) };
        if lift > 0 && !is_alone {
            self.accounts.seen.push("lifted");
        }
        *self.accounts.service.entry(flow).or_default() += lift;
        if is_alone {
            self.accounts.floor = settled + lift;
        }
    }

    pub(super) fn charge(&mut self, key: RequestKey) {
        let request = self.requests.get_mut(&key).unwrap();
        request.charged = self.accounts.charge(&request.flow, 0, request.new.bytes / 4);
        request.is_estimated = true;
    }

    pub(super) fn return_charge(&mut self, key: RequestKey) {
        let request = self.requests.get_mut(&key).unwrap();
        self.accounts.seen.extend((request.charged > 0).then_some("charge returned"));
        let charged = std::mem::take(&mut request.charged);
        request.is_estimated = false;
        self.accounts.charge(&request.flow, charged, 0);
    }

    pub(super) fn use_tokens(&mut self, key: RequestKey, usage: TokenUsage) {
        let request = self.requests.get_mut(&key).unwrap();
        request.charged = self.accounts.charge(&request.flow, request.charged, usage.input + 2 * usage.output);
        request.is_estimated = false;
    }

    /// Returns the service of a key without the estimates of its running requests.
    fn settled(&self, flow: &Flow) -> u64 {
        let estimated = self.requests.values().filter(|request| request.flow == *flow && request.is_estimated);
        self.accounts.of(flow) - estimated.map(|request| request.charged).sum::<u64>()
    }

    /// Returns the number of other models in a report whose first request is of a higher class, or of the same class
    /// and of a key with less service.
    pub(in super::super) fn ranks(&self, worker: WorkerKey) -> BTreeMap<Model, u32> {
        let reported = self.reported_to(worker);
        let place =
            |keys: &[RequestKey]| keys.iter().map(|key| (self.requests[key].class, self.service_of(*key))).min();
        let places: BTreeMap<_, _> = reported.iter().map(|(model, keys)| (model, place(keys))).collect();
        let different: BTreeSet<_> = places.values().collect();
        let before = |own| different.iter().filter(|other| ***other < own).count() as u32;
        places.iter().map(|(model, own)| (Model::clone(model), before(*own))).collect()
    }

    fn service_of(&self, key: RequestKey) -> u64 {
        self.accounts.of(&self.requests[&key].flow)
    }

    pub(in super::super) fn is_like(&self, one: RequestKey, other: RequestKey) -> bool {
        let share = |key| self.requests.get(&key).map(|request: &Request| (&request.flow, request.class));
        share(one) == share(other)
    }

    /// Returns which of these requests goes first.
    pub(super) fn fairest(&mut self, among: &[RequestKey]) -> Option<RequestKey> {
        let (requests, accounts) = (&self.requests, &self.accounts);
        let service = |key: &RequestKey| accounts.of(&requests[key].flow);
        let first = among.iter().min_by_key(|key| (requests[*key].class, service(key), **key))?;
        let is_promoted = |key: &&RequestKey| match self.settings.fairness {
            Fairness::Fifo => false,
            Fairness::Shared { promote_after } => self.now >= requests[*key].arrived + promote_after,
        };
        let promoted = among.iter().filter(is_promoted).min_by_key(|key| (service(key), **key));
        let promoted = promoted.filter(|promoted| service(promoted) < service(first));
        let chosen = *promoted.unwrap_or(first);
        let overtaken = among.iter().any(|key| *key < chosen && requests[key].class == requests[&chosen].class);
        let mut seen = vec![];
        seen.extend(promoted.map(|_| "promoted"));
        seen.extend(overtaken.then_some("sent before an older one of its class"));
        self.accounts.seen.append(&mut seen);
        Some(chosen)
    }

    /// Returns the request that has to make room for a new one, if it cannot wait otherwise.
    pub(super) fn displaced_by(&mut self, key: RequestKey) -> Option<RequestKey> {
        let Request { new, class, .. } = &self.requests[&key];
        let others = self.queued().filter(|other| *other != key);
        let lower: Vec<_> = others.filter(|other| self.requests[other].class > *class).collect();
        let youngest = |lower: Vec<RequestKey>| lower.into_iter().max_by_key(|key| (self.requests[key].class, *key));
        let (displaced, seen) = if self.share_is_full(key, Class::Batch).is_some() {
            let share = |new: &NewRequest| new.share.as_ref().map(|share| share.key.clone());
            let same = lower.into_iter().filter(|other| share(&self.requests[other].new) == share(new));
            (youngest(same.collect()), "displaced in its share")
        } else {
            let by_bytes = match self.excess(key, true) {
                (0, 0) => return None,
                (0, _) => true,
                (_, _) => false,
            };
            let part = |(count, bytes): (usize, u64)| if by_bytes { bytes } else { count as u64 };
            let has_more = |class: &Class| part(self.held(key, *class)) > part(self.kept(key, *class));
            let class = Class::ALL.into_iter().rev().take_while(|lowest| lowest > class).find(has_more)?;
            (youngest(lower.into_iter().filter(|other| self.requests[other].class == class).collect()), "displaced")
        };
        self.accounts.seen.push(seen);
        displaced
    }

    /// True if the queue has no room for a request, even if lower classes had only what they keep.
    pub(super) fn is_full(&mut self, key: RequestKey) -> bool {
        let (count, bytes) = self.excess(key, false);
        let lower = Class::ALL.into_iter().filter(|lower| *lower > self.requests[&key].class);
        let kept = lower.map(|lower| self.kept(key, lower)).fold((0, 0), |sum, kept| (sum.0 + kept.0, sum.1 + kept.1));
        let is_full = (count, bytes) != (0, 0);
        let is_kept = is_full && count <= kept.0 && bytes <= kept.1;
        self.accounts.seen.extend(is_kept.then_some("refused for a lower class"));
        is_full
    }

    /// Returns the places and bytes that are missing for a request. Lower classes have what they keep, and, if they
    /// `hold` it, what they have beyond that.
    fn excess(&self, key: RequestKey, hold: bool) -> (usize, u64) {
        let Request { class, new, .. } = &self.requests[&key];
        let (mut count, mut bytes) = (1, new.bytes);
        for other in Class::ALL {
            let (held, kept) = (self.held(key, other), self.kept(key, other));
            let part = match (other <= *class, hold) {
                (true, _) => held,
                (false, true) => (held.0.max(kept.0), held.1.max(kept.1)),
                (false, false) => kept,
            };
            (count, bytes) = (count + part.0, bytes + part.1);
        }
        let Settings { max_queue_len, max_queue_bytes, .. } = self.settings;
        (count.saturating_sub(max_queue_len), bytes.saturating_sub(max_queue_bytes))
    }

    /// Returns the number and bytes of the waiting requests of a class, without one of them.
    fn held(&self, without: RequestKey, class: Class) -> (usize, u64) {
        let of_class = |other: &RequestKey| *other != without && self.requests[other].class == class;
        let held: Vec<_> = self.queued().filter(of_class).map(|key| self.requests[&key].new.bytes).collect();
        (held.len(), held.iter().sum())
    }

    /// Returns the places and bytes that a class keeps.
    fn kept(&self, without: RequestKey, class: Class) -> (usize, u64) {
        let last = self.accounts.last_arrivals.get(&class);
        let is_recent = last.is_some_and(|last| self.now <= *last + Duration::from_secs(60));
        let Settings { max_queue_len, max_queue_bytes, .. } = self.settings;
        let is_empty = self.queued().all(|other| other == without);
        if is_recent && !is_empty || self.held(without, class).0 > 0 {
            (max_queue_len / 10, max_queue_bytes / 10)
        } else {
            (0, 0)
        }
    }

    /// Returns the share that leaves no room for a request next to those of this class and higher ones; the first
    /// request of a key may always wait.
    pub(super) fn share_is_full(&self, key: RequestKey, lowest: Class) -> Option<u8> {
        let new = &self.requests[&key].new;
        let share = new.share.as_ref()?;
        let others = self.queued().filter(|other| *other != key && self.requests[other].class <= lowest);
        let others = others.map(|other| &self.requests[&other].new);
        let same: Vec<_> =
            others.filter(|other| other.share.as_ref().is_some_and(|held| held.key == share.key)).collect();
        let part = |whole: u64| whole * u64::from(share.percent) / 100;
        let too_many = same.len() as u64 + 1 > part(self.settings.max_queue_len as u64);
        let bytes: u64 = same.iter().map(|other| other.bytes).sum();
        let too_large = bytes + new.bytes > part(self.settings.max_queue_bytes);
        (!same.is_empty() && (too_many || too_large)).then_some(share.percent)
    }

    /// Returns the place of each waiting request among those for its model.
    pub(in super::super) fn positions(&self) -> BTreeMap<RequestKey, usize> {
        let start = |key: RequestKey| {
            let Request { flow, class, new, .. } = &self.requests[&key];
            let weight = self.accounts.weights.get(flow).copied().unwrap_or(100);
            let before = self.queued().filter(|other| {
                let it = &self.requests[other];
                it.flow == *flow && it.new.model == new.model && (it.class, *other) < (*class, key)
            });
            let charges = before.map(|other| self.requests[&other].new.bytes / 4 * 10_000 / weight).sum::<u64>();
            (*class, self.service_of(key) + charges, key)
        };
        let starts: Vec<_> = self.queued().map(|key| (&self.requests[&key].new.model, start(key))).collect();
        let place = |(model, start): (&Model, &(Class, u64, RequestKey))| {
            starts.iter().filter(|other| other.0 == model && other.1 <= *start).count()
        };
        starts.iter().map(|(model, start)| (start.2, place((*model, start)))).collect()
    }
}
