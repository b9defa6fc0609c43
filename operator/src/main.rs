//! The operator's program.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use modelrelay_operator::app::commands;
use modelrelay_operator::crd::LogFormat;
use modelrelay_operator::settings::cli::{Cli, Command};
use modelrelay_operator::telemetry;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    // Before anything may open a TLS connection. It fails only if a provider is already installed, which is just as
    // good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match start(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("modelrelay-operator: {error}");
            ExitCode::FAILURE
        }
    }
}

fn start(cli: Cli) -> Result<(), Box<dyn std::error::Error>> {
    match &cli.command {
        Some(Command::Completions(args)) => {
            return print(modelrelay_manual::completions(&Cli::command(), args).as_bytes());
        }
        Some(Command::Man(args)) => return print(&modelrelay_manual::man(Cli::command(), args)?),
        Some(Command::Crds { .. } | Command::Apply(_) | Command::Delete(_) | Command::Get { .. }) | None => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let Some(command) = cli.command else {
        telemetry::init(&cli.run.log_level, cli.run.log_format)?;
        return Ok(runtime.block_on(modelrelay_operator::app::run(cli.run))?);
    };
    telemetry::init("info", LogFormat::Text)?;
    match command {
        Command::Crds { write, reference } => commands::crds(write.as_deref(), reference)?,
        Command::Apply(args) => runtime.block_on(commands::apply(&args))?,
        Command::Delete(args) => runtime.block_on(commands::delete(&args))?,
        Command::Get { url, timeout } => runtime.block_on(commands::get(&url, timeout))?,
        // Handled above, without a runtime and a log.
        Command::Completions(_) | Command::Man(_) => {}
    }
    Ok(())
}

/// Writes to standard output. Errors are ignored, because the reader may close the pipe before the end.
fn print(text: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    let _ = io::stdout().write_all(text);
    Ok(())
}
