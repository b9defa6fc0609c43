//! One TCP connection with its read buffer, for either side.

use std::io;
use std::net::SocketAddr;

use bytes::{Buf, BufMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{BUFFER_BYTES, Body, Head, HttpError};

/// A connection. The bytes that were read and not yet used lie between `begin` and `end` of the buffer.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Connection {
    /// Connects to `to`.
    pub async fn open(to: SocketAddr) -> io::Result<Self> {
        Self::accepted(TcpStream::connect(to).await?)
    }

    /// Takes over an accepted connection.
    pub fn accepted(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![0; BUFFER_BYTES], begin: 0, end: 0 })
    }

    /// Sends both parts, in one call if the kernel accepts them.
    pub async fn send(&mut self, head: &[u8], body: &[u8]) -> io::Result<()> {
        self.stream.write_all_buf(&mut Buf::chain(head, body)).await
    }

    /// Reads a head and returns the result of `of`; `None` if the connection ends before a head.
    pub async fn head<T>(&mut self, of: impl Fn(&Head) -> Result<T, HttpError>) -> Result<Option<T>, HttpError> {
        loop {
            if let Some((head, length)) = Head::read(&self.buffer[self.begin..self.end])? {
                let wanted = of(&head)?;
                self.begin += length;
                return Ok(Some(wanted));
            }
            if !self.fill().await? {
                return if self.begin == self.end { Ok(None) } else { Err(HttpError::Cut) };
            }
        }
    }

    /// Passes the available part of a body to `sink`, after waiting for some; false at the end of the body.
    pub async fn some_body(&mut self, body: &mut Body, sink: impl FnMut(&[u8])) -> Result<bool, HttpError> {
        if self.begin == self.end && !body.is_complete() && !self.fill().await? {
            return if body.ends_with_connection() { Ok(false) } else { Err(HttpError::Cut) };
        }
        self.begin += body.take(&self.buffer[self.begin..self.end], sink)?;
        Ok(!body.is_complete())
    }

    /// Reads a whole body and appends it to `into`; a body of known length is read straight from the kernel.
    pub async fn whole_body(&mut self, mut body: Body, into: &mut Vec<u8>) -> Result<(), HttpError> {
        while !body.is_complete() {
            if let (Some(left), true) = (body.remaining(), self.begin == self.end) {
                return self.straight(left, into).await;
            }
            self.some_body(&mut body, |bytes| into.extend_from_slice(bytes)).await?;
        }
        Ok(())
    }

    async fn straight(&mut self, length: u64, into: &mut Vec<u8>) -> Result<(), HttpError> {
        let length = usize::try_from(length).map_err(|_| HttpError::BadHead("the body is too long"))?;
        into.reserve(length);
        let mut rest = into.limit(length);
        while rest.has_remaining_mut() {
            if self.stream.read_buf(&mut rest).await? == 0 {
                return Err(HttpError::Cut);
            }
        }
        Ok(())
    }

    /// Reads once; false at the end of the connection.
    async fn fill(&mut self) -> Result<bool, HttpError> {
        if self.begin > 0 {
            self.buffer.copy_within(self.begin..self.end, 0);
            self.end -= self.begin;
            self.begin = 0;
        }
        let count = self.stream.read(&mut self.buffer[self.end..]).await?;
        self.end += count;
        Ok(count > 0)
    }
}
