//! Behaviours of a slot, as short scenarios. A number before a test is the requirement's, a letter the race's, in the
//! multiplexer's specification.

mod cancel;
mod config;
mod crash;
mod demand;
mod eta;
mod harness;
mod history;
mod lease;
mod orders;
mod policy;
mod races;
mod settle;
mod swap;
mod telling;
