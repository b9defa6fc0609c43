//! The process between the worker and each process that it starts: `modelrelay-worker supervise -- COMMAND…`.
//!
//! A worker that is killed cannot kill its children, and a model server without a parent would keep the GPU
//! indefinitely. So each command runs under a small process of this same program, which ends the command when its
//! standard input closes: the kernel closes that however the worker ended. The command gets its own process group; a
//! process that left the group is still found, because the supervisor adopts the orphans of its descendants (Linux), so
//! that every process that the command ever started stays in its tree. The supervisor is in its own group too: the
//! worker handles Ctrl-C in a terminal.
//!
//! If the supervisor itself is killed, the command dies with it, too (Linux): the kernel kills the command with its
//! parent. That can only be configured from inside the new process, before it becomes the command, so the command is
//! started through this program.
//!
//! The supervisor ignores signals that request termination: a service manager may send them to all processes of the
//! worker's service, and the worker, which gets them too, lets running requests end first.
//!
//! Orders arrive over standard input: a byte means "SIGTERM to the group", the end means "SIGKILL to everything". The
//! supervisor ends when nothing of the command is left, with the command's exit code, or 128 plus the signal that ended
//! it.
//!
//! On Windows a job does all that: its processes end with it, and with the supervisor that holds it. Windows has no
//! signal that requests termination, so both orders end everything at once; the requests that the worker was running
//! there have ended before. The supervisor waits for the command itself; processes that the command started end at the
//! same moment, or an instant later. A separate console keeps Ctrl-C from the command.

use std::ffi::OsString;
use std::process::ExitCode;

use modelrelay_platform::scheduling;
use tokio::process::Command;

#[cfg_attr(unix, path = "supervisor/unix.rs")]
#[cfg_attr(windows, path = "supervisor/windows.rs")]
mod of_system;

/// The hidden subcommand.
pub const SUBCOMMAND: &str = "supervise";

/// Keeps the processes that a command has started, if the command itself succeeds.
pub const LEAVE_ON_SUCCESS: &str = "--leave-on-success";

/// The exit code of a shell for a command that cannot be started.
const CANNOT_START: u8 = 127;

/// Arguments of the hidden subcommand.
#[derive(Debug, Clone, clap::Args)]
pub struct SuperviseArgs {
    /// Keep the processes that the command started if the command succeeds
    #[arg(long)]
    pub leave_on_success: bool,
    /// Replace this process with the command, which is killed when the process with this id, its parent, exits
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
            eprintln!("cannot start the supervisor: {error}");
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

/// Keeps terminal input for the worker from a supervisor that is about to be started.
pub fn set_apart(command: &mut Command) -> &mut Command {
    of_system::set_apart(command)
}
