//! The supervisor based on a Windows job.

use std::io;
use std::process::Stdio;

use process_wrap::tokio::{CommandWrap, JobObject, KillOnDrop};
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use super::SuperviseArgs;

/// `CREATE_NO_WINDOW`: an invisible console without keyboard input.
const OWN_CONSOLE: u32 = 0x0800_0000;

pub(super) async fn supervise(args: &SuperviseArgs) -> io::Result<u8> {
    let mut command = CommandWrap::with_new(&args.command[0], |command| {
        command.args(&args.command[1..]).stdin(Stdio::null());
    });
    command.wrap(JobObject);
    if !args.leave_on_success {
        // The job dies with its holder, thus also when this process is killed.
        command.wrap(KillOnDrop);
    }
    let mut child = command.spawn()?;
    let mut orders = tokio::io::stdin();
    let mut order = [0_u8; 1];
    let ended = tokio::select! {
        status = child.wait() => Some(status?),
        // Either order, or the worker's end.
        _ = orders.read(&mut order) => None,
    };
    let status = match ended {
        Some(status) if status.success() && args.leave_on_success => status,
        Some(status) => {
            // It may be gone already.
            let _ = child.start_kill();
            status
        }
        None => {
            child.start_kill()?;
            child.wait().await?
        }
    };
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

pub(super) fn set_apart(command: &mut Command) -> &mut Command {
    command.creation_flags(OWN_CONSOLE)
}
