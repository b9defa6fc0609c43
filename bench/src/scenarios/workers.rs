//! Throughput by the number of workers: each runs four requests at once, and each request takes its time in the
//! backend.

use std::time::Duration;

use super::{PartError, Turns};
use crate::figures::Figure;
use crate::load::{Load, Outcome, Until};
use crate::systems::{Setup, Stack, StackOptions, SystemError};

/// Concurrent requests of a worker.
const CONCURRENCY: u32 = 4;

/// The backend's time for each request: four at once make 200 responses a second.
const WORK: Duration = Duration::from_millis(20);

/// More than eight workers can run, so that none ever waits for a client.
const CLIENTS: u32 = 48;

/// Measures one, two, four and eight workers.
pub(super) async fn one_to_eight(turn: &mut Turns<'_>) -> Result<(), PartError> {
    let sizes = [(1, Figure::Workers1), (2, Figure::Workers2), (4, Figure::Workers4), (8, Figure::Workers8)];
    for (workers, figure) in sizes {
        let outcome = answers_of(workers, turn.setup, turn.extent.time()).await?;
        let outcome = turn.count(outcome)?;
        turn.set(figure, outcome.right as f64 / outcome.seconds);
    }
    Ok(())
}

/// Measures the responses of `workers` workers.
pub async fn answers_of(workers: u32, setup: &Setup, time: Duration) -> Result<Outcome, SystemError> {
    let options = StackOptions { workers, concurrency: CONCURRENCY, ..StackOptions::default() };
    let stack = Stack::start(&setup.programs, setup.backend_addr, &options).await?;
    let load = Load { connections: CLIENTS, gap: WORK, ..Load::new(stack.addr, Until::Elapsed(time)) };
    let outcome = load.run().await;
    stack.stop().await;
    Ok(outcome)
}
