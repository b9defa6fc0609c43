//! Handles whose label values are looked up once: per provider, and per provider, model and endpoint.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use modelrelay_protocol::location::Location;
use modelrelay_protocol::message::{CancelReason, TokenCounts};
use modelrelay_protocol::paths::Endpoint;
use prometheus::{Histogram, IntCounter};

use super::families::Families;
use super::labels::{
    ConnectionResult, DisconnectReason, Outcome, QueueOutcome, RequeueReason, Stage, TokenKind, UNKNOWN,
};
use crate::dispatch::Decision;
use crate::telemetry::stats::{ProviderStats, StatsReport};

/// The most series of models that one provider may have, with endpoints counted separately. Workers name models; a
/// worker that names others every minute must not fill the memory. Beyond the limit a model is `unknown`.
const MAX_MODEL_SERIES: usize = 8192;

/// The counts of one provider, for metrics and for `/admin/stats`.
pub struct ProviderSeries {
    name: Arc<str>,
    families: Arc<Families>,
    stats: Arc<ProviderStats>,
    retired: Arc<AtomicBool>,
    /// By model and endpoint; looked up once per request.
    requests: RwLock<HashMap<(String, Endpoint), Arc<RequestSeries>>>,
}

impl ProviderSeries {
    pub(super) fn new(name: &str, families: Arc<Families>) -> Self {
        Self {
            name: Arc::from(name),
            families,
            stats: Arc::new(ProviderStats::new(Instant::now())),
            retired: Arc::new(AtomicBool::new(false)),
            requests: RwLock::default(),
        }
    }

    /// The provider's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The series of a request. `model` is the id that workers register (with aliases resolved), or `None` if no worker
    /// registered the client's name.
    pub fn request(&self, model: Option<&str>, endpoint: Endpoint) -> Arc<RequestSeries> {
        let key = (model.unwrap_or(UNKNOWN).to_owned(), endpoint);
        let known = self.requests.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        known.unwrap_or_else(|| self.make_request(key))
    }

    /// Observes a wait in the queue; a requeued request has several.
    pub fn queue_wait_ended(&self, outcome: QueueOutcome, waited: Duration) {
        if self.is_retired() {
            return;
        }
        self.stats.queue_waited(waited, Instant::now());
        self.families.queue_wait.with_label_values(&[&*self.name, outcome.as_str()]).observe(waited.as_secs_f64());
    }

    /// Counts a request that was sent to a worker.
    pub fn placed(&self, decision: Decision) {
        if !self.is_retired() {
            let labels = [&*self.name, decision.as_str(), decision.reason()];
            self.families.placements.with_label_values(&labels).inc();
        }
    }

    /// Returns the counter of requests that are sent to workers there; `None` for an unknown location.
    pub fn zone_requests(&self, location: &Location) -> Option<IntCounter> {
        if self.is_retired() { None } else { self.families.zones.requests_to(&self.name, location) }
    }

    /// Counts a requeue.
    pub fn requeued(&self, reason: RequeueReason) {
        if self.is_retired() {
            return;
        }
        self.stats.requeued();
        self.families.requeues.with_label_values(&[&*self.name, reason.as_str()]).inc();
    }

    /// Counts a cancellation.
    pub fn cancelled(&self, reason: CancelReason, stage: Stage) {
        if !self.is_retired() {
            self.families.cancellations.with_label_values(&[&*self.name, reason.as_str(), stage.as_str()]).inc();
        }
    }

    /// Counts a worker that connected or was rejected.
    pub fn worker_connected(&self, result: ConnectionResult) {
        if !self.is_retired() {
            self.families.worker_connections.with_label_values(&[&*self.name, result.as_str()]).inc();
        }
    }

    /// Counts an ended link.
    pub fn worker_disconnected(&self, reason: DisconnectReason) {
        if !self.is_retired() {
            self.families.worker_disconnects.with_label_values(&[&*self.name, reason.as_str()]).inc();
        }
    }

    /// Observes the round trip of a worker's pong.
    pub fn heartbeat_answered(&self, round_trip: Duration) {
        if !self.is_retired() {
            self.families.heartbeat_rtt.with_label_values(&[&*self.name]).observe(round_trip.as_secs_f64());
        }
    }

    /// Totals since the start, and quantiles over the last minutes.
    pub fn stats(&self) -> StatsReport {
        self.stats.report(Instant::now())
    }

    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    fn make_request(&self, mut key: (String, Endpoint)) -> Arc<RequestSeries> {
        let mut requests = self.requests.write().unwrap_or_else(PoisonError::into_inner);
        if requests.len() >= MAX_MODEL_SERIES && !requests.contains_key(&key) {
            UNKNOWN.clone_into(&mut key.0);
        }
        let series = requests.entry(key).or_insert_with_key(|(model, endpoint)| {
            Arc::new(RequestSeries {
                provider: Arc::clone(&self.name),
                model: model.clone(),
                endpoint: *endpoint,
                families: Arc::clone(&self.families),
                stats: Arc::clone(&self.stats),
                retired: Arc::clone(&self.retired),
                duration: [OnceLock::new(), OnceLock::new()],
                first_token: OnceLock::new(),
                upstream_first_token: OnceLock::new(),
                chunk_gap: OnceLock::new(),
            })
        });
        Arc::clone(series)
    }
}

/// How a request ended, for [`RequestSeries::finished`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestEnd {
    /// The outcome.
    pub outcome: Outcome,
    /// The status that the client got, or would have got; 499 if it had disconnected.
    pub code: u16,
    /// True if it requested a stream.
    pub stream: bool,
    /// The time from its acceptance to its last byte.
    pub duration: Duration,
}

/// The counts of requests of one provider, model and endpoint. Children are created when first needed, so that a model
/// which is never streamed has no series of chunks.
pub struct RequestSeries {
    provider: Arc<str>,
    model: String,
    endpoint: Endpoint,
    families: Arc<Families>,
    stats: Arc<ProviderStats>,
    retired: Arc<AtomicBool>,
    /// By `stream`: false, true.
    duration: [OnceLock<Histogram>; 2],
    first_token: OnceLock<Histogram>,
    upstream_first_token: OnceLock<Histogram>,
    chunk_gap: OnceLock<Histogram>,
}

impl RequestSeries {
    /// The model label.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Counts a request that ended.
    pub fn finished(&self, end: RequestEnd) {
        if self.is_retired() {
            return;
        }
        self.stats.finished(end.outcome);
        let code = end.code.to_string();
        let labels = [&*self.provider, &self.model, self.endpoint.as_str(), end.outcome.as_str(), &code];
        self.families.requests.with_label_values(&labels).inc();
        let stream = if end.stream { "true" } else { "false" };
        let make = || {
            self.families.request_duration.with_label_values(&[
                &*self.provider,
                &self.model,
                self.endpoint.as_str(),
                stream,
            ])
        };
        self.duration[usize::from(end.stream)].get_or_init(make).observe(end.duration.as_secs_f64());
    }

    /// Observes the time from a request's acceptance to the first byte of its body to the client.
    pub fn first_byte_sent(&self, since_accepted: Duration) {
        if self.is_retired() {
            return;
        }
        self.stats.first_byte_sent(since_accepted, Instant::now());
        let make = || self.families.first_token.with_label_values(&self.labels());
        self.first_token.get_or_init(make).observe(since_accepted.as_secs_f64());
    }

    /// Observes the time from a request's dispatch to the first byte of a body from the worker.
    pub fn first_byte_received(&self, since_dispatched: Duration) {
        if self.is_retired() {
            return;
        }
        let make = || self.families.upstream_first_token.with_label_values(&self.labels());
        self.upstream_first_token.get_or_init(make).observe(since_dispatched.as_secs_f64());
    }

    /// Observes the time between two chunks of a stream. Called per chunk.
    pub fn chunk_received(&self, since_last: Duration) {
        if self.is_retired() {
            return;
        }
        let make = || self.families.inter_chunk.with_label_values(&[&*self.provider, &self.model]);
        self.chunk_gap.get_or_init(make).observe(since_last.as_secs_f64());
    }

    /// Counts the tokens that the backend reported. `writing` is the time from its first byte to its last, for the time
    /// per token.
    pub fn tokens_used(&self, tokens: TokenCounts, writing: Option<Duration>) {
        if self.is_retired() {
            return;
        }
        for (kind, count) in TokenKind::counts(&tokens).into_iter().filter(|(_, count)| *count > 0) {
            self.stats.tokens_used(kind, count);
            self.families.tokens.with_label_values(&[&*self.provider, &self.model, kind.as_str()]).inc_by(count);
        }
        if let (Some(writing), 2..) = (writing, tokens.completion_tokens) {
            let per_token = writing.as_secs_f64() / (tokens.completion_tokens - 1) as f64;
            self.families.output_token.with_label_values(&[&*self.provider, &self.model]).observe(per_token);
        }
    }

    fn labels(&self) -> [&str; 3] {
        [&*self.provider, &self.model, self.endpoint.as_str()]
    }

    fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }
}
