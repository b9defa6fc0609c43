//! The Kubernetes API, as a relay in a cluster uses it.

pub mod api;
pub mod identity;
