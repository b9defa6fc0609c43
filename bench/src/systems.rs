//! The compared systems: each is started by itself, in front of the same backend, and stopped after its turn.

mod modelrelay;
mod proxies;
mod rathole;
mod routers;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tempfile::TempDir;

pub use modelrelay::{How, SECRET, Stack, StackOptions};

use crate::load::{Load, Until};
use crate::programs::{Program, ProgramError};
use crate::usage::Usage;

/// The time from a system's start to its first right response.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// The system between client and backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// None.
    Direct,
    /// nginx, one worker.
    Nginx,
    /// haproxy, one thread.
    Haproxy,
    /// vLLM's router.
    VllmRouter,
    /// SGLang's router.
    SglangRouter,
    /// A bare tunnel, two programs.
    Rathole,
    /// ModelRelay's relay and worker.
    Modelrelay,
}

impl System {
    /// All systems, in the order of the table.
    pub const ALL: [Self; 7] = [
        Self::Direct,
        Self::Nginx,
        Self::Haproxy,
        Self::VllmRouter,
        Self::SglangRouter,
        Self::Rathole,
        Self::Modelrelay,
    ];

    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct (the backend itself)",
            Self::Nginx => "nginx, 1 worker, proxy_buffering off",
            Self::Haproxy => "haproxy, 1 thread, http-no-delay",
            Self::VllmRouter => "vllm-router",
            Self::SglangRouter => "sglang-router",
            Self::Rathole => "rathole, 2 programs, nodelay",
            Self::Modelrelay => "**modelrelay** (relay and worker)",
        }
    }
}

/// Whether a system logs each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logs {
    /// It does not.
    Off,
    /// As by default: lines of ModelRelay's default level, nginx's access log; in both cases into a file.
    Default,
}

/// The programs and paths from which a run starts systems.
#[derive(Debug)]
pub struct Setup {
    /// The backend.
    pub backend: Program,
    /// The address of the backend.
    pub backend_addr: SocketAddr,
    /// The folder of relay and worker.
    pub programs: PathBuf,
    /// The folder of the routers, if they are installed.
    pub routers: Option<PathBuf>,
    /// rathole, if it is installed.
    pub rathole: Option<PathBuf>,
}

/// The paths of programs that are not found on the path.
#[derive(Clone, Debug)]
pub struct Installed {
    /// The folder of relay and worker.
    pub programs: PathBuf,
    /// The folder of both routers.
    pub routers: Option<PathBuf>,
    /// The program rathole.
    pub rathole: Option<PathBuf>,
}

/// A system that responds.
#[derive(Debug)]
pub struct Running {
    /// Its address.
    pub addr: SocketAddr,
    /// Its programs; none for `direct`, whose only one is the backend.
    pub programs: Vec<Program>,
    _folder: TempDir,
}

/// Why a system is not measured.
#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    /// It is not installed.
    #[error("not installed: {0}")]
    Missing(String),
    /// It does not start.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// It starts, but its responses are wrong.
    #[error("no correct response within {READY_WITHIN:?}: {0}")]
    NotReady(String),
    /// The machine failed.
    #[error("cannot prepare the start: {0}")]
    Io(#[from] std::io::Error),
}

impl Setup {
    /// Starts the backend, which is this program.
    pub async fn new(installed: &Installed, folder: &Path) -> Result<Self, SystemError> {
        let mut backend = Program::start("backend", &std::env::current_exe()?, &["backend"], &[], folder)?;
        let addr = backend.printed("listening on http://").await?;
        let backend_addr = addr.parse().map_err(|_| backend.failed("printed no address"))?;
        let Installed { programs, routers, rathole } = installed.clone();
        Ok(Self { backend, backend_addr, programs, routers, rathole })
    }

    /// Starts a system, and waits for right responses.
    pub async fn start(&self, system: System, logs: Logs) -> Result<Running, SystemError> {
        let folder = tempfile::tempdir()?;
        let (addr, programs) = match system {
            System::Direct => (self.backend_addr, Vec::new()),
            System::Nginx => proxies::nginx(self.backend_addr, folder.path(), logs)?,
            System::Haproxy => proxies::haproxy(self.backend_addr, folder.path())?,
            System::VllmRouter => routers::vllm(self, folder.path())?,
            System::SglangRouter => routers::sglang(self, folder.path())?,
            System::Rathole => rathole::start(self, folder.path())?,
            System::Modelrelay => {
                let options = StackOptions { logs, ..StackOptions::default() };
                let stack = Stack::start(&self.programs, self.backend_addr, &options).await?;
                return Ok(stack.into());
            }
        };
        let mut running = Running { addr, programs, _folder: folder };
        ready(addr, &mut running.programs).await?;
        Ok(running)
    }

    /// The version that a system reports.
    pub fn version(&self, system: System) -> String {
        match system {
            System::Direct => String::new(),
            System::Nginx => proxies::version("nginx", "-v"),
            System::Haproxy => proxies::version("haproxy", "-v"),
            System::VllmRouter => routers::version(self, "vllm_router"),
            System::SglangRouter => routers::version(self, "sglang_router"),
            System::Rathole => {
                self.rathole.as_deref().map_or_else(String::new, |file| proxies::version_of(file, "--version"))
            }
            System::Modelrelay => env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

impl Running {
    /// The usage of all its programs so far.
    pub fn usage(&self) -> Result<Usage, ProgramError> {
        self.programs.iter().try_fold(Usage::default(), |sum, program| Ok(sum + program.usage()?))
    }

    /// Stops all programs.
    pub async fn stop(self) {
        for program in self.programs {
            program.stop().await;
        }
    }
}

/// Waits for right responses from `addr`.
async fn ready(addr: SocketAddr, programs: &mut [Program]) -> Result<(), SystemError> {
    answered(Load::new(addr, Until::Requests(1)), programs).await
}

/// Waits until all responses to this load are right.
async fn answered(load: Load, programs: &mut [Program]) -> Result<(), SystemError> {
    let begun = Instant::now();
    loop {
        let outcome = load.run().await;
        if outcome.wrong == 0 {
            return Ok(());
        }
        for program in programs.iter_mut() {
            program.check_running()?;
        }
        if begun.elapsed() > READY_WITHIN {
            return Err(SystemError::NotReady(outcome.first_fault.unwrap_or_default()));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A port that was free a moment ago, for programs that cannot choose one themselves.
pub fn free_port() -> std::io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// The path of a program on the path.
fn on_path(name: &str) -> Result<PathBuf, SystemError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian installs servers into folders that are only on root's path.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    let found = folders.map(|folder| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| SystemError::Missing(format!("{name} is not in PATH")))
}
