//! Processes that a driver starts, each under a [`supervisor`]: their ports, output, and ends.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use modelrelay_platform::own_program;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::supervisor::{self, LEAVE_ON_SUCCESS, SUBCOMMAND};
use super::{DriverError, Model};

/// The time from SIGTERM to SIGKILL.
pub const TERM_GRACE: Duration = Duration::from_secs(10);

/// In a command or its environment, stands for the port that the backend must listen on.
pub const PORT: &str = "${PORT}";

/// How long a killed process may take until its supervisor reports that nothing is left: a driver that frees its memory
/// takes seconds. Shorter than the machine's own limit, so that the error names the process that hangs.
const KILL_TIMEOUT: Duration = Duration::from_secs(50);

/// How long the last lines of an ended process are waited for. A process that it left behind may keep the pipe open.
const LAST_LINES_TIMEOUT: Duration = Duration::from_millis(500);

/// The number of lines that are kept for errors.
const TAIL_LINES: usize = 40;

/// The number of these lines that an error quotes, newest last.
const QUOTED_LINES: usize = 5;

/// The rest of a longer line is dropped: a backend that prints binary data must not fill the log.
const MAX_LINE_BYTES: usize = 2048;

/// Variables of the worker that backends must not see: secrets, and systemd's notification socket, which a container
/// engine would treat as its container's own.
const OWN_VARIABLES: [&str; 4] = ["WORKER_SECRET", "DRAIN_TOKEN", "BACKEND_API_KEY", "NOTIFY_SOCKET"];

/// A command, as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// The program and its arguments; `${PORT}` becomes the port.
    pub command: Vec<String>,
    /// Added to the worker's own environment, without its secrets.
    pub env: BTreeMap<String, String>,
    /// True if processes that the command starts keep running after it succeeds: for commands that only hand over to
    /// another program.
    pub leave_on_success: bool,
    /// True if its output goes only into errors, and not into the log: for commands that run every few seconds.
    pub is_quiet: bool,
}

/// The processes of a slot, at most one per model.
#[derive(Debug)]
pub struct Children {
    supervisor: PathBuf,
    /// Never held over an await.
    running: Mutex<HashMap<Model, Arc<Running>>>,
}

/// A process and its supervisor. Dropping it kills both.
#[derive(Debug)]
pub struct Running {
    port: u16,
    orders: mpsc::UnboundedSender<StopOrder>,
    end: watch::Receiver<Option<ProcessExit>>,
    tail: Arc<Tail>,
    /// True if it was ordered to end: it may respond for a moment, but is no longer considered alive.
    is_doomed: AtomicBool,
    /// True if it was killed without a grace period.
    is_killed: AtomicBool,
}

/// The result of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessExit {
    /// Its exit code; 128 plus the signal's number if a signal ended it.
    pub code: Option<i32>,
}

#[derive(Clone, Copy, Debug)]
enum StopOrder {
    Terminate,
    Kill,
}

/// The newest lines of a process.
#[derive(Debug, Default)]
struct Tail(Mutex<VecDeque<String>>);

/// Receives a process's output.
#[derive(Clone, Debug)]
struct Listener {
    model: Model,
    tail: Arc<Tail>,
    is_quiet: bool,
    /// True if it only hands over to another program.
    is_command: bool,
}

/// Kills the process of an abandoned call.
#[derive(Debug)]
pub struct KillOnDrop(Option<Arc<Running>>);

impl Children {
    /// Creates an empty set. `supervisor`: the path of this program.
    pub fn new(supervisor: PathBuf) -> Self {
        Self { supervisor, running: Mutex::default() }
    }

    /// Returns the model's process, if it runs and was not ordered to end.
    pub fn alive(&self, model: &Model) -> Option<Arc<Running>> {
        self.lock().get(model).filter(|running| running.is_alive()).cloned()
    }

    /// Returns the model's process, even if it has ended.
    pub fn last(&self, model: &Model) -> Option<Arc<Running>> {
        self.lock().get(model).cloned()
    }

    /// Starts the model's process. `port`: the configured port; `None` chooses a free one.
    pub fn start(&self, model: &Model, launch: &Launch, port: Option<u16>) -> Result<Arc<Running>, DriverError> {
        let port = claim_port(port)?;
        let running = Arc::new(Running::start(&self.supervisor, model, launch, port)?);
        self.lock().insert(Arc::clone(model), Arc::clone(&running));
        Ok(running)
    }

    /// Sends SIGTERM, after [`TERM_GRACE`] SIGKILL, and waits until nothing is left. A process that was already ordered
    /// to end gets no second SIGTERM: some programs then quit at once without cleaning up.
    pub async fn stop(&self, model: &Model) -> Result<(), DriverError> {
        if let Some(running) = self.last(model).filter(|running| !running.is_killed()) {
            if running.is_alive() {
                running.order(StopOrder::Terminate);
            }
            if tokio::time::timeout(TERM_GRACE, running.ended()).await.is_err() {
                tracing::warn!(model = &**model, "the backend did not exit on SIGTERM; killing it");
            }
        }
        self.kill(model).await
    }

    /// Sends SIGKILL, and waits until nothing is left.
    pub async fn kill(&self, model: &Model) -> Result<(), DriverError> {
        let Some(running) = self.last(model) else { return Ok(()) };
        running.kill();
        let ended = tokio::time::timeout(KILL_TIMEOUT, running.ended()).await;
        ended.map(|_| ()).map_err(|_| DriverError::StillThere(KILL_TIMEOUT))?;
        let mut all = self.lock();
        if all.get(model).is_some_and(|now| Arc::ptr_eq(now, &running)) {
            all.remove(model);
        }
        Ok(())
    }

    /// Completes when the model's process ends; never if none was started.
    pub async fn ended(&self, model: &Model) {
        match self.last(model) {
            Some(running) => drop(running.ended().await),
            None => std::future::pending().await,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Model, Arc<Running>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    #[expect(clippy::disallowed_methods, reason = "each call of the slot sends one order, and `drop` cannot wait")]
    fn start(program: &PathBuf, model: &Model, launch: &Launch, port: u16) -> Result<Self, DriverError> {
        let with_port = |text: &String| text.replace(PORT, &port.to_string());
        let mut command = Command::new(program);
        command.args(own_program::selector());
        command.arg(SUBCOMMAND).args(launch.leave_on_success.then_some(LEAVE_ON_SUCCESS)).arg("--");
        command.args(launch.command.iter().map(with_port));
        for variable in OWN_VARIABLES {
            command.env_remove(variable);
        }
        command.envs(launch.env.iter().map(|(name, value)| (name, with_port(value))));
        supervisor::set_apart(&mut command).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let cannot = |error: io::Error| DriverError::CannotStart(format!("{}: {error}", program.display()));
        let child = command.spawn().map_err(cannot)?;

        let tail = Arc::new(Tail::default());
        let (orders, received) = mpsc::unbounded_channel();
        let (ending, end) = watch::channel(None);
        let listener = Listener {
            model: Arc::clone(model),
            tail: Arc::clone(&tail),
            is_quiet: launch.is_quiet,
            is_command: launch.leave_on_success,
        };
        tokio::spawn(attend(child, listener, received, ending));
        Ok(Self { port, orders, end, tail, is_doomed: AtomicBool::new(false), is_killed: AtomicBool::new(false) })
    }

    /// The port that was assigned to it.
    pub fn port(&self) -> u16 {
        self.port
    }

    fn is_alive(&self) -> bool {
        !self.is_doomed.load(Ordering::Relaxed) && self.end().is_none()
    }

    fn is_killed(&self) -> bool {
        self.is_killed.load(Ordering::Relaxed)
    }

    /// Returns how it ended, if it has.
    pub fn end(&self) -> Option<ProcessExit> {
        *self.end.borrow()
    }

    /// Waits for its end.
    pub async fn ended(&self) -> ProcessExit {
        let mut end = self.end.clone();
        let ended = end.wait_for(Option::is_some).await.map(|end| *end);
        // Only a runtime that shuts down drops the task that waits for the process.
        ended.ok().flatten().unwrap_or(ProcessExit { code: None })
    }

    /// Waits for its end like [`ended`](Self::ended), and returns that as an error.
    pub async fn failed(&self) -> DriverError {
        let end = self.ended().await;
        let code = end.code.map_or_else(|| "killed".to_owned(), |code| format!("exit code {code}"));
        let last_words = self.tail.quote();
        DriverError::Ended { last_words: if last_words.is_empty() { code } else { format!("{code}: {last_words}") } }
    }

    /// Sends SIGKILL to the process and all its descendants.
    pub fn kill(&self) {
        self.is_killed.store(true, Ordering::Relaxed);
        self.order(StopOrder::Kill);
    }

    /// Kills it, unless [`KillOnDrop::keep`] is called first.
    pub fn kill_on_drop(self: &Arc<Self>) -> KillOnDrop {
        KillOnDrop(Some(Arc::clone(self)))
    }

    fn order(&self, order: StopOrder) {
        self.is_doomed.store(true, Ordering::Relaxed);
        // The receiver is gone when the process has ended.
        let _ = self.orders.send(order);
    }
}

impl KillOnDrop {
    /// The call has succeeded: keeps the process.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(running) = &self.0 {
            running.kill();
        }
    }
}

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.lock();
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    fn quote(&self) -> String {
        let lines = self.lock();
        let newest: Vec<_> = lines.iter().rev().take(QUOTED_LINES).rev().map(String::as_str).collect();
        newest.join(" | ")
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Passes orders on and waits for the end. Ends with the process, and ends the process with itself, because it holds
/// the supervisor's standard input.
async fn attend(
    mut child: Child,
    listener: Listener,
    mut orders: mpsc::UnboundedReceiver<StopOrder>,
    ending: watch::Sender<Option<ProcessExit>>,
) {
    let what = if listener.is_command { "the command has exited" } else { "the backend's process has exited" };
    let mut lines = JoinSet::new();
    if let Some(stdout) = child.stdout.take() {
        lines.spawn(follow(stdout, listener.clone()));
    }
    if let Some(stderr) = child.stderr.take() {
        lines.spawn(follow(stderr, listener.clone()));
    }
    let mut stdin = child.stdin.take();
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            order = orders.recv(), if stdin.is_some() => carry_out(order, &mut stdin).await,
        }
    };
    let all_read = async { while lines.join_next().await.is_some() {} };
    if tokio::time::timeout(LAST_LINES_TIMEOUT, all_read).await.is_err() {
        // A process that was left behind on purpose may keep writing.
        lines.detach_all();
    }
    let code = status.ok().as_ref().and_then(ExitStatus::code);
    if !listener.is_quiet {
        tracing::info!(model = &*listener.model, code, "{what}");
    }
    ending.send_replace(Some(ProcessExit { code }));
}

async fn carry_out(order: Option<StopOrder>, stdin: &mut Option<ChildStdin>) {
    match (order, stdin.as_mut()) {
        // If the write fails, the supervisor has ended.
        (Some(StopOrder::Terminate), Some(pipe)) => drop(pipe.write_all(b"T").await),
        (Some(StopOrder::Kill) | None, _) | (_, None) => *stdin = None,
    }
}

async fn follow(stream: impl AsyncRead + Unpin, listener: Listener) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        let (consumed, is_whole) = match reader.fill_buf().await {
            Ok([]) | Err(_) => break,
            Ok(bytes) => {
                let end = bytes.iter().position(|byte| *byte == b'\n');
                let part = &bytes[..end.unwrap_or(bytes.len())];
                line.extend_from_slice(&part[..part.len().min(MAX_LINE_BYTES - line.len())]);
                (end.map_or(part.len(), |end| end + 1), end.is_some())
            }
        };
        reader.consume(consumed);
        if is_whole {
            listener.hear(&mut line);
        }
    }
    listener.hear(&mut line);
}

impl Listener {
    fn hear(&self, line: &mut Vec<u8>) {
        let text = String::from_utf8_lossy(line).trim_end().to_owned();
        line.clear();
        if text.is_empty() {
            return;
        }
        if !self.is_quiet {
            tracing::info!(target: "backend", model = &*self.model, "{text}");
        }
        self.tail.push(text);
    }
}

/// Returns a free port, or the configured one if no other program uses it: that program would be mistaken for the
/// backend.
fn claim_port(configured: Option<u16>) -> Result<u16, DriverError> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, configured.unwrap_or(0)));
    let bound = std::net::TcpListener::bind(address).and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(|error| match configured {
        Some(port) => DriverError::CannotStart(format!("port {port} is in use by another program: {error}")),
        None => DriverError::CannotStart(format!("no free port: {error}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a line arrive in several parts.
    const LONGER_THAN_A_BUFFER: usize = 64 << 10;

    #[tokio::test]
    async fn output_lines_are_truncated_and_newest_kept() {
        let tail = Arc::new(Tail::default());
        let long = format!("{}\nx\n\nlast without an end", "y".repeat(LONGER_THAN_A_BUFFER));
        let (model, tail_of) = ("m".into(), Arc::clone(&tail));
        let listener = Listener { model, tail: tail_of, is_quiet: false, is_command: false };
        follow(long.as_bytes(), listener).await;
        let lines: Vec<_> = tail.lock().iter().map(String::len).collect();
        assert_eq!(lines, [MAX_LINE_BYTES, 1, 19]);
        for nth in 0..TAIL_LINES + 3 {
            tail.push(nth.to_string());
        }
        assert_eq!(tail.lock().len(), TAIL_LINES);
        assert_eq!(tail.quote(), "38 | 39 | 40 | 41 | 42");
    }

    #[cfg(unix)]
    #[tokio::test]
    #[expect(clippy::disallowed_methods, reason = "the orders of a process")]
    async fn process_output_and_exit_are_logged_unless_quiet() {
        use modelrelay_harness::own_log::{listen, logged};
        for is_quiet in [false, true] {
            listen();
            let mut says = Command::new("sh");
            says.args(["-c", "echo a word; exit 3"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let (tail, (_orders, received)) = (Arc::<Tail>::default(), mpsc::unbounded_channel());
            let (ending, end) = watch::channel(None);
            let listener = Listener { model: "m".into(), tail: Arc::clone(&tail), is_quiet, is_command: false };
            attend(says.spawn().unwrap(), listener, received, ending).await;
            assert_eq!((end.borrow().unwrap().code, tail.quote()), (Some(3), "a word".to_owned()));
            let lines: Vec<_> = logged().iter().map(|line| line["message"].clone()).collect();
            let expected = ["a word", "the backend's process has exited"];
            assert_eq!(lines, if is_quiet { &[] } else { &expected[..] });
        }
    }

    #[test]
    fn occupied_port_is_refused() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(claim_port(Some(port)).unwrap_err().to_string().contains(&port.to_string()));
        assert_ne!(claim_port(None).unwrap(), 0);
    }
}
