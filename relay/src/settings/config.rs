//! The relay's validated settings, as all other modules use them.
//!
//! Raw settings (flags, variables, `relay.yaml`) become a [`Config`] once, at start and at each change of the file, and
//! are valid from then on. An error is one line that names the place, the value and the allowed values; it never
//! repeats a secret. With a file, its providers apply and the provider variables are ignored;
//! [`Config::ignored_variables`] lists them for a warning. Settings of the whole relay come from the environment, but
//! `requireApiKeys` and `relayCount` from the file if it contains them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use modelrelay_protocol::cidr::Cidr;
use modelrelay_protocol::config_hash::content_hash;
use modelrelay_protocol::location::Location;
use modelrelay_protocol::secret::{Secret, bare};
use modelrelay_traces::{ENDPOINT, MetricsTarget, Target};

use crate::dispatch::Spill;
use crate::http::base_path;
use crate::keys::Tenant;
use crate::keys::secret::ClusterAccess;
use crate::kubernetes::api::ClusterApi;
use crate::net::budget::Purpose;
use crate::settings::cli::{Args, OptionalAddr, OptionalPath, OptionalText};
use crate::settings::error::ConfigError;
use crate::telemetry::log::{LogFilter, LogFormat};

mod bounds;
mod credentials;
mod fairness;
mod file;
mod location;
mod model_names;
mod origins;
mod placement;
mod provider;
mod raw;
mod tenants;
mod usage;
mod validate;

use model_names::{NamePlaces, RawModelNames};

pub use fairness::{FairnessConfig, FairnessMode};
pub use file::Sources;
pub use location::distance;
pub use model_names::{ModelNames, RawAliases};
pub use origins::AllowedOrigins;
pub use placement::{CacheIsolation, MAX_HOMES, MOST_HOMES, MOST_SPILL_REQUESTS, Placement, PlacementConfig};
pub use provider::{CatalogueModel, MAX_QUEUE_LEN, ProviderConfig, WorkerSecret};
pub use usage::{MOST_USAGE_DAYS, USAGE_DAYS, UsageSettings};

/// The most models that a provider may let one worker advertise.
pub const MAX_MODELS_PER_WORKER: usize = modelrelay_protocol::limits::MAX_ADVERTISED_MODELS;
/// The most relays behind one address.
pub const MAX_RELAY_COUNT: u32 = 1000;
/// A shorter secret can be guessed; it is used, with a warning.
pub const SHORT_SECRET_CHARS: usize = 16;

/// All settings of a relay.
#[derive(Debug, Clone)]
pub struct Config {
    /// The address that clients connect to, and workers unless they have their own.
    pub listen_addr: SocketAddr,
    /// The separate listener of `/admin`, `/metrics` and the dashboard.
    pub admin_listen_addr: Option<SocketAddr>,
    /// The address at which clients and workers reach this relay, without a slash at the end; `None` for the one that a
    /// request was sent to.
    pub public_url: Option<String>,
    /// The address at which workers reach this relay, if it is another one.
    pub worker_public_url: Option<String>,
    /// The origins whose pages may read responses.
    pub allowed_origins: AllowedOrigins,
    /// Further names that a relay on loopback accepts.
    pub allowed_hosts: Vec<String>,
    /// Further headers of clients that backends receive, in lower case.
    pub request_headers: Vec<String>,
    /// Further headers of backends that clients receive, in lower case.
    pub response_headers: Vec<String>,
    /// The separate listener of the worker socket.
    pub worker_listen_addr: Option<SocketAddr>,
    /// True if the worker socket is served on `listen_addr` too; always true without a separate listener.
    pub workers_on_client_port: bool,
    /// The listeners' certificate, if they use TLS.
    pub tls: Option<TlsFiles>,
    /// The token of `/admin`.
    pub admin_token: AdminTokenSource,
    /// The file to which admin actions are written, in addition to the log.
    pub audit_log_file: Option<PathBuf>,
    /// The file to which the metadata of finished requests is written, if any.
    pub request_journal: Option<RequestJournalFile>,
    /// The usage ledger.
    pub usage: UsageSettings,
    /// True if every client route requires an API key.
    pub require_api_keys: bool,
    /// The storage of API keys.
    pub api_keys: KeyStorage,
    /// How long revoked API keys stay listed; `None` without limit.
    pub revoked_keys_kept: Option<Duration>,
    /// How tokens of workers are verified.
    pub worker_tokens: WorkerTokens,
    /// The audience that tokens of clients must be issued for.
    pub client_token_audience: String,
    /// The ServiceAccounts that are clients.
    pub tenants: Vec<Tenant>,
    /// The number of relays that a worker should reach.
    pub relay_count: u32,
    /// The zone and cluster of this relay; without them, distance does not matter.
    pub location: Location,
    /// True if `/readyz` requires a worker.
    pub expect_workers: bool,
    /// True if `/readyz` requires room in every queue; off, because a full queue should respond 429 and not vanish from
    /// a Service.
    pub unready_when_saturated: bool,
    /// The interval of heartbeats.
    pub heartbeat_interval: Duration,
    /// The largest request body, in bytes.
    pub max_request_bytes: u64,
    /// The memory for all bodies at once, in bytes.
    pub max_buffered_bytes: u64,
    /// The largest streamed response, in bytes.
    pub max_stream_bytes: u64,
    /// The most bytes of one response that may wait for its client.
    pub max_unread_bytes: u64,
    /// The most open connections per listener.
    pub max_connections: usize,
    /// How long a connection may be idle, or take for the headers of a request.
    pub client_idle_timeout: Duration,
    /// Proxies whose `X-Forwarded-For` is trusted.
    pub trusted_proxies: Vec<Cidr>,
    /// The time for requests to finish after SIGTERM, and for those of a worker after its drain began.
    pub drain_timeout: Duration,
    /// The time after SIGTERM in which new connections are still accepted.
    pub shutdown_grace: Duration,
    /// The time after which a silent stream gets a comment; `None` is off.
    pub stream_keepalive: Option<Duration>,
    /// True if responses name their worker.
    pub worker_header: bool,
    /// True if the relay requests the usage of streams whose keys have limits of tokens.
    pub request_usage: bool,
    /// The target to which traces are exported, if any.
    pub traces: Option<Target>,
    /// True if traces show pseudonyms of conversations.
    pub trace_conversations: bool,
    /// The target to which metrics are exported, if any.
    pub metric_export: Option<MetricsTarget>,
    /// The filter of the log.
    pub log_filter: LogFilter,
    /// The format of the log.
    pub log_format: LogFormat,
    /// `--config`, which is watched.
    pub config_file: Option<PathBuf>,
    /// The providers in the order of the file, which decides between providers that both serve a model.
    pub providers: Vec<ProviderConfig>,
    /// SHA-256 in hex of `relay.yaml` and the secret files it names; without a file, of no data. Never of API keys.
    pub hash: String,
    /// Variables and flags that were given but have no effect because of `--config`.
    pub ignored_variables: Vec<&'static str>,
    /// Settings that are allowed but probably not intended, one line each.
    pub warnings: Vec<String>,
}

/// The file of the request journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestJournalFile {
    /// Its path.
    pub path: PathBuf,
    /// The size at which it is moved away; the previous file has as many bytes.
    pub max_bytes: u64,
}

/// The source of the token of `/admin`.
#[derive(Debug, Clone, PartialEq)]
pub enum AdminTokenSource {
    /// No token; all requests are rejected.
    None,
    /// The token itself; never empty.
    Value(Secret),
    /// A file, read again while the relay runs.
    File(PathBuf),
}

/// A certificate and its key, read again while the relay runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The chain in PEM, the server's own certificate first.
    pub cert: PathBuf,
    /// The private key in PEM.
    pub key: PathBuf,
}

/// The storage of API keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyStorage {
    /// In a file.
    File(PathBuf),
    /// In a Kubernetes Secret.
    Secret {
        /// The path at which its keys are mounted.
        mount: PathBuf,
        /// The Secret, and the account that may change it.
        access: ClusterAccess,
    },
}

/// How tokens of workers are verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerTokens {
    /// The API server that reviews them; `None` outside of a cluster.
    pub api: Option<ClusterApi>,
    /// The audience that they must be issued for.
    pub audience: String,
    /// The interval between two reviews of a connected worker's token.
    pub recheck: Duration,
}

impl Config {
    /// Validates the arguments and, with `--config`, the file that they name.
    pub fn from_args(args: &Args) -> Result<Self, ConfigError> {
        match config_path(args) {
            Some(path) => Self::from_sources(args, &Sources::read(&path)?),
            None => Self::from_environment(args),
        }
    }

    /// The path of `PUBLIC_URL`, below which a proxy serves this relay; empty without one.
    pub fn base_path(&self) -> &str {
        self.public_url.as_deref().map_or("", base_path::of)
    }

    /// Validates a file that has been read already.
    pub fn from_sources(args: &Args, sources: &Sources) -> Result<Self, ConfigError> {
        let mut config = relay_wide(args)?;
        let file = validate::file(sources)?;
        require_cluster(args, &file.providers, |index| format!("providers[{index}].workerServiceAccounts"))?;
        config.hash = sources.hash().to_owned();
        config.tenants = file.tenants;
        config.providers = file.providers;
        config.require_api_keys = file.require_api_keys.unwrap_or(args.require_api_keys);
        config.relay_count = file.relay_count.unwrap_or(args.relay_count);
        config.check_tenants(args)?;
        config.expect_workers = file.expect_workers.unwrap_or(args.expect_workers);
        config.unready_when_saturated = file.unready_when_saturated.unwrap_or(args.unready_when_saturated);
        config.ignored_variables.clone_from(&args.given_provider_settings);
        config.add_warnings(args);
        Ok(config)
    }

    fn from_environment(args: &Args) -> Result<Self, ConfigError> {
        let secret = credentials::worker_secret(args)?;
        let worker_accounts = args.worker_service_accounts.0.clone();
        if secret.is_none() && worker_accounts.is_empty() {
            return Err(ConfigError::new(
                "WORKER_SECRET (--worker-secret) is missing or empty: set the secret that workers must present, or WORKER_SECRET_FILE, \
                 WORKER_SERVICE_ACCOUNTS if workers present a token of their Pod, or --config FILE",
            ));
        }
        let mut config = relay_wide(args)?;
        let provider = ProviderConfig {
            worker_secrets: secret.map(|secret| WorkerSecret { secret, not_after: None }).into_iter().collect(),
            worker_accounts,
            max_queue_len: args.max_queue_len,
            max_queue_bytes: args.max_queue_bytes,
            queue_timeout: args.queue_timeout_secs,
            cold_timeout: args.cold_timeout_secs,
            request_timeout: args.request_timeout_secs,
            stream_idle_timeout: args.stream_idle_timeout_secs,
            first_byte_timeout: args.first_byte_timeout_secs,
            placement: PlacementConfig {
                mode: args.placement,
                cache_isolation: args.cache_isolation,
                max_homes: args.max_homes,
                spill: Spill { requests: args.spill_requests, bytes: args.spill_bytes },
            },
            fairness: FairnessConfig { mode: args.fairness_mode, promote_after: args.promote_after_secs },
            max_models_per_worker: args.max_models_per_worker,
            require_protocol_version: args.require_protocol_version,
            ..ProviderConfig::new(&args.provider_name)
        };
        config.providers = vec![provider.with_names(&name_places(), &model_names(args))?];
        require_cluster(args, &config.providers, |_| "WORKER_SERVICE_ACCOUNTS (--worker-service-accounts)".to_owned())?;
        config.add_warnings(args);
        Ok(config)
    }

    /// The provider with this name.
    pub fn provider(&self, name: &str) -> Option<&ProviderConfig> {
        self.providers.iter().find(|provider| provider.name == name)
    }

    /// Tenants exist only in a cluster, and only if clients are identified at all.
    fn check_tenants(&self, args: &Args) -> Result<(), ConfigError> {
        if self.tenants.is_empty() {
            return Ok(());
        }
        if !self.require_api_keys {
            return Err(ConfigError::new(
                "tenants: they require requireApiKeys: true (MODELRELAY_REQUIRE_API_KEYS), without which no client is identified",
            ));
        }
        if self.client_token_audience == self.worker_tokens.audience {
            return Err(ConfigError::new(format!(
                "CLIENT_TOKEN_AUDIENCE (--client-token-audience): {:?} is that of workers (WORKER_TOKEN_AUDIENCE); tokens of workers \
                 must not be those of clients",
                self.client_token_audience
            )));
        }
        ClusterApi::of_this_pod("tenants", "use API keys outside of a cluster", &args.service_account_dir).map(|_| ())
    }

    fn add_warnings(&mut self, args: &Args) {
        let mut warnings = Vec::new();
        let given = args.admin_token.as_ref().is_some_and(|token| !token.expose().is_empty());
        if given && matches!(self.admin_token, AdminTokenSource::File(_)) {
            warnings.push("MODELRELAY_ADMIN_TOKEN is ignored because MODELRELAY_ADMIN_TOKEN_FILE is set".to_owned());
        }
        if credentials::ignores_worker_secret(args) {
            warnings.push("WORKER_SECRET is ignored because WORKER_SECRET_FILE is set".to_owned());
        }
        if Purpose::of_body(self.max_request_bytes).room_in(self.max_buffered_bytes) < self.max_request_bytes {
            warnings.push(
                "seven eighths of MAX_BUFFERED_BYTES are less than MAX_REQUEST_BYTES: the largest requests are always rejected"
                    .to_owned(),
            );
        }
        for provider in &self.providers {
            let name = &provider.name;
            if provider.worker_secrets.is_empty() && provider.worker_accounts.is_empty() {
                warnings.push(format!(
                    "provider {name} has neither a worker secret nor worker service accounts: no worker can connect to it"
                ));
            }
            let wrapped = |secret: &WorkerSecret| bare(secret.secret.expose()) != secret.secret.expose();
            if provider.worker_secrets.iter().any(wrapped) {
                warnings.push(format!("a worker secret of provider {name} is enclosed in quotes, blanks or a line end, which are part of the secret: workers must present them too"));
            }
            let short = |secret: &WorkerSecret| secret.secret.expose().chars().count() < SHORT_SECRET_CHARS;
            if provider.worker_secrets.iter().any(short) {
                warnings.push(format!("a worker secret of provider {name} has fewer than {SHORT_SECRET_CHARS} characters and can be guessed"));
            }
            // For the published relay, 0 meant no limit.
            if provider.max_queue_len == 0 {
                warnings.push(format!("provider {name} has queue length 0: a request that no worker can accept immediately is rejected; set a queue length (MAX_QUEUE_LEN, queue.maxLength)"));
            }
        }
        self.warnings = warnings;
    }
}

pub(crate) fn config_path(args: &Args) -> Option<PathBuf> {
    args.config.as_ref().and_then(|path| path.0.clone())
}

fn model_names(args: &Args) -> RawModelNames<'_> {
    RawModelNames {
        aliases: &args.model_aliases.0,
        default_model: args.default_model.as_ref().and_then(|name| name.0.as_deref()),
        fallback_model: args.fallback_model.as_ref().and_then(|name| name.0.as_deref()),
    }
}

fn name_places() -> NamePlaces {
    NamePlaces {
        aliases: "MODEL_ALIASES (--model-aliases)".to_owned(),
        default_model: "DEFAULT_MODEL (--default-model)".to_owned(),
        fallback_model: "FALLBACK_MODEL (--fallback-model)".to_owned(),
    }
}

/// All settings except the providers.
fn relay_wide(args: &Args) -> Result<Config, ConfigError> {
    let address = |address: &Option<OptionalAddr>| address.and_then(|address| address.0);
    let worker_listen_addr = address(&args.worker_listen_addr);
    Ok(Config {
        listen_addr: args.listen_addr,
        admin_listen_addr: address(&args.admin_listen_addr),
        public_url: args.public_url.as_ref().and_then(|url| url.0.clone()),
        worker_public_url: args.worker_public_url.as_ref().and_then(|url| url.0.clone()),
        allowed_origins: args.allowed_origins.clone(),
        allowed_hosts: args.allowed_hosts.0.clone(),
        request_headers: args.request_headers.0.clone(),
        response_headers: args.response_headers.0.clone(),
        worker_listen_addr,
        workers_on_client_port: args.workers_on_client_port || worker_listen_addr.is_none(),
        tls: tls_files(args)?,
        admin_token: credentials::admin_token(args)?,
        audit_log_file: args.audit_log_file.as_ref().and_then(|path| path.0.clone()),
        request_journal: request_journal(args),
        usage: UsageSettings::of(args),
        require_api_keys: args.require_api_keys,
        api_keys: key_storage(args)?,
        revoked_keys_kept: days(args.revoked_keys_kept_days),
        worker_tokens: WorkerTokens {
            // The providers, which are read later, show whether it is required.
            api: cluster(args, "").ok(),
            audience: args.worker_token_audience.clone(),
            recheck: args.worker_token_recheck_secs,
        },
        client_token_audience: args.client_token_audience.clone(),
        tenants: Vec::new(),
        relay_count: args.relay_count,
        location: location::own(args),
        expect_workers: args.expect_workers,
        unready_when_saturated: args.unready_when_saturated,
        heartbeat_interval: args.heartbeat_interval,
        max_request_bytes: args.max_request_bytes,
        max_buffered_bytes: args.max_buffered_bytes,
        max_stream_bytes: args.max_stream_bytes,
        max_unread_bytes: args.max_unread_bytes,
        max_connections: args.max_connections,
        client_idle_timeout: args.client_idle_timeout_secs,
        trusted_proxies: args.trusted_proxies.0.clone(),
        drain_timeout: args.drain_timeout_secs,
        shutdown_grace: args.shutdown_grace_secs,
        stream_keepalive: (!args.stream_keepalive_secs.is_zero()).then_some(args.stream_keepalive_secs),
        worker_header: args.worker_header,
        request_usage: args.request_usage,
        traces: traces(args)?,
        trace_conversations: args.trace_conversations,
        metric_export: metric_export(args)?,
        log_filter: args.log_level.clone(),
        log_format: args.log_format,
        config_file: config_path(args),
        providers: Vec::new(),
        hash: content_hash::<&[u8]>([]),
        ignored_variables: Vec::new(),
        warnings: Vec::new(),
    })
}

/// Validates the whole target before any listener is opened, so that the relay does not start with an invalid one.
fn traces(args: &Args) -> Result<Option<Target>, ConfigError> {
    let target = Target::resolve(args.otlp_endpoint.as_deref().map(|address| (ENDPOINT, address)))?;
    target.as_ref().map(Target::check).transpose()?;
    Ok(target)
}

fn metric_export(args: &Args) -> Result<Option<MetricsTarget>, ConfigError> {
    let target = MetricsTarget::resolve(args.otlp_endpoint.as_deref().map(|address| (ENDPOINT, address)))?;
    target.as_ref().map(MetricsTarget::check).transpose()?;
    Ok(target)
}

fn request_journal(args: &Args) -> Option<RequestJournalFile> {
    let path = args.request_journal_file.as_ref().and_then(|path| path.0.clone())?;
    Some(RequestJournalFile { path, max_bytes: args.request_journal_bytes })
}

fn tls_files(args: &Args) -> Result<Option<TlsFiles>, ConfigError> {
    let path = |path: &Option<OptionalPath>| path.as_ref().and_then(|path| path.0.clone());
    match (path(&args.tls_cert_file), path(&args.tls_key_file)) {
        (Some(cert), Some(key)) => Ok(Some(TlsFiles { cert, key })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(ConfigError::new(
            "TLS_CERT_FILE (--tls-cert-file) requires TLS_KEY_FILE (--tls-key-file): the file with the certificate's private key",
        )),
        (None, Some(_)) => Err(ConfigError::new(
            "TLS_KEY_FILE (--tls-key-file) requires TLS_CERT_FILE (--tls-cert-file): the file with the key's certificate",
        )),
    }
}

fn cluster(args: &Args, setting: &str) -> Result<ClusterApi, ConfigError> {
    ClusterApi::of_this_pod(setting, "use a worker secret outside of a cluster", &args.service_account_dir)
}

/// Worker tokens are valid only in the cluster that issued them, so they require one. `setting` names the setting of
/// the provider at an index.
fn require_cluster(
    args: &Args,
    providers: &[ProviderConfig],
    setting: impl FnOnce(usize) -> String,
) -> Result<(), ConfigError> {
    match providers.iter().position(|provider| !provider.worker_accounts.is_empty()) {
        Some(index) => cluster(args, &setting(index)).map(|_| ()),
        None => Ok(()),
    }
}

/// A number of days; 0 is no limit.
fn days(number: u32) -> Option<Duration> {
    (number > 0).then(|| Duration::from_secs(u64::from(number) * 86_400))
}

fn key_storage(args: &Args) -> Result<KeyStorage, ConfigError> {
    let text = |text: &Option<OptionalText>| text.as_ref().and_then(|text| text.0.clone());
    let Some(secret) = text(&args.api_keys_secret) else { return Ok(KeyStorage::File(args.api_keys_file.clone())) };
    if !args.api_keys_file_given {
        return Err(ConfigError::new(
            "API_KEYS_SECRET (--api-keys-secret) requires API_KEYS_FILE: the path where the Secret's key keys.json is mounted",
        ));
    }
    let namespace = text(&args.pod_namespace);
    let access = ClusterAccess::of_this_pod(&secret, namespace.as_deref(), &args.service_account_dir)?;
    Ok(KeyStorage::Secret { mount: args.api_keys_file.clone(), access })
}

#[cfg(test)]
mod tests;
