//! Makes ModelRelay Kubernetes-native: `Provider` and `WorkerPool` become relays and workers.

pub mod apply;
pub mod cache;
pub mod conditions;
pub mod context;
pub mod crd;
pub mod defaults;
pub mod inject;
pub mod manifests;
pub mod metrics;
pub mod names;
pub mod relay_state;
