//! The reports of the relay: its log, metrics and statistics, the dashboard's journal, the audit log, and the request journal.

mod append_file;
pub mod audit;
pub mod journal;
pub mod log;
pub mod metrics;
pub mod request_journal;
pub mod stats;
