//! The multiplexer: many models on one GPU, one of them resident at a time.
//!
//! The decisions are pure: the slot machine takes events with the time at which they happened and returns effects, the
//! policy is arithmetic over plain values, and neither knows tasks, sockets or clocks. So every race is a plain test,
//! random histories can be generated and replayed, and the simulator that compares policies runs the same code that
//! serves requests.
//!
//! - [`machine`] is one slot: the resident model, the waiting requests, and the next step.
//! - [`event`] and [`effect`] are its inputs and outputs; [`error`] lists why a request is not served.
//! - [`policy`] decides when a resident is unloaded and for which model: the quantum, the linger, the pick.
//! - [`estimate`] measures what the policy needs: swap costs, gaps between requests, concurrency.
//! - [`memory`] decides whether a model fits, before anything is unloaded for it.
//! - [`config`] holds the few settings that are not measured.
//!
//! The shell around it:
//!
//! - [`slots`] holds all slots of a worker; links, probes and the shutdown use only this.
//! - [`actor`] is one slot's task: it owns the machine, executes its effects, and hands out leases.
//! - [`board`] merges the state of all slots into the messages to relays.
//! - [`driver`] loads, unloads and probes backends: it executes the machine's effects.
//! - [`metrics`] holds the multiplexer's metrics.
//!
//! Two modules also serve the rest of the worker, which depends on this crate:
//!
//! - [`net`] opens connections: of the drivers, and of the worker to relays and to its backend.
//! - [`setting_error`] is the error for a setting that cannot be used.

pub mod actor;
pub mod board;
pub mod config;
pub mod driver;
pub mod effect;
pub mod error;
pub mod estimate;
pub mod event;
pub mod machine;
pub mod memory;
pub mod metrics;
pub mod net;
pub mod policy;
pub mod setting_error;
pub mod slots;

use std::sync::Arc;

/// A model's exact name, as in `worker.yaml`.
pub type Model = Arc<str>;
