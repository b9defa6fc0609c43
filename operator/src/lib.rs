//! Makes ModelRelay Kubernetes-native: `Provider` and `WorkerPool` become relays and workers.

pub mod certs;
pub mod crd;
pub mod defaults;
pub mod inject;
pub mod manifests;
pub mod names;
