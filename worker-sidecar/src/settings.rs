//! Settings, validated once: flags and variables over `worker.yaml` over defaults.
//!
//! An invalid setting is one [`SettingError`], which states the setting as the user wrote it, the value and the allowed
//! values. Secrets are never repeated. After a reload of the file only [`Live`] settings change; changes of the rest
//! are logged as requiring a restart.

mod args;
mod credential;
mod file;
mod mistakes;
mod multiplexer;
mod parse;
mod proxies;
mod relay_headers;
mod relay_url;
mod watch;

pub use args::{Args, Setting, flags};
pub(crate) use args::{of_variable, secret};
pub use credential::{Credential, CredentialSource};
pub(crate) use parse::Given;
pub use proxies::Proxies;
pub use relay_headers::RelayHeaders;
pub use relay_url::RelayUrl;
pub use watch::watch;

pub use modelrelay_multiplexer::driver::settings::{DriverSettings, SlotSettings};
pub use modelrelay_multiplexer::setting_error::SettingError;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::HeaderMap;
use modelrelay_platform::files;
use modelrelay_protocol::location::Location;
use modelrelay_protocol::model_details::ModelDetails;
use modelrelay_protocol::secret::Secret;
use modelrelay_traces::{ENDPOINT, MetricsTarget, Target};
use url::Url;

use crate::telemetry::{LogFilter, LogFormat};
use file::File;
use mistakes::Mistakes;

/// The default address of the probe server.
pub const DEFAULT_PROBE_ADDR: &str = "127.0.0.1:17990";

/// Ollama's own port.
pub const OLLAMA_PORT: u16 = 11434;

/// Details that `worker.yaml` declares, by model name.
pub type Declared = BTreeMap<String, ModelDetails>;

/// All settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The worker's human-readable name.
    pub name: String,
    /// The WorkerPool, if any.
    pub pool: Option<String>,
    /// The zone and cluster of the worker.
    pub location: Location,
    /// Bytes of large request bodies to hold, beyond the first 256 KiB of each request.
    pub max_buffered_bytes: u64,
    /// The longest drain.
    pub shutdown_timeout: Duration,
    /// The address of the probe server.
    pub probe: ProbeAddr,
    /// The token that `/drain` requires.
    pub drain_token: Option<Secret>,
    /// The target of the trace export, if any.
    pub traces: Option<Target>,
    /// The target of the export of metrics, if any.
    pub metric_export: Option<MetricsTarget>,
    /// The log filter.
    pub log_filter: LogFilter,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The proxies through which relays are dialled.
    pub proxies: Proxies,
    /// The settings that a reload changes.
    pub live: Live,
}

/// Settings that a reload of `worker.yaml` applies without a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct Live {
    /// The relays. A change takes effect with the next dial.
    pub relay: RelayUrl,
    /// The name of the provider at the relay. A change takes effect with the next dial.
    pub provider: String,
    /// Certificates to trust in addition to the system's.
    pub relay_ca_file: Option<PathBuf>,
    /// Headers to add to each request to a relay.
    pub relay_headers: RelayHeaders,
    /// The source of the secret or token.
    pub credential: CredentialSource,
    /// The backend.
    pub backend: BackendSettings,
    /// The models to advertise.
    pub models: Models,
    /// Details of models, which replace those that the backend lists.
    pub model_details: Declared,
    /// The number of concurrent requests.
    pub max_concurrency: u32,
    /// True unless the settings name that number.
    pub is_default_concurrency: bool,
    /// The slots of a multiplexer, which replace backend, models and concurrency.
    pub slots: Option<Vec<SlotSettings>>,
}

/// The address of the probe server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeAddr {
    /// The address.
    pub addr: SocketAddr,
    /// True if it was configured: then it is an error if the address is in use.
    pub explicit: bool,
}

/// The backend.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSettings {
    /// Scheme, host, port and base path.
    pub url: Url,
    /// The kind of server.
    pub engine: Engine,
    /// The API key, which replaces the client's credentials.
    pub api_key: Option<Secret>,
    /// Headers that are set on every request.
    pub headers: HeaderMap,
}

/// The kind of inference server: it determines the meaning of "healthy".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp's server.
    LlamaServer,
    /// Ollama.
    Ollama,
    /// Any other server with an OpenAI-compatible API.
    #[default]
    OpenAi,
}

/// The models to advertise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Models {
    /// The models that the backend's `/v1/models` lists.
    Listed,
    /// Exactly these.
    Fixed(Vec<String>),
}

impl BackendSettings {
    /// Returns the kind of server for traces, if it is known. Ollama is recognised by its port too.
    pub fn kind(&self) -> Option<&'static str> {
        match (self.engine, self.url.port_or_known_default()) {
            (Engine::Vllm, _) => Some("vllm"),
            (Engine::Sglang, _) => Some("sglang"),
            (Engine::LlamaServer, _) => Some("llama_cpp"),
            (Engine::Ollama, _) | (Engine::OpenAi, Some(OLLAMA_PORT)) => Some("ollama"),
            (Engine::OpenAi, _) => None,
        }
    }
}

impl Engine {
    /// Returns the name of the engine in settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaServer => "llama-server",
            Self::Ollama => "ollama",
            Self::OpenAi => "openai",
        }
    }
}

impl Settings {
    /// Reads and validates everything. Returns the first mistake.
    pub fn load(args: &Args) -> Result<Self, SettingError> {
        Self::check(args).map_err(mistakes::first)
    }

    /// Reads and validates everything. Returns every mistake, in the order of the settings.
    pub fn check(args: &Args) -> Result<Self, Vec<SettingError>> {
        let read = |path: &PathBuf| File::parse(path, &read_config(path)?);
        // The content of an unreadable file is unknown, so its settings are not reported as missing.
        let file = args.config.as_ref().map_or_else(|| Ok(File::default()), read).map_err(|error| vec![error])?;
        Self::judge(args, &file)
    }

    fn resolve(args: &Args, file: &File) -> Result<Self, SettingError> {
        Self::judge(args, file).map_err(mistakes::first)
    }

    fn judge(args: &Args, file: &File) -> Result<Self, Vec<SettingError>> {
        let mut mistakes = Mistakes::default();
        let name = Given::first([("WORKER_NAME", &args.worker_name), ("name", &file.name)]);
        let pool = Given::first([("WORKER_POOL", &args.worker_pool), ("pool", &file.pool)]);
        let log = mistakes.of(log(args, file));
        let name = mistakes.of(name.map_or_else(|| Ok(host_name()), |given| given.label()));
        let pool = mistakes.of(pool.map(|given| given.label()).transpose());
        let location = mistakes.all(location(args, file));
        let max_buffered_bytes = mistakes.of(max_buffered_bytes(args, file));
        let shutdown_timeout = mistakes.of(shutdown_timeout(args, file));
        let probe = mistakes.of(probe_addr(args, file));
        let drain_token = mistakes.of(drain_token(args, file));
        let traces = mistakes.of(traces(args, file));
        let metric_export = mistakes.of(metric_export(args, file));
        let live = mistakes.all(Live::judge(args, file));
        let proxies = Proxies::from_env();
        if let Some(live) = &live {
            mistakes.of(proxies.of(&live.relay, None));
        }
        let settings = || {
            let (log_filter, log_format) = log?;
            Some(Self {
                name: name?,
                pool: pool?,
                location: location?,
                max_buffered_bytes: max_buffered_bytes?,
                shutdown_timeout: shutdown_timeout?,
                probe: probe?,
                drain_token: drain_token?,
                traces: traces?,
                metric_export: metric_export?,
                log_filter,
                log_format,
                proxies,
                live: live?,
            })
        };
        mistakes.or(settings())
    }
}

impl Live {
    fn judge(args: &Args, file: &File) -> Result<Self, Vec<SettingError>> {
        let mut mistakes = Mistakes::default();
        let relay = Given::first([("PROXY_URL", &args.proxy_url), ("relay", &file.relay)]);
        let relay = relay.map_or_else(|| Ok(RelayUrl::default()), |given| RelayUrl::parse(given.setting, given.value));
        let relay = mistakes.of(relay);
        let provider = Given::first([("PROVIDER_NAME", &args.provider_name), ("provider", &file.provider)]);
        let provider = mistakes.of(provider.map_or(Ok("local".to_owned()), |given| given.provider()));
        let credential = mistakes.of(credential::source(args, file));
        let relay_headers = mistakes.of(RelayHeaders::judge(args, file, credential.as_ref()));
        let backend = mistakes.of(backend(args, file));
        let models = mistakes.of(models(args, file));
        let model_details = mistakes.all(model_details(file));
        let max_concurrency = mistakes.of(max_concurrency(args, file));
        let slots = mistakes.all(multiplexer::slots(args, file));
        let live = || {
            Some(Self {
                relay: relay?,
                provider: provider?,
                relay_ca_file: args.relay_ca_file.clone().or_else(|| file.relay_ca_file.clone()),
                relay_headers: relay_headers?,
                credential: credential?,
                backend: backend?,
                models: models?,
                model_details: model_details?,
                max_concurrency: max_concurrency?,
                is_default_concurrency: args.max_concurrency.is_none() && file.max_concurrency.is_none(),
                slots: slots?,
            })
        };
        mistakes.or(live())
    }
}

fn location(args: &Args, file: &File) -> Result<Location, Vec<SettingError>> {
    let mut mistakes = Mistakes::default();
    let zone = Given::first([("ZONE", &args.zone), ("zone", &file.zone)]);
    let cluster = Given::first([("CLUSTER", &args.cluster), ("cluster", &file.cluster)]);
    let zone = mistakes.of(zone.map(|given| given.location_label()).transpose());
    let cluster = mistakes.of(cluster.map(|given| given.location_label()).transpose());
    mistakes.or(zone.zip(cluster).map(|(zone, cluster)| Location { zone, cluster }))
}

/// Returns the settings of the log alone, for the demo.
pub fn log_settings(args: &Args) -> Result<(LogFilter, LogFormat), SettingError> {
    log(args, &File::default())
}

fn log(args: &Args, file: &File) -> Result<(LogFilter, LogFormat), SettingError> {
    let filter = Given::first([("LOG_LEVEL", &args.log_level), ("logLevel", &file.log_level)]);
    let format = Given::first([("LOG_FORMAT", &args.log_format), ("logFormat", &file.log_format)]);
    Ok((
        filter.map_or(Ok(LogFilter::default()), |given| given.log_filter())?,
        format.map_or(Ok(LogFormat::default()), |given| given.log_format())?,
    ))
}

fn traces(args: &Args, file: &File) -> Result<Option<Target>, SettingError> {
    Target::resolve(otlp_endpoint(args, file)).map_err(|error| export_error(&error))
}

fn metric_export(args: &Args, file: &File) -> Result<Option<MetricsTarget>, SettingError> {
    MetricsTarget::resolve(otlp_endpoint(args, file)).map_err(|error| export_error(&error))
}

fn otlp_endpoint<'a>(args: &'a Args, file: &'a File) -> Option<(&'a str, &'a str)> {
    let base = Given::first([(ENDPOINT, &args.otlp_endpoint), ("otlpEndpoint", &file.otlp_endpoint)]);
    base.map(|given| (given.setting, given.value))
}

/// Creates an error about the export of traces or metrics.
pub(crate) fn export_error(error: &modelrelay_traces::SettingError) -> SettingError {
    SettingError::hidden(error.setting(), error.problem())
}

fn read_config(path: &Path) -> Result<String, SettingError> {
    files::read_text(path)
        .map_err(|error| SettingError::new("--config", path.display().to_string(), format!("cannot be read: {error}")))
}

pub(crate) fn read_secret(setting: &str, path: &Path) -> Result<Secret, SettingError> {
    let shown = path.display().to_string();
    let text = files::read_text(path)
        .map_err(|error| SettingError::new(setting, &shown, format!("the file cannot be read: {error}")))?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        return Err(SettingError::new(setting, shown, "the file is empty; it must contain one line"));
    }
    header_secret(setting, text)
}

/// Validates a secret, which is sent in a header.
pub(crate) fn header_secret(setting: &str, text: &str) -> Result<Secret, SettingError> {
    let why = if !text.is_ascii() {
        "it contains a character outside of ASCII"
    } else if text.contains(['\r', '\n']) {
        "it contains a line break, possibly a Windows line ending"
    } else if text.chars().any(|char| char.is_ascii_control() && char != '\t') {
        "it contains a control character"
    } else {
        return Ok(Secret::new(text));
    };
    Err(SettingError::hidden(setting, format!("its value (not shown) must be printable ASCII on one line: {why}")))
}

type NamedSecret<'a> = (&'a str, Option<&'a Secret>);
type NamedPath<'a> = (&'a str, Option<&'a Path>);

fn optional_secret(
    value: NamedSecret,
    path: NamedPath,
    file_value: NamedSecret,
    file_path: NamedPath,
) -> Result<Option<Secret>, SettingError> {
    for (value, path) in [(value, path), (file_value, file_path)] {
        if let (setting, Some(secret)) = value
            && !secret.is_empty()
        {
            return header_secret(setting, secret.expose()).map(Some);
        }
        if let (setting, Some(path)) = path
            && !path.as_os_str().is_empty()
        {
            return read_secret(setting, path).map(Some);
        }
    }
    Ok(None)
}

fn backend(args: &Args, file: &File) -> Result<BackendSettings, SettingError> {
    let of_file = file.backend.clone().unwrap_or_default();
    let url = Given::first([("BACKEND_URL", &args.backend_url), ("backend.url", &of_file.url)]);
    let engine = Given::first([("BACKEND_ENGINE", &args.backend_engine), ("backend.engine", &of_file.engine)]);
    let default = Given { setting: "BACKEND_URL", value: "http://127.0.0.1:8000" };
    Ok(BackendSettings {
        url: url.unwrap_or(default).backend_url()?,
        engine: engine.map_or(Ok(Engine::default()), |given| given.engine())?,
        api_key: optional_secret(
            ("BACKEND_API_KEY", args.backend_api_key.as_ref()),
            ("BACKEND_API_KEY_FILE", args.backend_api_key_file.as_deref()),
            ("backend.apiKey", None),
            ("backend.apiKeyFile", of_file.api_key_file.as_deref()),
        )?,
        headers: parse::headers(of_file.headers.0.as_ref())?,
    })
}

fn models(args: &Args, file: &File) -> Result<Models, SettingError> {
    if let Some(text) = &args.models {
        return parse::models("MODELS", text.split(','));
    }
    match &file.models {
        Some(list) => parse::models("models", list.iter().map(String::as_str)),
        None => Ok(Models::Listed),
    }
}

fn model_details(file: &File) -> Result<Declared, Vec<SettingError>> {
    let declared = file.model_details.iter().flatten().map(|(model, fields)| {
        let setting = || format!("modelDetails.{}", model.escape_debug());
        let details = ModelDetails::declared(fields).map_err(|why| SettingError::hidden(setting(), why))?;
        Ok((model.clone(), details))
    });
    Ok(mistakes::collect(declared)?.into_iter().collect())
}

fn max_concurrency(args: &Args, file: &File) -> Result<u32, SettingError> {
    match (&args.max_concurrency, file.max_concurrency) {
        (Some(text), _) => parse::concurrency("MAX_CONCURRENCY", text),
        (None, Some(number)) => parse::concurrency("maxConcurrency", &number.to_string()),
        (None, None) => Ok(1),
    }
}

fn max_buffered_bytes(args: &Args, file: &File) -> Result<u64, SettingError> {
    match (&args.max_buffered_bytes, file.max_buffered_bytes) {
        (Some(text), _) => parse::size("MAX_BUFFERED_BYTES", text),
        (None, Some(size)) => Ok(size.0),
        (None, None) => Ok(64 << 20),
    }
}

fn shutdown_timeout(args: &Args, file: &File) -> Result<Duration, SettingError> {
    match (&args.shutdown_timeout_secs, file.shutdown_timeout) {
        (Some(text), _) => parse::seconds("SHUTDOWN_TIMEOUT_SECS", text),
        (None, Some(duration)) => Ok(duration.0),
        (None, None) => Ok(Duration::from_secs(30)),
    }
}

fn drain_token(args: &Args, file: &File) -> Result<Option<Secret>, SettingError> {
    optional_secret(
        ("DRAIN_TOKEN", args.drain_token.as_ref()),
        ("DRAIN_TOKEN_FILE", args.drain_token_file.as_deref()),
        ("drainToken", file.drain_token.0.as_ref()),
        ("drainTokenFile", file.drain_token_file.as_deref()),
    )
}

fn probe_addr(args: &Args, file: &File) -> Result<ProbeAddr, SettingError> {
    match Given::first([("PROBE_ADDR", &args.probe_addr), ("probeListen", &file.probe_listen)]) {
        Some(given) => Ok(ProbeAddr { addr: given.socket_addr()?, explicit: true }),
        None => Ok(ProbeAddr {
            addr: Given { setting: "PROBE_ADDR", value: DEFAULT_PROBE_ADDR }.socket_addr()?,
            explicit: false,
        }),
    }
}

/// Returns the host name, which shows users which machine a worker runs on.
pub(crate) fn host_name() -> String {
    let from_file = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let of_windows = || std::env::var("COMPUTERNAME").ok();
    std::env::var("HOSTNAME")
        .ok()
        .or_else(from_file)
        .or_else(of_windows)
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "worker".to_owned())
}

#[cfg(test)]
mod tests;
