//! Two hundred requests in flight while everything behind them is deleted, replaced, resized, re-keyed or reconfigured.
//!
//! The relays here are a Provider's and the backends a WorkerPool's, as users have them. Where the grace of all that ends
//! allows it no request fails; where a process is killed, only what every SDK retries, and what it had begun to answer.

mod backends;
mod operator;
mod outside;
mod pools;
mod relays;
mod settings;
mod stack;
