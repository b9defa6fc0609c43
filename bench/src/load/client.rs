//! One connection of the client, and the response that it reads.

use std::net::SocketAddr;

use super::{Fault, request_head};
use crate::content::{self, Prompt, StreamCheck};
use crate::http::{Body, Connection, Framing, HttpError};

/// The most bytes kept of a response that is not 200.
const FAULT_BYTES: usize = 300;

/// A persistent connection.
#[derive(Debug)]
pub struct ClientConnection {
    connection: Connection,
    to: SocketAddr,
    header: &'static str,
    head: Vec<u8>,
    head_of: usize,
}

/// A response that is being read.
#[derive(Debug)]
pub struct Answer {
    body: Body,
    expected: Expected,
    closes: bool,
    bytes: u64,
    events: u32,
    seen: u32,
    more: bool,
}

#[derive(Debug)]
enum Expected {
    Whole { bytes: Vec<u8>, at: usize },
    Stream(StreamCheck),
}

impl Expected {
    /// Returns the number of completed events; `None` if these are not the expected next bytes.
    fn take(&mut self, bytes: &[u8]) -> Option<u32> {
        match self {
            Self::Stream(check) => check.take(bytes),
            Self::Whole { bytes: whole, at } => {
                let next = whole.get(*at..*at + bytes.len())?;
                *at += bytes.len();
                (next == bytes).then_some(0)
            }
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Self::Whole { bytes, at } => *at == bytes.len(),
            Self::Stream(check) => check.is_complete(),
        }
    }
}

impl ClientConnection {
    /// Connects to `to`.
    pub async fn open(to: SocketAddr) -> Result<Self, Fault> {
        Self::open_with(to, "").await
    }

    /// Connects to `to`; each request gets this additional header line.
    pub async fn open_with(to: SocketAddr, header: &'static str) -> Result<Self, Fault> {
        Ok(Self { connection: Connection::open(to).await?, to, header, head: Vec::new(), head_of: usize::MAX })
    }

    /// Sends the prompt and reads the head of its response: a stream of `chunks` events, or a plain one for 0.
    pub async fn send_prompt(&mut self, prompt: &Prompt, chunks: u32) -> Result<Answer, Fault> {
        self.send(prompt).await?;
        self.answer(prompt.digest(), chunks).await
    }

    /// Sends the prompt.
    pub async fn send(&mut self, prompt: &Prompt) -> Result<(), Fault> {
        let body = prompt.body();
        if self.head_of != body.len() {
            self.head = request_head(self.to, self.header, body.len()).into_bytes();
            self.head_of = body.len();
        }
        Ok(self.connection.send(&self.head, body).await?)
    }

    /// Reads the head of the response to the prompt with this digest.
    pub async fn answer(&mut self, digest: u64, chunks: u32) -> Result<Answer, Fault> {
        let head = self.connection.head(|head| Ok((head.status()?, head.framing, head.closes))).await?;
        let (status, framing, closes) = head.ok_or(HttpError::Cut)?;
        if status != 200 {
            return Err(self.fault(status, framing).await);
        }
        let expected = match chunks {
            0 => Expected::Whole { bytes: content::answer(digest), at: 0 },
            _ => Expected::Stream(StreamCheck::new(digest, chunks)),
        };
        let closes = closes || framing == Framing::Unstated;
        Ok(Answer { body: Body::new(framing), expected, closes, bytes: 0, events: 0, seen: 0, more: true })
    }

    async fn fault(&mut self, status: u16, framing: Framing) -> Fault {
        let (mut body, mut text) = (Body::new(framing), Vec::new());
        while text.len() < FAULT_BYTES {
            match self.connection.some_body(&mut body, |bytes| text.extend_from_slice(bytes)).await {
                Ok(true) => {}
                Ok(false) | Err(_) => break,
            }
        }
        text.truncate(FAULT_BYTES);
        Fault::Status { status, body: String::from_utf8_lossy(&text).into_owned() }
    }
}

impl Answer {
    /// Waits for more and compares it; false at the end.
    pub async fn more(&mut self, client: &mut ClientConnection) -> Result<bool, Fault> {
        if !self.more {
            return Ok(false);
        }
        let (expected, mut bytes, mut events) = (&mut self.expected, 0, Some(0));
        let sink = |part: &[u8]| {
            bytes += part.len() as u64;
            events = events.and_then(|before| Some(before + expected.take(part)?));
        };
        self.more = client.connection.some_body(&mut self.body, sink).await?;
        self.events += events.ok_or(Fault::Differs(self.bytes))?;
        self.bytes += bytes;
        Ok(true)
    }

    /// Events since the last call.
    pub fn new_events(&mut self) -> u32 {
        self.events - std::mem::replace(&mut self.seen, self.events)
    }

    /// Events so far.
    pub fn events(&self) -> u32 {
        self.events
    }

    /// Bytes so far, all of them right.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if the connection ends with this response.
    pub fn closes(&self) -> bool {
        self.closes
    }

    /// Returns an error if something is missing.
    pub fn check_complete(&self) -> Result<(), Fault> {
        if self.expected.is_complete() { Ok(()) } else { Err(Fault::Differs(self.bytes)) }
    }
}
