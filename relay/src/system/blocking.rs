//! Work that may take long: files on a network mount, sums over ten thousand workers, long documents.

use tokio::task::JoinHandle;

/// Runs `work` on a thread that forwards no tokens. Once started, it runs to its end even if the handle is dropped.
#[cfg(not(feature = "simulation"))]
#[expect(clippy::disallowed_methods, reason = "the only place; its twin is for simulations")]
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(work)
}

/// Runs `work` as a task: a seed cannot decide when a thread of its own completes.
#[cfg(feature = "simulation")]
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(async move { work() })
}
