//! The servers for the worker's tests: real inference servers, and a fake of vLLM and SGLang for their failures on a
//! GPU.
//!
//! `tests/drivers` and `tests/plain` link the drivers, unlike the other black-box suites, because the drivers form a
//! library inside the worker. Everything else is a program: the servers, the supervisor, which is `modelrelay-worker`
//! itself, and in `tests/plain` and `tests/workers` the whole worker with a relay in front of it.

pub mod cluster;
pub mod engines;
pub mod fake;
pub mod server;
pub mod tap;

use std::path::PathBuf;

/// Returns the worker's program, which is also the supervisor: in `MODELRELAY_BIN_DIR`, otherwise in the workspace's
/// `target/debug`.
///
/// # Panics
/// If it was not built.
#[must_use]
pub fn worker_program() -> PathBuf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/debug");
    let folder = std::env::var_os("MODELRELAY_BIN_DIR").map_or_else(|| PathBuf::from(folder), PathBuf::from);
    let program = folder.join("modelrelay-worker");
    assert!(program.exists(), "{} is missing: run `cargo build --workspace --bins`", program.display());
    program
}

/// Returns a file of the folder that `scripts/backends/build` or `scripts/backends/wheel` prints, which
/// `MODELRELAY_BACKENDS` names. Without it the test cannot run and reports so; under `CI=true` it fails.
#[must_use]
pub fn real(file: &str) -> Option<PathBuf> {
    file_of("MODELRELAY_BACKENDS", "scripts/backends/build", file)
}

/// Like [`real`], for the folder that `scripts/backends/vllm` prints, which `MODELRELAY_VLLM` names.
#[must_use]
pub fn vllm(file: &str) -> Option<PathBuf> {
    file_of("MODELRELAY_VLLM", "scripts/backends/vllm", file)
}

fn file_of(variable: &str, script: &str, file: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os(variable) else {
        modelrelay_harness::cannot_run(&format!("{variable} does not name the folder that {script} prints"));
        return None;
    };
    let file = PathBuf::from(folder).join(file);
    assert!(file.exists(), "{} is missing: run {script}", file.display());
    Some(file)
}
