//! The real relay and worker processes under faults, with a checked load running.
//!
//! Every request has a nonce of its own and an answer that is known beforehand ([`ask`]). What became of it is one of four
//! things ([`ledger`]): answered, byte for byte; failed for a reason that somebody stated; cancelled by us; or lost, which
//! no scenario permits. The backends, processes too, write down what they execute ([`executions`]), so that a request which
//! was executed again after its client had seen a first byte is found.

pub mod ask;
pub mod cage;
pub mod dice;
pub mod exchange;
pub mod executions;
pub mod form;
pub mod ledger;
pub mod load;
pub mod network;
pub mod site;
