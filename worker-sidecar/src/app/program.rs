//! The worker's command line: reads the settings and runs until a signal, or runs a subcommand.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use modelrelay_multiplexer::driver::supervisor;
use modelrelay_platform::log;
use modelrelay_platform::service::{self, Program};

use super::{connect, convert, install};
use crate::app::cli::{self, Command};
use crate::settings::Args;

static SERVICE: Program = Program {
    service: "ModelRelayWorker",
    title: "ModelRelay worker",
    about: "Connects an inference backend to ModelRelay relays",
    run,
    command: cli::command,
};

/// Runs the command line `words`; the first word is the program's name.
pub fn run(words: Vec<OsString>) -> ExitCode {
    // Before any TLS connection is opened; it fails only if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match cli::parse(words) {
        Ok(Command::Say(text)) => print_text(&text),
        Ok(Command::Run(args)) => crate::app::run::run(&args),
        Ok(Command::Check(args)) => check(&args),
        Ok(Command::Connect(args, connect)) => connect::run(*connect, &args),
        Ok(Command::Demo(args, demo)) => crate::app::run::run_demo(&args, demo),
        Ok(Command::Man(args)) => match modelrelay_manual::man(cli::command(), &args) {
            Ok(page) => print_text(&String::from_utf8_lossy(&page)),
            Err(error) => fail(&format!("modelrelay-worker: {error}")),
        },
        Ok(Command::Convert(args)) => match convert::run(&args) {
            Ok(text) => print_text(&text),
            Err(error) => fail(&error),
        },
        Ok(Command::Install(args)) => match install::run(&args) {
            Ok(target) => print_text(&format!("installed {}\n", target.display())),
            Err(error) => fail(&error),
        },
        Ok(Command::Service(args)) => match service::run(&SERVICE, &args) {
            Ok(text) => print_text(&text),
            Err(error) => fail(&format!("modelrelay-worker: {error}")),
        },
        Ok(Command::Supervise(args)) => supervisor::run(&args),
        Err(error) => fail(&error.to_string()),
    }
}

/// Reports whether a worker would run with these settings, and what it would do.
#[allow(clippy::print_stderr)]
fn check(args: &Args) -> ExitCode {
    match crate::app::check::check(args) {
        Ok(report) => {
            report.warnings.iter().for_each(|warning| eprintln!("modelrelay-worker: warning: {warning}"));
            print_text(&format!("configuration OK\n{}", report.plan))
        }
        Err(mistakes) => {
            mistakes.iter().for_each(|mistake| eprintln!("modelrelay-worker: {mistake}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints to standard output: help and version are command output, not a log. The reader may close the pipe before its
/// end.
fn print_text(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// Reports one line and returns exit code 1; a service writes the line into its log.
fn fail(line: &str) -> ExitCode {
    log::print_error(line);
    ExitCode::FAILURE
}
