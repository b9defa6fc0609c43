//! Idle workers of one relay: the cost of each, and the time until all are back after the relay was killed and
//! restarted.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Extent, ScaleError, kib_each, micros_each};
use crate::crowd::Crowd;
use crate::http::send_request;
use crate::samples::{Summary, millis};
use crate::systems::{How, Setup, Stack, free_port};

/// The time in which all workers must be back.
const BACK_WITHIN: Duration = Duration::from_secs(90);

/// The measurements.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Workers {
    /// The number of workers.
    pub count: u32,
    /// From the first one's dial to the last one's acknowledgement, 64 at a time.
    pub connected_seconds: f64,
    /// The relay's processor time of a handshake and registration; µs.
    pub handshake_micros: f64,
    /// The relay's memory of each; KiB.
    pub kib: f64,
    /// The relay's processor time of each; percent of a core.
    pub cpu_percent: f64,
    /// Heartbeats that got a reply meanwhile.
    pub heartbeats: u64,
    /// The relay's processor time of one; µs.
    pub heartbeat_micros: f64,
    /// The relay's processor time of a scrape of its metrics; ms.
    pub scrape_cpu_ms: f64,
    /// The size of its metrics; KiB.
    pub scrape_kib: f64,
    /// The time from the kill until a new relay listened on the same port; ms.
    pub away_ms: f64,
    /// The time from the kill until all were attached again; s.
    pub back_seconds: f64,
    /// The time from each worker's loss to its acknowledgement.
    pub back: Summary,
    /// Failed dials meanwhile.
    pub failed_dials: u32,
    /// The new relay's processor time of each return; µs.
    pub return_micros: f64,
    /// Its memory of each; KiB.
    pub return_kib: f64,
}

/// Connects the workers, leaves them idle, and kills their relay.
pub(super) async fn idle(setup: &Setup, extent: &Extent) -> Result<Workers, ScaleError> {
    let (count, addr) = (extent.workers, free_port()?);
    let env = [("LISTEN_ADDR", addr.to_string())];
    let how = How { env: &env, ..How::default() };
    let stack = Stack::relay(&setup.programs, how).await?;
    // The first worker causes the memory that all share.
    let first = Crowd::connect(addr, 1).await?;
    let empty = stack.relay.usage()?;
    let begun = Instant::now();
    let crowd = Crowd::connect(addr, count).await?;
    let (connected_seconds, connected) = (begun.elapsed().as_secs_f64(), stack.relay.usage()?);
    let idle = Duration::from_secs_f64(extent.idle_seconds);
    let before = crowd.heartbeats();
    tokio::time::sleep(idle).await;
    let (rested, heartbeats) = (stack.relay.usage()?, crowd.heartbeats() - before);
    if first.lost() + crowd.lost() > 0 {
        return Err(ScaleError::Other(format!("{} idle workers were lost", first.lost() + crowd.lost())));
    }
    let (_, metrics) = send_request(addr, "GET", "/metrics", "", b"").await?;
    let scraped = stack.relay.usage()?;
    drop(first);

    let killed = Instant::now();
    stack.stop().await;
    let stack = Stack::relay(&setup.programs, how).await?;
    let away = killed.elapsed();
    if !crowd.returned(count, BACK_WITHIN).await {
        return Err(ScaleError::Other(format!("not all {count} workers are back after {BACK_WITHIN:?}")));
    }
    let (back_seconds, returned) = (killed.elapsed().as_secs_f64(), stack.relay.usage()?);
    let used = rested.cpu.saturating_sub(connected.cpu);
    Ok(Workers {
        count,
        connected_seconds,
        handshake_micros: micros_each((connected - empty).cpu, u64::from(count)),
        kib: kib_each((rested - empty).proportional, count),
        cpu_percent: used.as_secs_f64() * 100.0 / idle.as_secs_f64() / f64::from(count),
        heartbeats,
        heartbeat_micros: micros_each(used, heartbeats),
        scrape_cpu_ms: millis((scraped - rested).cpu),
        scrape_kib: metrics.len() as f64 / 1024.0,
        away_ms: millis(away),
        back_seconds,
        back: crowd.away(),
        failed_dials: crowd.failed(),
        return_micros: micros_each(returned.cpu, u64::from(count)),
        return_kib: kib_each(returned.proportional.saturating_sub(empty.proportional), count),
    })
}
