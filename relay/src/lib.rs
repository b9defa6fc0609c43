//! The relay: one stable address for OpenAI and Anthropic clients, in front of workers that dial out.
//!
//! The path of a request: [`http`] reads and routes it, [`provider`] passes it to the pure [`dispatch`] core, the core
//! chooses a worker, [`socket`] writes it there and pushes the response into its [`exchange`], from which the client's
//! connection pulls.

pub mod admin;
pub mod affinity;
pub mod app;
pub mod audit;
pub mod blocking;
pub mod budget;
pub mod cli;
pub mod cluster_api;
pub mod config;
pub mod config_watch;
pub mod ctl;
pub mod dashboard;
pub mod dispatch;
pub mod exchange;
pub mod file_watch;
pub mod http;
pub mod identity;
pub mod ids;
pub mod keys;
pub mod lockout;
pub mod login;
pub mod metrics;
pub mod net;
pub mod open_files;
pub mod operations;
pub mod program;
pub mod provider;
pub mod request;
pub mod routing;
pub mod settings;
pub mod shared;
pub mod shutdown;
pub mod socket;
pub mod state;
pub mod stats;
pub mod telemetry;
pub mod tls;
pub mod unfinished;
pub mod unix_time;
