//! The request journal: one line of metadata per finished request, in `REQUEST_JOURNAL_FILE`.
//!
//! `make replay ARGS="--journal FILE"` replays it with other settings. It has no text of prompts and responses, no keys and
//! no addresses of clients. A request only appends its line to a buffer of limited size; a thread of its own writes the
//! file, so that a disk that hangs or is full delays no request. Lines that are lost are counted.

mod buffer;

use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use tracing::{error, info, warn};

use super::append_file::AppendFile;
use crate::settings::config::RequestJournalFile;
use crate::settings::error::ConfigError;
use crate::telemetry::metrics::Metrics;
use buffer::LineBuffer;

/// The most bytes of lines that wait for the disk: about 2,500 requests.
const MAX_WAITING_BYTES: usize = 1 << 20;

/// The time for which the writer collects further lines, so that a busy relay wakes it ten times a second.
const COLLECT: Duration = Duration::from_millis(100);

/// The most bytes of one write, unless a line is longer. Less than the smallest file.
const PIECE_BYTES: usize = 16 << 10;

/// The time between two log lines about lost lines.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// How long the end of the process waits for the last lines.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

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
    buffer: Arc<LineBuffer>,
    /// Closed when the thread ends.
    ended: Mutex<Receiver<()>>,
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
            recorder.buffer.close();
            // An error means that the thread ended, or that it takes too long.
            let _ = recorder.ended.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(CLOSE_PATIENCE);
        }
    }
}

impl Recorder {
    fn open(path: &Path, max_bytes: u64, metrics: Arc<Metrics>) -> io::Result<Self> {
        let file = AppendFile::open_limited(path.to_path_buf(), max_bytes)?;
        let buffer = Arc::new(LineBuffer::new(MAX_WAITING_BYTES));
        let (end, ended) = sync_channel(0);
        let mut writer = Writer { file, metrics: Arc::clone(&metrics), reports: Reports::default(), is_failing: false };
        let source = Arc::clone(&buffer);
        thread::Builder::new().name("requests".to_owned()).spawn(move || {
            let mut lines = Vec::new();
            while source.next_batch(&mut lines, COLLECT) {
                writer.write(&lines);
            }
            drop(end);
        })?;
        Ok(Self { buffer, ended: Mutex::new(ended), metrics, reports: Mutex::default() })
    }

    fn record(&self, line: &RequestLine<'_>) {
        let text = serde_json::to_vec(line).map(|mut text| {
            text.push(b'\n');
            text
        });
        if text.is_ok_and(|text| self.buffer.push(&text)) {
            return;
        }
        self.metrics.journal_lines_lost(1);
        let report = self.reports.lock().unwrap_or_else(PoisonError::into_inner).note(1, Instant::now());
        if let Some(lines) = report {
            warn!(lines, "request journal is written too slowly; lines are lost");
        }
    }
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

/// Lost lines, and the time when they were last reported.
#[derive(Debug, Default)]
struct Reports {
    lost: u64,
    reported_at: Option<Instant>,
}

impl Reports {
    /// Records lost lines. If it is time for a report, returns the number of lines that are lost since the last one.
    fn note(&mut self, lines: u64, now: Instant) -> Option<u64> {
        self.lost += lines;
        let is_due = self.reported_at.is_none_or(|at| now.saturating_duration_since(at) >= REPORT_INTERVAL);
        is_due.then(|| {
            self.reported_at = Some(now);
            std::mem::take(&mut self.lost)
        })
    }
}

#[cfg(test)]
mod tests;
