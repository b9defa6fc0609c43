//! Answers that stand still: without a request timeout, only silence ends a running request.

use std::time::{Duration, Instant};

use modelrelay_protocol::error::{ApiError, ErrorKind};
use tracing::warn;

use super::Provider;
use crate::dispatch::{CancelReason, Event};
use crate::exchange::Party;
use crate::request::RequestRecord;

/// Between two looks: an answer ends an eighth of its limit too late at most, and no later than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl Provider {
    /// How long running answers are not looked at.
    pub(super) fn pause_between_looks(&self) -> Duration {
        (self.config().stream_idle_timeout / 8).min(LONGEST_PAUSE)
    }

    /// Ends the answers that stand still for too long, if it is time to look.
    pub(super) fn end_silent(&self, looked_at: &mut Instant, now: Instant) {
        if now < *looked_at + self.pause_between_looks() {
            return;
        }
        *looked_at = now;
        let limit = self.config().stream_idle_timeout;
        let mut state = self.lock();
        let still = |record: &RequestRecord| record.exchange.standstill(now).filter(|still| still.time >= limit);
        let mut silent: Vec<_> =
            state.requests.iter().filter_map(|(key, record)| Some((*key, still(record)?.party))).collect();
        silent.sort_unstable_by_key(|(key, _)| *key);
        for (key, party) in silent {
            let Some(record) = state.requests.get(&key) else { continue };
            let (reason, error) = failure(party, limit);
            let (request_id, message) = (&record.outline.id, error.message());
            let worker = record.progress().worker.clone();
            warn!(request_id, provider = %self.name, worker = worker.as_deref(), "{message}");
            record.exchange.fail(error);
            self.handle(&mut state, Event::Cancel { request: key, reason });
        }
    }
}

fn failure(party: Party, limit: Duration) -> (CancelReason, ApiError) {
    let secs = limit.as_secs();
    match party {
        Party::Worker => {
            let message = format!("request timeout: the worker sent nothing for {secs} s (STREAM_IDLE_TIMEOUT_SECS)");
            (CancelReason::Timeout, ApiError::new(ErrorKind::RequestTimeout, message))
        }
        Party::Client => {
            let message = format!("the client read nothing for {secs} s (STREAM_IDLE_TIMEOUT_SECS)");
            (CancelReason::SlowClient, ApiError::new(ErrorKind::SlowClient, message))
        }
    }
}
