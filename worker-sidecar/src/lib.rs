//! The worker: runs next to an inference server and dials out to the relays.
//!
//! Its one job is to offer a local backend's capacity to every relay that it can reach. A failure affects only its
//! request; a link ends only when its socket does. The slots, each with one model at a time, are in the crate
//! `modelrelay_multiplexer`.

pub mod app;
pub mod backend;
pub mod forward;
pub mod link;
pub mod metrics;
pub mod probe;
pub mod relays;
pub mod serving;
pub mod settings;
pub mod shutdown;
pub mod telemetry;
pub mod worker;
