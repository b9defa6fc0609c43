//! Request journals, which relays write with `REQUEST_JOURNAL_FILE`: requests at the times of their arrival.
//!
//! A journal has no prompts. Each prompt of a conversation extends the previous one; a shorter one is its beginning,
//! and what follows it is new. Requests without a conversation share nothing with others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::time::Duration;

use serde::Deserialize;

use super::cache::{BLOCK_TOKENS, Block};
use super::worker::Engine;
use super::workload::{Recorded, Turn, body_bytes};
use super::{Outcome, Time};

/// Routes whose requests have a prompt that is computed and a response that is generated.
const ENDPOINTS: [&str; 4] = ["chat_completions", "completions", "messages", "responses"];

/// Outcomes of requests that no engine would have served.
const REFUSED: [&str; 5] = ["client_error", "unauthorized", "model_not_found", "provider_disabled", "provider_deleted"];

/// The longest prompt in tokens, and the longest response.
const MAX_TOKENS: u64 = 1 << 26;

/// The latest time, in the year 2109.
const MAX_AT_MS: u64 = 1 << 42;

/// One line. Further fields are ignored.
#[derive(Clone, PartialEq, Debug, Deserialize)]
struct Line {
    at_ms: u64,
    model: String,
    endpoint: String,
    body_bytes: u64,
    conversation: Option<String>,
    worker: Option<String>,
    ttft_ms: Option<u64>,
    duration_ms: u64,
    input_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    output_tokens: Option<u64>,
    outcome: String,
}

/// The requests of one model.
#[derive(Clone, PartialEq, Debug)]
pub struct Journal(Vec<Line>);

/// Why a journal cannot be replayed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JournalError {
    /// A line is not one of a journal.
    #[error("{file}, line {line}: {why}")]
    Line {
        /// The file.
        file: String,
        /// The number of the line, from 1.
        line: usize,
        /// The problem.
        why: String,
    },
    /// The journal has requests for several models.
    #[error("the journal has requests for several models; choose one with --model: {}", .0.join(", "))]
    Models(Vec<String>),
    /// There is nothing to replay.
    #[error("the journal has no request with a prompt{}", .0.as_ref().map_or_else(String::new, |model| format!(" for the model {model}")))]
    Empty(Option<String>),
}

impl Journal {
    /// Reads the text of files with their names. The files may overlap in time, as those of several relays do.
    pub fn read(files: &[(String, String)], model: Option<&str>) -> Result<Self, JournalError> {
        let mut lines = Vec::new();
        for (file, text) in files {
            for (index, line) in text.lines().enumerate() {
                let error = |why| JournalError::Line { file: file.clone(), line: index + 1, why };
                lines.push(parse(line).map_err(error)?);
            }
        }
        lines.retain(|line| line.is_replayed() && model.is_none_or(|model| line.model == model));
        let models: BTreeSet<_> = lines.iter().map(|line| line.model.clone()).collect();
        match models.len() {
            0 => return Err(JournalError::Empty(model.map(str::to_owned))),
            1 => {}
            _ => return Err(JournalError::Models(models.into_iter().collect())),
        }
        lines.sort_by_key(|line| line.at_ms);
        Ok(Self(lines))
    }

    /// The number of workers that served the requests; at least 1.
    pub fn workers(&self) -> usize {
        let workers: BTreeSet<_> = self.0.iter().filter_map(|line| line.worker.as_deref()).collect();
        workers.len().max(1)
    }

    /// The time from the first arrival to the last one.
    pub fn span(&self) -> Time {
        self.0.last().map_or(Time::ZERO, |last| self.arrival(last))
    }

    /// The requests, for workers with this engine.
    pub fn play(&self, engine: Engine) -> Recorded {
        let mut prompts = Prompts::default();
        Recorded(self.0.iter().map(|line| prompts.turn(line, self.arrival(line), engine)).collect())
    }

    /// The figures that were recorded. The number of overtakes is not.
    pub fn outcome(&self) -> Outcome {
        let mut outcome = Outcome::default();
        let mut previous: HashMap<&str, &str> = HashMap::new();
        for line in &self.0 {
            outcome.turns += u64::from(line.outcome == "ok");
            if let (Some(input), Some(cached)) = (line.input_tokens, line.cached_tokens) {
                outcome.tokens += input;
                outcome.cached += cached.min(input);
            }
            outcome.waits.push(Duration::from_millis(line.ttft_ms.unwrap_or(line.duration_ms)));
            if let (Some(conversation), Some(worker)) = (&line.conversation, &line.worker) {
                let before = previous.insert(conversation, worker);
                outcome.moves += u64::from(before.is_some_and(|before| before != worker));
            }
        }
        outcome
    }

    fn arrival(&self, line: &Line) -> Time {
        Duration::from_millis(line.at_ms - self.0.first().map_or(line.at_ms, |first| first.at_ms))
    }
}

impl fmt::Display for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut turns: BTreeMap<&str, usize> = BTreeMap::new();
        for conversation in self.0.iter().filter_map(|line| line.conversation.as_deref()) {
            *turns.entry(conversation).or_default() += 1;
        }
        let minutes = self.span().as_secs_f64() / 60.0;
        let (in_turns, requests): (usize, _) = (turns.values().sum(), self.0.len());
        write!(f, "{requests} requests in {minutes:.0} minutes, {in_turns} of them in {} conversations", turns.len())
    }
}

fn parse(text: &str) -> Result<Line, String> {
    let line: Line = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        // A line is parsed by itself, so the parser's number of the line is always 1.
        let message = message.split(" at line 1 column").next().unwrap_or_default();
        format!("{message} (column {})", error.column())
    })?;
    let values = [
        ("at_ms", Some(line.at_ms), MAX_AT_MS),
        ("body_bytes", Some(line.body_bytes), body_bytes(MAX_TOKENS as u32)),
        ("input_tokens", line.input_tokens, MAX_TOKENS),
        ("output_tokens", line.output_tokens, MAX_TOKENS),
    ];
    match values.into_iter().find(|(_, value, most)| value.is_some_and(|value| value > *most)) {
        Some((name, ..)) => Err(format!("`{name}` is too large")),
        None => Ok(line),
    }
}

impl Line {
    fn is_replayed(&self) -> bool {
        ENDPOINTS.contains(&self.endpoint.as_str()) && !REFUSED.contains(&self.outcome.as_str())
    }

    /// The tokens of the prompt, estimated from the body if the backend did not report them.
    fn tokens(&self) -> u32 {
        let tokens = self.input_tokens.filter(|tokens| *tokens > 0).unwrap_or(self.body_bytes / body_bytes(1));
        tokens.clamp(1, MAX_TOKENS) as u32
    }

    /// The tokens of the response, estimated from its duration if the backend did not report them.
    fn output(&self, engine: Engine) -> u32 {
        let written = self.ttft_ms.map_or(0, |first| self.duration_ms.saturating_sub(first));
        let estimate = || (written as f64 / 1000.0 / engine.token_time.as_secs_f64()) as u64;
        self.output_tokens.unwrap_or_else(estimate).clamp(1, MAX_TOKENS) as u32
    }
}

/// The blocks of all prompts so far.
#[derive(Default)]
struct Prompts {
    /// By pseudonym: the number of the conversation, and the blocks of its last prompt.
    conversations: HashMap<String, (u64, Vec<Block>)>,
    next_conversation: u64,
    next_block: Block,
}

impl Prompts {
    fn turn(&mut self, line: &Line, at: Time, engine: Engine) -> Turn {
        let tokens = line.tokens();
        let known = line.conversation.as_ref().and_then(|name| self.conversations.remove(name));
        let (conversation, mut blocks) = known.unwrap_or_else(|| {
            self.next_conversation += 1;
            (self.next_conversation, Vec::new())
        });
        let complete = (tokens / BLOCK_TOKENS) as usize;
        blocks.truncate(complete);
        while blocks.len() < complete {
            blocks.push(self.next_block);
            self.next_block += 1;
        }
        let shared = blocks.as_slice().into();
        if let Some(name) = &line.conversation {
            self.conversations.insert(name.clone(), (conversation, blocks));
        }
        Turn {
            at,
            client: 0,
            tokens,
            bytes: line.body_bytes,
            output: line.output(engine),
            conversation,
            blocks: shared,
        }
    }
}

#[cfg(test)]
mod tests;
