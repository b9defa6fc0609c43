//! Checks of a request's head: ambiguous ends of the body and ambiguous hosts.
//!
//! hyper checks the rest: contradicting lengths, spellings, line ends. If a length is given together with `chunked`, it
//! uses `chunked` and closes afterwards, as RFC 9112 (6.3) requires. But it accepts every list of codings that ends in
//! `chunked`, decodes only that one, and would let the relay forward a body that is still coded as if it were not.

use axum::body::Body;
use http::header::{HOST, TRANSFER_ENCODING};
use http::{HeaderMap, Request, Version};
use modelrelay_protocol::error::{ApiError, ErrorKind};

/// Returns why this request gets a 400, after which its connection is not read any more.
pub fn fault(request: &Request<Body>) -> Option<ApiError> {
    let headers = request.headers();
    let message = if !is_chunked_or_nothing(headers) {
        "Transfer-Encoding must be a single chunked, or absent"
    } else if !names_one_host(request.version(), headers) {
        "exactly one Host header is required"
    } else {
        return None;
    };
    Some(ApiError::new(ErrorKind::MalformedRequest, message))
}

fn is_chunked_or_nothing(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let first = codings.next();
    first.is_none_or(|coding| coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"))
        && codings.next().is_none()
}

/// RFC 9112 (3.2): with no host or two, one program may use another host than the next.
fn names_one_host(version: Version, headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    (hosts.next().is_some() || version == Version::HTTP_10) && hosts.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faulty(version: Version, headers: &[(&str, &str)]) -> bool {
        let request = Request::builder().version(version);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        fault(&request.body(Body::empty()).unwrap()).is_some()
    }

    #[test]
    fn only_chunked_transfer_encoding_is_accepted() {
        let coded = |codings: &[&str]| {
            let headers: Vec<_> = codings.iter().map(|coding| ("transfer-encoding", *coding)).collect();
            faulty(Version::HTTP_11, &[&[("host", "x")], headers.as_slice()].concat())
        };
        assert!(!coded(&[]) && !coded(&["chunked"]) && !coded(&[" Chunked\t"]));
        assert!(coded(&["gzip, chunked"]) && coded(&["chunked, chunked"]) && coded(&["chunked", "chunked"]));
        assert!(coded(&["identity", "chunked"]) && coded(&[",chunked"]) && coded(&[""]));
    }

    #[test]
    fn exactly_one_host_header_is_required() {
        assert!(!faulty(Version::HTTP_11, &[("host", "x")]) && !faulty(Version::HTTP_10, &[]));
        assert!(faulty(Version::HTTP_11, &[]) && faulty(Version::HTTP_11, &[("host", "x"), ("host", "x")]));
    }
}
