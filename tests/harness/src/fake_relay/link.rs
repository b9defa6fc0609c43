//! One worker's socket that a test controls.

use std::collections::{HashMap, VecDeque};
use std::ops::Index;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::{Message as Frame, Utf8Bytes};

use super::piece::{self, REQUEST_PIECE, RESPONSE_PIECE};
use super::{Ack, TEST_TIMEOUT, WINDOW, Wire};

/// The largest payload of a piece.
const PIECE_BYTES: u64 = 65_536;

/// An event from the worker.
#[derive(Clone, Debug)]
pub enum Event {
    /// A JSON message.
    Message(Message),
    /// A body piece.
    Piece {
        /// Its position in the order of arrival.
        seq: u64,
        /// The stream.
        stream: u32,
        /// The bytes.
        payload: Bytes,
    },
    /// A WebSocket ping, with its payload.
    Ping(Bytes),
    /// The socket ended: close code and reason, or neither if it just broke.
    Closed {
        /// 1000, 1002, …
        code: Option<u16>,
        /// The text of the close frame.
        reason: String,
    },
}

/// A JSON message with its position in the order of arrival.
#[derive(Clone, Debug)]
pub struct Message {
    /// The position, counted over messages and pieces of this link.
    pub seq: u64,
    /// The time of its arrival.
    pub at: Instant,
    /// The message.
    pub body: Value,
}

impl Message {
    /// Its `type`.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.body["type"].as_str().unwrap_or_default()
    }
}

impl Index<&str> for Message {
    type Output = Value;
    fn index(&self, key: &str) -> &Value {
        &self.body[key]
    }
}

/// A socket to one worker. Dropping it cuts the connection without a close frame.
pub struct RelayLink {
    /// The worker's `register`, once [`RelayLink::register`] has read it.
    pub registration: Value,
    pub(super) core1: bool,
    pub(super) next: u32,
    sender: LinkSender,
    events: mpsc::UnboundedReceiver<Event>,
    kept: VecDeque<Event>,
    tasks: [JoinHandle<()>; 2],
    frozen: watch::Sender<bool>,
}

/// The writing half, which can be cloned into other tasks.
#[derive(Clone)]
pub struct LinkSender {
    frames: mpsc::UnboundedSender<Frame>,
    shared: Arc<Shared>,
}

struct Shared {
    /// The remaining credit for request bodies, by stream.
    credit: Mutex<HashMap<u32, u64>>,
    credited: Notify,
    /// Response payload bytes so far.
    received: AtomicU64,
    /// True if response credit is returned at once.
    returns_credit: AtomicBool,
}

impl RelayLink {
    pub(super) fn new(socket: WebSocketStream<Box<dyn Wire>>) -> Self {
        let (sink, stream) = socket.split();
        let (frames, outgoing) = mpsc::unbounded_channel();
        let (event_sender, events) = mpsc::unbounded_channel();
        let (frozen, is_frozen) = watch::channel(false);
        let shared = Arc::new(Shared {
            credit: Mutex::new(HashMap::new()),
            credited: Notify::new(),
            received: AtomicU64::new(0),
            returns_credit: AtomicBool::new(true),
        });
        let sender = LinkSender { frames, shared };
        let reading = tokio::spawn(read(stream, sender.clone(), event_sender, is_frozen.clone()));
        let writing = tokio::spawn(write(sink, outgoing, is_frozen));
        Self {
            registration: Value::Null,
            core1: false,
            next: 1,
            sender,
            events,
            kept: VecDeque::new(),
            tasks: [reading, writing],
            frozen,
        }
    }

    /// Reads `register` and acknowledges it.
    pub async fn register(&mut self, ack: &Ack) {
        self.registration = self.expect("register").await.body;
        self.core1 = !ack.capabilities.is_empty();
        self.send(&ack.message(&self.registration));
    }

    /// The writing half, for other tasks.
    #[must_use]
    pub fn sender(&self) -> LinkSender {
        self.sender.clone()
    }

    /// Sends a JSON message.
    pub fn send(&self, message: &Value) {
        self.sender.send(message);
    }

    /// Sends a frame as it is.
    pub fn send_frame(&self, frame: Frame) {
        self.sender.send_frame(frame);
    }

    /// Sends `cancel` for a request.
    pub fn cancel(&self, request_id: &str, reason: &str) {
        self.send(&json!({"type": "cancel", "request_id": request_id, "reason": reason}));
    }

    /// From now on response credit is returned only through [`RelayLink::credit`].
    pub fn withhold_credit(&self) {
        self.sender.shared.returns_credit.store(false, Ordering::SeqCst);
    }

    /// Returns credit for response bytes.
    pub fn credit(&self, stream: u32, bytes: u64) {
        self.send(&json!({"type": "credit", "stream": stream, "bytes": bytes}));
    }

    /// The number of response payload bytes received over this link so far.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.sender.shared.received.load(Ordering::SeqCst)
    }

    /// Waits until the worker has sent `count` WebSocket pings.
    ///
    /// # Panics
    /// If the next one does not arrive within ten seconds.
    pub async fn websocket_pings(&mut self, count: usize) {
        for number in 0..count {
            let ping = self.next_where(TEST_TIMEOUT, |event| matches!(event, Event::Ping(_))).await;
            assert!(ping.is_some(), "only {number} WebSocket pings");
        }
    }

    /// Stops reading and writing, and keeps the socket open: a half-open peer.
    pub fn freeze(&self) {
        self.frozen.send_replace(true);
    }

    /// Sends a close frame.
    pub fn close(&self, code: u16, reason: &str) {
        let frame = CloseFrame { code: code.into(), reason: Utf8Bytes::from(reason) };
        self.send_frame(Frame::Close(Some(frame)));
    }

    /// The next message of this type; events before it are kept for later.
    ///
    /// # Panics
    /// If none arrives within ten seconds, or the socket closes first.
    pub async fn expect(&mut self, kind: &str) -> Message {
        self.expect_where(kind, |_| true).await
    }

    /// The next message of this type for which `wanted` holds.
    ///
    /// # Panics
    /// As [`RelayLink::expect`].
    pub async fn expect_where(&mut self, kind: &str, wanted: impl Fn(&Value) -> bool) -> Message {
        let found = self.message_within(TEST_TIMEOUT, kind, wanted).await;
        found.unwrap_or_else(|| panic!("no such {kind} within 10 s; unread: {}", self.unread()))
    }

    /// The next message of this type, if one arrives within `patience`.
    pub async fn expect_within(&mut self, patience: Duration, kind: &str) -> Option<Message> {
        self.message_within(patience, kind, |_| true).await
    }

    /// The next message of this type for which `wanted` holds, if one arrives within `patience`.
    pub async fn message_within(
        &mut self,
        patience: Duration,
        kind: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Option<Message> {
        let matches = |event: &Event| match event {
            Event::Message(message) => message.kind() == kind && wanted(&message.body),
            Event::Piece { .. } | Event::Ping(_) | Event::Closed { .. } => false,
        };
        match self.next_where(patience, matches).await {
            Some(Event::Message(message)) => Some(message),
            Some(Event::Piece { .. } | Event::Ping(_) | Event::Closed { .. }) | None => None,
        }
    }

    /// The close code and reason of the socket.
    ///
    /// # Panics
    /// If it is still open after ten seconds.
    pub async fn closed(&mut self) -> (Option<u16>, String) {
        match self.next_where(TEST_TIMEOUT, |event| matches!(event, Event::Closed { .. })).await {
            Some(Event::Closed { code, reason }) => (code, reason),
            other => panic!("the link is still open after 10 s: {other:?}"),
        }
    }

    /// True if the socket ends within `patience`.
    pub async fn closes_within(&mut self, patience: Duration) -> bool {
        self.next_where(patience, |event| matches!(event, Event::Closed { .. })).await.is_some()
    }

    /// Waits until the worker advertises exactly these models, in `register` or `models_update`.
    pub async fn models(&mut self, models: &[&str]) {
        let wanted = json!(models);
        if self.registration["models"] == wanted {
            self.registration["models"] = json!("seen");
            return;
        }
        self.expect_where("models_update", |update| update["models"] == wanted).await;
    }

    /// Waits until the worker advertises these models and uses the link: with `core1` it grants `slots`, without it
    /// responds to a ping. A worker that advertises in `register` may not have read the acknowledgement yet.
    pub async fn ready(&mut self, models: &[&str], slots: u64) {
        self.models(models).await;
        if self.core1 {
            self.grant(slots).await;
        } else {
            self.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
            self.expect("pong").await;
        }
    }

    /// The next grant of `slots` slots.
    pub async fn grant(&mut self, slots: u64) -> Message {
        self.expect_where("grant", |grant| grant["slots"] == json!(slots)).await
    }

    /// The first event, kept or new, that `wanted` accepts. A closed socket ends the search.
    pub async fn next_where(&mut self, patience: Duration, wanted: impl Fn(&Event) -> bool) -> Option<Event> {
        if let Some(found) = self.kept.iter().position(&wanted) {
            return self.kept.remove(found);
        }
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let event = tokio::time::timeout_at(deadline, self.events.recv()).await.ok()??;
            if wanted(&event) {
                return Some(event);
            }
            let ended = matches!(event, Event::Closed { .. });
            self.kept.push_back(event);
            if ended {
                return None;
            }
        }
    }

    /// Drops all events that were received and not read.
    pub fn forget(&mut self) {
        self.kept.clear();
        while self.events.try_recv().is_ok() {}
    }

    fn unread(&self) -> String {
        let names = self.kept.iter().map(|event| match event {
            Event::Message(message) => message.kind().to_owned(),
            Event::Piece { stream, payload, .. } => format!("piece({stream}, {} bytes)", payload.len()),
            Event::Ping(_) => "WebSocket ping".to_owned(),
            Event::Closed { code, reason } => format!("closed({code:?} {reason})"),
        });
        let names: Vec<_> = names.collect();
        let skipped = names.len().saturating_sub(20);
        format!("{skipped} more, {}", names[skipped..].join(", "))
    }
}

impl Drop for RelayLink {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl LinkSender {
    /// Sends a JSON message.
    pub fn send(&self, message: &Value) {
        self.send_frame(Frame::text(message.to_string()));
    }

    /// Sends a frame as it is.
    pub fn send_frame(&self, frame: Frame) {
        let _ = self.frames.send(frame);
    }

    /// Sends a request body in pieces, within the worker's credit.
    pub async fn send_body(&self, stream: u32, body: &[u8]) {
        let mut rest = body;
        while !rest.is_empty() {
            let credited = self.shared.credited.notified();
            let take = self.take_credit(stream, rest.len() as u64);
            if take == 0 {
                credited.await;
                continue;
            }
            let (now, later) = rest.split_at(usize::try_from(take).expect("at most 65,536"));
            self.send_frame(Frame::Binary(piece::piece(REQUEST_PIECE, stream, now)));
            rest = later;
        }
    }

    fn take_credit(&self, stream: u32, wanted: u64) -> u64 {
        let mut credit = self.shared.credit.lock().expect("no panic while the lock is held");
        let left = credit.entry(stream).or_insert(WINDOW);
        let take = wanted.min(PIECE_BYTES).min(*left);
        *left -= take;
        take
    }

    fn add_credit(&self, message: &Value) {
        let stream = message["stream"].as_u64().and_then(|stream| u32::try_from(stream).ok());
        if let (Some(stream), Some(bytes)) = (stream, message["bytes"].as_u64()) {
            *self.shared.credit.lock().expect("no panic while the lock is held").entry(stream).or_insert(WINDOW) +=
                bytes;
            self.shared.credited.notify_waiters();
        }
    }
}

async fn write(
    mut sink: SplitSink<WebSocketStream<Box<dyn Wire>>, Frame>,
    mut outgoing: mpsc::UnboundedReceiver<Frame>,
    mut frozen: watch::Receiver<bool>,
) {
    while let Some(frame) = outgoing.recv().await {
        tokio::select! {
            biased;
            () = until(&mut frozen) => std::future::pending().await,
            sent = sink.send(frame) => if sent.is_err() { return },
        }
    }
}

/// Waits until the link is frozen.
async fn until(frozen: &mut watch::Receiver<bool>) {
    let _ = frozen.wait_for(|frozen| *frozen).await;
}

async fn read(
    mut stream: SplitStream<WebSocketStream<Box<dyn Wire>>>,
    sender: LinkSender,
    events: mpsc::UnboundedSender<Event>,
    mut frozen: watch::Receiver<bool>,
) {
    let mut ending = (None, String::new());
    for seq in 0.. {
        let frame = tokio::select! {
            biased;
            () = until(&mut frozen) => std::future::pending().await,
            frame = stream.next() => frame,
        };
        let event = match frame {
            Some(Ok(Frame::Text(text))) => {
                let body: Value = serde_json::from_str(&text).expect("workers send JSON");
                if body["type"] == "credit" {
                    sender.add_credit(&body);
                }
                Event::Message(Message { seq, at: Instant::now(), body })
            }
            Some(Ok(Frame::Binary(bytes))) => {
                let (kind, stream, payload) = piece::parse(&bytes).expect("a piece has a header");
                assert_eq!(kind, RESPONSE_PIECE, "a worker sends response pieces only");
                assert!(payload.len() as u64 <= PIECE_BYTES, "a piece of {} bytes", payload.len());
                sender.shared.received.fetch_add(payload.len() as u64, Ordering::SeqCst);
                if sender.shared.returns_credit.load(Ordering::SeqCst) {
                    sender.send(&json!({"type": "credit", "stream": stream, "bytes": payload.len()}));
                }
                Event::Piece { seq, stream, payload }
            }
            Some(Ok(Frame::Ping(payload))) => Event::Ping(payload),
            Some(Ok(Frame::Close(Some(frame)))) => {
                ending = (Some(frame.code.into()), frame.reason.to_string());
                continue;
            }
            Some(Ok(Frame::Pong(_) | Frame::Frame(_) | Frame::Close(None))) => continue,
            Some(Err(_)) | None => break,
        };
        let _ = events.send(event);
    }
    let (code, reason) = ending;
    let _ = events.send(Event::Closed { code, reason });
}
