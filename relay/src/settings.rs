//! The settings: the command line, `relay.yaml`, and the types that both share with the rest of the relay.

pub mod admin_token;
pub mod commands;
pub mod error;
pub mod worker_credential;
