//! Peers that mean harm, or behave as if they did: what they can reach, and what their neighbours notice.
//!
//! Tests that measure what neighbours notice, or what the crowd costs, want the machine for themselves: `.config/nextest.toml` runs them alone.

mod disconnects;
mod floods;
mod lying_worker;
mod memory;
mod neighbour;
mod slow_crowds;
mod smuggling;
mod unfinished;
mod websocket;
