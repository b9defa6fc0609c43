//! One inference request that a test controls.

use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::request::{Answer, Head};

/// One server-sent event, framed.
#[must_use]
pub fn sse(data: &str) -> Vec<u8> {
    format!("data: {data}\n\n").into_bytes()
}

/// A request that reached the backend. Nothing is read beyond its head, and nothing is written, until the test does so.
/// Dropping it closes the connection.
#[derive(Debug)]
pub struct Call {
    /// The head of the request.
    pub head: Head,
    stream: TcpStream,
    buffer: BytesMut,
    body: Body,
    give_back: oneshot::Sender<(TcpStream, BytesMut)>,
}

/// The part of the request's body that is still to come.
#[derive(Debug)]
enum Body {
    Length(u64),
    Chunked { left: u64 },
    Done,
}

impl Call {
    pub(super) fn new(
        head: Head,
        stream: TcpStream,
        buffer: BytesMut,
        give_back: oneshot::Sender<(TcpStream, BytesMut)>,
    ) -> Self {
        let length = head.header("content-length").and_then(|value| value.parse().ok());
        let chunked = head.header("transfer-encoding").is_some_and(|value| value.contains("chunked"));
        let body = match length {
            _ if chunked => Body::Chunked { left: 0 },
            Some(0) | None => Body::Done,
            Some(length) => Body::Length(length),
        };
        Self { head, stream, buffer, body, give_back }
    }

    /// The whole body of the request.
    ///
    /// # Panics
    /// If the peer closes before its end.
    pub async fn read_body(&mut self) -> Vec<u8> {
        self.try_read_body().await.expect("the request's body ended early")
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    pub async fn read_json(&mut self) -> Value {
        serde_json::from_slice(&self.read_body().await).expect("a JSON body")
    }

    /// The whole body, or `None` if the peer closed before its end.
    pub async fn try_read_body(&mut self) -> Option<Vec<u8>> {
        let mut all = Vec::new();
        while !matches!(self.body, Body::Done) {
            all.extend_from_slice(&self.read_some(1 << 20).await?);
        }
        Some(all)
    }

    /// Between one byte and `most` of the body; empty at its end; `None` if the peer closed before it.
    pub async fn read_some(&mut self, most: usize) -> Option<Vec<u8>> {
        let left = match &mut self.body {
            Body::Done => return Some(Vec::new()),
            Body::Length(left) => *left,
            Body::Chunked { left: 0 } => {
                let size = self.chunk_size().await?;
                if size == 0 {
                    self.body = Body::Done;
                    return Some(Vec::new());
                }
                self.body = Body::Chunked { left: size };
                size
            }
            Body::Chunked { left } => *left,
        };
        if self.buffer.is_empty() && !self.fill().await {
            return None;
        }
        let take = self.buffer.len().min(most).min(usize::try_from(left).unwrap_or(usize::MAX));
        let bytes = self.buffer.split_to(take).to_vec();
        let left = left - take as u64;
        self.body = match self.body {
            Body::Length(_) if left == 0 => Body::Done,
            Body::Length(_) => Body::Length(left),
            Body::Chunked { .. } => {
                if left == 0 {
                    self.line().await?;
                }
                Body::Chunked { left }
            }
            Body::Done => Body::Done,
        };
        Some(bytes)
    }

    /// Writes bytes as they are. `false` if the peer is gone.
    pub async fn write_raw(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).await.is_ok() && self.stream.flush().await.is_ok()
    }

    /// Writes a status line and headers, and the empty line.
    pub async fn head(&mut self, status: u16, headers: &[(&str, &str)]) -> bool {
        let mut text = format!("HTTP/1.1 {status} Answer\r\n");
        for (key, value) in headers {
            text.push_str(&format!("{key}: {value}\r\n"));
        }
        text.push_str("\r\n");
        self.write_raw(text.as_bytes()).await
    }

    /// Writes the head of an event stream in chunked encoding.
    pub async fn start_stream(&mut self) -> bool {
        self.head(200, &[("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]).await
    }

    /// Writes one chunk of a chunked body.
    pub async fn chunk(&mut self, bytes: &[u8]) -> bool {
        let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
        framed.extend_from_slice(bytes);
        framed.extend_from_slice(b"\r\n");
        self.write_raw(&framed).await
    }

    /// Ends a chunked body and returns the connection.
    pub async fn end_stream(mut self) {
        self.write_raw(b"0\r\n\r\n").await;
        self.keep_alive();
    }

    /// Reads the rest of the request and sends a whole response.
    ///
    /// # Panics
    /// If the peer is gone.
    pub async fn answer(mut self, answer: &Answer) {
        self.read_body().await;
        assert!(self.try_answer(answer).await, "the peer disconnected before the response");
    }

    /// Sends a JSON response.
    pub async fn answer_json(self, status: u16, body: &Value) {
        self.answer(&Answer::json(status, body)).await;
    }

    /// Writes the response and returns the connection. `false` if the peer is gone.
    pub(super) async fn try_answer(mut self, answer: &Answer) -> bool {
        let written = self.write_raw(&answer.encoded()).await;
        self.keep_alive();
        written
    }

    /// Marks the response as complete: the connection waits for its next request.
    pub fn keep_alive(self) {
        let _ = self.give_back.send((self.stream, self.buffer));
    }

    /// Closes with a TCP reset, and drops bytes that were not read or written yet.
    pub fn reset(self) {
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).expect("SO_LINGER");
    }

    /// Closes the write side, as a backend does with a connection that it no longer keeps.
    pub async fn hang_up(&mut self) {
        self.stream.shutdown().await.expect("an open connection");
    }

    /// Waits until the peer closes or resets; returns the time at which this was detected. Body bytes that still arrive
    /// are dropped.
    ///
    /// # Panics
    /// If the connection is still open after ten seconds.
    pub async fn closed(&mut self) -> Instant {
        let closed = tokio::time::timeout(super::TEST_TIMEOUT, self.drain()).await;
        closed.expect("the connection to the backend is still open after 10 s");
        Instant::now()
    }

    /// True if the peer is gone already, as far as the kernel knows. To be called after the body was read.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        let peeked = socket2::SockRef::from(&self.stream).peek(&mut [std::mem::MaybeUninit::uninit(); 1]);
        match peeked {
            Ok(waiting) => waiting == 0,
            Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }

    /// True if the peer closes within `patience`.
    pub async fn closes_within(&mut self, patience: Duration) -> bool {
        tokio::time::timeout(patience, self.drain()).await.is_ok()
    }

    async fn drain(&mut self) {
        self.buffer.clear();
        while self.fill().await {
            self.buffer.clear();
        }
    }

    async fn fill(&mut self) -> bool {
        matches!(self.stream.read_buf(&mut self.buffer).await, Ok(read) if read > 0)
    }

    async fn chunk_size(&mut self) -> Option<u64> {
        let line = self.line().await?;
        let size = u64::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            self.line().await?;
        }
        Some(size)
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|window| window == b"\r\n") {
                let line = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
                self.buffer.advance(end + 2);
                return Some(line);
            }
            if !self.fill().await {
                return None;
            }
        }
    }
}
