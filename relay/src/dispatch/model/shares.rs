//! The requests that the queue holds, in total and for each key, and how many of them the key's share admits.
//!
//! Only requests with a [`QueueShare`] are counted by key. One of them may always wait, however small the share:
//! otherwise a key would be useless whenever all workers are busy. A requeue is admitted beyond the share, and is
//! counted.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::event::{QueueShare, RequestKey, Settings};
use super::owner::Class;

/// Waiting requests, by number and by body bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct QueueTotals {
    by_class: [(usize, u64); Class::ALL.len()],
}

impl QueueTotals {
    pub(crate) fn add(&mut self, class: Class, new: u64) {
        let (count, bytes) = &mut self.by_class[class as usize];
        *count += 1;
        *bytes = bytes.saturating_add(new);
    }

    pub(crate) fn subtract(&mut self, class: Class, gone: u64) {
        let (count, bytes) = &mut self.by_class[class as usize];
        *count -= 1;
        *bytes = bytes.saturating_sub(gone);
    }

    /// Returns the number and the bytes of the requests of one class.
    pub(crate) fn of(&self, class: Class) -> (usize, u64) {
        self.by_class[class as usize]
    }

    /// Returns the number of requests of this class and of higher ones.
    pub(crate) fn len(&self, lowest: Class) -> usize {
        self.by_class[..=lowest as usize].iter().map(|(count, _)| count).sum()
    }

    /// Returns the bytes of the requests of this class and of higher ones.
    pub(crate) fn bytes(&self, lowest: Class) -> u64 {
        self.by_class[..=lowest as usize].iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

/// The waiting requests by key. Keys without waiting requests are absent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares(HashMap<Arc<str>, ShareUsage>);

#[derive(Clone, Debug, Default)]
struct ShareUsage {
    held: QueueTotals,
    requests: BTreeSet<(Class, RequestKey)>,
}

impl Shares {
    /// True if the share has no room for another request with a body of this size next to those of this class and
    /// higher ones.
    pub(crate) fn is_full_for(&self, share: &QueueShare, bytes: u64, lowest: Class, settings: &Settings) -> bool {
        let Some(ShareUsage { held, .. }) = self.0.get(&share.key) else { return false };
        let part = |whole: u64| u64::try_from(u128::from(whole) * u128::from(share.percent) / 100).unwrap_or(whole);
        let most = part(u64::try_from(settings.max_queue_len).unwrap_or(u64::MAX)).max(1);
        let count = held.len(lowest);
        count > 0
            && (u64::try_from(count).unwrap_or(u64::MAX) >= most
                || held.bytes(lowest).saturating_add(bytes) > part(settings.max_queue_bytes))
    }

    /// Returns the youngest request of the lowest class in the share, if that class is lower than this one.
    pub(crate) fn youngest_below(&self, share: &QueueShare, class: Class) -> Option<RequestKey> {
        let (lowest, youngest) = self.0.get(&share.key)?.requests.last()?;
        (*lowest > class).then_some(*youngest)
    }

    pub(crate) fn handle_waiting(&mut self, share: &QueueShare, request: (Class, RequestKey), bytes: u64) {
        let usage = self.0.entry(Arc::clone(&share.key)).or_default();
        usage.held.add(request.0, bytes);
        usage.requests.insert(request);
    }

    pub(crate) fn handle_gone(&mut self, share: &QueueShare, request: (Class, RequestKey), bytes: u64) {
        let Some(usage) = self.0.get_mut(&share.key) else { return };
        usage.held.subtract(request.0, bytes);
        usage.requests.remove(&request);
        if usage.requests.is_empty() {
            self.0.remove(&share.key);
        }
    }

    /// The number of keys with waiting requests.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
