//! The program: its command line, the start and the end of a worker, and the subcommands.

pub mod check;
pub mod cli;
pub mod connect;
pub mod convert;
pub mod demo;
pub mod install;
pub mod program;
pub mod run;
pub mod shell;
