//! Workers that have nothing to do: registered, granting a slot, and answering heartbeats.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use modelrelay_protocol::message::{Grant, Parsed, Pong, Register, RelayToWorker, WorkerLimits, WorkerToRelay, encode};
use modelrelay_protocol::version::{Capability, VERSION};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use crate::systems::SECRET;

/// The least that works, so that the crowd itself needs little.
const BUFFER_BYTES: usize = 4 << 10;

/// A worker that is not acknowledged by then never will be.
const PATIENCE: Duration = Duration::from_secs(20);

type Socket = WebSocketStream<TcpStream>;

/// Idle workers; dropping it disconnects them all.
#[derive(Debug)]
pub struct Crowd {
    workers: JoinSet<()>,
    lost: Arc<AtomicU32>,
}

/// Why a worker was not let in.
#[derive(Debug, thiserror::Error)]
pub enum CrowdError {
    /// The connection.
    #[error("an idle worker cannot connect: {0}")]
    Io(#[from] std::io::Error),
    /// The WebSocket.
    #[error("an idle worker was not let in: {0}")]
    Socket(#[from] Box<tungstenite::Error>),
    /// What the relay said, or that it said nothing.
    #[error("an idle worker was not acknowledged: {0}")]
    NotAcknowledged(String),
}

impl Crowd {
    /// So many workers of one relay, each of them acknowledged.
    pub async fn connect(relay: SocketAddr, count: u32) -> Result<Self, CrowdError> {
        let mut crowd = Self { workers: JoinSet::new(), lost: Arc::default() };
        for number in 0..count {
            let mut socket = register(relay, number).await?;
            let lost = Arc::clone(&crowd.lost);
            crowd.workers.spawn(async move {
                stay(&mut socket).await;
                lost.fetch_add(1, Ordering::Relaxed);
            });
        }
        Ok(crowd)
    }

    /// How many the relay has dropped.
    pub fn lost(&self) -> u32 {
        self.lost.load(Ordering::Relaxed)
    }
}

async fn register(relay: SocketAddr, number: u32) -> Result<Socket, CrowdError> {
    let mut socket = tokio::time::timeout(PATIENCE, dial(relay))
        .await
        .map_err(|_| CrowdError::NotAcknowledged("the handshake has no end".into()))??;
    let register = Register {
        worker_name: format!("idle-{number}"),
        models: vec![format!("model-{number}"), "shared".into()],
        max_concurrent: 1,
        protocol_version: Some(VERSION.into()),
        instance_id: Some(new_instance()),
        capabilities: vec![Capability::Core1.as_str().into()],
        limits: Some(WorkerLimits { stream_window_bytes: 256 << 10 }),
        ..Register::default()
    };
    say(&mut socket, &WorkerToRelay::Register(register)).await?;
    let acknowledged = tokio::time::timeout(PATIENCE, acknowledged(&mut socket)).await;
    acknowledged.map_err(|_| CrowdError::NotAcknowledged("nothing came".into()))??;
    let grant = Grant { slots: 1, others: 0, capacity: 1, links: 1, models: None };
    say(&mut socket, &WorkerToRelay::Grant(grant)).await?;
    Ok(socket)
}

/// Two workers with one are one worker to a relay, which then drops the older link.
fn new_instance() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    format!("{:016x}{:016x}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

async fn dial(relay: SocketAddr) -> Result<Socket, CrowdError> {
    let url = format!("ws://{relay}/v1/worker/connect?provider=local");
    let mut request = url.into_client_request().map_err(Box::new)?;
    let secret = SECRET.parse().map_err(|_| CrowdError::NotAcknowledged("the secret is no header".into()))?;
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

/// Answers heartbeats until the relay goes.
async fn stay(socket: &mut Socket) {
    while let Some(message) = heard(socket).await {
        if let RelayToWorker::Ping(ping) = message {
            let pong = Pong { current_load: Some(0), timestamp_unix_ms: ping.timestamp_unix_ms };
            if say(socket, &WorkerToRelay::Pong(pong)).await.is_err() {
                return;
            }
        }
    }
}

async fn say(socket: &mut Socket, message: &WorkerToRelay) -> Result<(), CrowdError> {
    Ok(socket.send(Message::text(encode(message))).await.map_err(Box::new)?)
}

/// The next message that is one of the protocol's; `None` at the end.
async fn heard(socket: &mut Socket) -> Option<RelayToWorker> {
    loop {
        if let Message::Text(text) = socket.next().await?.ok()?
            && let Ok(Parsed::Known(message)) = RelayToWorker::parse(&text)
        {
            return Some(message);
        }
    }
}
