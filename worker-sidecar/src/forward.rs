//! One request: from its `request` message to the last byte of its answer.
//!
//! Each runs in a task of its own and owns all that it holds: its slot, its backend connection, its place on the link. A
//! cancel aborts the task, and with that everything is given back. Its failure is its own: it is said on the link, and the
//! link goes on.

mod failure;
mod frames;
mod texts;

pub use failure::Failure;
pub use texts::cancelled_completion;

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{Method, Request as Head};
use modelrelay_protocol::credit::ReceiveWindow;
use modelrelay_protocol::dialect::Dialect;
use modelrelay_protocol::limits::{MAX_ID_BYTES, STREAM_WINDOW_BYTES, WORKER_MAX_OUTSTANDING_BYTES};
use modelrelay_protocol::message::{Request, WorkerError, WorkerToRelay};
use modelrelay_protocol::paths::{Endpoint, backend_path};
use modelrelay_protocol::usage::UsageReader;

use crate::backend::{Answer, Backend, BackendError, Upload, UploadError};
use crate::capacity::{Held, Place};
use crate::relay_link::{Link, RequestKey};
use crate::worker::Worker;

/// A request on its way.
struct Job {
    worker: Arc<Worker>,
    link: Arc<Link>,
    key: RequestKey,
    request: Request,
    upload: Upload,
    started: Instant,
}

/// Takes a request in. Never waits: what cannot begin is refused, or held where the relay does not know refusals.
pub fn begin(worker: &Arc<Worker>, link: &Arc<Link>, mut request: Request) {
    let refuse = |code: &str, message: &str| link.push(&failure::error_message(&request.request_id, code, message));
    if link.core1 && worker.drain.is_draining() {
        return refuse(WorkerError::DRAINING, "the worker is draining");
    }
    if request.request_id.is_empty() || request.request_id.len() > MAX_ID_BYTES {
        return tracing::warn!(relay = %link.relay, "skipping a request without a usable id");
    }
    if link.core1 && (request.stream.is_none() || request.content_length.is_none()) {
        return refuse(WorkerError::BAD_BODY, "the request names no stream or no length");
    }
    let (slot, held) = match worker.capacity.handle_request(link) {
        Place::Run(slot) => (Some(slot), None),
        Place::Held(held) => (None, Some(held)),
        // The grant that says so is queued already.
        Place::AtCapacity => return refuse(WorkerError::AT_CAPACITY, "all slots are taken"),
    };
    let upload = upload_of(link, &mut request);
    let stream = request.stream.filter(|_| link.core1).map(|stream| (stream, upload.clone()));
    let window = request.window.unwrap_or(link.window);
    let id = request.request_id.clone();
    let (worker, job_link) = (Arc::clone(worker), Arc::clone(link));
    let begun = link.begin(&id, stream, window, slot, move |key| {
        let job = Job { worker, link: job_link, key, request, upload, started: Instant::now() };
        tokio::spawn(job.run(held)).abort_handle()
    });
    if begun.is_none() {
        tracing::warn!(relay = %link.relay, request_id = %id, "skipping a request whose id is in use");
    }
}

/// A request body broke the rules of its stream: that request fails.
pub fn fail_upload(worker: &Worker, link: &Link, id: &str, stream: u32, error: UploadError) {
    let message = match error {
        UploadError::Overrun => "the request body exceeds its credit",
        UploadError::TooLong => "the request body exceeds its announced length",
    };
    tracing::warn!(request_id = %id, stream, message, "backend error");
    worker.metrics.backend_errors("body");
    if link.cancel(id) {
        link.push(&failure::error_message(id, WorkerError::BAD_BODY, message));
    }
}

fn upload_of(link: &Arc<Link>, request: &mut Request) -> Upload {
    match (request.stream, request.content_length) {
        (Some(stream), Some(length)) if link.core1 => {
            let window = ReceiveWindow::new(STREAM_WINDOW_BYTES, WORKER_MAX_OUTSTANDING_BYTES);
            let link = Arc::downgrade(link);
            Upload::new(
                length,
                window,
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
    /// A task that panicked has answered nobody. In every other case the request is answered or forgotten by now, and
    /// this says nothing.
    fn drop(&mut self) {
        let message = if self.link.core1 {
            failure::error_message(&self.key.id, "internal_error", "the worker failed")
        } else {
            cancelled_completion(&self.key.id)
        };
        self.link.fail(&self.key, &message);
    }
}

impl Job {
    async fn run(self, held: Option<Held>) {
        if let Some(held) = held
            && !self.link.wait_for_slot(&self.key, held).await
        {
            return;
        }
        let path = self.path();
        tracing::info!(request_id = %self.key.id, model = %self.request.model, path, relay = %self.link.relay, "forwarding request");
        let result = if self.link.core1 { frames::answer(&self).await } else { texts::answer(&self).await };
        if let Err(failure) = result {
            tracing::warn!(request_id = %self.key.id, path, error = %failure, "backend error");
            self.worker.metrics.backend_errors(failure.label());
            self.react(&failure);
            if self.link.core1 {
                let message = failure::error_message(&self.key.id, failure.code(), &failure.public_message());
                self.link.fail(&self.key, &message);
            } else {
                texts::fail(&self, &failure).await;
            }
        }
    }

    /// Sends the request. The answer's status is one that may be passed on.
    async fn send(&self) -> Result<(Arc<Backend>, Answer), Failure> {
        let backend = self.worker.backend.load_full();
        let head = self.head(&backend).ok_or(Failure::BadPath)?;
        let answer = backend.send(head, &self.upload).await.map_err(Failure::from)?;
        let status = answer.head.status.as_u16();
        let endpoint = self.endpoint();
        self.worker.metrics.observe_backend(endpoint, status, self.started.elapsed());
        if !(200..=599).contains(&status) {
            return Err(Failure::Backend(BackendError::BadAnswer(format!("status {status}"))));
        }
        if status >= 400 {
            // It wants no more of the body, and a write that it answers with a reset could cost us the answer.
            self.upload.stop();
        }
        Ok((backend, answer))
    }

    fn head(&self, backend: &Backend) -> Option<Head<()>> {
        let method = self.request.method.as_deref().unwrap_or("POST");
        let path = backend_path(method, &self.request.endpoint_path)?;
        let headers = self.request.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        backend.request_head(&method.parse::<Method>().ok()?, &path, headers, self.upload.length())
    }

    /// What must happen before the failure is said: a relay that reads it has read of the withdrawal first.
    fn react(&self, failure: &Failure) {
        match failure {
            Failure::Backend(BackendError::Unreachable(_)) => {
                self.worker.catalogue.handle_unreachable(&self.worker.links, self.worker.capacity.load());
            }
            Failure::Backend(BackendError::Reset(_)) | Failure::Broken(_) => self.worker.catalogue.look_again(),
            Failure::Backend(BackendError::BadAnswer(_)) | Failure::BadPath | Failure::TooLarge | Failure::NotText => {}
        }
    }

    fn usage_reader(&self, answer: &Answer) -> UsageReader {
        let method = self.request.method.as_deref().unwrap_or("POST");
        let content_type = answer.head.headers.get(http::header::CONTENT_TYPE);
        // An error's usage is nobody's.
        let path = if answer.head.status.is_success() { self.path() } else { "" };
        UsageReader::new(method, path, content_type.and_then(|value| value.to_str().ok()))
    }

    /// Without the query, which may hold anything.
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

    fn say(&self, message: &WorkerToRelay) {
        self.link.say(&self.key, message);
    }
}
