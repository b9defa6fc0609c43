//! Measurements: the speed of relay and worker compared with other proxies in the same run, the multiplexer's policy
//! compared with other policies, and placement compared with other routers' rules ([`replay`]).
//!
//! The speed of two runs cannot be compared, not even on one machine. So every figure belongs to a run in which each
//! system had several turns in front of one [`backend`], with requests of one client ([`load`]), and every goal is a
//! ratio within it. A response is counted only after it was compared, byte for byte, with the expected one
//! ([`content`]).

pub mod backend;
pub mod cli;
pub mod content;
pub mod crowd;
pub mod dispatch_core;
pub mod figures;
pub mod http;
pub mod load;
pub mod machine;
pub mod page;
pub mod played;
pub mod programs;
pub mod replay;
pub mod run;
pub mod samples;
pub mod scale;
pub mod scenarios;
pub mod simulation;
pub mod systems;
pub mod usage;
