//! The text messages of the worker socket: the seeds' twelve exactly as they are, and what the capabilities add.
//!
//! Parsing is done in two steps, the `type` first, for two reasons: an unknown type is somebody's future, to be skipped
//! and not an error; and an internally tagged enum would copy every body of an old worker once more.

mod redacted;
mod relay_to_worker;
mod worker_to_relay;

pub use relay_to_worker::*;
pub use worker_to_relay::*;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::limits::MAX_CONTROL_BYTES;

/// What parsing a text message gave.
#[derive(Clone, Debug, PartialEq)]
pub enum Parsed<M> {
    /// A message we know.
    Known(M),
    /// A message of a type that we do not know, to be logged and skipped.
    Unknown(String),
}

/// A text message that breaks the protocol.
#[derive(Debug)]
pub struct MessageError(serde_json::Error);

impl MessageError {
    fn too_long() -> Self {
        Self(serde::de::Error::custom(format_args!("more than {MAX_CONTROL_BYTES} bytes, and no body")))
    }
}

impl std::fmt::Display for MessageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "malformed message: {}", without_values(&self.0.to_string()))
    }
}

/// What serde_json says of a value that is none of those expected, without the value: it may be a part of a prompt. Its other
/// errors name fields, lines and columns only.
fn without_values(error: &str) -> String {
    match error.find(", expected ").and_then(|_| error.rfind("expected ")) {
        Some(expected) => {
            let what = error.split([':', '`', '"']).next().unwrap_or_default();
            format!("{}, {}", what.trim_end(), &error[expected..])
        }
        None => error.to_owned(),
    }
}

impl std::error::Error for MessageError {}

impl From<serde_json::Error> for MessageError {
    fn from(error: serde_json::Error) -> Self {
        Self(error)
    }
}

#[derive(Deserialize)]
struct TypeOnly<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
}

fn type_of(text: &str) -> Result<Cow<'_, str>, MessageError> {
    Ok(serde_json::from_str::<TypeOnly>(text)?.kind)
}

fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, MessageError> {
    Ok(serde_json::from_str(text)?)
}

/// Writes a message as it goes on the wire.
pub fn encode<M: Serialize>(message: &M) -> String {
    // Our messages are structs, strings, numbers and maps with string keys: nothing that JSON cannot say.
    serde_json::to_string(message).expect("a message is always JSON")
}

/// Why a request was cancelled, as the seeds name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelReason {
    /// The request took longer than it may.
    Timeout,
    /// The drain deadline passed.
    GracefulShutdown,
    /// Stays in logs and metrics: no worker is left to be told.
    WorkerDisconnect,
    /// Stays in logs and metrics: no worker is left to be told.
    RequeueExhausted,
    /// The process is ending.
    ServerShutdown,
    /// The client went away, read too slowly, asked for too much, or an admin ended it. Also what an unknown reason is
    /// read as: stopping is always safe.
    #[serde(other)]
    ClientDisconnect,
}

impl CancelReason {
    /// The name on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::GracefulShutdown => "graceful_shutdown",
            Self::WorkerDisconnect => "worker_disconnect",
            Self::RequeueExhausted => "requeue_exhausted",
            Self::ServerShutdown => "server_shutdown",
            Self::ClientDisconnect => "client_disconnect",
        }
    }
}

/// Tokens that a backend said it used. Absent, never zero, where it said nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    /// Tokens read.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Tokens written.
    #[serde(default)]
    pub completion_tokens: u64,
    /// Both.
    #[serde(default)]
    pub total_tokens: u64,
    /// Tokens read that were cached, where the backend says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
}

/// Credit for one stream: so many more bytes may be sent. Either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// Which stream.
    pub stream: u32,
    /// How many payload bytes more.
    pub bytes: u64,
}

fn is_false(b: &bool) -> bool {
    !*b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_has_one_name_on_the_wire_and_in_metrics() {
        use CancelReason::{
            ClientDisconnect, GracefulShutdown, RequeueExhausted, ServerShutdown, Timeout, WorkerDisconnect,
        };
        for reason in [Timeout, GracefulShutdown, WorkerDisconnect, RequeueExhausted, ServerShutdown, ClientDisconnect]
        {
            assert_eq!(encode(&reason), format!("\"{}\"", reason.as_str()));
        }
    }

    #[test]
    fn an_error_says_what_is_wrong_and_never_what_was_there() {
        let told = |text: &str| RelayToWorker::parse(text).expect_err("malformed").to_string();
        let error =
            told(r#"{"type":"request","request_id":"r-1","endpoint_path":"/","stream":"planted, expected words"}"#);
        assert!(!error.contains("planted") && !error.contains("words"), "{error}");
        assert!(error.starts_with("malformed message: invalid type, expected u32 at line 1 column "), "{error}");
        assert!(told(r#"{"type":"request","request_id":"r-1"}"#).contains("missing field `endpoint_path`"));
    }
}
