//! `PROGRAM service install|uninstall`: the program as a Windows service, which starts with the machine and without a
//! user session.
//!
//! The service manager's stop is a [signal](crate::signals) like SIGTERM. Until the program has ended, the service
//! reports that it is still stopping, and the manager waits. A service has no terminal, so its log lines go to a
//! [file](crate::log). Other systems have service managers that need nothing from a program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

#[cfg(windows)]
mod installed;
#[cfg(windows)]
mod running;

#[cfg(windows)]
pub(crate) use running::{is_running, stop_requested};

/// The subcommand's name.
pub const SUBCOMMAND: &str = "service";

/// The properties of a program as a Windows service.
#[derive(Debug)]
pub struct Program {
    /// The service name.
    pub service: &'static str,
    /// The display name.
    pub title: &'static str,
    /// The description.
    pub about: &'static str,
    /// Runs the program with these arguments. The first is its name.
    pub run: fn(Vec<OsString>) -> ExitCode,
    /// Returns the program's command line, which names its environment variables.
    pub command: fn() -> clap::Command,
}

/// Arguments of `service`.
#[derive(Debug, Clone, Args)]
pub struct ServiceArgs {
    /// The action to run.
    #[command(subcommand)]
    pub action: Action,
}

/// The actions on the service.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// Install this program as a Windows service, which restarts on failure
    Install(InstallArgs),
    /// Stop the service after running requests finish, and remove it
    Uninstall,
    /// Command that the service manager runs
    #[command(hide = true)]
    Run(RunArgs),
}

/// Arguments of `service install`.
#[derive(Debug, Clone, Args)]
pub struct InstallArgs {
    /// Configuration file of the program; its folder becomes the working directory
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Log file [default: the configuration file's name with the extension .log]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Account to run as, without a password, such as "NT AUTHORITY\LocalService"; it must be able to read the
    /// configuration and the files named there, and to write the log [default: LocalSystem]
    #[arg(long, value_name = "NAME")]
    pub account: Option<OsString>,
    /// More flags for the program; other users can read them, so put secrets into files
    #[arg(last = true, value_name = "FLAGS")]
    pub flags: Vec<OsString>,
}

/// Arguments of `service run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Log file
    #[arg(long, value_name = "FILE")]
    pub log: PathBuf,
    /// Working directory
    #[arg(long, value_name = "DIR")]
    pub folder: PathBuf,
    /// Flags for the program
    #[arg(last = true, value_name = "FLAGS")]
    pub flags: Vec<OsString>,
}

/// Executes the action and returns a message about it; the message is empty after the service has run to its end.
#[cfg(windows)]
pub fn run(program: &'static Program, args: &ServiceArgs) -> Result<String, String> {
    match &args.action {
        Action::Install(args) => installed::install(program, args),
        Action::Uninstall => installed::uninstall(program),
        Action::Run(args) => running::run(program, args),
    }
}

/// The environment variables that the program's settings may come from.
#[cfg(any(windows, test))]
fn variables(program: &Program) -> Vec<OsString> {
    (program.command)().get_arguments().filter_map(|argument| argument.get_env().map(OsString::from)).collect()
}

/// Returns an error that names the alternatives.
#[cfg(not(windows))]
pub fn run(_: &'static Program, _: &ServiceArgs) -> Result<String, String> {
    Err("this command is for Windows only; systemd and launchd run the program directly: see docs/how-to/services.md"
        .to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    #[test]
    fn service_variables_match_settings_of_program() {
        let command = || {
            let setting = |name| Arg::new(name).long(name);
            clap::Command::new("program").args([
                setting("secret").env("SECRET"),
                setting("listen").env("LISTEN_ADDR"),
                setting("bare"),
            ])
        };
        let program = Program { service: "S", title: "", about: "", run: |_| ExitCode::SUCCESS, command };
        assert_eq!(variables(&program), ["SECRET", "LISTEN_ADDR"]);
    }
}
