//! The operator's program.

use std::process::ExitCode;

use clap::Parser;
use modelrelay_operator::cli::{Cli, Command};
use modelrelay_operator::crd::LogFormat;
use modelrelay_operator::{commands, telemetry};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    // Before anything may open a TLS connection; it fails only if somebody did it already, which is as good.
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
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let Some(command) = cli.command else {
        telemetry::init(&cli.run.log_level, cli.run.log_format)?;
        return Ok(runtime.block_on(modelrelay_operator::run::run(cli.run))?);
    };
    telemetry::init("info", LogFormat::Text)?;
    match command {
        Command::Crds { write, reference } => commands::crds(write.as_deref(), reference)?,
        Command::Apply(args) => runtime.block_on(commands::apply(&args))?,
        Command::Delete(args) => runtime.block_on(commands::delete(&args))?,
        Command::Get { url, timeout } => runtime.block_on(commands::get(&url, timeout))?,
    }
    Ok(())
}
