//! One of a hundred clients stops reading an endless response: the most that it may cost, and its effect on the others.

use std::time::{Duration, Instant};

use super::{PartError, Turns, kib};
use crate::content::{Plan, Prompt};
use crate::figures::Figure;
use crate::load::{ClientConnection, Fault, Load, PROMPT_BYTES, Until};
use crate::systems::{Stack, StackOptions};

const NEIGHBOURS: u32 = 99;

/// The time between two events of a neighbour's stream.
const PACE: Duration = Duration::from_millis(10);

/// 23 MB, several times the capacity of the sockets on the way.
const ENDLESS: u32 = 100_000;

/// Measures the gaps of the neighbours without and with it, and the additional memory of relay and worker.
pub(super) async fn one_of_a_hundred(turn: &mut Turns<'_>) -> Result<(), PartError> {
    let stack = Stack::start(&turn.setup.programs, turn.setup.backend_addr, &StackOptions::default()).await?;
    let (warm_up, settle) = (turn.extent.time() / 2, Duration::from_secs_f64(turn.extent.settle_seconds));
    // Longer than both, so that no stream ends while memory is measured.
    let chunks = ((warm_up + settle).as_secs_f64() * 1.2 / PACE.as_secs_f64()) as u32;
    let neighbours = Load { connections: NEIGHBOURS, chunks, gap: PACE, ..Load::new(stack.addr, Until::Requests(1)) };
    let without = turn.load(neighbours).await?;
    let reading = tokio::spawn(neighbours.run());
    tokio::time::sleep(warm_up).await;
    let before = stack.usage()?.resident;
    let slow = stop_reading(&stack).await.map_err(|fault| PartError::Other(fault.to_string()))?;
    let (begun, mut most) = (Instant::now(), before);
    while begun.elapsed() < settle {
        tokio::time::sleep(Duration::from_millis(50)).await;
        most = most.max(stack.usage()?.resident);
    }
    let settled = stack.usage()?.resident;
    let with = reading.await.map_err(|error| PartError::Other(error.to_string()))?;
    drop(slow);
    let with = turn.count(with)?;
    turn.set(Figure::SlowClientKib, kib(settled.saturating_sub(before)));
    turn.set(Figure::SlowClientPeakKib, kib(most - before));
    turn.set(Figure::SlowClientGaps, with.gaps.p99_ms / without.gaps.p99_ms);
    Ok(())
}

/// Requests a stream, reads its beginning, and then stops.
async fn stop_reading(stack: &Stack) -> Result<ClientConnection, Fault> {
    let prompt = Prompt::new(Plan { seed: u64::MAX, chunks: ENDLESS, gap: Duration::ZERO }, PROMPT_BYTES);
    let mut connection = ClientConnection::open(stack.addr).await?;
    let mut answer = connection.send_prompt(&prompt, ENDLESS).await?;
    while answer.events() == 0 {
        answer.more(&mut connection).await?;
    }
    Ok(connection)
}
