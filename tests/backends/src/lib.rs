//! What the tests of the multiplexer's drivers run against: real inference servers where they run without a GPU, and a
//! fake of those that need one.
//!
//! In `tests/drivers` the drivers are linked, unlike anything in the other black-box suites, because they are a library of
//! their own inside the worker. Everything else is a program: the servers, the supervisor that is `modelrelay-worker` itself,
//! and in `tests/workers` the whole worker with a relay before it.

pub mod cluster;
pub mod engines;
pub mod fake;
pub mod server;

use std::path::PathBuf;

/// The worker's program, which is also the supervisor: in `MODELRELAY_BIN_DIR`, else in the workspace's `target/debug`.
///
/// # Panics
/// When it was not built.
#[must_use]
pub fn worker_program() -> PathBuf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/debug");
    let folder = std::env::var_os("MODELRELAY_BIN_DIR").map_or_else(|| PathBuf::from(folder), PathBuf::from);
    let program = folder.join("modelrelay-worker");
    assert!(program.exists(), "{} is missing: run `cargo build --release --bins`", program.display());
    program
}

/// A file of the folder that `scripts/backends/build` prints, which `MODELRELAY_BACKENDS` names. Without it the test that
/// asks cannot run, and says so; under `CI=true` it fails.
#[must_use]
pub fn real(file: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("MODELRELAY_BACKENDS") else {
        modelrelay_harness::cannot_run(
            "MODELRELAY_BACKENDS does not name the folder that scripts/backends/build prints",
        );
        return None;
    };
    let file = PathBuf::from(folder).join(file);
    assert!(file.exists(), "{} is missing: run scripts/backends/build", file.display());
    Some(file)
}
