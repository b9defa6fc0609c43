//! The relay: one stable address for OpenAI and Anthropic clients, in front of workers that dial out.

pub mod cli;
pub mod config;
pub mod dispatch;
pub mod lockout;
pub mod metrics;
pub mod shutdown;
pub mod stats;
pub mod telemetry;
