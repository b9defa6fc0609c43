//! Executes the core's effects.

use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::message as wire;
use modelrelay_protocol::queue_position::QueuePosition;
use tracing::{debug, info, warn};

use super::{Provider, ProviderCore};
use crate::dispatch::{
    CancelReason, Class, Decision, Effect, Failure, FailureReport, LoadFailure, ModelDemand, RequestKey, RequeueReason,
    Stage, WorkerKey,
};
use crate::provider::request::{NeedsCore1, RequestRecord};
use crate::telemetry::journal::PER_REQUEST;
use crate::telemetry::metrics::{QueueOutcome, RequeueReason as RequeueLabel};

impl Provider {
    pub(super) fn execute(&self, state: &mut ProviderCore, effect: Effect) {
        match effect {
            Effect::Send { worker, request, attempt, waited, decision, class } => {
                self.send(state, (worker, request, attempt), waited, (decision, class));
            }
            Effect::CancelSent { worker, request, attempt: _, reason } => {
                if let Some(link) = state.links.get(&worker) {
                    link.cancel(request, reason);
                }
            }
            Effect::Fail { request, failure, attempts, age, position } => {
                self.fail(state, (request, attempts, age), failure, position);
            }
            Effect::Cancelled { request, reason, stage } => {
                self.count_cancelled(reason, stage);
                if let Some(record) = self.forget(state, request) {
                    record.progress().end_wait(Instant::now());
                }
            }
            Effect::Severed { request, worker: _ } => {
                if let Some(record) = self.forget(state, request) {
                    let lost = "the worker was lost during its response; the response is incomplete";
                    record.response.fail(ApiError::new(ErrorKind::WorkerLost, lost));
                }
            }
            Effect::Finished { request, .. } => {
                self.forget(state, request);
            }
            Effect::Requeued { request, reason, attempt } => self.requeued(state, request, reason, attempt),
            Effect::Demand { worker, demand } => {
                if let Some(link) = state.links.get(&worker) {
                    link.set_demand(demand_message(&demand));
                }
            }
            Effect::DrainedIdle { worker } => {
                if let Some(link) = state.links.get(&worker) {
                    info!(provider = %self.name, worker = %link.info.name, worker_id = %link.info.id, "worker drained");
                    link.handle_drained();
                }
            }
        }
    }

    fn send(
        &self,
        state: &ProviderCore,
        (worker, request, attempt): (WorkerKey, RequestKey, u32),
        waited: Duration,
        (decision, class): (Decision, Class),
    ) {
        let (Some(link), Some(record)) = (state.links.get(&worker), state.requests.get(&request)) else {
            // The core knows only links and requests that the shell passed to it, and removes them first.
            debug!(?worker, ?request, "dispatch target is gone");
            return;
        };
        {
            let mut progress = record.progress();
            progress.worker = Some(Arc::clone(&link.info.name));
            let now = Instant::now();
            progress.dispatched_at = Some(now);
            progress.slot_since = Some(now);
            progress.waiting_since = None;
            progress.queue_wait += waited;
            progress.attempts = attempt;
            progress.decision = Some(decision);
        }
        self.series.queue_wait_ended(QueueOutcome::Dispatched, waited);
        self.series.placed(decision);
        if let Some(requests) = &link.zone_requests {
            requests.inc();
        }
        if let Some(trace) = &record.trace {
            trace.begin_attempt(record, &link.info.name, (attempt, decision), waited);
        }
        let wire_id = link.send(record, attempt, class);
        info!(
            target: PER_REQUEST,
            request_id = record.id,
            provider = %self.name,
            model = record.logged_model(),
            worker = %link.info.name,
            attempt,
            wire_id = &*wire_id,
            queue_ms = waited.as_millis() as u64,
            "request dispatched"
        );
    }

    fn fail(
        &self,
        state: &mut ProviderCore,
        (request, attempts, age): (RequestKey, u32, Duration),
        failure: Failure,
        position: Option<QueuePosition>,
    ) {
        let Some(record) = self.forget(state, request) else { return };
        if attempts == 0 {
            record.progress().queue_wait = age;
        } else {
            record.progress().end_wait(Instant::now());
        }
        let error = self.explain(state, &record, failure, attempts).with_queue_position(position);
        record.response.fail(error);
    }

    /// Returns the error for the client, and logs the failures that an operator can prevent.
    fn explain(&self, state: &ProviderCore, record: &RequestRecord, failure: Failure, attempts: u32) -> ApiError {
        let request_id = record.id.as_str();
        let secs = |secs: u32| Duration::from_secs(u64::from(secs));
        let model = &record.model;
        match failure {
            Failure::QueueFull { retry_after_secs } => {
                warn!(request_id, provider = %self.name, "queue full");
                ApiError::new(ErrorKind::QueueFull, "Service temporarily at capacity")
                    .with_retry_after(secs(retry_after_secs))
            }
            Failure::Displaced { retry_after_secs } => {
                warn!(request_id, provider = %self.name, "displaced by a request of a higher class");
                let message = "the queue is full, and a request of a higher class took the place of this one";
                ApiError::new(ErrorKind::Displaced, message).with_retry_after(secs(retry_after_secs))
            }
            Failure::QueueShareFull { percent } => {
                warn!(request_id, provider = %self.name, "queue share of a key full");
                let message =
                    format!("the API key's requests use their full {percent} percent of the queue (max_queue_percent)");
                ApiError::new(ErrorKind::KeyLimit, message)
            }
            Failure::QueueTimeout { retry_after_secs } => {
                warn!(request_id, provider = %self.name, model = record.logged_model(), "queue timeout");
                let mut message = "queue timeout: no worker available within deadline".to_owned();
                if !state.core.worker_serves(model) {
                    message.push_str(&format!("; no worker serves {model}: see /v1/models"));
                    message.push_str(&state.workers_without_models());
                }
                ApiError::new(ErrorKind::QueueTimeout, message).with_retry_after(secs(retry_after_secs))
            }
            Failure::RequestTimeout => ApiError::new(ErrorKind::RequestTimeout, "request timeout"),
            Failure::RequeueExhausted => {
                warn!(request_id, provider = %self.name, attempts, "requeue exhausted");
                ApiError::new(ErrorKind::RequeueExhausted, "requeue attempts exhausted")
            }
            Failure::Disabled => ApiError::new(ErrorKind::ProviderDisabled, "Provider is currently disabled"),
            Failure::Deleted => ApiError::new(ErrorKind::ProviderDeleted, "Provider was deleted"),
            Failure::Draining => ApiError::new(ErrorKind::Draining, "the relay is shutting down; try again"),
            Failure::BackendUnreachable => ApiError::new(
                ErrorKind::BackendUnreachable,
                format!("the backend that serves {model} could not be reached"),
            ),
            Failure::SeveredBySwap => {
                ApiError::new(ErrorKind::SeveredBySwap, format!("{model} was swapped out before it responded"))
            }
            Failure::LoadFailed { code, retry_after, report }
            | Failure::ModelFailed { worker: _, code, retry_after, report } => {
                not_loaded(model, code, &report, retry_after)
            }
            Failure::ModelLoading { retry_after } => {
                let waited = record.received_at.elapsed().as_secs();
                let message = format!("{model} could not be loaded within the {waited} s that this request has waited");
                match retry_after {
                    Some(after) => {
                        let message = format!("{message}; it is expected in {} s", after.as_millis().div_ceil(1000));
                        ApiError::new(ErrorKind::ModelLoading, message).with_retry_after(after)
                    }
                    None => ApiError::new(ErrorKind::ModelLoading, message),
                }
            }
            Failure::WorkerTooOld { worker } => self.too_old(state, record, worker),
            Failure::AffinityLost => ApiError::new(
                ErrorKind::PreviousResponseNotFound,
                "the worker that has the previous response is no longer connected",
            ),
            Failure::CancelledByAdmin => {
                ApiError::new(ErrorKind::CancelledByAdmin, "the request was cancelled by an admin")
            }
            Failure::Fatal(report) => ApiError::new(ErrorKind::of_worker(&report.code), report.message.clone()),
        }
    }

    fn too_old(&self, state: &ProviderCore, record: &RequestRecord, worker: WorkerKey) -> ApiError {
        let link = state.links.get(&worker);
        let version = link.and_then(|link| link.info.version.clone()).unwrap_or_else(|| "older than 0.1.0".to_owned());
        match record.needs_core1 {
            Some(NeedsCore1::Size) => ApiError::new(
                ErrorKind::RequestTooLarge,
                format!(
                    "the request is too large for the connected workers (version {version}), which take 16 MiB encoded; update them"
                ),
            ),
            Some(NeedsCore1::Form) | None => ApiError::new(
                ErrorKind::WorkerTooOld,
                format!("the connected workers (version {version}) are too old to carry this request; update them"),
            ),
        }
    }

    fn requeued(&self, state: &ProviderCore, request: RequestKey, reason: RequeueReason, attempt: u32) {
        let label = RequeueLabel::from(reason);
        self.series.requeued(label);
        let Some(record) = state.requests.get(&request) else { return };
        record.response.detach(attempt);
        {
            let (mut progress, now) = (record.progress(), Instant::now());
            progress.end_attempt(now);
            progress.dispatched_at = None;
            progress.waiting_since = Some(now);
        }
        if let Some(trace) = &record.trace {
            trace.requeue(label.as_str());
        }
        warn!(
            request_id = record.id,
            provider = %self.name,
            model = record.logged_model(),
            reason = label.as_str(),
            attempt,
            "request requeued"
        );
    }

    fn count_cancelled(&self, reason: CancelReason, stage: Stage) {
        let reason = match reason {
            CancelReason::ClientDisconnect
            | CancelReason::SlowClient
            | CancelReason::StreamLimit
            | CancelReason::NoMemory
            | CancelReason::Admin
            | CancelReason::WorkerFault => wire::CancelReason::ClientDisconnect,
            CancelReason::Timeout => wire::CancelReason::Timeout,
            CancelReason::DrainDeadline => wire::CancelReason::ServerShutdown,
        };
        self.series.cancelled(reason, stage.into());
    }

    fn forget(&self, state: &mut ProviderCore, request: RequestKey) -> Option<Arc<RequestRecord>> {
        let record = state.requests.remove(&request);
        if let Some(record) = &record {
            record.progress().end_attempt(Instant::now());
        }
        self.shared.progress.notify_waiters();
        if state.deleted && state.requests.is_empty() {
            self.timer.notify_one();
        }
        record
    }
}

impl ProviderCore {
    /// Returns the likely cause of a missing model although workers are connected: a worker lists no models while its
    /// backend is down.
    fn workers_without_models(&self) -> String {
        match self.links.values().filter(|link| !link.lists_models()).count() {
            0 => String::new(),
            1 => "; a connected worker lists no models: its backend is down or has no models".to_owned(),
            count => format!("; {count} connected workers list no models: their backends are down or have no models"),
        }
    }
}

fn not_loaded(model: &str, code: LoadFailure, report: &FailureReport, retry_after: Option<Duration>) -> ApiError {
    let kind = match code {
        LoadFailure::InsufficientMemory => ErrorKind::InsufficientMemory,
        LoadFailure::BackendUnavailable => ErrorKind::BackendUnavailable,
        LoadFailure::SlotQuarantined => ErrorKind::SlotQuarantined,
    };
    let reason = Some(&report.message).filter(|message| !message.is_empty()).cloned();
    let message = reason.unwrap_or_else(|| format!("{model} could not be loaded"));
    ApiError::new(kind, message).with_worker_retry_after(retry_after)
}

fn demand_message(demand: &[ModelDemand]) -> wire::Demand {
    let models = demand.iter().map(|model| wire::ModelDemand {
        id: model.model.to_string(),
        waiting: model.waiting,
        oldest_ms: model.oldest.as_millis() as u64,
        sum_ms: model.sum.as_millis() as u64,
        class: model.class.into(),
        rank: model.rank,
    });
    wire::Demand { models: models.collect() }
}
