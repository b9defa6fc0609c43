//! The relay's command line: parses the settings, runs, and reports an error in them in one line.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::num::NonZero;
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory;
use modelrelay_platform::service::{self, Program};
use modelrelay_platform::{log, scheduling};
use tokio::runtime::{Builder, Runtime};

use crate::keys::file;
use crate::settings::cli::{Args, CliError};
use crate::settings::commands::Command;
use crate::settings::config::{Config, KeyStorage};
use crate::settings::error::ConfigError;
use crate::system::{open_files, shutdown};
use crate::{admin_cli, telemetry};

/// How long a thread that cannot be stopped may continue. A lookup of a collector's name with a dead DNS server takes
/// half a minute.
const LAST_BLOCKING: Duration = Duration::from_secs(2);

static SERVICE: Program = Program {
    service: "ModelRelayServer",
    title: "ModelRelay relay",
    about: "One stable address for OpenAI and Anthropic clients, in front of workers that dial out",
    run,
    command: Args::command,
};

/// Executes the command of these arguments, of which the first is the program's name.
pub fn run(words: Vec<OsString>) -> ExitCode {
    let args = match Args::load_from(words) {
        Ok(args) => args,
        Err(error) => return refuse_arguments(&error),
    };
    match args.command.clone() {
        Some(Command::Check) => return check(&args),
        Some(Command::Completions(args)) => {
            return print_result(Ok(modelrelay_manual::completions(&Args::command(), &args).into_bytes()));
        }
        Some(Command::Man(args)) => return print_result(modelrelay_manual::man(Args::command(), &args)),
        Some(Command::Service(args)) => return print_result(service::run(&SERVICE, &args).map(String::into_bytes)),
        Some(command) => return run_admin_command(command),
        None => {}
    }
    let ended = start(args);
    log::finish();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Checks whether a relay would start with these settings.
fn check(args: &Args) -> ExitCode {
    match Config::from_args(args).and_then(|config| check_keys(&config).map(|()| config)) {
        Ok(config) => {
            config.warnings.iter().for_each(|warning| eprintln!("modelrelay-relay: warning: {warning}"));
            let names: Vec<_> = config.providers.iter().map(|provider| provider.name.as_str()).collect();
            let _ = writeln!(io::stdout(), "configuration OK; providers: {}", names.join(", "));
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error),
    }
}

/// Checks the storage of keys, which a start leaves to the first change: if keys are required, a relay that cannot
/// store any is useless.
fn check_keys(config: &Config) -> Result<(), ConfigError> {
    if !config.require_api_keys {
        return Ok(());
    }
    if std::env::var_os("DATABASE_URL").is_some_and(|url| !url.is_empty()) {
        return Err(ConfigError::new(
            "DATABASE_URL: this relay stores API keys in API_KEYS_FILE, not in a database: create the keys again (keys create) and unset the variable",
        ));
    }
    match &config.api_keys {
        KeyStorage::File(path) => {
            file::check(path).map_err(|error| ConfigError::new(format!("API_KEYS_FILE (--api-keys-file): {error}")))
        }
        KeyStorage::Secret { .. } => Ok(()),
    }
}

/// Prints an error in one line; a service writes it into its log.
fn fail(error: &impl Display) -> ExitCode {
    log::print_error(&format!("modelrelay-relay: {error}"));
    ExitCode::FAILURE
}

/// Prints a text. Its reader may have closed the pipe early.
fn print_result(text: Result<Vec<u8>, String>) -> ExitCode {
    match text {
        Ok(text) => {
            let _ = io::stdout().write_all(&text);
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error),
    }
}

fn run_admin_command(command: Command) -> ExitCode {
    let result = runtime(1)
        .map_err(Box::<dyn std::error::Error>::from)
        .and_then(|runtime| Ok(runtime.block_on(admin_cli::run(command))?));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn start(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::from_args(&args)?;
    let journal = telemetry::log::init(&config.log_filter, config.log_format)?;
    for variable in &config.ignored_variables {
        tracing::warn!("{variable} is ignored because --config is set; set it in that file");
    }
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    open_files::raise_limit();
    scheduling::use_batch_scheduling();
    let threads = args.threads.map_or_else(default_threads, usize::from);
    let runtime = runtime(threads)?;
    let ended = runtime.block_on(async {
        let signal = shutdown::listen()?;
        super::run(args, config, signal, journal).await?;
        Ok(())
    });
    runtime.shutdown_timeout(LAST_BLOCKING);
    ended
}

/// One thread uses the simpler scheduler: it runs ready tasks in turn, so that a writer finds all pending output.
fn runtime(threads: usize) -> io::Result<Runtime> {
    match threads {
        1 => Builder::new_current_thread().enable_all().build(),
        _ => Builder::new_multi_thread().worker_threads(threads).enable_all().build(),
    }
}

/// Work that needs no wake-up of another thread is done sooner and costs less, and the kernel's share of a relay's work
/// is as large as the relay's own: on two processors a second thread made each token a fifth more expensive.
fn default_threads() -> usize {
    (std::thread::available_parallelism().map_or(1, NonZero::get) / 2).max(1)
}

fn refuse_arguments(error: &CliError) -> ExitCode {
    match error {
        CliError::Information(text) => {
            // The reader may have closed the pipe early.
            let _ = writeln!(io::stdout(), "{text}");
        }
        CliError::Invalid(text) => {
            fail(text);
        }
    }
    ExitCode::from(error.exit_code())
}
