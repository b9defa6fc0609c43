//! Reads untrusted bodies within a memory limit that all of them share.
//!
//! Parsed JSON takes up to forty times as much memory as its text, so the cost of a body is computed before it is
//! parsed. The threat is many bodies at once, not one. Small bodies are read concurrently, so that slow senders block
//! no other request. Large bodies take places, and parsed content is charged to a common sum.

use axum::body::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::sync::{Semaphore, SemaphorePermit};

/// The size up to which a body is read without a place.
const SMALL_BYTES: usize = 64 << 10;
/// An object's map or struct takes some 600 bytes, however small its content; any other value takes 80 at most.
const OBJECT_COST: u32 = 8;

/// The limits and the shared permits.
pub(crate) struct Intake {
    max_bytes: usize,
    max_cost: u32,
    large: Semaphore,
    costs: Semaphore,
}

/// A body with its share of the limits. It must be kept for as long as what was parsed from it.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    /// The body.
    pub(crate) bytes: Vec<u8>,
    _large: Option<SemaphorePermit<'a>>,
    _cost: SemaphorePermit<'a>,
}

/// The reason that a body is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    /// It has too many bytes.
    #[error("is too long")]
    TooLong,
    /// It has too many values, each of which takes many times its text's memory.
    #[error("has too many values")]
    TooManyValues,
    /// It ended prematurely.
    #[error("ended prematurely")]
    BrokenOff,
}

impl Intake {
    /// Limits each body to `max_bytes` and `max_cost` (see [`cost`]). `large` bodies are read at once, and `parsed` of
    /// the costliest are parsed at once, or more smaller ones with the same total cost.
    pub(crate) const fn new(max_bytes: usize, max_cost: u32, large: usize, parsed: usize) -> Self {
        let costs = Semaphore::const_new(max_cost as usize * parsed);
        Self { max_bytes, max_cost, large: Semaphore::const_new(large), costs }
    }

    /// Reads a body, and waits until there is room for its parsed content.
    pub(crate) async fn read<B: Body<Data = Bytes> + Unpin>(&self, mut body: B) -> Result<Taken<'_>, Refused> {
        let (mut bytes, mut large) = (Vec::new(), None);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Refused::BrokenOff)?;
            let Some(chunk) = frame.data_ref() else { continue };
            let length = bytes.len() + chunk.len();
            if length > self.max_bytes {
                return Err(Refused::TooLong);
            }
            if length > SMALL_BYTES && large.is_none() {
                large = Some(self.large.acquire().await.map_err(|_| Refused::BrokenOff)?);
            }
            bytes.extend_from_slice(chunk);
        }
        let cost = cost(&bytes);
        if cost > self.max_cost {
            return Err(Refused::TooManyValues);
        }
        let part = self.costs.acquire_many(cost).await.map_err(|_| Refused::BrokenOff)?;
        Ok(Taken { bytes, _large: large, _cost: part })
    }
}

/// Returns the cost of a JSON text in memory once parsed: roughly the number of its values, of which an object is worth
/// several. The cost of a text that is not JSON may be too high, but is never below that of the part up to the error.
fn cost(text: &[u8]) -> u32 {
    let (mut cost, mut is_string, mut is_escaped) = (0_u32, false, false);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_string => is_escaped = true,
            b'"' => is_string = !is_string,
            b',' | b'[' if !is_string => cost = cost.saturating_add(1),
            b'{' if !is_string => cost = cost.saturating_add(OBJECT_COST),
            _ => {}
        }
    }
    cost
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http_body_util::Full;

    use super::*;

    #[test]
    fn values_are_counted_outside_strings() {
        for (text, expected) in [
            ("", 0),
            ("[[0],[0]]", 4),
            (r#"{"a":1,"b":{}}"#, 17),
            (r#"["[,{\"[,{","\\",0]"#, 3),
            (r#"["never ends,,,"#, 1),
        ] {
            assert_eq!(cost(text.as_bytes()), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn bodies_wait_only_when_value_budget_is_exhausted() {
        let intake = Intake::new(1 << 20, 10, 1, 2);
        let body = |values: usize| Full::new(Bytes::from(",".repeat(values)));
        assert_eq!(intake.read(body(11)).await.unwrap_err(), Refused::TooManyValues);
        let _small = intake.read(body(1)).await.unwrap();
        let first = intake.read(body(10)).await.unwrap();
        assert!(intake.read(body(10)).now_or_never().is_none());
        assert!(intake.read(body(9)).now_or_never().is_some());
        drop(first);
        assert!(intake.read(body(10)).now_or_never().is_some());
    }

    #[tokio::test]
    async fn large_bodies_are_limited_and_small_ones_bypass() {
        let intake = Intake::new(1 << 20, 10, 1, 2);
        let body = |length: usize| Full::new(Bytes::from("x".repeat(length)));
        assert_eq!(intake.read(body((1 << 20) + 1)).await.unwrap_err(), Refused::TooLong);
        let first = intake.read(body(1 << 20)).await.unwrap();
        assert!(intake.read(body(SMALL_BYTES + 1)).now_or_never().is_none());
        assert!(intake.read(body(SMALL_BYTES)).now_or_never().is_some());
        drop(first);
        assert!(intake.read(body(SMALL_BYTES + 1)).now_or_never().is_some());
    }
}
