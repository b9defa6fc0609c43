//! Worker and relay as programs before real inference servers: what clients get while models take turns.
//!
//! Answers are compared byte by byte with those of a server that nobody swaps, at temperature 0. What a swap costs here is
//! the start of a llama-server, some tenths of a second.

mod end;
mod figures;
mod interrupted;
mod ollama;
mod process;
mod rig;
mod router;
mod stream;
