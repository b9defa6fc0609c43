//! The usage ledger: sums of requests, tokens and times per API key, model and day.
//!
//! It has no prompts, no responses and no addresses. A request adds to its row in memory when it ends. A thread of its
//! own appends what was added to `USAGE_FILE` within a second, so that no request waits for a disk. Sums that cannot be
//! written are kept and written later. Without a file, the ledger begins with the process.

mod day;
mod file;
mod sums;
mod table;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tracing::{error, info, warn};

use super::handoff::{Handoff, WriterThread};
use super::reports::Reports;
use crate::settings::config::UsageSettings;
use crate::settings::error::ConfigError;
use crate::telemetry::metrics::Metrics;
use file::{MIN_REWRITE_BYTES, UsageFile};

pub use day::Day;
pub use sums::{RequestCounts, UsageSums};
pub use table::{OTHER, RowKey, UsageFilter, UsageRow, UsageTable};

/// The time for which the thread collects sums, so that a crash loses less than a second.
const COLLECT: Duration = Duration::from_millis(500);

/// The time between two attempts while the file cannot be written.
const RETRY: Duration = Duration::from_secs(2);

/// The sums of one relay.
#[derive(Debug)]
pub struct UsageLedger {
    sums: Arc<Handoff<LedgerState>>,
    thread: Option<WriterThread>,
    /// The time from which on requests are included.
    since: SystemTime,
    /// The number of days that are kept, including the present one.
    days: u32,
    /// The last day with a request; only then have days expired.
    today: Mutex<Option<Day>>,
}

#[derive(Debug, Default)]
struct LedgerState {
    /// All rows.
    total: UsageTable,
    /// The part of them that the file lacks, if there is one.
    added: UsageTable,
    has_file: bool,
}

impl UsageLedger {
    /// A ledger in memory, which keeps this number of days.
    pub fn in_memory(days: u32) -> Self {
        Self { sums: Arc::default(), thread: None, since: SystemTime::now(), days, today: Mutex::default() }
    }

    /// Reads and opens the file, if there is one. A default path that cannot be used is reported in the log; one that
    /// was set is an error.
    pub fn open(settings: &UsageSettings, metrics: &Arc<Metrics>) -> Result<Self, ConfigError> {
        let in_memory = Self::in_memory(settings.days);
        let Some(path) = &settings.file else { return Ok(in_memory) };
        let first = Day::of(in_memory.since).before(settings.days.saturating_sub(1));
        let opened = UsageFile::open(path, first, MIN_REWRITE_BYTES).and_then(|(file, table)| {
            let since = table.first_day().map_or(in_memory.since, Day::start);
            let state = LedgerState { total: table.clone(), added: UsageTable::default(), has_file: true };
            let sums = Arc::new(Handoff::new(state));
            let writer = UsageWriter::new(file, Arc::clone(metrics), Day::of(in_memory.since));
            let source = Arc::clone(&sums);
            let thread = WriterThread::start("usage", move || writer.run(&source))?;
            Ok(Self { sums, thread: Some(thread), since, days: settings.days, today: Mutex::default() })
        });
        opened.or_else(|error| {
            let file = path.display();
            if settings.is_default_file {
                warn!(%file, %error, "cannot write to the usage file; usage is kept in memory only (USAGE_FILE sets another path)");
                return Ok(in_memory);
            }
            let allowed = format!("cannot write to the file: {error}");
            Err(ConfigError::refused("USAGE_FILE (--usage-file)", &file.to_string(), &allowed))
        })
    }

    /// Adds a request that ended at `now`. It never waits for a disk. `name` is that of the key.
    pub fn record(&self, key: RowKey, name: Option<&str>, sums: &UsageSums, now: SystemTime) {
        let day = Day::of(now);
        let is_new_day = self.today.lock().unwrap_or_else(PoisonError::into_inner).replace(day) != Some(day);
        let mut forgotten = None;
        self.sums.change(|state| {
            if is_new_day {
                state.total.expire(day.before(self.days.saturating_sub(1)));
            }
            if state.has_file {
                state.added.add(day, key.clone(), name, sums);
            }
            forgotten = state.total.add(day, key, name, sums);
            true
        });
        if let Some(day) = forgotten {
            warn!(%day, "the usage ledger is full; its oldest day was deleted");
        }
    }

    /// The present rows.
    pub fn table(&self) -> UsageTable {
        self.sums.read(|state| state.total.clone())
    }

    /// The tokens of a key's requests on the day of `now`, input and output together, with estimates.
    pub fn tokens_of(&self, key_id: &Arc<str>, now: SystemTime) -> u64 {
        self.sums.read(|state| state.total.tokens_of(Day::of(now), key_id))
    }

    /// The time from which on requests are included.
    pub fn since(&self) -> SystemTime {
        self.since
    }

    /// True if the sums are stored in a file.
    pub fn is_stored(&self) -> bool {
        self.thread.is_some()
    }

    /// Waits, for at most a second, until the sums are in the file. Nothing is written after that.
    pub fn close(&self) {
        if let Some(thread) = &self.thread {
            self.sums.close();
            thread.wait();
        }
    }
}

impl Drop for UsageLedger {
    /// Lets the thread end.
    fn drop(&mut self) {
        self.sums.close();
    }
}

/// The thread's side.
struct UsageWriter {
    file: UsageFile,
    metrics: Arc<Metrics>,
    /// Sums that the file lacks after a failure.
    unwritten: UsageTable,
    reports: Reports,
    /// True if a failure was reported, and nothing was written since.
    is_failing: bool,
    /// The day of the last attempt to write the file again, which deletes expired days.
    rewritten_on: Day,
}

impl UsageWriter {
    fn new(file: UsageFile, metrics: Arc<Metrics>, today: Day) -> Self {
        let unwritten = UsageTable::default();
        Self { file, metrics, unwritten, reports: Reports::default(), is_failing: false, rewritten_on: today }
    }

    fn run(mut self, sums: &Handoff<LedgerState>) {
        loop {
            let pause = if self.unwritten.is_empty() { COLLECT } else { RETRY };
            let Some(added) = sums.next(pause, |state| std::mem::take(&mut state.added)) else { break };
            self.unwritten.merge(&added);
            let today = Day::of(SystemTime::now());
            if self.write() && (self.file.is_grown() || today != self.rewritten_on) {
                self.rewritten_on = today;
                self.rewrite(sums);
            }
            if !self.unwritten.is_empty() {
                sums.call_again();
            }
        }
        if !self.unwritten.is_empty() {
            let (file, rows) = (self.file.path().display(), self.unwritten.len());
            error!(%file, rows, "sums are lost because the usage file cannot be written");
        }
    }

    /// Appends what the file lacks. Returns true on success.
    fn write(&mut self) -> bool {
        if let Err(error) = self.file.append(&self.unwritten) {
            self.failed(&error);
            return false;
        }
        self.unwritten = UsageTable::default();
        match self.file.sync() {
            Ok(()) if self.is_failing => {
                self.is_failing = false;
                info!(file = %self.file.path().display(), "usage file is writable again");
            }
            Ok(()) => {}
            Err(error) => self.failed(&error),
        }
        true
    }

    /// Writes the file again with one line per row. What was added meanwhile is then in it.
    fn rewrite(&mut self, sums: &Handoff<LedgerState>) {
        let (total, added) = sums.take(|state| (state.total.clone(), std::mem::take(&mut state.added)));
        if let Err(error) = self.file.rewrite(&total) {
            self.unwritten.merge(&added);
            self.failed(&error);
        }
    }

    fn failed(&mut self, error: &std::io::Error) {
        self.metrics.usage_write_failed();
        if let Some(attempts) = self.reports.note(1, Instant::now()) {
            self.is_failing = true;
            let file = self.file.path().display();
            error!(%file, %error, attempts, "cannot write to the usage file; sums are kept in memory until this is possible");
        }
    }
}

#[cfg(test)]
mod tests;
