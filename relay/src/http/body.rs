//! Request bodies that are not forwarded: small ones are read whole, the rest of a rejected one is dropped.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body::Body as _;
use http_body_util::{BodyExt, Collected, Limited};

/// The number of bytes that a rejected client may still send before its connection is closed.
const DISCARD_BYTES: u64 = 64 << 20;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(30);

/// Reads a body of at most `max_bytes`. `None` if it is larger, or cannot be read.
pub(crate) async fn read_small(body: Body, max_bytes: usize) -> Option<Bytes> {
    Limited::new(body, max_bytes).collect().await.ok().map(Collected::to_bytes)
}

/// Reads the rest of a body and drops it, so that a client that is still sending can read the error response: closing
/// the connection while the client writes would reset it and lose the response. Bytes and time are limited. The body of
/// a client that waits for `100 Continue` (`Expect: 100-continue`) is not read, because reading would request it.
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

/// The same for a whole request.
pub fn discard_request(request: Request<Body>) {
    let (parts, body) = request.into_parts();
    discard(&parts.headers, body);
}
