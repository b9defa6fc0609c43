//! Measurements: how fast relay and worker are beside other proxies of one run, and what the multiplexer's policy is worth
//! against the ones that others have.
//!
//! The speed of two runs cannot be compared, not even on one machine. So every figure is one of a run in which each system
//! had its turn, several times over, in front of one [`backend`], asked by one client ([`load`]), and every goal is a ratio
//! within it. Nothing is counted that was not compared, byte for byte, with what had to come ([`content`]).

pub mod backend;
pub mod cli;
pub mod content;
pub mod crowd;
pub mod figures;
pub mod http;
pub mod load;
pub mod machine;
pub mod page;
pub mod played;
pub mod programs;
pub mod run;
pub mod samples;
pub mod scale;
pub mod scenarios;
pub mod simulation;
pub mod systems;
pub mod table;
pub mod usage;
pub mod verdicts;
