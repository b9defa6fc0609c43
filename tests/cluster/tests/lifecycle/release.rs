//! A release of the chart, and its objects in the cluster.

use modelrelay_cluster::{Cluster, Command, Namespace, TEST_TIMEOUT, poll_for};
use serde_json::Value;

/// The chart.
pub(crate) const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/modelrelay");

/// Images that are on the node.
const IMAGES: &str = "--set image.registry=localhost --set image.pullPolicy=Never";

/// A release in its own namespace. Dropping it in a panic uninstalls it.
pub(crate) struct Release {
    pub(crate) namespace: Namespace,
    pub(crate) name: &'static str,
    helm: u8,
}

impl Release {
    /// Creates only the namespace.
    pub(crate) async fn prepare(cluster: &Cluster, helm: u8, name: &'static str) -> Self {
        Self { namespace: cluster.namespace(name).await, name, helm }
    }

    /// Runs `helm install` with images of this tag and these values, and waits for the installed objects.
    pub(crate) async fn install(&self, tag: &str, values: &str) -> String {
        self.helm(&format!("install {} {CHART} {IMAGES} --set image.tag={tag} {values} --wait --timeout 3m", self.name))
            .await
    }

    /// Runs `helm upgrade` likewise.
    pub(crate) async fn upgrade(&self, tag: &str, values: &str) {
        self.upgrade_command(tag, values).await;
    }

    /// Returns the command of [`Self::upgrade`].
    pub(crate) fn upgrade_command(&self, tag: &str, values: &str) -> Command {
        self.helm(&format!("upgrade {} {CHART} {IMAGES} --set image.tag={tag} {values} --wait --timeout 3m", self.name))
    }

    /// Runs `helm rollback` to a revision.
    pub(crate) async fn rollback(&self, revision: u32) {
        self.helm(&format!("rollback {} {revision} --wait --timeout 3m", self.name)).await;
    }

    /// Runs `helm test`.
    pub(crate) async fn test(&self) -> String {
        self.helm(&format!("test {} --timeout 2m", self.name)).await
    }

    /// Runs `helm uninstall`, and waits until only `kept` is left.
    pub(crate) async fn uninstall(&self, kept: &[&str]) {
        self.helm(&format!("uninstall {} --wait", self.name)).await;
        let mut left = Vec::new();
        let gone = async || {
            left = self.objects().await;
            (left == kept).then_some(())
        };
        let gone = poll_for(TEST_TIMEOUT, gone).await;
        assert!(gone.is_some(), "the release {} leaves behind: {left:#?}", self.name);
    }

    /// Returns the name that chart and operator give to the operator's objects.
    pub(crate) fn operator(&self) -> String {
        format!("{}-modelrelay-operator", self.name)
    }

    /// Returns all objects of the release as `Kind/name`: those in its namespace that are not Kubernetes' own, and
    /// those elsewhere that carry its name or ownership.
    pub(crate) async fn objects(&self) -> Vec<String> {
        let cluster = &self.namespace.cluster;
        let kinds = cluster.kubectl("api-resources --verbs list,delete --output name").await;
        let kinds: Vec<&str> = kinds.lines().filter(|kind| !kind.starts_with("events")).collect();
        let listed = cluster.kubectl(&format!("get {} --all-namespaces --output json", kinds.join(","))).await;
        let listed: Value = serde_json::from_str(&listed).expect("kubectl writes JSON");
        let objects = listed["items"].as_array().expect("a list has items");
        let mut names: Vec<String> = objects.iter().filter(|object| self.owns(object)).map(identity).collect();
        names.sort();
        // `endpoints` lists them twice: from the old and from the new API.
        names.dedup();
        names
    }

    fn owns(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let name = metadata["name"].as_str().unwrap_or_default();
        if metadata["namespace"] == self.namespace.name.as_str() {
            return !matches!(
                (object["kind"].as_str(), name),
                (Some("ConfigMap"), "kube-root-ca.crt") | (Some("ServiceAccount"), "default")
            );
        }
        let belongs = metadata["annotations"]["meta.helm.sh/release-namespace"] == self.namespace.name.as_str();
        let labelled = metadata["labels"]["app.kubernetes.io/instance"] == self.name;
        let kept = metadata["annotations"]["helm.sh/resource-policy"] == "keep";
        (belongs || labelled || name.contains(&format!("{}-modelrelay", self.name))) && !kept
    }

    fn helm(&self, arguments: &str) -> Command {
        self.namespace.cluster.helm(self.helm, &format!("--namespace {} {arguments}", self.namespace.name))
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Cluster-wide objects are not deleted with the namespace, and the webhook would reject Pods of later
            // tests.
            let helm = format!("helm{}", self.helm);
            let arguments = format!("uninstall {} --namespace {} --ignore-not-found", self.name, self.namespace.name);
            eprintln!("{}", self.namespace.cluster.blocking(&helm, &arguments).output_text());
        }
    }
}

fn identity(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text(&object["kind"]), text(&object["metadata"]["name"]))
}
