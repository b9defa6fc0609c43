//! A control plane without a node, for one test, and the operator as a process of this machine.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;

use modelrelay_cluster::{Cluster, Command, RELEASE, SYSTEM_NAMESPACE};
use modelrelay_harness::process::{Process, Spawn};
use serde_json::json;
use tempfile::TempDir;

use crate::operator::replicas::OPERATOR;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/cluster");
const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/modelrelay");
/// The number of consecutive ports that `scripts/cluster/up` uses.
const PORTS: u16 = 5;

/// A running control plane with the chart's definitions and rights. Dropping it stops it.
pub(crate) struct ControlPlane {
    pub(crate) cluster: Cluster,
    dir: TempDir,
}

impl ControlPlane {
    /// Starts etcd, API server, controllers and scheduler on free ports of the loopback address, and installs the
    /// chart. Without a node, its operator never starts.
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder can be made");
        let plane = dir.path().join("cluster");
        let up = Command::new(format!("{SCRIPTS}/up")).arg("control").env("MODELRELAY_CLUSTER_DIR", &plane);
        up.env("MODELRELAY_CLUSTER_PORT", free_ports().to_string()).await;
        let cluster = Cluster::connect_to(plane).await;
        let install =
            format!("install {RELEASE} --namespace {SYSTEM_NAMESPACE} --create-namespace --set webhook.enabled=false");
        cluster.helm(4, &install).arg(CHART).await;
        Self { cluster, dir }
    }

    /// Starts the operator with the rights of the chart's ServiceAccount.
    pub(crate) async fn operator(&self) -> Process {
        let system = format!("--namespace {SYSTEM_NAMESPACE}");
        let token = self.cluster.kubectl(&format!("{system} create token {OPERATOR} --duration 1h")).await;
        let server = self.cluster.kubectl("config view --minify --output jsonpath={.clusters[0].cluster.server}").await;
        let authority = self.path().join("pki/ca.crt");
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": authority}}],
            "users": [{"name": "test", "user": {"token": token.trim()}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        });
        let map = format!("{system} get configmap {OPERATOR}-defaults --output jsonpath={{.data.defaults\\.yaml}}");
        let defaults = self.cluster.kubectl(&map).await;
        let (kubeconfig_file, defaults_file) =
            (self.dir.path().join("kubeconfig"), self.dir.path().join("defaults.yaml"));
        fs::write(&kubeconfig_file, kubeconfig.to_string()).expect("the folder is writable");
        fs::write(&defaults_file, defaults).expect("the folder is writable");
        Spawn::program("modelrelay-operator")
            .env("KUBECONFIG", kubeconfig_file.to_string_lossy())
            .env("OPERATOR_DEFAULTS", defaults_file.to_string_lossy())
            .env("POD_NAMESPACE", SYSTEM_NAMESPACE)
            .env("POD_NAME", "operator-of-test")
            .env("LEASE_NAME", OPERATOR)
            .env("LISTEN_ADDR", "127.0.0.1:0")
            .start()
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("cluster")
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let down = std::process::Command::new(format!("{SCRIPTS}/down"))
            .arg("--quiet")
            .env("MODELRELAY_CLUSTER_DIR", self.path())
            .status();
        if !down.is_ok_and(|status| status.success()) {
            eprintln!("failed to stop the control plane in {}", self.path().display());
        }
    }
}

/// Returns the first of [`PORTS`] consecutive ports that are free now.
fn free_ports() -> u16 {
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let start = 20_000 + u16::try_from(std::process::id() % 1_000).expect("small") * 10;
    let found =
        (start..31_000).step_by(usize::from(PORTS)).find(|first| (*first..first + PORTS).all(|port| free(&port)));
    found.expect("five consecutive ports are free")
}
