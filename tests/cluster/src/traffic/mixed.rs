//! Clients of both kinds at once: half of them keep their connections, the others open one for each request.

use super::{Counts, Running, Traffic};

/// Running clients of both kinds.
#[derive(Debug)]
pub struct Mixed {
    kept: Running,
    new: Running,
}

impl Mixed {
    /// Starts this number of clients of each kind.
    #[must_use]
    pub fn start(settings: &Traffic, each: usize) -> Self {
        let settings = settings.clone().streams(each);
        Self { kept: settings.clone().kept().start(), new: settings.start() }
    }

    /// Waits until each kind has this number of responses underway.
    pub async fn wait_for_underway(&self, each: usize) {
        self.kept.wait_for_underway(each).await;
        self.new.wait_for_underway(each).await;
    }

    /// Waits for this number of further responses to each kind.
    pub async fn wait_for_answers(&self, each: usize) {
        tokio::join!(self.kept.wait_for_answers(each), self.new.wait_for_answers(each));
    }

    /// Returns the results so far, of clients that keep their connections and of those that do not.
    #[must_use]
    pub fn counts(&self) -> [Counts; 2] {
        [self.kept.counts(), self.new.counts()]
    }

    /// Panics if a request has failed so far; `what` names the last change.
    pub fn expect_no_failure(&self, what: &str) {
        for (kind, counts) in ["kept", "new"].into_iter().zip(self.counts()) {
            assert!(counts.has_no_failure(), "{what}: not every request of {kind} connections was answered: {counts}");
        }
    }

    /// Lets every client finish its request, and panics unless every request succeeded.
    pub async fn expect_all_answered(self) {
        let (kept, new) = tokio::join!(self.kept.finish(), self.new.finish());
        eprintln!("both kinds: {} answered", kept.answered + new.answered);
        kept.expect_all_answered();
        new.expect_all_answered();
    }
}
