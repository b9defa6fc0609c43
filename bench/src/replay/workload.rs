//! Requests: recorded ones, simulated agents, and prompts that are never repeated.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::Time;
use super::cache::{BLOCK_TOKENS, Block};
use crate::simulation::rng::Rng;

/// A request.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The time of its arrival.
    pub at: Time,
    /// The client that sends another request after the response.
    pub client: usize,
    /// The tokens of its prompt.
    pub tokens: u32,
    /// The bytes of its body.
    pub bytes: u64,
    /// The tokens of its response.
    pub output: u32,
    /// Its conversation, as the relay's key identifies it.
    pub conversation: u64,
    /// The complete blocks of its prompt.
    pub blocks: Arc<[Block]>,
}

/// The bytes of a body for a number of tokens, if they are unknown.
pub fn body_bytes(tokens: u32) -> u64 {
    u64::from(tokens) * 4
}

/// Clients that send requests.
pub trait Workload {
    /// The requests that depend on no response.
    fn begin(&mut self) -> Vec<Turn>;
    /// The next request of a client after its response has ended.
    fn after(&mut self, turn: &Turn, now: Time) -> Option<Turn>;
}

/// Requests at recorded times, whenever earlier ones end.
#[derive(Clone, Debug)]
pub struct Recorded(pub Vec<Turn>);

impl Workload for Recorded {
    fn begin(&mut self) -> Vec<Turn> {
        std::mem::take(&mut self.0)
    }

    fn after(&mut self, _: &Turn, _: Time) -> Option<Turn> {
        None
    }
}

/// The part of a trace's beginning within which a seed chooses the first request.
const OFFSET: f64 = 0.1;

/// The longest delay of an arrival, in seconds. The conversation trace has arrivals in steps of three seconds.
const JITTER: f64 = 3.0;

/// A block that begins more than this part of all requests is a system prompt of the service.
const SHARED: f64 = 0.01;

/// A trace of `bench/traces`: requests with the seconds from the trace's beginning.
#[derive(Clone, Debug)]
pub struct Trace(Vec<(f64, Turn)>);

impl Trace {
    /// Parses a trace.
    ///
    /// The relay's key covers system prompt, tools and the first user message. A trace has no messages, so the
    /// conversation is identified by the first block that is no common system prompt. Requests with no such block are
    /// identified by their last one.
    pub fn parse(text: &str) -> Self {
        let mut parents: Vec<Option<Block>> = Vec::new();
        let mut at = 0.0;
        let mut rows = Vec::new();
        for line in text.lines().skip(1) {
            let fields: Vec<Option<u32>> = line.split(',').map(|field| field.parse().ok()).collect();
            let [Some(delay), Some(tokens), Some(output), known] = fields[..] else {
                panic!("a trace has four numbers: {line}")
            };
            at += f64::from(delay) / 1000.0;
            let mut blocks: Vec<Block> = std::iter::successors(known, |block| parents[*block as usize]).collect();
            blocks.reverse();
            while blocks.len() < tokens.div_ceil(BLOCK_TOKENS) as usize {
                parents.push(blocks.last().copied());
                blocks.push(parents.len() as Block - 1);
            }
            rows.push((at, tokens, output, blocks));
        }
        let mut begun: HashMap<Block, usize> = HashMap::new();
        for block in rows.iter().flat_map(|(.., blocks)| blocks) {
            *begun.entry(*block).or_default() += 1;
        }
        let limit = (rows.len() as f64 * SHARED) as usize;
        let turn = |(at, tokens, output, blocks): (f64, u32, u32, Vec<Block>)| {
            let own = blocks.iter().find(|block| begun[*block] <= limit).or(blocks.last());
            let conversation = own.map_or(0, |block| u64::from(*block));
            let blocks = blocks[..(tokens / BLOCK_TOKENS) as usize].into();
            (at, Turn { at: Time::ZERO, client: 0, tokens, bytes: body_bytes(tokens), output, conversation, blocks })
        };
        Self(rows.into_iter().map(turn).collect())
    }

    /// Plays the trace `speed` times as fast, from a place near its beginning.
    pub fn play(&self, speed: f64, seed: u64) -> Recorded {
        let Self(requests) = self;
        let mut rng = Rng::new(seed);
        let first = (requests.len() as f64 * OFFSET * rng.unit()) as usize;
        let start = requests[first].0;
        let turn = |(at, turn): &(f64, Turn)| {
            let at = Duration::from_secs_f64((at - start + JITTER * rng.unit()) / speed);
            Turn { at, ..turn.clone() }
        };
        let mut turns: Vec<Turn> = requests[first..].iter().map(turn).collect();
        turns.sort_by_key(|turn| turn.at);
        Recorded(turns)
    }
}

/// Arrivals of prompts that have no block in common. If they are `alike`, they look like one conversation.
pub fn unique(requests: u32, rate: f64, alike: bool, seed: u64) -> Recorded {
    let mut rng = Rng::new(seed);
    let (mut at, mut next) = (Time::ZERO, 0);
    let turns = (0..requests).map(|number| {
        at += rng.exponential(1.0 / rate);
        let tokens = tokens(&mut rng, 12_000.0, 1.0);
        let blocks: Vec<Block> = (next..next + tokens / BLOCK_TOKENS).collect();
        next += tokens / BLOCK_TOKENS;
        let output = self::tokens(&mut rng, 300.0, 0.8);
        let conversation = if alike { 0 } else { u64::from(number) };
        Turn { at, client: 0, tokens, bytes: body_bytes(tokens), output, conversation, blocks: blocks.into() }
    });
    Recorded(turns.collect())
}

fn tokens(rng: &mut Rng, mean: f64, sigma: f64) -> u32 {
    (rng.lognormal(mean, sigma).as_secs_f64() as u32).max(1)
}

/// The tokens that all agents have at the beginning of their prompts.
const HEAD: u32 = 12_000;

/// The tokens at which an agent begins a new conversation.
const LONGEST: u32 = 150_000;

/// The mean of the tokens that a turn adds.
const GROWTH: f64 = 3000.0;

/// The mean tokens of a response.
const OUTPUT: f64 = 320.0;

/// The mean time between a response and the agent's next turn, in seconds: it runs a tool.
const THINKING: f64 = 5.0;

/// Coding agents, each with one conversation that grows until it begins a new one.
#[derive(Debug)]
pub struct Agents {
    sessions: Vec<Session>,
    next_block: Block,
    next_conversation: u64,
}

#[derive(Debug)]
struct Session {
    rng: Rng,
    conversation: u64,
    tokens: u32,
    blocks: Vec<Block>,
}

impl Agents {
    /// Creates agents that begin within a minute. Each draws from a sequence of its own, whatever the order of
    /// responses.
    pub fn new(sessions: usize, seed: u64) -> Self {
        let sessions = (0..sessions).map(|client| Session {
            rng: Rng::new(seed * 1000 + client as u64),
            conversation: client as u64,
            tokens: HEAD,
            blocks: (0..HEAD / BLOCK_TOKENS).collect(),
        });
        let sessions: Vec<_> = sessions.collect();
        Self { next_block: HEAD / BLOCK_TOKENS, next_conversation: sessions.len() as u64, sessions }
    }

    fn turn(&mut self, client: usize, now: Time) -> Turn {
        let session = &mut self.sessions[client];
        session.tokens += tokens(&mut session.rng, GROWTH, 1.0);
        if session.tokens > LONGEST {
            session.tokens = HEAD + tokens(&mut session.rng, GROWTH, 1.0);
            session.blocks.truncate((HEAD / BLOCK_TOKENS) as usize);
            session.conversation = self.next_conversation;
            self.next_conversation += 1;
        }
        while session.blocks.len() < (session.tokens / BLOCK_TOKENS) as usize {
            session.blocks.push(self.next_block);
            self.next_block += 1;
        }
        Turn {
            at: now + session.rng.lognormal(THINKING, 1.0),
            client,
            tokens: session.tokens,
            bytes: body_bytes(session.tokens),
            output: tokens(&mut session.rng, OUTPUT, 0.8),
            conversation: session.conversation,
            blocks: session.blocks.as_slice().into(),
        }
    }
}

impl Workload for Agents {
    fn begin(&mut self) -> Vec<Turn> {
        let sessions = self.sessions.len();
        let begin = |client: usize| {
            let at = Duration::from_secs_f64(60.0 * self.sessions[client].rng.unit());
            self.turn(client, at)
        };
        (0..sessions).map(begin).collect()
    }

    fn after(&mut self, turn: &Turn, now: Time) -> Option<Turn> {
        Some(self.turn(turn.client, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "header\n0,1100,5,\n1000,1700,6,1\n0,600,7,0\n";

    #[test]
    fn trace_contains_blocks_of_earlier_requests() {
        let Recorded(turns) = Trace::parse(TRACE).play(2.0, 1);
        let find = |output| turns.iter().find(|turn| turn.output == output).unwrap();
        assert_eq!((&*find(5).blocks, &*find(6).blocks, &*find(7).blocks), (&[0, 1][..], &[0, 1, 3][..], &[0][..]));
        assert!(find(6).at >= Duration::from_millis(500) && find(6).at < Duration::from_millis(2000));
    }

    #[test]
    fn agent_keeps_conversation_until_it_restarts() {
        let mut agents = Agents::new(1, 1);
        let mut turn = agents.begin().remove(0);
        let mut restarts = 0;
        for _ in 0..200 {
            let next = agents.after(&turn, turn.at).unwrap();
            if next.conversation == turn.conversation {
                assert!(next.tokens > turn.tokens && next.blocks.starts_with(&turn.blocks));
            } else {
                restarts += 1;
                assert_eq!(next.blocks[..23], turn.blocks[..23]);
                assert_ne!(next.blocks[23], turn.blocks[23]);
            }
            turn = next;
        }
        assert!((2..12).contains(&restarts), "{restarts}");
    }
}
