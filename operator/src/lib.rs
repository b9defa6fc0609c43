//! The Kubernetes operator: turns `Provider`s and `WorkerPool`s into relays and workers.

pub mod app;
pub mod cluster;
pub mod context;
pub mod controllers;
pub mod crd;
pub mod manifests;
mod net;
mod plural;
pub mod relay_client;
pub mod relays;
pub mod resources;
pub mod settings;
pub mod spec;
pub mod telemetry;
pub mod webhook;
