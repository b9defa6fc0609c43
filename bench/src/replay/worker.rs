//! A worker and its engine: prompts are computed one after the other, except for the part that is cached.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::Time;
use super::cache::{BLOCK_TOKENS, BlockCache};
use super::workload::Turn;

/// The speed of a worker's engine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Engine {
    /// Tokens of prompts that it computes in a second.
    pub prefill_rate: f64,
    /// The time between two tokens of a response.
    pub token_time: Duration,
}

impl Engine {
    /// The engine of the cases.
    pub const USUAL: Self = Self { prefill_rate: 16_000.0, token_time: Duration::from_millis(25) };

    /// The time to compute tokens of a prompt.
    pub fn prefill(self, tokens: u32) -> Duration {
        Duration::from_secs_f64(f64::from(tokens) / self.prefill_rate)
    }
}

/// The tokens of a prompt that a cache with these blocks saves. At least one token is always computed.
pub fn saved(turn: &Turn, blocks: usize) -> u32 {
    (blocks as u32 * BLOCK_TOKENS).min(turn.tokens - 1)
}

/// The result of a request that was sent to a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Served {
    /// Tokens of the prompt that were cached.
    pub cached: u32,
    /// The time of the first token.
    pub first: Time,
    /// The end of the response.
    pub end: Time,
}

/// A worker. It serves requests in the order in which they were sent, so everything about a request is known when it is
/// sent.
#[derive(Clone, Debug)]
pub struct Worker {
    engine: Engine,
    cache: BlockCache,
    concurrency: usize,
    /// The end of the last prompt's computation.
    computed: Time,
    /// The ends of the last `concurrency` responses at most.
    ends: BinaryHeap<Reverse<Time>>,
}

impl Worker {
    /// Creates an idle worker with an empty cache of this number of blocks.
    pub fn new(engine: Engine, cache: usize, concurrency: usize) -> Self {
        Self { engine, cache: BlockCache::new(cache), concurrency, computed: Time::ZERO, ends: BinaryHeap::new() }
    }

    /// Serves a request that was sent at `now`. A request beyond the concurrency waits at the worker.
    pub fn serve(&mut self, turn: &Turn, now: Time) -> Served {
        let mut start = now.max(self.computed);
        if self.ends.len() == self.concurrency
            && let Some(Reverse(end)) = self.ends.pop()
        {
            start = start.max(end);
        }
        let cached = saved(turn, self.cache.matching(&turn.blocks));
        self.cache.insert(&turn.blocks);
        let first = start + self.engine.prefill(turn.tokens - cached);
        self.computed = first;
        let end = first + self.engine.token_time * turn.output;
        self.ends.push(Reverse(end));
        Served { cached, first, end }
    }

    /// The time to the first token if the request were sent now.
    pub fn estimate(&self, turn: &Turn, now: Time) -> Duration {
        let cached = saved(turn, self.cache.matching(&turn.blocks));
        self.computed.saturating_sub(now) + self.engine.prefill(turn.tokens - cached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(tokens: u32, output: u32, blocks: &[u32]) -> Turn {
        Turn { at: Time::ZERO, client: 0, tokens, bytes: 0, output, conversation: 0, blocks: blocks.into() }
    }

    #[test]
    fn cached_blocks_are_not_computed_again() {
        let mut worker = Worker::new(Engine::USUAL, 10, 2);
        let first = worker.serve(&turn(1600, 10, &[0, 1, 2]), Time::ZERO);
        assert_eq!((first.cached, first.first, first.end), (0, Duration::from_millis(100), Duration::from_millis(350)));
        let second = worker.serve(&turn(1696, 1, &[0, 1, 2]), Time::ZERO);
        assert_eq!((second.cached, second.first), (1536, Duration::from_millis(110)));
    }

    #[test]
    fn request_beyond_concurrency_waits_for_response() {
        let mut worker = Worker::new(Engine::USUAL, 10, 1);
        let first = worker.serve(&turn(1600, 10, &[0]), Time::ZERO);
        let second = worker.serve(&turn(160, 10, &[]), Time::ZERO);
        assert_eq!(second.first, first.end + Duration::from_millis(10));
    }
}
