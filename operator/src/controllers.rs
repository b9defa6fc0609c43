//! The controllers, each with the loop that keeps the cluster as its resources state.

pub mod provider;
pub mod worker_pool;
