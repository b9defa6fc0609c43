//! One program under test: found, started with a clean environment, logged, and killed when dropped.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, PipeReader},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    process::{Child, Command},
    sync::watch,
};

use crate::{TEST_TIMEOUT, secrecy::Secrets};

/// How long the last output of a program that has ended may take. Its surviving children may keep the output open.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The settings with which a test starts a program.
#[derive(Debug, Clone)]
pub struct Spawn {
    binary: PathBuf,
    args: Vec<String>,
    env: BTreeMap<String, String>,
    working_dir: Option<PathBuf>,
}

/// The absolute path of a built program, for settings that name one; found in the same way as by [`Spawn::program`].
#[must_use]
pub fn path_of(name: &str) -> PathBuf {
    let found = binary_dir().join(name);
    std::path::absolute(&found).unwrap_or(found)
}

/// The path of a program of the machine, including daemons, if it is installed.
#[must_use]
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

impl Spawn {
    /// Creates the settings of a program by the name of its binary, such as `modelrelay-relay`: from
    /// `MODELRELAY_BIN_DIR`, else from the workspace's `target/debug`.
    #[must_use]
    pub fn program(name: &str) -> Self {
        Self { binary: binary_dir().join(name), args: Vec::new(), env: inherited_env(), working_dir: None }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets one variable of the otherwise empty environment (`PATH`, `HOME` and `TMPDIR` are inherited).
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Removes a variable that was set before.
    #[must_use]
    pub fn without_env(mut self, name: &str) -> Self {
        self.env.remove(name);
        self
    }

    /// Runs it through another program that accepts a command line, such as a tracer: `wrapper`, then the program.
    #[must_use]
    pub fn under<const N: usize>(mut self, wrapper: [&str; N]) -> Self {
        let program = std::mem::replace(&mut self.binary, wrapper[0].into());
        let mut args: Vec<String> = wrapper[1..].iter().map(ToString::to_string).collect();
        args.push(program.to_string_lossy().into_owned());
        args.append(&mut self.args);
        self.args = args;
        self
    }

    /// Sets the working directory.
    #[must_use]
    pub fn working_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.working_dir = Some(dir.as_ref().to_owned());
        self
    }

    /// Starts it. Must be called inside a tokio runtime.
    ///
    /// # Panics
    /// If the binary cannot be started: a suite without programs has nothing to test.
    #[must_use]
    pub fn start(self) -> Process {
        let mut command = Command::new(&self.binary);
        command.args(&self.args).env_clear().envs(&self.env);
        let (out, stdout) = std::io::pipe().expect("a pipe can be made");
        let (err, stderr) = std::io::pipe().expect("a pipe can be made");
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).kill_on_drop(true);
        if let Some(dir) = &self.working_dir {
            command.current_dir(dir);
        }
        let child = command.spawn().unwrap_or_else(|error| {
            panic!(
                "cannot start {}: {error} (build with `cargo build --workspace --bins`, or set MODELRELAY_BIN_DIR)",
                self.binary.display()
            )
        });
        let name = self.binary.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let log = Log::new(name);
        self.env.iter().for_each(|(name, value)| log.secrets().plant_variable(name, value));
        // The command holds this process's copies of the write ends of the pipes.
        drop(command);
        log.follow(out);
        log.follow(err);
        Process { child, log }
    }
}

/// A running program. Dropping it kills it, and fails the test if its output contains a secret.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: Log,
}

impl Process {
    /// Its output so far, shared and growing.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits until a line contains `part`, and returns the first such line.
    pub async fn wait_for_line(&self, part: &str) -> String {
        self.log.wait_for_line(part).await
    }

    /// Sends SIGTERM and returns at once.
    pub async fn terminate(&self) {
        self.signal("TERM").await;
    }

    /// Sends a signal by name (`TERM`, `INT`, `STOP`, `CONT`, `KILL`). Through the `kill` program: unsafe code is
    /// forbidden.
    pub async fn signal(&self, signal: &str) {
        let Some(pid) = self.pid() else { return };
        let status = Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status().await;
        assert!(status.is_ok_and(|status| status.success()), "cannot send SIG{signal} to {pid}\n{}", self.log.dump());
    }

    /// Kills it and waits until it is gone: the kernel has closed its sockets when this returns.
    pub async fn kill(&mut self) {
        let _ = self.child.kill().await;
    }

    /// Waits for the end within [`TEST_TIMEOUT`], as [`wait_exit_within`](Self::wait_exit_within) does.
    pub async fn wait_exit(&mut self) -> ExitStatus {
        self.wait_exit_within(TEST_TIMEOUT).await
    }

    /// Waits for the end within `patience`, and then until all its output is in the log: at most two seconds, if its
    /// surviving children keep the output open.
    ///
    /// # Panics
    /// If it is still running then.
    pub async fn wait_exit_within(&mut self, patience: Duration) -> ExitStatus {
        let Ok(status) = tokio::time::timeout(patience, self.child.wait()).await else {
            panic!("timed out after {patience:?} waiting for the program to exit\n{}", self.log.dump());
        };
        let _ = tokio::time::timeout(LAST_WORDS, self.log.closed()).await;
        status.expect("the exit status of a child can be read")
    }

    /// True if it is still running.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.start_kill();
        self.log.await_last_words();
        self.log.check_secrecy();
    }
}

/// The lines of a process, from stdout and stderr, in the order they were read. Clones share them.
#[derive(Debug, Clone)]
pub struct Log(Arc<LogState>);

#[derive(Debug)]
struct LogState {
    program: String,
    lines: Mutex<Vec<String>>,
    count: watch::Sender<usize>,
    open: watch::Sender<usize>,
    secrets: Secrets,
    /// Held while nothing is read.
    reading: tokio::sync::Mutex<()>,
}

impl Log {
    /// Creates an empty log, also for peers without a process.
    #[must_use]
    pub fn new(program: impl Into<String>) -> Self {
        let (lines, count, open) = (Mutex::default(), watch::Sender::new(0), watch::Sender::new(0));
        Self(Arc::new(LogState {
            program: program.into(),
            lines,
            count,
            open,
            secrets: Secrets::default(),
            reading: tokio::sync::Mutex::default(),
        }))
    }

    /// The secrets that must not be in it, nor in the program's responses about itself.
    #[must_use]
    pub fn secrets(&self) -> &Secrets {
        &self.0.secrets
    }

    /// Stops reading the program's output until the result is dropped, as a stuck log collector does.
    pub async fn stop_reading(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.reading.lock().await
    }

    /// All lines so far.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.0.lines.lock().expect("no holder of the log panics").clone()
    }

    /// The number of lines that contain `part`.
    #[must_use]
    pub fn count_of(&self, part: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(part)).count()
    }

    /// True if any line contains `part`.
    #[must_use]
    pub fn contains(&self, part: &str) -> bool {
        self.count_of(part) > 0
    }

    /// The whole log, for a failure's message.
    #[must_use]
    pub fn dump(&self) -> String {
        format!("--- log of {} ---\n{}\n--- end of log ---", self.0.program, self.lines().join("\n"))
    }

    /// Waits until a line contains `part`, and returns the first such line.
    ///
    /// # Panics
    /// After [`TEST_TIMEOUT`].
    pub async fn wait_for_line(&self, part: &str) -> String {
        let what = format!("a log line that contains {part:?}");
        self.wait_for(&what, |line| line.contains(part).then(|| line.to_owned())).await
    }

    /// Waits until `find` returns a value for a line, and returns it.
    ///
    /// # Panics
    /// After [`TEST_TIMEOUT`], with `what` was awaited.
    pub async fn wait_for<T>(&self, what: &str, find: impl Fn(&str) -> Option<T>) -> T {
        let mut changes = self.0.count.subscribe();
        let search = async {
            loop {
                changes.borrow_and_update();
                if let Some(found) = self.lines().iter().find_map(|line| find(line)) {
                    return found;
                }
                changes.changed().await.expect("the sender lives in this log");
            }
        };
        crate::within(what, self, search).await
    }

    /// Waits until the process has closed both its outputs, so that no more can arrive.
    pub async fn wait_until_closed(&self) {
        crate::within("the end of the program's output", self, self.closed()).await;
    }

    async fn closed(&self) {
        let _ = self.0.open.subscribe().wait_for(|open| *open == 0).await;
    }

    /// Fails the test if the log contains a secret; if the test fails already, only prints it.
    fn check_secrecy(&self) {
        let text = self.0.lines.lock().unwrap_or_else(PoisonError::into_inner).join("\n");
        let place = format!("the output of {}", self.0.program);
        if !thread::panicking() {
            self.secrets().check(&place, &text);
        } else if let Some(secret) = self.secrets().found_in(&text) {
            eprintln!("another secret was disclosed: {secret:?} is in {place}");
        }
    }

    fn await_last_words(&self) {
        let since = Instant::now();
        while *self.0.open.borrow() > 0 && since.elapsed() < LAST_WORDS {
            #[expect(clippy::disallowed_methods, reason = "a poll with a deadline in synchronous code")]
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn follow(&self, stream: PipeReader) {
        let log = self.clone();
        self.0.open.send_modify(|open| *open += 1);
        // A thread, and not a task: the last output of a program is read after the test's runtime has stopped.
        thread::spawn(move || {
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                drop(log.0.reading.blocking_lock());
                log.push(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            log.0.open.send_modify(|open| *open -= 1);
        });
    }

    fn push(&self, line: String) {
        self.0.lines.lock().expect("no holder of the log panics").push(line);
        self.0.count.send_modify(|count| *count += 1);
    }
}

fn binary_dir() -> PathBuf {
    match std::env::var_os("MODELRELAY_BIN_DIR") {
        Some(dir) => dir.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/debug"),
    }
}

/// The few variables that programs need from outside; all others would make a test depend on its environment.
fn inherited_env() -> BTreeMap<String, String> {
    ["PATH", "HOME", "TMPDIR"]
        .into_iter()
        .filter_map(|name| std::env::var(name).ok().map(|value| (name.to_owned(), value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        Spawn { binary: "/bin/sh".into(), ..Spawn::program("sh") }.arg("-c").arg(script).start()
    }

    #[tokio::test]
    async fn lines_of_both_streams_are_captured_and_awaited() {
        let mut process = shell("echo one; echo two >&2; exit 3");
        assert_eq!(process.wait_for_line("one").await, "one");
        assert_eq!(process.wait_for_line("two").await, "two");
        assert_eq!(process.wait_exit().await.code(), Some(3));
    }

    #[tokio::test]
    async fn exited_program_has_complete_log() {
        let mut process = shell("seq 20000");
        assert!(process.wait_exit().await.success());
        assert_eq!(process.log().lines().last().map(String::as_str), Some("20000"));
    }

    #[tokio::test]
    async fn exit_wait_does_not_hang_on_surviving_children() {
        let mut process = shell("sleep 60 & echo $!");
        assert!(process.wait_exit().await.success());
        let child = process.wait_for_line("").await;
        assert!(Command::new("kill").arg(child).status().await.is_ok_and(|status| status.success()), "it runs still");
    }

    #[tokio::test]
    #[should_panic(
        expected = "a secret was disclosed: \"planted-value-1\" is in the output of sh: it is planted-value-1"
    )]
    async fn program_that_prints_secret_fails_test() {
        let script = "echo it is $DRAIN_TOKEN >&2; echo ready; exec sleep 60";
        let spawn = Spawn { binary: "/bin/sh".into(), ..Spawn::program("sh") }.env("DRAIN_TOKEN", "planted-value-1");
        spawn.arg("-c").arg(script).start().wait_for_line("ready").await;
    }

    #[tokio::test]
    async fn terminate_sends_sigterm() {
        let mut process = shell("trap 'echo got term; exit 0' TERM; echo ready; sleep 5 & wait");
        process.wait_for_line("ready").await;
        process.terminate().await;
        assert_eq!(process.wait_exit().await.code(), Some(0));
    }

    #[tokio::test]
    async fn spawned_program_has_clean_environment() {
        let process = Spawn { binary: "/usr/bin/env".into(), ..Spawn::program("env") }.env("ONLY", "this").start();
        process.wait_for_line("ONLY=this").await;
        assert!(!process.log().contains("CARGO"), "{}", process.log().dump());
    }
}
