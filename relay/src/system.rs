//! The process and its machine: threads, files, time, random ids, signals.

pub mod blocking;
pub mod file_watch;
pub mod ids;
pub mod open_files;
pub mod shutdown;
pub mod unix_time;
