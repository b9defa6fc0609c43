//! Work that may take its time: files on a network mount, sums over ten thousand workers, long documents.

use tokio::task::JoinHandle;

/// Runs `work` where it keeps no thread from passing tokens on. Once begun it is finished, even if nobody waits for it.
#[cfg(not(feature = "simulation"))]
#[expect(clippy::disallowed_methods, reason = "the only place; its twin is for simulations")]
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(work)
}

/// Runs `work` as a task: when a thread of its own is done is not what a seed can decide.
#[cfg(feature = "simulation")]
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(async move { work() })
}
