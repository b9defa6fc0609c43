//! The multiplexer: many models on one GPU, one of them resident at a time.
//!
//! What decides is pure: the slot machine takes events with the time at which they happened and says what is to be done,
//! the policy is arithmetic over plain values, and neither knows of tasks, sockets or clocks. So every race is a plain test,
//! random histories can be made up and replayed, and the simulator that compares policies runs the very code that
//! serves.
//!
//! - [`machine`] is one slot: who is resident, who waits, what is to be done next.
//! - [`event`] and [`effect`] are all that goes in and comes out of it; [`error`] is why a request is not served.
//! - [`policy`] says when a resident is left and for which model: the quantum, the linger, the pick.
//! - [`estimate`] measures what the policy needs: what a swap costs, how soon the next request comes, how many come at once.
//! - [`memory`] says whether a model fits, before anything is unloaded for it.
//! - [`config`] has the few settings that are not measured.
//!
//! What acts on it:
//!
//! - [`slots`] is all slots of a worker, and what the rest of the worker talks to.
//! - [`actor`] is one slot's task: it owns the machine, carries out what that wants, and hands out leases.
//! - [`board`] is what relays are told, put together from all slots.
//! - [`driver`] is how a backend is loaded, unloaded and looked at: what the machine's effects do outside.
//! - [`metrics`] is what is counted.

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
pub mod policy;
pub mod slots;

use std::sync::Arc;

/// A model's exact name, as in `worker.yaml`.
pub type Model = Arc<str>;
