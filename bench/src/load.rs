//! The client: each connection sends its next request as soon as it has its response, and compares every byte of it.

mod client;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::content::{MODEL, Plan, Prompt};
use crate::http::HttpError;
use crate::samples::{Samples, Summary};
pub use client::{Answer, ClientConnection};

/// Bytes of a usual request.
pub const PROMPT_BYTES: usize = 352;

/// The requests to send, and how many.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The address.
    pub to: SocketAddr,
    /// The address of every second connection instead.
    pub also: Option<SocketAddr>,
    /// An additional header of each request with its line end, or nothing.
    pub header: &'static str,
    /// Connections, each with one request at a time.
    pub connections: u32,
    /// Bytes of a request's body.
    pub prompt_bytes: usize,
    /// Events of each stream; 0 requests plain responses.
    pub chunks: u32,
    /// The time between two events, or before a plain response.
    pub gap: Duration,
    /// The time over which the connections begin; by default one gap, so that streams of one pace do not move together.
    pub over: Option<Duration>,
    /// Disconnect after this number of events instead of reading to the end.
    pub leave_after: Option<u32>,
    /// When to stop.
    pub until: Until,
}

/// When a load ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// No further request is sent after this time; running ones are read to their end.
    Elapsed(Duration),
    /// After this number of requests of each connection.
    Requests(u32),
}

/// The outcome of a load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Responses that were right in every byte, to the end or to where the client disconnected.
    pub right: u64,
    /// Responses that were not.
    pub wrong: u64,
    /// The fault of the first of them.
    pub first_fault: Option<String>,
    /// Bytes of bodies that were compared.
    pub bytes: u64,
    /// Events of streams that were received.
    pub events: u64,
    /// The time from the first request to the last response.
    pub seconds: f64,
    /// The latency of whole responses.
    pub latency: Summary,
    /// The time to the first event of a stream.
    pub first_event: Summary,
    /// The time between events that did not arrive together.
    pub gaps: Summary,
}

/// The measurements of one connection.
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
    /// Creates a load of one connection that requests plain responses, one after the other.
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

    /// Sends requests until the end of the load. A wrong response is counted and costs its connection.
    pub async fn run(self) -> Outcome {
        let began = Instant::now();
        let mut clients = JoinSet::new();
        for number in 0..self.connections {
            clients.spawn(self.run_client(number, began));
        }
        let mut all = Tally::default();
        let mut wrong = 0;
        while let Some(tally) = clients.join_next().await {
            let mut tally = tally.expect("a client does not panic");
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

    async fn run_client(self, number: u32, began: Instant) -> Tally {
        let mut tally = Tally::default();
        let mut prompt = Prompt::new(self.plan(u64::from(number) << 32), self.prompt_bytes);
        tokio::time::sleep(self.over.unwrap_or(self.gap) * number / self.connections.max(1)).await;
        let mut connection = None;
        let mut requests = 0;
        while !self.is_over(requests, began) {
            prompt.reseed(u64::from(number) << 32 | u64::from(requests));
            requests += 1;
            match self.send_prompt(number, &mut connection, &prompt, &mut tally).await {
                Ok(()) => tally.right += 1,
                Err(fault) => {
                    tally.faults.push(fault.to_string());
                    connection = None;
                    // Do not retry a system that is gone as fast as it can refuse.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
            if self.leave_after.is_some() {
                connection = None;
            }
        }
        tally
    }

    fn is_over(&self, requests: u32, began: Instant) -> bool {
        match self.until {
            Until::Elapsed(length) => began.elapsed() >= length,
            Until::Requests(count) => requests >= count,
        }
    }

    /// The target of this connection.
    fn target(&self, number: u32) -> SocketAddr {
        self.also.filter(|_| number % 2 == 1).unwrap_or(self.to)
    }

    async fn send_prompt(
        &self,
        number: u32,
        kept: &mut Option<ClientConnection>,
        prompt: &Prompt,
        tally: &mut Tally,
    ) -> Result<(), Fault> {
        let connection = match kept {
            Some(connection) => connection,
            None => kept.insert(ClientConnection::open_with(self.target(number), self.header).await?),
        };
        let sent_at = Instant::now();
        let mut answer = connection.send_prompt(prompt, self.chunks).await?;
        let mut last = None;
        while answer.more(connection).await? {
            let now = Instant::now();
            let events = answer.new_events();
            if events > 0 && self.chunks > 0 {
                match last.replace(now) {
                    None => tally.first_event.add(now - sent_at),
                    Some(last) => tally.gaps.add(now - last),
                }
            }
            if self.leave_after.is_some_and(|enough| answer.events() >= enough) {
                break;
            }
        }
        tally.events += u64::from(answer.events());
        tally.bytes += answer.bytes();
        tally.latency.add(sent_at.elapsed());
        if self.leave_after.is_none() {
            answer.check_complete()?;
            if answer.closes() {
                *kept = None;
            }
        }
        Ok(())
    }
}

/// Why a response is not counted as right.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It did not arrive, or not as HTTP.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// It has another status.
    #[error("status {status}: {body}")]
    Status {
        /// The status.
        status: u16,
        /// The beginning of its body.
        body: String,
    },
    /// A byte of it, or its length, is wrong.
    #[error("the response differs from the backend's after {0} correct bytes")]
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
