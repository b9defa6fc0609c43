//! The measurements of every system.

use std::time::Duration;

use super::{PartError, Turns, kib, micros_each};
use crate::figures::Figure;
use crate::load::{Load, Until};
use crate::systems::{Running, System};
use crate::usage::Usage;

/// Concurrent clients.
const CLIENTS: u32 = 32;

/// The time between two tokens.
const PACE: Duration = Duration::from_millis(10);

/// Half a second of tokens, so that a load has many first events.
const PACED_CHUNKS: u32 = 50;

/// Long enough that the beginning and the end of a stream do not matter.
const FAST_CHUNKS: u32 = 2000;

/// The time between two events of streams of which only the memory is measured.
const SLOW_PACE: Duration = Duration::from_millis(250);

const LONG_PROMPT: usize = 220_000;
const HUGE_PROMPT: usize = 20_000_000;

/// Requests that warm a system up before it is measured.
const WARM_UP: u32 = 20;

/// Compares a thousand open streams with none.
pub(super) async fn memory(turn: &mut Turns<'_>, running: &Running) -> Result<(), PartError> {
    let streams = turn.extent.streams;
    turn.load(Load { connections: 2, ..Load::new(running.addr, Until::Requests(2)) }).await?;
    if turn.turn.system == System::Direct {
        return Ok(());
    }
    let before = turn.usage(running)?;
    let chunks = 1 + (turn.extent.seconds / SLOW_PACE.as_secs_f64()).ceil() as u32;
    let load = Load { connections: streams, chunks, gap: SLOW_PACE, ..Load::new(running.addr, Until::Requests(1)) };
    let open = tokio::spawn(load.run());
    // All streams have begun by then, and none is at its end.
    tokio::time::sleep(SLOW_PACE + turn.extent.time() / 2).await;
    let more = turn.usage(running)? - before;
    let outcome = open.await.map_err(|error| PartError::Other(error.to_string()))?;
    turn.count(outcome)?;
    turn.set(Figure::StreamKib, kib(more.proportional) / f64::from(streams));
    Ok(())
}

/// Measures plain responses.
pub(super) async fn unary(turn: &mut Turns<'_>, running: &Running) -> Result<(), PartError> {
    let load = Load::new(running.addr, Until::Elapsed(turn.extent.time()));
    turn.load(Load { until: Until::Requests(WARM_UP), connections: CLIENTS, ..load }).await?;
    let alone = turn.load(Load { until: Until::Elapsed(turn.extent.time() / 2), ..load }).await?;
    turn.set(Figure::AloneP50, alone.latency.p50_ms);
    let before = turn.usage(running)?;
    let outcome = turn.load(Load { connections: CLIENTS, ..load }).await?;
    let used = turn.usage(running)? - before;
    turn.set(Figure::Requests, outcome.right as f64 / outcome.seconds);
    turn.set(Figure::CpuPerRequest, micros_each(used.cpu, outcome.right));
    Ok(())
}

/// Measures streams at reading speed, and as fast as possible.
pub(super) async fn streams(turn: &mut Turns<'_>, running: &Running) -> Result<(), PartError> {
    let load = Load { connections: CLIENTS, ..Load::new(running.addr, Until::Elapsed(turn.extent.time())) };
    turn.load(Load { chunks: 5, until: Until::Requests(1), ..load }).await?;
    let (before, relay) = (turn.usage(running)?, relay_usage(running)?);
    let paced = turn.load(Load { chunks: PACED_CHUNKS, gap: PACE, ..load }).await?;
    let used = turn.usage(running)? - before;
    turn.set(Figure::FirstEventP50, paced.first_event.p50_ms);
    turn.set(Figure::FirstEventP99, paced.first_event.p99_ms);
    turn.set(Figure::Stalls, paced.first_event.stalls as f64);
    turn.set(Figure::CpuPerPacedChunk, micros_each(used.cpu, paced.events));
    if turn.turn.system == System::Modelrelay {
        let relay = relay_usage(running)? - relay;
        turn.set(Figure::RelayCpuPerPacedChunk, micros_each(relay.cpu, paced.events));
    }
    let before = turn.usage(running)?;
    let fast = turn.load(Load { chunks: FAST_CHUNKS, ..load }).await?;
    let used = turn.usage(running)? - before;
    turn.set(Figure::Chunks, fast.events as f64 / fast.seconds);
    turn.set(Figure::CpuPerChunk, micros_each(used.cpu, fast.events));
    Ok(())
}

/// Measures long prompts with short responses.
pub(super) async fn prompts(turn: &mut Turns<'_>, running: &Running) -> Result<(), PartError> {
    let each = turn.extent.long_prompts;
    let load = Load { connections: 4, ..Load::new(running.addr, Until::Requests(each.div_ceil(4))) };
    turn.load(Load { prompt_bytes: LONG_PROMPT, until: Until::Requests(2), ..load }).await?;
    let before = turn.usage(running)?;
    let outcome = turn.load(Load { prompt_bytes: LONG_PROMPT, ..load }).await?;
    let used = turn.usage(running)? - before;
    turn.set(Figure::CpuPerLongPrompt, micros_each(used.cpu, outcome.right));
    let huge = Load { prompt_bytes: HUGE_PROMPT, connections: 1, until: Until::Requests(each.div_ceil(50)), ..load };
    let before = turn.usage(running)?;
    let outcome = turn.load(huge).await?;
    let used = turn.usage(running)? - before;
    turn.set(Figure::CpuPerHugePrompt, micros_each(used.cpu, outcome.right) / 1e3);
    Ok(())
}

/// Measures clients that disconnect from a stream after three events. Clients after them are served normally.
pub(super) async fn aborts(turn: &mut Turns<'_>, running: &Running) -> Result<(), PartError> {
    let load = Load { connections: 8, ..Load::new(running.addr, Until::Elapsed(turn.extent.time() / 2)) };
    let before = turn.usage(running)?;
    let left = turn.load(Load { chunks: 1000, gap: PACE, leave_after: Some(3), ..load }).await?;
    let used = turn.usage(running)? - before;
    turn.set(Figure::CpuPerAbort, micros_each(used.cpu, left.right));
    turn.load(Load { until: Until::Requests(WARM_UP), ..load }).await?;
    Ok(())
}

/// The usage of ModelRelay's relay; zero for other systems.
fn relay_usage(running: &Running) -> Result<Usage, PartError> {
    let relay = running.programs.iter().find(|program| program.name() == "relay");
    Ok(relay.map(|relay| relay.usage()).transpose()?.unwrap_or_default())
}
