//! Every setting of the relay, as a flag and as a variable; flags win.
//!
//! This is the only list: the help, the tables of docs/reference/settings.md and the checks below are all derived from
//! it. A wrong setting ends the program with **one** line that names the setting, the value and the allowed values, so
//! the multi-line errors of the argument parser are rewritten here. Secrets are never repeated, not even in the help.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use modelrelay_protocol::limits;

use crate::settings::commands::Command;
use crate::settings::config::{
    AllowedOrigins, CacheIsolation, FairnessMode, MAX_HOMES, MAX_QUEUE_LEN, Placement, RawAliases, USAGE_DAYS,
};
use crate::telemetry::log::{LogFilter, LogFormat};

mod error;
mod types;
mod values;

pub use error::CliError;
pub use types::{Accounts, Names, OptionalAddr, OptionalPath, OptionalText, Proxies, SecretText};
pub use values::{optional_listen_addr, optional_path};

/// One stable address for OpenAI and Anthropic clients, in front of workers that dial out.
#[derive(Debug, Clone, Parser)]
#[command(name = "modelrelay-relay", version, max_term_width = 110, allow_negative_numbers = true, after_help = AFTER_HELP)]
pub struct Args {
    /// Command to run instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Address to which clients and, by default, workers connect.
    #[arg(long, alias = "listen", env = "LISTEN_ADDR", value_name = "ADDR", default_value = "127.0.0.1:8080", value_parser = values::listen_addr)]
    pub listen_addr: SocketAddr,

    /// Relay configuration (YAML) with any number of providers; watched while running.
    #[arg(long, env = "MODELRELAY_CONFIG", value_name = "FILE", value_parser = values::optional_path)]
    pub config: Option<OptionalPath>,

    /// Name of the provider that these variables describe; ignored if MODELRELAY_CONFIG is set, like all settings
    /// marked (provider).
    #[arg(long, alias = "provider", env = "PROVIDER_NAME", value_name = "NAME", default_value = "local", value_parser = values::provider_name)]
    pub provider_name: String,

    /// Secret that workers must present (provider). Without MODELRELAY_CONFIG, this setting, WORKER_SECRET_FILE or
    /// WORKER_SERVICE_ACCOUNTS is required.
    #[arg(long, env = "WORKER_SECRET", value_name = "SECRET", hide_env_values = true, allow_hyphen_values = true)]
    pub worker_secret: Option<SecretText>,

    /// File that contains the worker secret (provider); read at startup, takes precedence over WORKER_SECRET. [default:
    /// none]
    #[arg(long, env = "WORKER_SECRET_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub worker_secret_file: Option<OptionalPath>,

    /// ServiceAccounts of this cluster whose Pods may connect as workers with their own token, a list of NAMESPACE/NAME
    /// (provider). [default: none]
    #[arg(long, env = "WORKER_SERVICE_ACCOUNTS", value_name = "ACCOUNTS", default_value = "", hide_default_value = true, value_parser = values::accounts)]
    pub worker_service_accounts: Accounts,

    /// Aliases of models, a list of NAME=MODEL such as gpt-4o-mini=qwen: a request for NAME is served by MODEL, unless
    /// a worker serves a model called NAME (provider). [default: none]
    #[arg(long, env = "MODEL_ALIASES", value_name = "ALIASES", default_value = "", hide_default_value = true, value_parser = values::aliases)]
    pub model_aliases: RawAliases,

    /// Model for requests without a model (provider). [default: none; they are rejected]
    #[arg(long, env = "DEFAULT_MODEL", value_name = "MODEL", value_parser = values::optional_text)]
    pub default_model: Option<OptionalText>,

    /// Model for requests for an unknown model (provider). [default: none; they are rejected with 404]
    #[arg(long, env = "FALLBACK_MODEL", value_name = "MODEL", value_parser = values::optional_text)]
    pub fallback_model: Option<OptionalText>,

    /// Maximum number of requests in the queue; further ones are rejected with 429 (provider).
    #[arg(long, env = "MAX_QUEUE_LEN", value_name = "N", default_value_t = MAX_QUEUE_LEN, value_parser = values::queue_len)]
    pub max_queue_len: usize,

    /// Maximum size of all request bodies in the queue (provider).
    #[arg(long, env = "MAX_QUEUE_BYTES", value_name = "SIZE", default_value = "256Mi", value_parser = values::size)]
    pub max_queue_bytes: u64,

    /// Time that a request waits for a worker while some worker serves its model, in seconds (provider). [default:
    /// none; the request timeout applies]
    #[arg(long, alias = "queue-timeout", env = "QUEUE_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub queue_timeout_secs: Option<Duration>,

    /// Time that a request waits while no worker serves its model yet, in seconds (provider). [default: the queue
    /// timeout if it is set, else 30; at least 600 for a declared model that is still being loaded]
    #[arg(long, env = "COLD_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub cold_timeout_secs: Option<Duration>,

    /// Total time of a request, from queue to the end of its stream, without the wait for a cold model, in seconds
    /// (provider). [default: none; the stream idle timeout ends stalled responses]
    #[arg(long, alias = "request-timeout", env = "REQUEST_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub request_timeout_secs: Option<Duration>,

    /// Time that a response may stall because its worker sends nothing or its client reads nothing, in seconds
    /// (provider).
    #[arg(long, env = "STREAM_IDLE_TIMEOUT_SECS", value_name = "SECONDS", default_value = "300", value_parser = values::seconds)]
    pub stream_idle_timeout_secs: Duration,

    /// Time to the first byte of a response, in seconds, after which the request moves to another worker with free
    /// capacity (provider). [default: none; a response that is not streamed begins when it is complete]
    #[arg(long, env = "FIRST_BYTE_TIMEOUT_SECS", value_name = "SECONDS", value_parser = values::seconds)]
    pub first_byte_timeout_secs: Option<Duration>,

    /// Choice of the worker for a request: least-load takes the least loaded one, cache weighs the prompts that workers
    /// have cached against the work that waits at them (provider).
    #[arg(long, env = "PLACEMENT", value_name = "MODE", default_value = "least-load", value_parser = values::placement)]
    pub placement: Placement,

    /// Requests that may share a cached prompt: none means all of them, key those of one API key (provider).
    #[arg(long, env = "CACHE_ISOLATION", value_name = "BY", default_value = "none", value_parser = values::cache_isolation)]
    pub cache_isolation: CacheIsolation,

    /// Maximum number of conversations whose worker is remembered; the one unused for longest is forgotten first
    /// (provider).
    #[arg(long, env = "MAX_HOMES", value_name = "N", default_value_t = MAX_HOMES, value_parser = values::homes)]
    pub max_homes: usize,

    /// Number of running requests by which a nearer worker may exceed a farther one and still be chosen; it has an
    /// effect only with ZONE or CLUSTER (provider).
    #[arg(long, env = "SPILL_REQUESTS", value_name = "N", default_value = "4", value_parser = values::spill_requests)]
    pub spill_requests: u32,

    /// The same with PLACEMENT=cache, for conversations: size of the requests that still have to be computed
    /// (provider).
    #[arg(long, env = "SPILL_BYTES", value_name = "SIZE", default_value = "64Ki", value_parser = values::size)]
    pub spill_bytes: u64,

    /// Order of waiting requests: shared gives each API key its share of the workers, fifo is the order of arrival
    /// (provider).
    #[arg(long, env = "FAIRNESS_MODE", value_name = "MODE", default_value = "shared", value_parser = values::fairness_mode)]
    pub fairness_mode: FairnessMode,

    /// Wait, in seconds, after which a request competes with requests of higher classes, with FAIRNESS_MODE=shared
    /// (provider).
    #[arg(long, env = "PROMOTE_AFTER_SECS", value_name = "SECONDS", default_value = "15", value_parser = values::seconds)]
    pub promote_after_secs: Duration,

    /// Maximum number of models that one worker may advertise; further ones are dropped with a warning (provider).
    #[arg(long, env = "MAX_MODELS_PER_WORKER", value_name = "N", default_value_t = limits::MAX_MODELS_PER_WORKER, value_parser = values::models_per_worker)]
    pub max_models_per_worker: usize,

    /// Reject workers that report no protocol version (provider).
    #[arg(long, env = "REQUIRE_PROTOCOL_VERSION", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub require_protocol_version: bool,

    /// Seconds between heartbeats to a worker; it is considered lost after three intervals without a byte from it.
    #[arg(long, env = "HEARTBEAT_INTERVAL", value_name = "SECONDS", default_value = "15", value_parser = values::seconds)]
    pub heartbeat_interval: Duration,

    /// Zone of this relay: workers of the same ZONE are preferred to others, as long as they have room and little more
    /// load. [default: none; distance does not matter]
    #[arg(long, env = "ZONE", value_name = "NAME", value_parser = values::optional_label)]
    pub zone: Option<OptionalText>,

    /// Cluster or site of this relay: workers of the same CLUSTER come after those of the same zone and before all
    /// others. [default: none]
    #[arg(long, env = "CLUSTER", value_name = "NAME", value_parser = values::optional_label)]
    pub cluster: Option<OptionalText>,

    /// Maximum size of a request body; larger ones are rejected with 413.
    #[arg(long, env = "MAX_REQUEST_BYTES", value_name = "SIZE", default_value = "32Mi", value_parser = values::size)]
    pub max_request_bytes: u64,

    /// Memory for data from clients and workers: requests being received, queued or kept for a requeue, responses that
    /// clients have not read, and unfinished messages of workers. Request bodies above 64 KiB of one API key, or of one
    /// address if no keys are required, use at most half of it.
    #[arg(long, env = "MAX_BUFFERED_BYTES", value_name = "SIZE", default_value = "1Gi", value_parser = values::size)]
    pub max_buffered_bytes: u64,

    /// Maximum size of a streamed response; larger ones end with an error.
    #[arg(long, env = "MAX_STREAM_BYTES", value_name = "SIZE", default_value = "1Gi", value_parser = values::size)]
    pub max_stream_bytes: u64,

    /// Maximum size of the unread part of a response that is buffered for a slow client.
    #[arg(long, env = "MAX_UNREAD_BYTES", value_name = "SIZE", default_value = "4Mi", value_parser = values::size)]
    pub max_unread_bytes: u64,

    /// Maximum number of open connections of each listener, clients and workers together.
    #[arg(long, env = "MAX_CONNECTIONS", value_name = "N", default_value = "65536", value_parser = values::connections)]
    pub max_connections: usize,

    /// Time that a client connection may be idle between requests, or take to send a request's headers, in seconds. A
    /// proxy in front must close idle connections sooner.
    #[arg(long, env = "CLIENT_IDLE_TIMEOUT_SECS", value_name = "SECONDS", default_value = "75", value_parser = values::seconds)]
    pub client_idle_timeout_secs: Duration,

    /// Number of threads that process requests. [default: half of the CPUs, at least 1; the others are left to the
    /// network stack]
    #[arg(long, env = "THREADS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,

    /// Addresses or networks of proxies whose X-Forwarded-For is trusted: a list such as 10.0.0.0/8,192.168.1.1.
    /// [default: none]
    #[arg(long, env = "TRUSTED_PROXIES", value_name = "CIDRS", default_value = "", hide_default_value = true, value_parser = values::proxies)]
    pub trusted_proxies: Proxies,

    /// File with the certificate chain (PEM) of all listeners, which then use HTTPS; requires TLS_KEY_FILE. Reloaded
    /// when it changes. [default: none]
    #[arg(long, env = "TLS_CERT_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub tls_cert_file: Option<OptionalPath>,

    /// File with the private key (PEM) of the certificate. [default: none]
    #[arg(long, env = "TLS_KEY_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub tls_key_file: Option<OptionalPath>,

    /// Bearer token for /admin and the dashboard's data; without a token, /admin returns 403.
    #[arg(
        long,
        env = "MODELRELAY_ADMIN_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    pub admin_token: Option<SecretText>,

    /// File that contains the admin token; reloaded when it changes, takes precedence over MODELRELAY_ADMIN_TOKEN.
    /// [default: none]
    #[arg(long, env = "MODELRELAY_ADMIN_TOKEN_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub admin_token_file: Option<OptionalPath>,

    /// File to which changes and failed logins through /admin are appended, one JSON object per line. [default: none]
    #[arg(long, env = "AUDIT_LOG_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub audit_log_file: Option<OptionalPath>,

    /// File to which the metadata of finished requests is appended, one JSON object per line, for the replay with other
    /// settings. [default: none]
    #[arg(long, env = "REQUEST_JOURNAL_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub request_journal_file: Option<OptionalPath>,

    /// Size at which the request journal is moved to a second file with the ending .1, which is overwritten.
    #[arg(long, env = "REQUEST_JOURNAL_BYTES", value_name = "SIZE", default_value = "64Mi", value_parser = values::journal_size)]
    pub request_journal_bytes: u64,

    /// File that stores the sums of requests, tokens and times per API key, model and day; empty for none. [default:
    /// modelrelay-usage.jsonl next to API_KEYS_FILE if that is set, without API_KEYS_SECRET; else none]
    #[arg(long, env = "USAGE_FILE", value_name = "FILE", value_parser = values::optional_path)]
    pub usage_file: Option<OptionalPath>,

    /// Number of days for which usage is kept, including the present one.
    #[arg(long, env = "USAGE_DAYS", value_name = "DAYS", default_value_t = USAGE_DAYS, value_parser = values::usage_days)]
    pub usage_days: u32,

    /// Require an API key on every client route.
    #[arg(long, alias = "modelrelay-require-api-keys", env = "MODELRELAY_REQUIRE_API_KEYS", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub require_api_keys: bool,

    /// File that stores the API keys, as hashes.
    #[arg(long, env = "API_KEYS_FILE", value_name = "FILE", default_value = "modelrelay-keys.json", value_parser = values::path)]
    pub api_keys_file: PathBuf,

    /// Kubernetes Secret that stores the API keys for all relays of a provider; API_KEYS_FILE is where its key
    /// keys.json is mounted. [default: none]
    #[arg(long, env = "API_KEYS_SECRET", value_name = "NAME", value_parser = values::optional_object_name)]
    pub api_keys_secret: Option<OptionalText>,

    /// Days after which revoked API keys are deleted and no longer listed; 0 keeps them until there are 10,000 keys.
    #[arg(long, env = "REVOKED_KEYS_KEPT_DAYS", value_name = "DAYS", default_value = "90", value_parser = values::days_or_zero)]
    pub revoked_keys_kept_days: u32,

    /// Namespace of the API key Secret. [default: the ServiceAccount's]
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAMESPACE", value_parser = values::optional_object_name)]
    pub pod_namespace: Option<OptionalText>,

    /// Folder with the token and ca.crt of the relay's own ServiceAccount, which must be allowed to get and patch the
    /// API key Secret and, for tokens of workers and tenants, to create TokenReviews.
    #[arg(long, env = "SERVICE_ACCOUNT_DIR", value_name = "DIR", default_value = "/var/run/secrets/kubernetes.io/serviceaccount", value_parser = values::path)]
    pub service_account_dir: PathBuf,

    /// Required audience of worker tokens.
    #[arg(long, env = "WORKER_TOKEN_AUDIENCE", value_name = "NAME", default_value = "modelrelay", value_parser = values::audience)]
    pub worker_token_audience: String,

    /// Required audience of the tokens with which Pods of tenants (relay.yaml) call the relay. It must differ from
    /// WORKER_TOKEN_AUDIENCE.
    #[arg(long, env = "CLIENT_TOKEN_AUDIENCE", value_name = "NAME", default_value = "modelrelay-clients", value_parser = values::audience)]
    pub client_token_audience: String,

    /// Interval at which the token of a connected worker is reviewed again by the cluster, in seconds.
    #[arg(long, env = "WORKER_TOKEN_RECHECK_SECS", value_name = "SECONDS", default_value = "120", value_parser = values::seconds)]
    pub worker_token_recheck_secs: Duration,

    /// Address for /admin, /metrics and the dashboard, which are then not served on the client address. [default: none]
    #[arg(long, env = "ADMIN_LISTEN_ADDR", value_name = "ADDR", value_parser = values::optional_listen_addr)]
    pub admin_listen_addr: Option<OptionalAddr>,

    /// URL at which clients and workers reach this relay, used in the commands that the pages show and accepted as a
    /// host name. It may have a path, such as `https://relay.example/llm`, which a proxy in front may strip or keep.
    /// [default: the browser's URL]
    #[arg(long, env = "PUBLIC_URL", value_name = "URL", value_parser = values::optional_public_url)]
    pub public_url: Option<OptionalText>,

    /// URL at which workers reach this relay, if it differs. [default: PUBLIC_URL]
    #[arg(long, env = "WORKER_PUBLIC_URL", value_name = "URL", value_parser = values::optional_url)]
    pub worker_public_url: Option<OptionalText>,

    /// Origins whose pages may use the API from a browser (CORS): a list of SCHEME://NAME or SCHEME://NAME:PORT, or *
    /// for all. [default: none]
    #[arg(long, env = "ALLOWED_ORIGINS", value_name = "ORIGINS", default_value = "", hide_default_value = true)]
    pub allowed_origins: AllowedOrigins,

    /// Additional host names that a relay accepts if it listens on loopback and requires no API keys, for example
    /// behind a proxy: a list. [default: none]
    #[arg(long, env = "ALLOWED_HOSTS", value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = values::hosts)]
    pub allowed_hosts: Names,

    /// Additional client request headers to forward to backends: a list such as user-agent,x-tenant. [default: none]
    #[arg(long, env = "REQUEST_HEADERS", value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = values::request_headers)]
    pub request_headers: Names,

    /// Additional backend response headers to forward to clients: a list such as x-build,x-cache. [default: none]
    #[arg(long, env = "RESPONSE_HEADERS", value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = values::response_headers)]
    pub response_headers: Names,

    /// Additional address on which workers connect. [default: none]
    #[arg(long, env = "WORKER_LISTEN_ADDR", value_name = "ADDR", value_parser = values::optional_listen_addr)]
    pub worker_listen_addr: Option<OptionalAddr>,

    /// Accept workers on the client address even if WORKER_LISTEN_ADDR is set.
    #[arg(long, env = "WORKERS_ON_CLIENT_PORT", value_name = "BOOL", default_value = "true", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub workers_on_client_port: bool,

    /// Number of relays behind the address that workers dial; each worker connects to this number.
    #[arg(long, env = "RELAY_COUNT", value_name = "N", default_value = "1", value_parser = values::relay_count)]
    pub relay_count: u32,

    /// Report ready only while a worker is connected.
    #[arg(long, env = "EXPECT_WORKERS", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub expect_workers: bool,

    /// Report unready while a queue is full. If off, the relay stays behind its load balancer and returns 429.
    #[arg(long, env = "UNREADY_WHEN_SATURATED", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub unready_when_saturated: bool,

    /// Time that requests have to finish after SIGTERM or after a worker starts to drain, in seconds.
    #[arg(long, env = "DRAIN_TIMEOUT_SECS", value_name = "SECONDS", default_value = "30", value_parser = values::seconds_or_zero)]
    pub drain_timeout_secs: Duration,

    /// Time that new connections are still accepted after SIGTERM, until load balancers notice, in seconds.
    #[arg(long, env = "SHUTDOWN_GRACE_SECS", value_name = "SECONDS", default_value = "0", value_parser = values::seconds_or_zero)]
    pub shutdown_grace_secs: Duration,

    /// Seconds without a byte after which a stream receives status 200 and a comment; 0 disables it.
    #[arg(long, env = "STREAM_KEEPALIVE_SECS", value_name = "SECONDS", default_value = "0", value_parser = values::seconds_or_zero)]
    pub stream_keepalive_secs: Duration,

    /// Name the worker of each response in the header x-modelrelay-worker.
    #[arg(long, env = "WORKER_HEADER", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub worker_header: bool,

    /// Request the usage of streams whose API key has limits of tokens, and keep it from clients that did not request
    /// it.
    #[arg(long, env = "REQUEST_USAGE", value_name = "BOOL", default_value = "true", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub request_usage: bool,

    /// Collector to which OpenTelemetry traces, and with OTEL_METRICS_EXPORTER=otlp metrics, are exported (OTLP over
    /// HTTP), such as http://collector:4318. [default: none]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL", hide_env_values = true)]
    pub otlp_endpoint: Option<String>,

    /// Export a pseudonym of each request's conversation with its trace.
    #[arg(long, env = "TRACE_CONVERSATIONS", value_name = "BOOL", default_value = "false", num_args = 0..=1, default_missing_value = "true", value_parser = values::boolean)]
    pub trace_conversations: bool,

    /// error, warn, info, debug or trace, or directives such as info,modelrelay_relay=debug.
    #[arg(long, env = "LOG_LEVEL", value_name = "LEVEL", default_value = "info", value_parser = values::log_filter)]
    pub log_level: LogFilter,

    /// Log lines as text or as JSON.
    #[arg(long, env = "LOG_FORMAT", value_name = "FORMAT", default_value = "text", value_parser = values::log_format)]
    pub log_format: LogFormat,

    /// True if `API_KEYS_FILE` was given.
    #[arg(skip)]
    pub api_keys_file_given: bool,

    /// Variables and flags of the provider that were given; with `--config` they are ignored, and the relay logs a
    /// warning.
    #[arg(skip)]
    pub given_provider_settings: Vec<&'static str>,
}

const AFTER_HELP: &str = "Sizes are in bytes, or have a unit: Ki, Mi, Gi, Ti. Every flag has an environment variable; the flag takes precedence.";

/// The settings that describe the one provider of a relay without `--config`: argument id and variable.
const PROVIDER_SETTINGS: [(&str, &str); 23] = [
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
    ("placement", "PLACEMENT"),
    ("cache_isolation", "CACHE_ISOLATION"),
    ("max_homes", "MAX_HOMES"),
    ("spill_requests", "SPILL_REQUESTS"),
    ("spill_bytes", "SPILL_BYTES"),
    ("fairness_mode", "FAIRNESS_MODE"),
    ("promote_after_secs", "PROMOTE_AFTER_SECS"),
    ("max_models_per_worker", "MAX_MODELS_PER_WORKER"),
    ("require_protocol_version", "REQUIRE_PROTOCOL_VERSION"),
];

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
