//! The operator's settings: flags, variables, and the file of defaults.

pub mod cli;
pub mod defaults;
