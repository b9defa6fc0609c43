//! The link between relay and worker, as both ends need it: when its bytes last moved, and its messages.

mod liveness;

use bytes::BytesMut;
use modelrelay_protocol::outbox::Frame;
use tokio_tungstenite::tungstenite::Message;

pub use liveness::{Guard, Liveness, LivenessIo};

/// Makes the WebSocket message of a frame. A payload is copied behind its header.
pub fn encode_message(frame: Frame) -> Message {
    match frame {
        Frame::Text(text) => Message::Text(text.into()),
        Frame::Binary { header, payload } => {
            let mut message = BytesMut::with_capacity(header.len() + payload.len());
            message.extend_from_slice(&header);
            message.extend_from_slice(&payload);
            Message::Binary(message.freeze())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_message_is_header_then_payload() {
        let frame = Frame::Binary { header: *b"header", payload: "payload".into() };
        assert_eq!(encode_message(frame), Message::binary("headerpayload"));
        assert_eq!(encode_message(Frame::Text("text".to_owned())), Message::text("text"));
    }
}
