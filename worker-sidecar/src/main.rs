//! The worker program: reads its settings, runs until a signal, exits.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use modelrelay_platform::log;
use modelrelay_platform::service::{self, Program};
use modelrelay_worker::cli::{self, Args, Command};
use modelrelay_worker::multiplexer::driver::supervisor;
use modelrelay_worker::{check, connect, convert, install};

/// Returns memory after a burst, which glibc's allocator does not.
#[cfg(unix)]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

static SERVICE: Program = Program {
    service: "ModelRelayWorker",
    title: "ModelRelay worker",
    about: "Brings the models of this machine to a relay",
    run: program,
    command: cli::command,
};

fn main() -> ExitCode {
    // Before anything may open a TLS connection; it fails only if somebody did it already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    program(std::env::args_os().collect())
}

fn program(words: Vec<OsString>) -> ExitCode {
    match cli::parse(words) {
        Ok(Command::Say(text)) => say(&text),
        Ok(Command::Run(args)) => modelrelay_worker::run(&args),
        Ok(Command::Check(args)) => check(&args),
        Ok(Command::Connect(args, connect)) => connect::run(*connect, &args),
        Ok(Command::Demo(args, demo)) => modelrelay_worker::run_demo(&args, demo),
        Ok(Command::Man(args)) => match modelrelay_manual::man(cli::command(), &args) {
            Ok(page) => say(&String::from_utf8_lossy(&page)),
            Err(error) => fail(&format!("modelrelay-worker: {error}")),
        },
        Ok(Command::Convert(args)) => match convert::run(&args) {
            Ok(text) => say(&text),
            Err(error) => fail(&error),
        },
        Ok(Command::Install(args)) => match install::run(&args) {
            Ok(target) => say(&format!("installed {}\n", target.display())),
            Err(error) => fail(&error),
        },
        Ok(Command::Service(args)) => match service::run(&SERVICE, &args) {
            Ok(text) => say(&text),
            Err(error) => fail(&format!("modelrelay-worker: {error}")),
        },
        Ok(Command::Supervise(args)) => supervisor::run(&args),
        Err(error) => fail(&error.to_string()),
    }
}

/// Says whether a worker would run with these settings, and what it would do.
#[allow(clippy::print_stderr)]
fn check(args: &Args) -> ExitCode {
    match check::check(args) {
        Ok(report) => {
            report.warnings.iter().for_each(|warning| eprintln!("modelrelay-worker: warning: {warning}"));
            say(&format!("the settings are right\n{}", report.plan))
        }
        Err(mistakes) => {
            mistakes.iter().for_each(|mistake| eprintln!("modelrelay-worker: {mistake}"));
            ExitCode::FAILURE
        }
    }
}

/// Help and version are command output, not a log. Whoever reads it may have seen enough before its end.
fn say(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// One line, exit code 1, whatever was wrong; a service has it in its log.
fn fail(line: &str) -> ExitCode {
    log::complain(line);
    ExitCode::FAILURE
}
