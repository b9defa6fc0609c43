//! The supervisor based on process groups, and on Linux also on `/proc`.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

#[cfg(target_os = "linux")]
use modelrelay_platform::own_program;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

#[cfg(target_os = "linux")]
use super::SUBCOMMAND;
use super::SuperviseArgs;

#[cfg(target_os = "linux")]
const WITH_PARENT: &str = "--with-parent";

/// Between two rounds of killing processes that have not died yet or were just forked.
const KILL_PAUSE: Duration = Duration::from_millis(20);

pub(super) async fn supervise(args: &SuperviseArgs) -> io::Result<u8> {
    adopt_orphans();
    // Caught and dropped. Ignoring these signals would be inherited by the command.
    let _unheeded = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    let mut orphan = signal(SignalKind::child())?;
    let mut child = command(&args.command).stdin(Stdio::null()).process_group(0).spawn()?;
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)).ok_or(io::ErrorKind::NotFound)?;

    let mut orders = tokio::io::stdin();
    let mut order = [0_u8; 1];
    let ended = loop {
        tokio::select! {
            status = child.wait() => break Some(status?),
            read = orders.read(&mut order) => match read {
                // The group may be gone already.
                Ok(1..) => {
                    let _ = kill_process_group(group, Signal::TERM);
                }
                Ok(0) | Err(_) => break None,
            },
            _ = orphan.recv() => descendants::reap(group),
        }
    };
    let status = match ended {
        Some(status) if status.success() && args.leave_on_success => status,
        ended => kill_everything(&mut child, group, ended).await?,
    };
    Ok(exit_code(status))
}

pub(super) fn set_apart(command: &mut Command) -> &mut Command {
    command.process_group(0)
}

/// Starts this program first, so that it can configure the signal for its parent's death. The path is that of the
/// running program, even if the file was replaced.
#[cfg(target_os = "linux")]
fn command(words: &[OsString]) -> Command {
    let parent = rustix::process::getpid().as_raw_nonzero().to_string();
    let mut command = Command::new("/proc/self/exe");
    command.args(own_program::selector()).args([SUBCOMMAND, WITH_PARENT, &parent, "--"]).args(words);
    command
}

#[cfg(not(target_os = "linux"))]
fn command(words: &[OsString]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// Returns only if that fails.
#[cfg(target_os = "linux")]
pub(super) fn become_command(parent: i32, words: &[OsString]) -> io::Error {
    use std::os::unix::process::CommandExt;

    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        return error.into();
    }
    // The parent may have died before the kernel knew.
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return io::Error::other("the supervisor has exited");
    }
    std::process::Command::new(&words[0]).args(&words[1..]).exec()
}

/// Repeats until nothing is left: a killed process may have forked a moment before.
async fn kill_everything(child: &mut Child, group: Pid, ended: Option<ExitStatus>) -> io::Result<ExitStatus> {
    let mut ended = ended;
    loop {
        let _ = kill_process_group(group, Signal::KILL);
        let left = descendants::kill();
        if ended.is_none() {
            ended = child.try_wait()?;
        }
        descendants::reap(group);
        match ended {
            Some(status) if left == 0 => return Ok(status),
            Some(_) | None => tokio::time::sleep(KILL_PAUSE).await,
        }
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(target_os = "linux")]
fn adopt_orphans() {
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        tracing::debug!(%error, "orphans go to init");
    }
}

#[cfg(not(target_os = "linux"))]
fn adopt_orphans() {}

/// All running processes that the command ever started, found in `/proc`.
#[cfg(target_os = "linux")]
mod descendants {
    use std::collections::HashMap;

    use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};

    #[derive(Clone, Copy)]
    struct ProcessState {
        parent: i32,
        is_zombie: bool,
    }

    /// Kills them; returns their number.
    pub(super) fn kill() -> usize {
        let alive = all_of(&table(), getpid().as_raw_nonzero().get());
        for pid in alive.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            // It may be gone already.
            let _ = kill_process(pid, Signal::KILL);
        }
        alive.len()
    }

    /// Reaps adopted processes that have ended; the command itself has its own waiter.
    pub(super) fn reap(command: Pid) {
        let own = getpid().as_raw_nonzero().get();
        for (pid, process) in table() {
            if process.parent == own && process.is_zombie && pid != command.as_raw_nonzero().get() {
                let _ = Pid::from_raw(pid).map(|pid| waitpid(Some(pid), WaitOptions::NOHANG));
            }
        }
    }

    fn all_of(table: &HashMap<i32, ProcessState>, root: i32) -> Vec<i32> {
        let mut found = Vec::new();
        let mut parents = vec![root];
        while let Some(parent) = parents.pop() {
            let children = table.iter().filter(|(_, process)| process.parent == parent);
            for (&pid, process) in children {
                parents.push(pid);
                if !process.is_zombie {
                    found.push(pid);
                }
            }
        }
        found
    }

    fn table() -> HashMap<i32, ProcessState> {
        let Ok(entries) = std::fs::read_dir("/proc") else { return HashMap::new() };
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        pids.filter_map(|pid| Some((pid, parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
            .collect()
    }

    /// Parses `pid (name) state parent …`, where the name may contain anything, including parentheses.
    fn parse(stat: &str) -> Option<ProcessState> {
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let is_zombie = matches!(fields.next()?, "Z" | "X");
        Some(ProcessState { parent: fields.next()?.parse().ok()?, is_zombie })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn process_name_may_contain_any_characters() {
            let process = parse("7 (a) S 9 (b) Z 42 7 7 0").unwrap();
            assert!(process.is_zombie && process.parent == 42);
        }

        #[test]
        fn descendants_of_zombies_are_found_without_zombies() {
            let process = |parent, is_zombie| ProcessState { parent, is_zombie };
            let table = HashMap::from([(2, process(1, true)), (3, process(2, false)), (4, process(9, false))]);
            assert_eq!(all_of(&table, 1), [3]);
        }
    }
}

/// Without `/proc`, only the group is known.
#[cfg(not(target_os = "linux"))]
mod descendants {
    use rustix::process::Pid;

    pub(super) fn kill() -> usize {
        0
    }

    pub(super) fn reap(_: Pid) {}
}
