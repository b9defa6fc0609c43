//! The request journal: one line of metadata per finished request, in `REQUEST_JOURNAL_FILE`.
//!
//! `make replay ARGS="--journal FILE"` replays it with other settings. It has no text of prompts and responses, no keys
//! and no addresses of clients. A request only appends its line to a buffer of limited size; a thread of its own writes
//! the file, so that a disk that hangs or is full delays no request. Lines that are lost are counted.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tracing::{error, info, warn};

use super::append_file::AppendFile;
use super::handoff::{Handoff, WriterThread};
use super::reports::Reports;
use crate::settings::config::RequestJournalFile;
use crate::settings::error::ConfigError;
use crate::telemetry::metrics::Metrics;

/// The most bytes of lines that wait for the disk: about 2,500 requests.
const MAX_WAITING_BYTES: usize = 1 << 20;

/// The time for which the writer collects further lines, so that a busy relay wakes it ten times a second.
const COLLECT: Duration = Duration::from_millis(100);

/// The most bytes of one write, unless a line is longer. Less than the smallest file.
const PIECE_BYTES: usize = 16 << 10;

/// One finished request, as it is written. Times are in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct RequestLine<'a> {
    /// The arrival of its last byte, Unix time.
    pub at_ms: u64,
    /// The provider.
    pub provider: &'a str,
    /// The backend's name of the model.
    pub model: &'a str,
    /// The kind of route, as in metrics.
    pub endpoint: &'static str,
    /// True if a stream was requested.
    pub stream: bool,
    /// The size of its body.
    pub body_bytes: u64,
    /// The pseudonym of its conversation, if one was recognized.
    pub conversation: Option<&'a str>,
    /// The worker of its last attempt.
    pub worker: Option<&'a str>,
    /// The decision that led there.
    pub decision: Option<&'static str>,
    /// The reason of a move.
    pub reason: Option<&'static str>,
    /// The time in the queue.
    pub queue_ms: u64,
    /// The time to the first byte of the response's body.
    pub ttft_ms: Option<u64>,
    /// The time to its end.
    pub duration_ms: u64,
    /// Tokens of the prompt, according to the backend, as the other two.
    pub input_tokens: Option<u64>,
    /// Those from the backend's cache.
    pub cached_tokens: Option<u64>,
    /// Tokens of the response.
    pub output_tokens: Option<u64>,
    /// The outcome, as in metrics.
    pub outcome: &'static str,
}

/// The request journal; without `REQUEST_JOURNAL_FILE`, nothing is recorded.
#[derive(Debug, Default)]
pub struct RequestJournal(Option<Recorder>);

#[derive(Debug)]
struct Recorder {
    /// Complete lines that wait to be written.
    lines: Arc<Handoff<Vec<u8>>>,
    thread: WriterThread,
    metrics: Arc<Metrics>,
    /// Limits the log lines about a full buffer.
    reports: Mutex<Reports>,
}

impl RequestJournal {
    /// Opens the file, if it is set.
    pub fn open(settings: Option<&RequestJournalFile>, metrics: &Arc<Metrics>) -> Result<Self, ConfigError> {
        let Some(RequestJournalFile { path, max_bytes }) = settings else { return Ok(Self(None)) };
        let recorder = Recorder::open(path, *max_bytes, Arc::clone(metrics)).map_err(|error| {
            let setting = "REQUEST_JOURNAL_FILE (--request-journal-file)";
            let allowed = format!("cannot write to the file: {error}");
            ConfigError::refused(setting, &path.display().to_string(), &allowed)
        })?;
        Ok(Self(Some(recorder)))
    }

    /// True if requests are recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Records a request. It never waits.
    pub fn record(&self, line: &RequestLine<'_>) {
        if let Some(recorder) = &self.0 {
            recorder.record(line);
        }
    }

    /// Waits, for at most a second, until the recorded lines are in the file. No further line is written after that.
    pub fn close(&self) {
        if let Some(recorder) = &self.0 {
            recorder.lines.close();
            recorder.thread.wait();
        }
    }
}

impl Recorder {
    fn open(path: &Path, max_bytes: u64, metrics: Arc<Metrics>) -> io::Result<Self> {
        let file = AppendFile::open_limited(path.to_path_buf(), max_bytes)?;
        let lines = Arc::new(Handoff::<Vec<u8>>::default());
        let mut writer = Writer { file, metrics: Arc::clone(&metrics), reports: Reports::default(), is_failing: false };
        let source = Arc::clone(&lines);
        let thread = WriterThread::start("requests", move || {
            let mut batch = Vec::new();
            while source.next(COLLECT, |lines| std::mem::swap(lines, &mut batch)).is_some() {
                writer.write(&batch);
                batch.clear();
            }
        })?;
        Ok(Self { lines, thread, metrics, reports: Mutex::default() })
    }

    fn record(&self, line: &RequestLine<'_>) {
        let text = serde_json::to_vec(line).map(|mut text| {
            text.push(b'\n');
            text
        });
        if text.is_ok_and(|text| self.lines.change(|lines| push(lines, &text))) {
            return;
        }
        self.metrics.journal_lines_lost(1);
        let report = self.reports.lock().unwrap_or_else(PoisonError::into_inner).note(1, Instant::now());
        if let Some(lines) = report {
            warn!(lines, "request journal is written too slowly; lines are lost");
        }
    }
}

/// Adds a line. Returns false if there is no room for it.
fn push(lines: &mut Vec<u8>, line: &[u8]) -> bool {
    let fits = lines.len() + line.len() <= MAX_WAITING_BYTES;
    if fits {
        lines.extend_from_slice(line);
    }
    fits
}

/// The thread's side.
struct Writer {
    file: AppendFile,
    metrics: Arc<Metrics>,
    reports: Reports,
    /// True if a failure was reported, and no line was written since.
    is_failing: bool,
}

impl Writer {
    fn write(&mut self, lines: &[u8]) {
        for piece in pieces(lines) {
            match self.file.write(piece) {
                Ok(()) if self.is_failing => {
                    self.is_failing = false;
                    info!(file = %self.file.path().display(), "request journal is writable again");
                }
                Ok(()) => {}
                Err(error) => {
                    let lost = piece.iter().filter(|byte| **byte == b'\n').count() as u64;
                    self.metrics.journal_lines_lost(lost);
                    if let Some(lines) = self.reports.note(lost, Instant::now()) {
                        self.is_failing = true;
                        let file = self.file.path().display();
                        error!(%file, %error, lines, "cannot write to the request journal; lines are lost");
                    }
                }
            }
        }
    }
}

/// Cuts complete lines into pieces of complete lines.
fn pieces(lines: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = lines;
    std::iter::from_fn(move || {
        let most = &rest[..rest.len().min(PIECE_BYTES)];
        let end = |bytes: &[u8]| bytes.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        let first = || rest.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
        let (piece, after) = rest.split_at(end(most).or_else(first)?);
        rest = after;
        Some(piece)
    })
}

#[cfg(test)]
mod tests;
