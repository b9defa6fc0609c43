//! The share of the queue that the requests of one key fill.
//!
//! Only requests with a [`QueueShare`] are counted. One of them may always wait, however small the share: otherwise a
//! key would be useless whenever all workers are busy. A requeue is admitted beyond the share, and is counted.

use std::collections::HashMap;
use std::sync::Arc;

use super::event::{QueueShare, Settings};

/// The waiting requests by key. Keys without waiting requests are absent.
#[derive(Debug, Default)]
pub(crate) struct Shares(HashMap<Arc<str>, ShareUsage>);

#[derive(Clone, Copy, Debug, Default)]
struct ShareUsage {
    count: usize,
    bytes: u64,
}

impl Shares {
    /// True if the share has no room for another request with a body of this size.
    pub(crate) fn is_full_for(&self, share: &QueueShare, bytes: u64, settings: &Settings) -> bool {
        let Some(held) = self.0.get(&share.key) else { return false };
        let part = |whole: u64| u64::try_from(u128::from(whole) * u128::from(share.percent) / 100).unwrap_or(whole);
        let most = part(u64::try_from(settings.max_queue_len).unwrap_or(u64::MAX)).max(1);
        u64::try_from(held.count).unwrap_or(u64::MAX) >= most
            || held.bytes.saturating_add(bytes) > part(settings.max_queue_bytes)
    }

    pub(crate) fn handle_waiting(&mut self, share: &QueueShare, bytes: u64) {
        let held = self.0.entry(Arc::clone(&share.key)).or_default();
        held.count += 1;
        held.bytes = held.bytes.saturating_add(bytes);
    }

    pub(crate) fn handle_gone(&mut self, share: &QueueShare, bytes: u64) {
        let Some(held) = self.0.get_mut(&share.key) else { return };
        held.count -= 1;
        held.bytes = held.bytes.saturating_sub(bytes);
        if held.count == 0 {
            self.0.remove(&share.key);
        }
    }

    /// The number of keys with waiting requests.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
