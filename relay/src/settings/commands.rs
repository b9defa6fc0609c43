//! The commands of the program that do not serve, and their arguments.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use modelrelay_manual::{CompletionsArgs, ManArgs};
use modelrelay_platform::service::ServiceArgs;
use serde_json::Value;

use crate::dispatch::{Class, Weight};
use crate::settings::cli::SecretText;

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
    Status(RelayAccess),
    /// List connected workers
    Workers(RelayAccess),
    /// List active requests, or cancel one
    #[command(args_conflicts_with_subcommands = true)]
    Requests {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// To change one.
        #[command(subcommand)]
        change: Option<RequestChange>,
    },
    /// List, create, change or revoke API keys
    #[command(args_conflicts_with_subcommands = true)]
    Keys {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// To change some.
        #[command(subcommand)]
        change: Option<Box<KeyChange>>,
    },
    /// Show requests, tokens and times per API key
    Usage {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAddress,
        /// Which rows.
        #[command(flatten)]
        wanted: UsageArgs,
        /// Output format
        #[arg(long, short, value_enum, default_value = "table", value_name = "FORMAT")]
        output: UsageFormat,
    },
    /// Drain a worker and wait until it disconnects
    Drain {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
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
        relay: RelayAccess,
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
        relay: RelayAccess,
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
        /// Maximum number of tokens within a minute, input and output together [default: no limit]
        #[arg(long, value_name = "N")]
        tokens_per_minute: Option<u64>,
        /// Maximum number of tokens within a day, input and output together [default: no limit]
        #[arg(long, value_name = "N")]
        tokens_per_day: Option<u64>,
        /// Weight among busy keys of one class, 0.01 to 100 [default: 1]
        #[arg(long, value_name = "WEIGHT", value_parser = weight)]
        weight: Option<Weight>,
        /// Class of the key's requests: interactive, normal or batch [default: normal]
        #[arg(long, value_name = "CLASS", value_parser = class)]
        class: Option<Class>,
    },
    /// Change a key; it keeps whatever no option names
    Update {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// Key id
        id: String,
        /// What to change.
        #[command(flatten)]
        fields: KeyUpdate,
    },
    /// Revoke a key
    Revoke {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// Key id
        id: String,
    },
}

/// The changes to a key, as values of the admin API; null removes a limit.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = true)]
pub struct KeyUpdate {
    /// New name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Models that the key may use, a list, or all
    #[arg(long, value_name = "MODELS", value_parser = list_or_all)]
    pub models: Option<Value>,
    /// Providers that the key may use, a list, or all
    #[arg(long, value_name = "PROVIDERS", value_parser = list_or_all)]
    pub providers: Option<Value>,
    /// Expiry time, such as 2027-01-01T00:00:00Z, or never
    #[arg(long, value_name = "TIME", value_parser = time_or_never)]
    pub expires_at: Option<Value>,
    /// Maximum number of concurrent requests, or none for no limit
    #[arg(long, value_name = "N", value_parser = number_or_none)]
    pub max_in_flight: Option<Value>,
    /// Maximum share of a queue for the key's waiting requests, 1 to 100 percent, or none for no limit
    #[arg(long, value_name = "PERCENT", value_parser = number_or_none)]
    pub max_queue_percent: Option<Value>,
    /// Maximum number of tokens within a minute, input and output together, or none for no limit
    #[arg(long, value_name = "N", value_parser = number_or_none)]
    pub tokens_per_minute: Option<Value>,
    /// Maximum number of tokens within a day, input and output together, or none for no limit
    #[arg(long, value_name = "N", value_parser = number_or_none)]
    pub tokens_per_day: Option<Value>,
    /// Weight among busy keys of one class, 0.01 to 100
    #[arg(long, value_name = "WEIGHT", value_parser = weight)]
    pub weight: Option<Weight>,
    /// Class of the key's requests: interactive, normal or batch
    #[arg(long, value_name = "CLASS", value_parser = class)]
    pub class: Option<Class>,
}

fn weight(text: &str) -> Result<Weight, String> {
    text.parse().map_err(|_| "a number from 0.01 to 100 with at most two decimals".to_owned())
}

fn class(text: &str) -> Result<Class, String> {
    text.parse().map_err(|_| "interactive, normal or batch".to_owned())
}

fn list_or_all(text: &str) -> Result<Value, String> {
    if text == "all" { Ok(Value::Null) } else { Ok(text.split(',').collect()) }
}

/// The relay checks the time.
fn time_or_never(text: &str) -> Result<Value, String> {
    if text == "never" { Ok(Value::Null) } else { Ok(text.into()) }
}

/// The relay checks the range.
fn number_or_none(text: &str) -> Result<Value, String> {
    if text == "none" {
        return Ok(Value::Null);
    }
    text.parse::<u64>().map(Value::from).map_err(|_| "a whole number, or none for no limit".to_owned())
}

/// The rows of the usage ledger to show.
#[derive(Debug, Clone, Default, Args)]
pub struct UsageArgs {
    /// Only this API key, by its id or name [default: all]
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Only this model [default: all]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// First day in UTC, such as 2026-11-01 [default: the oldest]
    #[arg(long, value_name = "DAY")]
    pub since: Option<String>,
    /// Last day in UTC, which is included [default: the newest]
    #[arg(long, value_name = "DAY")]
    pub until: Option<String>,
    /// One line of the table per day
    #[arg(long)]
    pub daily: bool,
    /// One line of the table per model
    #[arg(long)]
    pub models: bool,
}

/// The relay to connect to, the credentials, and the output format.
#[derive(Debug, Clone, Args)]
pub struct RelayAccess {
    /// Which relay.
    #[command(flatten)]
    pub address: RelayAddress,
    /// Output format
    #[arg(long, short, value_enum, default_value = "table", value_name = "FORMAT")]
    pub output: OutputFormat,
}

/// The relay to connect to, and the credentials.
#[derive(Debug, Clone, Args)]
pub struct RelayAddress {
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
}

/// How an answer looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Human-readable table.
    Table,
    /// JSON of the admin API.
    Json,
}

/// How the usage looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UsageFormat {
    /// Human-readable sums.
    Table,
    /// JSON of the admin API.
    Json,
    /// Every row, for spreadsheets.
    Csv,
}
