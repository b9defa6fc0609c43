//! rathole: a bare tunnel of two programs, one of which dials the other as a worker dials its relay. It moves bytes
//! between connections and does not parse HTTP, so it shows the least possible cost of a dial-out system.

use std::net::SocketAddr;
use std::path::Path;

use super::{Setup, SystemError, free_port};
use crate::programs::Program;

/// With `nodelay` in every section that supports it.
pub(super) fn start(setup: &Setup, folder: &Path) -> Result<(SocketAddr, Vec<Program>), SystemError> {
    let binary = setup.rathole.as_ref().ok_or_else(|| SystemError::Missing("no program given".into()))?;
    if !binary.is_file() {
        return Err(SystemError::Missing(format!("{} does not exist", binary.display())));
    }
    let (control, addr) = (free_port()?, free_port()?);
    let backend = setup.backend_addr;
    let common = "default_token = \"bench\"\n";
    let transport =
        |side: &str| format!("[{side}.transport]\ntype = \"tcp\"\n[{side}.transport.tcp]\nnodelay = true\n");
    let server = format!(
        "[server]\nbind_addr = \"{control}\"\n{common}{}[server.services.backend]\nbind_addr = \"{addr}\"\nnodelay = true\n",
        transport("server")
    );
    let client = format!(
        "[client]\nremote_addr = \"{control}\"\n{common}{}[client.services.backend]\nlocal_addr = \"{backend}\"\nnodelay = true\n",
        transport("client")
    );
    let mut programs = Vec::new();
    for (side, text) in [("server", server), ("client", client)] {
        let config = folder.join(format!("{side}.toml"));
        std::fs::write(&config, text)?;
        let args = [format!("--{side}").into(), config.into_os_string()];
        let quiet = [("RUST_LOG", "warn".to_owned())];
        programs.push(Program::start(&format!("rathole-{side}"), binary, &args, &quiet, folder)?);
    }
    Ok((addr, programs))
}
