//! The Kubernetes operator: turns `Provider`s and `WorkerPool`s into relays and workers.

mod accept;
pub mod api;
pub mod apply;
pub mod cache;
pub mod certs;
pub mod cli;
pub mod commands;
pub mod conditions;
pub mod context;
pub mod crd;
pub mod defaults;
pub mod inject;
mod intake;
pub mod lead;
pub mod manifests;
pub mod metrics;
pub mod names;
pub mod probe;
pub mod provider;
pub mod relay_client;
pub mod relay_state;
pub mod relay_tls;
pub mod run;
pub mod telemetry;
mod words;
pub mod worker_pool;
