//! The worker program: reads its settings, runs until a signal, exits.

use std::process::ExitCode;

use modelrelay_worker::cli::{self, Command};
use modelrelay_worker::multiplexer::driver::supervisor;
use tikv_jemallocator::Jemalloc;

/// Returns memory after a burst, which glibc's allocator does not.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    // Before anything may open a TLS connection; it fails only if somebody did it already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match cli::parse(std::env::args_os()) {
        Ok(Command::Say(text)) => say(&text),
        Ok(Command::Run(args)) => modelrelay_worker::run(&args),
        Ok(Command::Demo(args, demo)) => modelrelay_worker::run_demo(&args, demo),
        Ok(Command::Supervise(args)) => supervisor::run(&args),
        Err(error) => fail(&error.to_string()),
    }
}

/// Help and version are command output, not a log.
#[allow(clippy::print_stdout)]
fn say(text: &str) -> ExitCode {
    print!("{text}");
    ExitCode::SUCCESS
}

/// One line, exit code 1, whatever was wrong.
#[allow(clippy::print_stderr)]
fn fail(line: &str) -> ExitCode {
    eprintln!("{line}");
    ExitCode::FAILURE
}
