//! The backend that all systems are measured in front of: it executes the plan at the beginning of a prompt.
//!
//! It uses one thread, so that it uses no more than its share of the machine. A chunk is one write, as an inference
//! server writes a token. Any GET gets the data that the health checks of routers read.

use std::io;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep_until};

use crate::content::{self, Chunk, DONE, Plan};
use crate::http::{Body, Connection, Framing, Head, HttpError};

const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";

/// The line in front of each chunk: its length in hexadecimal.
const CHUNK_SIZE: &[u8] = b"e8\r\n";

/// The response to the requests of routers before their first prompt: health, models and properties of the server.
const ABOUT: &str = r#"{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"bench","max_model_len":8192}],"status":"ok","model_path":"m","served_model_name":"m","is_generation":true,"max_total_num_tokens":1000000,"version":"1"}"#;

/// Serves indefinitely.
pub async fn serve(listener: TcpListener) -> io::Result<()> {
    loop {
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            // The connection is gone already, or no file descriptor is free. Neither is a reason to end.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
        };
        tokio::spawn(async move {
            // Clients that disconnect in the middle are the subject of some scenarios.
            let _ = serve_connection(stream).await;
        });
    }
}

async fn serve_connection(stream: TcpStream) -> Result<(), HttpError> {
    let mut connection = Connection::accepted(stream)?;
    let mut body = Vec::new();
    while let Some(summary) = connection.head(RequestSummary::read).await? {
        body.clear();
        connection.whole_body(Body::new(summary.framing), &mut body).await?;
        match (summary.is_get, content::read_body(&body)) {
            (true, _) => send(&mut connection, "200 OK", ABOUT.as_bytes()).await?,
            (false, None) => send(&mut connection, "400 Bad Request", br#"{"error":{"message":"not a plan"}}"#).await?,
            (false, Some((plan, digest))) if plan.chunks == 0 => {
                if !plan.gap.is_zero() {
                    tokio::time::sleep(plan.gap).await;
                }
                send(&mut connection, "200 OK", &content::answer(digest)).await?;
            }
            (false, Some((plan, digest))) => stream_out(&mut connection, plan, digest).await?,
        }
        if summary.closes {
            break;
        }
    }
    Ok(())
}

struct RequestSummary {
    is_get: bool,
    framing: Framing,
    closes: bool,
}

impl RequestSummary {
    fn read(head: &Head) -> Result<Self, HttpError> {
        let (method, _) = head.method_and_target()?;
        // A request without framing headers has no body.
        let framing = if head.framing == Framing::Unstated { Framing::Length(0) } else { head.framing };
        Ok(Self { is_get: method == "GET", framing, closes: head.closes })
    }
}

async fn send(connection: &mut Connection, status: &str, body: &[u8]) -> io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    connection.send(head.as_bytes(), body).await
}

/// Streams with one write for the head, one for each event and one for the end.
async fn stream_out(connection: &mut Connection, plan: Plan, digest: u64) -> io::Result<()> {
    connection.send(STREAM_HEAD, b"").await?;
    let begun = Instant::now();
    let mut chunk = Chunk::first(digest);
    let mut written = Vec::with_capacity(256);
    for number in 0..plan.chunks {
        if !plan.gap.is_zero() && number > 0 {
            sleep_until(begun + plan.gap * number).await;
        }
        written.clear();
        written.extend_from_slice(CHUNK_SIZE);
        written.extend_from_slice(chunk.number(number));
        written.extend_from_slice(b"\r\n");
        connection.send(&written, b"").await?;
    }
    written.clear();
    written.extend_from_slice(format!("{:x}\r\n", DONE.len()).as_bytes());
    written.extend_from_slice(DONE);
    written.extend_from_slice(b"\r\n0\r\n\r\n");
    connection.send(&written, b"").await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::CHUNK_BYTES;

    #[test]
    fn chunk_size_prefix_matches_chunk_length() {
        assert_eq!(CHUNK_SIZE, format!("{CHUNK_BYTES:x}\r\n").as_bytes());
    }
}
