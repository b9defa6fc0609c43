//! The answer towards a relay that knows only the seeds: text, and never an `error`, on which such a relay closes the socket.
//!
//! The first chunk means 200 and an event stream to its client, so only such an answer is sent in chunks.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::StatusCode;
use modelrelay_protocol::headers::response_pairs;
use modelrelay_protocol::limits::MAX_OLD_WORKER_MESSAGE_BYTES;
use modelrelay_protocol::message::{ResponseChunk, ResponseComplete, WorkerToRelay, encode};
use modelrelay_protocol::text::Utf8Chunker;

use super::{Failure, Job};
use crate::backend::Answer;

/// Passes the backend's answer on, in chunks or whole.
pub(super) async fn answer(job: &Job) -> Result<(), Failure> {
    let (backend, mut answer) = job.send().await?;
    let complete = if job.request.is_streaming && is_event_stream(&answer) {
        stream(job, &mut answer).await
    } else {
        whole(job, &mut answer).await?
    };
    tokio::join!(job.link.finish(&job.key, &complete), backend.recycle(answer));
    Ok(())
}

/// Says a failure that came before any chunk, as the answer that the relay itself would make.
pub(super) async fn fail(job: &Job, failure: &Failure) {
    let error = failure.api_error();
    let mut headers: BTreeMap<String, String> =
        error.headers().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    headers.insert("content-type".to_owned(), "application/json".to_owned());
    let body = job.dialect().error_body(&error, &job.key.id);
    let message = WorkerToRelay::ResponseComplete(ResponseComplete {
        request_id: job.key.id.to_string(),
        status_code: Some(error.status()),
        headers: Some(headers),
        body: Some(String::from_utf8_lossy(&body).into_owned()),
        ..ResponseComplete::default()
    });
    job.link.finish(&job.key, &message).await;
}

/// Ends a cancelled request. Its client is gone; the status is what nginx writes for that.
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

/// Streams the answer. A failure on the way becomes an error frame, on which every SDK raises, and an end.
async fn stream(job: &Job, answer: &mut Answer) -> WorkerToRelay {
    let mut usage = job.usage_reader(answer);
    let mut chunker = Utf8Chunker::new();
    // Whether an event was cut off, whose rest must not swallow what follows.
    let mut within_event = false;
    let failure = loop {
        let bytes: Bytes = match answer.next().await {
            Some(Ok(bytes)) => bytes,
            Some(Err(detail)) => break Some(Failure::Broken(detail)),
            None => break chunker.finish().err().map(|_| Failure::NotText),
        };
        usage.push(&bytes);
        match chunker.push(&bytes) {
            Ok(text) if text.is_empty() => {}
            Ok(text) => {
                within_event = !text.ends_with("\n\n") && !text.ends_with("\r\n\r\n");
                chunk(job, text).await;
            }
            Err(_) => break Some(Failure::NotText),
        }
    };
    if let Some(failure) = failure {
        tracing::warn!(request_id = %job.key.id, error = %failure, "backend error");
        job.worker.metrics.backend_errors(failure.label());
        job.react(&failure);
        let frame = job.dialect().error_frame(&failure.api_error(), &job.key.id);
        chunk(job, if within_event { format!("\n\n{frame}") } else { frame }).await;
    }
    let usage = usage.finish();
    WorkerToRelay::ResponseComplete(ResponseComplete {
        request_id: job.key.id.to_string(),
        status_code: Some(answer.head.status.as_u16()),
        headers: Some(header_map(answer)),
        token_counts: usage.token_counts,
        response_id: usage.response_id,
        body: None,
    })
}

async fn chunk(job: &Job, text: String) {
    job.worker.metrics.sent_bytes.inc_by(text.len() as u64);
    job.say(&WorkerToRelay::ResponseChunk(ResponseChunk { request_id: job.key.id.to_string(), chunk: text }));
    job.link.wait_for_text_room().await;
}

async fn whole(job: &Job, answer: &mut Answer) -> Result<WorkerToRelay, Failure> {
    let mut usage = job.usage_reader(answer);
    let mut body = Vec::new();
    while let Some(bytes) = answer.next().await {
        let bytes = bytes.map_err(Failure::Broken)?;
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
    });
    // Escapes make a message longer than its body; the published relay's library refuses frames over this.
    if encode(&message).len() > MAX_OLD_WORKER_MESSAGE_BYTES {
        return Err(Failure::TooLarge);
    }
    job.worker.metrics.sent_bytes.inc_by(length);
    Ok(message)
}

/// The map of the seeds has one value a name.
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
