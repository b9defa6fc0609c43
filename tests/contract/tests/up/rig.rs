//! A running `modelrelay up`, and the line that it prints to paste.

use std::process::{Output, Stdio};
use std::time::Duration;

use modelrelay_harness::process::{Process, Spawn};
use modelrelay_harness::within_for;
use tokio::process::{Child, Command};

/// The timeout for starts on a busy machine: three processes, one after another.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(30);

/// No inference server listens there.
pub(crate) const NO_BACKEND: (&str, &str) = ("BACKEND_PORTS", "1");

pub(crate) struct Up {
    pub(crate) process: Process,
}

impl Up {
    /// Starts it on any free port and waits for the greeting.
    pub(crate) async fn start(env: &[(&str, &str)]) -> Self {
        Self::greeted(spawn(env).env("LISTEN_ADDR", "127.0.0.1:0").start()).await
    }

    /// Starts it on the usual port, or the next free one.
    pub(crate) async fn start_on_usual_port(env: &[(&str, &str)]) -> Self {
        Self::greeted(spawn(env).start()).await
    }

    pub(crate) async fn greeted(process: Process) -> Self {
        within_for(START_TIMEOUT, "the greeting", process.log(), process.wait_for_line("Stop with Ctrl-C")).await;
        Self { process }
    }

    pub(crate) fn printed(&self, what: &str) -> bool {
        self.process.log().contains(what)
    }

    pub(crate) fn curl_line(&self) -> String {
        let lines = self.process.log().lines();
        let start = lines.iter().position(|line| line.contains("curl -N")).expect("a curl line");
        lines[start..=start + 1].join("\n")
    }

    pub(crate) fn url(&self) -> String {
        self.curl_line().split_whitespace().nth(2).expect("curl -N URL").to_owned()
    }

    pub(crate) fn spawn_curl(&self) -> Child {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(self.curl_line()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        shell.spawn().expect("a shell")
    }

    pub(crate) async fn paste_curl_line(&self) -> String {
        let output = self.curl_output(self.spawn_curl()).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("curl prints text")
    }

    pub(crate) async fn curl_output(&self, curl: Child) -> Output {
        let output = within_for(START_TIMEOUT, "the end of curl", self.process.log(), curl.wait_with_output()).await;
        output.expect("curl's output")
    }

    /// Returns the process id of one of its parts, by its command line.
    pub(crate) fn part(&self, words: &str) -> String {
        let pid = self.process.pid().expect("it runs").to_string();
        let found = std::process::Command::new("pgrep").args(["-P", &pid, "-f", words]).output().expect("pgrep");
        let found = String::from_utf8_lossy(&found.stdout).trim().to_owned();
        assert!(!found.is_empty() && !found.contains('\n'), "{words}: {found}");
        found
    }

    /// Stops it as `kill` and Ctrl-C do.
    pub(crate) async fn stop(self) {
        self.process.terminate().await;
        self.ended().await;
    }

    /// Waits until it has stopped in order, and all its parts with it, which hold its output open.
    pub(crate) async fn ended(mut self) {
        let status = self.process.wait_exit().await;
        assert!(status.success(), "{status}\n{}", self.process.log().dump());
        self.process.log().wait_until_closed().await;
        assert!(self.printed("modelrelay: stopped"));
    }
}

/// The command with these variables.
pub(crate) fn spawn(env: &[(&str, &str)]) -> Spawn {
    let spawn = Spawn::program("modelrelay").arg("up");
    env.iter().fold(spawn, |spawn, (name, value)| spawn.env(*name, *value))
}
