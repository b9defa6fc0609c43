//! The log of code that a test runs in its own process.

use std::cell::RefCell;
use std::io;
use std::sync::Once;

use serde_json::Value;

thread_local! {
    /// One JSON object per line, after [`listen`] was called.
    static LOGGED: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

struct Writer;

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOGGED.with_borrow_mut(|logged| logged.as_mut().map_or(Ok(bytes.len()), |logged| logged.write(bytes)))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the log of this thread for [`logged`]: with `#[tokio::test]`, the log of the whole test.
///
/// One subscriber is used for all threads: with one for each, a thread loses lines whose call sites were first reached
/// by threads without a subscriber.
///
/// # Panics
/// If other code subscribes to this process's log.
pub fn listen() {
    static SUBSCRIBE: Once = Once::new();
    SUBSCRIBE.call_once(|| {
        let lines = tracing_subscriber::fmt().json().flatten_event(true).with_target(false).without_time();
        lines.with_writer(|| Writer).init();
    });
    LOGGED.set(Some(Vec::new()));
}

/// The lines of level INFO and above since the last call, such as `{"level":"INFO","message":"loading","model":"a"}`.
#[must_use]
pub fn logged() -> Vec<Value> {
    let bytes = LOGGED.replace(Some(Vec::new())).unwrap_or_default();
    bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}
