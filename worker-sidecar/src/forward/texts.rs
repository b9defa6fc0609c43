//! The response to a relay without capabilities: text, and never an `error`, on which such a relay closes the socket.
//!
//! The first chunk means 200 and an event stream to its client, so only event streams are sent in chunks.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::StatusCode;
use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::event_stream::Tail;
use modelrelay_protocol::headers::response_pairs;
use modelrelay_protocol::limits::MAX_OLD_WORKER_MESSAGE_BYTES;
use modelrelay_protocol::message::{ResponseChunk, ResponseComplete, WorkerToRelay, encode};
use modelrelay_protocol::text::Utf8Chunker;

use super::{Failure, Job, Passed};
use crate::backend::{Answer, Backend};

/// Forwards the backend's response, in chunks or whole.
pub(super) async fn answer(job: &Job, backend: &Backend) -> Result<Passed, Failure> {
    let mut answer = job.send(backend).await?;
    if job.request.is_streaming && is_event_stream(&answer) {
        return Ok(stream(job, answer).await);
    }
    let complete = whole(job, &mut answer).await?;
    Ok(Passed { complete, answer: Some(answer) })
}

/// Reports a failure that occurred before any chunk, as the response that the relay itself would write.
pub(super) async fn fail(job: &Job, error: &ApiError) {
    let mut headers: BTreeMap<String, String> =
        error.headers().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    headers.insert("content-type".to_owned(), "application/json".to_owned());
    let body = job.dialect().error_body(error, &job.key.id);
    let message = WorkerToRelay::ResponseComplete(ResponseComplete {
        request_id: job.key.id.to_string(),
        status_code: Some(error.status()),
        headers: Some(headers),
        body: Some(String::from_utf8_lossy(&body).into_owned()),
        ..ResponseComplete::default()
    });
    job.link.finish(&job.key, &message).await;
}

/// Ends a cancelled request. Its client is gone; nginx logs the same status for that.
pub fn cancelled_completion(request_id: &str) -> WorkerToRelay {
    WorkerToRelay::ResponseComplete(ResponseComplete {
        request_id: request_id.to_owned(),
        status_code: Some(499),
        body: Some(String::new()),
        ..ResponseComplete::default()
    })
}

fn is_event_stream(answer: &Answer) -> bool {
    let content_type = answer.head.headers.get(http::header::CONTENT_TYPE);
    let content_type = content_type.and_then(|value| value.to_str().ok()).unwrap_or_default();
    answer.head.status == StatusCode::OK && content_type.to_ascii_lowercase().starts_with("text/event-stream")
}

/// Streams the response. A failure during the stream becomes an error frame, on which every SDK raises an error, and an
/// end.
async fn stream(job: &Job, mut answer: Answer) -> Passed {
    let mut usage = job.usage_reader(&answer);
    let (status, headers) = (answer.head.status.as_u16(), header_map(&answer));
    let mut chunker = Utf8Chunker::new();
    // An event may be cut off; the error frame must not become part of it.
    let mut tail = Tail::default();
    let failure = loop {
        let bytes: Bytes = match job.next_bytes(&mut answer).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => break chunker.finish().err().map(|_| Failure::NotText),
            Err(failure) => break Some(failure),
        };
        usage.push(&bytes);
        match chunker.push(&bytes) {
            Ok(text) if text.is_empty() => {}
            Ok(text) => {
                tail.follow(text.as_bytes());
                if let Err(failure) = job.unless_ended(answer.run_while_sending(chunk(job, text))).await {
                    break Some(failure);
                }
            }
            Err(_) => break Some(Failure::NotText),
        }
    };
    let mut answer = Some(answer);
    if let Some(failure) = failure {
        // Close the connection before the slot is notified that the request is over.
        answer = None;
        job.note(&failure);
        let frame = job.dialect().error_frame(&failure.api_error(), &job.key.id, 0);
        chunk(job, if tail.is_between_events() { frame } else { format!("\n\n{frame}") }).await;
        if let Some(failure_report) = job.failure_report(&failure) {
            failure_report.send();
        }
    }
    let usage = usage.finish();
    let complete = WorkerToRelay::ResponseComplete(ResponseComplete {
        request_id: job.key.id.to_string(),
        status_code: Some(status),
        headers: Some(headers),
        token_counts: usage.token_counts,
        response_id: usage.response_id,
        ..ResponseComplete::default()
    });
    Passed { complete, answer }
}

async fn chunk(job: &Job, text: String) {
    job.worker.metrics.sent_bytes.inc_by(text.len() as u64);
    job.send_message(&WorkerToRelay::ResponseChunk(ResponseChunk { request_id: job.key.id.to_string(), chunk: text }));
    job.link.wait_for_text_room().await;
}

async fn whole(job: &Job, answer: &mut Answer) -> Result<WorkerToRelay, Failure> {
    let mut usage = job.usage_reader(answer);
    let mut body = Vec::new();
    while let Some(bytes) = job.next_bytes(answer).await? {
        usage.push(&bytes);
        body.extend_from_slice(&bytes);
        if body.len() > MAX_OLD_WORKER_MESSAGE_BYTES {
            return Err(Failure::TooLarge);
        }
    }
    let body = String::from_utf8(body).map_err(|_| Failure::NotText)?;
    let usage = usage.finish();
    let length = body.len() as u64;
    let message = WorkerToRelay::ResponseComplete(ResponseComplete {
        request_id: job.key.id.to_string(),
        status_code: Some(answer.head.status.as_u16()),
        headers: Some(header_map(answer)),
        body: Some(body),
        token_counts: usage.token_counts,
        response_id: usage.response_id,
        details: None,
    });
    // Escapes make a message longer than its body; the published relay's library rejects frames above this limit.
    if encode(&message).len() > MAX_OLD_WORKER_MESSAGE_BYTES {
        return Err(Failure::TooLarge);
    }
    job.worker.metrics.sent_bytes.inc_by(length);
    Ok(message)
}

/// The message's map has one value per name.
fn header_map(answer: &Answer) -> BTreeMap<String, String> {
    let mut map: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in response_pairs(&answer.head.headers) {
        map.entry(name)
            .and_modify(|joined| {
                joined.push_str(", ");
                joined.push_str(&value);
            })
            .or_insert(value);
    }
    map
}
