//! Checks of speed that work on a busy machine: the benchmark measures what it claims, and the number of instructions
//! of a request and of a token. No test here reads a clock.
//!
//! Tests under valgrind have long timeouts for themselves, but not with a benchmark in parallel: `.config/nextest.toml`
//! runs each alone.

mod benchmark;
mod instructions;
mod scale;

use std::{path::Path, process::Command};

/// Renders the measurements in a file as tables, as `make bench` does.
fn tables_of(json: &Path) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/bench_report.py");
    let output = Command::new("python3").arg(script).arg(json).output().expect("python3 is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("tables in UTF-8")
}
