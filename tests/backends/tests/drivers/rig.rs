//! For each driver: its backends, and the facts that the table needs about them.

use std::path::Path;
use std::sync::Arc;

use modelrelay_backends::cluster::{Cluster, Deployment};
use modelrelay_backends::engines;
use modelrelay_backends::fake::{Fake, Kind};
use modelrelay_backends::server::{Server, free_port, processes_with};
use modelrelay_backends::{real, worker_program};
use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::driver::Driver;
use modelrelay_multiplexer::driver::hooks::{HookedModel, Hooks};
use modelrelay_multiplexer::driver::kubernetes::{KubernetesScale, ScaledModel};
use modelrelay_multiplexer::driver::launch::{Launch, PORT};
use modelrelay_multiplexer::driver::llama_router::LlamaRouter;
use modelrelay_multiplexer::driver::ollama::Ollama;
use modelrelay_multiplexer::driver::process::{Process, ProcessModel};
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::driver::sglang::{SaverModel, Sglang};
use modelrelay_multiplexer::driver::static_url::StaticUrl;
use modelrelay_multiplexer::driver::vllm_sleep::{Level, SleeperModel, VllmSleep};
use tempfile::TempDir;
use url::Url;

/// The built fake of vLLM and SGLang.
pub(crate) const FAKE: &str = env!("CARGO_BIN_EXE_fake-engine");

/// A driver and its backends.
pub(crate) struct Rig {
    pub(crate) driver: Arc<dyn Driver>,
    /// Two models that can be loaded, one at a time.
    pub(crate) models: [Model; 2],
    /// The backend's names of these models.
    pub(crate) names: [&'static str; 2],
    /// A model that the driver knows, but whose backend serves another.
    pub(crate) wrong: Model,
    /// A model whose load takes long, or never ends.
    pub(crate) slow: Model,
    /// True if the driver knows for certain that a backend has ended: its own child, or by the result of a command.
    pub(crate) is_certain: bool,
    /// True if nothing is ever unloaded.
    pub(crate) stays: bool,
    /// Servers that the driver did not start.
    pub(crate) servers: Vec<Server>,
    /// A text in the command line of every process that the driver starts.
    pub(crate) mark: String,
    _folder: Marked,
    _cluster: Option<Cluster>,
}

impl Rig {
    fn new(driver: impl Driver + 'static, folder: TempDir) -> Self {
        Self {
            is_certain: driver.capabilities().owns_backends,
            driver: Arc::new(driver),
            models: [A.into(), B.into()],
            names: [A, B],
            wrong: WRONG.into(),
            slow: SLOW.into(),
            stays: false,
            servers: Vec::new(),
            mark: path(folder.path()),
            _folder: Marked(folder),
            _cluster: None,
        }
    }

    /// Kills the backends, as a crash would.
    pub(crate) async fn kill_backends(&mut self) {
        for server in &mut self.servers {
            server.kill().await;
        }
        for pid in processes_with(&self.mark) {
            let killed = tokio::process::Command::new("kill").arg("-KILL").arg(pid.to_string()).status().await;
            assert!(killed.is_ok(), "{pid} can be killed");
        }
    }
}

const A: &str = "tiny-a";
const B: &str = "tiny-b";
const WRONG: &str = "wrong";
const SLOW: &str = "slow";

pub(crate) fn folder() -> TempDir {
    tempfile::Builder::new().prefix("modelrelay-driver-").tempdir().expect("the folder can be created")
}

fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

pub(crate) fn on_port(port: u16) -> Url {
    format!("http://127.0.0.1:{port}").parse().expect("this is a URL")
}

fn expecting(id: &str, expect: &str) -> Served {
    Served { expect: expect.to_owned(), ..Served::new(id) }
}

async fn fake_server(kind: Kind, model: &str, defects: &[&str]) -> Server {
    let port = free_port();
    let fake = defects.iter().fold(Fake::new(FAKE, kind, model, &port.to_string()), |fake, defect| fake.with(defect));
    Server::start(&fake.command(), &[("RUST_LOG", "info".to_owned())], port).await
}

/// Starts the demo backend, whose model is `demo`.
async fn demo_server() -> Server {
    let port = free_port();
    let command =
        words(&[&path(&worker_program()), "demo", "--listen", &format!("127.0.0.1:{port}"), "--delay", "0ms"]);
    Server::start(&command, &[], port).await
}

pub(crate) async fn static_url() -> Option<Rig> {
    let never = fake_server(Kind::Vllm, SLOW, &["never-ready"]).await;
    let servers = vec![demo_server().await, demo_server().await, never];
    let url = |nth: usize| servers[nth].url.clone();
    let driver = StaticUrl::new([
        (expecting(A, "demo"), url(0)),
        (expecting(B, "demo"), url(1)),
        (Served::new(WRONG), url(0)),
        (Served::new(SLOW), url(2)),
    ]);
    Some(Rig { stays: true, names: ["demo", "demo"], servers, ..Rig::new(driver, folder()) })
}

/// A real llama-server per model.
pub(crate) async fn process() -> Option<Rig> {
    let (server, folder) = (real("bin/llama-server")?, folder());
    let model = |id: &str, file: &str, expect: &str| {
        // Its own file, whose path identifies the process.
        let weights = folder.path().join(format!("{id}.gguf"));
        std::os::unix::fs::symlink(real(&format!("models/{file}.gguf"))?, &weights).expect("a link can be made");
        let (server, weights) = (path(&server), path(&weights));
        let args = [&server, "-m", &weights, "--alias", file, "-np", "1", "-c", "512", "--no-warmup", "--port", PORT];
        let launch = Launch { command: words(&args), ..Launch::default() };
        Some(ProcessModel { served: expecting(id, expect), launch, url: None })
    };
    let slow = Launch { command: words(&["tail", "-f", "/dev/null", &path(folder.path())]), ..Launch::default() };
    let slow = ProcessModel { served: Served::new(SLOW), launch: slow, url: None };
    let models = vec![model(A, A, A)?, model(B, B, B)?, model(WRONG, A, WRONG)?, slow];
    Some(Rig::new(Process::new(models, worker_program()), folder))
}

/// One real llama-server in router mode.
pub(crate) async fn llama_router() -> Option<Rig> {
    let folder = folder();
    // In the command lines of the router's children, but not in its own.
    let mark = path(&folder.path().join("weights-"));
    engines::weights(folder.path(), "weights-", &[A, B])?;
    let section = |id: &str| format!("[{id}]\nmodel = {mark}{id}.gguf\nctx-size = 512\n");
    // A model whose file is missing: the router starts a process for it, which then exits.
    let broken = "[broken]\nmodel = /nowhere/model.gguf\n";
    let server = engines::llama_router(folder.path(), &(section(A) + &section(B) + broken)).await?;
    let driver = LlamaRouter::new(server.url.clone(), vec![A.into(), B.into(), WRONG.into(), "broken".into()]);
    Some(Rig { slow: A.into(), mark, servers: vec![server], ..Rig::new(driver, folder) })
}

/// One real Ollama with two models.
pub(crate) async fn ollama() -> Option<Rig> {
    let folder = folder();
    let server = engines::ollama(folder.path(), &[A, B]).await?;
    let driver = Ollama::new(server.url.clone(), vec![A.into(), B.into(), WRONG.into()]);
    Some(Rig { slow: A.into(), servers: vec![server], ..Rig::new(driver, folder) })
}

struct Engine {
    served: Served,
    url: Url,
    launch: Option<Launch>,
}

/// Servers of one kind, started by the driver.
fn launched_servers(kind: Kind, folder: &TempDir, more: &[&str]) -> Vec<Engine> {
    let engine = |id: &str, model: &str, defects: &[&str]| {
        let url = on_port(free_port());
        let fake = Fake::new(FAKE, kind, model, PORT).with(&path(folder.path()));
        let fake = defects.iter().chain(more).fold(fake, |fake, defect| fake.with(defect));
        Engine { served: Served::new(id), url, launch: Some(Launch { command: fake.command(), ..Launch::default() }) }
    };
    vec![engine(A, A, &[]), engine(B, B, &[]), engine(WRONG, A, &[]), engine(SLOW, SLOW, &["never-ready"])]
}

/// Like [`launched_servers`], but started externally.
async fn external_servers(kind: Kind, more: &[&str]) -> (Vec<Engine>, Vec<Server>) {
    let (mut engines, mut servers) = (Vec::new(), Vec::new());
    for (id, model, defects) in [(A, A, &[][..]), (B, B, &[]), (WRONG, A, &[]), (SLOW, SLOW, &["never-ready"])] {
        let server = fake_server(kind, model, &[defects, more].concat()).await;
        engines.push(Engine { served: Served::new(id), url: server.url.clone(), launch: None });
        servers.push(server);
    }
    (engines, servers)
}

fn vllm(engines: Vec<Engine>, level: Level) -> VllmSleep {
    let models = engines.into_iter().map(|Engine { served, url, launch }| SleeperModel { served, url, launch });
    VllmSleep::new(models, level, worker_program())
}

fn sglang(engines: Vec<Engine>, reload_from: Option<&str>) -> Sglang {
    let reload_from = reload_from.map(str::to_owned);
    let model = |Engine { served, url, launch }| SaverModel { served, url, launch, reload_from: reload_from.clone() };
    Sglang::new(engines.into_iter().map(model), worker_program())
}

pub(crate) async fn vllm_started_by_us() -> Option<Rig> {
    let folder = folder();
    Some(Rig::new(vllm(launched_servers(Kind::Vllm, &folder, &[]), Level::One), folder))
}

pub(crate) async fn vllm_at_level_two() -> Option<Rig> {
    let folder = folder();
    Some(Rig::new(vllm(launched_servers(Kind::Vllm, &folder, &[]), Level::Two), folder))
}

pub(crate) async fn vllm_started_by_others() -> Option<Rig> {
    let (engines, servers) = external_servers(Kind::Vllm, &[]).await;
    Some(Rig { servers, ..Rig::new(vllm(engines, Level::One), folder()) })
}

/// Without a backup of the weights: they are read from disk at each wake.
pub(crate) async fn sglang_started_by_us() -> Option<Rig> {
    let folder = folder();
    Some(Rig::new(sglang(launched_servers(Kind::Sglang, &folder, &["no-backup"]), Some("/weights")), folder))
}

pub(crate) async fn sglang_started_by_others() -> Option<Rig> {
    let (engines, servers) = external_servers(Kind::Sglang, &[]).await;
    Some(Rig { servers, ..Rig::new(sglang(engines, None), folder()) })
}

/// Shell commands that start and kill a server in the background.
pub(crate) async fn hooks() -> Option<Rig> {
    let folder = folder();
    let model = |id: &str, model: &str, defects: &[&str]| {
        let port = free_port();
        let fake = Fake::new(FAKE, Kind::Vllm, model, &port.to_string()).with(&path(folder.path()));
        let fake = defects.iter().fold(fake, |fake, defect| fake.with(defect)).command().join(" ");
        let pid = path(&folder.path().join(format!("{id}.pid")));
        let shell = |script: String| words(&["sh", "-c", &script]);
        HookedModel {
            served: Served::new(id),
            url: on_port(port),
            load: shell(format!("{fake} > /dev/null 2>&1 & echo $! > {pid}")),
            evict: shell(format!("kill -KILL $(cat {pid}) 2> /dev/null; rm -f {pid}")),
            alive: Some(shell(format!("kill -0 $(cat {pid})"))),
        }
    };
    let models = [model(A, A, &[]), model(B, B, &[]), model(WRONG, A, &[]), model(SLOW, SLOW, &["never-ready"])];
    let driver = Hooks::new(models, worker_program());
    Some(Rig { is_certain: true, ..Rig::new(driver, folder) })
}

/// A Deployment per model, in a cluster whose Pods are processes of this machine.
pub(crate) async fn kubernetes() -> Option<Rig> {
    let folder = folder();
    let deployment = |model: &str, defects: &[&str]| {
        let port = free_port();
        let fake = Fake::new(FAKE, Kind::Vllm, model, &port.to_string()).with(&path(folder.path()));
        Deployment::new(defects.iter().fold(fake, |fake, defect| fake.with(defect)).command(), port)
    };
    let deployments = vec![
        (A, deployment(A, &[])),
        (B, deployment(B, &[])),
        (WRONG, deployment(A, &[])),
        (SLOW, deployment(SLOW, &["never-ready"])),
    ];
    let cluster = Cluster::start(deployments).await;
    let models =
        [A, B, WRONG, SLOW].map(|id| ScaledModel { served: Served::new(id), deployment: id.to_owned(), url: None });
    let driver = KubernetesScale::new(cluster.access(), models, modelrelay_harness::TEST_TIMEOUT);
    Some(Rig { _cluster: Some(cluster), ..Rig::new(driver, folder) })
}

/// A folder whose path is in the command line of processes.
struct Marked(TempDir);

impl Drop for Marked {
    /// Kills processes that a command of the hooks left behind, which have no other owner.
    fn drop(&mut self) {
        for pid in processes_with(&path(self.0.path())) {
            let _ = std::process::Command::new("kill").arg("-KILL").arg(pid.to_string()).status();
        }
    }
}
