//! Every setting of the operator, as a flag and as an environment variable; flags take precedence. The chart sets all
//! of them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use modelrelay_manual::{CompletionsArgs, ManArgs};
use modelrelay_protocol::units;

use crate::crd::LogFormat;

/// Kubernetes operator that runs relays and workers for Provider and WorkerPool resources.
#[derive(Debug, Parser)]
#[command(name = "modelrelay-operator", version, max_term_width = 110, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Command to run instead of the operator.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Settings of the running operator.
    #[command(flatten)]
    pub run: RunArgs,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the custom resource definitions, or write them to files.
    Crds {
        /// Write providers.yaml and workerpools.yaml to this directory.
        #[arg(long, value_name = "DIR")]
        write: Option<PathBuf>,
        /// Print the reference of both kinds as Markdown.
        #[arg(long, conflicts_with = "write")]
        reference: bool,
    },
    /// Generate shell completions.
    Completions(CompletionsArgs),
    /// Print the manual page.
    Man(ManArgs),
    /// Apply the resources of a file (server-side apply), as the chart's demo does.
    Apply(FileArgs),
    /// Delete the resources of a file and wait until they are gone.
    Delete(FileArgs),
    /// Send a GET request, and fail unless the response is 2xx, as the chart's test does.
    Get {
        /// URL, such as http://local.llm.svc/readyz.
        #[expect(rustdoc::bare_urls, reason = "`--help` shows it")]
        url: String,
        /// Maximum time to retry.
        #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
        timeout: Duration,
    },
}

/// A file of resources, and the time limit.
#[derive(Debug, Args)]
pub struct FileArgs {
    /// YAML with one or more resources.
    #[arg(long, value_name = "FILE")]
    pub file: PathBuf,
    /// Maximum time to retry, as a kind may have been defined only recently.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration)]
    pub timeout: Duration,
    /// Wait until every resource that has a Ready condition is ready.
    #[arg(long)]
    pub wait: bool,
}

/// Settings of the running operator.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Images and other defaults for Providers and WorkerPools (YAML).
    #[arg(
        long,
        env = "OPERATOR_DEFAULTS",
        value_name = "FILE",
        default_value = "/etc/modelrelay-operator/defaults.yaml"
    )]
    pub defaults: PathBuf,

    /// Namespaces to watch, separated by commas. [default: all]
    #[arg(
        long,
        env = "WATCH_NAMESPACES",
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "",
        hide_default_value = true
    )]
    pub watch_namespaces: Vec<String>,

    /// Namespace of the operator.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME", default_value = "default")]
    pub namespace: String,

    /// Set if the operator's Pod uses the host network, in which case the relays' NetworkPolicies cannot match it.
    #[arg(long, env = "HOST_NETWORK", value_name = "BOOL", num_args = 0..=1, default_value = "false", default_missing_value = "true", action = clap::ArgAction::Set)]
    pub host_network: bool,

    /// Name of this replica, in the lease and in Events. [default: the host name]
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value = "", hide_default_value = true)]
    pub pod_name: String,

    /// Address of /metrics, /livez and /readyz. `[::]` includes IPv4.
    #[arg(long, env = "LISTEN_ADDR", value_name = "ADDR", default_value = "[::]:8080")]
    pub listen_addr: SocketAddr,

    /// Address of the webhook, which uses TLS. `[::]` includes IPv4.
    #[arg(long, env = "WEBHOOK_LISTEN_ADDR", value_name = "ADDR", default_value = "[::]:9443")]
    pub webhook_listen_addr: SocketAddr,

    /// MutatingWebhookConfiguration whose caBundle the operator manages. [default: none; the webhook is disabled]
    #[arg(long, env = "WEBHOOK_CONFIGURATION", value_name = "NAME", default_value = "", hide_default_value = true)]
    pub webhook_configuration: String,

    /// Service through which the API server reaches the webhook.
    #[arg(long, env = "WEBHOOK_SERVICE", value_name = "NAME", default_value = "modelrelay-webhook")]
    pub webhook_service: String,

    /// Secret in the operator's namespace with the webhook's certificate.
    #[arg(long, env = "CERTIFICATE_SECRET", value_name = "NAME", default_value = "modelrelay-webhook-certificate")]
    pub certificate_secret: String,

    /// Set if the Secret and the caBundle are managed externally, for example by cert-manager.
    #[arg(long, env = "EXTERNAL_CERTIFICATES", value_name = "BOOL", num_args = 0..=1, default_value = "false", default_missing_value = "true", action = clap::ArgAction::Set)]
    pub external_certificates: bool,

    /// Lifetime of the webhook's certificates; they are renewed after two thirds of it.
    #[arg(long, env = "CERTIFICATE_LIFETIME", value_name = "DURATION", default_value = "2160h", value_parser = duration)]
    pub certificate_lifetime: Duration,

    /// Lease for leader election among the replicas.
    #[arg(long, env = "LEASE_NAME", value_name = "NAME", default_value = "modelrelay-operator")]
    pub lease_name: String,

    /// Time that the webhook keeps serving after SIGTERM, until the cluster stops sending requests.
    #[arg(long, env = "SHUTDOWN_GRACE", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub shutdown_grace: Duration,

    /// Log level: error, warn, info, debug, trace, or directives such as info,kube=debug.
    #[arg(long, env = "LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    pub log_level: String,

    /// Log format: text or JSON.
    #[arg(long, env = "LOG_FORMAT", value_name = "FORMAT", default_value = "json", value_parser = log_format)]
    pub log_format: LogFormat,
}

impl RunArgs {
    /// Returns the namespaces; an empty variable yields none.
    pub fn namespaces(&self) -> Vec<String> {
        let named = self.watch_namespaces.iter().map(|name| name.trim()).filter(|name| !name.is_empty());
        named.map(str::to_owned).collect()
    }

    /// Returns the name of this replica: that of its Pod, or the host name and process id.
    pub fn instance(&self) -> String {
        if !self.pod_name.is_empty() {
            return self.pod_name.clone();
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        format!("{}-{}", host.trim(), std::process::id())
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    units::parse_duration(text).map_err(|error| error.to_string())
}

fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("must be text or json".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn missing_namespaces_select_whole_cluster() {
        let cli = Cli::try_parse_from(["modelrelay-operator"]).unwrap();
        assert!(cli.run.namespaces().is_empty());
    }

    #[test]
    fn namespaces_are_parsed_as_list() {
        let cli = Cli::try_parse_from(["modelrelay-operator", "--watch-namespaces", "a, b,"]).unwrap();
        assert_eq!(cli.run.namespaces(), ["a", "b"]);
    }

    #[test]
    fn duration_without_unit_is_rejected() {
        let error = Cli::try_parse_from(["modelrelay-operator", "--shutdown-grace", "5"]).unwrap_err();
        assert!(error.to_string().contains("such as 500ms, 30s or 1h30m"), "{error}");
    }
}
