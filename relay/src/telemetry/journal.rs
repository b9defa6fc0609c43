//! The latest events for the dashboard: log lines at `info` and above, regardless of `LOG_LEVEL`, without those of
//! individual requests.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::system::unix_time::unix_millis;

/// The most entries that are kept.
const MAX_ENTRIES: usize = 500;
/// The most characters of a message or a field's value, so that an entry stays one line.
const MAX_CHARS: usize = 500;

/// The target of lines that belong to individual requests, which would displace all others.
pub const PER_REQUEST: &str = "modelrelay_relay::requests";

/// The latest events. A clone shares the same journal.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    last: u64,
    entries: VecDeque<JournalEntry>,
}

/// One event.
#[derive(Clone, Debug, Serialize)]
pub struct JournalEntry {
    /// The number of the event, from 1, without gaps.
    pub seq: u64,
    /// The time, Unix time in milliseconds.
    pub at: u64,
    /// `info`, `warn` or `error`.
    pub level: &'static str,
    /// The message.
    pub message: String,
    /// Its other fields.
    pub fields: Map<String, Value>,
}

impl Journal {
    /// Entries after the one with this number, oldest first; 0 for all that are kept.
    pub fn since(&self, seq: u64) -> Vec<JournalEntry> {
        self.lock().entries.iter().filter(|entry| entry.seq > seq).cloned().collect()
    }

    /// True if events of this kind are kept; evaluated once for each call site.
    pub fn keeps(metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
            && metadata.is_event()
            && metadata.target().starts_with("modelrelay_")
            && metadata.target() != PER_REQUEST
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut words = Words::default();
        event.record(&mut words);
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warn",
            _ => "info",
        };
        let mut entries = self.lock();
        entries.last += 1;
        let entry = JournalEntry {
            seq: entries.last,
            at: unix_millis(SystemTime::now()),
            level,
            message: words.message,
            fields: words.fields,
        };
        if entries.entries.len() == MAX_ENTRIES {
            entries.entries.pop_front();
        }
        entries.entries.push_back(entry);
    }
}

#[derive(Default)]
struct Words {
    message: String,
    fields: Map<String, Value>,
}

impl Words {
    fn take(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => {
                self.fields.insert(name.to_owned(), value);
            }
        }
    }
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = Shortened::default();
        // An error only means that the text is long enough.
        let _ = write!(text, "{value:?}");
        self.take(field, Value::String(text.text));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, Value::String(value.chars().take(MAX_CHARS).collect()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.take(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.take(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.take(field, value.into());
    }
}

#[derive(Default)]
struct Shortened {
    text: String,
    chars: usize,
}

impl fmt::Write for Shortened {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let before = self.text.len();
        self.text.extend(text.chars().take(MAX_CHARS - self.chars));
        self.chars += self.text[before..].chars().count();
        if self.chars < MAX_CHARS { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use tracing::{debug, info, warn};
    use tracing_subscriber::filter::filter_fn;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn journal_of(tell: impl FnOnce()) -> Journal {
        let journal = Journal::default();
        let layer = journal.clone().with_filter(filter_fn(Journal::keeps));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), tell);
        journal
    }

    #[test]
    fn entries_have_number_level_message_and_fields() {
        let journal = journal_of(|| {
            info!(provider = "local", models = 3_u64, "models updated");
            warn!(why = %"it is full", "a problem");
        });
        let entries = journal.since(0);
        let messages: Vec<_> = entries.iter().map(|entry| (entry.seq, entry.level, entry.message.as_str())).collect();
        assert_eq!(messages, [(1, "info", "models updated"), (2, "warn", "a problem")]);
        assert_eq!(entries[0].fields, *serde_json::json!({"provider": "local", "models": 3}).as_object().unwrap());
        assert_eq!(journal.since(1).len(), 1);
    }

    #[test]
    fn request_and_debug_events_are_left_out() {
        let journal = journal_of(|| {
            info!(target: PER_REQUEST, "response complete");
            info!(target: "hyper", "something");
            debug!("a detail");
        });
        assert_eq!(journal.since(0).len(), 0);
    }

    #[test]
    fn journal_keeps_newest_entries_and_truncates_long_fields() {
        let journal = journal_of(|| {
            for _ in 0..MAX_ENTRIES {
                info!(long = "ä".repeat(2 * MAX_CHARS), debug = ?"ä".repeat(2 * MAX_CHARS), "again");
            }
            info!("the last");
        });
        let entries = journal.since(0);
        assert_eq!((entries.len(), entries[0].seq), (MAX_ENTRIES, 2));
        let chars = |name: &str| entries[0].fields[name].as_str().unwrap().chars().count();
        assert_eq!((chars("long"), chars("debug")), (MAX_CHARS, MAX_CHARS));
        assert_eq!(entries[MAX_ENTRIES - 1].message, "the last");
    }
}
