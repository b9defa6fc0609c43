//! What requests leave for a thread that writes it, so that no request waits for a disk.

use std::io;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long the end of the process waits for a thread to write the rest.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// A value that requests change and a thread writes.
#[derive(Debug, Default)]
pub(super) struct Handoff<T> {
    /// Held for moments.
    state: Mutex<HandoffState<T>>,
    /// Notified when the idle thread has something to write, and at the end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HandoffState<T> {
    content: T,
    /// True if the content changed since the thread took a part of it.
    is_due: bool,
    /// True while the thread waits for the first change.
    is_idle: bool,
    is_closed: bool,
}

impl<T> Handoff<T> {
    /// Hands over changes of this content from now on.
    pub(super) fn new(content: T) -> Self {
        let state = HandoffState { content, is_due: false, is_idle: false, is_closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Makes a change that the thread has to write. Returns false after the end, or if `change` does, which must not
    /// have changed anything then.
    pub(super) fn change(&self, change: impl FnOnce(&mut T) -> bool) -> bool {
        let mut state = self.lock();
        if state.is_closed || !change(&mut state.content) {
            return false;
        }
        state.is_due = true;
        let is_idle = std::mem::take(&mut state.is_idle);
        drop(state);
        if is_idle {
            self.changed.notify_one();
        }
        true
    }

    /// Reads the content.
    pub(super) fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.lock().content)
    }

    /// Takes a part of the content now.
    pub(super) fn take<R>(&self, take: impl FnOnce(&mut T) -> R) -> R {
        take(&mut self.lock().content)
    }

    /// Waits for a change, then for further ones for this time, and takes a part of the content. Returns `None` after
    /// the end, when nothing has changed since the last call.
    pub(super) fn next<R>(&self, collect: Duration, take: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut state = self.lock();
        state.is_idle = true;
        let mut state = self
            .changed
            .wait_while(state, |state| !state.is_due && !state.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        state.is_idle = false;
        let collected = self.changed.wait_timeout_while(state, collect, |state| !state.is_closed);
        let (mut state, _) = collected.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut state.is_due).then(|| take(&mut state.content))
    }

    /// Lets the thread take a part of the content again, although nothing has changed; not after the end.
    pub(super) fn call_again(&self) {
        let mut state = self.lock();
        state.is_due |= !state.is_closed;
    }

    /// Ends it: changes until now are still taken.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, HandoffState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that ends when it has written everything.
#[derive(Debug)]
pub(super) struct WriterThread(Mutex<Receiver<()>>);

impl WriterThread {
    /// Starts it.
    pub(super) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (end, ended) = sync_channel(0);
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            work();
            drop(end);
        })?;
        Ok(Self(Mutex::new(ended)))
    }

    /// Waits for its end, for at most a second.
    pub(super) fn wait(&self) {
        // An error means that the thread ended, or that it takes too long.
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(CLOSE_PATIENCE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(handoff: &Handoff<Vec<u8>>, number: u8) -> bool {
        handoff.change(|numbers| {
            numbers.push(number);
            true
        })
    }

    #[test]
    fn refused_change_leaves_nothing_to_write() {
        let handoff = Handoff::default();
        assert!(!handoff.change(|_: &mut Vec<u8>| false));
        handoff.close();
        assert_eq!(handoff.next(Duration::ZERO, std::mem::take), None);
    }

    #[test]
    fn changes_before_end_are_taken() {
        let handoff = Handoff::default();
        assert!(add(&handoff, 1));
        handoff.close();
        assert!(!add(&handoff, 2));
        assert_eq!(handoff.next(Duration::from_secs(3600), std::mem::take), Some(vec![1]));
        assert_eq!(handoff.next(Duration::from_secs(3600), std::mem::take), None);
    }

    #[test]
    fn change_wakes_idle_thread() {
        let handoff = Handoff::default();
        thread::scope(|scope| {
            let reader = scope.spawn(|| handoff.next(Duration::ZERO, std::mem::take));
            while !handoff.lock().is_idle {
                thread::yield_now();
            }
            assert!(add(&handoff, 1));
            assert_eq!(reader.join().unwrap(), Some(vec![1]));
        });
    }
}
