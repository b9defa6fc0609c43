//! Reads a request's body within the size limit and the memory budget.
//!
//! The memory of a small body is reserved when its length is announced, so that of many concurrent bodies some are read
//! whole instead of all stopping half-way. The memory of a larger body is reserved as its bytes arrive, so that a
//! client that announces much and sends little holds little. A body that has no room when it is announced is rejected
//! at once.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body_util::BodyExt;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use tokio::time::Instant;

use super::coding::Coding;
use crate::net::budget::{Full, Purpose, Reservation};

/// The time within which the first byte of a body must arrive.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest pause within a body.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The lowest rate of a body after its first minute, in bytes per second (128 kbit/s). Without it, a few thousand
/// clients that send a byte now and then would leave no connections for others.
const MIN_BYTES_PER_SEC: u64 = 16 << 10;

/// The number of bytes that are reserved at a time.
const GROWTH_BYTES: u64 = 64 << 10;

/// Reads the whole body into an empty reservation, which is held until the last clone of the bytes is dropped.
pub async fn read(
    headers: &HeaderMap,
    body: &mut Body,
    mut reservation: Reservation,
    limit: u64,
) -> Result<Bytes, ApiError> {
    let coding = Coding::of(headers)?;
    let announced = announced_length(headers)?;
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large(limit));
    }
    begin(&mut reservation, announced.unwrap_or(0))?;
    let mut bytes = BytesMut::new();
    let began = Instant::now();
    loop {
        let patience = if bytes.is_empty() { FIRST_BYTE_TIMEOUT } else { IDLE_TIMEOUT };
        let allowed = IDLE_TIMEOUT + Duration::from_secs(bytes.len() as u64 / MIN_BYTES_PER_SEC);
        let deadline = (began + allowed).min(Instant::now() + patience);
        let frame = match tokio::time::timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => return Err(ApiError::new(ErrorKind::InvalidJson, "request body ended prematurely")),
            Ok(None) => break,
            Err(_) => {
                return Err(ApiError::new(ErrorKind::InvalidJson, "the request body arrived too slowly or stalled"));
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
    match coding {
        Some(coding) => coding.decode(bytes.freeze(), reservation, limit).await,
        None => Ok(reservation.hold(bytes.freeze())),
    }
}

/// Reserves the memory that a body of `announced` bytes needs before it arrives.
fn begin(reservation: &mut Reservation, announced: u64) -> Result<(), Full> {
    let purpose = Purpose::of_body(announced);
    match purpose {
        Purpose::SmallBody => reservation.grow(announced, purpose),
        Purpose::Bulk | Purpose::Passing => reservation.check(announced, purpose),
    }
}

/// Reserves the memory that a body of `total` bytes needs.
pub(super) fn grow(reservation: &mut Reservation, total: u64) -> Result<(), Full> {
    let missing = total.saturating_sub(reservation.bytes());
    if missing == 0 {
        return Ok(());
    }
    // In small steps at first: most bodies are small.
    let step = missing.max(reservation.bytes().min(GROWTH_BYTES));
    let purpose = Purpose::of_body(total);
    reservation.grow(step, purpose).or_else(|_| reservation.grow(missing, purpose))
}

fn announced_length(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(value) = headers.get(http::header::CONTENT_LENGTH) else { return Ok(None) };
    let length = value.to_str().ok().and_then(|text| text.parse().ok());
    length.map(Some).ok_or_else(|| ApiError::new(ErrorKind::InvalidJson, "Content-Length is not a number"))
}

pub(super) fn too_large(limit: u64) -> ApiError {
    ApiError::new(
        ErrorKind::RequestTooLarge,
        format!("the request body is larger than {limit} bytes (MAX_REQUEST_BYTES)"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::budget::Budget;
    use http::HeaderValue;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_str(value).unwrap())).collect()
    }

    async fn code(pairs: &[(&'static str, &str)], body: &'static [u8], budget: u64) -> Result<usize, String> {
        let budget = Budget::new(budget);
        let read = read(&headers(pairs), &mut Body::from(body), budget.open(), 10).await;
        read.map(|bytes| bytes.len()).map_err(|error| error.code().to_owned())
    }

    #[tokio::test]
    async fn body_within_limits_is_read_whole() {
        assert_eq!(code(&[("content-length", "3")], b"abc", 3).await, Ok(3));
        assert_eq!(code(&[], b"abc", 1 << 20).await, Ok(3));
    }

    #[tokio::test]
    async fn too_large_compressed_and_unaffordable_bodies_are_refused() {
        assert_eq!(code(&[("content-length", "11")], b"01234567890", 100).await, Err("request_too_large".into()));
        assert_eq!(code(&[], b"01234567890", 1 << 20).await, Err("request_too_large".into()));
        assert_eq!(code(&[("content-encoding", "br")], b"x", 100).await, Err("unsupported_encoding".into()));
        assert_eq!(code(&[("content-encoding", "gzip")], b"x", 100).await, Err("invalid_json".into()));
        assert_eq!(code(&[("content-length", "5")], b"01234", 4).await, Err("overloaded".into()));
        assert_eq!(code(&[], b"01234", 4).await, Err("overloaded".into()));
    }

    /// Reads a body of pieces of `bytes`, one per `pause`; returns the result and the elapsed time.
    async fn dripping(bytes: usize, pause: Duration) -> (Result<usize, String>, Duration) {
        let pieces = futures_util::stream::unfold(0, move |sent| async move {
            tokio::time::sleep(pause).await;
            (sent < 1 << 20).then(|| (Ok::<_, std::io::Error>(Bytes::from(vec![b' '; bytes])), sent + bytes))
        });
        let (budget, began) = (Budget::new(2 << 20), Instant::now());
        let read = read(&HeaderMap::new(), &mut Body::from_stream(pieces), budget.open(), 2 << 20).await;
        (read.map(|bytes| bytes.len()).map_err(|error| error.code().to_owned()), began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn dripping_body_is_rejected_despite_timely_pieces() {
        let (read, took) = dripping(1, Duration::from_secs(30)).await;
        assert_eq!(read, Err("invalid_json".to_owned()));
        assert!(took <= Duration::from_secs(61), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_but_steady_body_is_accepted() {
        let (read, took) = dripping(20 << 10, Duration::from_secs(1)).await;
        assert!(read.is_ok_and(|read| read >= 1 << 20), "{took:?}");
    }
}
