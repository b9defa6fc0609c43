//! The real relay and worker on a simulated network, under faults that a seed decides.
//!
//! A seed makes a [`plan`]: relays, workers, requests and faults. A [`world`] runs it with the code of the programs, on
//! turmoil's network and on a clock and randomness that the seed decides too ([`determinism`]), so that a failing seed fails
//! again. Everybody writes down what they saw ([`ledger`], [`log`]), and in the end that is [`check`]ed.

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
