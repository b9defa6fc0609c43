//! Counts per API key, by the key's name.

use std::time::Duration;

use modelrelay_protocol::message::TokenCounts;
use prometheus::{CounterVec, IntCounterVec, Registry};

use super::labels::{FirstValues, OTHER, TokenKind};
use super::register::{counter_vec, float_counter_vec};

/// The most names; admins may create ten thousand keys.
const MAX_NAMES: usize = 200;

pub(super) struct KeyFamilies {
    tokens: IntCounterVec,
    slot_seconds: CounterVec,
    names: FirstValues<String>,
}

impl KeyFamilies {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            tokens: counter_vec(
                registry,
                "key_tokens_total",
                "Tokens per API key, if the backend reports token counts.",
                &["key", "type"],
            ),
            slot_seconds: float_counter_vec(
                registry,
                "key_slot_seconds_total",
                "Time for which requests of an API key held slots of workers.",
                &["key"],
            ),
            names: FirstValues::new(MAX_NAMES),
        }
    }

    /// Counts a request of the key with this name.
    pub(super) fn used(&self, name: &str, tokens: Option<TokenCounts>, slot_time: Duration) {
        let label = if self.names.has_room(name) { name } else { OTHER };
        for (kind, count) in tokens.iter().flat_map(TokenKind::counts).filter(|(_, count)| *count > 0) {
            self.tokens.with_label_values(&[label, kind.as_str()]).inc_by(count);
        }
        self.slot_seconds.with_label_values(&[label]).inc_by(slot_time.as_secs_f64());
    }
}
