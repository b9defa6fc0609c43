//! An inference backend played by hand.
//!
//! It serves HTTP/1.1 on a raw socket, so that a test controls every byte: where a response is cut, when it stalls,
//! whether it resets. Housekeeping requests (`GET /health`, `GET /v1/models`, any other `GET` without an id) get an
//! automatic response and are recorded; an inference request becomes a [`Call`] that the test plays, or goes to the
//! handler set with [`FakeBackend::answer_with`].
//!
//! A refusing backend keeps its port: the socket stays bound without listening, so that no other program can use it.

mod call;
mod request;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinHandle};

pub use call::{Call, sse};
pub use request::{Answer, Head};

use crate::{TEST_TIMEOUT, poll_for};

type Handler = Arc<dyn Fn(&Head, &[u8]) -> Answer + Send + Sync>;

/// The backend: a listening port, its requests, and its responses.
pub struct FakeBackend {
    addr: SocketAddr,
    shared: Arc<Shared>,
    calls: mpsc::UnboundedReceiver<Call>,
    door: Door,
}

/// The port: listening, or only bound so that connections are refused.
enum Door {
    Open(JoinHandle<()>),
    Shut(Socket),
    /// Only while one of the others is being replaced.
    Moving,
}

struct Shared {
    state: Mutex<State>,
    calls: mpsc::UnboundedSender<Call>,
}

struct State {
    models: Vec<String>,
    details: Value,
    healthy: bool,
    lists: bool,
    handler: Option<Handler>,
    remembers: bool,
    heads: Vec<Head>,
    connections: Vec<AbortHandle>,
}

impl FakeBackend {
    /// Starts a healthy backend on a free port of 127.0.0.1 that lists model `m`.
    pub async fn start() -> Self {
        Self::with_models(&["m"]).await
    }

    /// Starts a healthy backend that lists these models.
    pub async fn with_models(models: &[&str]) -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("a literal address"), models).await
    }

    /// Starts a healthy backend at this address that lists these models.
    pub async fn start_at(addr: SocketAddr, models: &[&str]) -> Self {
        let socket = bound(addr).expect("a free address of this machine");
        let addr = local_addr(&socket);
        let (sender, calls) = mpsc::unbounded_channel();
        let state = State {
            models: models.iter().map(ToString::to_string).collect(),
            details: json!({}),
            healthy: true,
            lists: true,
            handler: None,
            remembers: true,
            heads: Vec::new(),
            connections: Vec::new(),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), calls: sender });
        let door = Door::Open(open(socket, &shared));
        Self { addr, shared, calls, door }
    }

    /// Starts a backend that refuses connections until [`FakeBackend::reopen`].
    pub async fn refusing() -> Self {
        let mut backend = Self::start().await;
        backend.refuse().await;
        backend
    }

    /// The address on which it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The value for `BACKEND_URL`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Lists these models from now on.
    pub fn set_models(&self, models: &[&str]) {
        self.shared.lock().models = models.iter().map(ToString::to_string).collect();
    }

    /// Lists each model with these fields from now on.
    pub fn set_details(&self, details: &Value) {
        self.shared.lock().details = details.clone();
    }

    /// With `false`, health and models get a 503.
    pub fn set_healthy(&self, healthy: bool) {
        self.shared.lock().healthy = healthy;
    }

    /// With `false`, it is healthy but responds 500 to requests for its models.
    pub fn set_listing(&self, lists: bool) {
        self.shared.lock().lists = lists;
    }

    /// Responds to every inference request by itself from now on.
    pub fn answer_with(&self, handler: impl Fn(&Head, &[u8]) -> Answer + Send + Sync + 'static) {
        self.shared.lock().handler = Some(Arc::new(handler));
    }

    /// Records no more request heads: for backends that get requests for hours.
    pub fn forget(&self) {
        self.shared.lock().remembers = false;
    }

    /// The next inference request.
    ///
    /// # Panics
    /// If none arrives within ten seconds.
    pub async fn call(&mut self) -> Call {
        let call = tokio::time::timeout(TEST_TIMEOUT, self.calls.recv()).await;
        call.expect("no request reached the backend within 10 s").expect("the backend holds the sender itself")
    }

    /// The next inference request, if one arrives within `patience`.
    pub async fn call_within(&mut self, patience: Duration) -> Option<Call> {
        tokio::time::timeout(patience, self.calls.recv()).await.ok().flatten()
    }

    /// Every request head so far, including housekeeping, in order of arrival.
    #[must_use]
    pub fn received_heads(&self) -> Vec<Head> {
        self.shared.lock().heads.clone()
    }

    /// The number of requests for this path so far.
    #[must_use]
    pub fn request_count(&self, path: &str) -> usize {
        self.shared.lock().heads.iter().filter(|head| head.path() == path).count()
    }

    /// Refuses connections from now on, and cuts the idle ones. Calls that the test holds stay open.
    pub async fn refuse(&mut self) {
        let door = std::mem::replace(&mut self.door, Door::Moving);
        if let Door::Open(listening) = door {
            listening.abort();
            let _ = listening.await;
            for connection in self.shared.lock().connections.drain(..) {
                connection.abort();
            }
            self.door = Door::Shut(bound_again(self.addr).await);
        } else {
            self.door = door;
        }
    }

    /// Accepts connections again, on the same port.
    pub fn reopen(&mut self) {
        let door = std::mem::replace(&mut self.door, Door::Moving);
        self.door = match door {
            Door::Shut(socket) => Door::Open(open(socket, &self.shared)),
            other @ (Door::Open(_) | Door::Moving) => other,
        };
    }
}

impl Drop for FakeBackend {
    fn drop(&mut self) {
        if let Door::Open(listening) = &self.door {
            listening.abort();
        }
        for connection in self.shared.lock().connections.drain(..) {
            connection.abort();
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no test panics while it holds this lock")
    }
}

fn bound(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).expect("a TCP socket");
    socket.set_reuse_address(true).expect("SO_REUSEADDR");
    socket.set_nonblocking(true).expect("a non-blocking socket");
    socket.bind(&addr.into()).map(|()| socket)
}

/// Binds the port of a listener that was just closed. A program that another test starts at this moment holds a copy of
/// it until it runs, so the port may be occupied for a little longer.
async fn bound_again(addr: SocketAddr) -> Socket {
    let socket = poll_for(TEST_TIMEOUT, async || bound(addr).ok()).await;
    socket.unwrap_or_else(|| panic!("cannot bind {addr} again"))
}

fn local_addr(socket: &Socket) -> SocketAddr {
    socket.local_addr().expect("a bound socket").as_socket().expect("an IP socket")
}

fn open(socket: Socket, shared: &Arc<Shared>) -> JoinHandle<()> {
    socket.listen(1024).expect("a listening socket");
    let listener = TcpListener::from_std(socket.into()).expect("a tokio listener");
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let served = tokio::spawn(serve(stream, Arc::clone(&shared)));
            let connections = &mut shared.lock().connections;
            connections.retain(|connection| !connection.is_finished());
            connections.push(served.abort_handle());
        }
    })
}

/// Serves one connection until it closes. A call owns the socket and returns it after a complete response.
async fn serve(mut stream: TcpStream, shared: Arc<Shared>) {
    let mut buffer = BytesMut::new();
    while let Some(head) = request::read_head(&mut stream, &mut buffer).await {
        let handler = {
            let mut state = shared.lock();
            if state.remembers {
                state.heads.push(head.clone());
            }
            state.handler.clone()
        };
        if let Some(answer) = housekeeping(&head, &shared) {
            if stream.write_all(&answer.encoded()).await.is_err() {
                return;
            }
            continue;
        }
        let (give_back, returned) = oneshot::channel();
        let mut call = Call::new(head, stream, buffer, give_back);
        match handler {
            Some(handler) => {
                let Some(body) = call.try_read_body().await else {
                    return;
                };
                let answer = handler(&call.head, &body);
                if !call.try_answer(&answer).await {
                    return;
                }
            }
            None => {
                let _ = shared.calls.send(call);
            }
        }
        match returned.await {
            Ok(back) => (stream, buffer) = back,
            Err(_) => return,
        }
    }
}

fn housekeeping(head: &Head, shared: &Shared) -> Option<Answer> {
    let state = shared.lock();
    let path = head.path();
    if head.method != "GET" || path.starts_with("/v1/responses/") {
        return None;
    }
    if !state.healthy {
        return Some(Answer::json(503, &json!({"error": {"message": "loading"}})));
    }
    Some(match path {
        "/health" => Answer::new(200, &[], b""),
        "/v1/models" if !state.lists => Answer::json(500, &json!({"error": {"message": "no list"}})),
        "/v1/models" => {
            let entry = |id: &String| {
                let mut entry = state.details.clone();
                (entry["id"], entry["object"]) = (json!(id), json!("model"));
                entry
            };
            let data: Vec<_> = state.models.iter().map(entry).collect();
            Answer::json(200, &json!({"object": "list", "data": data}))
        }
        _ => Answer::json(404, &json!({"error": {"message": "not found"}})),
    })
}
