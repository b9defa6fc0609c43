//! Lines between requests and the thread that writes them.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Complete lines that wait to be written, up to a number of bytes.
#[derive(Debug)]
pub(super) struct LineBuffer {
    /// Held to copy a line or to exchange a pointer.
    waiting: Mutex<PendingLines>,
    /// Notified when the reader is idle and a line arrives, and at the end.
    changed: Condvar,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct PendingLines {
    lines: Vec<u8>,
    /// True while the reader waits for the first line.
    is_idle: bool,
    is_closed: bool,
}

impl LineBuffer {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { waiting: Mutex::default(), changed: Condvar::new(), max_bytes }
    }

    /// Adds a line. Returns false if there is no room for it, or after the end.
    pub(super) fn push(&self, line: &[u8]) -> bool {
        let mut waiting = self.lock();
        if waiting.is_closed || waiting.lines.len() + line.len() > self.max_bytes {
            return false;
        }
        waiting.lines.extend_from_slice(line);
        let is_idle = std::mem::take(&mut waiting.is_idle);
        drop(waiting);
        if is_idle {
            self.changed.notify_one();
        }
        true
    }

    /// Waits for lines, then collects further ones for this time. Returns false after the end, when no line is left.
    pub(super) fn next_batch(&self, batch: &mut Vec<u8>, collect: Duration) -> bool {
        batch.clear();
        let mut waiting = self.lock();
        waiting.is_idle = true;
        let mut waiting = self
            .changed
            .wait_while(waiting, |waiting| waiting.lines.is_empty() && !waiting.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        waiting.is_idle = false;
        let collected = self.changed.wait_timeout_while(waiting, collect, |waiting| !waiting.is_closed);
        let (mut waiting, _) = collected.unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut waiting.lines, batch);
        !batch.is_empty()
    }

    /// Ends the buffer: lines that wait are still read.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, PendingLines> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_beyond_limit_is_refused() {
        let buffer = LineBuffer::new(8);
        assert!(buffer.push(b"one\n") && buffer.push(b"two\n") && !buffer.push(b"\n"));
        let mut batch = Vec::new();
        assert!(buffer.next_batch(&mut batch, Duration::ZERO));
        assert_eq!(batch, b"one\ntwo\n");
        assert!(buffer.push(b"three\n"));
    }

    #[test]
    fn lines_before_end_are_read() {
        let buffer = LineBuffer::new(100);
        let mut batch = Vec::new();
        assert!(buffer.push(b"one\n"));
        buffer.close();
        assert!(!buffer.push(b"two\n"));
        assert!(buffer.next_batch(&mut batch, Duration::from_secs(3600)));
        assert_eq!(batch, b"one\n");
        assert!(!buffer.next_batch(&mut batch, Duration::from_secs(3600)));
    }

    #[test]
    fn line_wakes_idle_reader() {
        let buffer = LineBuffer::new(100);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut batch = Vec::new();
                buffer.next_batch(&mut batch, Duration::ZERO).then_some(batch)
            });
            while !buffer.lock().is_idle {
                std::thread::yield_now();
            }
            assert!(buffer.push(b"one\n"));
            assert_eq!(reader.join().unwrap().as_deref(), Some(&b"one\n"[..]));
        });
    }
}
