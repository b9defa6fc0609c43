//! Reading a request's body, within the limit and the memory budget.
//!
//! Memory is reserved before it is used: from the announced length at once, without one as the bytes come.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::Body as _;
use http_body_util::BodyExt;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use tokio::time::Instant;

use crate::budget::{Budget, Reservation};

/// A client that sends nothing for so long in the middle of its body is not waited for.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Nor is one that has sent less than this a second, beyond its first minute: memory is reserved for all of its body, and some
/// dozens that send a byte now and then would leave none for others. 128 kbit/s.
const MIN_BYTES_PER_SEC: u64 = 16 << 10;

/// What a refused client may still send before its connection is closed.
const DISCARD_BYTES: u64 = 64 << 20;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(30);

/// How much is reserved at a time when the length was not announced.
const GROWTH_BYTES: u64 = 64 << 10;

/// Reads the whole body. The budget is charged until the last clone of the bytes is gone.
pub async fn read(headers: &HeaderMap, body: &mut Body, budget: &Arc<Budget>, limit: u64) -> Result<Bytes, ApiError> {
    refuse_encoded(headers)?;
    let announced = announced_length(headers)?;
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large(limit));
    }
    let mut reservation = budget.reserve(announced.unwrap_or(0)).ok_or_else(overloaded)?;
    let mut bytes = BytesMut::with_capacity(usize::try_from(announced.unwrap_or(0)).unwrap_or(0));
    let began = Instant::now();
    loop {
        let allowed = IDLE_TIMEOUT + Duration::from_secs(bytes.len() as u64 / MIN_BYTES_PER_SEC);
        let deadline = (began + allowed).min(Instant::now() + IDLE_TIMEOUT);
        let frame = match tokio::time::timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => return Err(ApiError::new(ErrorKind::InvalidJson, "the request body broke off")),
            Ok(None) => break,
            Err(_) => {
                return Err(ApiError::new(
                    ErrorKind::InvalidJson,
                    "the request body stopped coming, or came too slowly",
                ));
            }
        };
        let Ok(data) = frame.into_data() else { continue };
        let total = bytes.len() as u64 + data.len() as u64;
        if total > limit {
            return Err(too_large(limit));
        }
        grow(&mut reservation, total)?;
        bytes.extend_from_slice(&data);
    }
    Ok(reservation.hold(bytes.freeze()))
}

/// Reads on without keeping anything, so that a client which is still sending gets to read why it was refused: closing
/// under its writes would reset the connection, and the answer with it. Bounded, for whoever sends without end. A client
/// that waits to be asked for its body (`Expect: 100-continue`) is not asked: to read would be to ask.
pub fn discard(headers: &HeaderMap, mut body: Body) {
    if body.is_end_stream() || headers.contains_key(http::header::EXPECT) {
        return;
    }
    tokio::spawn(async move {
        let discarding = async {
            let mut left = DISCARD_BYTES;
            while let Some(Ok(frame)) = body.frame().await {
                left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
                if left == 0 {
                    return;
                }
            }
        };
        // Either way the connection closes once the body is dropped before its end.
        let _ = tokio::time::timeout(DISCARD_TIMEOUT, discarding).await;
    });
}

fn grow(reservation: &mut Reservation, total: u64) -> Result<(), ApiError> {
    let missing = total.saturating_sub(reservation.bytes());
    if missing > 0 && !reservation.grow(missing.max(GROWTH_BYTES)) {
        return Err(overloaded());
    }
    Ok(())
}

fn refuse_encoded(headers: &HeaderMap) -> Result<(), ApiError> {
    let encoded = headers.get_all(http::header::CONTENT_ENCODING).iter().any(|value| {
        !value.as_bytes().trim_ascii().is_empty() && !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity")
    });
    if encoded {
        let message = "compressed request bodies are not supported: send the body without Content-Encoding";
        return Err(ApiError::new(ErrorKind::UnsupportedEncoding, message));
    }
    Ok(())
}

fn announced_length(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(value) = headers.get(http::header::CONTENT_LENGTH) else { return Ok(None) };
    let length = value.to_str().ok().and_then(|text| text.parse().ok());
    length.map(Some).ok_or_else(|| ApiError::new(ErrorKind::InvalidJson, "Content-Length is not a number"))
}

fn too_large(limit: u64) -> ApiError {
    ApiError::new(
        ErrorKind::RequestTooLarge,
        format!("the request body is larger than {limit} bytes (MAX_REQUEST_BYTES)"),
    )
}

fn overloaded() -> ApiError {
    ApiError::new(ErrorKind::Overloaded, "the relay's memory for request bodies is full; try again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_str(value).unwrap())).collect()
    }

    async fn code(pairs: &[(&'static str, &str)], body: &'static [u8], budget: u64) -> Result<usize, String> {
        let budget = Budget::new(budget);
        let read = read(&headers(pairs), &mut Body::from(body), &budget, 10).await;
        read.map(|bytes| bytes.len()).map_err(|error| error.code().to_owned())
    }

    #[tokio::test]
    async fn a_body_is_read_whole_within_the_limits() {
        assert_eq!(code(&[("content-length", "3")], b"abc", 3).await, Ok(3));
        assert_eq!(code(&[], b"abc", 1 << 20).await, Ok(3));
    }

    #[tokio::test]
    async fn too_large_compressed_and_unaffordable_bodies_are_refused() {
        assert_eq!(code(&[("content-length", "11")], b"01234567890", 100).await, Err("request_too_large".into()));
        assert_eq!(code(&[], b"01234567890", 1 << 20).await, Err("request_too_large".into()));
        assert_eq!(code(&[("content-encoding", "gzip")], b"x", 100).await, Err("unsupported_encoding".into()));
        assert_eq!(code(&[("content-length", "5")], b"01234", 4).await, Err("overloaded".into()));
        assert_eq!(code(&[], b"01234", 4).await, Err("overloaded".into()));
    }

    /// How long a body is read that comes in pieces of `bytes`, one each `pause`, and how that ends.
    async fn dripping(bytes: usize, pause: Duration) -> (Result<usize, String>, Duration) {
        let pieces = futures_util::stream::unfold(0, move |sent| async move {
            tokio::time::sleep(pause).await;
            (sent < 1 << 20).then(|| (Ok::<_, std::io::Error>(Bytes::from(vec![b' '; bytes])), sent + bytes))
        });
        let (budget, began) = (Budget::new(2 << 20), Instant::now());
        let read = read(&HeaderMap::new(), &mut Body::from_stream(pieces), &budget, 2 << 20).await;
        (read.map(|bytes| bytes.len()).map_err(|error| error.code().to_owned()), began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_drips_is_given_up_though_each_piece_comes_in_time() {
        let (read, took) = dripping(1, Duration::from_secs(30)).await;
        assert_eq!(read, Err("invalid_json".to_owned()));
        assert!(took <= Duration::from_secs(61), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_slow_but_comes_is_waited_for() {
        let (read, took) = dripping(20 << 10, Duration::from_secs(1)).await;
        assert!(read.is_ok_and(|read| read >= 1 << 20), "{took:?}");
    }
}
