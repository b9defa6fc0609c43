//! The conversations that relays have sent to this worker.
//!
//! Relays that share workers do not see each other's requests. Each therefore gets reports from its workers: which
//! conversations the others have sent here, and how many bytes of prompts wait here for their first response byte. A
//! relay that has restarted gets the newest part of the table, and so knows the homes of running conversations at once.
//!
//! Locks: this one is acquired last, also under a link's lock, and is never held over an await.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use modelrelay_protocol::homes::HomeTable;
pub use modelrelay_protocol::homes::ModelLoads;
use modelrelay_protocol::message::{ConversationKey, Homes};
use tokio::sync::Notify;

use super::LinkId;

/// The conversations of a worker, and the requests that have no response yet.
#[derive(Debug, Default)]
pub struct Conversations {
    table: Mutex<HomeTable<LinkId>>,
    /// Notified when there may be something to report.
    changed: Notify,
}

/// The bytes of a request of whose response no byte has come; dropping it removes them from the backlog.
#[derive(Debug)]
pub struct AwaitedBytes {
    conversations: Arc<Conversations>,
    link: LinkId,
    bytes: u64,
}

impl Conversations {
    /// Adds a link; with `reports`, its relay wants them, and first gets the newest conversations.
    pub fn attach(&self, link: LinkId, reports: bool) {
        self.lock().attach(link, reports);
        self.changed.notify_one();
    }

    /// Removes a link, whose requests have ended.
    pub fn detach(&self, link: LinkId) {
        self.lock().detach(link);
        self.changed.notify_one();
    }

    /// A request with a body of this length arrived; `conversation` is its key and its model's id, if it has a key.
    pub fn handle_request(
        self: &Arc<Self>,
        link: LinkId,
        conversation: Option<(ConversationKey, Arc<str>)>,
        bytes: u64,
    ) -> AwaitedBytes {
        let (awaited, is_reported) = {
            let mut table = self.lock();
            (table.handle_request(link, conversation, bytes), table.is_reported_beyond(link))
        };
        if is_reported {
            self.changed.notify_one();
        }
        AwaitedBytes { conversations: Arc::clone(self), link, bytes: awaited }
    }

    /// Replaces the loads of models. The conversations of a load that is gone are removed: its cache is gone, too.
    pub fn handle_loads(&self, loads: ModelLoads) {
        self.lock().handle_loads(loads);
    }

    /// Waits until there may be something to report.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns what to send to the relay behind `link` now, and when to call this again; `None`: after the next change.
    pub fn next_report(&self, link: LinkId, now: Instant) -> (Option<Homes>, Option<Instant>) {
        self.lock().next_report(link, now)
    }

    fn lock(&self) -> MutexGuard<'_, HomeTable<LinkId>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AwaitedBytes {
    fn drop(&mut self) {
        let is_reported = {
            let mut table = self.conversations.lock();
            table.handle_first_byte(self.link, self.bytes);
            table.is_reported_beyond(self.link)
        };
        if is_reported && self.bytes > 0 {
            self.conversations.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: LinkId = LinkId(1);
    const TWO: LinkId = LinkId(2);

    #[test]
    fn dropped_request_leaves_backlog() {
        let (all, now) = (Arc::new(Conversations::default()), Instant::now());
        all.attach(ONE, true);
        all.attach(TWO, true);
        let request = all.handle_request(ONE, None, 7);
        let backlog = |now| all.next_report(TWO, now).0.map(|report| report.backlog);
        assert_eq!(backlog(now), Some(7));
        drop(request);
        assert_eq!(backlog(now + modelrelay_protocol::limits::HOMES_INTERVAL), Some(0));
    }
}
