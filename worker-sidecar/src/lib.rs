//! The worker: runs next to an inference server and dials out to the relays.
//!
//! Its one job is to offer a local backend's capacity to every relay that it can reach. A failure affects only its
//! request; a link ends only when its socket does.

pub mod backend;
pub mod capacity;
pub mod catalogue;
pub mod check;
pub mod cli;
pub mod config;
pub mod connect;
pub mod convert;
pub mod demo;
pub mod forward;
pub mod install;
pub mod metrics;
pub mod multiplexer;
pub mod net;
pub mod probe;
pub mod program;
pub mod relay_link;
pub mod relays;
pub mod run;
pub mod serving;
pub mod setting_error;
pub mod shell;
pub mod shutdown;
pub mod telemetry;
pub mod worker;
