//! Installation without Helm: `kubectl apply -k`.

use modelrelay_cluster::Cluster;
use modelrelay_cluster::manifests::{provider, worker_pool};
use serde_json::{Value, json};

use super::certificates;
use super::shared::Away;

const LOCAL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kustomize/local");
const NAMESPACE: &str = "modelrelay-system";

#[tokio::test]
async fn kustomize_installs_working_operator() {
    let cluster = Cluster::connect().await;
    let _away = Away::take(&cluster).await;
    let installed = Installed::apply(&cluster).await;
    let rollout = format!("--namespace {NAMESPACE} rollout status deployment/modelrelay-operator --timeout 90s");
    cluster.kubectl(&rollout).await;

    let namespace = cluster.namespace("kustomize").await;
    namespace.apply(&[provider("local", &json!({})), worker_pool("llama", &json!({"provider": "local"}))]).await;
    let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
    namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
    certificates::wait_for_injection(&namespace).await;
    installed.delete().await;
}

/// The applied objects without the definitions, whose deletion would delete every Provider of the cluster.
struct Installed<'a> {
    cluster: &'a Cluster,
    objects: String,
    deleted: bool,
}

impl<'a> Installed<'a> {
    async fn apply(cluster: &'a Cluster) -> Self {
        let text = cluster.kubectl("kustomize").arg(LOCAL).await;
        let documents = serde_yaml::Deserializer::from_str(&text);
        let documents =
            documents.map(|document| serde::Deserialize::deserialize(document).expect("kubectl writes YAML"));
        let objects = documents.filter(|object: &Value| object["kind"] != "CustomResourceDefinition");
        let objects = objects.map(|object| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let metadata = &object["metadata"];
            [text(&object["kind"]), text(&metadata["name"]), text(&metadata["namespace"])]
        });
        // Objects in the namespace are deleted with it.
        let wide = objects.filter(|[kind, _, namespace]| namespace.is_empty() && kind != "Namespace");
        let wide: Vec<String> = wide.map(|[kind, name, _]| format!("{kind}/{name}")).collect();
        assert!(wide.iter().any(|name| name.starts_with("MutatingWebhookConfiguration/")), "{wide:?}");
        let installed = Self { cluster, objects: format!("{} namespace/{NAMESPACE}", wide.join(" ")), deleted: false };
        cluster.kubectl("apply --server-side --kustomize").arg(LOCAL).await;
        installed
    }

    async fn delete(mut self) {
        self.deleted = true;
        self.cluster.kubectl(&format!("delete --timeout 90s {}", self.objects)).await;
    }
}

impl Drop for Installed<'_> {
    fn drop(&mut self) {
        if !self.deleted {
            let delete = format!("delete --ignore-not-found --timeout 90s {}", self.objects);
            eprintln!("{}", self.cluster.blocking("kubectl", &delete).output_text());
        }
    }
}
