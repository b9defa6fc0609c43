//! Request heads as received, and canned responses.

use bytes::{Buf, BytesMut};
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// The first line and the headers of a request, with names as sent.
#[derive(Clone, Debug)]
pub struct Head {
    /// `POST`, …
    pub method: String,
    /// The path with its query string, exactly as sent.
    pub target: String,
    /// Header lines in order; names keep their case.
    pub headers: Vec<(String, Vec<u8>)>,
}

impl Head {
    /// The target without its query string.
    #[must_use]
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// The first header of this name, as text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.and_then(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// The names of all headers, in lower case, sorted.
    #[must_use]
    pub fn header_names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.headers.iter().map(|(key, _)| key.to_ascii_lowercase()).collect();
        names.sort();
        names
    }
}

/// A whole response, written in one piece.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Headers in addition to `content-length`, which is always written.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Answer {
    /// Creates a response from these parts.
    #[must_use]
    pub fn new(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Self {
        let headers = headers.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Self { status, headers, body: body.to_vec() }
    }

    /// Creates a JSON response.
    #[must_use]
    pub fn json(status: u16, body: &Value) -> Self {
        Self::new(status, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    pub(super) fn encoded(&self) -> Vec<u8> {
        let mut text = format!("HTTP/1.1 {} Answer\r\n", self.status);
        for (key, value) in &self.headers {
            text.push_str(&format!("{key}: {value}\r\n"));
        }
        text.push_str(&format!("content-length: {}\r\n\r\n", self.body.len()));
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// The head of the next request, or `None` if the peer closed first.
pub(super) async fn read_head(stream: &mut TcpStream, buffer: &mut BytesMut) -> Option<Head> {
    let end = loop {
        if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        match stream.read_buf(buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
    };
    let bytes = buffer.split_to(end);
    buffer.advance(4);
    let mut lines = bytes[..].split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let first = String::from_utf8_lossy(lines.next()?).into_owned();
    let mut words = first.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let headers = lines.filter_map(header_line).collect();
    Some(Head { method, target, headers })
}

fn header_line(line: &[u8]) -> Option<(String, Vec<u8>)> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = String::from_utf8_lossy(&line[..colon]).into_owned();
    Some((name, line[colon + 1..].trim_ascii().to_vec()))
}
