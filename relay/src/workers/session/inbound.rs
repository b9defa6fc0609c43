//! Handles the messages of a worker.
//!
//! `Err` closes the socket with 1002 and is reserved for messages that no peer of any version would send. A problem
//! with one request ends that request at most.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::frame::{self, BodyKind};
use modelrelay_protocol::headers;
use modelrelay_protocol::limits::MAX_HOMES_PER_MESSAGE;
use modelrelay_protocol::message::{
    Parsed, Pong, ResponseComplete, ResponseStart, TokenCounts, WorkerError, WorkerToRelay,
};
use modelrelay_protocol::names::printable;
use tracing::{debug, warn};

use crate::dispatch::{AttemptFailure, CancelReason, FailureReport, Grant, LoadFailure};
use crate::net::budget::Full;
use crate::provider::Provider;
use crate::provider::affinity::Origin;
use crate::provider::response::{Head, Hold, PushError};
use crate::provider::worker::link::{Attempt, WorkerLink};
use crate::provider::worker::register;
use crate::system::unix_time::unix_millis;

/// The maximum number of header fields in one response.
const MAX_RESPONSE_HEADERS: usize = 128;

/// The maximum size of one response's header fields together.
const MAX_RESPONSE_HEADER_BYTES: usize = 64 << 10;

/// How long to wait for the status of bytes that are no event stream: a published worker sends it right after them.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);

type Handled = Result<(), &'static str>;

/// Handles one text message.
pub(super) fn handle_text(provider: &Arc<Provider>, link: &Arc<WorkerLink>, text: &str) -> Handled {
    let message = match WorkerToRelay::parse(text) {
        Ok(Parsed::Known(message)) => message,
        Ok(Parsed::Unknown(kind)) => {
            debug!(worker = %link.info.name, kind = kind.chars().take(64).collect::<String>(), "unknown message skipped");
            return Ok(());
        }
        Err(_) => return Err("malformed JSON"),
    };
    match message {
        WorkerToRelay::Register(_) => return Err("a second register"),
        WorkerToRelay::ResponseStart(start) => response_start(provider, link, start),
        WorkerToRelay::ResponseChunk(chunk) => {
            let Some(held) = known(link, &chunk.request_id) else { return Ok(()) };
            response_chunk(provider, link, &held, chunk.chunk.into());
        }
        WorkerToRelay::ResponseComplete(complete) => response_complete(provider, link, complete),
        WorkerToRelay::Error(error) => worker_error(provider, link, error),
        WorkerToRelay::Pong(pong) => handle_pong(provider, link, pong),
        WorkerToRelay::ModelsUpdate(update) => provider.models_updated(link, update),
        WorkerToRelay::Credit(credit) => link.add_credit(credit.stream, credit.bytes),
        WorkerToRelay::Grant(grant) if link.info.slots1 => provider.gates_set(link, &grant),
        WorkerToRelay::Slots(slots) if link.info.slots1 => provider.slots_reported(link, slots.slots),
        WorkerToRelay::CommandResult(result) if link.info.slots1 => provider.command_ended(link, &result),
        WorkerToRelay::Grant(grant) if link.info.core1 => provider.granted(link, Grant::from(&grant)),
        WorkerToRelay::Drain(drain) if link.info.core1 => {
            let reason = printable(&drain.reason, 128);
            debug!(worker = %link.info.name, reason, "worker requested its drain");
            provider.worker_requested_drain(link, drain.timeout_secs.map(Duration::from_secs));
        }
        WorkerToRelay::Homes(homes) if link.info.homes1 => {
            if homes.homes.len() > MAX_HOMES_PER_MESSAGE {
                return Err("too many homes in one message");
            }
            provider.homes_reported(link, &homes);
        }
        WorkerToRelay::Grant(_)
        | WorkerToRelay::Homes(_)
        | WorkerToRelay::Drain(_)
        | WorkerToRelay::Slots(_)
        | WorkerToRelay::CommandResult(_) => {
            debug!(worker = %link.info.name, "message skipped: capability not negotiated");
        }
    }
    Ok(())
}

/// Handles one binary message.
pub(super) fn handle_binary(provider: &Arc<Provider>, link: &Arc<WorkerLink>, bytes: Bytes) -> Handled {
    if !link.info.core1 {
        return Err("a binary message without core1");
    }
    let piece = frame::decode(bytes).map_err(|_| "a malformed binary message")?;
    let held = link.held_stream(piece.stream).filter(|_| piece.kind == BodyKind::Response);
    let Some(held) = held else {
        debug!(worker = %link.info.name, stream = piece.stream, "late body piece dropped");
        return Ok(());
    };
    let begins = !held.begun && is_answer(held.record.is_streaming, &piece.payload);
    match held.response().push_piece(held.attempt, piece.payload) {
        Ok(()) if begins => provider.begun(link, &held),
        Ok(()) => {}
        Err(error) => push_failed(provider, link, &held, error),
    }
    Ok(())
}

/// True if a backend sends these bytes of a body only after it has computed the prompt. Comments keep a stream alive
/// before that, and vLLM sends the head of a stream at once.
fn is_answer(is_streaming: bool, bytes: &[u8]) -> bool {
    let is_comment = is_streaming && bytes.starts_with(b":");
    !bytes.is_empty() && !is_comment
}

fn known(link: &WorkerLink, request_id: &str) -> Option<Attempt> {
    let held = link.held(request_id);
    if held.is_none() {
        // Late, or never this worker's: in either case no client waits for it.
        debug!(worker = %link.info.name, "message dropped: the worker does not have this request");
    }
    held
}

fn response_start(provider: &Provider, link: &WorkerLink, start: ResponseStart) {
    let Some(held) = known(link, &start.request_id) else { return };
    match head(provider, Some(start.status_code), start.headers, start.content_length) {
        Ok(head) => drop(begin(provider, link, &held, head)),
        Err(problem) => push_failed(provider, link, &held, PushError::Broken(problem)),
    }
}

fn begin(provider: &Provider, link: &WorkerLink, held: &Attempt, head: Head) -> bool {
    // Marked first: once the client may have the head, a lost worker must not lead to a second response.
    link.mark_started(held.stream);
    let pushed = held.response().push_head(held.attempt, head);
    provider.shared.progress.notify_waiters();
    if let Err(error) = pushed {
        push_failed(provider, link, held, error);
    }
    pushed.is_ok()
}

fn response_chunk(provider: &Arc<Provider>, link: &Arc<WorkerLink>, held: &Attempt, chunk: Bytes) {
    if !held.begun && is_answer(held.record.is_streaming, &chunk) {
        provider.begun(link, held);
    }
    let record = &held.record;
    let must_be_events = record.is_streaming && record.endpoint.raises_error_frame();
    if !held.started && !link.info.core1 && must_be_events {
        return hold(provider, link, held, &chunk);
    }
    if !held.started && !begin(provider, link, held, stream_head()) {
        return;
    }
    if let Err(error) = held.response().push_uncredited(held.attempt, chunk) {
        push_failed(provider, link, held, error);
    }
}

/// Returns the head of a stream from a worker that sends none.
fn stream_head() -> Head {
    let mut headers = HeaderMap::new();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    Head { status: StatusCode::OK, headers, content_length: None }
}

fn mark_begun(provider: &Provider, link: &WorkerLink, held: &Attempt) {
    link.mark_started(held.stream);
    provider.shared.progress.notify_waiters();
}

/// Passes an event stream on, and holds other bytes until their status arrives.
fn hold(provider: &Arc<Provider>, link: &Arc<WorkerLink>, held: &Attempt, chunk: &Bytes) {
    match held.response().hold(held.attempt, chunk, stream_head()) {
        Ok(Hold::Passed) => mark_begun(provider, link, held),
        Ok(Hold::First) => {
            let (provider, link, held) = (Arc::clone(provider), Arc::clone(link), held.clone());
            tokio::spawn(async move {
                tokio::time::sleep(STATUS_PATIENCE).await;
                if held.response().pass_held(held.attempt, stream_head()) {
                    mark_begun(&provider, &link, &held);
                }
            });
        }
        Ok(Hold::Further) => {}
        Err(error) => push_failed(provider, link, held, error),
    }
}

fn response_complete(provider: &Arc<Provider>, link: &WorkerLink, mut complete: ResponseComplete) {
    let Some(held) = known(link, &complete.request_id) else { return };
    if !link.info.core1 {
        let status = complete.status_code.unwrap_or(200);
        if let Some(sent) = held.response().take_held(held.attempt) {
            if !answer_whole(provider, link, &held, &mut complete, sent) {
                return;
            }
        } else if status >= 400 {
            let message = format!("the backend returned {status} after its stream had begun");
            held.response().fail(ApiError::new(ErrorKind::Worker("backend_error".into()), message));
            return provider.completed(link, &held);
        }
    }
    held.record.progress().token_counts = complete.token_counts.map(TokenCounts::plausible);
    if let (Some(trace), Some(details)) = (&held.record.trace, &complete.details) {
        trace.set_details(details);
    }
    if let (Some(id), Some(instance)) = (register::accepted_id(complete.response_id.as_deref()), &link.info.instance) {
        let origin = Origin {
            provider: Arc::clone(&provider.name),
            instance: Arc::clone(instance),
            model: Arc::clone(&held.record.model),
            key: held.record.api_key.clone(),
        };
        let is_alive = |owner: &Origin| provider.worker_of_instance(&owner.instance).is_some();
        provider.shared.affinity.remember(&id, origin, Instant::now(), is_alive);
    }
    match held.response().finish(held.attempt) {
        Ok(()) | Err(PushError::Stale) => provider.completed(link, &held),
        Err(error) => push_failed(provider, link, &held, error),
    }
}

/// Responds with the status of a worker that sends it last: with the body in the message, or with the held bytes.
/// Returns true on success.
fn answer_whole(
    provider: &Provider,
    link: &WorkerLink,
    held: &Attempt,
    complete: &mut ResponseComplete,
    sent: Bytes,
) -> bool {
    let was_sent = !sent.is_empty();
    let body = if was_sent { sent } else { Bytes::from(complete.body.take().unwrap_or_default()) };
    let status = complete.status_code.or(was_sent.then_some(200));
    let headers = complete.headers.take().unwrap_or_default();
    let mut head = match head(provider, status, headers, Some(body.len() as u64)) {
        Ok(head) => head,
        Err(problem) => {
            push_failed(provider, link, held, PushError::Broken(problem));
            return false;
        }
    };
    if was_sent {
        let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(&body).is_ok();
        let kind = HeaderValue::from_static(if is_json { "application/json" } else { "text/plain; charset=utf-8" });
        head.headers.entry(http::header::CONTENT_TYPE).or_insert(kind);
    }
    if !begin(provider, link, held, head) {
        return false;
    }
    let pushed = held.response().push_whole(held.attempt, body);
    if let Err(error) = pushed {
        push_failed(provider, link, held, error);
    }
    pushed.is_ok()
}

/// Ends a response that cannot continue. The client is notified first, then the worker, whose slot becomes free.
fn push_failed(provider: &Provider, link: &WorkerLink, held: &Attempt, error: PushError) {
    let (reason, error) = match error {
        PushError::Stale => return,
        PushError::Broken(what) => {
            warn!(request_id = held.record.id, worker = %link.info.name, what, "worker violated the protocol in one request");
            let message = format!("invalid response from the worker: {what}");
            (CancelReason::WorkerFault, ApiError::new(ErrorKind::Worker("bad_answer".into()), message))
        }
        PushError::StreamLimit => {
            let message = "the response exceeds the relay's limit (MAX_STREAM_BYTES)";
            (CancelReason::StreamLimit, ApiError::new(ErrorKind::ResponseTooLarge, message))
        }
        PushError::SlowClient => {
            let message = "the client left too much of the response unread (MAX_UNREAD_BYTES)";
            (CancelReason::SlowClient, ApiError::new(ErrorKind::SlowClient, message))
        }
        PushError::NoMemory => (CancelReason::NoMemory, Full::Budget.into()),
    };
    held.response().fail(error);
    provider.cancel(held.record.key, reason);
}

fn worker_error(provider: &Provider, link: &WorkerLink, error: WorkerError) {
    let code = printable(&error.code, 64);
    let message = printable(&error.message, 1_024);
    let Some(request_id) = error.request_id else {
        match link.note_report() {
            Some(suppressed) => {
                warn!(provider = %provider.name, worker = %link.info.name, code, message, suppressed, "worker reported an error");
            }
            None => {
                debug!(provider = %provider.name, worker = %link.info.name, code, message, "worker reported an error");
            }
        }
        return;
    };
    let Some(held) = known(link, &request_id) else { return };
    let message =
        if message.is_empty() { "the worker failed the request without a reason".to_owned() } else { message };
    let retry_after = error.retry_after_ms.map(Duration::from_millis);
    debug!(request_id = held.record.id, worker = %link.info.name, code, message, "worker failed a request");
    if held.started {
        let error = ApiError::new(ErrorKind::of_worker(&code), message);
        held.response().fail(error.with_worker_retry_after(retry_after));
        provider.completed(link, &held);
    } else {
        provider.attempt_failed(link, &held, failure(FailureReport { code, message }, retry_after));
    }
}

fn failure(report: FailureReport, retry_after: Option<Duration>) -> AttemptFailure {
    let load_failed = |code, report| AttemptFailure::LoadFailed { code, retry_after, report: Arc::new(report) };
    match report.code.as_str() {
        WorkerError::AT_CAPACITY => AttemptFailure::AtCapacity,
        WorkerError::DRAINING => AttemptFailure::Draining,
        WorkerError::SEVERED_BY_SWAP => AttemptFailure::SeveredBySwap,
        WorkerError::BACKEND_UNREACHABLE => AttemptFailure::BackendUnreachable,
        WorkerError::BACKEND_RESET => AttemptFailure::BackendReset,
        WorkerError::INSUFFICIENT_MEMORY => load_failed(LoadFailure::InsufficientMemory, report),
        WorkerError::BACKEND_UNAVAILABLE => load_failed(LoadFailure::BackendUnavailable, report),
        WorkerError::SLOT_QUARANTINED => load_failed(LoadFailure::SlotQuarantined, report),
        _ => AttemptFailure::Fatal(Arc::new(report)),
    }
}

fn handle_pong(provider: &Provider, link: &WorkerLink, pong: Pong) {
    // The worker echoes the relay's own clock. A wrong value affects only a histogram, and the growth of its windows
    // until the next heartbeat.
    let took =
        pong.timestamp_unix_ms.map(|sent| Duration::from_millis(unix_millis(SystemTime::now()).saturating_sub(sent)));
    link.mark_heard(took);
    if let Some(took) = took {
        provider.series.heartbeat_answered(took);
    }
    if let Some(load) = pong.current_load {
        provider.load_reported(link, load);
    }
}

/// Returns the head of a response, or why a client could not read it: a client whose lengths are signed 64-bit would
/// reject the whole head.
fn head(
    provider: &Provider,
    status: Option<u16>,
    headers: impl IntoIterator<Item = (String, String)>,
    content_length: Option<u64>,
) -> Result<Head, &'static str> {
    if content_length.is_some_and(|length| i64::try_from(length).is_err()) {
        return Err("a length of 2^63 bytes or more");
    }
    Ok(Head { status: valid_status(status)?, headers: header_map(provider, headers)?, content_length })
}

fn valid_status(status: Option<u16>) -> Result<StatusCode, &'static str> {
    let status = status.ok_or("a response without a status")?;
    if !(200..=599).contains(&status) {
        return Err("a status outside 200-599");
    }
    StatusCode::from_u16(status).map_err(|_| "a status outside 200-599")
}

/// Returns the headers that may go to the client, or an error if there are too many; malformed headers are left out.
fn header_map(
    provider: &Provider,
    pairs: impl IntoIterator<Item = (String, String)>,
) -> Result<HeaderMap, &'static str> {
    let config = provider.shared.config.load();
    let mut map = HeaderMap::new();
    let mut connection = Vec::new();
    let mut bytes = 0;
    for (count, (name, value)) in pairs.into_iter().enumerate() {
        bytes += name.len() + value.len();
        if count >= MAX_RESPONSE_HEADERS || bytes > MAX_RESPONSE_HEADER_BYTES {
            return Err("more than 128 header fields, or more than 64 KiB of them");
        }
        let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) else { continue };
        if name == http::header::CONNECTION {
            connection.push(value);
        } else if headers::is_client_header(name.as_str(), &config.response_headers) {
            map.append(name, value);
        }
    }
    for value in connection {
        let named: Vec<HeaderName> =
            value.to_str().unwrap_or("").split(',').filter_map(|token| token.trim().parse().ok()).collect();
        for name in named {
            map.remove(name);
        }
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comment_of_stream_is_no_answer() {
        assert!(!is_answer(true, b": ping\n\n"));
        assert!(!is_answer(true, b"") && !is_answer(false, b""));
        assert!(is_answer(true, b"data: {}\n\n"));
        assert!(is_answer(false, b": text"), "only streams have comments");
    }
}
