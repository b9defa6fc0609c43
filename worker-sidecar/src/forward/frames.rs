//! The response to a relay with `core1`: its head, its bytes as they arrive, its end.

use http::HeaderMap;
use modelrelay_protocol::headers::response_pairs;
use modelrelay_protocol::message::{ResponseComplete, ResponseStart, WorkerToRelay};

use super::{Failure, Job, Passed};
use crate::backend::Backend;

/// Forwards the backend's response. The backend is read only while there is room in the queue.
pub(super) async fn answer(job: &Job, backend: &Backend) -> Result<Passed, Failure> {
    let mut answer = job.send(backend).await?;
    job.send_message(&WorkerToRelay::ResponseStart(ResponseStart {
        request_id: job.key.id.to_string(),
        status_code: answer.head.status.as_u16(),
        headers: response_pairs(&answer.head.headers),
        content_length: answer.content_length(),
    }));
    let mut usage = job.usage_reader(&answer);
    // Each header is a slice of the buffer that the head was read into, which would be kept for the whole stream.
    answer.head.headers = HeaderMap::new();
    while let Some(bytes) = job.next_bytes(&mut answer).await? {
        usage.push(&bytes);
        if job.link.send_body(&job.key, bytes) {
            // On the heap, because most responses never wait.
            let room = answer.run_while_sending(job.link.wait_for_room(&job.key));
            job.worker.metrics.waited(Box::pin(job.unless_ended(room)).await?);
        }
    }
    let usage = usage.finish();
    let details = usage.details.and_then(|details| Job::details_of(backend, details));
    let complete = WorkerToRelay::ResponseComplete(ResponseComplete {
        request_id: job.key.id.to_string(),
        token_counts: usage.token_counts,
        response_id: usage.response_id,
        details,
        ..ResponseComplete::default()
    });
    Ok(Passed { complete, answer: Some(answer) })
}
