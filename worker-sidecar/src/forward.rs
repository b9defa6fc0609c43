//! One request: from its `request` message to the last byte of its response.
//!
//! Each runs in its own task and owns all its resources: its slot or its lease, its backend connection, its entry on
//! the link. A cancel aborts the task, which releases everything: the connection first, then the lease, since a model
//! is unloaded as soon as its last lease is gone. A failure affects only its request: it is reported on the link, and
//! the link continues.

mod failure;
mod frames;
mod refusal;
mod texts;
mod trace;

pub use failure::Failure;
pub use texts::cancelled_completion;

use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use bytes::Bytes;
use http::{Method, Request as Head};
use modelrelay_multiplexer::actor::ConnectFailureReport;
use modelrelay_protocol::dialect::Dialect;
use modelrelay_protocol::grant_step;
use modelrelay_protocol::limits::MAX_ID_BYTES;
use modelrelay_protocol::message::{Request, ResponseDetails, WorkerError, WorkerToRelay};
use modelrelay_protocol::paths::{Endpoint, POST_PATHS, backend_path};
use modelrelay_protocol::rename::Renamer;
use modelrelay_protocol::usage::UsageReader;

use crate::backend::{Answer, Backend, BackendError, SpareMemory, Upload, UploadError};
use crate::link::{AwaitedBytes, Link, LinkRequestKey};
use crate::serving::{Admission, Leased, Start};
use crate::worker::Worker;
use trace::ForwardTrace;

/// The metric label of a request whose body violates the rules of its stream.
const BROKEN_UPLOAD: &str = "body";

/// A request in progress.
struct Job {
    worker: Arc<Worker>,
    link: Arc<Link>,
    key: LinkRequestKey,
    request: Request,
    upload: Upload,
    started: Instant,
    /// The multiplexer's lease. Dropped after everything that `run` holds, and so after the backend's connection.
    leased: Option<Leased>,
    /// Its spans, if traces are exported.
    trace: Option<Box<ForwardTrace>>,
}

/// A forwarded response, up to its last message.
struct Passed {
    complete: WorkerToRelay,
    /// `None` if it ended prematurely, and its connection is closed.
    answer: Option<Answer>,
}

/// Accepts a request. Never waits: a request that cannot start is rejected, or held if the relay does not support
/// rejections.
pub fn begin(worker: &Arc<Worker>, link: &Arc<Link>, mut request: Request) {
    let refuse = |code: &str, message: &str| link.push(&failure::error_message(&request.request_id, code, message));
    if link.core1 && worker.drain.is_draining() {
        grant_step!("drains", link.id.0, id = request.request_id);
        return refuse(WorkerError::DRAINING, "the worker is draining");
    }
    if request.request_id.is_empty() || request.request_id.len() > MAX_ID_BYTES {
        return tracing::warn!(relay = %link.relay, "skipping a request without a usable id");
    }
    if link.core1 && (request.stream.is_none() || request.content_length.is_none()) {
        return refuse(WorkerError::BAD_BODY, "the request has no stream id or no body length");
    }
    grant_step!("request", link.id.0, id = request.request_id);
    // Before anything else is read: a demand includes the requests before it.
    let (taken, start) = match worker.serving.admit(link, &request.model, request.class) {
        Admission::Accepted(taken, start) => (taken, start),
        // The grant that states this is already queued.
        Admission::AtCapacity => return refuse(WorkerError::AT_CAPACITY, "all slots are busy"),
        Admission::Unlinked => return,
    };
    let upload = upload_of(link, &worker.spare_memory, &mut request);
    let stream = request.stream.filter(|_| link.core1).map(|stream| (stream, upload.clone()));
    let window = request.window.unwrap_or(link.window);
    let id = request.request_id.clone();
    let awaited = note_conversation(worker, link, &request, upload.length());
    let (worker, job_link) = (Arc::clone(worker), Arc::clone(link));
    let begun = link.begin(&id, stream, window, taken, awaited, move |key| {
        let mut request = request;
        let traces = worker.traces.as_ref();
        let trace = traces.map(|traces| ForwardTrace::begin(traces, &mut request, &worker.settings.name)).map(Box::new);
        let job = Job { worker, link: job_link, key, request, upload, started: Instant::now(), leased: None, trace };
        tokio::spawn(job.run(start)).abort_handle()
    });
    if begun.is_none() {
        tracing::warn!(relay = %link.relay, request_id = %id, "skipping a request whose id is in use");
    }
}

/// Records the request's conversation, if it has a key, and adds its body to the backlog.
fn note_conversation(worker: &Worker, link: &Link, request: &Request, bytes: u64) -> AwaitedBytes {
    let conversation = request.conversation.filter(|_| link.homes1).map(|key| {
        // First, because a model that was loaded again does not have the former conversations any more.
        worker.conversations.handle_loads(worker.serving.loads());
        (key, worker.serving.model_id(&request.model))
    });
    worker.conversations.handle_request(link.id, conversation, bytes)
}

/// Fails a request whose body violates the rules of its stream.
pub fn fail_upload(worker: &Worker, link: &Link, id: &str, stream: u32, error: UploadError) {
    let message = match error {
        UploadError::Overrun => "the request body exceeds its credit",
        UploadError::TooLong => "the request body exceeds its announced length",
        UploadError::Misnamed => "the model in the request body differs from that of the request",
    };
    tracing::warn!(request_id = %id, stream, message, "backend error");
    worker.metrics.backend_errors(BROKEN_UPLOAD);
    if link.cancel(id) {
        grant_step!("errs", link.id.0, id = id);
        link.push(&failure::error_message(id, WorkerError::BAD_BODY, message));
    }
}

fn upload_of(link: &Arc<Link>, memory: &Arc<SpareMemory>, request: &mut Request) -> Upload {
    match (request.stream, request.content_length) {
        (Some(stream), Some(length)) if link.core1 => {
            let link = Arc::downgrade(link);
            Upload::new(
                length,
                Arc::clone(memory),
                Box::new(move |bytes| {
                    if let Some(link) = link.upgrade() {
                        link.return_credit(stream, bytes);
                    }
                }),
            )
        }
        _ => Upload::whole(Bytes::from(request.body.take().unwrap_or_default())),
    }
}

impl Drop for Job {
    /// Only a task that panicked has not replied yet. In every other case the request has been completed or removed by
    /// now, and this sends nothing; it only marks the trace of a body that violated the rules, because such a task is
    /// aborted from outside.
    fn drop(&mut self) {
        if self.upload.is_broken() {
            self.fail_trace(BROKEN_UPLOAD);
        }
        let message = if self.link.core1 {
            failure::error_message(&self.key.id, "internal_error", "internal worker error")
        } else {
            cancelled_completion(&self.key.id)
        };
        self.link.fail(&self.key, &message);
    }
}

impl Job {
    async fn run(mut self, start: Start) {
        let backend = match start {
            Start::Now(single) => single.backend(),
            Start::Held(single, held) => {
                if !self.link.wait_for_slot(&self.key, held).await {
                    return;
                }
                single.backend()
            }
            Start::Leasing(lease) => match lease.wait().await {
                Ok((leased, backend)) => {
                    self.leased = Some(leased);
                    backend
                }
                Err(error) => {
                    self.fail_trace(error.code());
                    return Box::pin(refusal::refuse(&self, &error)).await;
                }
            },
        };
        if let Some(trace) = &self.trace {
            trace.mark_forwarding();
        }
        self.rename();
        let path = self.path();
        tracing::info!(request_id = %self.key.id, model = %self.request.model, path, relay = %self.link.relay, "forwarding request");
        // Short or rare states are on the heap while they last, and not part of the task of each open stream.
        let passed = if self.link.core1 {
            frames::answer(&self, &backend).await
        } else {
            Box::pin(texts::answer(&self, &backend)).await
        };
        match passed {
            Ok(passed) => Box::pin(self.finish(&backend, passed)).await,
            Err(failure) => Box::pin(self.fail(&failure)).await,
        }
    }

    /// Makes the body name the model as its backend does, on the listed paths, where bodies name a model. No other
    /// path, and no query, does.
    fn rename(&self) {
        let Some(name) = self.leased.as_ref().and_then(Leased::backend_name) else { return };
        let is_named = self.upload.length() > 0 && POST_PATHS.iter().any(|(path, _)| *path == self.path());
        if is_named && name != self.request.model {
            let mut headers = self.request.headers.iter();
            let content_type = headers.find(|(name, _)| name.eq_ignore_ascii_case("content-type"));
            let content_type = content_type.map(|(_, value)| value.as_str());
            self.upload.rename(Renamer::new(content_type, &self.request.model, name));
        }
    }

    /// Sends the last message, once the slot is free for the next request.
    async fn finish(mut self, backend: &Backend, Passed { complete, answer }: Passed) {
        if let Some(trace) = &self.trace {
            trace.finish();
        }
        let leased = self.leased.take();
        let is_whole = answer.is_some();
        let finish = async {
            if let Some(leased) = leased {
                leased.release(is_whole).await;
            }
            self.link.finish(&self.key, &complete).await;
        };
        let recycle = async {
            if let Some(answer) = answer {
                backend.recycle(answer).await;
            }
        };
        tokio::join!(recycle, finish);
    }

    /// Reports that there is no response, or that it ended prematurely. The backend's connection is closed by now.
    async fn fail(mut self, failure: &Failure) {
        let is_reset = matches!(failure, Failure::Backend(BackendError::Reset(_)));
        if is_reset {
            // A lost backend is withdrawn before the failure is reported.
            self.worker.serving.check_after_reset().await;
        }
        self.note(failure);
        let failure_report = self.failure_report(failure);
        if let Some(leased) = self.leased.take() {
            leased.release(false).await;
        }
        match failure {
            Failure::Slot(error) => refusal::refuse(&self, error).await,
            Failure::Backend(_)
            | Failure::Lost(_)
            | Failure::Broken(_)
            | Failure::BadPath
            | Failure::TooLarge
            | Failure::NotText => {
                if self.link.core1 {
                    let message = failure::error_message(&self.key.id, failure.code(), &failure.public_message());
                    self.link.fail(&self.key, &message);
                } else {
                    texts::fail(&self, &failure.api_error()).await;
                }
            }
        }
        // Not earlier: a relay must read of the failure before it reads that the backend was found.
        if let Some(failure_report) = failure_report {
            failure_report.send();
        }
        if is_reset {
            self.worker.serving.handle_reset_reported(&self.link);
        }
    }

    /// Returns the report for the slot about its backend. The slot checks the backend itself: it probes at once, and
    /// reports the result in its own messages.
    fn failure_report(&self, failure: &Failure) -> Option<ConnectFailureReport> {
        match failure {
            Failure::Backend(BackendError::Unreachable(_) | BackendError::Reset(_)) | Failure::Broken(_) => {
                self.leased.as_ref()?.failure_report()
            }
            Failure::Backend(BackendError::BadAnswer(_))
            | Failure::Lost(_)
            | Failure::BadPath
            | Failure::TooLarge
            | Failure::NotText
            | Failure::Slot(_) => None,
        }
    }

    /// Logs and counts a failure, and does everything that must precede its report.
    fn note(&self, failure: &Failure) {
        tracing::warn!(request_id = %self.key.id, path = self.path(), error = %failure, "backend error");
        self.worker.metrics.backend_errors(failure.label());
        self.fail_trace(failure.label());
        self.react(failure);
    }

    fn fail_trace(&self, reason: &'static str) {
        if let Some(trace) = &self.trace {
            trace.fail(reason);
        }
    }

    /// Sends the request. The status of the returned response may be forwarded.
    async fn send(&self, backend: &Backend) -> Result<Answer, Failure> {
        let mut head = self.head(backend).ok_or(Failure::BadPath)?;
        if let Some(trace) = &self.trace {
            let method = head.method().to_string();
            trace.begin_backend(&backend.settings().url, &method, self.path(), head.headers_mut());
        }
        let mut sending = Box::pin(backend.send(head, &self.upload));
        // If this process was stopped after it had read the request, another worker may have served it since. The
        // session ends an overdue link in a moment, and with it this task; until then nothing more of the request is
        // sent.
        let sending = poll_fn(|cx| if self.link.is_overdue() { Poll::Pending } else { sending.as_mut().poll(cx) });
        let answer = self.unless_ended(sending).await?.map_err(Failure::from)?;
        // A copy: a borrow of the response would keep its place in the task during the check below.
        let status = answer.head.status;
        let status = status.as_u16();
        let endpoint = self.endpoint();
        self.worker.metrics.observe_backend(endpoint, status, self.started.elapsed());
        if let Some(trace) = &self.trace {
            trace.mark_answered(status);
        }
        if !(200..=599).contains(&status) {
            return Err(Failure::Backend(BackendError::BadAnswer(format!("status {status}"))));
        }
        if status >= 400 {
            // It accepts no more of the body, and a write that it resets could lose the response.
            self.upload.stop();
        }
        if status >= 500 {
            // On the heap, because it is rare.
            return Box::pin(self.unless_lost(backend, answer)).await;
        }
        self.note_status(status);
        Ok(answer)
    }

    /// Records a forwarded status for its model.
    fn note_status(&self, status: u16) {
        let model = self.leased.as_ref().and_then(Leased::model).unwrap_or(&self.request.model);
        self.worker.note_status(model, status);
    }

    /// Returns a server error to pass on, unless the backend is lost. An older relay does not requeue, so it gets the
    /// error.
    async fn unless_lost(&self, backend: &Backend, answer: Answer) -> Result<Answer, Failure> {
        if self.worker.serving.is_lost(backend).await && self.link.core1 {
            return Err(Failure::Lost(answer.head.status.as_u16()));
        }
        self.note_status(answer.head.status.as_u16());
        Ok(answer)
    }

    /// Returns the next bytes of the response; `None` at its end.
    async fn next_bytes(&self, answer: &mut Answer) -> Result<Option<Bytes>, Failure> {
        self.unless_ended(answer.next()).await?.transpose().map_err(Failure::Broken)
    }

    /// Runs `work` unless the slot requires the request to end.
    async fn unless_ended<T>(&self, work: impl Future<Output = T>) -> Result<T, Failure> {
        let ended = async {
            match &self.leased {
                Some(leased) => leased.ended().await,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            error = ended => Err(Failure::Slot(error)),
            done = work => Ok(done),
        }
    }

    fn head(&self, backend: &Backend) -> Option<Head<()>> {
        let method = self.request.method.as_deref().unwrap_or("POST");
        let path = backend_path(method, &self.request.endpoint_path)?;
        let headers = self.request.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let further = &self.link.request_headers;
        backend.request_head(&method.parse::<Method>().ok()?, &path, headers, further, self.upload.length())
    }

    /// Takes the steps that must precede the report of a failure: a relay must read of the withdrawal first.
    fn react(&self, failure: &Failure) {
        match failure {
            Failure::Backend(BackendError::Unreachable(error)) => self.worker.serving.handle_unreachable(error),
            Failure::Backend(BackendError::Reset(_)) | Failure::Broken(_) => self.worker.serving.handle_broken(),
            Failure::Backend(BackendError::BadAnswer(_))
            | Failure::Lost(_)
            | Failure::BadPath
            | Failure::TooLarge
            | Failure::NotText
            | Failure::Slot(_) => {}
        }
    }

    fn usage_reader(&self, answer: &Answer) -> UsageReader {
        let method = self.request.method.as_deref().unwrap_or("POST");
        let content_type = answer.head.headers.get(http::header::CONTENT_TYPE);
        // The usage of an error is not counted.
        let path = if answer.head.status.is_success() { self.path() } else { "" };
        let reader = UsageReader::new(method, path, content_type.and_then(|value| value.to_str().ok()));
        reader.with_details(self.request.wants_details && self.link.core1)
    }

    /// Adds the kind of backend to the details of its response, which are sent unless nothing is known.
    fn details_of(backend: &Backend, mut details: Box<ResponseDetails>) -> Option<Box<ResponseDetails>> {
        details.backend = backend.settings().kind().map(str::to_owned);
        (!details.is_empty()).then_some(details)
    }

    /// Returns the path without the query, which may contain anything.
    fn path(&self) -> &str {
        self.request.endpoint_path.split('?').next().unwrap_or_default()
    }

    fn endpoint(&self) -> Endpoint {
        let method = self.request.method.as_deref().unwrap_or("POST");
        backend_path(method, &self.request.endpoint_path).map_or(Endpoint::Other, |path| path.endpoint)
    }

    fn dialect(&self) -> Dialect {
        if self.request.headers.keys().any(|name| name.eq_ignore_ascii_case("anthropic-version")) {
            Dialect::Anthropic
        } else {
            self.endpoint().dialect()
        }
    }

    fn send_message(&self, message: &WorkerToRelay) {
        self.link.send_message(&self.key, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The task is moved to its place when it starts, which the profile showed: 8 % of a short response.
    #[test]
    fn request_task_is_small() {
        fn size<A, F>(_: impl FnOnce(A) -> F) -> usize {
            size_of::<F>()
        }
        let bytes = size(|(job, start): (Job, Start)| job.run(start));
        assert!(bytes <= 2592, "{bytes} bytes");
    }
}
