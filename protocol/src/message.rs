//! The text messages of the worker socket: the twelve seed messages unchanged, and those that the capabilities add.
//!
//! Parsing has two steps, the `type` first, for two reasons: an unknown type may come from a newer peer and is skipped,
//! not an error; and an internally tagged enum would copy every body of an old worker once more.

mod class;
mod conversation;
mod redacted;
mod relay_to_worker;
mod worker_to_relay;

pub use class::RequestClass;
pub use conversation::ConversationKey;
pub use relay_to_worker::*;
pub use worker_to_relay::*;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::limits::MAX_CONTROL_BYTES;

/// The result of parsing a text message.
#[derive(Clone, Debug, PartialEq)]
pub enum Parsed<M> {
    /// A known message.
    Known(M),
    /// A message of an unknown type, to be logged and skipped.
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

/// Removes the value from serde_json's error about an unexpected value, because it may be a part of a prompt. Its other
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

/// Encodes a message for the wire.
pub fn encode<M: Serialize>(message: &M) -> String {
    // Messages are structs, strings, numbers and maps with string keys, which JSON can always represent.
    serde_json::to_string(message).expect("a message is always JSON")
}

/// The reason why a request was cancelled, as the seed messages name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelReason {
    /// The request exceeded its time limit.
    Timeout,
    /// The drain deadline passed.
    GracefulShutdown,
    /// For logs and metrics only: no worker is left to notify.
    WorkerDisconnect,
    /// For logs and metrics only: no worker is left to notify.
    RequeueExhausted,
    /// The process is ending.
    ServerShutdown,
    /// The client disconnected, read too slowly or exceeded a limit, or an admin cancelled the request. An unknown
    /// reason is read as this one: stopping is always safe.
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

/// The token counts that a backend reported. Absent, never zero, if it reported none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    /// Tokens read.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Tokens written.
    #[serde(default)]
    pub completion_tokens: u64,
    /// The sum of both.
    #[serde(default)]
    pub total_tokens: u64,
    /// Tokens read that were cached, if the backend reports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
}

/// No request has more tokens. A wrong count of a backend would use up limits and hide all other sums.
const MOST_TOKENS: u64 = 1 << 28;

impl TokenCounts {
    /// The counts, none of which is larger than any request's can be.
    #[must_use]
    pub fn plausible(self) -> Self {
        let Self { prompt_tokens, completion_tokens, total_tokens, cached_tokens } = self;
        Self {
            prompt_tokens: prompt_tokens.min(MOST_TOKENS),
            completion_tokens: completion_tokens.min(MOST_TOKENS),
            total_tokens: total_tokens.min(2 * MOST_TOKENS),
            cached_tokens: cached_tokens.map(|tokens| tokens.min(MOST_TOKENS)),
        }
    }

    /// The share of the tokens read that were cached, in permille; `None` if the backend does not report it.
    pub fn cached_permille(&self) -> Option<u16> {
        let cached = self.cached_tokens?.min(self.prompt_tokens);
        let share = (u128::from(cached) * 1000).checked_div(u128::from(self.prompt_tokens))?;
        u16::try_from(share).ok()
    }
}

/// Credit for one stream, in either direction: the number of further bytes that may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// The stream.
    pub stream: u32,
    /// The number of further payload bytes.
    pub bytes: u64,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

fn is_false(b: &bool) -> bool {
    !*b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn implausible_counts_are_cut() {
        let counts = |tokens| TokenCounts {
            prompt_tokens: tokens,
            completion_tokens: tokens,
            total_tokens: 2 * tokens,
            cached_tokens: Some(tokens),
        };
        assert_eq!(counts(7).plausible(), counts(7));
        assert_eq!(counts(u64::MAX / 2).plausible(), counts(MOST_TOKENS));
    }

    #[test]
    fn cached_share_is_bounded_and_optional() {
        let share = |prompt_tokens, cached_tokens| {
            TokenCounts { prompt_tokens, cached_tokens, ..TokenCounts::default() }.cached_permille()
        };
        assert_eq!([share(8, Some(6)), share(8, Some(0)), share(8, Some(9))], [Some(750), Some(0), Some(1000)]);
        assert_eq!([share(8, None), share(0, Some(1)), share(u64::MAX, Some(u64::MAX))], [None, None, Some(1000)]);
    }

    #[test]
    fn cancel_reason_has_same_name_in_metrics() {
        use CancelReason::{
            ClientDisconnect, GracefulShutdown, RequeueExhausted, ServerShutdown, Timeout, WorkerDisconnect,
        };
        for reason in [Timeout, GracefulShutdown, WorkerDisconnect, RequeueExhausted, ServerShutdown, ClientDisconnect]
        {
            assert_eq!(encode(&reason), format!("\"{}\"", reason.as_str()));
        }
    }

    #[test]
    fn parse_error_names_fault_but_no_content() {
        let error_of = |text: &str| RelayToWorker::parse(text).expect_err("malformed").to_string();
        let error =
            error_of(r#"{"type":"request","request_id":"r-1","endpoint_path":"/","stream":"planted, expected words"}"#);
        assert!(!error.contains("planted") && !error.contains("words"), "{error}");
        assert!(error.starts_with("malformed message: invalid type, expected u32 at line 1 column "), "{error}");
        assert!(error_of(r#"{"type":"request","request_id":"r-1"}"#).contains("missing field `endpoint_path`"));
    }
}
