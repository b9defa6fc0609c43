//! A single request and the evaluation of its response.

use std::{fmt::Write, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, StatusCode, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::Traffic;
use crate::tls::Trust;

/// The timeout without data: longer than any queue of these tests, shorter than a test's deadline.
const SILENCE: Duration = Duration::from_secs(75);

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The response was complete and correct.
    Answered,
    /// It was rejected before a response began, in a way that every SDK retries.
    Retryable(String),
    /// Its response ended prematurely.
    Cut(String),
    /// Any other failure.
    Failed(String),
}

/// A connection that a client may use again.
pub(super) type Kept = http1::SendRequest<Full<Bytes>>;

/// The progress of a request.
pub(super) enum Stage {
    /// The first bytes of the response have arrived.
    Begun,
}

/// A request and its expected response.
pub(super) struct Exchange {
    to: SocketAddr,
    trust: Option<Trust>,
    request: Request<Full<Bytes>>,
    expected: String,
}

impl Exchange {
    /// Creates a request with a unique prompt, which begins with `mark`.
    pub(super) fn new(settings: &Traffic, mark: &str) -> Self {
        let mut prompt = mark.to_owned();
        for word in 1..settings.words {
            let _ = write!(prompt, " {word:03}");
        }
        let messages = json!([{"role": "user", "content": prompt}]);
        let body = json!({"model": settings.model, "stream": true, "messages": messages}).to_string();
        let mut request = Request::post("/v1/chat/completions")
            .header("host", settings.service.to_string())
            .header("content-type", "application/json");
        if let Some(key) = &settings.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(Full::new(body.into())).expect("the request is well-formed");
        let expected = format!("This is ModelRelay's built-in demo backend, not a model. You said: {prompt}");
        Self { to: settings.service, trust: settings.trust.clone(), request, expected }
    }

    /// Sends it over the kept connection if the server has not closed that, and reads the whole response.
    pub(super) async fn run(self, kept: &mut Option<Kept>, on_stage: impl FnMut(Stage)) -> Outcome {
        let Self { to, trust, request, expected } = self;
        let answer = match tokio::time::timeout(SILENCE, send(to, trust.as_ref(), request, kept)).await {
            Ok(Ok(answer)) => answer,
            // Without a response, SDKs treat it as a connection error.
            Ok(Err(error)) => return Outcome::Retryable(error),
            Err(_) => return Outcome::Failed(format!("no answer within {SILENCE:?}")),
        };
        if answer.status() == StatusCode::OK { read(answer, &expected, on_stage).await } else { refusal(answer).await }
    }
}

impl Outcome {
    /// Adds the elapsed time to a failure.
    pub(super) fn after(self, time: Duration) -> Self {
        let late = |why: String| format!("after {:.1} s: {why}", time.as_secs_f32());
        match self {
            Self::Answered => Self::Answered,
            Self::Retryable(why) => Self::Retryable(late(why)),
            Self::Cut(why) => Self::Cut(late(why)),
            Self::Failed(why) => Self::Failed(late(why)),
        }
    }
}

async fn send(
    to: SocketAddr,
    trust: Option<&Trust>,
    request: Request<Full<Bytes>>,
    kept: &mut Option<Kept>,
) -> Result<Response<Incoming>, String> {
    let mut open = kept.take();
    if let Some(sender) = &mut open
        && sender.ready().await.is_err()
    {
        open = None;
    }
    let mut sender = match open {
        Some(sender) => sender,
        None => connect(to, trust).await?,
    };
    let answer = sender.send_request(request).await.map_err(|error| format!("no answer: {error}"))?;
    *kept = Some(sender);
    Ok(answer)
}

async fn connect(to: SocketAddr, trust: Option<&Trust>) -> Result<Kept, String> {
    match trust {
        Some(trust) => handshake(trust.connect(to).await?).await,
        None => handshake(TcpStream::connect(to).await.map_err(|error| format!("cannot connect: {error}"))?).await,
    }
}

async fn handshake(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Result<Kept, String> {
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (sender, connection) = handshake.map_err(|error| format!("no HTTP connection: {error}"))?;
    // It ends with the sender and the body; its errors reach the reader of the response.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(sender)
}

/// Evaluates a response other than 200 as the SDKs do.
async fn refusal(answer: Response<Incoming>) -> Outcome {
    let status = answer.status();
    let should_retry = answer.headers().get("x-should-retry").map(|value| value == "true");
    let usual = matches!(status.as_u16(), 408 | 409 | 429) || status.is_server_error();
    let body = tokio::time::timeout(SILENCE, answer.into_body().collect()).await;
    let body = body.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let why = format!("{status}: {}", String::from_utf8_lossy(&body));
    if should_retry.unwrap_or(usual) { Outcome::Retryable(why) } else { Outcome::Failed(why) }
}

async fn read(answer: Response<Incoming>, expected: &str, mut on_stage: impl FnMut(Stage)) -> Outcome {
    let mut body = answer.into_body();
    let mut text = Vec::new();
    loop {
        let frame = match tokio::time::timeout(SILENCE, body.frame()).await {
            Ok(frame) => frame,
            Err(_) => return Outcome::Failed(format!("silence after {:?}", tail(&text))),
        };
        match frame {
            Some(Ok(frame)) => {
                if text.is_empty() {
                    on_stage(Stage::Begun);
                }
                text.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
            }
            Some(Err(error)) => return Outcome::Cut(format!("{error}, after {:?}", tail(&text))),
            None => return judge(&String::from_utf8_lossy(&text), expected),
        }
    }
}

/// Evaluates a whole event stream: every frame must be a chunk, their contents the expected text, and the last one
/// `[DONE]`.
pub(super) fn judge(stream: &str, expected: &str) -> Outcome {
    let mut content = String::new();
    let mut done = false;
    for event in stream.split("\n\n").filter(|event| !event.is_empty()) {
        let Some(data) = event.strip_prefix("data: ").filter(|_| !done) else {
            return Outcome::Failed(format!("not an event of an answer: {event:?}"));
        };
        if data == "[DONE]" {
            done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(data).unwrap_or_default();
        if !chunk["error"].is_null() {
            return Outcome::Cut(format!("error in the stream: {data}"));
        }
        match chunk["choices"][0]["delta"].as_object() {
            Some(delta) => content += delta.get("content").and_then(Value::as_str).unwrap_or_default(),
            None => return Outcome::Failed(format!("not a chunk of an answer: {event:?}")),
        }
    }
    if content == expected && done {
        Outcome::Answered
    } else if !done && expected.starts_with(&content) {
        Outcome::Cut(format!("ended after {:?}", tail(content.as_bytes())))
    } else {
        Outcome::Failed(format!("wrong answer {content:?}, expected {expected:?}"))
    }
}

fn tail(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[text.len().saturating_sub(120)..]).into_owned()
}
