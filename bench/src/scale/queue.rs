//! Waiting requests: the cost of each as it arrives and waits, when its client disconnects, and when its deadline
//! passes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::{Extent, ScaleError, kib_each, micros_each, other};
use crate::content::{Plan, Prompt};
use crate::http::send_request;
use crate::load::{ClientConnection, Fault, PROMPT_BYTES};
use crate::samples::{Samples, Summary, millis};
use crate::systems::{How, Setup, Stack};

const ADMIN: &str = "authorization: Bearer bench-admin-token\r\n";

/// Concurrent dials of clients.
const AT_ONCE: usize = 128;

/// The relay's status code for a request whose deadline has passed.
const TIME_IS_UP: u16 = 504;

/// The time in which every request arrives or leaves.
const PATIENCE: Duration = Duration::from_secs(60);

/// The measurements.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Queue {
    /// The number of requests that waited at once.
    pub count: u32,
    /// Arrivals a second.
    pub a_second: f64,
    /// The relay's processor time of accepting one, with its connection; µs.
    pub submit_micros: f64,
    /// The relay's memory of each; KiB.
    pub kib: f64,
    /// The number of clients that disconnected at once.
    pub left: u32,
    /// The time until the last of them had left the queue; ms.
    pub leave_ms: f64,
    /// The relay's processor time of each; µs.
    pub leave_micros: f64,
    /// The number of requests that got a timeout.
    pub expired: u32,
    /// The time from each deadline to its response.
    pub late: Summary,
    /// The relay's processor time of each; µs.
    pub expire_micros: f64,
}

/// One request runs and all others wait behind it. Half of the clients disconnect; the others are not served.
pub(super) async fn waiting(setup: &Setup, extent: &Extent) -> Result<Queue, ScaleError> {
    let timeout = Duration::from_secs(extent.queue_seconds);
    let relay = [
        ("MAX_QUEUE_LEN", extent.queued.to_string()),
        ("QUEUE_TIMEOUT_SECS", extent.queue_seconds.to_string()),
        ("MODELRELAY_ADMIN_TOKEN", "bench-admin-token".to_owned()),
    ];
    let mut stack = Stack::relay(&setup.programs, How { env: &relay, ..How::default() }).await?;
    let worker = [("MAX_CONCURRENCY", "1".to_owned())];
    stack.add_worker(&setup.programs, setup.backend_addr, How { env: &worker, ..How::default() })?;
    let addr = stack.addr;
    stack.serves(crate::load::Load::new(addr, crate::load::Until::Requests(1))).await?;
    let _running = occupy(addr, timeout * 4).await?;

    let (begun, before) = (Instant::now(), stack.relay.usage()?);
    let mut clients = Clients::come(addr, extent.queued, timeout).await?;
    until_queued(addr, extent.queued).await?;
    let (came, queued) = (begun.elapsed(), stack.relay.usage()?);
    let left = extent.queued / 2;
    let begun = Instant::now();
    clients.leave(left).await;
    until_queued(addr, extent.queued - left).await?;
    let (leaving, fewer) = (begun.elapsed(), stack.relay.usage()?);
    let late = clients.summarize().await?;
    let used = stack.relay.usage()? - fewer;
    stack.stop().await;
    let expired = extent.queued - left;
    Ok(Queue {
        count: extent.queued,
        a_second: f64::from(extent.queued) / came.as_secs_f64(),
        submit_micros: micros_each((queued - before).cpu, u64::from(extent.queued)),
        kib: kib_each((queued - before).proportional, extent.queued),
        left,
        leave_ms: millis(leaving),
        leave_micros: micros_each((fewer - queued).cpu, u64::from(left)),
        expired,
        late,
        expire_micros: micros_each(used.cpu, u64::from(expired)),
    })
}

fn prompt(seed: u32, gap: Duration) -> Prompt {
    Prompt::new(Plan { seed: u64::from(seed), chunks: 0, gap }, PROMPT_BYTES)
}

/// Sends a request that runs for this time.
async fn occupy(addr: SocketAddr, time: Duration) -> Result<ClientConnection, ScaleError> {
    let mut connection = ClientConnection::open(addr).await?;
    connection.send(&prompt(u32::MAX, time)).await?;
    until(addr, "in_flight", 1).await?;
    Ok(connection)
}

async fn until_queued(addr: SocketAddr, count: u32) -> Result<(), ScaleError> {
    until(addr, "queue_depth", count).await
}

/// Waits until the relay reports `count`.
async fn until(addr: SocketAddr, what: &str, count: u32) -> Result<(), ScaleError> {
    let begun = Instant::now();
    loop {
        let (_, body) = send_request(addr, "GET", "/admin/stats", ADMIN, b"").await?;
        let stats: serde_json::Value = serde_json::from_slice(&body).map_err(other)?;
        if stats[what]["local"] == count {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            return Err(ScaleError::Other(format!("{what} is {}, expected {count}", stats[what]["local"])));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waiting clients. Each returns how long after its deadline its timeout arrived.
struct Clients(JoinSet<Result<Duration, String>>, Vec<tokio::task::AbortHandle>);

impl Clients {
    async fn come(addr: SocketAddr, count: u32, timeout: Duration) -> Result<Self, ScaleError> {
        let dialled = (0..count).map(|number| async move {
            let mut connection = ClientConnection::open(addr).await?;
            let prompt = prompt(number, Duration::ZERO);
            connection.send(&prompt).await?;
            Ok::<_, Fault>((connection, prompt.digest(), Instant::now()))
        });
        let mut dialled = stream::iter(dialled).buffer_unordered(AT_ONCE);
        let mut clients = Self(JoinSet::new(), Vec::new());
        while let Some(client) = dialled.next().await {
            let (mut connection, digest, sent_at) = client?;
            clients.1.push(clients.0.spawn(async move {
                match connection.answer(digest, 0).await {
                    Err(Fault::Status { status: TIME_IS_UP, body }) if body.contains("queue_timeout") => {
                        Ok(sent_at.elapsed().saturating_sub(timeout))
                    }
                    Err(fault) => Err(fault.to_string()),
                    Ok(_) => Err("a request received a response without a worker".to_owned()),
                }
            }));
        }
        Ok(clients)
    }

    /// Disconnects `count` clients.
    async fn leave(&mut self, count: u32) {
        for client in self.1.drain(..count as usize) {
            client.abort();
        }
        for _ in 0..count {
            // An aborted task returns nothing else.
            let _ = self.0.join_next().await;
        }
    }

    /// How late the timeout of each of the others was.
    async fn summarize(mut self) -> Result<Summary, ScaleError> {
        let mut late = Samples::default();
        while let Some(waited) = self.0.join_next().await {
            late.add(waited.map_err(other)?.map_err(ScaleError::Other)?);
        }
        Ok(late.summary())
    }
}
