//! The reply for a request that a slot does not serve: a code if the relay acts on it, otherwise a response.

use bytes::Bytes;
use modelrelay_multiplexer::error::SlotError;
use modelrelay_multiplexer::slots::Refusal;
use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::message::{ResponseComplete, ResponseStart, WorkerToRelay};

use super::{Job, texts};

/// Ends a request that its slot does not serve, or stopped serving.
pub(super) async fn refuse(job: &Job, error: &SlotError) {
    tracing::info!(request_id = %job.key.id, model = %job.request.model, code = error.code(), "not served: {error}");
    match Refusal::new(error, job.link.peer()) {
        Refusal::Code(mut message) => {
            message.request_id = Some(job.key.id.to_string());
            job.link.fail(&job.key, &WorkerToRelay::Error(message));
        }
        Refusal::Answer(error) if job.link.core1 => answer(job, &error).await,
        Refusal::Answer(error) => texts::fail(job, &error).await,
    }
}

async fn answer(job: &Job, error: &ApiError) {
    let request_id = job.key.id.to_string();
    let body = Bytes::from(job.dialect().error_body(error, &request_id));
    let of_error = error.headers().into_iter().map(|(name, value)| (name.to_owned(), value));
    let content_type = ("content-type".to_owned(), "application/json".to_owned());
    job.send_message(&WorkerToRelay::ResponseStart(ResponseStart {
        request_id: request_id.clone(),
        status_code: error.status(),
        headers: of_error.chain([content_type]).collect(),
        content_length: Some(body.len() as u64),
    }));
    // Queued regardless of the limit, because nothing follows.
    let _ = job.link.send_body(&job.key, body);
    let complete = ResponseComplete { request_id, ..ResponseComplete::default() };
    job.link.finish(&job.key, &WorkerToRelay::ResponseComplete(complete)).await;
}
