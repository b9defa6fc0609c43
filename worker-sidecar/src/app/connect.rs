//! `modelrelay-worker connect`: sets up a worker interactively, and tries each answer before it is written.
//!
//! Rules:
//! - An answer that was given as a flag or a variable is not prompted for. Without a terminal, a missing answer is an
//!   error that names its flag; `--yes` accepts the defaults.
//! - A wrong answer is reported at once and prompted for again; without a terminal it ends the program.
//! - Nothing is written before all answers are known, and no file is replaced without confirmation. The secret is never
//!   shown, and is written into a separate file that only its owner may read.

pub mod backends;
mod files;
mod next;
mod questions;
mod terminal;
mod variables;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use modelrelay_protocol::secret::Secret;
use tokio::runtime::Runtime;

use super::check;
use crate::app::shell::Shell;
use crate::settings::{Args, secret};
use next::next;
use questions::Questions;

/// Arguments of the subcommand.
#[derive(Clone, Debug, clap::Args)]
pub struct ConnectArgs {
    /// Relay to dial: http(s)://, ws(s)://, or dns+http(s)://NAME:PORT for every address behind NAME
    #[arg(env = "PROXY_URL", value_name = "RELAY-URL")]
    relay: Option<String>,
    /// Provider to serve at the relay
    #[arg(long, env = "PROVIDER_NAME", value_name = "NAME", default_value = "local")]
    provider_name: String,
    /// Secret that admits this worker to the provider; not safe on a command line, which other users can read
    #[arg(long, env = "WORKER_SECRET", value_name = "SECRET", hide_env_values = true, value_parser = secret)]
    worker_secret: Option<Secret>,
    /// File that holds the secret, which the worker will read [default: a new file next to --output]
    #[arg(long, env = "WORKER_SECRET_FILE", value_name = "FILE")]
    worker_secret_file: Option<PathBuf>,
    /// Display name of the worker [default: the host name]
    #[arg(long, env = "WORKER_NAME", value_name = "NAME")]
    worker_name: Option<String>,
    /// Inference backend to serve [default: one that responds on this machine]
    #[arg(long, alias = "backend-url", env = "BACKEND_URL", value_name = "URL")]
    backend: Option<String>,
    /// Kind of backend: vllm, sglang, llama-server, ollama or openai [default: detected]
    #[arg(long, env = "BACKEND_ENGINE", value_name = "ENGINE")]
    backend_engine: Option<String>,
    /// File that holds the backend's key [default: none]
    #[arg(long, env = "BACKEND_API_KEY_FILE", value_name = "FILE")]
    backend_api_key_file: Option<PathBuf>,
    /// Local ports to probe for a backend: vLLM, llama-server, Ollama, SGLang, LM Studio
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = backends::USUAL_PORTS)]
    backend_ports: Vec<u16>,
    /// Maximum number of concurrent requests [default: 16 for vLLM and SGLang, otherwise 4]
    #[arg(long, env = "MAX_CONCURRENCY", value_name = "N")]
    max_concurrency: Option<String>,
    /// CA certificates (PEM) to trust for the relay, in addition to the system's [default: none]
    #[arg(long, env = "RELAY_CA_FILE", value_name = "FILE")]
    relay_ca_file: Option<PathBuf>,
    /// File with headers to add to each request to the relay, one NAME: VALUE per line [default: none]
    #[arg(long, env = "RELAY_HEADERS_FILE", value_name = "FILE")]
    relay_headers_file: Option<PathBuf>,
    /// File to write the settings to
    #[arg(long, short, value_name = "FILE", default_value = "worker.yaml")]
    output: PathBuf,
    /// Overwrite existing files
    #[arg(long)]
    force: bool,
    /// Accept all defaults without prompting
    #[arg(long, short)]
    yes: bool,
    /// Run the worker after the files are written
    #[arg(long)]
    run: bool,
}

/// Prompts, tries, writes, and runs the worker if requested.
#[allow(clippy::print_stderr)]
pub fn run(args: ConnectArgs, of_run: &Args) -> ExitCode {
    let (output, runs) = (args.output.clone(), args.run);
    if let Err(why) = with_network(|runtime| set_up(args, runtime)) {
        eprintln!("modelrelay-worker: {why}");
        return ExitCode::FAILURE;
    }
    if !runs {
        return ExitCode::SUCCESS;
    }
    // The settings in the file were tried; a variable that is still set may hold an untried one.
    crate::app::run::run(&Args {
        config: Some(output),
        probe_addr: of_run.probe_addr.clone(),
        otlp_endpoint: of_run.otlp_endpoint.clone(),
        log_level: of_run.log_level.clone(),
        log_format: of_run.log_format.clone(),
        ..Args::default()
    })
}

/// Runs `work` with a network runtime, and abandons all pending tasks: a name lookup cannot be stopped, and may take
/// half a minute if no name server responds.
fn with_network(work: impl FnOnce(&Runtime) -> Result<(), String>) -> Result<(), String> {
    // A separate thread watches for Ctrl-C while this one waits for an answer.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the network runtime: {error}"))?;
    let done = work(&runtime);
    runtime.shutdown_background();
    done
}

fn set_up(args: ConnectArgs, runtime: &Runtime) -> Result<(), String> {
    let questions = Questions::new(args.without_empty(), runtime);
    questions.output()?;
    let answers = questions.answers()?;
    let args = questions.args();
    files::write(&args.output, &answers)?;
    let written = Args { config: Some(args.output.clone()), ..Args::default() };
    let report = check::check(&written)
        .map_err(|mistakes| mistakes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))?;
    print_text(&format!("\nwrote {}\n{}", args.output.display(), report.plan));
    if !args.run {
        let file = args.output.display().to_string();
        print_text(&next(&file, &variables::in_the_way(&args.output), Shell::HERE));
    }
    Ok(())
}

/// Prints the text. The reader may close the pipe before its end.
fn print_text(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}

impl ConnectArgs {
    /// Compose files and charts pass an empty variable for "not set".
    fn without_empty(mut self) -> Self {
        for text in [
            &mut self.relay,
            &mut self.worker_name,
            &mut self.backend,
            &mut self.backend_engine,
            &mut self.max_concurrency,
        ] {
            text.take_if(|text| text.trim().is_empty());
        }
        for path in [
            &mut self.worker_secret_file,
            &mut self.backend_api_key_file,
            &mut self.relay_ca_file,
            &mut self.relay_headers_file,
        ] {
            path.take_if(|path| path.as_os_str().is_empty());
        }
        self.worker_secret.take_if(|secret| secret.expose().trim().is_empty());
        if self.provider_name.trim().is_empty() {
            "local".clone_into(&mut self.provider_name);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_returned_while_lookup_still_runs() {
        let (_held, look_up) = std::sync::mpsc::sync_channel::<()>(1);
        let failed = with_network(|runtime| {
            let (began, begun) = std::sync::mpsc::sync_channel(1);
            // Like a lookup: on a thread that cannot be interrupted.
            runtime.spawn_blocking(move || {
                let _ = began.send(());
                look_up.recv()
            });
            begun.recv().map_err(|error| error.to_string())?;
            Err("no such name".to_owned())
        });
        assert_eq!(failed, Err("no such name".to_owned()));
    }
}
