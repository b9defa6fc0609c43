//! Measurements. So far one: what the multiplexer's policy is worth, against the ones that others have.

pub mod simulation;
