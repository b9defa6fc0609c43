//! The second node of this machine, for one test: it has a taint, so no other test's Pod runs there.

use std::fs::File;

use serde_json::{Value, json};

use crate::{Cluster, Command};

/// Only one test at a time has the node.
const LOCK: &str = "/run/modelrelay-cluster-second.lock";

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/cluster/second");

/// The node. Dropping it removes it.
pub struct SecondNode {
    cluster: Cluster,
    _lock: File,
}

impl SecondNode {
    /// The name of the node.
    pub const NAME: &'static str = "modelrelay-2";

    /// The bridge to which all its Pods are connected.
    const BRIDGE: &'static str = "mr-pods-2";

    /// Starts containerd and kubelet, and waits until the node is ready. `labels` are those of the node, such as
    /// `topology.kubernetes.io/zone=east-1`.
    ///
    /// # Panics
    /// If the node cannot be started.
    pub async fn start(cluster: &Cluster, labels: &str) -> Self {
        let lock = tokio::task::spawn_blocking(|| {
            let lock = File::create(LOCK)?;
            if lock.try_lock().is_err() {
                eprintln!("waiting for another test to remove the second node");
                lock.lock()?;
            }
            Ok::<_, std::io::Error>(lock)
        });
        let lock = lock.await.expect("it does not panic").expect("a cluster needs root");
        // Before the command, so that a failed start is removed too.
        let node = Self { cluster: cluster.clone(), _lock: lock };
        Command::new(SCRIPT).env("MODELRELAY_CLUSTER_DIR", &cluster.dir).args(["up", labels]).await;
        node
    }

    /// Returns the toleration that a Pod needs to run there.
    #[must_use]
    pub fn toleration() -> Value {
        json!({"key": "modelrelay.io/second", "operator": "Exists", "effect": "NoSchedule"})
    }

    /// Disconnects its Pods from everything: no packet reaches them, and no connection is closed.
    pub async fn cut_off(&self) {
        Command::new("ip").args(["link", "set", Self::BRIDGE, "down"]).await;
    }

    /// Connects them again.
    pub async fn reconnect(&self) {
        Command::new("ip").args(["link", "set", Self::BRIDGE, "up"]).await;
    }
}

impl Drop for SecondNode {
    fn drop(&mut self) {
        let mut down = std::process::Command::new(SCRIPT);
        let down = down.arg("down").env("MODELRELAY_CLUSTER_DIR", &self.cluster.dir).status();
        if !down.is_ok_and(|status| status.success()) {
            eprintln!("failed to remove the second node");
        }
    }
}
