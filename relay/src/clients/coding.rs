//! Decoding of compressed request bodies.

use std::io::Read;

use bytes::{Bytes, BytesMut};
use flate2::read::MultiGzDecoder;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use ruzstd::decoding::StreamingDecoder;

use super::intake::{grow, too_large};
use crate::net::budget::Reservation;
use crate::system::blocking;

/// The largest window of a zstd frame, as recommended by RFC 8878 (3.1.1.1.2).
const MAX_ZSTD_WINDOW_BYTES: u64 = 8 << 20;

/// The size of a compressed body from which decoding may noticeably delay other tasks on the same thread.
const LONG_BODY_BYTES: usize = 64 << 10;

/// The number of bytes that are decoded at a time.
const PIECE_BYTES: usize = 16 << 10;

/// A compression that clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

impl Coding {
    /// Returns the compression of a request body with these headers, if any.
    ///
    /// # Errors
    /// Returns 415 for any other coding, and for more than one.
    pub fn of(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let named = headers.get_all(CONTENT_ENCODING).iter().map(|value| value.as_bytes().trim_ascii());
        let mut named = named.filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case(b"identity"));
        let coding = match named.next() {
            None => return Ok(None),
            Some(name) if name.eq_ignore_ascii_case(b"gzip") || name.eq_ignore_ascii_case(b"x-gzip") => Self::Gzip,
            Some(name) if name.eq_ignore_ascii_case(b"zstd") => Self::Zstd,
            Some(_) => return Err(unsupported()),
        };
        if named.next().is_some() { Err(unsupported()) } else { Ok(Some(coding)) }
    }

    /// Returns the decompressed body, within the budget and the limit like any other. `reservation` is that of the
    /// compressed body.
    pub async fn decode(self, body: Bytes, reservation: Reservation, limit: u64) -> Result<Bytes, ApiError> {
        if body.len() < LONG_BODY_BYTES {
            return self.decode_now(&body, reservation, limit);
        }
        let decoding = blocking::run(move || self.decode_now(&body, reservation, limit));
        decoding.await.unwrap_or_else(|_| Err(ApiError::new(ErrorKind::Internal, "cannot read the request body")))
    }

    fn decode_now(self, body: &[u8], reservation: Reservation, limit: u64) -> Result<Bytes, ApiError> {
        match self {
            Self::Gzip => Self::read(MultiGzDecoder::new(body), reservation, limit),
            Self::Zstd => {
                let mut rest = body;
                let decoder = StreamingDecoder::new_with_max_window_size(&mut rest, MAX_ZSTD_WINDOW_BYTES);
                let decoded = Self::read(decoder.map_err(|_| broken())?, reservation, limit)?;
                if rest.is_empty() { Ok(decoded) } else { Err(broken()) }
            }
        }
    }

    fn read(mut reader: impl Read, mut reservation: Reservation, limit: u64) -> Result<Bytes, ApiError> {
        let compressed = reservation.bytes();
        let (mut decoded, mut piece) = (BytesMut::new(), [0; PIECE_BYTES]);
        loop {
            let read = reader.read(&mut piece).map_err(|_| broken())?;
            if read == 0 {
                reservation.shrink(compressed);
                return Ok(reservation.hold(decoded.freeze()));
            }
            let total = (decoded.len() + read) as u64;
            if total > limit {
                return Err(too_large(limit));
            }
            grow(&mut reservation, compressed + total)?;
            decoded.extend_from_slice(&piece[..read]);
        }
    }
}

fn unsupported() -> ApiError {
    let message = "unsupported Content-Encoding of the request body: use gzip, zstd or none";
    ApiError::new(ErrorKind::UnsupportedEncoding, message)
}

fn broken() -> ApiError {
    ApiError::new(ErrorKind::InvalidJson, "the request body does not match its Content-Encoding")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::net::budget::Budget;

    const BODY: &[u8] = br#"{"model":"m"}"#;
    /// `zstd` of [`BODY`], as written by the `zstd` program.
    const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd\x00\x58\x69\x00\x00{\"model\":\"m\"}";

    fn gzip(body: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(body).unwrap();
        encoder.finish().unwrap()
    }

    fn decoded(coding: Coding, body: &[u8], limit: u64) -> Result<Bytes, String> {
        coding.decode_now(body, Budget::new(1 << 20).open(), limit).map_err(|error| error.code().to_owned())
    }

    #[test]
    fn both_codings_are_decoded() {
        assert_eq!(decoded(Coding::Gzip, &gzip(BODY), 100).as_deref(), Ok(BODY));
        assert_eq!(decoded(Coding::Zstd, ZSTD, 100).as_deref(), Ok(BODY));
    }

    #[test]
    fn compression_bomb_is_rejected_before_decoding() {
        assert_eq!(decoded(Coding::Gzip, &gzip(&vec![b' '; 10 << 20]), 1 << 19), Err("request_too_large".to_owned()));
        assert_eq!(decoded(Coding::Gzip, &gzip(&vec![b' '; 10 << 20]), 1 << 30), Err("overloaded".to_owned()));
    }

    #[test]
    fn bytes_that_are_not_compressed_are_refused() {
        for coding in [Coding::Gzip, Coding::Zstd] {
            assert_eq!(decoded(coding, BODY, 100), Err("invalid_json".to_owned()), "{coding:?}");
        }
        assert_eq!(decoded(Coding::Gzip, &gzip(BODY)[..20], 100), Err("invalid_json".to_owned()));
        assert_eq!(decoded(Coding::Zstd, &[ZSTD, b"more"].concat(), 100), Err("invalid_json".to_owned()));
    }
}
