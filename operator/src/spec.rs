//! Validated specs, and the plan of a secret's rotation: pure, without client and clock.

pub mod provider;
pub mod rotation;
pub mod sharing;
pub mod worker_pool;
pub mod workload;
