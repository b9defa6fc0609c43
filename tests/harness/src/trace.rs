//! The system calls of a program under test, recorded by `strace`: for promises about the use of the kernel.

use std::{path::PathBuf, process::Command};

use tempfile::TempDir;

use crate::process::Spawn;

/// A record that strace writes while the program runs. Each belongs to one program.
#[derive(Debug)]
pub struct Trace {
    dir: TempDir,
}

/// One system call that returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Its name.
    pub name: String,
    /// The text between its brackets, with data truncated after 1,024 bytes.
    pub args: String,
    /// The text after the `=`: a number, or -1 and the error's name.
    pub result: String,
}

impl Trace {
    /// Prepares a record if this machine supports it; otherwise reports why and returns `None`.
    #[must_use]
    pub fn new() -> Option<Self> {
        let probe = Command::new("strace").args(["-D", "-f", "-o", "/dev/null", "true"]).output();
        match probe {
            Ok(output) if output.status.success() => {
                Some(Self { dir: tempfile::tempdir().expect("a temporary folder") })
            }
            Ok(output) => {
                let why = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
                crate::cannot_run(&format!("strace may not trace here: {why}"));
                None
            }
            Err(error) => {
                crate::cannot_run(&format!("strace is missing ({error}): apt-get install strace"));
                None
            }
        }
    }

    /// Runs the program with recording. It remains the child that was spawned: the tracer is a separate child (`-D`)
    /// and ends with it.
    #[must_use]
    pub fn of(&self, program: Spawn, filter: &str) -> Spawn {
        let (path, filter) = (self.path().to_string_lossy().into_owned(), format!("trace={filter}"));
        program.under([
            "strace",
            "-D",
            "-f",
            "-qq",
            "-s",
            "1024",
            "-e",
            &filter,
            "-e",
            "signal=none",
            "-o",
            &path,
            "--",
        ])
    }

    /// All calls that returned so far, in the order of their returns.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        parse(&String::from_utf8_lossy(&std::fs::read(self.path()).unwrap_or_default()))
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("trace")
    }
}

impl Call {
    /// The file descriptor that is its first argument.
    #[must_use]
    pub fn fd(&self) -> Option<i32> {
        self.args.split([',', ' ']).next()?.parse().ok()
    }

    /// The returned value, unless it is an error.
    #[must_use]
    pub fn value(&self) -> Option<i64> {
        self.result.split(' ').next()?.parse().ok().filter(|value| *value >= 0)
    }

    /// True if it sends data over a descriptor, and the kernel accepted some.
    #[must_use]
    pub fn is_send(&self) -> bool {
        ["write", "writev", "sendto", "sendmsg"].contains(&self.name.as_str())
            && self.value().is_some_and(|sent| sent > 0)
    }
}

/// Parses lines of the form `PID name(args) = result`. If another thread's line comes between, the first half ends with
/// `<unfinished ...>` and the second begins `PID <... name resumed>`.
fn parse(text: &str) -> Vec<Call> {
    let mut begun: Vec<(&str, &str)> = Vec::new();
    let mut calls = Vec::new();
    for line in text.lines() {
        let Some((pid, rest)) = line.split_once(' ') else { continue };
        let rest = rest.trim_start();
        if let Some(first_half) = rest.strip_suffix("<unfinished ...>") {
            begun.push((pid, first_half));
            continue;
        }
        let whole = match rest.strip_prefix("<... ").and_then(|rest| rest.split_once(" resumed>")) {
            Some((_, second_half)) => {
                let Some(at) = begun.iter().position(|(of, _)| *of == pid) else { continue };
                format!("{}{second_half}", begun.remove(at).1)
            }
            None => rest.to_owned(),
        };
        calls.extend(call(&whole));
    }
    calls
}

fn call(line: &str) -> Option<Call> {
    let (name, rest) = line.split_once('(')?;
    let (args, result) = rest.rsplit_once(") = ").or_else(|| {
        // A short line is padded before its `=`.
        let (args, result) = rest.rsplit_once(" = ")?;
        Some((args.trim_end().strip_suffix(')')?, result))
    })?;
    Some(Call { name: name.to_owned(), args: args.to_owned(), result: result.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_and_broken_lines_are_read() {
        let text = "7 accept4(9, {sa_family=AF_INET, sin_port=htons(1)}, [16], SOCK_CLOEXEC) = 12\n\
                    7 sendto(12, \"a) = 3\", 6, MSG_NOSIGNAL, NULL, 0 <unfinished ...>\n\
                    8 close(4)          = 0\n\
                    7 <... sendto resumed>) = 6\n\
                    8 connect(5, {sa_family=AF_INET}, 16) = -1 EINPROGRESS (Operation now in progress)\n\
                    8 +++ exited with 0 +++\n";
        let calls = parse(text);
        let names: Vec<_> = calls.iter().map(|call| (call.name.as_str(), call.fd(), call.value())).collect();
        assert_eq!(
            names,
            [
                ("accept4", Some(9), Some(12)),
                ("close", Some(4), Some(0)),
                ("sendto", Some(12), Some(6)),
                ("connect", Some(5), None)
            ]
        );
        assert!(calls[2].is_send() && calls[2].args.contains("a) = 3"), "{calls:?}");
    }
}
