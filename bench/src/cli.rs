//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use serde::Serialize;

use crate::crowd::Crowd;
use crate::load::{Load, PROMPT_BYTES, Until};
use crate::run::{Options, Report, run};
use crate::scenarios::{Extent, Part};
use crate::systems::{Installed, System};
use crate::{backend, played, scale};

#[derive(Debug, Parser)]
#[command(
    name = "modelrelay-bench",
    version,
    about = "Measures relay and worker in comparison with other proxies",
    max_term_width = 110
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure all systems
    Run(RunArgs),
    /// Measure the scalability of one relay and the cost of features
    Scale(ScaleArgs),
    /// Send requests, compare every byte of every response, and print the outcome as JSON
    Load(LoadArgs),
    /// Run the backend that all systems are measured in front of
    Backend(BackendArgs),
    /// Run idle workers until interrupted
    Crowd(CrowdArgs),
    /// Run one worker that responds by itself as the backend would, until the relay disconnects
    Worker(WorkerArgs),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Rounds; each round measures every system
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only these parts, separated by commas [default: all]
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    only: Vec<Part>,
    /// Only these systems, separated by commas [default: all]
    #[arg(long, value_name = "SYSTEMS", value_delimiter = ',')]
    systems: Vec<System>,
    /// Measure briefly, as a smoke test
    #[arg(long)]
    quick: bool,
    /// Folder with modelrelay-relay and modelrelay-worker
    #[arg(long, value_name = "FOLDER", default_value = "target/release")]
    programs: PathBuf,
    /// Folder with vllm-router and sglang-router [default: none; they are not measured]
    #[arg(long, value_name = "FOLDER")]
    routers: Option<PathBuf>,
    /// The program rathole [default: none; it is not measured]
    #[arg(long, value_name = "FILE")]
    rathole: Option<PathBuf>,
    /// File for the measurements, as JSON [default: standard output]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct ScaleArgs {
    /// Only these parts, separated by commas [default: all]
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    only: Vec<scale::Part>,
    /// Measure briefly, as a smoke test
    #[arg(long)]
    quick: bool,
    /// Folder with modelrelay-relay and modelrelay-worker
    #[arg(long, value_name = "FOLDER", default_value = "target/release")]
    programs: PathBuf,
    /// File for the measurements, as JSON [default: standard output]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct WorkerArgs {
    /// The relay, whose provider `local` has the secret `bench-worker-secret`
    #[arg(long, value_name = "ADDR")]
    relay: SocketAddr,
    /// Use the earlier protocol, which supports only text
    #[arg(long)]
    text: bool,
}

#[derive(Debug, clap::Args)]
struct CrowdArgs {
    /// The relay, whose provider `local` has the secret `bench-worker-secret`
    #[arg(long, value_name = "ADDR")]
    relay: SocketAddr,
    /// Number of workers
    #[arg(long, value_name = "N", default_value_t = 1000)]
    workers: u32,
}

#[derive(Debug, clap::Args)]
struct LoadArgs {
    /// Address to send requests to
    #[arg(long, value_name = "ADDR")]
    to: SocketAddr,
    /// Connections, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    connections: u32,
    /// Bytes of a request's body
    #[arg(long, value_name = "N", default_value_t = PROMPT_BYTES)]
    prompt_bytes: usize,
    /// Events of each stream; 0 requests plain responses
    #[arg(long, value_name = "N", default_value_t = 0)]
    chunks: u32,
    /// Milliseconds between two events, or before a plain response; 0 is as fast as possible
    #[arg(long, value_name = "MS", default_value_t = 0)]
    gap_ms: u64,
    /// Disconnect after this number of events instead of reading to the end [default: never]
    #[arg(long, value_name = "N")]
    leave_after: Option<u32>,
    /// Duration of the load
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    seconds: f64,
    /// Number of requests on each connection, however long they take [default: none]
    #[arg(long, value_name = "N")]
    requests: Option<u32>,
}

#[derive(Debug, clap::Args)]
struct BackendArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
}

/// Parses the command line and runs its command.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    modelrelay_relay::system::open_files::raise_limit();
    // One thread: a client or backend that spreads over the machine uses the processors that it measures.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let done = runtime.block_on(async {
        match cli.command {
            Command::Load(args) => load(&args).await,
            Command::Backend(args) => serve(&args).await,
            Command::Crowd(args) => crowd(&args).await,
            Command::Worker(args) => {
                played::serve(args.relay, args.text, || print_line(&format!("registered at {}", args.relay))).await?;
                Ok(ExitCode::SUCCESS)
            }
            Command::Scale(args) => tokio::select! {
                done = measure_scale(args) => done,
                signal = ended() => Ok(signal.map(|()| ExitCode::FAILURE)?),
            },
            // Dropped when interrupted, together with every program that it has started.
            Command::Run(args) => tokio::select! {
                done = measure(args) => done,
                signal = ended() => Ok(signal.map(|()| ExitCode::FAILURE)?),
            },
        }
    });
    match done {
        Ok(code) => code,
        Err(error) => fail(error.as_ref()),
    }
}

type Done = Result<ExitCode, Box<dyn std::error::Error>>;

async fn load(args: &LoadArgs) -> Done {
    let until = match args.requests {
        Some(count) => Until::Requests(count),
        None => Until::Elapsed(Duration::try_from_secs_f64(args.seconds)?),
    };
    let outcome = Load {
        connections: args.connections,
        prompt_bytes: args.prompt_bytes,
        chunks: args.chunks,
        gap: Duration::from_millis(args.gap_ms),
        leave_after: args.leave_after,
        ..Load::new(args.to, until)
    };
    let outcome = outcome.run().await;
    write_json(&outcome, None)?;
    Ok(if outcome.wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn measure(args: RunArgs) -> Done {
    let all_or = |parts: Vec<Part>| if parts.is_empty() { Part::ALL.to_vec() } else { parts };
    let options = Options {
        rounds: args.rounds,
        systems: if args.systems.is_empty() { System::ALL.to_vec() } else { args.systems },
        parts: all_or(args.only),
        extent: if args.quick { Extent::QUICK } else { Extent::FULL },
        quick: args.quick,
        installed: Installed {
            programs: std::path::absolute(args.programs)?,
            routers: args.routers.map(std::path::absolute).transpose()?,
            rathole: args.rathole.map(std::path::absolute).transpose()?,
        },
    };
    let folder = tempfile::tempdir()?;
    let report = run(&options, folder.path(), |text| eprintln!("{text}")).await?;
    write_json(&report, args.json.as_deref())?;
    Ok(judge(&report))
}

async fn measure_scale(args: ScaleArgs) -> Done {
    let options = scale::Options {
        parts: if args.only.is_empty() { scale::Part::ALL.to_vec() } else { args.only },
        extent: if args.quick { scale::Extent::QUICK } else { scale::Extent::FULL },
        quick: args.quick,
        installed: Installed { programs: std::path::absolute(args.programs)?, routers: None, rathole: None },
    };
    let folder = tempfile::tempdir()?;
    let report = scale::run(&options, folder.path(), |text| eprintln!("{text}")).await?;
    write_json(&report, args.json.as_deref())?;
    report.faults.iter().for_each(|fault| eprintln!("modelrelay-bench: {fault}"));
    Ok(if report.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A slow result is a success. A wrong byte, or a ModelRelay program that does not run, is a failure.
fn judge(report: &Report) -> ExitCode {
    let faults = report.own_faults();
    for fault in &faults {
        eprintln!("modelrelay-bench: {fault}");
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn crowd(args: &CrowdArgs) -> Done {
    let crowd = Crowd::connect(args.relay, args.workers).await?;
    print_line(&format!("{} workers are registered", args.workers));
    ended().await?;
    print_line(&format!("{} of them were lost", crowd.lost()));
    Ok(ExitCode::SUCCESS)
}

/// Waits for SIGINT or SIGTERM.
async fn ended() -> std::io::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted,
        _ = terminate.recv() => Ok(()),
    }
}

async fn serve(args: &BackendArgs) -> Done {
    let listener = tokio::net::TcpListener::bind(args.listen).await?;
    print_line(&format!("listening on http://{}", listener.local_addr()?));
    backend::serve(listener).await?;
    Ok(ExitCode::SUCCESS)
}

/// Writes it to the file, or prints it if there is none.
fn write_json(measured: &impl Serialize, file: Option<&Path>) -> Result<(), Box<dyn std::error::Error>> {
    let text = serde_json::to_string_pretty(measured)?;
    match file {
        Some(file) => std::fs::write(file, text)?,
        None => print_line(&text),
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "what was measured is this program's output")]
fn print_line(text: &str) {
    println!("{text}");
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("modelrelay-bench: {error}");
    ExitCode::FAILURE
}
