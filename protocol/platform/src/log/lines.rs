//! Log lines on their way to the thread that writes them.
//!
//! A plain buffer instead of the channel of `tracing-appender`: the thread takes all waiting lines at once and writes
//! them in one call. A request, which logs two lines, thus needs 2,000 instructions less in the relay (`scripts/test
//! speed`), and a burst fewer system calls.

use std::io::Write;
use std::mem;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::lock;

/// The maximum size of the waiting lines, in bytes. A line has a few hundred.
const MAX_WAITING: usize = 4 << 20;

/// The memory that a written batch leaves for the next one, in bytes.
const KEPT: usize = 64 << 10;

/// Lines that wait for the thread.
#[derive(Debug)]
pub(super) struct Lines {
    state: Mutex<LinesState>,
    changed: Condvar,
}

#[derive(Debug)]
struct LinesState {
    waiting: Vec<u8>,
    dropped: u64,
    /// True while the thread sleeps until there are lines.
    is_asleep: bool,
    thread: WriterThread,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriterThread {
    Running,
    /// It writes the waiting lines, then ends.
    Ending,
    /// None runs.
    Ended,
}

impl Lines {
    pub(super) const fn new() -> Self {
        let thread = WriterThread::Ended;
        let state = LinesState { waiting: Vec::new(), dropped: 0, is_asleep: false, thread };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Queues lines from now on, for a thread that runs [`Self::write_to`].
    pub(super) fn begin(&self) {
        lock(&self.state).thread = WriterThread::Running;
    }

    /// Queues a line, or drops and counts it if too many wait. Returns false if no thread would write it.
    pub(super) fn push(&self, line: &[u8]) -> bool {
        let mut state = lock(&self.state);
        if state.thread == WriterThread::Ended {
            return false;
        }
        if state.waiting.len() + line.len() > MAX_WAITING {
            state.dropped += 1;
            return true;
        }
        state.waiting.extend_from_slice(line);
        let wakes = mem::take(&mut state.is_asleep);
        drop(state);
        if wakes {
            self.changed.notify_all();
        }
        true
    }

    /// Writes lines until [`Self::end`] is called: the thread's work.
    pub(super) fn write_to(&self, mut output: impl Write) {
        let mut batch = Vec::new();
        let mut state = lock(&self.state);
        loop {
            if !state.waiting.is_empty() {
                mem::swap(&mut batch, &mut state.waiting);
                drop(state);
                let _ = output.write_all(&batch);
                batch.clear();
                batch.shrink_to(KEPT);
                state = lock(&self.state);
            } else if state.thread == WriterThread::Running {
                state.is_asleep = true;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                state.thread = WriterThread::Ended;
                return self.changed.notify_all();
            }
        }
    }

    /// Lets the thread write the waiting lines and end, and waits for that at most `timeout`.
    pub(super) fn end(&self, timeout: Duration) {
        let mut state = lock(&self.state);
        if state.thread == WriterThread::Running {
            state.thread = WriterThread::Ending;
            self.changed.notify_all();
        }
        drop(self.changed.wait_timeout_while(state, timeout, |state| state.thread != WriterThread::Ended));
    }

    /// Returns the number of dropped lines.
    pub(super) fn dropped(&self) -> u64 {
        lock(&self.state).dropped
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn lines_are_written_in_order_before_the_end() {
        let lines = Lines::new();
        assert!(!lines.push(b"early\n"), "no thread runs");
        lines.begin();
        let mut written = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| lines.write_to(&mut written));
            for number in 0..1000 {
                assert!(lines.push(format!("{number}\n").as_bytes()));
            }
            lines.end(TEST_TIMEOUT);
        });
        let expected: String = (0..1000).map(|number| format!("{number}\n")).collect();
        assert_eq!(String::from_utf8(written).unwrap(), expected);
        assert!(!lines.push(b"late\n"), "no thread runs");
        assert_eq!(lines.dropped(), 0);
    }

    #[test]
    fn lines_over_the_limit_are_dropped_and_counted() {
        let lines = Lines::new();
        lines.begin();
        let half = vec![b'x'; MAX_WAITING / 2];
        for _ in 0..3 {
            assert!(lines.push(&half));
        }
        assert!(lines.push(b"one more\n"));
        assert_eq!(lines.dropped(), 2);
        lines.end(Duration::ZERO);
        let mut written = Vec::new();
        lines.write_to(&mut written);
        assert_eq!(written.len(), MAX_WAITING);
    }
}
