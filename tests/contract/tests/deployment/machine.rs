//! A machine run by systemd, for units: booted in namespaces, with this machine's programs and none of its services.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use modelrelay_harness::process::{Process, Spawn, path_of};
use modelrelay_harness::{cannot_run, poll_for};
use tempfile::TempDir;

/// The timeout for a boot, or for a command with a stop or a start in it. A stop waits for running requests, a restart
/// for `RestartSec`.
const LONG: Duration = Duration::from_secs(60);

/// A machine that boots when created and is removed when dropped.
#[derive(Debug)]
pub(crate) struct Machine {
    supervisor: Child,
    pid: String,
    folder: TempDir,
}

impl Machine {
    /// Boots the machine. Returns `None` if systemd or namespaces are not available.
    pub(crate) async fn boot() -> Option<Self> {
        let wanted = ["/lib/systemd/systemd", "/usr/bin/unshare", "/usr/bin/nsenter"];
        if let Some(missing) = wanted.iter().find(|file| !Path::new(file).exists()) {
            cannot_run(&format!("{missing} is missing: of Debian's packages systemd and util-linux"));
            return None;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/deployment/machine.sh");
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let programs = path_of("modelrelay-relay").parent().expect("the program is in a folder").to_owned();
        let mut command = Command::new("unshare");
        command.args(["--mount", "bash"]).arg(script).arg(folder.path()).arg(repository).arg(programs);
        let log = std::fs::File::create(folder.path().join("log")).expect("the folder is writable");
        let supervisor = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log).spawn();
        let mut machine = Self { supervisor: supervisor.expect("unshare is installed"), pid: String::new(), folder };
        if let Err(why) = machine.await_start().await {
            cannot_run(&format!("systemd cannot be booted next to this machine's own, which needs root: {why}"));
            return None;
        }
        // Commands work shortly after the start; this one then reports whether all units are up or which one failed.
        let up = "until state=$(systemctl is-system-running --wait 2> /dev/null) || [ \"$state\" = degraded ]; do sleep 0.05; done";
        machine.run(up).await;
        Some(machine)
    }

    /// Waits until the script has become systemd, which sees only the new machine; otherwise returns the script's
    /// output.
    async fn await_start(&mut self) -> Result<(), String> {
        let file = self.folder.path().join("pid");
        let started = poll_for(LONG, async || {
            let pid = std::fs::read_to_string(&file).unwrap_or_default();
            let program = std::fs::read_to_string(format!("/proc/{}/comm", pid.trim())).unwrap_or_default();
            if program.trim() == "systemd" {
                return Some(Some(pid.trim().to_owned()));
            }
            let has_ended = self.supervisor.try_wait().is_ok_and(|status| status.is_some());
            (has_ended || !self.log_text().is_empty()).then_some(None)
        });
        match started.await.flatten() {
            Some(pid) => self.pid = pid,
            None => return Err(self.log_text().trim().replace('\n', "; ")),
        }
        Ok(())
    }

    fn log_text(&self) -> String {
        let mut journal = String::new();
        let log = std::fs::File::open(self.folder.path().join("log"));
        let _ = log.and_then(|mut log| log.read_to_string(&mut journal));
        journal
    }

    /// Starts a client that reaches the machine only by its network, and that survives the machine's shutdown:
    /// systemd's last act is to end every remaining process.
    #[must_use]
    pub(crate) fn spawn_client(&self, script: &str) -> Process {
        let args = ["--target", &self.pid, "--net", "bash", "-euo", "pipefail", "-c", script];
        args.iter().fold(Spawn::program("/usr/bin/nsenter"), |spawn, arg| spawn.arg(*arg)).start()
    }

    /// Runs a script, which must succeed, and returns its output.
    pub(crate) async fn run(&self, script: &str) -> String {
        let (succeeded, printed) = self.attempt(script).await;
        assert!(succeeded, "in the machine:\n{script}\n{printed}\n{}", self.journal().await);
        printed
    }

    /// Runs a script; returns whether it succeeded, and its output.
    pub(crate) async fn attempt(&self, script: &str) -> (bool, String) {
        let command = self.command(script);
        let output = tokio::process::Command::new(&command[0]).args(&command[1..]).kill_on_drop(true).output();
        let output =
            tokio::time::timeout(LONG, output).await.unwrap_or_else(|_| panic!("timed out after {LONG:?}:\n{script}"));
        let output = output.expect("nsenter is installed");
        let printed = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&printed).trim().to_owned())
    }

    fn command(&self, script: &str) -> Vec<String> {
        let enter = ["/usr/bin/nsenter", "--target", &self.pid];
        let kinds = ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--root", "--wd"];
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let shell = ["env", "-i", path, "HOME=/root", "bash", "-euo", "pipefail", "-c"];
        let words = enter.iter().chain(&kinds).chain(&shell).map(ToString::to_string);
        words.chain([format!("cd /clone\n{script}")]).collect()
    }

    async fn journal(&self) -> String {
        self.attempt("journalctl --no-pager --lines 60").await.1
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The machine lives until this end of the pipe is closed.
        drop(self.supervisor.stdin.take());
        let status = self.supervisor.wait();
        if !self.pid.is_empty() && !std::thread::panicking() {
            assert!(
                status.is_ok_and(|status| status.success()),
                "the machine is not cleared away: {}",
                self.log_text()
            );
        }
    }
}
