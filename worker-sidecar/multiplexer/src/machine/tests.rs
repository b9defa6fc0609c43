//! Behaviours of a slot, as short scenarios.

mod cancel;
mod config;
mod crash;
mod demand;
mod eta;
mod fair;
mod harness;
mod history;
mod lease;
mod orders;
mod policy;
mod races;
mod settle;
mod swap;
mod telling;
