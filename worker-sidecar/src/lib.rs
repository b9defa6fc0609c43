//! The worker: sits beside an inference backend and dials out to the relays.

pub mod demo;
