//! The client: so many connections, each asking again as soon as it has its answer, and comparing every byte of it.

mod visitor;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::content::{MODEL, Plan, Prompt};
use crate::http::HttpError;
use crate::samples::{Samples, Summary};
pub use visitor::{Answer, Visitor};

/// Bytes of a usual request.
pub const PROMPT_BYTES: usize = 352;

/// What to ask, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Where.
    pub to: SocketAddr,
    /// Where every second connection goes instead.
    pub also: Option<SocketAddr>,
    /// One more header of each request with its line end, or nothing.
    pub header: &'static str,
    /// Connections, each with one request at a time.
    pub connections: u32,
    /// Bytes of a request's body.
    pub prompt_bytes: usize,
    /// Events of each stream; 0 asks for plain answers.
    pub chunks: u32,
    /// Between two events, or before a plain answer.
    pub gap: Duration,
    /// Over how long the connections begin; without it over a gap, so that streams of one pace do not move together.
    pub over: Option<Duration>,
    /// Leave after so many events instead of reading to the end.
    pub leave_after: Option<u32>,
    /// When to stop.
    pub until: Until,
}

/// When a load ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// Nothing more is asked after so long; what runs is read to its end.
    Elapsed(Duration),
    /// After so many requests of each connection.
    Requests(u32),
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Answers that were right in every byte, to the end or to where the client left.
    pub right: u64,
    /// Answers that were not.
    pub wrong: u64,
    /// What was wrong with the first of them.
    pub first_fault: Option<String>,
    /// Bytes of bodies that were compared.
    pub bytes: u64,
    /// Events of streams that came.
    pub events: u64,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Of whole answers.
    pub latency: Summary,
    /// To the first event of a stream.
    pub first_event: Summary,
    /// Between events that did not come at once.
    pub gaps: Summary,
}

/// What one connection saw.
#[derive(Debug, Default)]
struct Tally {
    right: u64,
    faults: Vec<String>,
    bytes: u64,
    events: u64,
    latency: Samples,
    first_event: Samples,
    gaps: Samples,
}

impl Load {
    /// One connection after another request, plain answers.
    pub fn new(to: SocketAddr, until: Until) -> Self {
        Self {
            to,
            also: None,
            header: "",
            connections: 1,
            prompt_bytes: PROMPT_BYTES,
            chunks: 0,
            gap: Duration::ZERO,
            over: None,
            leave_after: None,
            until,
        }
    }

    /// Asks until it is time to stop. A wrong answer is counted and costs its connection.
    pub async fn run(self) -> Outcome {
        let began = Instant::now();
        let mut visitors = JoinSet::new();
        for number in 0..self.connections {
            visitors.spawn(self.visit(number, began));
        }
        let mut all = Tally::default();
        let mut wrong = 0;
        while let Some(tally) = visitors.join_next().await {
            let mut tally = tally.expect("a visitor does not panic");
            all.right += tally.right;
            wrong += tally.faults.len() as u64;
            all.faults.append(&mut tally.faults);
            all.bytes += tally.bytes;
            all.events += tally.events;
            all.latency.merge(&tally.latency);
            all.first_event.merge(&tally.first_event);
            all.gaps.merge(&tally.gaps);
        }
        Outcome {
            right: all.right,
            wrong,
            first_fault: all.faults.into_iter().next(),
            bytes: all.bytes,
            events: all.events,
            seconds: began.elapsed().as_secs_f64(),
            latency: all.latency.summary(),
            first_event: all.first_event.summary(),
            gaps: all.gaps.summary(),
        }
    }

    fn plan(&self, seed: u64) -> Plan {
        Plan { seed, chunks: self.chunks, gap: self.gap }
    }

    async fn visit(self, number: u32, began: Instant) -> Tally {
        let mut tally = Tally::default();
        let mut prompt = Prompt::new(self.plan(u64::from(number) << 32), self.prompt_bytes);
        tokio::time::sleep(self.over.unwrap_or(self.gap) * number / self.connections.max(1)).await;
        let mut visitor = None;
        let mut asked = 0;
        while !self.is_over(asked, began) {
            prompt.reseed(u64::from(number) << 32 | u64::from(asked));
            asked += 1;
            match self.ask(number, &mut visitor, &prompt, &mut tally).await {
                Ok(()) => tally.right += 1,
                Err(fault) => {
                    tally.faults.push(fault.to_string());
                    visitor = None;
                    // A system that is gone must not be asked as fast as it can refuse.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
            if self.leave_after.is_some() {
                visitor = None;
            }
        }
        tally
    }

    fn is_over(&self, asked: u32, began: Instant) -> bool {
        match self.until {
            Until::Elapsed(length) => began.elapsed() >= length,
            Until::Requests(count) => asked >= count,
        }
    }

    /// Where this connection goes.
    fn target(&self, number: u32) -> SocketAddr {
        self.also.filter(|_| number % 2 == 1).unwrap_or(self.to)
    }

    async fn ask(
        &self,
        number: u32,
        kept: &mut Option<Visitor>,
        prompt: &Prompt,
        tally: &mut Tally,
    ) -> Result<(), Fault> {
        let visitor = match kept {
            Some(visitor) => visitor,
            None => kept.insert(Visitor::open_with(self.target(number), self.header).await?),
        };
        let asked = Instant::now();
        let mut answer = visitor.ask(prompt, self.chunks).await?;
        let mut last = None;
        while answer.more(visitor).await? {
            let now = Instant::now();
            let events = answer.new_events();
            if events > 0 && self.chunks > 0 {
                match last.replace(now) {
                    None => tally.first_event.add(now - asked),
                    Some(last) => tally.gaps.add(now - last),
                }
            }
            if self.leave_after.is_some_and(|enough| answer.events() >= enough) {
                break;
            }
        }
        tally.events += u64::from(answer.events());
        tally.bytes += answer.bytes();
        tally.latency.add(asked.elapsed());
        if self.leave_after.is_none() {
            answer.check_complete()?;
            if answer.closes() {
                *kept = None;
            }
        }
        Ok(())
    }
}

/// Why an answer does not count.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It did not come, or not as HTTP.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// Another status.
    #[error("status {status}: {body}")]
    Status {
        /// The status.
        status: u16,
        /// The beginning of its body.
        body: String,
    },
    /// A byte of it, or its length.
    #[error("the answer differs from what the backend sent, after {0} bytes that were right")]
    Differs(u64),
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::Http(error.into())
    }
}

/// The head of a request to the usual path.
fn request_head(to: SocketAddr, header: &str, length: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {to}\r\ncontent-type: application/json\r\naccept: */*\r\nx-model: {MODEL}\r\n{header}content-length: {length}\r\n\r\n"
    )
}

#[cfg(test)]
mod tests;
