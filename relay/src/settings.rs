//! The settings: the command line, `relay.yaml`, and the types that both share with the rest of the relay.

pub mod admin_token;
pub mod cli;
pub mod commands;
pub mod config;
pub mod error;
pub mod watch;
pub mod worker_credential;
