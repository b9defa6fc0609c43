//! Counts per API key, by the key's name.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use modelrelay_protocol::message::TokenCounts;
use prometheus::{CounterVec, IntCounterVec, Registry};

use super::families::{counter_vec, float_counter_vec};
use super::labels::TokenKind;

/// The most names; admins may create ten thousand keys.
const MAX_NAMES: usize = 200;

/// The label of all further keys.
const OTHER: &str = "other";

pub(super) struct KeyFamilies {
    tokens: IntCounterVec,
    slot_seconds: CounterVec,
    /// Names that have series.
    names: Mutex<HashSet<String>>,
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
            names: Mutex::default(),
        }
    }

    /// Counts a request of the key with this name.
    pub(super) fn used(&self, name: &str, tokens: Option<TokenCounts>, slot_time: Duration) {
        let label = if self.has_room(name) { name } else { OTHER };
        for (kind, count) in tokens.iter().flat_map(TokenKind::counts).filter(|(_, count)| *count > 0) {
            self.tokens.with_label_values(&[label, kind.as_str()]).inc_by(count);
        }
        self.slot_seconds.with_label_values(&[label]).inc_by(slot_time.as_secs_f64());
    }

    fn has_room(&self, name: &str) -> bool {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.contains(name) || names.len() < MAX_NAMES && names.insert(name.to_owned())
    }
}
