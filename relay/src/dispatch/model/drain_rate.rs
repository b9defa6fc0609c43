//! The recent speed of the queue, for the `Retry-After` of requests that find it full.

use std::collections::VecDeque;

use super::clock::{Moment, Span};

/// The number of departures remembered: enough to even out batches, few enough to follow a change of pace.
const REMEMBERED: usize = 64;

const SECOND: Span = 1_000_000_000;

#[derive(Clone, Debug, Default)]
pub(crate) struct DrainRate {
    departures: VecDeque<Moment>,
}

impl DrainRate {
    /// Records that a place in the queue became free.
    pub(crate) fn handle_departure(&mut self, now: Moment) {
        if self.departures.len() == REMEMBERED {
            self.departures.pop_front();
        }
        self.departures.push_back(now);
    }

    /// Returns whole seconds until a queue of this length has moved on, 1 to 60, and never more than `at_most`, after
    /// which the places are free in any case.
    pub(crate) fn retry_after_secs(&self, waiting: usize, at_most: Span, now: Moment) -> u32 {
        // The first departure only starts the measurement; one alone is no rate.
        let moved = i64::try_from(self.departures.len().saturating_sub(1)).unwrap_or(i64::MAX);
        let wait = match self.departures.front() {
            Some(first) if moved > 0 => {
                let waiting = i64::try_from(waiting).unwrap_or(i64::MAX);
                now.since(*first).saturating_mul(waiting) / moved
            }
            Some(_) | None => at_most,
        };
        let secs = wait.min(at_most).saturating_add(SECOND - 1) / SECOND;
        u32::try_from(secs.clamp(1, 60)).unwrap_or(60)
    }
}
