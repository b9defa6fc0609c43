//! Makes ModelRelay Kubernetes-native: `Provider` and `WorkerPool` become relays and workers.

pub mod crd;
pub mod defaults;
pub mod manifests;
pub mod names;
