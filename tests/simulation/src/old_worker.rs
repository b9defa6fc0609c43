//! A fake worker of the published program: it uses only the first messages of the protocol, with one relay. It has no
//! grants, credits or drains, and relies on its relay not to send it too much.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use modelrelay_relay::system::shutdown::StopSignal;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use turmoil::net::TcpStream;

use crate::backend::FIRST_PORT;
use crate::client::RELAY_PORT;
use crate::plan::Plan;
use crate::secrets;

/// The pause between a link's end and the next dial.
const REDIAL: Duration = Duration::from_secs(2);

/// The time after which a silent link is lost, three heartbeats, for old peers of either kind. A published worker
/// learns of it from its kernel, whose peer responds with a reset; here, packets from before a partition are lost.
pub const SILENCE: Duration = Duration::from_secs(3);

/// The timeout of a dial.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// SIGTERM.
pub type Stop = watch::Receiver<Option<StopSignal>>;

/// Serves until it is stopped, and then finishes its requests.
pub async fn work(plan: Rc<Plan>, number: usize, mut stop: Stop) {
    while stop.borrow().is_none() {
        if let Ok(Some(socket)) = timeout(DIAL_TIMEOUT, dial(&plan, number)).await {
            Link::new(&plan, number).serve(socket, &mut stop).await;
        }
        tokio::select! {
            () = sleep(REDIAL) => {}
            _ = stop.wait_for(Option::is_some) => {}
        }
    }
}

async fn dial(plan: &Plan, number: usize) -> Option<WebSocketStream<TcpStream>> {
    let relay = format!("relay-{}", plan.only_relay_of(number));
    let stream = TcpStream::connect((relay.as_str(), RELAY_PORT)).await.ok()?;
    let url = format!("ws://{relay}:{RELAY_PORT}/v1/worker/connect?provider=local");
    let mut request = url.into_client_request().ok()?;
    request.headers_mut().insert("x-worker-secret", secrets::WORKER_SECRET.parse().ok()?);
    Some(tokio_tungstenite::client_async(request, stream).await.ok()?.0)
}

/// One socket, and its running requests.
struct Link<'a> {
    plan: &'a Plan,
    number: usize,
    running: HashMap<String, Running>,
    /// Messages to send, in this order.
    sender: mpsc::UnboundedSender<Value>,
    outgoing: mpsc::UnboundedReceiver<Value>,
}

/// Ends with its link, or when cancelled.
struct Running(JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<'a> Link<'a> {
    fn new(plan: &'a Plan, number: usize) -> Self {
        let (sender, outgoing) = mpsc::unbounded_channel();
        Self { plan, number, running: HashMap::new(), sender, outgoing }
    }

    async fn serve(mut self, socket: WebSocketStream<TcpStream>, stop: &mut Stop) {
        let own = &self.plan.workers[self.number];
        self.send_message(
            json!({"type": "register", "worker_name": format!("worker-{}", self.number), "models": own.models,
            "max_concurrent": own.capacity, "protocol_version": "1", "current_load": 0}),
        );
        let (mut sink, mut stream) = socket.split();
        let mut last_message = Instant::now();
        let mut ends: Option<Instant> = None;
        while ends.is_none() || !self.running.is_empty() || !self.outgoing.is_empty() {
            tokio::select! {
                message = stream.next() => match message {
                    Some(Ok(Message::Text(text))) => {
                        last_message = Instant::now();
                        self.handle(&serde_json::from_str(&text).unwrap_or_default());
                    }
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => last_message = Instant::now(),
                    Some(Ok(Message::Binary(_) | Message::Close(_) | Message::Frame(_)) | Err(_)) | None => return,
                },
                Some(message) = self.outgoing.recv() => {
                    if let ("response_complete" | "error", Some(id)) = (kind(&message), message["request_id"].as_str()) {
                        self.running.remove(id);
                    }
                    if sink.send(Message::text(message.to_string())).await.is_err() {
                        return;
                    }
                }
                _ = stop.wait_for(Option::is_some), if ends.is_none() => {
                    ends = Some(Instant::now() + Duration::from_secs(self.plan.settings.drain_timeout));
                    self.send_message(json!({"type": "models_update", "models": [], "current_load": self.running.len()}));
                }
                () = sleep_until(last_message + SILENCE) => return,
                () = sleep_until(ends.unwrap_or(last_message)), if ends.is_some() => return,
            }
        }
        let _ = sink.close().await;
    }

    fn send_message(&self, message: Value) {
        let _ = self.sender.send(message);
    }

    fn handle(&mut self, message: &Value) {
        let id = message["request_id"].as_str().unwrap_or_default().to_owned();
        match kind(message) {
            "request" => {
                let (number, message, sender) = (self.number, message.clone(), self.sender.clone());
                let task = tokio::task::spawn_local(async move { answer(number, &message, &sender).await });
                self.running.insert(id, Running(task));
            }
            "cancel" => drop(self.running.remove(&id)),
            "ping" => self.send_message(json!({"type": "pong", "current_load": self.running.len(),
                "timestamp_unix_ms": message["timestamp_unix_ms"]})),
            // Including `graceful_shutdown`: the relay closes the socket when all requests are finished.
            _ => {}
        }
    }
}

fn kind(message: &Value) -> &str {
    message["type"].as_str().unwrap_or_default()
}

/// Sends a request to the backend and forwards its response.
async fn answer(number: usize, request: &Value, sender: &mpsc::UnboundedSender<Value>) {
    let id = &request["request_id"];
    let failed = || json!({"type": "error", "request_id": id, "message": "backend error"});
    let last = match forward_request(number, request).await {
        Some(response) if response.status() == 200 && request["is_streaming"] == true => {
            stream(id, response, sender).await.unwrap_or_else(failed)
        }
        Some(response) => whole(id, response).await.unwrap_or_else(failed),
        None => failed(),
    };
    let _ = sender.send(last);
}

async fn forward_request(number: usize, request: &Value) -> Option<Response<Incoming>> {
    let stream = TcpStream::connect(("backends", FIRST_PORT + number as u16)).await.ok()?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    tokio::task::spawn_local(connection);
    let mut forwarded = Request::post(request["endpoint_path"].as_str()?).header("host", "backends");
    for (name, value) in request["headers"].as_object()? {
        forwarded = forwarded.header(name, value.as_str()?);
    }
    let body = Bytes::from(request["body"].as_str()?.to_owned());
    sender.send_request(forwarded.body(Full::new(body)).ok()?).await.ok()
}

/// Sends chunks; returns the end, unless the backend's response is truncated.
async fn stream(id: &Value, response: Response<Incoming>, sender: &mpsc::UnboundedSender<Value>) -> Option<Value> {
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        // All backend output is ASCII here, so it can be split anywhere.
        let data = frame.ok()?.into_data().unwrap_or_default();
        let chunk = String::from_utf8(data.into()).ok()?;
        let _ = sender.send(json!({"type": "response_chunk", "request_id": id, "chunk": chunk}));
    }
    Some(json!({"type": "response_complete", "request_id": id, "status_code": 200}))
}

async fn whole(id: &Value, response: Response<Incoming>) -> Option<Value> {
    let status = response.status().as_u16();
    let text = |value: &http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
    let headers: HashMap<_, _> =
        response.headers().iter().map(|(name, value)| (name.as_str().to_owned(), text(value))).collect();
    let body = String::from_utf8(response.into_body().collect().await.ok()?.to_bytes().into()).ok()?;
    Some(
        json!({"type": "response_complete", "request_id": id, "status_code": status, "headers": headers, "body": body}),
    )
}
