//! What can be said of speed on a machine that is busy with something else: that the benchmark measures what it says, and how
//! many instructions a request and a token take. No test here looks at a clock.
//!
//! What valgrind slows down has patience for itself, not for a benchmark next to it: `.config/nextest.toml` runs each alone.

mod benchmark;
mod instructions;
mod scale;
