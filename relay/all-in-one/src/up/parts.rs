//! The processes of a run: started one after another, watched, and stopped in order.
//!
//! Each is this same program as a [part](modelrelay_platform::parent) of this process: it reports on standard output
//! that it is ready, and stops when its standard input ends, also when this process is killed.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::select_all;
use modelrelay_multiplexer::driver::supervisor;
use modelrelay_platform::parent::READY;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{interval_at, sleep, timeout};

use super::ports::{free_port, is_free};
use super::print_line;
use crate::select::{PART, Program};

/// The pause between two attempts of [`Parts::wait_for`].
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The interval at which a wait is reported.
const REMINDER_INTERVAL: Duration = Duration::from_secs(5);

/// How long the last log lines of an ended part may take. A process that it left behind may hold its output open.
const LAST_LINES: Duration = Duration::from_secs(2);

/// The order of stopping: the relay needs its worker to finish what is queued, and the worker its backend.
const STOP_ORDER: [&str; 3] = ["relay", "worker", DEMO];

const DEMO: &str = "demo";

/// A part that is to be started.
#[derive(Debug)]
pub(super) struct Spec {
    name: &'static str,
    words: Vec<&'static str>,
    env: Vec<(&'static str, std::ffi::OsString)>,
}

/// The parts that were started.
#[derive(Debug)]
pub(super) struct Parts {
    program: PathBuf,
    running: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    name: &'static str,
    child: Child,
    /// Closed to stop it.
    input: Option<ChildStdin>,
    log: JoinHandle<()>,
}

impl Spec {
    pub(super) fn of(program: Program) -> Self {
        Self { name: program.word(), words: vec![program.word()], env: Vec::new() }
    }

    pub(super) fn demo() -> Self {
        Self { name: DEMO, words: vec![Program::Worker.word(), "demo"], env: Vec::new() }
    }

    /// Sets a variable, which others cannot see as they can see a command line.
    pub(super) fn env(mut self, name: &'static str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.env.push((name, value.as_ref().to_owned()));
        self
    }
}

impl Parts {
    pub(super) fn new() -> Result<Self, String> {
        let program = std::env::current_exe()
            .map_err(|error| format!("cannot determine the path of this executable: {error}"))?;
        Ok(Self { program, running: Vec::new() })
    }

    /// Starts a part and waits until it is ready.
    pub(super) async fn start(&mut self, spec: Spec) -> Result<(), String> {
        let mut command = Command::new(&self.program);
        command.arg(PART).args(&spec.words).envs(spec.env);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        // Ctrl-C in the terminal is for this process only: a part would take it for a second signal.
        supervisor::set_apart(&mut command);
        let name = spec.name;
        let mut child = command.spawn().map_err(|error| format!("cannot start the {name}: {error}"))?;
        let (ready, is_ready) = oneshot::channel();
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let log = tokio::spawn(async move {
            tokio::join!(pass_on(name, stdout, Some(ready)), pass_on(name, stderr, None));
        });
        self.running.push(Part { name, input: child.stdin.take(), child, log });
        let ready = async { is_ready.await.is_ok() };
        if with_reminders(&format!("the start of the {name}"), ready).await { Ok(()) } else { Err(self.ended().await) }
    }

    /// Starts a part on the first free port. Another program may take that port in the same moment; then the next one
    /// is tried.
    pub(super) async fn start_on_free_port(
        &mut self,
        ip: IpAddr,
        mut first: u16,
        spec: impl Fn(SocketAddr) -> Spec,
    ) -> Result<SocketAddr, String> {
        loop {
            let addr = free_port(ip, first).await?;
            let parts_before = self.running.len();
            match self.start(spec(addr)).await {
                Ok(()) => return Ok(addr),
                Err(_) if self.running.len() > parts_before && !is_free(addr).await => {
                    for part in self.running.drain(parts_before..) {
                        part.finish().await;
                    }
                    first = if first == 0 { 0 } else { addr.port().saturating_add(1) };
                }
                Err(why) => return Err(why),
            }
        }
    }

    /// Calls `ask` until it returns a value. Fails if a part ends or `ask` fails.
    pub(super) async fn wait_for<T>(
        &mut self,
        what: &str,
        mut ask: impl AsyncFnMut() -> Result<Option<T>, String>,
    ) -> Result<T, String> {
        let asking = async {
            loop {
                if let Some(value) = ask().await? {
                    return Ok(value);
                }
                sleep(RETRY_INTERVAL).await;
            }
        };
        tokio::select! {
            value = with_reminders(what, asking) => value,
            why = self.ended() => Err(why),
        }
    }

    /// Waits until a part ends, and returns a sentence about it. Needs a part.
    pub(super) async fn ended(&mut self) -> String {
        let ends = self.running.iter_mut().map(|part| {
            Box::pin(async {
                match part.child.wait().await {
                    Ok(status) => format!("the {} exited unexpectedly ({status})", part.name),
                    Err(error) => format!("cannot monitor the {}: {error}", part.name),
                }
            })
        });
        select_all(ends).await.0
    }

    /// Stops one part after the other; each finishes what it runs.
    pub(super) async fn stop(&mut self) {
        for name in STOP_ORDER {
            for part in self.running.iter_mut().filter(|part| part.name == name) {
                part.input = None;
                let _ = part.child.wait().await;
            }
        }
        self.finish().await;
    }

    /// Kills all parts.
    pub(super) async fn kill(&mut self) {
        for part in &mut self.running {
            // It fails for a part that has ended.
            let _ = part.child.start_kill();
        }
        for part in &mut self.running {
            let _ = part.child.wait().await;
        }
        self.finish().await;
    }

    async fn finish(&mut self) {
        for part in self.running.drain(..) {
            part.finish().await;
        }
    }
}

impl Part {
    /// Waits for the last lines of a part that has ended.
    async fn finish(self) {
        let _ = timeout(LAST_LINES, self.log).await;
    }
}

/// Waits, and reports regularly what for.
async fn with_reminders<T>(what: &str, wait: impl Future<Output = T>) -> T {
    let mut reminder = interval_at(tokio::time::Instant::now() + REMINDER_INTERVAL, REMINDER_INTERVAL);
    let mut wait = std::pin::pin!(wait);
    loop {
        tokio::select! {
            value = &mut wait => return value,
            _ = reminder.tick() => print_line(&format!("still waiting for {what}")),
        }
    }
}

/// Prints each line of a part's output behind its name, until the output ends. The line that reports readiness is not
/// printed.
async fn pass_on(name: &str, output: Option<impl AsyncRead + Unpin>, mut ready: Option<oneshot::Sender<()>>) {
    let Some(output) = output else { return };
    let mut lines = BufReader::new(output);
    let mut line = Vec::new();
    while matches!(lines.read_until(b'\n', &mut line).await, Ok(1..)) {
        let text = line.trim_ascii_end();
        match ready.take() {
            Some(ready) if text == READY.as_bytes() => drop(ready.send(())),
            not_ready => {
                ready = not_ready;
                // The reader may be gone; the part must not block on its log.
                let _ = io::stdout().write_all(&[format!("{name:<6} | ").as_bytes(), text, b"\n"].concat());
            }
        }
        line.clear();
    }
}
