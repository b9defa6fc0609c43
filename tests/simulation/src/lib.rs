//! The real relay and worker on a simulated network, under faults that depend on a seed.
//!
//! A seed determines a [`plan`]: relays, workers, requests and faults. A [`world`] runs it with the code of the
//! programs, on turmoil's network and on a clock and randomness that depend on the seed too ([`determinism`]), so that
//! a failing seed fails again. All hosts record their observations ([`ledger`], [`log`]), which are [`check`]ed at the
//! end.

pub mod answer;
pub mod backend;
pub mod check;
pub mod client;
pub mod determinism;
pub mod keys;
pub mod ledger;
pub mod log;
pub mod old_relay;
pub mod old_worker;
pub mod plan;
pub mod router;
pub mod secrets;
pub mod world;
