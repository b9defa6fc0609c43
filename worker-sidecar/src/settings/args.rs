//! The flags and variables of a run: the given text, not yet its meaning.
//!
//! Every value arrives as text and is validated in [`super`] together with `worker.yaml`, so that an invalid
//! setting gives the same error wherever it was written. Each flag has a variable; both take precedence over the file.

use std::path::{Path, PathBuf};

use clap::{Args as _, FromArgMatches};
use modelrelay_protocol::secret::Secret;

/// Flags and variables of the worker, unjudged. An empty value counts as not given, except for the secret.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Relay to dial: http(s)://, ws(s)://, or dns+http(s)://NAME:PORT for every address behind NAME [default:
    /// http://127.0.0.1:8080]
    #[arg(long, env = "PROXY_URL", value_name = "URL")]
    pub proxy_url: Option<String>,
    /// Provider to serve at the relay [default: local]
    #[arg(long, env = "PROVIDER_NAME", value_name = "NAME")]
    pub provider_name: Option<String>,
    /// Secret that admits this worker to the provider
    #[arg(long, env = "WORKER_SECRET", value_name = "SECRET", hide_env_values = true, value_parser = secret)]
    pub worker_secret: Option<Secret>,
    /// File that holds the secret; read again at every dial. The worker waits while it is missing
    #[arg(long, env = "WORKER_SECRET_FILE", value_name = "FILE")]
    pub worker_secret_file: Option<PathBuf>,
    /// File that holds a projected ServiceAccount token of the Pod, sent instead of the secret; read again at every
    /// dial
    #[arg(long, env = "WORKER_TOKEN_FILE", value_name = "FILE")]
    pub worker_token_file: Option<PathBuf>,
    /// Display name of the worker [default: the host name]
    #[arg(long, env = "WORKER_NAME", value_name = "NAME")]
    pub worker_name: Option<String>,
    /// Pool that the worker belongs to [default: none]
    #[arg(long, env = "WORKER_POOL", value_name = "NAME")]
    pub worker_pool: Option<String>,
    /// Zone in which the worker runs: a relay with ZONE prefers workers of its own [default: none]
    #[arg(long, env = "ZONE", value_name = "NAME")]
    pub zone: Option<String>,
    /// Cluster or site in which the worker runs, which may have several zones [default: none]
    #[arg(long, env = "CLUSTER", value_name = "NAME")]
    pub cluster: Option<String>,
    /// Inference backend to serve [default: http://127.0.0.1:8000]
    #[arg(long, env = "BACKEND_URL", value_name = "URL")]
    pub backend_url: Option<String>,
    /// Kind of backend: vllm, sglang, llama-server, ollama or openai [default: openai]
    #[arg(long, env = "BACKEND_ENGINE", value_name = "ENGINE")]
    pub backend_engine: Option<String>,
    /// Key sent to the backend in place of the client's
    #[arg(long, env = "BACKEND_API_KEY", value_name = "KEY", hide_env_values = true, value_parser = secret)]
    pub backend_api_key: Option<Secret>,
    /// File that holds the backend's key [default: none]
    #[arg(long, env = "BACKEND_API_KEY_FILE", value_name = "FILE")]
    pub backend_api_key_file: Option<PathBuf>,
    /// Models to advertise, separated by commas; * advertises what the backend lists [default: *]
    #[arg(long, env = "MODELS", value_name = "LIST")]
    pub models: Option<String>,
    /// Maximum number of concurrent requests [default: 1]
    #[arg(long, env = "MAX_CONCURRENCY", value_name = "N")]
    pub max_concurrency: Option<String>,
    /// Memory for large request bodies, beyond the first 256 KiB of each request [default: 64Mi]
    #[arg(long, env = "MAX_BUFFERED_BYTES", value_name = "SIZE")]
    pub max_buffered_bytes: Option<String>,
    /// Time limit for running requests to finish after SIGTERM [default: 30]
    #[arg(long, env = "SHUTDOWN_TIMEOUT_SECS", value_name = "SECONDS")]
    pub shutdown_timeout_secs: Option<String>,
    /// With a multiplexer: time limit for running requests to finish before their model is unloaded; 0 severs them at
    /// once [default: 5m]
    #[arg(long, env = "DRAIN_TIMEOUT", value_name = "DURATION")]
    pub drain_timeout: Option<String>,
    /// Address that serves /livez, /readyz, /backendz, /healthz, /metrics and /drain [default: 127.0.0.1:17990]
    #[arg(long, env = "PROBE_ADDR", value_name = "ADDR")]
    pub probe_addr: Option<String>,
    /// Token that /drain requires in x-modelrelay-drain-token [default: none]
    #[arg(long, env = "DRAIN_TOKEN", value_name = "TOKEN", hide_env_values = true, value_parser = secret)]
    pub drain_token: Option<Secret>,
    /// File that holds the token for /drain [default: none]
    #[arg(long, env = "DRAIN_TOKEN_FILE", value_name = "FILE")]
    pub drain_token_file: Option<PathBuf>,
    /// CA certificates (PEM) to trust for the relay, in addition to the system's; read again at every dial [default:
    /// none]
    #[arg(long, env = "RELAY_CA_FILE", value_name = "FILE")]
    pub relay_ca_file: Option<PathBuf>,
    /// Headers to add to each request to the relay, as NAME: VALUE, separated by ; or line breaks [default: none]
    #[arg(long, env = "RELAY_HEADERS", value_name = "HEADERS", hide_env_values = true, value_parser = secret)]
    pub relay_headers: Option<Secret>,
    /// File that holds these headers, one per line; read again at every dial [default: none]
    #[arg(long, env = "RELAY_HEADERS_FILE", value_name = "FILE")]
    pub relay_headers_file: Option<PathBuf>,
    /// Collector to which OpenTelemetry traces, and with OTEL_METRICS_EXPORTER=otlp metrics, are exported (OTLP over
    /// HTTP), such as http://collector:4318 [default: none]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL", hide_env_values = true)]
    pub otlp_endpoint: Option<String>,
    /// Log level: error, warn, info, debug or trace [default: info]
    #[arg(long, env = "LOG_LEVEL", value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Log format: text or json [default: text]
    #[arg(long, env = "LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Path of worker.yaml; reloaded when it changes [default: none]
    #[arg(long, env = "WORKER_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// One setting, for the table in `docs/reference/settings.md`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The environment variable.
    pub variable: String,
    /// The flag, with its dashes.
    pub flag: String,
    /// The default, if there is one.
    pub default: Option<String>,
    /// The help text.
    pub help: String,
}

/// Returns the settings that a run of this file takes from one variable, and from no other.
pub(crate) fn of_variable(variable: &str, file: &Path) -> Args {
    let others_without = |argument: clap::Arg| match argument.get_env() {
        Some(env) if env == variable => argument,
        Some(_) | None => argument.env(None::<&str>),
    };
    let matches = command().mut_args(others_without).try_get_matches_from(["modelrelay-worker"]);
    let args = matches.and_then(|matches| Args::from_arg_matches(&matches)).unwrap_or_default();
    Args { config: Some(file.to_owned()), ..args.without_empty() }
}

/// Returns every setting, in the order of the help.
pub fn flags() -> Vec<Setting> {
    command()
        .get_arguments()
        .filter_map(|argument| {
            let help = argument.get_help()?.to_string();
            let (help, default) = match help.rsplit_once(" [default: ") {
                Some((help, default)) => (help.to_owned(), Some(default.trim_end_matches(']').to_owned())),
                None => (help, None),
            };
            Some(Setting {
                variable: argument.get_env()?.to_string_lossy().into_owned(),
                flag: format!("--{}", argument.get_long()?),
                default: default.filter(|default| default != "none"),
                help,
            })
        })
        .collect()
}

fn command() -> clap::Command {
    Args::augment_args(clap::Command::new("modelrelay-worker"))
}

impl Args {
    /// Compose files and charts pass an empty variable for "not set".
    pub(crate) fn without_empty(mut self) -> Self {
        for text in [
            &mut self.proxy_url,
            &mut self.provider_name,
            &mut self.worker_name,
            &mut self.worker_pool,
            &mut self.zone,
            &mut self.cluster,
            &mut self.backend_url,
            &mut self.backend_engine,
            &mut self.models,
            &mut self.max_concurrency,
            &mut self.max_buffered_bytes,
            &mut self.shutdown_timeout_secs,
            &mut self.drain_timeout,
            &mut self.probe_addr,
            &mut self.otlp_endpoint,
            &mut self.log_level,
            &mut self.log_format,
        ] {
            text.take_if(|text| text.trim().is_empty());
        }
        for secret in [&mut self.backend_api_key, &mut self.drain_token, &mut self.relay_headers] {
            secret.take_if(|secret| secret.expose().trim().is_empty());
        }
        for path in [
            &mut self.worker_secret_file,
            &mut self.worker_token_file,
            &mut self.backend_api_key_file,
            &mut self.drain_token_file,
            &mut self.relay_ca_file,
            &mut self.relay_headers_file,
            &mut self.config,
        ] {
            path.take_if(|path| path.as_os_str().is_empty());
        }
        self
    }
}

/// Parses a secret, which no `Debug` output shows.
pub(crate) fn secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret::new(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_has_variable() {
        let flags = command().get_arguments().filter(|a| a.get_help().is_some()).count();
        assert_eq!(super::flags().len(), flags);
        let models = super::flags().into_iter().find(|s| s.variable == "MODELS").unwrap();
        assert_eq!((models.flag.as_str(), models.default.as_deref()), ("--models", Some("*")));
    }
}
