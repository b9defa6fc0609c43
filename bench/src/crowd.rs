//! Idle workers. They register, grant a slot and respond to heartbeats. When their relay is gone, they dial again after
//! the pauses of the real worker ([`Backoff`]).

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt, stream};
use modelrelay_protocol::message::{Grant, Parsed, Pong, Register, RelayToWorker, WorkerLimits, WorkerToRelay, encode};
use modelrelay_protocol::version::{Capability, VERSION};
use modelrelay_worker::link::{Backoff, EndKind, random};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use crate::samples::{Samples, Summary};
use crate::systems::SECRET;

/// The smallest buffer that works, so that the crowd itself needs little.
const BUFFER_BYTES: usize = 4 << 10;

/// The timeout of a handshake, and then of the acknowledgement; the same as in the worker.
const PATIENCE: Duration = Duration::from_secs(10);

/// Concurrent dials while a crowd connects for the first time, which is not measured.
const AT_ONCE: usize = 64;

pub(crate) type Socket = WebSocketStream<TcpStream>;

/// Idle workers; dropping it disconnects them all.
#[derive(Debug)]
pub struct Crowd {
    _workers: JoinSet<()>,
    shared: Arc<Shared>,
}

/// The counters that all of its workers share.
#[derive(Debug, Default)]
struct Shared {
    attached: watch::Sender<u32>,
    lost: AtomicU32,
    failed: AtomicU32,
    heartbeats: AtomicU64,
    away: Mutex<Samples>,
    dials: Mutex<Vec<Instant>>,
    unanswered: AtomicU32,
}

/// Why a worker was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum CrowdError {
    /// The connection failed.
    #[error("a worker cannot connect: {0}")]
    Io(#[from] io::Error),
    /// The WebSocket handshake failed, or the WebSocket broke.
    #[error("a worker was rejected: {0}")]
    Socket(#[from] Box<tungstenite::Error>),
    /// The relay sent something else, or nothing.
    #[error("a worker received no register_ack: {0}")]
    NotAcknowledged(String),
}

impl Crowd {
    /// Connects `count` workers to one relay and waits until each of them is acknowledged.
    pub async fn connect(relay: SocketAddr, count: u32) -> Result<Self, CrowdError> {
        let shared = Arc::new(Shared::default());
        let mut workers = JoinSet::new();
        let idlers = (0..count).map(|number| Idler { relay, registration: registration(number) });
        let mut linked = stream::iter(idlers.map(Idler::into_linked)).buffer_unordered(AT_ONCE);
        while let Some(linked) = linked.next().await {
            let (idler, socket) = linked?;
            shared.attached.send_modify(|attached| *attached += 1);
            workers.spawn(idler.keep_linked(socket, Arc::clone(&shared)));
        }
        Ok(Self { _workers: workers, shared })
    }

    /// How often the relay has dropped a worker.
    pub fn lost(&self) -> u32 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Failed dials after a loss.
    pub fn failed(&self) -> u32 {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Those of [`Self::failed`] with a connection, but without a successful handshake.
    pub fn failed_handshakes(&self) -> u32 {
        self.failed() - self.shared.unanswered.load(Ordering::Relaxed)
    }

    /// The times of the dials after a loss.
    pub fn dials(&self) -> Vec<Instant> {
        self.shared.dials.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Heartbeats that got a reply.
    pub fn heartbeats(&self) -> u64 {
        self.shared.heartbeats.load(Ordering::Relaxed)
    }

    /// How long each lost worker was away until it was back.
    pub fn away(&self) -> Summary {
        self.shared.away.lock().unwrap_or_else(PoisonError::into_inner).summary()
    }

    /// Waits until `count` workers were lost and as many are attached again; false if the time runs out first.
    pub async fn returned(&self, count: u32, within: Duration) -> bool {
        let mut attached = self.shared.attached.subscribe();
        let all = attached.wait_for(|attached| *attached >= count && self.lost() >= count);
        tokio::time::timeout(within, all).await.is_ok_and(|all| all.is_ok())
    }
}

/// One worker of the crowd.
#[derive(Debug)]
struct Idler {
    relay: SocketAddr,
    registration: Register,
}

impl Idler {
    async fn into_linked(self) -> Result<(Self, Socket), CrowdError> {
        let socket = self.link().await?;
        Ok((self, socket))
    }

    async fn link(&self) -> Result<Socket, CrowdError> {
        let mut socket = link(self.relay, &self.registration).await?;
        send_message(
            &mut socket,
            &WorkerToRelay::Grant(Grant { slots: 1, others: 0, capacity: 1, links: 1, models: None }),
        )
        .await?;
        Ok(socket)
    }

    async fn keep_linked(self, mut socket: Socket, shared: Arc<Shared>) {
        let mut backoff = Backoff::default();
        loop {
            stay(&mut socket, &shared.heartbeats).await;
            drop(socket);
            let lost = Instant::now();
            shared.attached.send_modify(|attached| *attached -= 1);
            shared.lost.fetch_add(1, Ordering::Relaxed);
            let mut end = EndKind::Linked;
            socket = loop {
                tokio::time::sleep(backoff.next_pause(end, 1, random())).await;
                shared.dials.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
                match self.link().await {
                    Ok(socket) => break socket,
                    Err(CrowdError::Io(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        shared.unanswered.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(_) => {}
                }
                end = EndKind::Failed;
                shared.failed.fetch_add(1, Ordering::Relaxed);
            };
            shared.away.lock().unwrap_or_else(PoisonError::into_inner).add(lost.elapsed());
            shared.attached.send_modify(|attached| *attached += 1);
        }
    }
}

/// The registration of one worker, with a model of its own and one that all share.
fn registration(number: u32) -> Register {
    Register {
        worker_name: format!("idle-{number}"),
        models: vec![format!("model-{number}"), "shared".into()],
        max_concurrent: 1,
        protocol_version: Some(VERSION.into()),
        instance_id: Some(new_instance()),
        capabilities: vec![Capability::Core1.as_str().into()],
        limits: Some(WorkerLimits { stream_window_bytes: 256 << 10 }),
        ..Register::default()
    }
}

/// A new instance id. Two workers with the same one are one worker to a relay, which drops the older link.
pub(crate) fn new_instance() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    format!("{:016x}{:016x}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Dials, registers, and waits for the acknowledgement.
pub(crate) async fn link(relay: SocketAddr, registration: &Register) -> Result<Socket, CrowdError> {
    let late = |what: &str| CrowdError::NotAcknowledged(what.to_owned());
    let mut socket = tokio::time::timeout(PATIENCE, dial(relay)).await.map_err(|_| late("incomplete handshake"))??;
    send_message(&mut socket, &WorkerToRelay::Register(registration.clone())).await?;
    tokio::time::timeout(PATIENCE, acknowledged(&mut socket)).await.map_err(|_| late("nothing was received"))??;
    Ok(socket)
}

async fn dial(relay: SocketAddr) -> Result<Socket, CrowdError> {
    let url = format!("ws://{relay}/v1/worker/connect?provider=local");
    let mut request = url.into_client_request().map_err(Box::new)?;
    let secret =
        SECRET.parse().map_err(|_| CrowdError::NotAcknowledged("the secret is not a valid header value".into()))?;
    request.headers_mut().insert("x-worker-secret", secret);
    let stream = TcpStream::connect(relay).await?;
    stream.set_nodelay(true)?;
    let config = WebSocketConfig::default().read_buffer_size(BUFFER_BYTES).write_buffer_size(0);
    let (socket, _) = client_async_with_config(request, stream, Some(config)).await.map_err(Box::new)?;
    Ok(socket)
}

async fn acknowledged(socket: &mut Socket) -> Result<(), CrowdError> {
    loop {
        match heard(socket).await {
            Some(RelayToWorker::RegisterAck(_)) => return Ok(()),
            Some(_) => {}
            None => return Err(CrowdError::NotAcknowledged("the relay closed the connection".into())),
        }
    }
}

/// Responds to heartbeats until the relay disconnects.
async fn stay(socket: &mut Socket, heartbeats: &AtomicU64) {
    while let Some(message) = heard(socket).await {
        if let RelayToWorker::Ping(ping) = message {
            let pong = Pong { current_load: Some(0), timestamp_unix_ms: ping.timestamp_unix_ms };
            if send_message(socket, &WorkerToRelay::Pong(pong)).await.is_err() {
                return;
            }
            heartbeats.fetch_add(1, Ordering::Relaxed);
        }
    }
}

pub(crate) async fn send_message(socket: &mut Socket, message: &WorkerToRelay) -> Result<(), CrowdError> {
    Ok(socket.send(Message::text(encode(message))).await.map_err(Box::new)?)
}

/// The next message that belongs to the protocol; `None` at the end.
async fn heard(socket: &mut Socket) -> Option<RelayToWorker> {
    loop {
        if let Message::Text(text) = socket.next().await?.ok()?
            && let Ok(Parsed::Known(message)) = RelayToWorker::parse(&text)
        {
            return Some(message);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio_tungstenite::accept_async;

    use super::*;

    /// Accepts the next worker; returns its socket and its instance id.
    async fn admit(listener: &TcpListener) -> (Socket, String) {
        let mut socket = accept_async(listener.accept().await.unwrap().0).await.unwrap();
        let text = socket.next().await.unwrap().unwrap().into_text().unwrap();
        let Ok(Parsed::Known(WorkerToRelay::Register(register))) = WorkerToRelay::parse(&text) else {
            panic!("{text}");
        };
        socket.send(Message::text(r#"{"type":"register_ack","worker_id":"w"}"#)).await.unwrap();
        assert!(socket.next().await.unwrap().unwrap().into_text().unwrap().contains("grant"));
        (socket, register.instance_id.unwrap())
    }

    #[tokio::test]
    async fn dropped_worker_reconnects_with_same_identity() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let relay = listener.local_addr().unwrap();
        let (crowd, (socket, first)) = tokio::join!(Crowd::connect(relay, 1), admit(&listener));
        let crowd = crowd.unwrap();
        drop(socket);
        let (mut socket, again) = admit(&listener).await;
        assert!(crowd.returned(1, PATIENCE).await);
        assert_eq!((first, crowd.lost(), crowd.away().count), (again, 1, 1));
        socket.send(Message::text(r#"{"type":"ping"}"#)).await.unwrap();
        assert!(socket.next().await.unwrap().unwrap().into_text().unwrap().contains("pong"));
    }
}
