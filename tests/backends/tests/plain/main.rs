//! A plain worker, without the multiplexer, in front of a real engine: llama-server and vLLM.
//!
//! `steps` contains the checks that apply to every engine. llama-server starts within a second, so each step is a test
//! with its own server. vLLM takes minutes: its steps share the server that `scripts/backends/vllm run` starts, and are
//! one test.

mod death;
mod engine;
mod llama;
mod placement;
mod sleep;
mod steps;
mod vllm;
