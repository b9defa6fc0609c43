//! Commands that query and control a running relay through its admin API, for terminals and scripts.

mod api;
mod tables;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use http::Method;
use modelrelay_manual::{CompletionsArgs, ManArgs};
use modelrelay_platform::service::ServiceArgs;
use serde_json::{Value, json};

use crate::cli::SecretText;
use api::Api;

/// The interval at which the progress of a drain is polled.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The command to run instead of serving.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Check the settings and the --config file, then exit
    Check,
    /// Generate shell completions
    Completions(CompletionsArgs),
    /// Print the manual page
    Man(ManArgs),
    /// Install or remove the relay's Windows service
    #[cfg_attr(not(windows), command(hide = true))]
    Service(ServiceArgs),
    /// Show relay and provider status, including problems
    Status(Relay),
    /// List connected workers
    Workers(Relay),
    /// List active requests, or cancel one
    #[command(args_conflicts_with_subcommands = true)]
    Requests {
        /// Which relay.
        #[command(flatten)]
        relay: Relay,
        /// To change one.
        #[command(subcommand)]
        change: Option<RequestChange>,
    },
    /// List, create or revoke API keys
    #[command(args_conflicts_with_subcommands = true)]
    Keys {
        /// Which relay.
        #[command(flatten)]
        relay: Relay,
        /// To change some.
        #[command(subcommand)]
        change: Option<KeyChange>,
    },
    /// Drain a worker and wait until it disconnects
    Drain {
        /// Which relay.
        #[command(flatten)]
        relay: Relay,
        /// Worker name or id
        worker: String,
        /// Do not wait for the worker to disconnect
        #[arg(long)]
        no_wait: bool,
    },
}

/// A change to a request.
#[derive(Debug, Clone, Subcommand)]
pub enum RequestChange {
    /// Cancel a request
    Cancel {
        /// Which relay.
        #[command(flatten)]
        relay: Relay,
        /// Request id
        id: String,
    },
}

/// A change to API keys.
#[derive(Debug, Clone, Subcommand)]
pub enum KeyChange {
    /// Create a key; its secret is shown only once
    Create {
        /// Which relay.
        #[command(flatten)]
        relay: Relay,
        /// Name of the key
        name: String,
        /// Models that the key may use, a list [default: all]
        #[arg(long, value_name = "MODELS", value_delimiter = ',')]
        models: Option<Vec<String>>,
        /// Providers that the key may use, a list [default: all]
        #[arg(long, value_name = "PROVIDERS", value_delimiter = ',')]
        providers: Option<Vec<String>>,
        /// Expiry time, such as 2027-01-01T00:00:00Z [default: never]
        #[arg(long, value_name = "TIME")]
        expires_at: Option<String>,
        /// Maximum number of concurrent requests [default: no limit]
        #[arg(long, value_name = "N")]
        max_in_flight: Option<u32>,
        /// Maximum share of a queue for the key's waiting requests, 1 to 100 percent [default: no limit]
        #[arg(long, value_name = "PERCENT")]
        max_queue_percent: Option<u8>,
    },
    /// Revoke a key
    Revoke {
        /// Which relay.
        #[command(flatten)]
        relay: Relay,
        /// Key id
        id: String,
    },
}

/// The relay to connect to, the credentials, and the output format.
#[derive(Debug, Clone, Args)]
pub struct Relay {
    /// URL of the relay's admin API
    #[arg(long, env = "MODELRELAY_URL", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// Admin token of the relay
    #[arg(
        long,
        env = "MODELRELAY_ADMIN_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    pub token: Option<SecretText>,
    /// File that contains the admin token; takes precedence over --token
    #[arg(long, env = "MODELRELAY_ADMIN_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Additional certificates to trust
    #[arg(long, env = "RELAY_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "table", value_name = "FORMAT")]
    pub output: Output,
}

/// How an answer looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Human-readable table.
    Table,
    /// JSON of the admin API.
    Json,
}

/// A failed command; the message is one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CtlError(String);

/// Runs a command against a relay. Commands that need no relay are handled elsewhere.
pub async fn run(command: Command) -> Result<(), CtlError> {
    match command {
        Command::Check | Command::Completions(_) | Command::Man(_) | Command::Service(_) => Ok(()),
        Command::Status(relay) => {
            let api = Api::new(&relay)?;
            let (state, stats) = (api.get("/admin/state").await?, api.get("/admin/stats").await?);
            let both = json!({ "state": state, "stats": stats });
            say(relay.output, &both, || tables::status(&state, &stats))
        }
        Command::Workers(relay) => {
            let answer = Api::new(&relay)?.get("/admin/workers").await?;
            say(relay.output, &answer, || tables::workers(&answer))
        }
        Command::Requests { relay, change: None } => {
            let answer = Api::new(&relay)?.get("/admin/requests").await?;
            say(relay.output, &answer, || tables::requests(&answer))
        }
        Command::Requests { change: Some(RequestChange::Cancel { relay, id }), .. } => {
            let path = format!("/admin/requests/{}/cancel", api::segment(&id));
            let answer = Api::new(&relay)?.call(Method::POST, &path, None).await?;
            say(relay.output, &answer, || format!("request {id} cancelled\n"))
        }
        Command::Keys { relay, change: None } => {
            let answer = Api::new(&relay)?.get("/admin/keys").await?;
            say(relay.output, &answer, || tables::keys(&answer))
        }
        Command::Keys { change: Some(change), .. } => change_keys(change).await,
        Command::Drain { relay, worker, no_wait } => drain(&relay, &worker, no_wait).await,
    }
}

async fn change_keys(change: KeyChange) -> Result<(), CtlError> {
    match change {
        KeyChange::Create { relay, name, models, providers, expires_at, max_in_flight, max_queue_percent } => {
            let wanted = json!({
                "name": name,
                "models": models,
                "providers": providers,
                "expires_at": expires_at,
                "max_in_flight": max_in_flight,
                "max_queue_percent": max_queue_percent,
            });
            let answer = Api::new(&relay)?.call(Method::POST, "/admin/keys", Some(&wanted)).await?;
            let text = |name: &str| answer[name].as_str().unwrap_or_default();
            say(relay.output, &answer, || {
                format!("{}\n\nkey {} created for {name}; the secret is shown only once\n", text("secret"), text("id"))
            })
        }
        KeyChange::Revoke { relay, id } => {
            let path = format!("/admin/keys/{}", api::segment(&id));
            let answer = Api::new(&relay)?.call(Method::DELETE, &path, None).await?;
            say(relay.output, &answer, || format!("key {id} revoked\n"))
        }
    }
}

async fn drain(relay: &Relay, wanted: &str, no_wait: bool) -> Result<(), CtlError> {
    let api = Api::new(relay)?;
    let id = find(&api.get("/admin/workers").await?, wanted)?;
    let path = format!("/admin/workers/{}", api::segment(&id));
    let answer = api.call(Method::POST, &format!("{path}/drain"), None).await?;
    // Relays of earlier versions do not send this field.
    let returns = answer["stays_away"] == false;
    let advice =
        if returns { "; its older version reconnects within seconds: stop its process to prevent that" } else { "" };
    if no_wait {
        return say(relay.output, &answer, || format!("worker {wanted} is draining{advice}\n"));
    }
    let mut told = None;
    loop {
        let workers = api.get("/admin/workers").await?;
        let Some(worker) = list(&workers, "workers").iter().find(|worker| worker["worker_id"] == *id) else { break };
        let left = worker["in_flight_count"].as_u64().unwrap_or(0);
        if told != Some(left) {
            eprintln!("worker {wanted} is draining: {left} request{} left", if left == 1 { "" } else { "s" });
            told = Some(left);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    say(relay.output, &answer, || format!("worker {wanted} disconnected{advice}\n"))
}

/// Returns the id of the only worker with this name or id.
fn find(workers: &Value, wanted: &str) -> Result<String, CtlError> {
    let is_it = |worker: &&Value| worker["worker_id"] == wanted || worker["worker_name"] == wanted;
    let found: Vec<&str> =
        list(workers, "workers").iter().filter(is_it).filter_map(|worker| worker["worker_id"].as_str()).collect();
    match found[..] {
        [id] => Ok(id.to_owned()),
        [] => Err(CtlError(format!("no connected worker has the name or id {wanted}"))),
        _ => {
            Err(CtlError(format!("{} workers are named {wanted}: specify an id, {}", found.len(), found.join(" or "))))
        }
    }
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn say(output: Output, answer: &Value, table: impl FnOnce() -> String) -> Result<(), CtlError> {
    let text = match output {
        Output::Json if io::stdout().is_terminal() => format!("{answer:#}\n"),
        Output::Json => format!("{answer}\n"),
        Output::Table => table(),
    };
    match io::stdout().write_all(text.as_bytes()) {
        // The reader of a pipe may close it before the end of the output.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(CtlError(format!("cannot write the output: {error}")))
        }
        _ => Ok(()),
    }
}
