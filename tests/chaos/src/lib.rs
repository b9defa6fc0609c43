//! The real relay and worker processes under faults and a verified load.
//!
//! Every request has a unique nonce and a response that is known beforehand ([`request`]). It has one of four results
//! ([`ledger`]): complete, byte for byte; failed for a stated reason; cancelled by the client; or lost, which no
//! scenario permits. The backends, also processes, record their executions ([`executions`]), so that a request that was
//! executed again after its client had received a first byte is detected.

pub mod cage;
pub mod dice;
pub mod exchange;
pub mod executions;
pub mod form;
pub mod ledger;
pub mod load;
pub mod network;
pub mod request;
pub mod site;
