//! Every setting of the relay, as a flag and as a variable; flags win.
//!
//! This is the only list: the help, the tables of docs/reference/settings.md and the checks below are all derived from it.
//! A wrong setting ends the program with **one** line that names the setting, the value and the allowed values, so the
//! multi-line errors of the argument parser are rewritten here. Secrets are never repeated, not even in the help.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use modelrelay_protocol::cidr::Cidr;
use modelrelay_protocol::limits;

use crate::kubernetes::identity::ServiceAccount;
use crate::settings::commands::Command;
use crate::settings::config::{AllowedOrigins, MAX_QUEUE_LEN, RawAliases};
use crate::telemetry::log::{LogFilter, LogFormat};

mod error;
mod values;

pub use error::CliError;
pub use values::{optional_listen_addr, optional_path};

/// One stable address for OpenAI and Anthropic clients, in front of workers that dial out.
#[derive(Debug, Clone, Parser)]
#[command(name = "modelrelay-relay", version, max_term_width = 110, allow_negative_numbers = true, after_help = AFTER_HELP)]
pub struct Args {
    /// What to do instead of being a relay.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Address that clients, and unless told otherwise workers, connect to.
    #[arg(long, alias = "listen", env = "LISTEN_ADDR", value_name = "ADDR", default_value = "127.0.0.1:8080", value_parser = values::listen_addr)]
    pub listen_addr: SocketAddr,

    /// Relay configuration (YAML) with any number of providers; watched while running.
    #[arg(long, env = "MODELRELAY_CONFIG", value_name = "FILE", value_parser = values::optional_path)]
    pub config: Option<OptionalPath>,

    /// Name of the provider that these variables describe; ignored with --config, like all marked (provider).
    #[arg(long, alias = "provider", env = "PROVIDER_NAME", value_name = "NAME", default_value = "local", value_parser = values::provider_name)]
    pub provider_name: String,

    /// Secret that workers must present (provider). Without --config this, WORKER_SECRET_FILE or
    /// WORKER_SERVICE_ACCOUNTS is required.
    #[arg(long, env = "WORKER_SECRET", value_name = "SECRET", hide_env_values = true, allow_hyphen_values = true)]
    pub worker_secret: Option<SecretText>,

    /// File that holds that secret (provider); read at the start, and counts before WORKER_SECRET. [default: none]
    #[arg(long, env = "WORKER_SECRET_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub worker_secret_file: Option<OptionalPath>,

    /// ServiceAccounts of this cluster whose Pods may be workers by their own token, a list of NAMESPACE/NAME (provider).
    /// [default: none]
    #[arg(long, env = "WORKER_SERVICE_ACCOUNTS", value_name = "ACCOUNTS", default_value = "", hide_default_value = true, value_parser = values::accounts)]
    pub worker_service_accounts: Accounts,

    /// Further names of models, a list of NAME=MODEL such as gpt-4o-mini=qwen: a request for the name is one for the model, unless a
    /// worker serves a model of that name (provider). [default: none]
    #[arg(long, env = "MODEL_ALIASES", value_name = "ALIASES", default_value = "", hide_default_value = true, value_parser = values::aliases)]
    pub model_aliases: RawAliases,

    /// Model of requests that name none (provider). [default: none; they are refused]
    #[arg(long, env = "DEFAULT_MODEL", value_name = "MODEL", value_parser = values::optional_text)]
    pub default_model: Option<OptionalText>,

    /// Model of requests for an unknown name (provider). [default: none; they are refused with 404]
    #[arg(long, env = "FALLBACK_MODEL", value_name = "MODEL", value_parser = values::optional_text)]
    pub fallback_model: Option<OptionalText>,

    /// Requests that may wait in the queue; one more is refused with 429 (provider).
    #[arg(long, env = "MAX_QUEUE_LEN", value_name = "N", default_value_t = MAX_QUEUE_LEN, value_parser = values::queue_len)]
    pub max_queue_len: usize,

    /// Bytes of request bodies that may wait in the queue (provider).
    #[arg(long, env = "MAX_QUEUE_BYTES", value_name = "SIZE", default_value = "256Mi", value_parser = values::size)]
    pub max_queue_bytes: u64,

    /// How long a request waits for a worker while some worker serves its model, in seconds (provider).
    /// [default: as long as a request may take]
    #[arg(long, alias = "queue-timeout", env = "QUEUE_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub queue_timeout_secs: Option<Duration>,

    /// How long it waits while no worker serves its model yet, in seconds (provider).
    /// [default: the queue timeout if it is set, else 30; at least 600 for a declared model that is still being loaded]
    #[arg(long, env = "COLD_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub cold_timeout_secs: Option<Duration>,

    /// A request's whole time: queue, first byte and stream to its end, cold waiting excepted, in seconds (provider).
    /// [default: none; an answer ends when it stands still]
    #[arg(long, alias = "request-timeout", env = "REQUEST_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub request_timeout_secs: Option<Duration>,

    /// How long an answer may stand still: its worker sends nothing, or its client reads nothing, in seconds (provider).
    #[arg(long, env = "STREAM_IDLE_TIMEOUT_SECS", value_name = "SECONDS", default_value = "300", value_parser = values::seconds)]
    pub stream_idle_timeout_secs: Duration,

    /// How long a worker may send nothing of a response while another worker has room; the request then goes to that one. In
    /// seconds (provider). [default: none; a response that is not streamed begins when it is complete]
    #[arg(long, env = "FIRST_BYTE_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub first_byte_timeout_secs: Option<Duration>,

    /// Models that one worker may advertise; more are dropped with a warning (provider).
    #[arg(long, env = "MAX_MODELS_PER_WORKER", value_name = "N", default_value_t = limits::MAX_MODELS_PER_WORKER, value_parser = values::models_per_worker)]
    pub max_models_per_worker: usize,

    /// Turn away workers that state no protocol version (provider).
    #[arg(long, env = "REQUIRE_PROTOCOL_VERSION", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub require_protocol_version: bool,

    /// Seconds between heartbeats to a worker; it is lost after three without a byte from it.
    #[arg(long, env = "HEARTBEAT_INTERVAL", value_name = "SECONDS", default_value = "15", value_parser = values::seconds)]
    pub heartbeat_interval: Duration,

    /// Largest request body; a larger one is refused with 413.
    #[arg(long, env = "MAX_REQUEST_BYTES", value_name = "SIZE", default_value = "32Mi", value_parser = values::size)]
    pub max_request_bytes: u64,

    /// Memory for all that clients and workers send: requests that are received, queued or held for a requeue, responses that clients have not read, and workers' unfinished messages. Request bodies above 64 KiB of one API key, or of one address where no keys are required, take half of it at most.
    #[arg(long, env = "MAX_BUFFERED_BYTES", value_name = "SIZE", default_value = "1Gi", value_parser = values::size)]
    pub max_buffered_bytes: u64,

    /// Largest streamed answer; a longer one is ended with an error.
    #[arg(long, env = "MAX_STREAM_BYTES", value_name = "SIZE", default_value = "1Gi", value_parser = values::size)]
    pub max_stream_bytes: u64,

    /// How much of one answer may wait for a slow client.
    #[arg(long, env = "MAX_UNREAD_BYTES", value_name = "SIZE", default_value = "4Mi", value_parser = values::size)]
    pub max_unread_bytes: u64,

    /// Connections, of clients and workers together, that each listener holds open at most.
    #[arg(long, env = "MAX_CONNECTIONS", value_name = "N", default_value = "65536", value_parser = values::connections)]
    pub max_connections: usize,

    /// How long a client's connection may be idle between requests, or take for a request's headers, in seconds. A proxy in front has
    /// to close idle connections sooner.
    #[arg(long, env = "CLIENT_IDLE_TIMEOUT_SECS", value_name = "SECONDS", default_value = "75", value_parser = values::seconds)]
    pub client_idle_timeout_secs: Duration,

    /// Threads that move requests. [default: half of the machine's processors, at least 1; the others are the network's]
    #[arg(long, env = "THREADS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,

    /// Addresses or networks of proxies whose X-Forwarded-For is believed: a list such as 10.0.0.0/8,192.168.1.1.
    /// [default: none]
    #[arg(long, env = "TRUSTED_PROXIES", value_name = "CIDRS", default_value = "", hide_default_value = true, value_parser = values::proxies)]
    pub trusted_proxies: Proxies,

    /// File with the certificate chain (PEM) that all listeners show; they speak HTTPS then, and need TLS_KEY_FILE too. Read
    /// again while running. [default: none]
    #[arg(long, env = "TLS_CERT_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub tls_cert_file: Option<OptionalPath>,

    /// File with that certificate's private key (PEM). [default: none]
    #[arg(long, env = "TLS_KEY_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub tls_key_file: Option<OptionalPath>,

    /// Bearer token of /admin and the dashboard's data; without one /admin answers 403.
    #[arg(
        long,
        env = "MODELRELAY_ADMIN_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    pub admin_token: Option<SecretText>,

    /// File that holds that token; read again while running, and counts before MODELRELAY_ADMIN_TOKEN. [default: none]
    #[arg(long, env = "MODELRELAY_ADMIN_TOKEN_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub admin_token_file: Option<OptionalPath>,

    /// File to which changes and refused logins through /admin are appended, a JSON object per line. [default: none]
    #[arg(long, env = "AUDIT_LOG_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub audit_log_file: Option<OptionalPath>,

    /// Require an API key on every client route.
    #[arg(long, alias = "modelrelay-require-api-keys", env = "MODELRELAY_REQUIRE_API_KEYS", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub require_api_keys: bool,

    /// File that keeps the API keys, as hashes.
    #[arg(long, env = "API_KEYS_FILE", value_name = "FILE", default_value = "modelrelay-keys.json", value_parser = values::path)]
    pub api_keys_file: PathBuf,

    /// Kubernetes Secret that keeps the API keys for all relays of a provider; API_KEYS_FILE is where its key keys.json is
    /// mounted. [default: none]
    #[arg(long, env = "API_KEYS_SECRET", value_name = "NAME", value_parser = values::optional_object_name)]
    pub api_keys_secret: Option<OptionalText>,

    /// Namespace of that Secret. [default: the ServiceAccount's]
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAMESPACE", value_parser = values::optional_object_name)]
    pub pod_namespace: Option<OptionalText>,

    /// Folder with the token and ca.crt of the relay's own ServiceAccount, which may get and patch that Secret and, for
    /// workers' tokens, create TokenReviews.
    #[arg(long, env = "SERVICE_ACCOUNT_DIR", value_name = "DIR", default_value = "/var/run/secrets/kubernetes.io/serviceaccount", value_parser = values::path)]
    pub service_account_dir: PathBuf,

    /// Audience that workers' tokens must be made for.
    #[arg(long, env = "WORKER_TOKEN_AUDIENCE", value_name = "NAME", default_value = "modelrelay", value_parser = values::audience)]
    pub worker_token_audience: String,

    /// How often the token of a connected worker is checked again with the cluster, in seconds.
    #[arg(long, env = "WORKER_TOKEN_RECHECK_SECS", value_name = "SECONDS", default_value = "120", value_parser = values::seconds)]
    pub worker_token_recheck_secs: Duration,

    /// Serve /admin, /metrics and the dashboard here instead of on the clients' address. [default: none]
    #[arg(long, env = "ADMIN_LISTEN_ADDR", value_name = "ADDR", value_parser = values::optional_listen_addr)]
    pub admin_listen_addr: Option<OptionalAddr>,

    /// Address at which clients and workers reach this relay, for the commands that the pages show and as a name that it answers to.
    /// It may have a path, such as `https://relay.example/llm`, which a proxy in front may strip or keep. [default: as the browser does]
    #[arg(long, env = "PUBLIC_URL", value_name = "URL", value_parser = values::optional_public_url)]
    pub public_url: Option<OptionalText>,

    /// Address at which workers reach this relay, where that is another one. [default: PUBLIC_URL]
    #[arg(long, env = "WORKER_PUBLIC_URL", value_name = "URL", value_parser = values::optional_url)]
    pub worker_public_url: Option<OptionalText>,

    /// Origins whose pages may use the API from a browser (CORS): a list, each as SCHEME://NAME or SCHEME://NAME:PORT, or * for all.
    /// [default: none]
    #[arg(long, env = "ALLOWED_ORIGINS", value_name = "ORIGINS", default_value = "", hide_default_value = true)]
    pub allowed_origins: AllowedOrigins,

    /// Names, besides that of PUBLIC_URL, under which clients reach a relay that listens on this machine only and wants no API keys,
    /// for example behind a proxy: a list. [default: none]
    #[arg(long, env = "ALLOWED_HOSTS", value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = values::hosts)]
    pub allowed_hosts: Names,

    /// Request headers of clients that backends receive besides the usual ones: a list such as user-agent,x-tenant.
    /// [default: none]
    #[arg(long, env = "REQUEST_HEADERS", value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = values::request_headers)]
    pub request_headers: Names,

    /// Response headers of backends that clients receive besides the usual ones: a list such as x-build,x-cache.
    /// [default: none]
    #[arg(long, env = "RESPONSE_HEADERS", value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = values::response_headers)]
    pub response_headers: Names,

    /// Serve the worker socket here as well. [default: none]
    #[arg(long, env = "WORKER_LISTEN_ADDR", value_name = "ADDR", value_parser = values::optional_listen_addr)]
    pub worker_listen_addr: Option<OptionalAddr>,

    /// Keep the worker socket on the clients' address when it has one of its own.
    #[arg(long, env = "WORKERS_ON_CLIENT_PORT", value_name = "BOOL", default_value = "true", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub workers_on_client_port: bool,

    /// Relays behind the address that workers dial: they connect to so many.
    #[arg(long, env = "RELAY_COUNT", value_name = "N", default_value = "1", value_parser = values::relay_count)]
    pub relay_count: u32,

    /// Be ready only while a worker is attached.
    #[arg(long, env = "EXPECT_WORKERS", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub expect_workers: bool,

    /// Be unready while a queue is full. Off: a full queue answers 429 instead of vanishing from its load balancer.
    #[arg(long, env = "UNREADY_WHEN_SATURATED", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub unready_when_saturated: bool,

    /// How long requests may take to finish after SIGTERM, and after a worker was told to drain, in seconds.
    #[arg(long, env = "DRAIN_TIMEOUT_SECS", value_name = "SECONDS", default_value = "30", value_parser = values::seconds_or_zero)]
    pub drain_timeout_secs: Duration,

    /// How long requests are still accepted after SIGTERM, while load balancers notice, in seconds.
    #[arg(long, env = "SHUTDOWN_GRACE_SECS", value_name = "SECONDS", default_value = "0", value_parser = values::seconds_or_zero)]
    pub shutdown_grace_secs: Duration,

    /// After so many seconds without a byte a stream gets a comment, and its status 200; 0 is off.
    #[arg(long, env = "STREAM_KEEPALIVE_SECS", value_name = "SECONDS", default_value = "0", value_parser = values::seconds_or_zero)]
    pub stream_keepalive_secs: Duration,

    /// Collector to which OpenTelemetry traces are exported (OTLP over HTTP), such as http://collector:4318. [default: none]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL", hide_env_values = true)]
    pub otlp_endpoint: Option<String>,

    /// error, warn, info, debug or trace, or directives such as info,modelrelay_relay=debug.
    #[arg(long, env = "LOG_LEVEL", value_name = "LEVEL", default_value = "info", value_parser = values::log_filter)]
    pub log_level: LogFilter,

    /// Log lines as text or as JSON.
    #[arg(long, env = "LOG_FORMAT", value_name = "FORMAT", default_value = "text", value_parser = values::log_format)]
    pub log_format: LogFormat,

    /// Whether `API_KEYS_FILE` was given.
    #[arg(skip)]
    pub api_keys_file_given: bool,

    /// Variables and flags of the provider that were given; with `--config` they are ignored, and the relay says so.
    #[arg(skip)]
    pub given_provider_settings: Vec<&'static str>,
}

const AFTER_HELP: &str = "Sizes: bytes, or with Ki, Mi, Gi, Ti. Every flag has a variable; a flag wins over it.";

/// The settings that describe the one provider of a relay without `--config`: argument id and variable.
const PROVIDER_SETTINGS: [(&str, &str); 16] = [
    ("provider_name", "PROVIDER_NAME"),
    ("worker_secret", "WORKER_SECRET"),
    ("worker_secret_file", "WORKER_SECRET_FILE"),
    ("worker_service_accounts", "WORKER_SERVICE_ACCOUNTS"),
    ("model_aliases", "MODEL_ALIASES"),
    ("default_model", "DEFAULT_MODEL"),
    ("fallback_model", "FALLBACK_MODEL"),
    ("max_queue_len", "MAX_QUEUE_LEN"),
    ("max_queue_bytes", "MAX_QUEUE_BYTES"),
    ("queue_timeout_secs", "QUEUE_TIMEOUT_SECS"),
    ("cold_timeout_secs", "COLD_TIMEOUT_SECS"),
    ("request_timeout_secs", "REQUEST_TIMEOUT_SECS"),
    ("stream_idle_timeout_secs", "STREAM_IDLE_TIMEOUT_SECS"),
    ("first_byte_timeout_secs", "FIRST_BYTE_TIMEOUT_SECS"),
    ("max_models_per_worker", "MAX_MODELS_PER_WORKER"),
    ("require_protocol_version", "REQUIRE_PROTOCOL_VERSION"),
];

/// A secret from a flag or a variable, before it is validated; it cannot be printed.
#[derive(Clone)]
pub struct SecretText(String);

/// A path for which an empty variable means none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionalPath(pub Option<PathBuf>);

/// A text for which an empty variable means none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionalText(pub Option<String>);

/// An address for which an empty variable means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionalAddr(pub Option<SocketAddr>);

/// The networks of trusted proxies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proxies(pub Vec<Cidr>);

/// Names of hosts or of headers, in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

/// The ServiceAccounts of workers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Accounts(pub Vec<ServiceAccount>);

/// One setting, for the tables of docs/reference/settings.md.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The environment variable.
    pub variable: String,
    /// The flag, with its dashes.
    pub flag: String,
    /// The default as a user would write it, if the help shows one.
    pub default: Option<String>,
    /// The help, in one paragraph.
    pub help: String,
}

impl Args {
    /// Parses the given arguments (the first is the program's name) and the environment.
    pub fn load_from<I, T>(arguments: I) -> Result<Self, CliError>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        let command = Self::command();
        let matches =
            command.clone().try_get_matches_from(arguments).map_err(|error| CliError::new(&command, &error))?;
        let mut args = Self::from_arg_matches(&matches).map_err(|error| CliError::new(&command, &error))?;
        args.given_provider_settings = given_provider_settings(&matches);
        args.api_keys_file_given = is_given(&matches, "api_keys_file");
        Ok(args)
    }

    /// Returns every setting, in the order of the help.
    pub fn settings() -> Vec<Setting> {
        Self::command().get_arguments().filter_map(setting).collect()
    }
}

impl SecretText {
    /// The secret itself.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for SecretText {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl std::fmt::Debug for SecretText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SecretText(…)")
    }
}

fn given_provider_settings(matches: &ArgMatches) -> Vec<&'static str> {
    PROVIDER_SETTINGS.iter().filter(|(id, _)| is_given(matches, id)).map(|(_, variable)| *variable).collect()
}

fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id).is_some_and(|source| source != ValueSource::DefaultValue)
}

fn setting(argument: &clap::Arg) -> Option<Setting> {
    let variable = argument.get_env()?.to_string_lossy().into_owned();
    let help = argument.get_help().map(|help| help.to_string().replace('\n', " ")).unwrap_or_default();
    let default = argument.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
    Some(Setting {
        variable,
        flag: format!("--{}", argument.get_long()?),
        default: default.filter(|value| !value.is_empty()),
        help,
    })
}

#[cfg(test)]
mod tests;
