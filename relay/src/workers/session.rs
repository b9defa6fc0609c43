//! One worker's socket, from its first message to its last.
//!
//! Three loops in one task: the reader never waits for the writer or for a client, the writer flushes once per batch
//! and never on a timer, and the third sends heartbeats. The session ends when the first of them does.

mod inbound;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, Stream, StreamExt};
use modelrelay_protocol::frame;
use modelrelay_protocol::limits::{
    ANSWER_WINDOW_BYTES, HEARTBEATS_UNTIL_LOST, MAX_CONTROL_BYTES, REGISTER_TIMEOUT, STREAM_WINDOW_BYTES,
};
use modelrelay_protocol::message::{
    ModelsRefresh, Parsed, Ping, Register, RegisterAck, RelayLimits, RelayToWorker, WorkerToRelay, encode,
};
use modelrelay_protocol::outbox::Frame;
use modelrelay_protocol::version::{Capabilities, Capability};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};
use tracing::{debug, info, warn};

use super::Admission;
use super::io::{Liveness, LivenessIo};
use super::read_ahead::ReadAhead;
use crate::dispatch::LossCause;
use crate::net::unfinished::{Refusal, Unfinished};
use crate::provider::Provider;
use crate::provider::shared::ProcessPhase;
use crate::provider::worker::close::{Close, DRAINED, RELAY_STOPPING, SECRET_REMOVED};
use crate::provider::worker::link::{Output, WorkerInfo, WorkerLink};
use crate::provider::worker::register::{self, Accepted};
use crate::system::ids;
use crate::system::unix_time::unix_millis;
use crate::telemetry::metrics::{ConnectionResult, DisconnectReason};

/// Frames and bytes of one batch; then the written frames are flushed, so that a long queue cannot delay its first
/// frame.
const BATCH_FRAMES: usize = 64;
const BATCH_BYTES: usize = 128 << 10;

/// The time that a peer may take to reply to our close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

const PROTOCOL_ERROR: Close = Close { code: 1002, reason: "worker registration protocol error" };
const NO_UTF8: Close = Close { code: 1007, reason: "text that is no UTF-8" };
const TOO_LARGE: Close = Close { code: 1009, reason: "message too large" };
const MEMORY_FULL: Close = Close { code: 1013, reason: "no memory for the message (MAX_BUFFERED_BYTES)" };
const SLOW_MESSAGE: Close = Close { code: 1008, reason: "the message comes too slowly" };
const HEARTBEAT_LOST: Close = Close { code: 1000, reason: "worker heartbeat timed out" };
/// The reply to the worker's own close; the library sends the worker's code instead of this one.
const GOODBYE: Close = Close { code: 1000, reason: "" };
const DRAIN_TIMED_OUT: Close = Close { code: 1000, reason: "graceful shutdown timed out" };

type WorkerSocket<S> = WebSocketStream<ReadAhead<LivenessIo<S>>>;
type Sink<S> = SplitSink<WorkerSocket<S>, Message>;
type Source<S> = SplitStream<WorkerSocket<S>>;

/// The end of a session: the close to send to the worker, if it is still connected, and the reason for the metrics.
struct End {
    close: Option<Close>,
    reason: DisconnectReason,
}

impl End {
    fn closing(close: Close, reason: DisconnectReason) -> Self {
        Self { close: Some(close), reason }
    }

    fn gone(reason: DisconnectReason) -> Self {
        Self { close: None, reason }
    }
}

/// Serves one upgraded connection until it ends.
pub async fn serve<S>(socket: WorkerSocket<S>, liveness: Arc<Liveness>, provider: Arc<Provider>, admission: Admission)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // Boxed and freed afterwards: otherwise the memory of the registration would be part of each idle worker.
    let Some((socket, link)) = Box::pin(admit(socket, &liveness, &provider, admission)).await else { return };
    run(socket, liveness, &provider, &link).await;
}

/// Waits for the registration and adds the worker; `None` if the connection ended instead.
async fn admit<S>(
    mut socket: WorkerSocket<S>,
    liveness: &Liveness,
    provider: &Arc<Provider>,
    admission: Admission,
) -> Option<(WorkerSocket<S>, Arc<WorkerLink>)>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let first = tokio::time::timeout(REGISTER_TIMEOUT, first_message(&mut socket, &liveness.unfinished)).await;
    let register = match first {
        Ok(Ok(Some(register))) => register,
        Ok(Ok(None)) => {
            info!(provider = %provider.name, address = %admission.address, "worker disconnected before registering");
            close_socket(&mut socket, Close { code: 1000, reason: "" }).await;
            return None;
        }
        Ok(Err(end)) => return rejected(socket, provider, end).await,
        Err(_) => return rejected(socket, provider, PROTOCOL_ERROR).await,
    };
    let config = provider.config();
    if !register::version_is_accepted(register.protocol_version.as_deref(), config.require_protocol_version) {
        return rejected(socket, provider, PROTOCOL_ERROR).await;
    }
    let accepted = register::sanitize(&register, &config);
    let link = new_link(provider, &register, &accepted, &admission);
    let mut ack = acknowledge(provider, &link, &register, &accepted);
    if register.have.contains(&provider.shared.relay_id) {
        ack.duplicate = true;
        // No requests may be sent on this link; the other one is live.
        let text = encode(&RelayToWorker::RegisterAck(ack));
        let sent = socket.send(Message::Text(text.into())).await.is_ok();
        if sent {
            close_socket(&mut socket, Close { code: 1000, reason: "duplicate" }).await;
        }
        provider.series.worker_disconnected(DisconnectReason::Duplicate);
        return None;
    }
    if !link.info.core1 {
        liveness.unfinished.allow_bodies();
    }
    provider.series.worker_connected(ConnectionResult::Accepted);
    info!(
        provider = %provider.name,
        worker = %link.info.name,
        worker_id = %link.info.id,
        models = accepted.models.len(),
        max_concurrent = accepted.max_concurrent,
        core1 = link.info.core1,
        slots1 = link.info.slots1,
        address = %link.info.address,
        identity = link.info.credential.identity(),
        "worker registered"
    );
    for warning in &ack.warnings {
        warn!(provider = %provider.name, worker = %link.info.name, "{warning}");
    }
    let succeeds = register.succeeds.contains(&provider.shared.relay_id);
    provider.join(&link, &accepted, &config, register.current_load, ack, succeeds);
    Some((socket, link))
}

async fn run<S>(socket: WorkerSocket<S>, liveness: Arc<Liveness>, provider: &Arc<Provider>, link: &Arc<WorkerLink>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let _lost = LostOnDrop { provider, link };
    let (mut sink, mut source) = socket.split();
    let end = tokio::select! {
        end = read_loop(&mut source, &liveness.unfinished, provider, link) => end,
        end = write_loop(&mut sink, &liveness, link) => end,
        end = heart_loop(&liveness, provider, link) => end,
    };
    let heartbeat = end.reason == DisconnectReason::HeartbeatTimeout || end.reason == DisconnectReason::WriteTimeout;
    let cause = if heartbeat { LossCause::HeartbeatTimeout } else { LossCause::Disconnected };
    // The requests first: another worker may get them at the same moment, whatever this socket still does.
    provider.lose(link, cause);
    provider.series.worker_disconnected(end.reason);
    info!(
        provider = %provider.name,
        worker = %link.info.name,
        worker_id = %link.info.id,
        reason = end.reason.as_str(),
        "worker disconnected"
    );
    if heartbeat {
        warn!(provider = %provider.name, worker = %link.info.name, worker_id = %link.info.id, "worker heartbeat timed out");
    }
    if let (Some(close), Ok(mut socket)) = (end.close, sink.reunite(source)) {
        close_socket(&mut socket, close).await;
    }
}

/// Removes the worker even if the session panics, so that its requests do not hang.
struct LostOnDrop<'a> {
    provider: &'a Provider,
    link: &'a Arc<WorkerLink>,
}

impl Drop for LostOnDrop<'_> {
    fn drop(&mut self) {
        // Has no effect if the worker was removed already.
        self.provider.lose(self.link, LossCause::Disconnected);
    }
}

/// Returns the next message, and marks it as finished.
async fn next_message<S>(source: &mut S, unfinished: &Unfinished) -> Option<Result<Message, WsError>>
where
    S: Stream<Item = Result<Message, WsError>> + Unpin,
{
    let message = source.next().await;
    if matches!(message, Some(Ok(_))) {
        unfinished.end();
    }
    message
}

/// Returns the registration; `None` from a peer that closes normally, such as `modelrelay-worker connect`, which only
/// tests its secret.
async fn first_message<S>(socket: &mut WorkerSocket<S>, unfinished: &Unfinished) -> Result<Option<Register>, Close>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let text = match next_message(socket, unfinished).await {
            Some(Ok(Message::Text(text))) => text,
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
            Some(Err(WsError::Capacity(_))) => return Err(TOO_LARGE),
            Some(Err(_)) if unfinished.refusal() == Some(Refusal::TooLarge) => return Err(TOO_LARGE),
            Some(Err(WsError::Utf8(_))) => return Err(NO_UTF8),
            Some(Ok(Message::Close(Some(frame)))) if frame.code == CloseCode::Normal => return Ok(None),
            Some(Ok(Message::Binary(_) | Message::Close(_) | Message::Frame(_)) | Err(_)) | None => {
                return Err(PROTOCOL_ERROR);
            }
        };
        // Messages with bodies may be longer, but this one has none, and all of its models are kept.
        if text.len() > MAX_CONTROL_BYTES {
            return Err(TOO_LARGE);
        }
        return match WorkerToRelay::parse(&text) {
            Ok(Parsed::Known(WorkerToRelay::Register(register))) => Ok(Some(register)),
            Ok(_) | Err(_) => Err(PROTOCOL_ERROR),
        };
    }
}

async fn rejected<S, T>(mut socket: WorkerSocket<S>, provider: &Provider, close: Close) -> Option<T>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    provider.series.worker_connected(ConnectionResult::BadProtocol);
    warn!(provider = %provider.name, code = close.code, reason = close.reason, "worker registration refused");
    close_socket(&mut socket, close).await;
    None
}

fn new_link(provider: &Provider, register: &Register, accepted: &Accepted, admission: &Admission) -> Arc<WorkerLink> {
    let both = capabilities_in_common(register);
    let info = WorkerInfo {
        key: provider.shared.next_worker_key(),
        id: ids::worker_id().into(),
        provider: Arc::clone(&provider.name),
        name: accepted.name.as_str().into(),
        version: register.version.as_deref().map(|version| version.chars().take(64).collect()),
        instance: register::accepted_id(register.instance_id.as_deref()),
        pool: register.pool.as_deref().map(|pool| pool.chars().take(64).collect()),
        location: accepted.location.clone(),
        address: admission.address,
        core1: both.has(Capability::Core1),
        slots1: both.has(Capability::Slots1),
        homes1: both.has(Capability::Homes1),
        credential: admission.credential.clone(),
        request_window: register.limits.map_or(STREAM_WINDOW_BYTES, |limits| limits.stream_window_bytes.max(1)),
        round_trip: admission.at.elapsed(),
        max_unread_bytes: provider.shared.config.load().max_unread_bytes,
        connected_at: SystemTime::now(),
    };
    let zone_requests = provider.series.zone_requests(&info.location);
    let link = WorkerLink::new(info, register.models.clone(), zone_requests);
    link.set_details(register.model_details.clone());
    link.set_failing(&register.failing);
    link.set_slots(accepted.slots.clone());
    link.set_meaningless(accepted.meaningless.clone());
    link
}

/// Returns the capabilities that both sides support.
fn capabilities_in_common(register: &Register) -> Capabilities {
    let ours = Capabilities::new([Capability::Slots1, Capability::Homes1]);
    ours.intersection(&Capabilities::from_names(&register.capabilities))
}

fn acknowledge(provider: &Provider, link: &WorkerLink, register: &Register, accepted: &Accepted) -> RegisterAck {
    let config = provider.shared.config.load();
    let ack = RegisterAck {
        worker_id: link.info.id.to_string(),
        models: accepted.models.iter().map(ToString::to_string).collect(),
        warnings: accepted.warnings.clone(),
        protocol_version: register.protocol_version.clone(),
        ..RegisterAck::default()
    };
    if !link.info.core1 {
        return ack;
    }
    let settings = provider.config();
    RegisterAck {
        relay_id: Some(provider.shared.relay_id.clone()),
        relay_count: Some(config.relay_count),
        capabilities: capabilities_in_common(register).names(),
        limits: Some(RelayLimits {
            max_request_bytes: config.max_request_bytes,
            stream_window_bytes: ANSWER_WINDOW_BYTES,
            heartbeat_ms: config.heartbeat_interval.as_millis() as u64,
            cold_timeout_ms: settings.cold_timeout_for(link.info.slots1).as_millis() as u64,
        }),
        request_headers: config.request_headers.clone(),
        ..ack
    }
}

async fn read_loop<S>(
    source: &mut Source<S>,
    unfinished: &Unfinished,
    provider: &Arc<Provider>,
    link: &Arc<WorkerLink>,
) -> End
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let handled = match next_message(source, unfinished).await {
            Some(Ok(Message::Text(text))) => {
                if link.info.core1 && text.len() > MAX_CONTROL_BYTES {
                    return End::closing(TOO_LARGE, DisconnectReason::MessageTooLarge);
                }
                inbound::handle_text(provider, link, &text)
            }
            Some(Ok(Message::Binary(bytes))) => inbound::handle_binary(provider, link, bytes),
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => Ok(()),
            Some(Ok(Message::Close(_))) => return End::closing(GOODBYE, DisconnectReason::ClosedByWorker),
            None => return End::gone(DisconnectReason::ClosedByWorker),
            Some(Err(WsError::Utf8(_))) => return End::closing(NO_UTF8, DisconnectReason::ProtocolError),
            Some(Err(WsError::Capacity(_))) => return End::closing(TOO_LARGE, DisconnectReason::MessageTooLarge),
            Some(Err(WsError::Protocol(ProtocolError::ResetWithoutClosingHandshake))) => {
                debug!(worker = %link.info.name, "worker connection ended without a close");
                return End::gone(DisconnectReason::ConnectionLost);
            }
            Some(Err(WsError::Protocol(error))) => {
                debug!(worker = %link.info.name, %error, "websocket protocol error");
                return End::closing(PROTOCOL_ERROR, DisconnectReason::ProtocolError);
            }
            Some(Err(error)) => {
                if let Some(refusal) = unfinished.refusal() {
                    return refused(refusal, provider, link);
                }
                debug!(worker = %link.info.name, %error, "worker connection lost");
                return End::gone(DisconnectReason::ConnectionLost);
            }
        };
        if let Err(problem) = handled {
            warn!(provider = %provider.name, worker = %link.info.name, problem, "worker protocol error");
            return End::closing(PROTOCOL_ERROR, DisconnectReason::ProtocolError);
        }
        if let Some(pause) = link.take_read_pause() {
            tokio::time::sleep(pause).await;
        }
        // Messages that were read ahead cost no system call, and would block all other tasks on this thread.
        tokio::task::coop::consume_budget().await;
    }
}

/// Ends the link because of its worker's message.
fn refused(refusal: Refusal, provider: &Provider, link: &WorkerLink) -> End {
    let (close, reason) = match refusal {
        Refusal::TooLarge => (TOO_LARGE, DisconnectReason::MessageTooLarge),
        Refusal::NoMemory => (MEMORY_FULL, DisconnectReason::MemoryFull),
        Refusal::TooSlow => (SLOW_MESSAGE, DisconnectReason::SlowMessage),
    };
    warn!(provider = %provider.name, worker = %link.info.name, reason = close.reason, "worker message rejected");
    End::closing(close, reason)
}

async fn write_loop<S>(sink: &mut Sink<S>, liveness: &Liveness, link: &WorkerLink) -> End
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let (mut frames, mut bytes) = (0, 0);
        while frames < BATCH_FRAMES && bytes < BATCH_BYTES {
            let message = match link.next_output() {
                Output::Frame(frame) => into_message(frame),
                Output::Ping => Message::Ping(Bytes::new()),
                Output::Close(close) => {
                    // The sink holds one message of its own, which is lost when the halves are reunited.
                    let _ = sink.flush().await;
                    return End::closing(close, reason_of(close));
                }
                Output::Nothing => break,
            };
            if frames == 0 {
                liveness.mark_waiting();
            }
            frames += 1;
            bytes += message.len();
            if sink.feed(message).await.is_err() {
                return End::gone(DisconnectReason::ConnectionLost);
            }
        }
        if frames == 0 {
            link.wait().await;
            continue;
        }
        if sink.flush().await.is_err() {
            return End::gone(DisconnectReason::ConnectionLost);
        }
        liveness.mark_idle();
    }
}

/// Sends the heartbeat, and detects a peer that is silent or has stopped reading. Wakes once per interval.
async fn heart_loop(liveness: &Liveness, provider: &Arc<Provider>, link: &Arc<WorkerLink>) -> End {
    let interval = provider.shared.config.load().heartbeat_interval;
    let patience = interval * HEARTBEATS_UNTIL_LOST;
    let mut beat = Instant::now() + interval;
    loop {
        let lost_at = liveness.last_read() + patience;
        let stuck_at = liveness.waiting_since().map(|since| since + patience);
        // A drain of the whole process has its own deadline.
        let own_drain = provider.shared.phase() >= ProcessPhase::Draining;
        let drained_by = link.drain_deadline(provider.shared.config.load().drain_timeout).filter(|_| !own_drain);
        let next = [Some(lost_at), stuck_at, drained_by, Some(beat)].into_iter().flatten().min().unwrap_or(beat);
        tokio::select! {
            () = tokio::time::sleep_until(next.into()) => {}
            () = link.drain_begun() => continue,
        }
        let now = Instant::now();
        if liveness.last_read() + patience <= now {
            return End::closing(HEARTBEAT_LOST, DisconnectReason::HeartbeatTimeout);
        }
        if liveness.waiting_since().is_some_and(|since| since + patience <= now) {
            return End::closing(HEARTBEAT_LOST, DisconnectReason::WriteTimeout);
        }
        if drained_by.is_some_and(|by| by <= now) {
            link.end_drain(DRAIN_TIMED_OUT);
        }
        if beat <= now {
            beat = now + interval;
            // A million numbers are left at this point, far more than one interval uses.
            if link.is_exhausted() && link.draining_since().is_none() {
                provider.drain_worker(link, "stream numbers are used up", Some(DRAINED));
            }
            if now.duration_since(liveness.last_read()) >= interval {
                link.ping();
            }
            link.push(&RelayToWorker::Ping(Ping { timestamp_unix_ms: Some(unix_millis(SystemTime::now())) }));
            if link.owes_list() {
                link.push(&RelayToWorker::ModelsRefresh(ModelsRefresh { reason: Some("wildcard".to_owned()) }));
            }
        }
    }
}

/// Sends the close reason and waits briefly for the worker's reply.
async fn close_socket<S>(socket: &mut WorkerSocket<S>, close: Close)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let frame = CloseFrame { code: close.code.into(), reason: close.reason.into() };
    let closed = async {
        if socket.close(Some(frame)).await.is_err() {
            // The worker closed first: only the reply to its close is left to send.
            return socket.flush().await;
        }
        while let Some(Ok(_)) = socket.next().await {}
        Ok(())
    };
    // A peer that does not reply is dropped anyway.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, closed).await;
}

fn into_message(frame: Frame) -> Message {
    match frame {
        Frame::Text(text) => Message::Text(text.into()),
        Frame::Binary { header, payload } => Message::Binary(frame::join(header, &payload)),
    }
}

fn reason_of(close: Close) -> DisconnectReason {
    match close {
        SECRET_REMOVED => DisconnectReason::AuthFailed,
        RELAY_STOPPING => DisconnectReason::RelayShutdown,
        DRAIN_TIMED_OUT => DisconnectReason::DrainTimeout,
        Close { reason: "replaced", .. } => DisconnectReason::Replaced,
        _ => DisconnectReason::Drained,
    }
}
