//! Binary messages: one piece of one body.
//!
//! ```text
//! byte 0     kind    1 request body, 2 response body
//! byte 1     0
//! byte 2–5   stream  u32, big-endian
//! byte 6–    payload bytes exactly as they came, at most 65,536
//! ```

use bytes::Bytes;

use crate::limits::MAX_PIECE_BYTES;

/// The length of the header before the payload.
pub const HEADER_BYTES: usize = 6;

/// The body that a piece belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BodyKind {
    /// From the client to the backend.
    Request,
    /// From the backend to the client.
    Response,
}

impl BodyKind {
    /// The kind's byte on the wire.
    pub const fn byte(self) -> u8 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
        }
    }
}

/// One decoded piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The body.
    pub kind: BodyKind,
    /// The stream of this socket.
    pub stream: u32,
    /// The payload.
    pub payload: Bytes,
}

/// The reason why a binary message closes the socket with 1002.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// Fewer than [`HEADER_BYTES`] bytes.
    TooShort,
    /// An undefined kind.
    UnknownKind(u8),
    /// More than [`MAX_PIECE_BYTES`] of payload.
    TooLong(usize),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooShort => write!(f, "binary message shorter than {HEADER_BYTES} bytes"),
            Self::UnknownKind(kind) => write!(f, "binary message of unknown kind {kind}"),
            Self::TooLong(len) => write!(f, "piece of {len} bytes exceeds the limit of {MAX_PIECE_BYTES}"),
        }
    }
}

impl std::error::Error for FrameError {}

/// Returns the six bytes before a payload.
pub fn encode_header(kind: BodyKind, stream: u32) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = stream.to_be_bytes();
    [kind.byte(), 0, a, b, c, d]
}

/// Returns the binary message of a header and its payload.
pub fn join(header: [u8; HEADER_BYTES], payload: &[u8]) -> Bytes {
    [&header[..], payload].concat().into()
}

/// Decodes a binary message. Byte 1 is ignored: a later version may use it.
pub fn decode(mut message: Bytes) -> Result<Piece, FrameError> {
    let Some(&[kind, _, a, b, c, d]) = message.first_chunk::<HEADER_BYTES>() else {
        return Err(FrameError::TooShort);
    };
    let kind = match kind {
        1 => BodyKind::Request,
        2 => BodyKind::Response,
        other => return Err(FrameError::UnknownKind(other)),
    };
    let payload = message.split_off(HEADER_BYTES);
    if payload.len() > MAX_PIECE_BYTES {
        return Err(FrameError::TooLong(payload.len()));
    }
    Ok(Piece { kind, stream: u32::from_be_bytes([a, b, c, d]), payload })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: BodyKind, stream: u32, payload: &[u8]) -> Bytes {
        join(encode_header(kind, stream), payload)
    }

    #[test]
    fn piece_survives_round_trip() {
        let piece = decode(message(BodyKind::Response, 0x0102_0304, b"\xff\0data")).unwrap();
        assert_eq!(
            piece,
            Piece { kind: BodyKind::Response, stream: 0x0102_0304, payload: Bytes::from_static(b"\xff\0data") }
        );
    }

    #[test]
    fn header_has_documented_layout() {
        assert_eq!(encode_header(BodyKind::Request, 17), [1, 0, 0, 0, 0, 17]);
    }

    #[test]
    fn short_unknown_and_long_messages_are_refused() {
        assert_eq!(decode(Bytes::from_static(&[2, 0, 0, 0, 0])), Err(FrameError::TooShort));
        assert_eq!(decode(Bytes::from_static(&[9, 0, 0, 0, 0, 1])), Err(FrameError::UnknownKind(9)));
        let long = message(BodyKind::Request, 1, &vec![0; MAX_PIECE_BYTES + 1]);
        assert_eq!(decode(long), Err(FrameError::TooLong(MAX_PIECE_BYTES + 1)));
        assert!(decode(message(BodyKind::Request, 1, &vec![0; MAX_PIECE_BYTES])).is_ok());
    }
}
