//! Bursts of requests with the log that users have: every program of the table that logs each request by default.

use std::time::Duration;

use super::{PartError, Turns, micros_each};
use crate::figures::Figure;
use crate::load::{Load, Until};
use crate::samples::Summary;
use crate::systems::{Logs, Running, System};

/// Streams that begin at the same moment.
const BURST: u32 = 32;

/// The time between two tokens.
const PACE: Duration = Duration::from_millis(10);

/// As short as possible, for many bursts in little time: the streams of a burst end together, and the next one begins.
const CHUNKS: u32 = 5;

/// Measures the time to the first token in bursts, and the processor time of a logged request.
pub(super) async fn logged(turn: &mut Turns<'_>, running: &Running) -> Result<(), PartError> {
    let has_log = match turn.turn.system {
        System::Nginx | System::Modelrelay => true,
        System::Direct => false,
        System::Haproxy | System::VllmRouter | System::SglangRouter | System::Rathole => return Ok(()),
    };
    let unlogged = turn.burst(running).await?;
    turn.set(Figure::BurstP99Unlogged, unlogged.p99_ms);
    if !has_log {
        return Ok(());
    }
    let logging = turn.setup.start(turn.turn.system, Logs::Default).await?;
    let measured = measure(turn, &logging).await;
    logging.stop().await;
    measured
}

async fn measure(turn: &mut Turns<'_>, logging: &Running) -> Result<(), PartError> {
    let first = turn.burst(logging).await?;
    turn.set(Figure::BurstP50, first.p50_ms);
    turn.set(Figure::BurstP99, first.p99_ms);
    let load = Load { connections: BURST, ..Load::new(logging.addr, Until::Elapsed(turn.extent.time())) };
    let before = turn.usage(logging)?;
    let outcome = turn.load(load).await?;
    let used = turn.usage(logging)? - before;
    turn.set(Figure::CpuPerLoggedRequest, micros_each(used.cpu, outcome.right));
    Ok(())
}

impl Turns<'_> {
    /// Returns the time to the first token of streams that begin together.
    async fn burst(&mut self, running: &Running) -> Result<Summary, PartError> {
        let load = Load {
            connections: BURST,
            chunks: CHUNKS,
            gap: PACE,
            over: Some(Duration::ZERO),
            ..Load::new(running.addr, Until::Elapsed(self.extent.time()))
        };
        self.load(Load { until: Until::Requests(1), ..load }).await?;
        Ok(self.load(load).await?.first_event)
    }
}
