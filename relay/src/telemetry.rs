//! The reports of the relay: its log, metrics and statistics, the dashboard's journal, the audit log, the request
//! journal, and the usage ledger.

mod append_file;
pub mod audit;
mod handoff;
pub mod journal;
pub mod log;
pub mod metrics;
mod reports;
pub mod request_journal;
pub mod stats;
pub mod usage;
