//! The bound on fair shares, from the messages alone: while two keys of one class and weight wait for the same workers,
//! and no other class does, they attain the same service, up to a constant.

use std::collections::{BTreeMap, BTreeSet};

use super::reference::Reference;
use crate::dispatch::{Effect, Event, RequestKey};

/// The most that one request is charged, in tokens, whether it is an estimate or the usage.
const LARGEST: i64 = 100;

/// The most slots that the workers have.
const SLOTS: i64 = 4;

/// A key gets ahead by one request that it is sent, by the usage of all that run, and by what all that run return to
/// others; and the keys may have been as far apart at the beginning.
const BOUND: i64 = 2 * (LARGEST + 2 * SLOTS * LARGEST);

#[derive(Clone, Default)]
pub(super) struct Bound {
    keys: BTreeMap<RequestKey, String>,
    charged: BTreeMap<RequestKey, i64>,
    service: BTreeMap<String, i64>,
    /// The difference between two keys when they began to wait together, and what they have attained since.
    since: BTreeMap<(String, String), (i64, i64)>,
    bytes: BTreeMap<RequestKey, i64>,
    /// True if two keys have waited together for much longer than the bound.
    pub(super) is_proved: bool,
}

impl Bound {
    pub(super) fn apply(&mut self, event: &Event) {
        if let Event::Submit(new) = event {
            let key = format!("{:?}", new.owner.as_ref().expect("every request has an owner").key);
            self.keys.insert(new.key, key);
            self.bytes.insert(new.key, i64::try_from(new.bytes).unwrap());
        }
        if let Event::Used { request, usage } | Event::Completed { request, usage: Some(usage), .. } = event {
            self.charge(*request, i64::try_from(usage.input + 2 * usage.output).unwrap());
        }
    }

    pub(super) fn record(&mut self, effect: &Effect) {
        match effect {
            Effect::Send { request, .. } => self.charge(*request, self.bytes[request] / 4),
            Effect::Requeued { request, .. } => self.charge(*request, 0),
            Effect::CancelSent { .. }
            | Effect::Fail { .. }
            | Effect::Cancelled { .. }
            | Effect::Severed { .. }
            | Effect::Finished { .. }
            | Effect::Demand { .. }
            | Effect::DrainedIdle { .. } => {}
        }
    }

    fn charge(&mut self, request: RequestKey, tokens: i64) {
        assert!(tokens <= LARGEST, "{tokens} are more than the bound allows");
        let before = self.charged.insert(request, tokens).unwrap_or(0);
        *self.service.entry(self.keys[&request].clone()).or_default() += tokens - before;
    }

    pub(super) fn check(&mut self, reference: &Reference) {
        let slots: u32 = reference.workers.values().map(|worker| worker.new.max_concurrent).sum();
        assert!(i64::from(slots) <= SLOTS);
        let waiting: BTreeSet<_> = reference.queued().map(|key| self.keys[&key].clone()).collect();
        self.since.retain(|(one, other), _| waiting.contains(one) && waiting.contains(other));
        for one in &waiting {
            for other in waiting.range::<String, _>((std::ops::Bound::Excluded(one), std::ops::Bound::Unbounded)) {
                let attained = |key: &String| self.service.get(key).copied().unwrap_or(0);
                let (now, all) = (attained(one) - attained(other), attained(one) + attained(other));
                let (then, before) = *self.since.entry((one.clone(), other.clone())).or_insert((now, all));
                assert!((now - then).abs() <= BOUND, "{one} has attained {} more than {other}", now - then);
                self.is_proved |= all - before > 2 * BOUND;
            }
        }
    }
}
