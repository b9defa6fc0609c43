//! Single HTTP requests that tests send to relays and workers. For clients under load, see [`crate::traffic`].

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Request, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// The timeout for a whole exchange.
const LONGEST: Duration = Duration::from_secs(20);

/// A response.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its whole body.
    pub body: String,
}

impl Reply {
    /// Returns a header's value, empty if absent.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Returns the body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }
}

/// Sends `METHOD /path` with these headers, and with a JSON body unless it is null. Without a response, the error
/// explains why.
///
/// # Errors
/// If there is no valid HTTP response within 20 s.
///
/// # Panics
/// If the request is malformed.
pub async fn fetch(to: SocketAddr, what: &str, headers: &[(&str, &str)], body: &Value) -> Result<Reply, String> {
    let (method, path) = what.split_once(' ').expect("METHOD /path");
    let mut request = Request::builder().method(method).uri(path).header("host", to.to_string());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut bytes = Bytes::new();
    if !body.is_null() {
        request = request.header("content-type", "application/json");
        bytes = body.to_string().into();
    }
    let request = request.body(Full::new(bytes)).expect("the request is well-formed");
    let answer = tokio::time::timeout(LONGEST, exchange(to, request)).await;
    answer.unwrap_or_else(|_| Err(format!("no answer from {to} within {LONGEST:?}")))
}

async fn exchange(to: SocketAddr, request: Request<Full<Bytes>>) -> Result<Reply, String> {
    let stream = TcpStream::connect(to).await.map_err(|error| format!("cannot connect to {to}: {error}"))?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| format!("no HTTP connection: {error}"))?;
    // It ends with the response; its errors reach the reader below.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    let answer = sender.send_request(request).await.map_err(|error| format!("no answer: {error}"))?;
    let (parts, body) = answer.into_parts();
    let body = body.collect().await.map_err(|error| format!("response body ended prematurely: {error}"))?.to_bytes();
    let body = String::from_utf8_lossy(&body).into_owned();
    Ok(Reply { status: parts.status.as_u16(), headers: parts.headers, body })
}
