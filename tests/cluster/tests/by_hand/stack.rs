//! Applies `stack.yaml`.

use std::net::SocketAddr;

use modelrelay_cluster::traffic::Traffic;
use modelrelay_cluster::{Cluster, Namespace, TEST_TIMEOUT, wait_until};

/// A manually deployed provider in its own namespace, with every worker connected to every relay.
pub(crate) struct Stack {
    pub(crate) namespace: Namespace,
    pub(crate) service: SocketAddr,
}

impl Stack {
    pub(crate) async fn start(name: &str, relays: usize, workers: usize) -> Self {
        let cluster = Cluster::connect().await;
        let namespace = cluster.namespace(name).await;
        let yaml = include_str!("stack.yaml");
        let yaml = yaml.replace("RELAYS", &relays.to_string()).replace("WORKERS", &workers.to_string());
        namespace.apply_yaml(&yaml).await;
        namespace.rolled_out("deployment/relay").await;
        namespace.rolled_out("deployment/vllm").await;
        let service = namespace.service_address("relay").await;
        let stack = Self { namespace, service };
        stack.wait_for_workers(relays, workers).await;
        stack
    }

    /// Waits until this number of relays exists, each with this number of workers.
    pub(crate) async fn wait_for_workers(&self, relays: usize, workers: usize) {
        wait_until(&format!("{workers} workers at each of {relays} relays"), TEST_TIMEOUT, async || {
            let known = self.workers_of_relays().await;
            known.len() == relays && known.iter().all(|known| *known == workers)
        })
        .await;
    }

    /// Returns clients of the relays' Service.
    pub(crate) fn traffic(&self) -> Traffic {
        Traffic::to(self.service)
    }

    /// Returns the number of workers of each relay, read through the API server's proxy.
    async fn workers_of_relays(&self) -> Vec<usize> {
        let mut known = Vec::new();
        for pod in self.namespace.pod_names("app=relay").await {
            let path = format!("/api/v1/namespaces/{}/pods/{pod}:8080/proxy/health", self.namespace.name);
            let health = self.namespace.kubectl("get --raw").arg(path).output().await;
            let health: serde_json::Value = serde_json::from_str(&health.stdout).unwrap_or_default();
            known.extend(health["workers_connected"].as_u64().and_then(|number| usize::try_from(number).ok()));
        }
        known
    }
}
