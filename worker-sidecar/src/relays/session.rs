//! The reading half of a registered link, until its socket ends. Each message is put into the [`Link`] or handed to a
//! separate task; nothing here waits for a backend, and only the socket ends the session.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt;
use futures_util::stream::SplitStream;
use modelrelay_protocol::frame::{self, BodyKind};
use modelrelay_protocol::grant_step;
use modelrelay_protocol::limits::MAX_CONTROL_BYTES;
use modelrelay_protocol::message::{Cancel, Drain, GracefulShutdown, Parsed, Pong, RelayToWorker, WorkerToRelay};
use prometheus::Gauge;
use tokio_tungstenite::tungstenite::{Bytes, Message};

use super::End;
use crate::forward;
use crate::link::liveness::{LivenessCheck, Traffic};
use crate::link::writer::{self, WebSocket};
use crate::link::{BARRIER, EndKind, Link};
use crate::shutdown::DrainState;
use crate::worker::Worker;

/// How long a drain waits for a relay's confirmation that no more requests follow.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the other side may take to close a link that is closed or unwanted.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// WebSocket close codes.
const NORMAL: u16 = 1000;
pub(super) const PROTOCOL_ERROR: u16 = 1002;
const TOO_BIG: u16 = 1009;

/// A registered link being served.
pub(super) struct Session<'a> {
    worker: &'a Arc<Worker>,
    link: &'a Arc<Link>,
    /// The gauge for the time of the relay's last message.
    heard: Gauge,
    heartbeat: Duration,
    /// The time at which the worker requested that no more requests be sent.
    drain: Option<Instant>,
    /// True once the relay has confirmed that none follow.
    barrier: bool,
    /// True if the relay requested that the link finish and reconnect.
    finishing: bool,
    /// The time at which the close frame was queued, or the other side's was read.
    closing: Option<Instant>,
    closed: Option<End>,
}

impl<'a> Session<'a> {
    pub(super) fn new(worker: &'a Arc<Worker>, link: &'a Arc<Link>, heartbeat: Duration) -> Self {
        Self {
            worker,
            link,
            heard: worker.metrics.last_message(&link.relay),
            heartbeat,
            drain: None,
            barrier: false,
            finishing: false,
            closing: None,
            closed: None,
        }
    }

    pub(super) async fn pump(mut self, socket: WebSocket, traffic: Arc<Traffic>) -> End {
        let (sink, mut stream) = socket.split();
        let metrics = Arc::clone(&self.worker.metrics);
        let mut writer =
            AbortOnDrop(tokio::spawn(writer::run(Arc::clone(self.link), sink, Arc::clone(&traffic), metrics)));
        let mut drain = self.worker.drain.subscribe();
        self.handle_drain(*drain.borrow_and_update());
        traffic.expect_heartbeats(self.heartbeat);
        self.link.follow(Arc::clone(&traffic));
        let timer = tokio::time::sleep(self.heartbeat);
        tokio::pin!(timer);
        let mut writing = true;
        loop {
            tokio::select! {
                message = stream.next() => match message {
                    Some(Ok(message)) => self.handle_frame(message),
                    Some(Err(error)) => return match traffic.judge(Instant::now(), self.heartbeat) {
                        LivenessCheck::Lost(reason) => self.end("silent", reason.to_owned()),
                        LivenessCheck::Fine(_) | LivenessCheck::Ping(_) => self.end("lost", error.to_string()),
                    },
                    None => return self.end("lost", "the connection was closed".to_owned()),
                },
                wrote = &mut writer.0, if writing => {
                    writing = false;
                    if let Ok(Err(error)) = wrote {
                        self.read_last_words(&mut stream).await;
                        return self.end("lost", error.to_string());
                    }
                }
                Ok(()) = drain.changed() => {
                    let state = *drain.borrow_and_update();
                    self.handle_drain(state);
                }
                () = self.link.changed() => self.handle_successor(),
                () = &mut timer => {}
            }
            // Messages that were read ahead cost no system call, and would block all other tasks on this thread.
            tokio::task::coop::consume_budget().await;
            let now = Instant::now();
            if timer.is_elapsed() || self.drain.is_some() || self.closing.is_some() {
                match self.handle_time(&traffic, now) {
                    Ok(next) => timer.as_mut().reset(next.into()),
                    Err(reason) => return self.end("silent", reason.to_owned()),
                }
            }
            self.close_when_done(now);
        }
    }

    /// Looks for a close frame that the relay sent before the write failed.
    async fn read_last_words(&mut self, stream: &mut SplitStream<WebSocket>) {
        let read = async {
            while let Some(Ok(message)) = stream.next().await {
                if let Message::Close(_) = message {
                    self.handle_frame(message);
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(Duration::from_millis(100), read).await;
    }

    fn end(self, label: &'static str, reason: String) -> End {
        let Some(closed) = self.closed else {
            // After the worker's own close frame, how the socket ends does not matter.
            let (label, reason) =
                if self.closing.is_some() { ("closed", "closed by the worker".to_owned()) } else { (label, reason) };
            return End::new(EndKind::Linked, label, reason);
        };
        closed
    }

    /// Pings a silent peer, gives up a lost one, and returns the time of the next check.
    fn handle_time(&mut self, traffic: &Traffic, now: Instant) -> Result<Instant, &'static str> {
        if self.closing.is_some_and(|since| now.duration_since(since) >= CLOSE_TIMEOUT) {
            return Err("the relay did not close in time");
        }
        let next = match traffic.judge(now, self.heartbeat) {
            LivenessCheck::Fine(next) => next,
            LivenessCheck::Ping(next) => {
                self.link.ping();
                next
            }
            LivenessCheck::Lost(reason) => return Err(reason),
        };
        let closing = self.closing.map(|since| since + CLOSE_TIMEOUT);
        let barrier = self.drain.filter(|_| !self.barrier).map(|since| since + BARRIER_TIMEOUT);
        // An overdue barrier has had its effect.
        let barrier = barrier.filter(|due| *due > now);
        Ok([closing, barrier].into_iter().flatten().fold(next, Instant::min))
    }

    fn handle_drain(&mut self, state: DrainState) {
        let DrainState::Draining(order) = state else { return };
        if self.drain.is_some() {
            return;
        }
        let now = Instant::now();
        self.drain = Some(now);
        self.link.watch();
        if self.link.core1 {
            let timeout_secs = order.deadline.saturating_duration_since(now).as_millis().div_ceil(1000);
            self.link.push(&WorkerToRelay::Drain(Drain {
                reason: order.cause.as_str().to_owned(),
                timeout_secs: u64::try_from(timeout_secs).ok(),
            }));
        } else {
            // Such a relay replies to the ping after it has read everything before it: its pong is the barrier.
            self.link.mute();
            self.link.ping_behind();
        }
    }

    /// A relay without `core1` does not support replaced links: it is notified here that this one serves no more.
    fn handle_successor(&mut self) {
        if self.link.has_successor() && !self.link.core1 && self.drain.is_none() {
            self.drain = Some(Instant::now());
            self.link.mute();
            self.link.ping_behind();
        }
    }

    fn close_when_done(&mut self, now: Instant) {
        let drained = self.drain.is_some_and(|since| self.barrier || now.duration_since(since) >= BARRIER_TIMEOUT);
        if (drained || self.finishing) && self.closing.is_none() && self.link.is_idle() {
            self.link.close(NORMAL, "graceful shutdown complete");
            self.closing = Some(now);
        }
    }

    /// The relay violated the protocol. Its requests end here: their responses must not delay the close frame.
    fn close(&mut self, code: u16, reason: &'static str) {
        let aborted = self.link.cancel_all();
        tracing::warn!(relay = %self.link.relay, code, reason, aborted, "closing the link");
        self.link.close(code, reason);
        self.closing.get_or_insert_with(Instant::now);
    }

    fn handle_frame(&mut self, message: Message) {
        match message {
            Message::Text(text) if self.link.core1 && text.len() > MAX_CONTROL_BYTES => {
                self.close(TOO_BIG, "message too large");
            }
            Message::Text(text) => self.handle_text(text.as_str()),
            Message::Binary(bytes) => self.handle_binary(bytes),
            Message::Pong(payload) => self.barrier |= payload.as_ref() == BARRIER,
            Message::Close(frame) => {
                let code = frame.as_ref().map_or(1005, |frame| u16::from(frame.code));
                let reason = frame.map_or_else(String::new, |frame| frame.reason.to_string());
                let kind = if reason == "replaced" { EndKind::Duplicate } else { EndKind::Linked };
                self.closed = Some(End::new(kind, "closed", format!("the relay closed with {code} {reason}")));
                self.closing.get_or_insert_with(Instant::now);
            }
            // tungstenite replies to pings, and never returns raw frames.
            Message::Ping(_) | Message::Frame(_) => {}
        }
    }

    fn handle_text(&mut self, text: &str) {
        match RelayToWorker::parse(text) {
            Ok(Parsed::Known(message)) => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                self.heard.set(now.as_secs_f64());
                self.handle_message(message);
            }
            Ok(Parsed::Unknown(kind)) => {
                let kind: String = kind.chars().take(64).collect();
                tracing::debug!(relay = %self.link.relay, kind, "skipping a message of unknown type");
            }
            Err(error) => tracing::warn!(relay = %self.link.relay, %error, "skipping a message"),
        }
    }

    fn handle_message(&mut self, message: RelayToWorker) {
        let (worker, link) = (self.worker, self.link);
        match message {
            RelayToWorker::Request(request) => return forward::begin(worker, link, request),
            RelayToWorker::Demand(demand) => return worker.serving.handle_demand(link, &demand),
            RelayToWorker::Cancel(cancel) => self.handle_cancel(&cancel),
            RelayToWorker::Credit(credit) => link.add_credit(credit.stream, credit.bytes),
            RelayToWorker::Ping(ping) => link.push(&WorkerToRelay::Pong(Pong {
                current_load: Some(worker.serving.running()),
                timestamp_unix_ms: ping.timestamp_unix_ms,
            })),
            RelayToWorker::Relays(relays) => worker.set_relay_count(relays.relay_count),
            RelayToWorker::ModelsRefresh(_) => worker.serving.handle_refresh(link),
            RelayToWorker::GracefulShutdown(shutdown) => self.handle_graceful_shutdown(&shutdown),
            RelayToWorker::Command(command) => worker.serving.handle_command(link, command),
            RelayToWorker::RegisterAck(_) => tracing::warn!(relay = %link.relay, "skipping a second register_ack"),
        }
        worker.serving.handle_message(link);
    }

    fn handle_cancel(&self, cancel: &Cancel) {
        grant_step!("cancel", self.link.id.0, id = cancel.request_id);
        if !self.link.cancel(&cancel.request_id) {
            return;
        }
        self.worker.metrics.backend_errors("cancelled");
        tracing::info!(request_id = %cancel.request_id, reason = cancel.reason.as_str(), "cancelled");
        if !self.link.core1 {
            // A relay without capabilities leaks the slot of a request that never completes.
            self.link.push(&forward::cancelled_completion(&cancel.request_id));
        }
    }

    fn handle_graceful_shutdown(&mut self, shutdown: &GracefulShutdown) {
        // Whatever the reason, no request follows.
        self.worker.serving.handle_leaving(self.link);
        let reason = shutdown.reason.as_deref().unwrap_or_default();
        match reason {
            GracefulShutdown::DRAIN if self.drain.is_some() => self.barrier = true,
            GracefulShutdown::WORKER_DRAIN => {
                tracing::info!(relay = %self.link.relay, "graceful shutdown: an admin is draining this worker");
                let timeout = shutdown.drain_timeout_secs.map(Duration::from_secs);
                // The relay itself sends nothing more.
                self.barrier = true;
                self.worker.drain_by_admin(timeout);
            }
            _ => {
                tracing::info!(
                    relay = %self.link.relay, reason, running = self.link.unanswered(),
                    "graceful shutdown: finishing the requests on this link"
                );
                self.finishing = true;
                self.link.watch();
            }
        }
    }

    fn handle_binary(&mut self, bytes: Bytes) {
        if !self.link.core1 {
            return self.close(PROTOCOL_ERROR, "binary message without core1");
        }
        let piece = match frame::decode(bytes) {
            Ok(piece) if piece.kind == BodyKind::Request => piece,
            // A piece of a body that only the worker sends.
            Ok(_) => return self.worker.metrics.dropped_pieces.inc(),
            Err(error) => {
                tracing::warn!(relay = %self.link.relay, %error, "broken binary message");
                return self.close(PROTOCOL_ERROR, "broken binary message");
            }
        };
        let Some((id, upload)) = self.link.upload(piece.stream) else {
            return self.worker.metrics.dropped_pieces.inc();
        };
        self.worker.metrics.received_bytes.inc_by(piece.payload.len() as u64);
        if let Err(error) = upload.push(piece.payload) {
            forward::fail_upload(self.worker, self.link, &id, piece.stream, error);
        }
    }
}

/// Aborts the writer with its session.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
