//! The command line: a run's flags, or a subcommand with its own.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use modelrelay_manual::{CompletionsArgs, ManArgs};
use modelrelay_multiplexer::driver::supervisor::SuperviseArgs;
use modelrelay_platform::service::ServiceArgs;

use crate::app::connect::ConnectArgs;
use crate::app::convert::ConvertArgs;
use crate::app::demo::DemoArgs;
use crate::app::install::InstallArgs;
use crate::settings::Args;

/// The requested command.
#[derive(Debug)]
pub enum Command {
    /// Print this and exit: help, version, or completions.
    Say(String),
    /// Run the worker.
    Run(Box<Args>),
    /// Check the settings and exit.
    Check(Box<Args>),
    /// Set up a worker interactively.
    Connect(Box<Args>, Box<ConnectArgs>),
    /// Run the demo backend.
    Demo(Box<Args>, DemoArgs),
    /// Print the manual page, or write all pages.
    Man(ManArgs),
    /// Convert another program's configuration into a worker.yaml.
    Convert(ConvertArgs),
    /// Copy this program into a container of another image.
    Install(InstallArgs),
    /// Install or remove a Windows service.
    Service(ServiceArgs),
    /// Run between a worker and a backend that it has started.
    Supervise(SuperviseArgs),
}

#[derive(Debug, Parser)]
#[command(
    name = "modelrelay-worker",
    version,
    about = "Connects an inference backend to ModelRelay relays",
    max_term_width = 110
)]
struct Cli {
    #[command(flatten)]
    args: Args,
    #[command(subcommand)]
    subcommand: Option<WorkerSubcommand>,
}

const CHECK: &str = "check";

#[derive(Debug, Subcommand)]
enum WorkerSubcommand {
    /// Set up this machine as a worker interactively
    Connect(Box<ConnectArgs>),
    /// Validate the settings and the file of --config, then exit
    Check(Box<Args>),
    /// Serve a built-in demo backend, which needs no model
    Demo(DemoArgs),
    /// Generate shell completions
    Completions(CompletionsArgs),
    /// Print the manual page
    Man(ManArgs),
    /// Convert another program's configuration to a worker.yaml, with a note for each setting without a counterpart
    Convert(ConvertArgs),
    /// Copy this program into a folder that a container of another image mounts
    Install(InstallArgs),
    /// Install or remove the worker's Windows service
    #[cfg_attr(not(windows), command(hide = true))]
    Service(ServiceArgs),
    /// Run a backend for a worker, and stop it when standard input closes
    #[command(hide = true)]
    Supervise(SuperviseArgs),
}

/// An invalid command line, as one line.
#[derive(Debug)]
pub struct CliError(String);

impl std::fmt::Display for CliError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CliError {}

/// Parses the command line and the environment.
pub fn parse<I, T>(arguments: I) -> Result<Command, CliError>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let read = command().try_get_matches_from(arguments).and_then(|matches| {
        let mut cli = Cli::from_arg_matches(&matches)?;
        if let Some(after) = matches.subcommand_matches(CHECK) {
            cli.args.update_from_arg_matches(after)?;
        }
        Ok(cli)
    });
    match read {
        Ok(Cli { args, subcommand }) => {
            let args = Box::new(args.without_empty());
            Ok(match subcommand {
                None => Command::Run(args),
                Some(WorkerSubcommand::Check(_)) => Command::Check(args),
                Some(WorkerSubcommand::Connect(connect)) => Command::Connect(args, connect),
                Some(WorkerSubcommand::Demo(demo)) => Command::Demo(args, demo),
                Some(WorkerSubcommand::Completions(args)) => {
                    Command::Say(modelrelay_manual::completions(&command(), &args))
                }
                Some(WorkerSubcommand::Man(args)) => Command::Man(args),
                Some(WorkerSubcommand::Convert(convert)) => Command::Convert(convert),
                Some(WorkerSubcommand::Install(install)) => Command::Install(install),
                Some(WorkerSubcommand::Service(service)) => Command::Service(service),
                Some(WorkerSubcommand::Supervise(supervise)) => Command::Supervise(supervise),
            })
        }
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            Ok(Command::Say(error.to_string()))
        }
        Err(error) => Err(CliError(first_line(&error.to_string()))),
    }
}

/// Returns the whole command line. `check` also accepts the flags of a run after it, which take precedence over those
/// before it; the variables are those of the run.
pub fn command() -> clap::Command {
    Cli::command().mut_subcommands(|command| match command.get_name() {
        CHECK => command.mut_args(|argument| argument.env(None::<&str>)),
        _ => command,
    })
}

fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or("invalid command line");
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_flag_error_is_one_line() {
        let error = parse(["modelrelay-worker", "--colour", "red"]).unwrap_err().to_string();
        assert!(error.contains("--colour") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn help_and_version_are_output() {
        for flag in ["--help", "--version"] {
            assert!(matches!(parse(["modelrelay-worker", flag]), Ok(Command::Say(_))), "{flag}");
        }
    }
}
