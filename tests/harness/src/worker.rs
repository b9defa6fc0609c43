//! A worker played by hand: the test writes every message. Only the automatic replies that [`FakeWorker::recv_json`]
//! describes are sent by itself. It can be an old peer that supports only the original text messages or one with
//! `core1`, and may violate any rule.
//!
//! It reads its socket only inside its own functions: a test that does not call them plays a worker that hangs.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{WebSocketStream, tungstenite::Message};

pub use self::{
    answer::response_piece,
    dial::Dial,
    slots::{failed, slot, slots1_registration},
};
use crate::{TEST_TIMEOUT, process::Log, within, within_for};

mod answer;
mod dial;
mod slots;

/// The most payload of one binary piece.
pub const PIECE_MAX: usize = 65_536;
/// The window of request bodies that this worker states.
pub const WINDOW: usize = 262_144;
/// The window of responses that a relay states.
pub const ANSWER_WINDOW: usize = 65_536;

/// One frame of the socket.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// A text message that is JSON.
    Json(Value),
    /// A binary message.
    Binary(Bytes),
    /// A WebSocket Pong.
    Pong(Bytes),
    /// A close frame: code and reason. Code 0: closed without one. Code 1006: the connection broke.
    Close(u16, String),
}

/// A request as it reached this worker.
#[derive(Debug, Clone)]
pub struct Job {
    /// The `request_id`.
    pub id: String,
    /// The stream of its pieces; 0 without `core1`.
    pub stream: u32,
    /// The whole message.
    pub message: Value,
    /// The body: the message's, or its pieces.
    pub body: Vec<u8>,
}

impl Job {
    /// The path with its query string.
    #[must_use]
    pub fn path(&self) -> &str {
        self.message["endpoint_path"].as_str().unwrap_or_default()
    }

    /// A header, by its lower-case name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers().iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).and_then(|(_, value)| value.as_str())
    }

    /// All headers.
    ///
    /// # Panics
    /// If the message has none.
    #[must_use]
    pub fn headers(&self) -> &Map<String, Value> {
        self.message["headers"].as_object().unwrap_or_else(|| panic!("no map of headers in {}", self.message))
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the request body is JSON")
    }
}

/// A connected worker.
#[derive(Debug)]
pub struct FakeWorker {
    socket: WebSocketStream<TcpStream>,
    log: Log,
    /// The load in its replies to `ping`.
    pub load: u64,
    /// True if [`Self::expect_request`] returns credit for the pieces that it reads.
    pub returns_credit: bool,
    /// The id from the relay.
    pub worker_id: String,
    core1: bool,
    inbox: VecDeque<Value>,
    pieces: HashMap<u32, Vec<u8>>,
    credits: HashMap<u32, u64>,
    demands: VecDeque<Value>,
    pings: u64,
}

/// The `register` message of an old worker, which supports only the original messages.
#[must_use]
pub fn registration(models: &[&str], max_concurrent: u64) -> Value {
    json!({"type": "register", "worker_name": "hand-played", "models": models, "max_concurrent": max_concurrent,
           "protocol_version": "1", "current_load": 0})
}

/// The `register` message of a worker with `core1` and an `instance_id`.
#[must_use]
pub fn core1_registration(models: &[&str], max_concurrent: u64, instance_id: &str) -> Value {
    let mut message = registration(models, max_concurrent);
    message["instance_id"] = json!(instance_id);
    message["version"] = json!("0.1.0");
    message["have"] = json!([]);
    message["capabilities"] = json!(["core1"]);
    message["limits"] = json!({"stream_window_bytes": WINDOW});
    message
}

/// An `instance_id` that no other worker of this run has.
#[must_use]
pub fn new_instance_id() -> String {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    format!("{:016x}{count:016x}", std::process::id())
}

impl FakeWorker {
    fn new(socket: WebSocketStream<TcpStream>, log: Log) -> Self {
        Self {
            socket,
            log,
            load: 0,
            returns_credit: true,
            worker_id: String::new(),
            core1: false,
            inbox: VecDeque::new(),
            pieces: HashMap::new(),
            credits: HashMap::new(),
            demands: VecDeque::new(),
            pings: 0,
        }
    }

    // --- registering ---

    /// Registers as an old peer, which supports only the original messages, and returns the `register_ack`.
    pub async fn register(&mut self, models: &[&str], max_concurrent: u64) -> Value {
        self.register_with(registration(models, max_concurrent)).await
    }

    /// Registers with `core1` and a fresh `instance_id`. Nothing is granted yet.
    pub async fn register_core1(&mut self, models: &[&str], max_concurrent: u64) -> Value {
        self.register_with(core1_registration(models, max_concurrent, &new_instance_id())).await
    }

    /// Sends any `register` message and returns the `register_ack`.
    pub async fn register_with(&mut self, message: Value) -> Value {
        // The others imply the first.
        let core1 = [json!("core1"), json!("slots1"), json!("homes1")];
        let named = message["capabilities"].as_array();
        self.core1 = named.is_some_and(|named| named.iter().any(|name| core1.contains(name)));
        self.send(&message).await;
        let ack = self.expect("register_ack").await;
        self.worker_id = ack["worker_id"].as_str().unwrap_or_default().to_owned();
        ack
    }

    /// Grants this relay `slots`, as the only link of this worker.
    pub async fn grant(&mut self, slots: u64) {
        self.grant_of(slots, 0, slots, 1).await;
    }

    /// Sends any grant.
    pub async fn grant_of(&mut self, slots: u64, others: u64, capacity: u64, links: u64) {
        let grant = json!({"type": "grant", "slots": slots, "others": others, "capacity": capacity, "links": links});
        self.send(&grant).await;
    }

    // --- raw sending and receiving ---

    /// Sends a JSON message.
    pub async fn send(&mut self, message: &Value) {
        self.send_text(&message.to_string()).await;
    }

    /// Sends any text.
    pub async fn send_text(&mut self, text: &str) {
        self.send_message(Message::text(text)).await;
    }

    /// Sends a binary message.
    pub async fn send_binary(&mut self, bytes: impl Into<Bytes>) {
        self.send_message(Message::Binary(bytes.into())).await;
    }

    /// Sends any WebSocket message. If the relay has closed meanwhile, this is no error: the next read shows it.
    pub async fn send_message(&mut self, message: Message) {
        let _ = within("room to send to the relay", &self.log, self.socket.send(message)).await;
    }

    /// Sends WebSocket messages with one flush at their end, so that they arrive together.
    pub async fn send_together(&mut self, messages: Vec<Message>) {
        let mut messages = futures_util::stream::iter(messages.into_iter().map(Ok));
        let _ = within("room to send to the relay", &self.log, self.socket.send_all(&mut messages)).await;
    }

    /// The next frame, as received. WebSocket Pings get their Pong from the library.
    pub async fn recv(&mut self) -> Frame {
        self.recv_within(TEST_TIMEOUT).await
    }

    /// The same as [`Self::recv`], with its own timeout: for workers that idle.
    pub async fn recv_within(&mut self, patience: Duration) -> Frame {
        loop {
            let message = within_for(patience, "a message from the relay", &self.log, self.socket.next()).await;
            return match message {
                None => Frame::Close(0, String::new()),
                Some(Err(_)) => Frame::Close(1006, String::new()),
                Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                    Ok(value) => Frame::Json(value),
                    Err(error) => panic!("the relay sent no JSON ({error}): {text}\n{}", self.log.dump()),
                },
                Some(Ok(Message::Binary(bytes))) => Frame::Binary(bytes),
                Some(Ok(Message::Pong(bytes))) => Frame::Pong(bytes),
                Some(Ok(Message::Close(Some(close)))) => Frame::Close(close.code.into(), close.reason.to_string()),
                Some(Ok(Message::Close(None))) => Frame::Close(0, String::new()),
                Some(Ok(Message::Ping(_) | Message::Frame(_))) => continue,
            };
        }
    }

    /// The next JSON message that is not housekeeping: `ping` gets a reply, `credit` and `demand` are kept for
    /// [`Self::expect_credit`] and [`Self::expect_demand`], pieces for [`Self::expect_request`].
    pub async fn recv_json(&mut self) -> Value {
        loop {
            if let Some(message) = self.inbox.pop_front() {
                return message;
            }
            self.take_one().await;
        }
    }

    /// The next message of [`Self::recv_json`], which must be of this type.
    pub async fn expect(&mut self, kind: &str) -> Value {
        let message = self.recv_json().await;
        assert_eq!(message["type"], kind, "expected a {kind}, got {message}\n{}", self.log.dump());
        message
    }

    /// The next request, with its whole body.
    pub async fn expect_request(&mut self) -> Job {
        let message = self.expect("request").await;
        let id = message["request_id"].as_str().expect("a request has an id").to_owned();
        if !self.core1 {
            let body = message["body"].as_str().expect("a request has a body").as_bytes().to_vec();
            return Job { id, stream: 0, message, body };
        }
        assert!(message.get("body").is_none(), "a body inside JSON towards a core1 worker: {message}");
        let stream = stream_of(&message);
        let length = message["content_length"].as_u64().expect("a core1 request has a content_length");
        let length = usize::try_from(length).expect("lengths fit");
        while self.received(stream) < length {
            self.take_one().await;
        }
        let body = self.pieces.remove(&stream).unwrap_or_default();
        assert_eq!(body.len(), length, "the request body is longer than content_length");
        Job { id, stream, message, body }
    }

    /// The next `request` message, without waiting for its pieces.
    pub async fn expect_request_head(&mut self) -> Job {
        let message = self.expect("request").await;
        let id = message["request_id"].as_str().expect("a request has an id").to_owned();
        Job { id, stream: message["stream"].as_u64().map_or(0, |_| stream_of(&message)), message, body: Vec::new() }
    }

    /// The next message, which must be the `cancel` of this request.
    pub async fn expect_cancel(&mut self, id: &str) -> Value {
        let message = self.expect("cancel").await;
        assert_eq!(message["request_id"], id, "another request was cancelled\n{}", self.log.dump());
        message
    }

    /// Reads until the socket closes; returns code and reason.
    pub async fn expect_close(&mut self) -> (u16, String) {
        loop {
            match self.recv().await {
                Frame::Close(code, reason) => return (code, reason),
                Frame::Json(_) | Frame::Binary(_) | Frame::Pong(_) => {}
            }
        }
    }

    /// Checks that nothing but housekeeping arrives before the Pong of a WebSocket Ping sent now.
    pub async fn expect_quiet(&mut self) {
        self.pings += 1;
        let payload = Bytes::from(format!("quiet-{}", self.pings));
        self.send_message(Message::Ping(payload.clone())).await;
        loop {
            assert!(self.inbox.is_empty(), "expected no message, got {:?}\n{}", self.inbox, self.log.dump());
            match self.recv().await {
                Frame::Pong(bytes) if bytes == payload => return,
                frame @ (Frame::Json(_) | Frame::Binary(_) | Frame::Pong(_) | Frame::Close(..)) => {
                    self.handle(frame).await;
                }
            }
        }
    }

    /// Waits for this total credit of a stream.
    pub async fn expect_credit(&mut self, stream: u32, at_least: u64) -> u64 {
        while self.credit_of(stream) < at_least {
            self.take_one().await;
        }
        self.credit_of(stream)
    }

    /// The credit received so far for a stream.
    #[must_use]
    pub fn credit_of(&self, stream: u32) -> u64 {
        self.credits.get(&stream).copied().unwrap_or(0)
    }

    /// Waits for a `demand` with this `waiting` for a model (0: or without the model).
    pub async fn expect_demand(&mut self, model: &str, waiting: u64) -> Value {
        loop {
            while let Some(demand) = self.demands.pop_front() {
                if demand_of(&demand, model) == waiting {
                    return demand;
                }
            }
            self.take_one().await;
        }
    }

    /// Reads until `at_least` bytes of a request's body arrived, and returns their number. Credit is only returned
    /// according to [`Self::returns_credit`].
    pub async fn expect_body_bytes(&mut self, stream: u32, at_least: usize) -> usize {
        while self.received(stream) < at_least {
            self.take_one().await;
        }
        self.received(stream)
    }

    /// The number of received bytes of a request's body that were not taken yet.
    #[must_use]
    pub fn received(&self, stream: u32) -> usize {
        self.pieces.get(&stream).map_or(0, Vec::len)
    }

    /// The number of unread `demand` messages.
    #[must_use]
    pub fn unread_demands(&self) -> usize {
        self.demands.len()
    }

    // --- housekeeping ---

    async fn take_one(&mut self) {
        let frame = self.recv().await;
        self.handle(frame).await;
    }

    async fn handle(&mut self, frame: Frame) {
        match frame {
            Frame::Json(message) => match message["type"].as_str().unwrap_or_default() {
                "ping" => {
                    let pong = json!({"type": "pong", "current_load": self.load, "timestamp_unix_ms": unix_ms()});
                    self.send(&pong).await;
                }
                "credit" => {
                    let bytes = message["bytes"].as_u64().expect("credit states the number of bytes");
                    *self.credits.entry(stream_of(&message)).or_default() += bytes;
                }
                "demand" => self.demands.push_back(message),
                _ => self.inbox.push_back(message),
            },
            Frame::Binary(bytes) => self.handle_piece(&bytes).await,
            Frame::Pong(_) => {}
            Frame::Close(code, reason) => {
                panic!("the relay closed the worker's socket: {code} {reason:?}\n{}", self.log.dump())
            }
        }
    }

    async fn handle_piece(&mut self, bytes: &[u8]) {
        assert!(bytes.len() >= 6, "a piece of {} bytes", bytes.len());
        assert_eq!((bytes[0], bytes[1]), (1, 0), "a worker receives only request pieces");
        assert!(bytes.len() - 6 <= PIECE_MAX, "a piece of {} bytes", bytes.len());
        let stream = u32::from_be_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]);
        self.pieces.entry(stream).or_default().extend_from_slice(&bytes[6..]);
        if self.returns_credit {
            self.send(&json!({"type": "credit", "stream": stream, "bytes": bytes.len() - 6})).await;
        }
    }
}

fn stream_of(message: &Value) -> u32 {
    let stream = message["stream"].as_u64().and_then(|stream| u32::try_from(stream).ok());
    stream.unwrap_or_else(|| panic!("no stream number in {message}"))
}

fn demand_of(demand: &Value, model: &str) -> u64 {
    let models = demand["models"].as_array().cloned().unwrap_or_default();
    models.iter().find(|entry| entry["id"] == model).and_then(|entry| entry["waiting"].as_u64()).unwrap_or(0)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    u64::try_from(since.as_millis()).expect("the clock is this side of the far future")
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio_tungstenite::accept_async;

    use super::*;

    /// A worker connected to a peer that this test plays too.
    async fn pair() -> (FakeWorker, WebSocketStream<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let dial = Dial::new(listener.local_addr().expect("it is bound"), &Log::new("none")).secret("s");
        let accept =
            async { accept_async(listener.accept().await.expect("a connection").0).await.expect("a handshake") };
        tokio::join!(dial.open(), accept)
    }

    async fn send_json(peer: &mut WebSocketStream<TcpStream>, message: Value) {
        peer.send(Message::text(message.to_string())).await.expect("the worker listens");
    }

    #[tokio::test]
    async fn core1_request_is_assembled_despite_interleaved_messages() {
        let (mut worker, mut peer) = pair().await;
        worker.core1 = true;
        send_json(&mut peer, json!({"type": "request", "request_id": "r", "stream": 3, "content_length": 5})).await;
        peer.send(Message::Binary(vec![1, 0, 0, 0, 0, 3, b'a', b'b'].into())).await.expect("sent");
        send_json(&mut peer, json!({"type": "cancel", "request_id": "other"})).await;
        send_json(&mut peer, json!({"type": "credit", "stream": 3, "bytes": 7})).await;
        peer.send(Message::Binary(vec![1, 0, 0, 0, 0, 3, b'c', b'd', b'e'].into())).await.expect("sent");
        let job = worker.expect_request().await;
        assert_eq!((job.id.as_str(), job.stream, job.body.as_slice()), ("r", 3, b"abcde".as_slice()));
        worker.expect_cancel("other").await;
        assert_eq!(worker.expect_credit(3, 7).await, 7);
    }

    #[tokio::test]
    async fn quiet_check_ends_at_pong() {
        let (mut worker, mut peer) = pair().await;
        send_json(&mut peer, json!({"type": "ping", "timestamp_unix_ms": 1})).await;
        let peer = tokio::spawn(async move {
            let pong = peer.next().await;
            let answer = peer.next().await;
            peer.close(None).await.expect("closed");
            (pong, answer)
        });
        worker.expect_quiet().await;
        assert_eq!(worker.expect_close().await.0, 0);
        let (pong, answer) = peer.await.expect("the peer does not panic");
        assert!(pong.is_some_and(|message| message.is_ok_and(|message| message.is_ping())));
        assert!(answer.is_some_and(|message| {
            message.is_ok_and(|message| message.to_text().is_ok_and(|text| text.contains("pong")))
        }));
    }

    #[tokio::test]
    #[should_panic(expected = "expected no message")]
    async fn quiet_check_fails_on_request() {
        let (mut worker, mut peer) = pair().await;
        send_json(&mut peer, json!({"type": "request", "request_id": "r", "body": ""})).await;
        tokio::spawn(async move { while peer.next().await.is_some() {} });
        worker.expect_quiet().await;
    }
}
