//! The release that `tests/cluster/run` installed: uninstalled for a test, and installed again.

use modelrelay_cluster::{Cluster, RELEASE, SYSTEM_NAMESPACE};
use tempfile::TempDir;

use super::release::CHART;

/// Fallback values, if the release is missing: those of `tests/cluster/run`.
const VALUES: &str = r#"{"image": {"registry": "localhost", "tag": "dev", "pullPolicy": "Never"}}"#;

/// Keeps the shared release uninstalled until this is dropped.
pub(crate) struct Away {
    cluster: Cluster,
    values: TempDir,
}

impl Away {
    /// Uninstalls it once it is idle: its rights are removed before its Pods, and a denied request would be mistaken
    /// for a missing right.
    pub(crate) async fn take(cluster: &Cluster) -> Self {
        cluster.nothing_is_leaving().await;
        let values = tempfile::tempdir().expect("a temporary folder");
        let get = cluster.helm(4, &format!("get values {RELEASE} --namespace {SYSTEM_NAMESPACE} --output json"));
        let shown = get.output().await;
        let text = if shown.success { shown.stdout.as_str() } else { VALUES };
        std::fs::write(values.path().join("values.json"), text).expect("the file can be written");
        let away = Self { cluster: cluster.clone(), values };
        if shown.success {
            cluster.helm(4, &format!("uninstall {RELEASE} --namespace {SYSTEM_NAMESPACE} --wait")).await;
        }
        away
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        let values = self.values.path().join("values.json");
        let install = format!(
            "upgrade --install {RELEASE} {CHART} --namespace {SYSTEM_NAMESPACE} --create-namespace --values {} --wait \
             --timeout 3m",
            values.display()
        );
        let installed = self.cluster.blocking("helm4", &install);
        if !installed.success {
            eprintln!("the shared release cannot be put back:\n{}", installed.output_text());
            assert!(std::thread::panicking(), "the shared release cannot be put back");
        }
    }
}
