//! A fake relay of the published program: it uses only the first messages of the protocol, and has no grants, credits
//! or drains. It sends a worker as many requests as its registered capacity, in order of arrival, and includes a
//! cancelled request until its worker completes it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, LocalBoxStream};
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::Upgraded;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, sleep, sleep_until};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};
use turmoil::net::TcpListener;

use crate::client::RELAY_PORT;
use crate::ledger::{Event, Ledger};
use crate::old_worker::{SILENCE, Stop};
use crate::plan::Plan;
use crate::secrets;

/// The only version that it accepts.
const VERSION: &str = "2026-04-bridge-v1";

/// The maximum number of requeues of a request whose worker was lost.
const MAX_REQUEUES: usize = 3;

/// The messages that a worker may send to it.
const KNOWN: [&str; 4] = ["models_update", "response_chunk", "response_complete", "pong"];

type Body = Either<Full<Bytes>, StreamBody<LocalBoxStream<'static, io::Result<Frame<Bytes>>>>>;

/// Serves until it is stopped, and then finishes its requests.
pub async fn serve(plan: Rc<Plan>, ledger: Ledger, mut stop: Stop) -> io::Result<()> {
    let drain = Duration::from_secs(plan.settings.drain_timeout);
    let relay = Rc::new(Relay { plan, ledger, state: RefCell::default(), is_stopping: Cell::new(false) });
    let listener = TcpListener::bind(("0.0.0.0", RELAY_PORT)).await?;
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted?.0,
            _ = stop.wait_for(Option::is_some) => break,
        };
        let relay = Rc::clone(&relay);
        let service = service_fn(move |request| Rc::clone(&relay).answer(request));
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades();
        tokio::task::spawn_local(connection);
    }
    relay.is_stopping.set(true);
    let until = Instant::now() + drain;
    while Instant::now() < until && !relay.state.borrow().is_idle() {
        sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

struct Relay {
    plan: Rc<Plan>,
    ledger: Ledger,
    state: RefCell<State>,
    is_stopping: Cell<bool>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Waiting>,
    /// By registration number.
    workers: BTreeMap<usize, Worker>,
    joined: usize,
    submitted: usize,
    sent: usize,
}

struct Waiting {
    /// Its arrival number, and the model name that its client uses.
    number: usize,
    model: String,
    message: Value,
    client: mpsc::UnboundedSender<Word>,
    /// True if its client has received a part of the response.
    has_begun: bool,
    requeues: usize,
}

struct Worker {
    models: Vec<String>,
    capacity: usize,
    sender: mpsc::UnboundedSender<Value>,
    running: BTreeMap<String, Waiting>,
}

/// A message to a client's request.
enum Word {
    Chunk(String),
    Complete(Value),
    Failed(&'static str),
}

impl State {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.workers.values().all(|worker| worker.running.is_empty())
    }

    /// Sends the requests that can be sent: the oldest first, each to the least loaded worker.
    fn dispatch(&mut self) {
        let mut place = 0;
        while let Some(waiting) = self.queue.get(place) {
            let serves =
                |worker: &&mut Worker| worker.models.contains(&waiting.model) && worker.running.len() < worker.capacity;
            let Some(worker) = self.workers.values_mut().filter(serves).min_by_key(|worker| worker.running.len())
            else {
                place += 1;
                continue;
            };
            let Some(waiting) = self.queue.remove(place) else { return };
            // Every relay of this program numbers like this, starting again after each restart.
            self.sent += 1;
            let id = format!("request-{}", self.sent);
            let mut message = waiting.message.clone();
            message["request_id"] = json!(id);
            let _ = worker.sender.send(message);
            worker.running.insert(id, waiting);
        }
    }

    /// Handles the loss of a worker: requests without a response so far are sent again, before all that arrived later.
    fn lose(&mut self, worker: usize) {
        let running = self.workers.remove(&worker).map(|worker| worker.running).unwrap_or_default();
        for mut waiting in running.into_values().filter(|waiting| !waiting.client.is_closed()) {
            if waiting.has_begun {
                let _ = waiting.client.send(Word::Failed("worker_lost"));
            } else if waiting.requeues == MAX_REQUEUES {
                let _ = waiting.client.send(Word::Failed("requeue_exhausted"));
            } else {
                waiting.requeues += 1;
                let place = self.queue.partition_point(|other| other.number < waiting.number);
                self.queue.insert(place, waiting);
            }
        }
        self.dispatch();
    }

    /// Cancels a request that is no longer wanted.
    fn cancel(&mut self, number: usize, reason: &str) {
        self.queue.retain(|waiting| waiting.number != number);
        for worker in self.workers.values() {
            for (id, _) in worker.running.iter().filter(|(_, waiting)| waiting.number == number) {
                let _ = worker.sender.send(json!({"type": "cancel", "request_id": id, "reason": reason}));
            }
        }
    }
}

// Clients.

/// A client's request, for as long as its client waits.
struct WaitingClient {
    relay: Rc<Relay>,
    number: usize,
    words: mpsc::UnboundedReceiver<Word>,
    queued_until: Instant,
    until: Instant,
}

impl Drop for WaitingClient {
    fn drop(&mut self) {
        self.relay.state.borrow_mut().cancel(self.number, "client_disconnect");
    }
}

impl WaitingClient {
    /// Returns the next message; a deadline is a failure.
    async fn next(&mut self) -> Word {
        loop {
            let is_queued = self.relay.state.borrow().queue.iter().any(|waiting| waiting.number == self.number);
            tokio::select! {
                word = self.words.recv() => return word.unwrap_or(Word::Failed("worker_lost")),
                () = sleep_until(self.queued_until), if is_queued => {
                    // It may have been sent meanwhile.
                    if self.relay.state.borrow().queue.iter().any(|waiting| waiting.number == self.number) {
                        return Word::Failed("queue_timeout");
                    }
                }
                () = sleep_until(self.until) => {
                    self.relay.state.borrow_mut().cancel(self.number, "timeout");
                    return Word::Failed("request_timeout");
                }
            }
        }
    }
}

impl Relay {
    async fn answer(self: Rc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        if request.uri().path() == "/v1/worker/connect" {
            return Ok(self.connect(request));
        }
        if self.is_stopping.get() {
            return Ok(failure("draining"));
        }
        let (head, body) = request.into_parts();
        let Ok(body) = body.collect().await else { return Ok(failure("invalid_json")) };
        let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
        let Some(client) = self.submit(&head, text) else { return Ok(failure("queue_full")) };
        Ok(respond(client).await)
    }

    fn submit(self: &Rc<Self>, head: &http::request::Parts, body: String) -> Option<WaitingClient> {
        let parsed: Value = serde_json::from_str(&body).unwrap_or_default();
        let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let kept = ["authorization", "content-type"].into_iter();
        let headers: BTreeMap<_, _> = kept.filter_map(|name| Some((name, header(name)?))).collect();
        let model = parsed["model"].as_str().unwrap_or_default().to_owned();
        let message = json!({"type": "request", "model": model, "endpoint_path": head.uri.path(), "body": body,
            "is_streaming": parsed["stream"], "headers": headers});
        let mut state = self.state.borrow_mut();
        if state.queue.len() >= self.plan.settings.queue_len {
            return None;
        }
        let (client, words) = mpsc::unbounded_channel();
        state.submitted += 1;
        let number = state.submitted;
        state.queue.push_back(Waiting { number, model, message, client, has_begun: false, requeues: 0 });
        state.dispatch();
        let now = Instant::now();
        let queued_until = now + Duration::from_secs(self.plan.settings.queue_timeout);
        let until = now + Duration::from_secs(self.plan.settings.request_timeout);
        Some(WaitingClient { relay: Rc::clone(self), number, words, queued_until, until })
    }
}

fn failure(code: &str) -> Response<Body> {
    let status = match code {
        "queue_full" => 429,
        "queue_timeout" | "request_timeout" => 504,
        _ => 503,
    };
    whole(status, error(code))
}

fn error(code: &str) -> String {
    json!({"error": {"message": code, "type": "server_error", "param": null, "code": code}}).to_string()
}

fn whole(status: u16, body: String) -> Response<Body> {
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(Either::Left(Full::new(Bytes::from(body)))).expect("a fixed head")
}

/// The first message determines the kind of response.
async fn respond(mut client: WaitingClient) -> Response<Body> {
    match client.next().await {
        Word::Failed(code) => failure(code),
        Word::Complete(complete) => {
            let status = complete["status_code"].as_u64().and_then(|status| u16::try_from(status).ok());
            whole(status.unwrap_or(200), complete["body"].as_str().unwrap_or_default().to_owned())
        }
        Word::Chunk(first) => {
            let chunks = stream::unfold(Streaming::Goes(client, Some(first)), Streaming::next);
            let body = Either::Right(StreamBody::new(chunks.boxed_local()));
            Response::builder().header("content-type", "text/event-stream").body(body).expect("a fixed head")
        }
    }
}

enum Streaming {
    Goes(WaitingClient, Option<String>),
    /// The error frame was sent, and the body must now fail.
    Failed,
}

impl Streaming {
    async fn next(self) -> Option<(io::Result<Frame<Bytes>>, Self)> {
        let Self::Goes(mut client, first) = self else {
            // When a body fails, hyper drops what it has not written yet.
            sleep(Duration::from_millis(50)).await;
            return Some((Err(io::Error::other("failed")), Self::Failed));
        };
        let word = match first {
            Some(first) => Word::Chunk(first),
            None => client.next().await,
        };
        match word {
            Word::Chunk(chunk) => Some((Ok(Frame::data(Bytes::from(chunk))), Self::Goes(client, None))),
            Word::Complete(_) => None,
            Word::Failed(code) => {
                let frame = format!("data: {}\n\n", error(code));
                Some((Ok(Frame::data(Bytes::from(frame))), Self::Failed))
            }
        }
    }
}

// Workers.

impl Relay {
    fn connect(self: Rc<Self>, mut request: Request<Incoming>) -> Response<Body> {
        let header = |name: &str| request.headers().get(name).map(|value| value.as_bytes().to_owned());
        if header("x-worker-secret").as_deref() != Some(secrets::WORKER_SECRET.as_bytes()) {
            return whole(401, "{}".to_owned());
        }
        let Some(key) = header("sec-websocket-key") else { return whole(400, "{}".to_owned()) };
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::task::spawn_local(async move {
            let Ok(upgraded) = upgrade.await else { return };
            let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
            let _ = self.attend(socket).await;
        });
        let response = Response::builder().status(101).header("connection", "upgrade").header("upgrade", "websocket");
        let response = response.header("sec-websocket-accept", derive_accept_key(&key));
        response.body(Either::Left(Full::default())).expect("a fixed head")
    }

    /// Serves a worker's socket to its end.
    async fn attend(&self, mut socket: WebSocketStream<TokioIo<Upgraded>>) -> Option<()> {
        let Message::Text(text) = socket.next().await?.ok()? else { return None };
        let register: Value = serde_json::from_str(&text).ok()?;
        if register["protocol_version"] != VERSION {
            let reason = "unsupported protocol version".into();
            return socket.close(Some(CloseFrame { code: CloseCode::Protocol, reason })).await.ok();
        }
        let (sender, mut outgoing) = mpsc::unbounded_channel();
        let number = self.join(&register, sender.clone());
        let left = Left { relay: self, number };
        let mut heartbeat = interval(Duration::from_secs(1));
        let mut last_message = Instant::now();
        loop {
            tokio::select! {
                message = socket.next() => match message?.ok()? {
                    Message::Text(text) => {
                        last_message = Instant::now();
                        self.handle(number, &serde_json::from_str(&text).unwrap_or_default())?;
                    }
                    Message::Ping(_) | Message::Pong(_) => last_message = Instant::now(),
                    Message::Binary(_) => self.wrong("a binary message"),
                    Message::Close(_) | Message::Frame(_) => break,
                },
                Some(message) = outgoing.recv() => socket.send(Message::text(message.to_string())).await.ok()?,
                _ = heartbeat.tick() => {
                    let _ = sender.send(json!({"type": "ping", "timestamp_unix_ms": 1}));
                }
                () = sleep_until(last_message + SILENCE) => break,
            }
        }
        drop(left);
        Some(())
    }

    fn join(&self, register: &Value, sender: mpsc::UnboundedSender<Value>) -> usize {
        let mut state = self.state.borrow_mut();
        state.joined += 1;
        let number = state.joined;
        let capacity = register["max_concurrent"].as_u64().unwrap_or_default() as usize;
        let _ = sender.send(json!({"type": "register_ack", "worker_id": format!("w-{number}"),
            "models": register["models"], "protocol_version": VERSION}));
        let worker = Worker { models: models(register), capacity, sender, running: BTreeMap::new() };
        state.workers.insert(number, worker);
        state.dispatch();
        number
    }

    /// Returns `None` if the socket must end, as it does on any error.
    fn handle(&self, number: usize, message: &Value) -> Option<()> {
        let kind = message["type"].as_str().unwrap_or_default();
        if !KNOWN.contains(&kind) {
            self.wrong(kind);
            return None;
        }
        let mut state = self.state.borrow_mut();
        let worker = state.workers.get_mut(&number)?;
        let id = message["request_id"].as_str().unwrap_or_default();
        match kind {
            "models_update" => worker.models = models(message),
            "response_chunk" => {
                if let Some(waiting) = worker.running.get_mut(id) {
                    waiting.has_begun = true;
                    let chunk = message["chunk"].as_str().unwrap_or_default().to_owned();
                    let _ = waiting.client.send(Word::Chunk(chunk));
                }
            }
            "response_complete" => {
                if let Some(waiting) = worker.running.remove(id) {
                    let _ = waiting.client.send(Word::Complete(message.clone()));
                }
            }
            _ => {}
        }
        state.dispatch();
        Some(())
    }

    fn wrong(&self, kind: &str) {
        self.ledger.note(Event::Wrong(format!("a worker sent {kind:?} to a relay that does not support it")));
    }
}

/// When a socket ends, in whatever way, its worker's requests are lost.
struct Left<'a> {
    relay: &'a Relay,
    number: usize,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.relay.state.borrow_mut().lose(self.number);
    }
}

fn models(message: &Value) -> Vec<String> {
    let models = message["models"].as_array().into_iter().flatten();
    models.filter_map(|model| Some(model.as_str()?.to_owned())).collect()
}
