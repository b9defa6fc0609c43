//! Raw bytes over TCP.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::connect;
use crate::{TEST_TIMEOUT, process::Log, within, within_for};

/// Bytes over TCP, for requests that no HTTP client would send.
#[derive(Debug)]
pub struct RawConnection {
    stream: TcpStream,
    log: Log,
}

impl RawConnection {
    /// Connects.
    pub async fn open(to: SocketAddr, log: &Log) -> Self {
        let stream = within(&format!("a connection to {to}"), log, connect(to, None)).await;
        Self { stream: stream.unwrap_or_else(|error| panic!("cannot connect to {to}: {error}")), log: log.clone() }
    }

    /// Writes all of `bytes`. A peer that closed already is not an error, because it may have responded early.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = within("room to write", &self.log, self.stream.write_all(bytes.as_ref())).await;
    }

    /// Reads up to the end of a response's head and returns it, with any bytes of the body that came with it.
    pub async fn read_head(&mut self) -> String {
        let mut text = Vec::new();
        let mut buffer = [0_u8; 4096];
        while !text.windows(4).any(|four| four == b"\r\n\r\n") {
            let count = within("the head of an answer", &self.log, self.stream.read(&mut buffer)).await;
            match count {
                Ok(0) | Err(_) => break,
                Ok(count) => text.extend_from_slice(&buffer[..count]),
            }
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Reads until the peer closes.
    pub async fn read_to_end(&mut self) -> String {
        self.read_to_end_within(TEST_TIMEOUT).await
    }

    /// The same as [`Self::read_to_end`], with a time that a rule specifies.
    pub async fn read_to_end_within(&mut self, patience: Duration) -> String {
        let mut text = Vec::new();
        let _ = within_for(patience, "the peer's close", &self.log, self.stream.read_to_end(&mut text)).await;
        String::from_utf8_lossy(&text).into_owned()
    }
}
