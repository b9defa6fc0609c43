//! The routers of vLLM and SGLang, from their Python packages, with reduced logs like all systems here.

use std::net::SocketAddr;
use std::path::Path;

use super::{Setup, SystemError, free_port};
use crate::programs::Program;

type Started = Result<(SocketAddr, Vec<Program>), SystemError>;

pub(super) fn vllm(setup: &Setup, folder: &Path) -> Started {
    start(setup, "vllm-router", &[], "warning", folder)
}

pub(super) fn sglang(setup: &Setup, folder: &Path) -> Started {
    start(setup, "sglang-router", &["launch"], "warn", folder)
}

/// Both have the same flags. The policy is `round_robin`, because one backend leaves no choice.
fn start(setup: &Setup, name: &str, command: &[&str], quiet: &str, folder: &Path) -> Started {
    let bin = setup.routers.as_ref().ok_or_else(|| SystemError::Missing("no virtual environment given".into()))?;
    let binary = bin.join(name);
    if !binary.is_file() {
        return Err(SystemError::Missing(format!("{} does not exist", binary.display())));
    }
    let addr = free_port()?;
    let (port, metrics) = (addr.port().to_string(), free_port()?.port().to_string());
    let backend = format!("http://{}", setup.backend_addr);
    let flags = ["--host", "127.0.0.1", "--port", &port, "--worker-urls", &backend, "--policy", "round_robin"];
    let more = ["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics, "--log-level", quiet];
    let args: Vec<&str> = command.iter().copied().chain(flags).chain(more).collect();
    Ok((addr, vec![Program::start(name, &binary, &args, &[], folder)?]))
}

/// The version in the name of the folder that pip wrote next to the package.
pub(super) fn version(setup: &Setup, package: &str) -> String {
    let Some(lib) = setup.routers.as_ref().and_then(|bin| bin.parent()).map(|home| home.join("lib")) else {
        return String::new();
    };
    let versions = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let packages = versions.filter_map(|python| std::fs::read_dir(python.path().join("site-packages")).ok());
    let names = packages.flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let version = |name: String| {
        let rest = name.strip_prefix(package)?.strip_prefix('-')?;
        Some(rest.strip_suffix(".dist-info")?.to_owned())
    };
    names.into_iter().find_map(version).unwrap_or_default()
}
