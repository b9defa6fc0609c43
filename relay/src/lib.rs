//! The relay: one stable address for OpenAI and Anthropic clients, in front of workers that dial out.

pub mod dispatch;
