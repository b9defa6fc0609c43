//! One request over its own connection, and its result. The response is parsed here, not by an HTTP client, because the
//! difference between a complete response and a truncated one matters.

use std::{io, net::SocketAddr, time::Duration};

use bytes::{Buf, BytesMut};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, tcp::OwnedReadHalf, tcp::OwnedWriteHalf},
    time::timeout,
};

use crate::{executions::now, request::RequestSpec};

/// Larger bodies are sent in pieces with pauses, so that faults occur during uploads.
const UPLOAD_PIECE: usize = 64 << 10;

const UPLOAD_PAUSE: Duration = Duration::from_millis(5);

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The correct response, with its end.
    Answered,
    /// The request failed with a reason: a status and an error code, or an error frame as the last event of a stream.
    Failed(String),
    /// The client disconnected on purpose.
    Cancelled,
    /// The connection to the relay broke without a reason: allowed only if the relay was killed.
    Broken(String),
    /// Never allowed: no end before the deadline, a wrong response, or a truncated one that looks complete.
    Lost(String),
}

/// A request that has ended.
#[derive(Debug, Clone)]
pub struct Record {
    /// Its number.
    pub nonce: u64,
    /// When it was sent.
    pub began: u64,
    /// When the head of a response arrived, which is its first byte.
    pub first_byte: Option<u64>,
    /// When it ended.
    pub ended: u64,
    /// Its result.
    pub outcome: Outcome,
    /// True if a rejection contained `Retry-After`.
    pub retry_after: bool,
}

/// The client's behaviour besides reading.
#[derive(Debug, Clone)]
pub struct Manner {
    /// The time by which it must have ended.
    pub deadline: Duration,
    /// The time after which the client disconnects.
    pub leaves: Option<Duration>,
    /// The API key to present.
    pub key: Option<String>,
}

impl Manner {
    /// Waits up to this deadline, and presents no key.
    #[must_use]
    pub fn patient(deadline: Duration) -> Self {
        Self { deadline, leaves: None, key: None }
    }
}

/// Sends a request, reads its response, and evaluates it.
pub async fn exchange(spec: &RequestSpec, relay: SocketAddr, manner: Manner) -> Record {
    let key = manner.key.map_or_else(String::new, |key| format!("authorization: Bearer {key}\r\n"));
    let mut client = Client { spec, key, first_byte: None, retry_after: false };
    let began = now();
    let ends = manner.leaves.map_or(manner.deadline, |leaves| leaves.min(manner.deadline));
    let outcome = timeout(ends, client.run(relay)).await.unwrap_or_else(|_| {
        if ends < manner.deadline { Outcome::Cancelled } else { Outcome::Lost(format!("no end in {ends:?}")) }
    });
    let (first_byte, retry_after) = (client.first_byte, client.retry_after);
    Record { nonce: spec.nonce, began, first_byte, ended: now(), outcome, retry_after }
}

struct Client<'a> {
    spec: &'a RequestSpec,
    key: String,
    first_byte: Option<u64>,
    retry_after: bool,
}

/// The head of a response.
struct Head {
    status: u16,
    length: Option<usize>,
    retry_after: bool,
}

impl Client<'_> {
    async fn run(&mut self, relay: SocketAddr) -> Outcome {
        let stream = match TcpStream::connect(relay).await {
            Ok(stream) => stream,
            Err(error) => return Outcome::Broken(format!("connect: {error}")),
        };
        let _ = stream.set_nodelay(true);
        let (reader, writer) = stream.into_split();
        let (body, target) = (self.spec.body(), self.spec.target());
        let head = format!(
            "POST {target} HTTP/1.1\r\nhost: {relay}\r\n{}content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.key,
            body.len()
        );
        let upload = upload(writer, head, &body);
        tokio::pin!(upload);
        let read = self.read(Wire { reader, buffer: BytesMut::new() });
        tokio::pin!(read);
        // The relay may respond before it has read everything, and may close while it reads: its response decides.
        let mut uploading = true;
        let mut _writer = None;
        loop {
            tokio::select! {
                outcome = &mut read => return outcome,
                writer = &mut upload, if uploading => (uploading, _writer) = (false, writer.ok()),
            }
        }
    }

    async fn read(&mut self, mut wire: Wire) -> Outcome {
        let head = match wire.head().await {
            Ok(head) => head,
            Err(error) => return Outcome::Broken(format!("before the head: {error}")),
        };
        self.retry_after = head.retry_after;
        if head.status == 200 {
            self.first_byte = Some(now());
        }
        let mut body = Vec::new();
        let end = match head.length {
            Some(length) => wire.sized(length, &mut body).await,
            None => wire.chunked(&mut body).await,
        };
        match (head.status, end) {
            (200, Ok(())) if body == self.spec.expected() => Outcome::Answered,
            (200, Ok(())) => self
                .judge_frame(&body, false)
                .unwrap_or_else(|| Outcome::Lost(format!("a wrong answer of {} bytes: {}", body.len(), tail(&body)))),
            (200, Err(error)) => self.judge_cut(&body, &error),
            (status, Ok(())) => match serde_json::from_slice::<Value>(&body).as_ref().map(|it| &it["error"]["code"]) {
                Ok(Value::String(code)) => Outcome::Failed(format!("{status} {code}")),
                _ => Outcome::Lost(format!("status {status} without a reason: {}", tail(&body))),
            },
            (status, Err(error)) => Outcome::Broken(format!("in the body of a {status}: {error}")),
        }
    }

    /// Evaluates a truncated response, which must be the beginning of the correct one. A stream must contain a reason;
    /// a JSON body has no place for it.
    fn judge_cut(&self, body: &[u8], error: &io::Error) -> Outcome {
        if let Some(outcome) = self.judge_frame(body, true) {
            return outcome;
        }
        if !self.spec.expected().starts_with(body) {
            return Outcome::Lost(format!("wrong bytes before the cut: {}", tail(body)));
        }
        if !self.spec.stream && self.first_byte.is_some() && !error.to_string().contains("reset") {
            return Outcome::Failed("JSON body cut".to_owned());
        }
        Outcome::Broken(format!("in the answer, after {} bytes: {error}", body.len()))
    }

    /// Returns the reason in a stream's error frame, if it has one. The frame must follow the beginning of the correct
    /// response, which may end in the middle of an event only if the connection breaks after the frame.
    fn judge_frame(&self, body: &[u8], is_cut: bool) -> Option<Outcome> {
        const FRAME: &[u8] = b"data: {\"error\"";
        let at = body.windows(FRAME.len()).rposition(|window| window == FRAME)?;
        let (received, expected) = (&body[..at], self.spec.expected());
        // If an event was truncated, an empty line separates it from the frame.
        let parted = received.strip_suffix(b"\n\n").filter(|_| is_cut).unwrap_or(received);
        let is_between_events = received.is_empty() || received.ends_with(b"\n\n");
        if !(is_cut || is_between_events) || !expected.starts_with(received) && !expected.starts_with(parted) {
            return Some(Outcome::Lost(format!("wrong bytes before the error frame: {}", tail(body))));
        }
        let frame = String::from_utf8_lossy(&body[at..]).into_owned();
        let value: Option<Value> =
            frame.strip_prefix("data: ").and_then(|text| serde_json::from_str(text.trim_end()).ok());
        Some(match value.map(|value| value["error"]["code"].clone()) {
            Some(Value::String(code)) if frame.ends_with("\n\n") => Outcome::Failed(format!("in-band {code}")),
            _ => Outcome::Lost(format!("an error frame without a reason: {frame:?}")),
        })
    }
}

/// Sends everything, and keeps the connection open.
async fn upload(mut writer: OwnedWriteHalf, head: String, body: &[u8]) -> io::Result<OwnedWriteHalf> {
    let mut first = head.into_bytes();
    let at_once = body.len().min(UPLOAD_PIECE);
    first.extend_from_slice(&body[..at_once]);
    writer.write_all(&first).await?;
    for piece in body[at_once..].chunks(UPLOAD_PIECE) {
        #[expect(clippy::disallowed_methods, reason = "the pace of an upload")]
        tokio::time::sleep(UPLOAD_PAUSE).await;
        writer.write_all(piece).await?;
    }
    Ok(writer)
}

/// The bytes of a response.
struct Wire {
    reader: OwnedReadHalf,
    buffer: BytesMut,
}

impl Wire {
    async fn fill(&mut self) -> io::Result<()> {
        match self.reader.read_buf(&mut self.buffer).await? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed")),
            _ => Ok(()),
        }
    }

    async fn line(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
                self.buffer.advance(end + 2);
                return Ok(line);
            }
            self.fill().await?;
        }
    }

    async fn head(&mut self) -> io::Result<Head> {
        let status = self.line().await?;
        let status = status.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.ok_or_else(|| io::Error::other("no status line"))?;
        let mut head = Head { status, length: None, retry_after: false };
        loop {
            let line = self.line().await?.to_ascii_lowercase();
            if line.is_empty() {
                return Ok(head);
            }
            if let Some(length) = line.strip_prefix("content-length:") {
                head.length = length.trim().parse().ok();
            }
            head.retry_after |= line.starts_with("retry-after:");
        }
    }

    async fn sized(&mut self, mut left: usize, body: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let take = self.buffer.len().min(left);
            body.extend_from_slice(&self.buffer.split_to(take));
            left -= take;
            if left == 0 {
                return Ok(());
            }
            self.fill().await?;
        }
    }

    async fn chunked(&mut self, body: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let size = usize::from_str_radix(&self.line().await?, 16).map_err(io::Error::other)?;
            self.sized(size, body).await?;
            self.line().await?;
            if size == 0 {
                return Ok(());
            }
        }
    }
}

/// Returns the end of a body, for a message.
fn tail(body: &[u8]) -> String {
    format!("…{:?}", String::from_utf8_lossy(&body[body.len().saturating_sub(200)..]))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Returns the result for exactly these bytes, after which the connection is closed.
    async fn judged(spec: &RequestSpec, answer: Vec<u8>) -> Outcome {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let relay = listener.local_addr().expect("it is bound");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = [0; 4096];
            assert!(stream.read(&mut request).await.expect("a request") > 0);
            stream.write_all(&answer).await.expect("the client reads");
        });
        exchange(spec, relay, Manner::patient(Duration::from_secs(5))).await.outcome
    }

    fn chunk(bytes: &[u8]) -> Vec<u8> {
        [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
    }

    const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    const END: &[u8] = b"0\r\n\r\n";
    const FRAME: &[u8] = b"data: {\"error\":{\"message\":\"gone\",\"code\":\"worker_lost\"}}\n\n";

    #[tokio::test]
    async fn response_needs_expected_bytes_and_end() {
        let spec = RequestSpec::stream(1, 3, 0);
        let right = chunk(&spec.expected());
        assert_eq!(judged(&spec, [HEAD, &right, END].concat()).await, Outcome::Answered);
        assert!(matches!(judged(&spec, [HEAD, &right].concat()).await, Outcome::Broken(_)));
        assert!(matches!(judged(&spec, [HEAD, &right, &right, END].concat()).await, Outcome::Lost(_)));
        assert!(matches!(judged(&spec, [HEAD, &chunk(b"data: "), END].concat()).await, Outcome::Lost(_)));
        assert!(matches!(judged(&RequestSpec::stream(2, 3, 0), [HEAD, &right, END].concat()).await, Outcome::Lost(_)));
    }

    #[tokio::test]
    async fn broken_stream_needs_valid_beginning_and_reason() {
        let spec = RequestSpec::stream(1, 3, 0);
        let (half, all) = (&spec.expected()[..70], spec.expected());
        let failed = Outcome::Failed("in-band worker_lost".to_owned());
        assert_eq!(judged(&spec, [HEAD, &chunk(&all), &chunk(FRAME)].concat()).await, failed);
        let parted = [b"\n\n", FRAME].concat();
        assert_eq!(judged(&spec, [HEAD, &chunk(half), &chunk(&parted)].concat()).await, failed);
        assert_eq!(judged(&spec, [HEAD, &chunk(&all), &chunk(FRAME), END].concat()).await, failed);
        assert!(matches!(judged(&spec, [HEAD, &chunk(half), &chunk(&parted), END].concat()).await, Outcome::Lost(_)));
        assert!(matches!(judged(&spec, [HEAD, &chunk(half), &chunk(FRAME), END].concat()).await, Outcome::Lost(_)));
        assert!(matches!(judged(&spec, [HEAD, &chunk(b"other"), &chunk(FRAME)].concat()).await, Outcome::Lost(_)));
        assert!(matches!(judged(&spec, [HEAD, &chunk(half)].concat()).await, Outcome::Broken(_)));
    }

    #[tokio::test]
    async fn refusal_without_reason_is_lost() {
        let refusal =
            |body: &str| format!("HTTP/1.1 503 No\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes();
        let spec = RequestSpec::plain(1, 0);
        let failed = Outcome::Failed("503 overloaded".to_owned());
        assert_eq!(judged(&spec, refusal("{\"error\":{\"code\":\"overloaded\"}}")).await, failed);
        assert!(matches!(judged(&spec, refusal("no")).await, Outcome::Lost(_)));
        assert!(matches!(judged(&spec, Vec::new()).await, Outcome::Broken(_)));
    }
}
