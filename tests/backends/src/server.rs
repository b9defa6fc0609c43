//! Servers that a test starts itself, and information about processes.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use modelrelay_harness::{TEST_TIMEOUT, poll_for};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use url::Url;

use crate::worker_program;

/// A server and everything that it starts. Dropping it kills all of that, because it runs under a supervisor.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// Its address.
    pub url: Url,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl Server {
    /// Starts a command that listens on `port` of loopback, and waits until it listens.
    ///
    /// # Panics
    /// If it does not listen within [`TEST_TIMEOUT`].
    pub async fn start(command: &[String], env: &[(&str, String)], port: u16) -> Self {
        Self::start_within(TEST_TIMEOUT, command, env, port).await
    }

    /// Like [`Server::start`], with another limit of time.
    ///
    /// # Panics
    /// If it does not listen by then.
    pub async fn start_within(limit: Duration, command: &[String], env: &[(&str, String)], port: u16) -> Self {
        let folder = tempfile::tempdir().expect("a folder for a log can be made");
        let log = folder.path().join("log");
        let file = File::create(&log).expect("a log can be made");
        let mut started = Command::new(worker_program());
        started.arg("supervise").arg("--").args(command).envs(env.iter().map(|(name, value)| (name, value)));
        started.stdin(Stdio::piped()).stdout(file.try_clone().expect("a file can be shared")).stderr(file);
        let child = started.spawn().expect("the supervisor starts");
        let url = format!("http://127.0.0.1:{port}").parse().expect("this is a URL");
        let server = Self { child, url, log, _folder: folder };
        let listens = poll_for(limit, async || is_listening(port).await.then_some(())).await;
        assert!(listens.is_some(), "{} does not listen after {limit:?}: {}", command[0], server.log());
        server
    }

    /// Kills it, and waits until nothing of it is left.
    pub async fn kill(&mut self) {
        drop(self.child.stdin.take());
        let ended = tokio::time::timeout(TEST_TIMEOUT, self.child.wait()).await;
        assert!(ended.is_ok(), "the supervisor ends after its standard input");
    }

    /// Returns its output.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// Ports below those that the kernel assigns to connections and to listeners of concurrent tests.
const PORTS: std::ops::Range<u32> = 10_000..32_000;

/// Returns a port that was free a moment ago, and that the kernel does not assign by itself.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn free_port() -> u16 {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    // Each test process starts at a different port.
    let begin = std::process::id().wrapping_mul(101);
    let numbers = PORTS.map(|_| begin.wrapping_add(ASKED.fetch_add(1, Ordering::Relaxed)) % PORTS.len() as u32);
    let mut ports = numbers.map(|number| u16::try_from(PORTS.start + number).expect("below 2^16"));
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}

/// True if a program listens on that port of loopback.
pub async fn is_listening(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).await.is_ok()
}

/// Waits until the condition holds.
///
/// # Panics
/// After [`TEST_TIMEOUT`], with `what`.
pub async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let held = poll_for(TEST_TIMEOUT, async || is_so().await.then_some(())).await;
    assert!(held.is_some(), "timed out after {TEST_TIMEOUT:?} waiting until {what}");
}

/// True if the process with this id runs and is no zombie.
#[must_use]
pub fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Returns the processes whose command line contains this text, except supervisors.
#[must_use]
pub fn processes_with(text: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_it = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.contains(text) && !line.contains(" supervise ") && runs(*pid)
    };
    pids.filter(is_it).collect()
}

/// Waits until a file has a line, and returns it.
pub async fn line_of(file: &Path) -> String {
    until(&format!("{} is written", file.display()), async || {
        std::fs::read_to_string(file).is_ok_and(|text| text.ends_with('\n'))
    })
    .await;
    std::fs::read_to_string(file).unwrap_or_default().trim().to_owned()
}

/// Sends a request to a server and returns its status and body; `None` without a response.
pub async fn post(url: &Url, path: &str, body: &serde_json::Value) -> Option<(u16, String)> {
    exchange(url, "POST", path, &body.to_string()).await
}

/// As [`post`], without a body.
pub async fn get(url: &Url, path: &str) -> Option<(u16, String)> {
    exchange(url, "GET", path, "").await
}

async fn exchange(url: &Url, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let address = url.socket_addrs(|| None).ok()?;
    let mut stream = TcpStream::connect(address.first()?).await.ok()?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        url.authority(),
        body.len()
    );
    stream.write_all((head + body).as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    tokio::time::timeout(TEST_TIMEOUT, stream.read_to_end(&mut answer)).await.ok()?.ok()?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    Some((status, answer))
}
