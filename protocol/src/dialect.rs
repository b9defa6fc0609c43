//! The error formats of the two APIs, and the frames with which their streams report an error.
//!
//! Measured with the SDKs: most of them treat a stream that merely ends as success, so a broken stream ends with the
//! dialect's error frame. The end of a complete stream, such as `[DONE]`, is never invented.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::queue_position::QueuePosition;

/// The API that the client uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// OpenAI's API, except for Responses.
    OpenAi,
    /// OpenAI's Responses API, whose streams are typed events.
    Responses,
    /// Anthropic's API.
    Anthropic,
}

impl Dialect {
    /// Returns the body of an error response.
    pub fn error_body(self, error: &ApiError, request_id: &str) -> Vec<u8> {
        let body = match self {
            Self::OpenAi | Self::Responses => json!({ "error": openai_error(error) }),
            Self::Anthropic => anthropic_error(error, request_id),
        };
        body.to_string().into_bytes()
    }

    /// Returns the frame that reports a broken event stream to its reader. `sequence_number` is the next one of the
    /// stream; only Responses events have one.
    pub fn error_frame(self, error: &ApiError, request_id: &str, sequence_number: u64) -> String {
        match self {
            Self::OpenAi => format!("data: {}\n\n", json!({ "error": openai_error(error) })),
            // openai-python only yields the specified event and does not raise it; the nested error makes it raise.
            Self::Responses => {
                let event = json!({
                    "type": "error",
                    "sequence_number": sequence_number,
                    "code": error.code(),
                    "message": error.message(),
                    "param": error.param(),
                    "error": openai_error(error),
                });
                format!("event: error\ndata: {event}\n\n")
            }
            Self::Anthropic => format!("event: error\ndata: {}\n\n", anthropic_error(error, request_id)),
        }
    }

    /// Returns a frame that every SDK ignores, to keep an impatient proxy waiting.
    pub fn keepalive_frame(self) -> &'static str {
        match self {
            Self::OpenAi | Self::Responses => ": keepalive\n\n",
            Self::Anthropic => "event: ping\ndata: {\"type\": \"ping\"}\n\n",
        }
    }

    /// Returns such a frame for a request that waits, with its position in a comment.
    pub fn waiting_frame(self, QueuePosition { position, waiting }: QueuePosition) -> String {
        let comment = format!(": waiting, position {position} of {waiting}\n");
        match self {
            Self::OpenAi | Self::Responses => comment + "\n",
            // A comment within the event: some clients would read a block of its own as an event without a name.
            Self::Anthropic => comment + self.keepalive_frame(),
        }
    }
}

fn openai_error(error: &ApiError) -> Value {
    json!({
        "message": error.message(),
        "type": error.openai_type(),
        "param": error.param(),
        "code": error.code(),
    })
}

fn anthropic_error(error: &ApiError, request_id: &str) -> Value {
    json!({
        "type": "error",
        "error": { "type": error.anthropic_type(), "message": error.message() },
        "request_id": request_id,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn error() -> ApiError {
        ApiError::new(ErrorKind::ModelNotFound, "no provider for model x")
    }

    fn parsed(bytes: &[u8]) -> Value {
        serde_json::from_slice(bytes).unwrap()
    }

    #[test]
    fn openai_error_has_message_type_param_and_code() {
        assert_eq!(
            parsed(&Dialect::OpenAi.error_body(&error(), "r")),
            json!({"error": {"message": "no provider for model x", "type": "invalid_request_error", "param": "model",
                "code": "model_not_found"}})
        );
    }

    #[test]
    fn anthropic_error_has_envelope_and_request_id() {
        assert_eq!(
            parsed(&Dialect::Anthropic.error_body(&error(), "r")),
            json!({"type": "error", "error": {"type": "not_found_error", "message": "no provider for model x"},
                "request_id": "r"})
        );
    }

    #[test]
    fn stream_frames_are_whole_events() {
        for dialect in [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic] {
            let frame = dialect.error_frame(&error(), "r", 2);
            assert!(frame.ends_with("\n\n") && !frame.contains("[DONE]"), "{frame}");
            let data = frame.split_once("data: ").unwrap().1;
            assert!(parsed(data.trim_end().as_bytes())["error"]["message"].is_string(), "{frame}");
        }
        assert!(Dialect::OpenAi.error_frame(&error(), "r", 0).starts_with("data: "));
        assert!(Dialect::Anthropic.error_frame(&error(), "r", 0).starts_with("event: error\n"));
    }

    #[test]
    fn keepalive_is_comment_or_anthropic_ping() {
        for dialect in [Dialect::OpenAi, Dialect::Responses] {
            let frame = dialect.keepalive_frame();
            assert!(frame.starts_with(':') && frame.ends_with("\n\n") && frame.lines().count() == 2, "{frame}");
        }
        let (event, data) = Dialect::Anthropic.keepalive_frame().split_once("\ndata: ").unwrap();
        assert_eq!((event, parsed(data.as_bytes())), ("event: ping", json!({"type": "ping"})));
        assert!(data.ends_with("\n\n"));
    }
    #[test]
    fn waiting_frame_is_keepalive_with_position() {
        let position = QueuePosition { position: 3, waiting: 12 };
        for dialect in [Dialect::OpenAi, Dialect::Responses] {
            assert_eq!(dialect.waiting_frame(position), ": waiting, position 3 of 12\n\n");
        }
        let frame = Dialect::Anthropic.waiting_frame(position);
        assert_eq!(frame, format!(": waiting, position 3 of 12\n{}", Dialect::Anthropic.keepalive_frame()));
    }
}
