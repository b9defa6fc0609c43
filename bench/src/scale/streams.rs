//! Thousands of streams at once through one relay and one worker, compared with as many of the backend itself.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Extent, ScaleError, kib_each, micros_each, other};
use crate::load::{Load, Outcome, Until};
use crate::samples::Summary;
use crate::systems::{Setup, Stack, StackOptions};
use crate::usage::Usage;

/// The time between two events: with all streams open, as many a second as a core can read and compare without being
/// late.
const PACE: Duration = Duration::from_millis(500);

/// The measurements of one way.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Streams {
    /// True if relay and worker were in between.
    pub is_relayed: bool,
    /// The number of concurrent streams.
    pub count: u32,
    /// Events of all of them.
    pub events: u64,
    /// The time to the first event.
    pub first_event: Summary,
    /// The time between two events.
    pub gaps: Summary,
    /// The relay's memory of each; KiB.
    pub relay_kib: f64,
    /// The worker's; KiB.
    pub worker_kib: f64,
    /// The relay's processor time of an event, with its share of the beginning and end of its stream; µs.
    pub relay_micros: f64,
    /// The worker's; µs.
    pub worker_micros: f64,
}

/// Measures direct first, then relayed.
pub(super) async fn open(
    setup: &Setup,
    extent: &Extent,
    mut check: impl FnMut(&Outcome) -> Result<(), ScaleError>,
) -> Result<Vec<Streams>, ScaleError> {
    let over = Duration::from_secs_f64(extent.begin_seconds);
    let load = Load {
        connections: extent.streams,
        chunks: extent.stream_chunks,
        gap: PACE,
        over: Some(over),
        ..Load::new(setup.backend_addr, Until::Requests(1))
    };
    let direct = load.run().await;
    check(&direct)?;
    let options = StackOptions { concurrency: extent.streams + 10, ..StackOptions::default() };
    let stack = Stack::start(&setup.programs, setup.backend_addr, &options).await?;
    let before = both(&stack)?;
    let open = tokio::spawn(Load { to: stack.addr, ..load }.run());
    // All streams have begun by then, and none is at its end.
    tokio::time::sleep(over + (PACE * extent.stream_chunks).saturating_sub(over) / 2).await;
    let during = both(&stack)?;
    let relayed = open.await.map_err(other)?;
    check(&relayed)?;
    let after = both(&stack)?;
    stack.stop().await;
    let (count, events) = (extent.streams, relayed.events);
    let of = |outcome: &Outcome| Streams {
        is_relayed: false,
        count,
        events: outcome.events,
        first_event: outcome.first_event,
        gaps: outcome.gaps,
        relay_kib: 0.0,
        worker_kib: 0.0,
        relay_micros: 0.0,
        worker_micros: 0.0,
    };
    let relayed = Streams {
        is_relayed: true,
        relay_kib: kib_each((during.0 - before.0).proportional, count),
        worker_kib: kib_each((during.1 - before.1).proportional, count),
        relay_micros: micros_each((after.0 - before.0).cpu, events),
        worker_micros: micros_each((after.1 - before.1).cpu, events),
        ..of(&relayed)
    };
    Ok(vec![of(&direct), relayed])
}

fn both(stack: &Stack) -> Result<(Usage, Usage), ScaleError> {
    let relay = stack.relay.usage()?;
    let worker =
        stack.workers.iter().try_fold(Usage::default(), |sum, worker| Ok::<_, ScaleError>(sum + worker.usage()?));
    Ok((relay, worker?))
}
