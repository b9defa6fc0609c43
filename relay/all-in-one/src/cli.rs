//! The command line of `modelrelay`, with those of relay and worker in it, so that help, completions and manual pages
//! cover all.

use std::convert::Infallible;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use modelrelay_manual::{CompletionsArgs, ManArgs};
use modelrelay_relay::settings::cli::{
    Args as RelayArgs, CliError, OptionalAddr, OptionalPath, SecretText, optional_listen_addr, optional_path,
};
use modelrelay_worker::app::connect::backends::USUAL_PORTS;

use crate::select::Program;

/// Relay and worker in one program
#[derive(Debug, Parser)]
#[command(name = "modelrelay", version, max_term_width = 110, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// A command of `modelrelay` itself.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a relay and a worker on this machine, in front of an inference server or the demo backend
    #[command(display_order = 1, after_help = AFTER_HELP)]
    Up(Box<UpArgs>),
    /// Generate shell completions
    #[command(display_order = 4)]
    Completions(CompletionsArgs),
    /// Print the manual page
    #[command(display_order = 5)]
    Man(ManArgs),
}

const AFTER_HELP: &str = "The relay and the worker also read their own variables: see `modelrelay relay --help` and `modelrelay worker --help`.";

/// Settings of `modelrelay up`. An empty variable means the default.
#[derive(Debug, clap::Args)]
pub(crate) struct UpArgs {
    /// URL of the inference server [default: the first server with a model on the backend ports, else the demo backend]
    #[arg(long, env = "BACKEND_URL", value_name = "URL", value_parser = text)]
    backend_url: Option<Text>,
    /// Local ports to probe for an inference server: vLLM, llama-server, Ollama, SGLang, LM Studio
    #[arg(long, env = "BACKEND_PORTS", value_name = "LIST", default_value = USUAL_PORTS, value_parser = ports)]
    backend_ports: Ports,
    /// Address of the relay; port 0 selects any free port [default: 127.0.0.1:8080, or the next free port]
    #[arg(long, env = "LISTEN_ADDR", value_name = "ADDR", value_parser = optional_listen_addr)]
    listen_addr: Option<OptionalAddr>,
    /// Secret shared by worker and relay [default: a random one]
    #[arg(long, env = "WORKER_SECRET", value_name = "SECRET", hide_env_values = true, allow_hyphen_values = true)]
    worker_secret: Option<SecretText>,
    /// Models to serve, separated by commas; * serves what the backend lists [default: *]
    #[arg(long, env = "MODELS", value_name = "LIST", value_parser = text)]
    models: Option<Text>,
    /// Number of requests that the backend runs concurrently [default: 4]
    #[arg(long, env = "MAX_CONCURRENCY", value_name = "N", value_parser = text)]
    max_concurrency: Option<Text>,
    /// Admin token, for the dashboard login [default: a random one, printed at startup]
    #[arg(
        long,
        env = "MODELRELAY_ADMIN_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    admin_token: Option<SecretText>,
    /// File that contains the admin token; takes precedence over the token [default: none]
    #[arg(long, env = "MODELRELAY_ADMIN_TOKEN_FILE", value_name = "FILE", value_parser = optional_path)]
    admin_token_file: Option<OptionalPath>,
}

/// A text where an empty one means none.
#[derive(Clone, Debug)]
struct Text(Option<String>);

/// A list of ports, in the order in which a backend is preferred.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ports(Vec<u16>);

impl UpArgs {
    pub(crate) fn backend_url(&self) -> Option<&str> {
        self.backend_url.as_ref()?.0.as_deref()
    }

    pub(crate) fn backend_ports(&self) -> &[u16] {
        &self.backend_ports.0
    }

    pub(crate) fn listen_addr(&self) -> Option<SocketAddr> {
        self.listen_addr?.0
    }

    pub(crate) fn worker_secret(&self) -> Option<&str> {
        given_secret(self.worker_secret.as_ref())
    }

    pub(crate) fn models(&self) -> &str {
        self.models.as_ref().and_then(|models| models.0.as_deref()).unwrap_or("*")
    }

    pub(crate) fn max_concurrency(&self) -> &str {
        self.max_concurrency.as_ref().and_then(|number| number.0.as_deref()).unwrap_or("4")
    }

    pub(crate) fn admin_token(&self) -> Option<&str> {
        given_secret(self.admin_token.as_ref())
    }

    pub(crate) fn admin_token_file(&self) -> Option<&PathBuf> {
        self.admin_token_file.as_ref()?.0.as_ref()
    }
}

/// The whole command line.
pub(crate) fn command() -> clap::Command {
    let part = |program: Program, command: clap::Command, about: &'static str| {
        command.name(program.word()).about(about).display_order(2)
    };
    Cli::command()
        .subcommand(part(
            Program::Relay,
            RelayArgs::command(),
            "Run a relay or one of its commands, like modelrelay-relay",
        ))
        .subcommand(part(
            Program::Worker,
            modelrelay_worker::app::cli::command(),
            "Run a worker or one of its commands, like modelrelay-worker",
        ))
}

/// Reads a command line that is not the relay's or the worker's.
pub(crate) fn parse(words: Vec<OsString>) -> Result<Command, CliError> {
    let command = command();
    let read = command.clone().try_get_matches_from(words).and_then(|matches| Cli::from_arg_matches(&matches));
    let up = command.find_subcommand("up").unwrap_or(&command);
    read.map(|cli| cli.command).map_err(|error| {
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            return CliError::Information(error.to_string());
        }
        CliError::new(up, &error)
    })
}

fn given_secret(secret: Option<&SecretText>) -> Option<&str> {
    secret.map(SecretText::expose).filter(|secret| !secret.is_empty())
}

#[allow(clippy::unnecessary_wraps)] // The form of a value parser.
fn text(text: &str) -> Result<Text, Infallible> {
    let text = text.trim();
    Ok(Text((!text.is_empty()).then(|| text.to_owned())))
}

fn ports(list: &str) -> Result<Ports, String> {
    let words = if list.trim().is_empty() { USUAL_PORTS } else { list };
    let words = words.split([',', ' ']).filter(|word| !word.is_empty());
    let ports: Result<Vec<u16>, _> = words.map(str::parse).collect();
    ports.map(Ports).map_err(|_| format!("a comma-separated list of ports, such as {USUAL_PORTS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_up_flag_has_variable_help_and_default() {
        let command = command();
        let up = command.find_subcommand("up").unwrap();
        for argument in up.get_arguments().filter(|argument| argument.get_id() != "help") {
            let help = argument.get_help().unwrap_or_else(|| panic!("{argument}: no help")).to_string();
            let has_default = !argument.get_default_values().is_empty() || help.contains("[default: ");
            assert!(argument.get_env().is_some() && has_default, "{argument}: {help}");
        }
    }

    #[test]
    fn ports_are_separated_by_commas_or_blanks() {
        for list in ["8000,1234", "8000 1234", " 8000, 1234 "] {
            assert_eq!(ports(list), Ok(Ports(vec![8000, 1234])), "{list}");
        }
        assert_eq!(ports(" ").unwrap().0.len(), 5);
        assert!(ports("8000,http").is_err() && ports("70000").is_err());
    }

    #[test]
    fn wrong_values_name_their_variable() {
        let error = parse(["modelrelay", "up", "--backend-ports", "x"].map(OsString::from).to_vec()).unwrap_err();
        let line = "BACKEND_PORTS (--backend-ports): \"x\" is not allowed: a comma-separated list of ports, such as 8000,8080,11434,30000,1234";
        assert_eq!(error, CliError::Invalid(line.to_owned()));
    }
}
