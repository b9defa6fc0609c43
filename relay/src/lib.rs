//! The relay: one stable address for OpenAI and Anthropic clients, in front of workers that dial out.
//!
//! The path of a request: [`clients`] reads and routes it, [`provider`] passes it to the pure [`dispatch`] core, the
//! core chooses a worker, [`workers`] writes it there and pushes the response into its
//! [`response`](provider::response), from which the client's connection pulls.

pub mod admin;
pub mod admin_cli;
pub mod app;
pub mod clients;
pub mod dashboard;
pub mod dispatch;
pub mod http;
pub mod keys;
pub mod kubernetes;
pub mod login;
pub mod net;
pub mod provider;
pub mod settings;
pub mod state;
pub mod system;
pub mod telemetry;
pub mod workers;
