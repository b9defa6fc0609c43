//! One request to a program's own endpoints: its metrics, its state, its keys.

use std::net::SocketAddr;

use super::{Body, Connection, HttpError};

/// Sends a request on a connection of its own; `headers` are lines with their ends. Returns status and body.
pub async fn send_request(
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &[u8],
) -> Result<(u16, Vec<u8>), HttpError> {
    let mut connection = Connection::open(to).await?;
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {to}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    connection.send(head.as_bytes(), body).await?;
    let answer = connection.head(|head| Ok((head.status()?, head.framing))).await?;
    let (status, framing) = answer.ok_or(HttpError::Cut)?;
    let mut text = Vec::new();
    connection.whole_body(Body::new(framing), &mut text).await?;
    Ok((status, text))
}
