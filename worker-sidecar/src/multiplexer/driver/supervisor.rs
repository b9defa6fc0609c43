//! What stands between the worker and each process that it starts: `modelrelay-worker supervise -- COMMAND…`.
//!
//! A worker that is killed cannot kill its children, and a model server without a parent keeps the GPU for ever. So each
//! command runs under a small process of this same program, which ends the command when its standard input closes: the
//! kernel closes that, however the worker ended. The command gets a process group of its own; what left that group is
//! still found, because the supervisor adopts whatever its descendants orphan (Linux), so that everything the command
//! ever started stays in its tree. The supervisor is in a group of its own too: Ctrl-C in a terminal is the worker's to
//! handle.
//!
//! A supervisor that is killed itself takes the command with it, too (Linux): the command is told to the kernel as one that
//! dies with its parent. That can only be said from inside the new process, before it becomes the command, so this program
//! is also what the command is started through.
//!
//! Signals that ask a program to end change nothing here: a service manager may send them to all processes of the worker's
//! service, and the worker, which gets them too, lets running requests end first.
//!
//! Orders come over standard input: a byte is "SIGTERM to the group", the end is "SIGKILL to everything". The supervisor
//! ends when nothing of the command is left, with the command's exit code, or 128 and the signal that ended it.
//!
//! Windows has a job for all that, whose processes end with it, and with the supervisor that holds it. It has no signal that
//! asks, so that both orders end everything at once; what the worker still has running there ended before. The supervisor
//! waits for the command itself there; what that started ends in the same moment, or an instant after it. A console of its
//! own keeps Ctrl-C from the command.

use std::ffi::OsString;
use std::process::ExitCode;

use modelrelay_platform::scheduling;
use tokio::process::Command;

#[cfg_attr(unix, path = "supervisor/unix.rs")]
#[cfg_attr(windows, path = "supervisor/windows.rs")]
mod of_system;

/// The hidden subcommand.
pub const SUBCOMMAND: &str = "supervise";

/// Leaves alone what a command has started, if the command itself succeeds.
pub const LEAVE_ON_SUCCESS: &str = "--leave-on-success";

/// What a shell says when a command cannot be started.
const CANNOT_START: u8 = 127;

/// Arguments of the hidden subcommand.
#[derive(Debug, Clone, clap::Args)]
pub struct SuperviseArgs {
    /// Leave what the command has started alone, if the command itself succeeds
    #[arg(long)]
    pub leave_on_success: bool,
    /// Become the command instead, and die with the process of this id, which must be the parent
    #[arg(long, value_name = "PID")]
    pub with_parent: Option<i32>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Runs the command to its end, or until standard input closes.
#[allow(clippy::print_stderr)] // Its standard error is the worker's log.
pub fn run(args: &SuperviseArgs) -> ExitCode {
    scheduling::be_usual();
    #[cfg(target_os = "linux")]
    if let Some(parent) = args.with_parent {
        let error = of_system::become_command(parent, &args.command);
        eprintln!("cannot run {}: {error}", args.command[0].display());
        return ExitCode::from(CANNOT_START);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("the supervisor cannot start: {error}");
            return ExitCode::from(CANNOT_START);
        }
    };
    let ended = runtime.block_on(of_system::supervise(args));
    // A thread may still be reading standard input.
    runtime.shutdown_background();
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("cannot run {}: {error}", args.command[0].display());
            ExitCode::from(CANNOT_START)
        }
    }
}

/// Has a supervisor that is about to be started hear nothing of what is typed for the worker.
pub fn set_apart(command: &mut Command) -> &mut Command {
    of_system::set_apart(command)
}
