//! Responses without progress. A response that has not begun is moved to another worker after the first byte timeout,
//! if that is set. A response without progress for the stream idle timeout ends: without a request timeout, nothing
//! else ends a running request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_protocol::error::{ApiError, ErrorKind};
use tracing::warn;

use super::{Provider, ProviderCore};
use crate::dispatch::{CancelReason, Event};
use crate::provider::request::RequestRecord;
use crate::provider::response::{Detached, Party};

/// The longest check interval: a response ends at most an eighth of its limit too late, and no later than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl Provider {
    /// Returns the interval between checks of running responses.
    pub(super) fn poll_interval(&self) -> Duration {
        let config = self.config();
        let shortest = config.first_byte_timeout.unwrap_or(Duration::MAX).min(config.stream_idle_timeout);
        (shortest / 8).min(LONGEST_PAUSE)
    }

    /// Moves and ends the requests whose workers or clients are silent for too long, if a check is due.
    pub(super) fn check_silence(&self, checked_at: &mut Instant, now: Instant) {
        if now < *checked_at + self.poll_interval() {
            return;
        }
        *checked_at = now;
        let config = self.config();
        let mut state = self.lock();
        if let Some(limit) = config.first_byte_timeout {
            self.move_unbegun(&mut state, limit, now);
        }
        let limit = config.stream_idle_timeout;
        let still = |record: &RequestRecord| record.response.standstill(now).filter(|still| still.time >= limit);
        let mut silent: Vec<_> =
            state.requests.iter().filter_map(|(key, record)| Some((*key, still(record)?.party))).collect();
        silent.sort_unstable_by_key(|(key, _)| *key);
        for (key, party) in silent {
            let Some(record) = state.requests.get(&key) else { continue };
            let (reason, error) = failure(party, limit);
            let (request_id, message) = (&record.id, error.message());
            let worker = record.progress().worker.clone();
            warn!(request_id, provider = %self.name, worker = worker.as_deref(), "{message}");
            record.response.fail(error);
            self.cancel_in(&mut state, key, reason);
        }
    }

    /// Moves requests whose responses have not begun within `limit` to workers that have room.
    fn move_unbegun(&self, state: &mut ProviderCore, limit: Duration, now: Instant) {
        let is_late = |record: &RequestRecord| {
            let still = record.response.standstill(now);
            still.is_some_and(|still| still.time >= limit) && !record.response.has_head()
        };
        let late = state.requests.iter().filter(|(_, record)| is_late(record));
        let mut late: Vec<_> = late.map(|(key, record)| (*key, Arc::clone(record))).collect();
        late.sort_unstable_by_key(|(key, _)| *key);
        for (key, record) in late {
            let Some(attempt) = state.core.can_move(key) else { continue };
            // The worker may begin to respond at this moment.
            if record.response.detach(attempt) == Detached::Unbegun {
                self.handle(state, Event::Silent { request: key });
            }
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
