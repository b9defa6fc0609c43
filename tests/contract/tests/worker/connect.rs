//! `modelrelay-worker connect`: an interactive set-up, at a terminal and without one.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Output, Stdio};

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::process::{Spawn, on_path, path_of};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::tls::Certificates;
use modelrelay_harness::{cannot_run, within};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

/// A relay, a backend, and an empty folder.
struct Site {
    relay: Relay,
    backend: FakeBackend,
    folder: TempDir,
}

impl Site {
    async fn new() -> Self {
        let (relay, backend) = (Relay::start().await, FakeBackend::with_models(&["qwen"]).await);
        Self { relay, backend, folder: tempfile::tempdir().expect("a temporary directory") }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Returns the ports on which a backend is searched: that of the backend, and the relay's.
    fn ports(&self) -> String {
        format!("{},{}", self.relay.addr().port(), self.backend.addr().port())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(path_of("modelrelay-worker"));
        command.env_clear().current_dir(self.folder.path()).stdin(Stdio::null()).arg("connect").args(args);
        command
    }

    async fn run(&self, command: &mut Command) -> Output {
        within("the command's end", self.relay.log(), command.output()).await.expect("it starts")
    }

    /// Returns the output of a set-up that succeeds.
    async fn done(&self, command: &mut Command) -> String {
        let output = self.run(command).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Returns the last line of a set-up that fails and writes nothing.
    async fn refused(&self, command: &mut Command) -> String {
        let before = files(self.folder.path());
        let output = self.run(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && !stderr.contains(WORKER_SECRET), "{stderr}");
        assert_eq!(files(self.folder.path()), before, "{stderr}");
        let last = stderr.lines().last().unwrap_or_default();
        last.strip_prefix("modelrelay-worker: ").unwrap_or_else(|| panic!("{stderr:?}")).to_owned()
    }

    /// Returns the relay's view of the configured worker.
    async fn serves(&self, worker: Spawn) -> Value {
        let _worker = worker.env("PROBE_ADDR", "127.0.0.1:0").working_dir(self.folder.path()).start();
        self.relay.wait_for_workers(1).await;
        self.relay.workers().await.remove(0)
    }
}

fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    let read = |entry: std::fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).expect("a file"))
    };
    let mut files: Vec<_> = entries.map(read).collect();
    files.sort();
    files
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).expect("the file exists").permissions().mode() & 0o777
}

/// True if a terminal is available: util-linux's `script` creates one; other programs of that name have other flags.
fn has_terminal() -> bool {
    let has = cfg!(target_os = "linux") && on_path("script").is_some();
    if !has {
        cannot_run("a terminal to type into is made by the script of util-linux");
    }
    has
}

/// A user at a terminal.
struct Dialogue<'a> {
    site: &'a Site,
    child: Child,
    output: String,
    read: usize,
}

impl<'a> Dialogue<'a> {
    /// Runs a shell line, in which `$W` is the program.
    fn begin(site: &'a Site, line: &str) -> Self {
        let mut command = Command::new("script");
        command.args(["-q", "-e", "-c", line, "/dev/null"]).env_clear().current_dir(site.folder.path());
        command.env("W", path_of("modelrelay-worker")).env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        Self { site, child: command.spawn().expect("util-linux has `script`"), output: String::new(), read: 0 }
    }

    async fn read_some(&mut self) -> bool {
        let mut bytes = [0; 4096];
        let stdout = self.child.stdout.as_mut().expect("a pipe");
        let reading = within("more words", self.site.relay.log(), stdout.read(&mut bytes));
        let read = reading.await.expect("a pipe can be read");
        self.output.push_str(&String::from_utf8_lossy(&bytes[..read]));
        read > 0
    }

    /// Waits for a question.
    async fn expect_question(&mut self, part: &str) -> &mut Self {
        loop {
            if let Some(at) = self.output[self.read..].find(part) {
                self.read += at + part.len();
                return self;
            }
            assert!(self.read_some().await, "the program ended before {part:?}: {}", self.output);
        }
    }

    async fn answer(&mut self, text: &str) {
        self.child.stdin.as_mut().expect("a pipe").write_all(text.as_bytes()).await.expect("it listens");
    }

    /// Returns the exit code and everything that was on the screen.
    async fn end(mut self) -> (Option<i32>, String) {
        while self.read_some().await {}
        let ended = within("the end", self.site.relay.log(), self.child.wait()).await.expect("it ends");
        (ended.code(), std::mem::take(&mut self.output))
    }
}

#[tokio::test]
async fn terminal_answers_are_checked_and_wrong_ones_repeated() {
    if !has_terminal() {
        return;
    }
    let site = Site::new().await;
    let mut dialogue = Dialogue::begin(&site, &format!("$W connect --backend-ports {}", site.ports()));
    dialogue.expect_question("The relay's address [http://127.0.0.1:8080]: ").await.answer("nonsense\n").await;
    dialogue.expect_question("RELAY-URL: \"nonsense\" is not allowed").await;
    dialogue.expect_question("The relay's address").await.answer("http://127.0.0.1:1\n").await;
    dialogue.expect_question("cannot reach the relay at http://127.0.0.1:1").await;
    dialogue.expect_question("The relay's address").await.answer(&format!("{}\n", site.relay.url())).await;
    dialogue.expect_question("Worker secret of provider local").await.answer("planted-wrong-secret-9\n").await;
    dialogue.expect_question("the relay rejected the worker secret (401)").await;
    dialogue.expect_question("Worker secret of provider local").await.answer(&format!("{WORKER_SECRET}\n")).await;
    dialogue.expect_question("accepts this worker").await;
    dialogue.expect_question(&format!("port {}: a ModelRelay relay, not a backend", site.relay.addr().port())).await;
    dialogue.expect_question(&format!("1) {}  OpenAI-compatible: qwen", site.backend.url())).await;
    dialogue.expect_question("Backend to use").await.answer("2\n").await;
    dialogue.expect_question("no backend has number 2").await;
    dialogue.expect_question("Backend to use").await.answer("\n").await;
    dialogue.expect_question("concurrent requests [4]").await.answer("none\n").await;
    dialogue.expect_question("MAX_CONCURRENCY (--max-concurrency): \"none\" is not allowed").await;
    dialogue.expect_question("concurrent requests [4]").await.answer("3\n").await;
    dialogue.expect_question("Display name of this worker").await.answer("Grace's box\n").await;
    let (code, output) = dialogue.end().await;
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("modelrelay-worker --config worker.yaml"), "{output}");
    assert!(!output.contains(WORKER_SECRET) && !output.contains("planted-wrong-secret-9"), "{output}");
    assert_eq!((site.read("worker.secret"), mode(&site.path("worker.secret"))), (format!("{WORKER_SECRET}\n"), 0o600));
    assert!(!site.read("worker.yaml").contains(WORKER_SECRET));
    site.relay.log().wait_for_line("worker disconnected before registering").await;
    assert!(!site.relay.log().lines().iter().any(|line| line.contains("registration refused")));
    let worker = site.serves(Spawn::program("modelrelay-worker").arg("--config").arg("worker.yaml")).await;
    assert_eq!((worker["worker_name"].as_str(), worker["max_concurrent"].as_u64()), (Some("Grace's box"), Some(3)));
}

#[tokio::test]
async fn interrupt_at_hidden_prompt_restores_terminal() {
    if !has_terminal() {
        return;
    }
    let site = Site::new().await;
    let line = format!("trap : INT; $W connect {}; echo code $?; stty -a", site.relay.url());
    let mut dialogue = Dialogue::begin(&site, &line);
    dialogue.expect_question("not echoed").await.answer("\x03").await;
    let (_, output) = dialogue.end().await;
    assert!(output.contains("nothing was written") && output.contains("code 130"), "{output}");
    assert!(output.contains(" echo ") && !output.contains("-echo "), "{output}");
    assert!(files(site.folder.path()).is_empty());
}

#[tokio::test]
async fn terminal_overwrites_file_only_after_confirmation() {
    if !has_terminal() {
        return;
    }
    let site = Site::new().await;
    std::fs::write(site.path("worker.yaml"), "relay: http://older\n").unwrap();
    for (answer, code) in [("\n", 1), ("n\n", 1), ("y\n", 130)] {
        let mut dialogue = Dialogue::begin(&site, &format!("$W connect {}", site.relay.url()));
        dialogue.expect_question("worker.yaml already exists. Overwrite it? [y/N]").await.answer(answer).await;
        if code == 130 {
            dialogue.expect_question("Worker secret").await.answer("\x03").await;
        }
        assert_eq!(dialogue.end().await.0, Some(code), "{answer:?}");
        assert_eq!(
            site.read("worker.yaml"),
            "relay: http://older\n",
            "no file may be written before all answers are known"
        );
    }
}

#[tokio::test]
async fn confirmation_lists_every_file_to_be_replaced() {
    if !has_terminal() {
        return;
    }
    let site = Site::new().await;
    std::fs::write(site.path("worker.yaml"), "relay: http://older\n").unwrap();
    std::fs::write(site.path("worker.secret"), "older\n").unwrap();
    let mut dialogue = Dialogue::begin(&site, &format!("$W connect {}", site.relay.url()));
    dialogue
        .expect_question("worker.yaml and worker.secret already exist. Overwrite them? [y/N]")
        .await
        .answer("n\n")
        .await;
    assert_eq!(dialogue.end().await.0, Some(1));
}

#[tokio::test]
async fn replacing_existing_secret_file_requires_confirmation() {
    if !has_terminal() {
        return;
    }
    let site = Site::new().await;
    std::fs::write(site.path("worker.secret"), "older\n").unwrap();
    std::fs::write(site.path("mine"), "planted-wrong-secret-9\n").unwrap();
    let line = format!("$W connect {} --worker-secret-file mine --backend {}", site.relay.url(), site.backend.url());
    for (answer, code, kept) in [("n\n", 1, "older"), ("y\n", 0, WORKER_SECRET)] {
        let mut dialogue = Dialogue::begin(&site, &line);
        dialogue.expect_question("the relay rejected the worker secret (401)").await;
        dialogue.expect_question("Worker secret of provider local").await.answer(&format!("{WORKER_SECRET}\n")).await;
        dialogue.expect_question("worker.secret already exists. Overwrite it? [y/N]").await.answer(answer).await;
        if code == 0 {
            dialogue.expect_question("concurrent requests [4]").await.answer("\n").await;
            dialogue.expect_question("Display name of this worker").await.answer("\n").await;
        }
        let (ended, output) = dialogue.end().await;
        assert_eq!((ended, site.read("worker.secret").trim()), (Some(code), kept), "{output}");
    }
    assert_eq!(site.read("mine"), "planted-wrong-secret-9\n");
}

#[tokio::test]
async fn variables_overriding_answers_are_listed_for_unset() {
    if !has_terminal() {
        return;
    }
    let site = Site::new().await;
    std::fs::write(site.path("mine"), "planted-wrong-secret-9\n").unwrap();
    let given =
        "PROXY_URL=http://127.0.0.1:1 WORKER_SECRET_FILE=mine MAX_CONCURRENCY=none WORKER_NAME=w LOG_LEVEL=info";
    let mut dialogue = Dialogue::begin(&site, &format!("{given} $W connect --backend {}", site.backend.url()));
    dialogue.expect_question("The relay's address").await.answer(&format!("{}\n", site.relay.url())).await;
    dialogue.expect_question("Worker secret of provider local").await.answer(&format!("{WORKER_SECRET}\n")).await;
    dialogue.expect_question("concurrent requests [4]").await.answer("2\n").await;
    let (code, output) = dialogue.end().await;
    assert_eq!(code, Some(0), "{output}");
    let unset: Vec<&str> = output.lines().filter_map(|line| line.trim().strip_prefix("unset ")).collect();
    assert_eq!(unset, ["PROXY_URL WORKER_SECRET_FILE MAX_CONCURRENCY"], "{output}");
    assert!(output.find("unset PROXY_URL") < output.find("modelrelay-worker --config"), "{output}");
}

#[tokio::test]
async fn variables_matching_written_values_are_not_listed() {
    let site = Site::new().await;
    let mut command = site.command(&["--yes"]);
    command.env("PROXY_URL", site.relay.url()).env("BACKEND_URL", site.backend.url()).env("WORKER_NAME", "w");
    std::fs::write(site.path("mine"), format!("{WORKER_SECRET}\n")).unwrap();
    let output = site.done(command.env("WORKER_SECRET_FILE", "mine").env("PROVIDER_NAME", " ")).await;
    assert!(!output.contains("unset"), "{output}");
}

#[tokio::test]
async fn overwriting_file_requires_force() {
    let site = Site::new().await;
    let (url, backend) = (site.relay.url(), site.backend.url());
    let set_up = |more: &[&str]| {
        let mut command = site.command(&["--yes", "--backend", &backend, &url]);
        command.env("WORKER_SECRET", WORKER_SECRET).args(more);
        command
    };
    std::fs::write(site.path("worker.yaml"), "relay: http://older\n").unwrap();
    let output = site.refused(&mut set_up(&[])).await;
    assert_eq!(output, "worker.yaml already exists; pass --force to overwrite it, or choose another --output");
    site.done(&mut set_up(&["--output", "other.yaml"])).await;
    assert_eq!((mode(&site.path("other.secret")), site.read("worker.yaml").as_str()), (0o600, "relay: http://older\n"));
    std::fs::remove_file(site.path("other.yaml")).unwrap();
    let output = site.refused(&mut set_up(&["--output", "other.yaml"])).await;
    assert!(output.starts_with("other.secret already exists"), "{output}");
    site.done(&mut set_up(&["--force"])).await;
    assert!(site.read("worker.yaml").contains(&url));
}

#[tokio::test]
async fn missing_answer_without_terminal_names_its_flag() {
    let site = Site::new().await;
    let (url, backend) = (site.relay.url(), site.backend.url());
    let given = ["--backend", &backend, "--worker-name", "w", "--max-concurrency", "2", &url];
    let without = |left_out: &[&str]| {
        let args: Vec<&str> = given.iter().copied().filter(|arg| !left_out.contains(arg)).collect();
        let mut command = site.command(&args);
        command.env("WORKER_SECRET", WORKER_SECRET).args(["--backend-ports", "1"]);
        command
    };
    for (left_out, flag) in [
        (vec![url.as_str()], "RELAY-URL is missing"),
        (vec!["--backend", &backend], "BACKEND_URL (--backend) is missing: no backend responds"),
        (vec!["--worker-name", "w"], "WORKER_NAME (--worker-name) is missing"),
        (vec!["--max-concurrency", "2"], "MAX_CONCURRENCY (--max-concurrency) is missing"),
    ] {
        let output = site.refused(&mut without(&left_out)).await;
        assert!(output.starts_with(flag), "{output}");
    }
    let output = site.refused(without(&[]).env_remove("WORKER_SECRET")).await;
    assert!(output.contains("WORKER_SECRET") && output.contains("--worker-secret-file"), "{output}");
    let output = site.refused(without(&[]).env("WORKER_SECRET", "planted-wrong-secret-9")).await;
    assert!(
        output.starts_with("the relay rejected the worker secret (401)") && !output.contains("planted"),
        "{output}"
    );
    let output = site.refused(without(&[]).env("PROVIDER_NAME", "unknown")).await;
    assert!(
        output.contains("no provider has this name; check the relay's address, and that it has a provider unknown"),
        "{output}"
    );
    let output = site.refused(without(&[&url]).arg(&backend)).await;
    assert!(output.contains("check the relay's address"), "{output}");
    site.done(&mut without(&[])).await;
    site.serves(Spawn::program("modelrelay-worker").arg("--config").arg("worker.yaml")).await;
}

#[tokio::test]
async fn yes_selects_only_unambiguous_backend() {
    let site = Site::new().await;
    let other = FakeBackend::with_models(&["llama"]).await;
    let both = format!("{},{}", site.ports(), other.addr().port());
    let url = site.relay.url();
    let set_up = |ports: &str, yes: bool| {
        let mut command = site.command(&[&url, "--backend-ports", ports]);
        command.env("WORKER_SECRET", WORKER_SECRET).args(yes.then_some("--yes"));
        command
    };
    let output = site.refused(&mut set_up(&both, true)).await;
    assert!(output.contains(&site.backend.url()) && output.contains(&other.url()), "{output}");
    let output = site.refused(&mut set_up(&site.ports(), false)).await;
    assert!(output.contains("(--backend) is missing") && output.contains(&site.backend.url()), "{output}");
    let output = site.done(&mut set_up(&site.ports(), true)).await;
    assert!(output.contains(&format!("backend: {} (openai)\n", site.backend.url())), "{output}");
}

#[tokio::test]
async fn run_flag_serves_immediately_from_given_files() {
    let certificates = Certificates::make();
    let site = Site { relay: Relay::builder().tls(&certificates).start().await, ..Site::new().await };
    std::fs::write(site.path("my-secret"), format!("{WORKER_SECRET}\n")).unwrap();
    let worker = Spawn::program("modelrelay-worker").arg("connect").arg(site.relay.url()).arg("--run").arg("--yes");
    let worker = worker.arg("--backend").arg(site.backend.url()).arg("--worker-secret-file").arg("my-secret");
    let worker = worker.arg("--relay-ca-file").arg(certificates.ca_file().to_string_lossy());
    let collector = FakeBackend::refusing().await;
    let worker = worker.env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url()).env("PROBE_ADDR", "127.0.0.1:0");
    let worker = worker.working_dir(site.folder.path()).start();
    site.relay.wait_for_workers(1).await;
    worker.wait_for_line("exporting traces").await;
    let file = site.read("worker.yaml");
    assert!(file.contains("/my-secret\"\n") && !site.path("worker.secret").exists(), "{file}");
}

#[tokio::test]
async fn unavailable_backend_is_awaited() {
    let site = Site::new().await;
    let refusing = FakeBackend::refusing().await;
    let mut command = site.command(&["--yes", "--backend", &refusing.url(), &site.relay.url()]);
    let output = site.run(command.env("WORKER_SECRET", WORKER_SECRET)).await;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && stderr.contains("the worker waits until it responds"), "{stderr}");
}
