//! The reports of the relay: its log, metrics and statistics, the dashboard's journal, and the audit log.

pub mod audit;
pub mod journal;
pub mod log;
pub mod metrics;
pub mod stats;
