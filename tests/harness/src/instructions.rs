//! The instructions that a program executes, counted by valgrind's callgrind: for promises about costs that hold on a
//! busy machine, too.

use std::{path::PathBuf, process::Command};

use tempfile::TempDir;

use crate::process::Spawn;

/// The allocator returns memory after certain times, and thus more often on a busy machine. Neither is counted here.
const ALLOCATOR_WITHOUT_CLOCK: &str = "experimental_tcache_gc:false,dirty_decay_ms:-1,muzzy_decay_ms:-1";

/// A count that callgrind writes when the program ends. Each belongs to one program.
#[derive(Debug)]
pub struct Instructions {
    dir: TempDir,
    core: String,
}

impl Instructions {
    /// Prepares a count if this machine supports it; otherwise reports why and returns `None`.
    #[must_use]
    pub fn new() -> Option<Self> {
        for (program, package) in [("valgrind", "valgrind"), ("taskset", "util-linux")] {
            let probe = Command::new(program).arg("--version").output();
            if !probe.is_ok_and(|output| output.status.success()) {
                crate::cannot_run(&format!("{program} is missing: apt-get install {package}"));
                return None;
            }
        }
        let Some(core) = allowed_core(&std::fs::read_to_string("/proc/self/status").unwrap_or_default()) else {
            crate::cannot_run("/proc/self/status does not list the allowed cores");
            return None;
        };
        Some(Self { dir: tempfile::tempdir().expect("a temporary folder"), core })
    }

    /// Runs the program with counting. It sees only one core, so that it has one thread for its work: how several
    /// threads wake each other depends on the machine.
    #[must_use]
    pub fn of(&self, program: Spawn) -> Spawn {
        let out = format!("--callgrind-out-file={}", self.path().display());
        let program = program.env("_RJEM_MALLOC_CONF", ALLOCATOR_WITHOUT_CLOCK);
        program.under(["taskset", "-c", &self.core, "valgrind", "-q", "--tool=callgrind", &out, "--"])
    }

    /// The number of instructions that the program executed, from its start to its end.
    ///
    /// # Panics
    /// If it has not ended.
    #[must_use]
    pub fn count(&self) -> u64 {
        let text = std::fs::read_to_string(self.path()).expect("callgrind writes when the program ends");
        summary(&text).expect("callgrind's file has a summary")
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("callgrind.out")
    }
}

/// The first core that this process may use.
fn allowed_core(status: &str) -> Option<String> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let first = list.trim().split([',', '-']).next()?;
    Some(first.to_owned())
}

fn summary(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("summary: "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_core_and_instruction_count_are_parsed() {
        assert_eq!(allowed_core("Name:\tx\nCpus_allowed_list:\t2-3,7\n").as_deref(), Some("2"));
        assert_eq!(allowed_core("Cpus_allowed_list:\t0\n").as_deref(), Some("0"));
        assert_eq!(summary("events: Ir\nsummary: 2910208\ntotals: 2910426\n"), Some(2_910_208));
        assert_eq!(summary("events: Ir\n"), None);
    }
}
