//! Runs `kubectl` and `helm` without blocking the test's own clients; a failure shows the command and its output.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    future::{Future, IntoFuture},
    pin::Pin,
    process::Stdio,
    time::Duration,
};

use tokio::io::AsyncWriteExt;

/// The longest time for a command of a test, `helm --wait` and `kubectl wait` included.
const LONGEST: Duration = Duration::from_secs(300);

/// A command to run. Awaiting it returns its standard output and panics on failure; see also [`Self::output`].
#[must_use]
#[derive(Debug)]
pub struct Command {
    program: OsString,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    input: Option<String>,
}

/// The result of a command.
#[derive(Debug, Clone)]
pub struct Output {
    /// True if it exited with 0.
    pub success: bool,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Command {
    /// Creates a command from the path of a program.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        let program = program.as_ref().to_owned();
        Self { program, arguments: Vec::new(), environment: Vec::new(), input: None }
    }

    /// Adds one argument, without splitting it.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(self, arguments: impl IntoIterator<Item = A>) -> Self {
        arguments.into_iter().fold(self, Self::arg)
    }

    /// Sets a variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets its standard input.
    pub fn input(mut self, text: impl Into<String>) -> Self {
        self.input = Some(text.into());
        self
    }

    /// Runs it and returns its output, whether or not it succeeds.
    ///
    /// # Panics
    /// If it cannot be started, or takes longer than five minutes.
    pub async fn output(self) -> Output {
        let shown = self.to_string();
        let mut command = tokio::process::Command::new(&self.program);
        command.args(&self.arguments).envs(self.environment).kill_on_drop(true);
        command.stdin(if self.input.is_some() { Stdio::piped() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start `{shown}`: {error}"));
        let (stdin, input) = (child.stdin.take(), self.input);
        // A command that ends without reading everything reports the reason itself.
        let feed = async {
            if let (Some(mut stdin), Some(input)) = (stdin, input) {
                let _ = stdin.write_all(input.as_bytes()).await;
            }
        };
        let run = async { tokio::join!(feed, child.wait_with_output()).1 };
        let ended =
            tokio::time::timeout(LONGEST, run).await.unwrap_or_else(|_| panic!("`{shown}` took over {LONGEST:?}"));
        let ended = ended.unwrap_or_else(|error| panic!("`{shown}` was lost: {error}"));
        ended.into()
    }

    /// Runs it, expects a failure, and returns its standard error.
    ///
    /// # Panics
    /// If it succeeds.
    pub async fn expect_failure(self) -> String {
        let shown = self.to_string();
        let output = self.output().await;
        assert!(!output.success, "`{shown}` succeeded, which it must not:\n{}{}", output.stdout, output.stderr);
        output.stderr
    }
}

impl Output {
    /// Returns standard output and standard error.
    #[must_use]
    pub fn output_text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

impl From<std::process::Output> for Output {
    fn from(output: std::process::Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self { success: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl IntoFuture for Command {
    type Output = String;
    type IntoFuture = Pin<Box<dyn Future<Output = String> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let shown = self.to_string();
            let output = self.output().await;
            assert!(output.success, "`{shown}` failed:\n{}{}", output.stdout, output.stderr);
            output.stdout
        })
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = std::path::Path::new(&self.program).file_name().unwrap_or(&self.program);
        write!(f, "{}", program.to_string_lossy())?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {}", argument.to_string_lossy()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn command_reads_input_and_returns_output() {
        assert_eq!(Command::new("/bin/cat").input("one\ntwo").await, "one\ntwo");
    }

    #[tokio::test]
    async fn failure_is_distinguished_from_success() {
        let output = Command::new("/bin/sh").args(["-c", "echo out; echo why >&2; exit 3"]).output().await;
        assert_eq!((output.success, output.stdout.as_str(), output.stderr.as_str()), (false, "out\n", "why\n"));
        assert_eq!(Command::new("/bin/sh").args(["-c", "echo why >&2; exit 1"]).expect_failure().await, "why\n");
    }

    #[tokio::test]
    #[should_panic(expected = "`sh -c echo why >&2; exit 1` failed:\nwhy")]
    async fn unexpected_failure_shows_output() {
        Command::new("/bin/sh").args(["-c", "echo why >&2; exit 1"]).await;
    }
}
