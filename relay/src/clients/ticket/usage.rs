//! The usage of one request, with estimates where the backend reported no tokens.

use modelrelay_protocol::paths::Endpoint;

use crate::dispatch::TOKEN_BYTES;
use crate::provider::request::Progress;
use crate::telemetry::metrics::Outcome;
use crate::telemetry::usage::{RequestCounts, UsageSums};

/// The estimated tokens of a request's body of this size. Sound and pictures are no text, and to count tokens costs none.
pub fn input_estimate(endpoint: Endpoint, bytes: u64) -> u64 {
    let is_text = !matches!(endpoint, Endpoint::Audio | Endpoint::Images);
    if is_text && !is_free(endpoint) { bytes.div_ceil(TOKEN_BYTES) } else { 0 }
}

/// True for routes on which a backend computes no tokens.
pub fn is_free(endpoint: Endpoint) -> bool {
    matches!(endpoint, Endpoint::CountTokens | Endpoint::Tokenize | Endpoint::Models)
}

/// How a request ended.
pub(super) struct RequestUsage<'a> {
    pub(super) outcome: Outcome,
    /// The status that the client got.
    pub(super) status: Option<u16>,
    pub(super) endpoint: Endpoint,
    /// True if a stored response is only read.
    pub(super) is_stored: bool,
    /// The size of the request's body.
    pub(super) request_bytes: u64,
    /// The size of the response's body, as far as the worker sent it.
    pub(super) response_bytes: u64,
    /// The part of it that was sent to the client.
    pub(super) sent_bytes: u64,
    /// The number of `data` lines in that part, if the response is an event stream.
    pub(super) data_lines: u64,
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
            sums.estimated_output_tokens = self.output_estimate();
        }
        sums
    }

    /// True if a backend has computed a part of the request at least. An error of the backend has no tokens, and neither has
    /// a stored response that is only read.
    fn is_computed(&self) -> bool {
        let is_error = self.status.is_some_and(|status| status >= 400);
        let is_cancelled_there = self.outcome == Outcome::Cancelled && self.progress.dispatched_at.is_some();
        !self.is_stored && !is_error && (self.response_bytes > 0 || is_cancelled_there)
    }

    /// One token per event of a stream, with those that the client has not read, and else one per four bytes.
    fn output_estimate(&self) -> u64 {
        if !generates_text(self.endpoint) {
            return 0;
        }
        if self.data_lines == 0 || self.sent_bytes == 0 {
            return self.response_bytes.div_ceil(TOKEN_BYTES);
        }
        let all = u128::from(self.data_lines) * u128::from(self.response_bytes.max(self.sent_bytes));
        u64::try_from(all.div_ceil(u128::from(self.sent_bytes))).unwrap_or(u64::MAX)
    }
}

fn generates_text(endpoint: Endpoint) -> bool {
    match endpoint {
        Endpoint::ChatCompletions
        | Endpoint::Completions
        | Endpoint::Responses
        | Endpoint::Messages
        | Endpoint::Native => true,
        Endpoint::CountTokens
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Score
        | Endpoint::Classify
        | Endpoint::Images
        | Endpoint::Audio
        | Endpoint::Tokenize
        | Endpoint::Models
        | Endpoint::Other => false,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use modelrelay_protocol::message::TokenCounts;

    use super::*;

    fn sent() -> Progress {
        let slot_time = Duration::from_secs(3);
        Progress { attempts: 2, dispatched_at: Some(Instant::now()), slot_time, ..Progress::default() }
    }

    fn usage(progress: &Progress, outcome: Outcome) -> RequestUsage<'_> {
        let endpoint = Endpoint::ChatCompletions;
        let (request_bytes, response_bytes, sent_bytes) = (401, 4000, 4000);
        RequestUsage {
            outcome,
            status: Some(200),
            endpoint,
            is_stored: false,
            request_bytes,
            response_bytes,
            sent_bytes,
            data_lines: 20,
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
        // The client has read half of it.
        assert_eq!(tokens(&RequestUsage { sent_bytes: 2000, ..usage }), [0, 0, 0, 101, 40]);
    }

    #[test]
    fn other_responses_are_estimated_by_bytes() {
        let progress = sent();
        let whole = RequestUsage { data_lines: 0, ..usage(&progress, Outcome::Ok) };
        assert_eq!(tokens(&whole), [0, 0, 0, 101, 1000]);
        let at = |endpoint| tokens(&RequestUsage { endpoint, ..usage(&progress, Outcome::Ok) });
        assert_eq!(at(Endpoint::Embeddings), [0, 0, 0, 101, 0]);
        assert_eq!([Endpoint::CountTokens, Endpoint::Tokenize, Endpoint::Audio].map(at), [[0; 5]; 3]);
    }

    #[test]
    fn request_that_no_backend_computed_has_no_tokens() {
        let (sent, waiting) = (sent(), Progress::default());
        let none = [0; 5];
        assert_eq!(tokens(&RequestUsage { response_bytes: 0, ..usage(&waiting, Outcome::Cancelled) }), none);
        assert_eq!(
            tokens(&RequestUsage { status: Some(502), response_bytes: 0, ..usage(&sent, Outcome::WorkerLost) }),
            none
        );
        assert_eq!(tokens(&RequestUsage { status: Some(400), ..usage(&sent, Outcome::ClientError) }), none);
        // A stored response is read.
        assert_eq!(tokens(&RequestUsage { is_stored: true, ..usage(&sent, Outcome::Ok) }), none);
        // Its prompt was being read when the client disconnected.
        let early = RequestUsage {
            status: None,
            response_bytes: 0,
            sent_bytes: 0,
            data_lines: 0,
            ..usage(&sent, Outcome::Cancelled)
        };
        assert_eq!(tokens(&early), [0, 0, 0, 101, 0]);
    }
}
