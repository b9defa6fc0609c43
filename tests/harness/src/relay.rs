//! A relay under test: started on free ports in a folder of its own, called over HTTP, dialled by hand-played workers.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{ExitStatus, Output},
    sync::Arc,
};

use rustls::ClientConfig;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::{
    TEST_TIMEOUT,
    client::{Pending, Reply, Request, Response},
    poll_until,
    process::{Log, Process, Spawn, path_of},
    tls::Certificates,
    trace::Trace,
    usage::Usage,
    within,
    worker::{Dial, FakeWorker, slot},
};

/// The default worker secret of relays.
pub const WORKER_SECRET: &str = "worker-secret-of-the-tests";
/// The default admin token of relays.
pub const ADMIN_TOKEN: &str = "admin-token-of-the-tests";

/// The settings of a relay before its start.
#[derive(Debug, Clone)]
pub struct RelayBuilder {
    spawn: Spawn,
    files: Vec<(String, String)>,
    client: Option<Arc<ClientConfig>>,
}

impl RelayBuilder {
    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.spawn = self.spawn.env(name, value);
        self
    }

    /// Removes a variable: `WORKER_SECRET` and `MODELRELAY_ADMIN_TOKEN` are set unless a test removes them.
    #[must_use]
    pub fn without_env(mut self, name: &str) -> Self {
        self.spawn = self.spawn.without_env(name);
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: &str) -> Self {
        self.spawn = self.spawn.arg(arg);
        self
    }

    /// Runs it through another program that accepts a command line.
    #[must_use]
    pub fn under<const N: usize>(mut self, wrapper: [&str; N]) -> Self {
        self.spawn = self.spawn.under(wrapper);
        self
    }

    /// Records the system calls that `filter` (strace's `-e trace=`) names.
    #[must_use]
    pub fn traced(mut self, trace: &Trace, filter: &str) -> Self {
        self.spawn = trace.of(self.spawn, filter);
        self
    }

    /// Writes a file into the relay's working folder before it starts.
    #[must_use]
    pub fn file(mut self, name: &str, contents: impl Into<String>) -> Self {
        self.files.push((name.into(), contents.into()));
        self
    }

    /// Runs it with this `relay.yaml` (and without `WORKER_SECRET`, which belongs into the file).
    #[must_use]
    pub fn config(self, yaml: impl Into<String>) -> Self {
        self.file("relay.yaml", yaml).arg("--config").arg("relay.yaml").without_env("WORKER_SECRET")
    }

    /// Enables TLS on its listeners, with certificates that clients trust.
    #[must_use]
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.client = Some(certificates.client());
        self.file("tls.crt", certificates.certificate())
            .file("tls.key", certificates.key())
            .env("TLS_CERT_FILE", "tls.crt")
            .env("TLS_KEY_FILE", "tls.key")
    }

    /// Starts it and waits until `/livez` succeeds.
    pub async fn start(self) -> Relay {
        let dir = self.working_dir();
        Relay::start_in(dir, self.spawn, self.client).await
    }

    /// Starts it and waits for its end: for settings that it must reject.
    pub async fn start_and_exit(self) -> (ExitStatus, Log) {
        let dir = self.working_dir();
        let mut process = self.spawn.working_dir(dir.path()).start();
        let status = process.wait_exit().await;
        (status, process.log().clone())
    }

    fn working_dir(&self) -> TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, contents) in &self.files {
            write_file(dir.path(), name, contents);
        }
        dir
    }
}

/// A running relay. Dropping it kills it and removes its folder.
#[derive(Debug)]
pub struct Relay {
    process: Process,
    dir: TempDir,
    spawn: Spawn,
    addr: SocketAddr,
    client: Option<Arc<ClientConfig>>,
}

impl Relay {
    /// Builds a relay with a worker secret and an admin token, otherwise with its own defaults, on free ports.
    #[must_use]
    pub fn builder() -> RelayBuilder {
        let spawn = Spawn::program("modelrelay-relay")
            .env("LISTEN_ADDR", "127.0.0.1:0")
            .env("WORKER_SECRET", WORKER_SECRET)
            .env("MODELRELAY_ADMIN_TOKEN", ADMIN_TOKEN);
        RelayBuilder { spawn, files: Vec::new(), client: None }
    }

    /// Starts a relay with the defaults of [`Self::builder`].
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    async fn start_in(dir: TempDir, spawn: Spawn, client: Option<Arc<ClientConfig>>) -> Self {
        let process = spawn.clone().working_dir(dir.path()).start();
        let addr = listener(process.log(), "").await;
        let relay = Self { process, dir, spawn, addr, client };
        relay.wait_until_alive().await;
        relay
    }

    async fn wait_until_alive(&self) {
        self.eventually("/livez answers 200", || async { self.get("/livez").await.status == 200 }).await;
    }

    /// Ends it by SIGTERM and starts it again in the same folder, on a new port.
    pub async fn restart(mut self) -> Self {
        self.process.terminate().await;
        self.process.wait_exit().await;
        self.start_again().await
    }

    /// Kills it and starts it again in the same folder, on a new port.
    pub async fn restart_after_kill(mut self) -> Self {
        self.process.kill().await;
        self.process.wait_exit().await;
        self.start_again().await
    }

    async fn start_again(mut self) -> Self {
        self.process = self.spawn.clone().working_dir(self.dir.path()).start();
        self.addr = listener(self.process.log(), "").await;
        self.wait_until_alive().await;
        self
    }

    /// Makes clients trust only this authority from now on.
    pub fn trust(&mut self, certificates: &Certificates) {
        self.client = Some(certificates.client());
    }

    /// The address that workers dial, for `PROXY_URL`.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.client.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.addr)
    }

    /// The address for clients (and by default for workers).
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The admin listener's address, if `ADMIN_LISTEN_ADDR` opened one.
    pub async fn admin_addr(&self) -> SocketAddr {
        listener(self.log(), "admin").await
    }

    /// The worker listener's address, if `WORKER_LISTEN_ADDR` opened one.
    pub async fn worker_addr(&self) -> SocketAddr {
        listener(self.log(), "worker").await
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> &Log {
        self.process.log()
    }

    /// Its process, for signals or to await its end.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Its usage of the machine.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage::of(self.process.pid().expect("the relay runs"))
    }

    /// The value of a metric: the sum over the series whose line begins with `series`. A whole name ends with a space.
    ///
    /// # Panics
    /// If no series has that whole name: one without labels always exists.
    pub async fn metric(&self, series: &str) -> f64 {
        let metrics = self.admin("GET", "/metrics").await.with_status(200).text();
        let values = metrics.lines().filter(|line| line.starts_with(series));
        let values: Vec<f64> = values.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
        assert!(!values.is_empty() || !series.ends_with(' '), "there is no metric {series:?}");
        values.iter().sum()
    }

    /// Replaces a file of its working folder in one step, as an editor or a Secret mount does.
    pub fn replace_file(&self, name: &str, contents: &str) {
        let scratch = format!("{name}.new");
        write_file(self.dir.path(), &scratch, contents);
        std::fs::rename(self.dir.path().join(scratch), self.dir.path().join(name)).expect("a file can be renamed");
    }

    /// The path of a file in its working folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Reads a file of its working folder.
    #[must_use]
    pub fn read_file(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name))
            .unwrap_or_else(|error| panic!("cannot read {name}: {error}"))
    }

    /// Sends a request and waits for the head of its response.
    pub async fn send(&self, request: Request) -> Response {
        request.over_tls(self.client.clone()).send(self.addr, self.log()).await
    }

    /// Sends a request and reads the whole response.
    pub async fn fetch(&self, request: Request) -> Reply {
        request.over_tls(self.client.clone()).fetch(self.addr, self.log()).await
    }

    /// Sends a request in the background.
    #[must_use]
    pub fn begin(&self, request: Request) -> Pending {
        request.over_tls(self.client.clone()).start(self.addr, self.log())
    }

    /// GETs a path.
    pub async fn get(&self, target: &str) -> Reply {
        self.fetch(Request::get(target)).await
    }

    /// Calls the admin API with the right token.
    pub async fn admin(&self, method: &str, target: &str) -> Reply {
        self.fetch(Request::new(method, target).bearer(ADMIN_TOKEN)).await
    }

    /// GETs JSON from the admin API.
    pub async fn admin_json(&self, target: &str) -> Value {
        self.admin("GET", target).await.with_status(200).json()
    }

    /// POSTs JSON to the admin API.
    pub async fn admin_post(&self, target: &str, body: &Value) -> Reply {
        self.fetch(Request::post(target, body).bearer(ADMIN_TOKEN)).await
    }

    /// Waits until `/admin/stats` reports `depth` queued requests of a provider.
    pub async fn wait_for_queue_depth(&self, provider: &str, depth: u64) {
        let what = format!("{depth} queued requests of provider {provider}");
        self.eventually(&what, || async {
            self.admin_json("/admin/stats").await["queue_depth"][provider].as_u64() == Some(depth)
        })
        .await;
    }

    /// Waits until `/admin/workers` lists `count` workers.
    pub async fn wait_for_workers(&self, count: usize) {
        self.eventually(&format!("{count} workers"), || async { self.workers().await.len() == count }).await;
    }

    /// Polls until this number of workers serve model `m` and no other.
    pub async fn wait_for_serving(&self, count: usize) {
        let serving = async || self.workers().await.iter().filter(|it| it["models"] == json!(["m"])).count() == count;
        self.eventually(&format!("{count} workers that serve"), serving).await;
    }

    /// Runs a command of the program against this relay.
    pub async fn run_command(&self, args: &[&str]) -> Output {
        let mut command = Command::new(path_of("modelrelay-relay"));
        command.args(args).env_clear().env("MODELRELAY_URL", self.url()).env("MODELRELAY_ADMIN_TOKEN", ADMIN_TOKEN);
        within("the command's end", self.log(), command.output()).await.expect("it starts")
    }

    /// Returns the output of a command that succeeds.
    pub async fn output_of(&self, args: &[&str]) -> String {
        let output = self.run_command(args).await;
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("the output is UTF-8")
    }

    /// The workers of `/admin/workers`.
    pub async fn workers(&self) -> Vec<Value> {
        let answer = self.admin_json("/admin/workers").await;
        answer["workers"].as_array().unwrap_or_else(|| panic!("no list of workers in {answer}")).clone()
    }

    /// Polls until `condition` holds: for state that the relay shows but does not announce.
    ///
    /// # Panics
    /// After [`TEST_TIMEOUT`].
    pub async fn eventually(&self, what: &str, condition: impl AsyncFnMut() -> bool) {
        poll_until(TEST_TIMEOUT, what, self.log(), condition).await;
    }

    /// Prepares the dial of a worker, with provider `local` and the right secret.
    #[must_use]
    pub fn dial(&self) -> Dial {
        Dial::new(self.addr, self.log()).secret(WORKER_SECRET).provider("local")
    }

    /// Connects a registered old worker, which supports only the original text messages.
    pub async fn worker(&self, models: &[&str], max_concurrent: u64) -> FakeWorker {
        let mut worker = self.dial().open().await;
        worker.register(models, max_concurrent).await;
        worker
    }

    /// Connects a registered worker with `core1` that granted this relay all its slots.
    pub async fn core1_worker(&self, models: &[&str], max_concurrent: u64) -> FakeWorker {
        let mut worker = self.dial().open().await;
        worker.register_core1(models, max_concurrent).await;
        worker.grant(max_concurrent).await;
        worker
    }

    /// Connects a registered worker with a multiplexer of one empty slot.
    pub async fn slots1_worker(&self, models: &[&str]) -> FakeWorker {
        let mut worker = self.dial().open().await;
        worker.register_slots1(models, &[slot("gpu0", "empty", models)]).await;
        worker
    }
}

impl Drop for Relay {
    /// Searches the files that it wrote into its folder, such as keys and the audit log, for secrets too.
    fn drop(&mut self) {
        for name in ["audit.jsonl", "modelrelay-keys.json", "modelrelay-usage.jsonl", "requests.jsonl", "usage.jsonl"] {
            if let Ok(text) = std::fs::read_to_string(self.dir.path().join(name))
                && !std::thread::panicking()
            {
                self.log().secrets().check(name, &text);
            }
        }
    }
}

/// The address in the line `NAME listening on http://ADDRESS` or `https://` (`NAME` empty: the clients' listener).
async fn listener(log: &Log, name: &str) -> SocketAddr {
    const PHRASE: &str = "listening on ";
    let others = ["admin", "worker", "workers"];
    let what = format!("a line with the address of the {name} listener");
    log.wait_for(&what, |line| {
        let (before, after) = line.split_once(PHRASE)?;
        let last_word = before.trim_end().rsplit([' ', '"']).next().unwrap_or_default();
        let named = if name.is_empty() { !others.contains(&last_word) } else { last_word.starts_with(name) };
        let (_, after) = after.split_once("://")?;
        let is_part = |char: &char| char.is_ascii_hexdigit() || ".:[]".contains(*char);
        let address: String = after.chars().take_while(is_part).collect();
        if named { address.parse().ok() } else { None }
    })
    .await
}

fn write_file(dir: &Path, name: &str, contents: &str) {
    let path = dir.join(name);
    std::fs::create_dir_all(path.parent().expect("a file of a folder has a parent"))
        .expect("the folder can be created");
    std::fs::write(&path, contents).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}
