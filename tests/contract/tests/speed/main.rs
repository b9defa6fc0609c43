//! Checks of speed that work on a busy machine: the benchmark measures what it claims, and the number of instructions
//! of a request and of a token. No test here reads a clock.
//!
//! Tests under valgrind have long timeouts for themselves, but not with a benchmark in parallel: `.config/nextest.toml`
//! runs each alone.

mod benchmark;
mod instructions;
mod scale;
