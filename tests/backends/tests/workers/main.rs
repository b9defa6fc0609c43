//! Worker and relay as programs in front of real inference servers: the clients' view while models alternate.
//!
//! Responses are compared byte by byte with those of a server without swaps, at temperature 0. A swap costs the start
//! of a llama-server here, some tenths of a second.

mod end;
mod figures;
mod interrupted;
mod ollama;
mod process;
mod rig;
mod router;
mod stream;
