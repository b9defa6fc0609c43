//! A request's ticket in the relay, held by its handler or its response.
//!
//! Dropping it is the cancellation: hyper drops the handler or the body when the client is gone, and everything below
//! ends with it. It also counts and logs the request once, however it ended.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::limits::MAX_MODEL_CHARS;
use modelrelay_protocol::names::printable;
use modelrelay_protocol::queue_position::QueuePosition;
use modelrelay_protocol::rate_limit::RateLimit;

use crate::dispatch::{CancelReason, Decision};
use crate::keys::{Key, KeyLease};
use crate::provider::Provider;
use crate::provider::request::{CLIENT_CLOSED_REQUEST, Progress, RequestRecord, TraceEnd};
use crate::provider::response::Received;
use crate::system::unix_time::unix_millis;
use crate::telemetry::journal::PER_REQUEST;
use crate::telemetry::metrics::{Outcome, RequestEnd, RequestSeries};
use crate::telemetry::request_journal::RequestLine;
use crate::telemetry::usage::{OTHER, RowKey};
use usage::RequestUsage;

mod usage;

/// The ticket of one request.
pub struct Ticket {
    provider: Arc<Provider>,
    record: Arc<RequestRecord>,
    series: Arc<RequestSeries>,
    /// The model as workers list it, if one does.
    model: Option<Arc<str>>,
    read_at: Instant,
    status: Option<u16>,
    first_byte_at: Option<Instant>,
    last_byte_at: Option<Instant>,
    bytes: u64,
    delivered: bool,
    /// Why the response was aborted.
    broken: Option<Outcome>,
    lease: Option<KeyLease>,
}

impl Ticket {
    /// Creates a ticket for a request that is about to be submitted. `known`: the model may become a metric label.
    pub fn new(
        provider: Arc<Provider>,
        record: Arc<RequestRecord>,
        known: bool,
        read_at: Instant,
        lease: Option<KeyLease>,
    ) -> Self {
        let model = known.then(|| provider.counted_as(&record.model));
        let series = provider.series.request(model.as_deref(), record.endpoint);
        Self {
            provider,
            record,
            series,
            model,
            read_at,
            status: None,
            first_byte_at: None,
            last_byte_at: None,
            bytes: 0,
            delivered: false,
            broken: None,
            lease,
        }
    }

    /// The request.
    pub fn record(&self) -> &Arc<RequestRecord> {
        &self.record
    }

    /// How long a stream may be silent before a comment is sent, if this is configured.
    pub fn keepalive(&self) -> Option<Duration> {
        self.provider.shared.config.load().stream_keepalive.filter(|_| self.record.is_streaming)
    }

    /// The position in the queue, while the request waits there.
    pub fn queue_position(&self) -> Option<QueuePosition> {
        let is_waiting = self.record.progress().waiting_since.is_some();
        is_waiting.then(|| self.provider.queue_position(self.record.key)).flatten()
    }

    /// The name of the worker whose response this is, if clients receive it.
    pub fn shown_worker(&self) -> Option<Arc<str>> {
        let is_shown = self.provider.shared.config.load().worker_header;
        is_shown.then(|| self.record.progress().worker.clone()).flatten()
    }

    /// The limit of tokens of its key, if it has one.
    pub fn token_limit(&self) -> Option<RateLimit> {
        self.lease.as_ref()?.key().token_limit(SystemTime::now())
    }

    /// Records the status that was sent to the client.
    pub fn mark_status(&mut self, status: u16) {
        self.status.get_or_insert(status);
    }

    /// Records bytes of the response that are sent to the client.
    pub fn mark_bytes(&mut self, bytes: &[u8], is_event_stream: bool) {
        let now = Instant::now();
        self.bytes += bytes.len() as u64;
        if self.first_byte_at.is_none() {
            self.first_byte_at = Some(now);
            self.series.first_byte_sent(now - self.record.received_at);
            let dispatched_at = self.record.progress().dispatched_at;
            let came_at = self.record.response.received().first_byte_at;
            if let (Some(sent), Some(came)) = (dispatched_at, came_at) {
                self.series.first_byte_received(came.saturating_duration_since(sent));
            }
        } else if let Some(last) = self.last_byte_at
            && is_event_stream
        {
            self.series.chunk_received(now - last);
        }
        self.last_byte_at = Some(now);
    }

    /// The number of bytes of the response that were sent to the client.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Records that the whole response was sent.
    pub fn mark_delivered(&mut self) {
        self.delivered = true;
    }

    /// Records that the response was aborted for this reason, whether or not a worker had ended it by then.
    pub fn mark_broken(&mut self, error: &ApiError) {
        self.broken = Some(Outcome::of_error(error.kind()));
    }

    fn outcome(&self, end: Option<&Result<(), ApiError>>) -> (Outcome, u16) {
        if let Some(outcome) = self.broken {
            return (outcome, self.status.unwrap_or(200));
        }
        match end {
            Some(Err(error)) => (Outcome::of_error(error.kind()), self.status.unwrap_or_else(|| error.status())),
            _ if !self.delivered => (Outcome::Cancelled, CLIENT_CLOSED_REQUEST),
            Some(Ok(())) | None => {
                let status = self.status.unwrap_or(200);
                (Outcome::of_backend_status(status), status)
            }
        }
    }

    fn log(&self, outcome: Outcome, code: u16, duration: Duration) {
        let record = &self.record;
        let progress = record.progress();
        let ttft = self.first_byte_at.map(|at| (at - record.received_at).as_millis() as u64);
        tracing::info!(
            target: PER_REQUEST,
            request_id = record.id,
            provider = %record.provider,
            model = record.logged_model(),
            endpoint = record.endpoint.as_str(),
            worker = progress.worker.as_deref(),
            outcome = outcome.as_str(),
            code,
            queue_ms = progress.queue_wait.as_millis() as u64,
            ttft_ms = ttft,
            duration_ms = duration.as_millis() as u64,
            bytes = self.bytes,
            trace_id = record.trace.as_ref().map(|trace| trace.id()),
            "response complete"
        );
    }

    fn journal(&self, outcome: Outcome, duration: Duration, progress: &Progress) {
        let (record, journal) = (&self.record, &self.provider.shared.request_journal);
        if !journal.is_on() {
            return;
        }
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (tokens, decision) = (progress.token_counts, progress.decision);
        journal.record(&RequestLine {
            at_ms: unix_millis(record.arrived),
            provider: &record.provider,
            // A client chooses it if no worker has listed its models.
            model: &printable(record.logged_model(), MAX_MODEL_CHARS),
            endpoint: record.endpoint.as_str(),
            stream: record.is_streaming,
            body_bytes: record.body_bytes,
            conversation: record.pseudonym.as_deref(),
            worker: progress.worker.as_deref(),
            decision: decision.map(Decision::as_str),
            reason: decision.map(Decision::reason).filter(|reason| !reason.is_empty()),
            queue_ms: millis(progress.queue_wait),
            ttft_ms: self.first_byte_at.map(|at| millis(at - record.received_at)),
            duration_ms: millis(duration),
            input_tokens: tokens.map(|tokens| tokens.prompt_tokens),
            cached_tokens: tokens.and_then(|tokens| tokens.cached_tokens),
            output_tokens: tokens.map(|tokens| tokens.completion_tokens),
            outcome: outcome.as_str(),
        });
    }

    fn count_usage(&mut self, outcome: Outcome, received: Received, progress: &Progress) {
        let (record, shared) = (&self.record, &self.provider.shared);
        let usage = RequestUsage {
            outcome,
            endpoint: record.endpoint,
            is_stored: record.is_stored,
            request_bytes: record.body_bytes,
            received,
            progress,
        };
        let (sums, now) = (usage.sums(), SystemTime::now());
        if let Some(lease) = &mut self.lease {
            lease.settle(sums.tokens(), now);
        }
        let key = self.lease.as_ref().map(KeyLease::key);
        let model = match &self.model {
            Some(model) => Arc::clone(model),
            // A worker has listed it since.
            None if progress.attempts > 0 => self.provider.counted_as(&record.model),
            None => OTHER.into(),
        };
        let row = RowKey { key_id: key.map(Key::shared_id), model };
        shared.usage.record(row, key.map(Key::name), &sums, now);
        if let Some(key) = key {
            shared.metrics.key_used(key.name(), progress.token_counts, sums.slot_time);
        }
    }

    fn end_trace(&self, outcome: Outcome, code: u16, progress: &Progress, came_at: Option<Instant>) {
        let record = &self.record;
        let Some(trace) = &record.trace else { return };
        let sent_and_came = progress.dispatched_at.zip(came_at);
        trace.finish(&TraceEnd {
            outcome,
            code,
            is_broken: self.broken.is_some(),
            record,
            queue_wait: progress.queue_wait,
            first_byte: self.first_byte_at.map(|at| at - record.received_at),
            upstream_first_byte: sent_and_came.map(|(sent, came)| came.saturating_duration_since(sent)),
            unsent_since: (progress.attempts == 0).then_some(self.read_at),
            tokens: progress.token_counts,
        });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let duration = self.record.received_at.elapsed();
        let (end, received) = (self.record.response.end(), self.record.response.received());
        let (outcome, code) = self.outcome(end.as_ref());
        self.record.response.close();
        // The worker's session is about to report a complete response as such; its worker, which has no part in it any
        // more, must not receive a cancel.
        if !matches!(end, Some(Ok(()))) {
            self.provider.cancel(self.record.key, CancelReason::ClientDisconnect);
        }
        let stream = self.record.is_streaming;
        self.series.finished(RequestEnd { outcome, code, stream, duration });
        let metrics = &self.provider.shared.metrics;
        metrics.response_body_sent(self.record.endpoint, self.bytes);
        let mut progress = self.record.progress().clone();
        progress.end_attempt(Instant::now());
        if let Some(tokens) = progress.token_counts {
            let writing = self.first_byte_at.zip(self.last_byte_at).map(|(first, last)| last - first);
            self.series.tokens_used(tokens, writing);
        }
        if let Some(sent) = progress.dispatched_at {
            let spent = sent.saturating_duration_since(self.read_at).saturating_sub(progress.queue_wait);
            metrics.overhead_observed(self.record.endpoint, spent);
        }
        self.log(outcome, code, duration);
        self.journal(outcome, duration, &progress);
        self.count_usage(outcome, received, &progress);
        self.end_trace(outcome, code, &progress, received.first_byte_at);
    }
}
