//! Tests on a real cluster, and what they stand on.
//!
//! `tests/cluster/run` brings the cluster up, loads the images, installs the chart once and runs the tests; a test alone
//! only connects. To write and repeat one by hand:
//!
//! ```text
//! scripts/images && scripts/cluster/up && scripts/cluster/load target/images/*.tar
//! cargo nextest run -p modelrelay-cluster --test cluster by_hand
//! scripts/cluster/down
//! ```
//!
//! A test asks for a [`Namespace`] of its own, applies manifests as text, waits for what it expects with a deadline, and
//! keeps clients busy meanwhile:
//!
//! ```no_run
//! # use modelrelay_cluster::{Cluster, traffic::Traffic, manifests};
//! # use std::time::Duration;
//! # async fn test() {
//! let cluster = Cluster::connect().await;
//! let namespace = cluster.namespace("example").await;         // removed on drop; after a panic its state is printed
//! namespace.apply(&manifests::demo_backend("vllm", 2)).await;
//! namespace.rolled_out("deployment/vllm").await;
//! let service = namespace.service_address("vllm").await;      // the ClusterIP, which this machine reaches
//! let traffic = Traffic::to(service).streams(50).start();     // request after request, each checked word by word
//! traffic.wait_for_underway(50).await;
//! namespace.kubectl("delete pod --selector app=vllm").await;
//! traffic.finish().await.expect_all_answered();
//! # }
//! ```
//!
//! Rules:
//! - Nothing of our own programs is linked, and nothing waits without a deadline that names what it waited for.
//! - Tests run in parallel, each in its namespace, so they touch nothing that is the cluster's. A test that must (an upgrade of the
//!   chart, say) is in a binary that `.config/nextest.toml` gives the whole cluster.
//! - Commands run as tokio processes: a blocked thread would stall the clients of the same test.

pub mod audit;
pub mod command;
pub mod http;
pub mod manifests;
pub mod namespace;
pub mod process;
pub mod traffic;

use std::{env, path::PathBuf, time::Duration};

use kube::{Api, Client, Config, api::ListParams, config::KubeConfigOptions, config::Kubeconfig};

use modelrelay_harness::poll_every;

pub use command::{Command, Output};
pub use namespace::Namespace;

/// How long anything may take on a busy machine before a test fails.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The pause between two polls of a state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Name of the release that `tests/cluster/run` installs the chart as, with the images `localhost/modelrelay-*:dev`.
pub const RELEASE: &str = "modelrelay";

/// Namespace of that release.
pub const SYSTEM_NAMESPACE: &str = "mr-system";

/// The running cluster.
#[derive(Clone)]
pub struct Cluster {
    /// Speaks to its API server as an administrator.
    pub client: Client,
    dir: PathBuf,
}

impl Cluster {
    /// The cluster that `scripts/cluster/up` brought up, in `MODELRELAY_CLUSTER_DIR` or at its default.
    ///
    /// # Panics
    /// When there is none: these tests have nothing else to test.
    pub async fn connect() -> Self {
        // Whichever test comes first installs it; the others find it done.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let dir = cluster_dir();
        let path = dir.join("admin.kubeconfig");
        let hint = "start one with scripts/cluster/up, or run all of this by tests/cluster/run";
        assert!(path.exists(), "there is no cluster: {} does not exist; {hint}", path.display());
        let kubeconfig = Kubeconfig::read_from(&path).expect("the kubeconfig is one");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("the kubeconfig is whole")).expect("a client needs no network");
        if let Err(error) = client.apiserver_version().await {
            panic!("the cluster of {} does not answer ({error}); {hint}", dir.display());
        }
        Self { client, dir }
    }

    /// A new namespace whose name begins with `prefix`; it enforces the Pod security standard `restricted`.
    pub async fn namespace(&self, prefix: &str) -> Namespace {
        Namespace::create(self, prefix, "restricted").await
    }

    /// As [`Self::namespace`], under another Pod security standard.
    pub async fn namespace_with(&self, prefix: &str, pod_security: &str) -> Namespace {
        Namespace::create(self, prefix, pod_security).await
    }

    /// Waits until what earlier tests left behind is deleted: the operator has work with that too.
    pub async fn nothing_is_leaving(&self) {
        let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(self.client.clone());
        let leaving = ListParams::default().fields("status.phase=Terminating");
        // All of them at once, on a machine that does other things too.
        wait_until("the namespaces of earlier tests to be gone", PATIENCE * 3, async || {
            namespaces.list(&leaving).await.is_ok_and(|list| list.items.is_empty())
        })
        .await;
    }

    /// `kubectl` with these arguments, split at white space.
    pub fn kubectl(&self, arguments: &str) -> Command {
        self.program("kubectl").args(arguments.split_whitespace())
    }

    /// Helm of a major version (3 or 4) with these arguments, split at white space.
    pub fn helm(&self, major: u8, arguments: &str) -> Command {
        let home = self.dir.join(format!("helm{major}"));
        let command = self.program(&format!("helm{major}")).args(arguments.split_whitespace());
        let folders = [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")];
        folders.into_iter().fold(command, |command, (name, folder)| command.env(name, home.join(folder)))
    }

    /// Runs `kubectl`, `helm3` or `helm4` without a runtime, for what a test puts back even in a panic.
    #[must_use]
    pub fn blocking(&self, program: &str, arguments: &str) -> Output {
        let output = std::process::Command::new(self.dir.join("bin").join(program))
            .env("KUBECONFIG", self.dir.join("admin.kubeconfig"))
            .args(arguments.split_whitespace())
            .output();
        match output {
            Ok(output) => Output::from(output),
            Err(error) => Output { success: false, stdout: String::new(), stderr: format!("{program}: {error}\n") },
        }
    }

    /// Kills `apiserver`, `controllers`, `scheduler`, `etcd`, `kubelet`, `proxy` or `containerd`, and starts it again
    /// `down_for` later; comes back once the API server answers. For binaries of their own: every test feels it.
    pub async fn restart(&self, process: &str, down_for: Duration) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/cluster/restart");
        let seconds = down_for.as_secs_f32().to_string();
        Command::new(script).env("MODELRELAY_CLUSTER_DIR", &self.dir).args([process, &seconds]).await;
    }

    /// Gives an image of the node a second name, as a registry would have it under another tag.
    pub async fn tag_image(&self, image: &str, other: &str) {
        let socket = self.dir.join("containerd/containerd.sock");
        let command = Command::new("ctr").arg("--address").arg(socket);
        command.args(["--namespace", "k8s.io", "images", "tag", "--force", image, other]).await;
    }

    /// A program of the cluster's own folder, with its kubeconfig.
    fn program(&self, name: &str) -> Command {
        Command::new(self.dir.join("bin").join(name)).env("KUBECONFIG", self.dir.join("admin.kubeconfig"))
    }
}

/// Asks until `condition` holds; a deadline that passes is a panic that names `what`. For what cannot be watched.
pub async fn wait_until(what: &str, deadline: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let held = poll_for(deadline, async || condition().await.then_some(())).await;
    held.unwrap_or_else(|| panic!("waited {deadline:?} in vain for: {what}"));
}

/// Asks until `find` gives something, which is `None` when the deadline passes before.
pub async fn poll_for<T>(deadline: Duration, find: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    poll_every(POLL_INTERVAL, deadline, find).await
}

fn cluster_dir() -> PathBuf {
    let from = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    from("MODELRELAY_CLUSTER_DIR").unwrap_or_else(|| {
        let cache = from("XDG_CACHE_HOME").or_else(|| Some(from("HOME")?.join(".cache")));
        cache.expect("HOME is set").join("modelrelay/cluster/run")
    })
}
