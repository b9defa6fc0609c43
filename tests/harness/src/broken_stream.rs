//! Streams that end with an error frame.

use serde_json::Value;

use crate::client::Reply;

/// The ends of complete streams.
const TERMINATORS: [&str; 3] = ["[DONE]", "message_stop", "response.completed"];

impl Reply {
    /// The error frame with which this stream ends; `None` for a stream that did not break.
    #[must_use]
    pub fn error_frame(&self) -> Option<Value> {
        let text = self.text();
        let line = text.strip_suffix("\n\n")?.lines().next_back()?;
        let frame: Value = serde_json::from_str(line.strip_prefix("data: ")?).ok()?;
        frame["error"].is_object().then_some(frame)
    }

    /// The text of a stream that broke between two events: an error frame, and then the end of the body without the
    /// terminator of the stream.
    ///
    /// # Panics
    /// If it is anything else.
    #[must_use]
    pub fn broken_stream(&self) -> String {
        let text = self.text();
        assert!(!self.aborted, "the connection broke: {text:?}");
        assert!(self.error_frame().is_some(), "no error frame at the end: {text:?}");
        assert!(!TERMINATORS.iter().any(|end| text.contains(end)), "a truncated response ended as complete: {text:?}");
        text
    }

    /// True if the response came to its own end: neither cut off, nor ended by an error frame.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        !self.aborted && self.error_frame().is_none()
    }
}
