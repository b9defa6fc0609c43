//! A relay with nothing to do: by itself, and with a thousand workers.

use std::time::Duration;

use super::{PartError, Turns, kib};
use crate::crowd::Crowd;
use crate::figures::Figure;
use crate::samples::millis;
use crate::systems::Stack;

/// The time in which temporary memory of the start is released.
const SETTLES_WITHIN: Duration = Duration::from_secs(1);

/// Measures the time until the relay listens, and its memory then.
pub(super) async fn start(turn: &mut Turns<'_>) -> Result<(), PartError> {
    let stack = Stack::relay_alone(&turn.setup.programs).await?;
    turn.set(Figure::ColdStart, millis(stack.relay_start));
    tokio::time::sleep(SETTLES_WITHIN.min(turn.extent.time())).await;
    turn.set(Figure::IdleRelayMb, stack.relay.usage()?.resident as f64 / 1e6);
    Ok(())
}

/// Measures the cost of idle workers for the relay: heartbeats at their usual interval, and nothing else.
pub(super) async fn workers(turn: &mut Turns<'_>) -> Result<(), PartError> {
    let stack = Stack::relay_alone(&turn.setup.programs).await?;
    let count = turn.extent.idle_workers;
    // The first worker causes the memory that all share.
    let first = Crowd::connect(stack.addr, 1).await.map_err(|error| PartError::Other(error.to_string()))?;
    let before = stack.relay.usage()?;
    let crowd = Crowd::connect(stack.addr, count).await.map_err(|error| PartError::Other(error.to_string()))?;
    let connected = stack.relay.usage()?;
    let idle = Duration::from_secs_f64(turn.extent.idle_seconds);
    tokio::time::sleep(idle).await;
    let last = stack.relay.usage()?;
    if first.lost() + crowd.lost() > 0 {
        return Err(PartError::Other(format!("{} idle workers were lost", first.lost() + crowd.lost())));
    }
    let used = (last - connected).cpu.as_secs_f64() / idle.as_secs_f64();
    turn.set(Figure::IdleWorkerKib, kib((last - before).proportional) / f64::from(count));
    turn.set(Figure::IdleWorkerCpu, used * 100.0 / f64::from(count));
    Ok(())
}
