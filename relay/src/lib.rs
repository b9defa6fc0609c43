//! The relay: one stable address for OpenAI and Anthropic clients, in front of workers that dial out.

pub mod cli;
pub mod config;
pub mod lockout;
pub mod shutdown;
pub mod telemetry;
