//! Memory for request bodies beyond the first [`STREAM_WINDOW_BYTES`] of each: windows that have grown, and bodies that
//! are kept to be sent again. All requests of a worker share it, so that a hanging backend cannot make the worker hold
//! more.
//!
//! [`STREAM_WINDOW_BYTES`]: modelrelay_protocol::limits::STREAM_WINDOW_BYTES

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The shared memory.
#[derive(Debug)]
pub struct SpareMemory {
    free: AtomicU64,
}

impl SpareMemory {
    /// Returns a memory of this many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { free: AtomicU64::new(bytes) })
    }

    /// Returns a share without bytes.
    pub(super) fn open(self: Arc<Self>) -> Spare {
        Spare { memory: self, bytes: 0 }
    }
}

/// The share of one request. Dropping it returns its bytes.
#[derive(Debug)]
pub(super) struct Spare {
    memory: Arc<SpareMemory>,
    bytes: u64,
}

impl Spare {
    /// Acquires `bytes` more. Returns false, and acquires nothing, if they do not fit.
    pub(super) fn grow(&mut self, bytes: u64) -> bool {
        let taken = self.memory.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| free.checked_sub(bytes));
        self.bytes += if taken.is_ok() { bytes } else { 0 };
        taken.is_ok()
    }

    /// Returns `bytes` to the shared memory.
    pub(super) fn shrink(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.memory.free.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}
