//! The release that `tests/cluster/run` installed: taken away for a test, and put back.

use modelrelay_cluster::{Cluster, RELEASE, SYSTEM_NAMESPACE};
use tempfile::TempDir;

use super::release::CHART;

/// Values of a release that somebody has lost: those of `tests/cluster/run`.
const VALUES: &str = r#"{"image": {"registry": "localhost", "tag": "dev", "pullPolicy": "Never"}}"#;

/// The shared release is away until this is dropped.
pub(crate) struct Away {
    cluster: Cluster,
    values: TempDir,
}

impl Away {
    /// Uninstalls it, once it has nothing to do: its rights go before its Pods, and what it may not do any more would be
    /// taken for a right that it lacks.
    pub(crate) async fn take(cluster: &Cluster) -> Self {
        cluster.nothing_is_leaving().await;
        let values = tempfile::tempdir().expect("a temporary folder");
        let get = cluster.helm(4, &format!("get values {RELEASE} --namespace {SYSTEM_NAMESPACE} --output json"));
        let shown = get.output().await;
        let text = if shown.success { shown.stdout.as_str() } else { VALUES };
        std::fs::write(values.path().join("values.json"), text).expect("the folder takes a file");
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
            eprintln!("the shared release cannot be put back:\n{}", installed.said());
            assert!(std::thread::panicking(), "the shared release cannot be put back");
        }
    }
}
