//! `AUDIT_LOG_FILE`: a JSON object per line.
//!
//! A thread of its own writes the file, so that a disk that hangs or is full delays nothing else. Events that it cannot
//! write are counted. The log, which contains the event too, reports the failure once until writing works again. A file
//! that was moved away, as logrotate does, is created again for the next event. It is readable by its owner alone: it
//! contains the actions of admins and their addresses.

use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use tracing::{error, info};

use super::AuditEvent;
use crate::telemetry::append_file::AppendFile;
use crate::telemetry::handoff::WriterThread;
use crate::telemetry::metrics::Metrics;

/// The most events that wait for the disk; more than an admin causes while it hangs.
const MAX_WAITING: usize = 4096;

#[derive(Debug)]
pub(super) struct AuditFile {
    /// `None` after the end.
    lines: Mutex<Option<SyncSender<Vec<u8>>>>,
    thread: WriterThread,
    metrics: Arc<Metrics>,
}

impl AuditFile {
    pub(super) fn open(path: &Path, metrics: Arc<Metrics>) -> io::Result<Self> {
        let writer = AppendFile::open(path.to_path_buf())?;
        let (lines, waiting) = sync_channel(MAX_WAITING);
        let counted = Arc::clone(&metrics);
        let thread = WriterThread::start("audit", move || write_all(writer, &waiting, &counted))?;
        Ok(Self { lines: Mutex::new(Some(lines)), thread, metrics })
    }

    pub(super) fn write(&self, event: &AuditEvent) {
        let Ok(mut line) = serde_json::to_vec(event) else { return self.metrics.audit_event_lost() };
        line.push(b'\n');
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = lines.as_ref().map(|lines| lines.try_send(line));
        if matches!(sent, None | Some(Err(TrySendError::Full(_) | TrySendError::Disconnected(_)))) {
            self.metrics.audit_event_lost();
        }
    }

    pub(super) fn close(&self) {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.thread.wait();
    }
}

fn write_all(mut writer: AppendFile, lines: &Receiver<Vec<u8>>, metrics: &Metrics) {
    let mut trouble: Option<String> = None;
    for line in lines {
        match writer.write(&line) {
            Ok(()) if trouble.is_some() => {
                trouble = None;
                info!(file = %writer.path().display(), "audit log is writable again");
            }
            Ok(()) => {}
            Err(error) => {
                metrics.audit_event_lost();
                let why = error.to_string();
                if trouble.as_ref() != Some(&why) {
                    let file = writer.path().display();
                    error!(%file, error = why, "cannot write to the audit log; events are in this log only");
                    trouble = Some(why);
                }
            }
        }
    }
}
