//! The commands of the program that do not serve, and their arguments.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use modelrelay_manual::{CompletionsArgs, ManArgs};
use modelrelay_platform::service::ServiceArgs;

use crate::settings::cli::SecretText;

/// The command to run instead of serving.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Check the settings, and the file of --config, and end
    Check,
    /// Print what makes a shell complete commands and flags
    Completions(CompletionsArgs),
    /// Print the manual page
    Man(ManArgs),
    /// Install the relay as a service of Windows, or remove it
    #[cfg_attr(not(windows), command(hide = true))]
    Service(ServiceArgs),
    /// How the relay and its providers do, and what is wrong
    Status(RelayAccess),
    /// Workers that are connected
    Workers(RelayAccess),
    /// Requests that have not ended
    #[command(args_conflicts_with_subcommands = true)]
    Requests {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// To change one.
        #[command(subcommand)]
        change: Option<RequestChange>,
    },
    /// API keys
    #[command(args_conflicts_with_subcommands = true)]
    Keys {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// To change some.
        #[command(subcommand)]
        change: Option<KeyChange>,
    },
    /// Let a worker finish what it has, and wait until it is gone
    Drain {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// Its name or id
        worker: String,
        /// Do not wait
        #[arg(long)]
        no_wait: bool,
    },
}

/// A change to a request.
#[derive(Debug, Clone, Subcommand)]
pub enum RequestChange {
    /// End one
    Cancel {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// Its id
        id: String,
    },
}

/// A change to API keys.
#[derive(Debug, Clone, Subcommand)]
pub enum KeyChange {
    /// Make one; its secret is shown once
    Create {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// What to call it
        name: String,
        /// Models it may use, a list [default: all]
        #[arg(long, value_name = "MODELS", value_delimiter = ',')]
        models: Option<Vec<String>>,
        /// Providers it may use, a list [default: all]
        #[arg(long, value_name = "PROVIDERS", value_delimiter = ',')]
        providers: Option<Vec<String>>,
        /// When it ends, such as 2027-01-01T00:00:00Z [default: never]
        #[arg(long, value_name = "TIME")]
        expires_at: Option<String>,
        /// Requests at once [default: any number]
        #[arg(long, value_name = "N")]
        max_in_flight: Option<u32>,
        /// How much of a queue its waiting requests may fill, 1 to 100 [default: all of it]
        #[arg(long, value_name = "PERCENT")]
        max_queue_percent: Option<u8>,
    },
    /// Make one useless
    Revoke {
        /// Which relay.
        #[command(flatten)]
        relay: RelayAccess,
        /// Its id
        id: String,
    },
}

/// The relay to connect to, the credentials, and the output format.
#[derive(Debug, Clone, Args)]
pub struct RelayAccess {
    /// Where the relay's admin API is
    #[arg(long, env = "MODELRELAY_URL", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// Its admin token
    #[arg(
        long,
        env = "MODELRELAY_ADMIN_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    pub token: Option<SecretText>,
    /// File that holds the token; counts before it
    #[arg(long, env = "MODELRELAY_ADMIN_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificates to trust besides the system's
    #[arg(long, env = "RELAY_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// How the answer looks
    #[arg(long, short, value_enum, default_value = "table", value_name = "FORMAT")]
    pub output: OutputFormat,
}

/// How an answer looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// For people.
    Table,
    /// As the admin API gives it.
    Json,
}
