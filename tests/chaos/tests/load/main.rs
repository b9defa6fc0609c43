//! Overload, long load and mass reconnection. These tests need the machine for themselves: `.config/nextest.toml` runs
//! each alone.

mod overload;
mod soak;
mod thousand_workers;

/// The backends' program.
const BACKEND: &str = env!("CARGO_BIN_EXE_chaos-backend");
