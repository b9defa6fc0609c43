//! The usage of one request, with estimates where the backend reported no tokens.

use modelrelay_protocol::paths::Endpoint;

use crate::provider::request::{Progress, input_estimate, output_estimate};
use crate::provider::response::Received;
use crate::telemetry::metrics::Outcome;
use crate::telemetry::usage::{RequestCounts, UsageSums};

/// How a request ended.
pub(super) struct RequestUsage<'a> {
    pub(super) outcome: Outcome,
    pub(super) endpoint: Endpoint,
    /// True if a stored response is only read.
    pub(super) is_stored: bool,
    /// The size of the request's body.
    pub(super) request_bytes: u64,
    pub(super) received: Received,
    pub(super) progress: &'a Progress,
}

impl RequestUsage<'_> {
    /// The sums of this one request.
    pub(super) fn sums(&self) -> UsageSums {
        let progress = self.progress;
        let mut sums = UsageSums {
            requests: RequestCounts::one(self.outcome, progress.attempts),
            slot_time: progress.slot_time,
            wait_time: progress.queue_wait,
            ..UsageSums::default()
        };
        if let Some(tokens) = progress.token_counts {
            sums.input_tokens = tokens.prompt_tokens;
            sums.cached_tokens = tokens.cached_tokens.unwrap_or(0);
            sums.output_tokens = tokens.completion_tokens;
        } else if self.is_computed() {
            sums.estimated_input_tokens = input_estimate(self.endpoint, self.request_bytes);
            sums.estimated_output_tokens = output_estimate(self.endpoint, &self.received);
        }
        sums
    }

    /// True if a backend has computed a part of the request at least. An error of the backend has no tokens, and
    /// neither has a stored response that is only read.
    fn is_computed(&self) -> bool {
        let is_cancelled = matches!(self.outcome, Outcome::Cancelled | Outcome::RequestTimeout);
        let is_cancelled_there = is_cancelled && self.progress.dispatched_at.is_some();
        !self.is_stored && !self.received.is_error() && (self.received.bytes > 0 || is_cancelled_there)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use http::StatusCode;
    use modelrelay_protocol::message::TokenCounts;

    use super::*;

    fn sent() -> Progress {
        let slot_time = Duration::from_secs(3);
        Progress { attempts: 2, dispatched_at: Some(Instant::now()), slot_time, ..Progress::default() }
    }

    fn usage(progress: &Progress, outcome: Outcome) -> RequestUsage<'_> {
        let endpoint = Endpoint::ChatCompletions;
        RequestUsage {
            outcome,
            endpoint,
            is_stored: false,
            request_bytes: 401,
            received: Received { bytes: 4000, data_lines: 20, ..Received::default() },
            progress,
        }
    }

    fn tokens(usage: &RequestUsage<'_>) -> [u64; 5] {
        let sums = usage.sums();
        let reported = [sums.input_tokens, sums.cached_tokens, sums.output_tokens];
        let [input, cached, output] = reported;
        [input, cached, output, sums.estimated_input_tokens, sums.estimated_output_tokens]
    }

    #[test]
    fn reported_tokens_are_not_estimated() {
        let counts = TokenCounts { prompt_tokens: 9, completion_tokens: 5, total_tokens: 14, cached_tokens: Some(2) };
        let progress = Progress { token_counts: Some(counts), queue_wait: Duration::from_secs(1), ..sent() };
        let usage = usage(&progress, Outcome::Ok);
        assert_eq!(tokens(&usage), [9, 2, 5, 0, 0]);
        let sums = usage.sums();
        assert_eq!((sums.requests.answered, sums.slot_time.as_secs(), sums.wait_time.as_secs()), (1, 3, 1));
    }

    #[test]
    fn stream_without_counts_is_estimated_by_events() {
        let progress = sent();
        let usage = usage(&progress, Outcome::Cancelled);
        assert_eq!(tokens(&usage), [0, 0, 0, 101, 20]);
    }

    #[test]
    fn other_responses_are_estimated_by_bytes() {
        let progress = sent();
        let received = Received { bytes: 4000, ..Received::default() };
        let whole = RequestUsage { received, ..usage(&progress, Outcome::Ok) };
        assert_eq!(tokens(&whole), [0, 0, 0, 101, 1000]);
        let at = |endpoint| tokens(&RequestUsage { endpoint, ..usage(&progress, Outcome::Ok) });
        assert_eq!(at(Endpoint::Embeddings), [0, 0, 0, 101, 0]);
        assert_eq!([Endpoint::CountTokens, Endpoint::Tokenize, Endpoint::Audio].map(at), [[0; 5]; 3]);
    }

    #[test]
    fn request_that_no_backend_computed_has_no_tokens() {
        let (sent, waiting) = (sent(), Progress::default());
        let (none, received) = ([0; 5], Received::default());
        assert_eq!(tokens(&RequestUsage { received, ..usage(&waiting, Outcome::Cancelled) }), none);
        assert_eq!(tokens(&RequestUsage { received, ..usage(&sent, Outcome::WorkerLost) }), none);
        let refused = Received { status: Some(StatusCode::BAD_REQUEST), bytes: 4000, ..Received::default() };
        assert_eq!(tokens(&RequestUsage { received: refused, ..usage(&sent, Outcome::ClientError) }), none);
        // A stored response is read.
        assert_eq!(tokens(&RequestUsage { is_stored: true, ..usage(&sent, Outcome::Ok) }), none);
        // Its prompt was being read when the client disconnected, or at its time limit.
        for outcome in [Outcome::Cancelled, Outcome::RequestTimeout] {
            let early = RequestUsage { received, ..usage(&sent, outcome) };
            assert_eq!(tokens(&early), [0, 0, 0, 101, 0], "{outcome:?}");
        }
    }
}
