//! One HTTP request and its response, over a connection of its own: for backends and for an API server.

use std::fmt::Display;
use std::time::Duration;

use ::http::header::{CONTENT_TYPE, HOST, InvalidHeaderValue};
use ::http::{HeaderValue, Method, Request, Response};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use modelrelay_protocol::secret::Secret;
use tokio::task::JoinSet;
use url::{Position, Url};

use super::DriverError;
use crate::net::Stream;

/// The longest response: thousands of models, a page of metrics, or a Deployment's few Pods of at most 1.5 MB each.
pub(super) const MAX_ANSWER_BYTES: usize = 8 << 20;

/// A response whose body is still to be read.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) answer: Response<Incoming>,
    /// Drives the connection, and is aborted with this value.
    _connection: JoinSet<()>,
}

impl Exchange {
    /// Sends the request. `log_lost` receives the error of a connection that breaks.
    pub(super) async fn begin(
        stream: Stream,
        request: Request<Full<Bytes>>,
        peer: &impl Display,
        log_lost: fn(hyper::Error),
    ) -> Result<Self, DriverError> {
        let broken = |error| silent(peer, &error);
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let mut driving = JoinSet::new();
        driving.spawn(async move { connection.await.unwrap_or_else(log_lost) });
        Ok(Self { answer: sender.send_request(request).await.map_err(broken)?, _connection: driving })
    }

    pub(super) async fn body(self, peer: &impl Display) -> Result<Bytes, DriverError> {
        let Self { answer, _connection } = self;
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        Ok(body.map_err(|error| silent(peer, &error))?.to_bytes())
    }
}

/// Builds a request. `body`: its media type and its text.
pub(super) fn request(method: Method, url: &Url, body: Option<(&'static str, String)>) -> Request<Full<Bytes>> {
    let (media_type, text) = body.unzip();
    let mut request = Request::new(Full::new(Bytes::from(text.unwrap_or_default())));
    *request.method_mut() = method;
    // `Url` always has a valid request target after the authority.
    *request.uri_mut() = url[Position::BeforePath..Position::AfterQuery].parse().unwrap_or_default();
    request.headers_mut().extend(HeaderValue::from_str(url.authority()).ok().map(|host| (HOST, host)));
    request.headers_mut().extend(media_type.map(|media_type| (CONTENT_TYPE, HeaderValue::from_static(media_type))));
    request
}

/// The value of `Authorization` for a token.
pub(super) fn bearer(token: &Secret) -> Result<HeaderValue, InvalidHeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose()))?;
    value.set_sensitive(true);
    Ok(value)
}

pub(super) async fn within<T>(
    limit: Duration,
    peer: &impl Display,
    exchange: impl Future<Output = Result<T, DriverError>>,
) -> Result<T, DriverError> {
    let late = || Err(silent(peer, &format!("no response within {} s", limit.as_secs())));
    tokio::time::timeout(limit, exchange).await.unwrap_or_else(|_| late())
}

/// The error of a peer that does not respond.
pub(super) fn silent(peer: &impl Display, why: &dyn Display) -> DriverError {
    DriverError::Silent { url: peer.to_string(), why: why.to_string() }
}
