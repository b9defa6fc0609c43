//! A pool's ConfigMap: the `worker.yaml` that its workers mount and reload when it changes.
//!
//! A worker rejects unknown keys, and a pool's workers may be older than the operator, because a new operator restarts
//! none of them. A key that was added after the first release may therefore be written only if the pool uses its
//! feature. The order of the keys has no meaning.
//!
//! Settings of a single Pod are in the Pod instead: the backend's address, mounted files, the port of its probes. A
//! change of those creates new Pods, and running ones continue unchanged.

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Serialize;

use super::{Manifest, sidecar};
use crate::crd::worker_pool::Mode;
use crate::crd::{LogFormat, Multiplexer, WorkerPool};
use crate::resources::names::{self, Component};
use crate::settings::defaults::WorkerDefaults;
use crate::spec::worker_pool::max_concurrency;

/// The key of the ConfigMap, and the name of the file.
const FILE: &str = "worker.yaml";
/// The key of the relays' authority in the ConfigMap, and the name of its file: both files reach a Pod in one step.
const AUTHORITY: &str = "ca.crt";
const AUTHORITY_FILE: &str = "/etc/modelrelay/config/ca.crt";
const TLS_SCHEME: &str = "dns+https";

/// The transport between workers and their relays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RelayTransport {
    /// Plain HTTP.
    #[default]
    Plain,
    /// TLS.
    Tls {
        /// The additional authority to trust, in PEM, besides the system's roots.
        authority: Option<String>,
    },
}

impl RelayTransport {
    /// Returns the transport of an existing ConfigMap.
    pub fn of(config_map: &ConfigMap) -> Self {
        let entry = |key| config_map.data.as_ref().and_then(|data| data.get(key));
        let speaks_tls = |yaml: &String| yaml.lines().any(|line| line.starts_with(&format!("relay: {TLS_SCHEME}://")));
        match entry(FILE).is_some_and(speaks_tls) {
            true => Self::Tls { authority: entry(AUTHORITY).cloned() },
            false => Self::Plain,
        }
    }

    fn scheme(&self) -> &'static str {
        match self {
            Self::Plain => "dns+http",
            Self::Tls { .. } => TLS_SCHEME,
        }
    }

    fn authority(&self) -> Option<&String> {
        match self {
            Self::Plain => None,
            Self::Tls { authority } => authority.as_ref(),
        }
    }
}

/// The relays of a pool's workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayTarget {
    /// Host and port that workers dial.
    pub address: String,
    /// The name of the pool's Provider there.
    pub provider: String,
    /// The transport.
    pub transport: RelayTransport,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WorkerYaml<'a> {
    relay: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    relay_ca_file: Option<&'static str>,
    provider: &'a str,
    worker_secret_file: &'static str,
    pool: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend: Option<BackendYaml>,
    #[serde(skip_serializing_if = "Option::is_none")]
    models: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_concurrency: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    multiplexer: Option<&'a Multiplexer>,
    shutdown_timeout: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_level: Option<&'a str>,
    log_format: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BackendYaml {
    url: String,
    engine: &'static str,
}

/// Returns the ConfigMap `<pool>-worker`.
pub fn config_map(pool: &WorkerPool, defaults: &WorkerDefaults, relay: &RelayTarget) -> Manifest {
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    let yaml = (FILE.to_owned(), worker_yaml(pool, defaults, relay));
    let authority = relay.transport.authority().map(|authority| (AUTHORITY.to_owned(), authority.clone()));
    Manifest::of(&ConfigMap {
        metadata: ObjectMeta {
            name: Some(names::worker(name)),
            namespace: pool.metadata.namespace.clone(),
            labels: Some(names::pool_labels(Component::Worker, name)),
            owner_references: pool.controller_owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        data: Some([yaml].into_iter().chain(authority).collect()),
        ..ConfigMap::default()
    })
}

fn worker_yaml(pool: &WorkerPool, defaults: &WorkerDefaults, relay: &RelayTarget) -> String {
    let spec = &pool.spec;
    let sidecar = &spec.sidecar;
    // Each slot defines its own backends and models; a worker rejects the top-level fields alongside slots.
    let slots = spec.slots();
    let log_format = sidecar.log_format.or(defaults.log_format).unwrap_or(LogFormat::Json);
    let file = WorkerYaml {
        relay: format!("{}://{}", relay.transport.scheme(), relay.address),
        relay_ca_file: relay.transport.authority().map(|_| AUTHORITY_FILE),
        provider: &relay.provider,
        worker_secret_file: sidecar::SECRET_FILE,
        pool: pool.metadata.name.as_deref().unwrap_or_default(),
        backend: backend(pool),
        models: slots.is_none().then_some(&spec.models),
        max_concurrency: slots.is_none().then(|| max_concurrency(pool)),
        multiplexer: slots,
        shutdown_timeout: &spec.shutdown_timeout.0,
        log_level: sidecar.log_level.as_deref().or(defaults.log_level.as_deref()),
        log_format: log_format.as_str(),
    };
    serde_yaml::to_string(&file).unwrap_or_default()
}

/// Returns the backend of a standalone worker, which can move to another address without a new Pod.
fn backend(pool: &WorkerPool) -> Option<BackendYaml> {
    let spec = &pool.spec;
    (spec.mode() == Mode::Standalone && spec.slots().is_none())
        .then(|| BackendYaml { url: sidecar::backend_url(spec), engine: sidecar::backend_engine(spec).as_str() })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use modelrelay_worker::settings::{Args, Settings};
    use serde_json::json;

    use super::*;
    use crate::manifests::{snapshot, testing};

    #[test]
    fn omitted_pool_fields_get_defaults() {
        let pool = testing::pool(&json!({"provider": "local"}));
        snapshot::check(
            "worker-config-inject",
            &config_map(&pool, &testing::defaults(), &testing::relay(RelayTransport::Plain)).to_yaml(),
        );
    }

    #[test]
    fn standalone_worker_has_remote_backend() {
        let pool = testing::pool(&json!({
            "provider": "local", "standalone": {"replicas": 2}, "models": ["llama3", "qwen"], "maxConcurrency": 4,
            "shutdownTimeout": "1h30m",
            "backend": {
                "engine": "sglang", "url": "https://gpu.example:8443/", "basePath": "/tenant/a/",
                "apiKeySecretRef": {"name": "engine", "key": "token"},
            },
            "sidecar": {"port": 18000, "logLevel": "debug", "logFormat": "text"},
        }));
        snapshot::check(
            "worker-config-standalone",
            &config_map(&pool, &testing::defaults(), &testing::relay(RelayTransport::Plain)).to_yaml(),
        );
    }

    #[test]
    fn slots_replace_backend_models_and_concurrency() {
        let pool = testing::pool(&json!({
            "provider": "local", "standalone": {},
            "multiplexer": {
                "drainTimeout": "0s", "rollback": false,
                "slots": [
                    {"id": "gpu0", "driver": "kubernetes", "default": "qwen", "memory": "24Gi", "models": [
                        {"id": "qwen", "aliases": ["qwen3"], "deployment": "qwen", "url": "http://qwen:8000", "maxConcurrency": 8},
                        {"id": "llama", "deployment": "llama", "memory": 9_663_676_416_u64},
                    ]},
                    {"id": "cpu", "driver": "ollama", "url": "http://ollama:11434", "models": [{"id": "gemma:2b", "pin": true}]},
                ],
            },
        }));
        snapshot::check(
            "worker-config-multiplexer",
            &config_map(&pool, &testing::defaults(), &testing::relay(RelayTransport::Plain)).to_yaml(),
        );
        assert_eq!(max_concurrency(&pool), 8 + 1);
    }

    #[test]
    fn relays_with_certificate_are_dialled_over_tls() {
        let pool = testing::pool(&json!({"provider": "local"}));
        let authority = Some("-----BEGIN CERTIFICATE-----\n".to_owned());
        let transport = RelayTransport::Tls { authority: authority.clone() };
        snapshot::check(
            "worker-config-tls",
            &config_map(&pool, &testing::defaults(), &testing::relay(transport.clone())).to_yaml(),
        );
        for transport in [transport, RelayTransport::Tls { authority: None }, RelayTransport::Plain] {
            let manifest = config_map(&pool, &testing::defaults(), &testing::relay(transport.clone()));
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(manifest.value["data"][FILE].as_str().unwrap().as_bytes()).unwrap();
            let args = Args { config: Some(file.path().to_owned()), ..Args::default() };
            let relay = Settings::load(&args).expect("the worker's own parser takes it").live.relay;
            assert!(relay.every_address && relay.tls == (transport != RelayTransport::Plain));
            assert_eq!(RelayTransport::of(&serde_json::from_value(manifest.value).unwrap()), transport);
        }
    }

    #[test]
    fn chart_values_apply_when_pool_omits_them() {
        let defaults =
            WorkerDefaults { log_level: Some("warn".into()), log_format: Some(LogFormat::Text), ..testing::defaults() };
        let yaml = worker_yaml(
            &testing::pool(&json!({"provider": "local"})),
            &defaults,
            &testing::relay(RelayTransport::Plain),
        );
        assert!(yaml.contains("logLevel: warn\nlogFormat: text\n"), "{yaml}");
    }
}
