//! Two hundred requests in flight while everything behind them is deleted, replaced, resized, re-keyed or reconfigured.
//!
//! The relays belong to a Provider and the backends to a WorkerPool, as in production. If the grace periods allow it,
//! no request fails. If a process is killed, only requests that every SDK retries fail, and those with a partial
//! response.

mod backends;
mod certificates;
mod evictions;
mod moving;
mod operator;
pub(crate) mod outside;
mod pools;
mod relays;
mod settings;
pub(crate) mod stack;
mod zero;
