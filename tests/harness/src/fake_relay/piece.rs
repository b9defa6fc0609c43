//! Binary pieces, encoded and decoded by hand.

use bytes::{BufMut, Bytes, BytesMut};

/// The kind byte of a piece of a request body.
pub const REQUEST_PIECE: u8 = 1;
/// The kind byte of a piece of a response body.
pub const RESPONSE_PIECE: u8 = 2;

/// Bytes before the payload.
pub(super) const HEADER: usize = 6;

/// One binary message.
#[must_use]
pub fn piece(kind: u8, stream: u32, payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER + payload.len());
    bytes.put_u8(kind);
    bytes.put_u8(0);
    bytes.put_u32(stream);
    bytes.put_slice(payload);
    bytes.freeze()
}

/// Kind, stream and payload of a binary message.
pub(super) fn parse(message: &Bytes) -> Option<(u8, u32, Bytes)> {
    let header = message.get(..HEADER)?;
    let stream = u32::from_be_bytes([header[2], header[3], header[4], header[5]]);
    Some((header[0], stream, message.slice(HEADER..)))
}
