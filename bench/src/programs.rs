//! Measured programs: started with their output in a file, and killed when dropped.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};

use crate::usage::Usage;

/// The time in which a program must print the awaited text; the routers load Python first.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// The number of lines of its output that an error shows.
const LAST_LINES: usize = 5;

/// Why a program does not run.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It could not be started, or its output could not be stored.
    #[error("{program}: {error}")]
    Io {
        /// The program.
        program: String,
        /// The cause.
        error: std::io::Error,
    },
    /// It ended, or never reported that it is ready.
    #[error("{program} {what}: {last}")]
    Failed {
        /// The program.
        program: String,
        /// The failure.
        what: String,
        /// The end of its output.
        last: String,
    },
}

/// A running program.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    pid: u32,
    output: PathBuf,
}

impl Program {
    /// Starts it under another command, such as one that enters a network namespace and then executes it.
    pub fn start_under(
        name: &str,
        under: &[String],
        binary: &Path,
        env: &[(&str, String)],
        folder: &Path,
    ) -> Result<Self, ProgramError> {
        let Some((first, rest)) = under.split_first() else {
            return Self::start::<&str>(name, binary, &[], env, folder);
        };
        let args: Vec<_> = rest.iter().map(OsStr::new).chain([binary.as_os_str()]).collect();
        Self::start(name, Path::new(first), &args, env, folder)
    }

    /// Starts it in `folder`, which also gets its output, with only the path, the home and `env` in its environment.
    pub fn start<A: AsRef<OsStr>>(
        name: &str,
        binary: &Path,
        args: &[A],
        env: &[(&str, String)],
        folder: &Path,
    ) -> Result<Self, ProgramError> {
        let failed = |error| ProgramError::Io { program: format!("{name} ({})", binary.display()), error };
        let output = folder.join(format!("{name}.log"));
        let file = std::fs::File::create(&output).map_err(failed)?;
        let mut command = Command::new(binary);
        command.args(args).env_clear().current_dir(folder).kill_on_drop(true);
        command.envs(["PATH", "HOME"].iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(file.try_clone().map_err(failed)?).stderr(file);
        let child = command.spawn().map_err(failed)?;
        let pid = child.id().ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
        Ok(Self { name: name.to_owned(), child, pid, output })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The resources that it has used so far.
    pub fn usage(&self) -> Result<Usage, ProgramError> {
        Usage::of(self.pid).map_err(|error| ProgramError::Io { program: self.name.clone(), error })
    }

    /// Waits for the first line that contains `mark`; returns the text after it, up to the next space.
    pub async fn printed(&mut self, mark: &str) -> Result<String, ProgramError> {
        let begun = Instant::now();
        loop {
            let text = self.output();
            if let Some((_, rest)) = text.split_once(mark)
                && let Some((line, _)) = rest.split_once('\n')
            {
                return Ok(line.split(' ').next().unwrap_or_default().to_owned());
            }
            self.check_running()?;
            if begun.elapsed() > START_PATIENCE {
                return Err(self.failed(&format!("has not printed {mark:?}")));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Returns an error if it has ended.
    pub fn check_running(&mut self) -> Result<(), ProgramError> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.failed(&format!("exited ({status})"))),
            Err(error) => Err(ProgramError::Io { program: self.name.clone(), error }),
        }
    }

    /// Kills it, and waits until it is gone.
    pub async fn stop(mut self) {
        let _ = self.child.kill().await;
    }

    /// Makes an error about it that shows the end of its output.
    pub fn failed(&self, what: &str) -> ProgramError {
        let text = self.output();
        let lines: Vec<_> = text.lines().rev().take(LAST_LINES).collect();
        let last = lines.into_iter().rev().collect::<Vec<_>>().join(" | ");
        ProgramError::Failed { program: self.name.clone(), what: what.to_owned(), last }
    }

    fn output(&self) -> String {
        let bytes = std::fs::read(&self.output).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        without_colours(&text)
    }
}

/// Removes colours, which some programs print even into a file.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        plain.push_str(part.split_once('m').map_or("", |(_, rest)| rest));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, folder: &Path) -> Program {
        Program::start("sh", Path::new("/bin/sh"), &["-c", script], &[], folder).unwrap()
    }

    #[tokio::test]
    async fn awaited_program_output_is_returned() {
        let folder = tempfile::tempdir().unwrap();
        let mut program = shell("echo nothing; echo listening on 127.0.0.1:80 now; exec sleep 60", folder.path());
        assert_eq!(program.printed("listening on ").await.unwrap(), "127.0.0.1:80");
        assert!(program.usage().unwrap().resident > 0);
        program.stop().await;
    }

    #[tokio::test]
    async fn error_names_ended_program_and_its_last_output() {
        let folder = tempfile::tempdir().unwrap();
        let error = shell("echo no such setting; exit 3", folder.path()).printed("listening").await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("sh exited (exit status: 3): no such setting"), "{text}");
    }

    #[test]
    fn colours_are_left_out() {
        assert_eq!(without_colours("\u{1b}[2mat\u{1b}[0m http://x\n"), "at http://x\n");
    }
}
