//! Hostile and misbehaving peers: what they can achieve, and what their neighbours notice.
//!
//! Tests that measure the effect on neighbours, or the cost of a crowd, need the machine for themselves:
//! `.config/nextest.toml` runs them alone.

mod disconnects;
mod floods;
mod lying_worker;
mod memory;
mod neighbour;
mod slow_crowds;
mod smuggling;
mod unfinished;
mod websocket;
