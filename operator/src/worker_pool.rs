//! WorkerPools.
pub mod census;
pub mod reasons;
pub mod render;
pub mod rollout;
pub mod scaling;
pub mod status;
pub mod writers;
