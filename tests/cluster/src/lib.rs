//! Tests on a real cluster, and their common parts.
//!
//! `tests/cluster/run` starts the cluster, loads the images, installs the chart once and runs the tests; a single test
//! only connects. To write and repeat one manually:
//!
//! ```text
//! scripts/images && scripts/cluster/up && scripts/cluster/load target/images/*.tar
//! cargo nextest run -p modelrelay-cluster --test cluster by_hand
//! scripts/cluster/down
//! ```
//!
//! A test creates its own [`Namespace`], applies manifests as text, waits for the expected state with a deadline, and
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
//! - None of ModelRelay's own crates is linked, and every wait has a deadline that names what it waited for.
//! - Tests run in parallel, each in its namespace, so they change no cluster-wide object. A test that must (an upgrade
//!   of the chart, for example) gets the whole cluster in `.config/nextest.toml`.
//! - Commands run as tokio processes: a blocked thread would stall the clients of the same test.

pub mod audit;
pub mod command;
pub mod http;
pub mod manifests;
pub mod namespace;
pub mod process;
pub mod second;
pub mod tls;
pub mod traffic;

use std::{env, path::PathBuf, time::Duration};

use kube::{Api, Client, Config, api::ListParams, config::KubeConfigOptions, config::Kubeconfig};

use modelrelay_harness::poll_every;

pub use command::{Command, Output};
pub use namespace::Namespace;
pub use second::SecondNode;

/// The default deadline of a wait, on a busy machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(90);

/// The pause between two polls of a state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The name of the release as which `tests/cluster/run` installs the chart, with the images
/// `localhost/modelrelay-*:dev`.
pub const RELEASE: &str = "modelrelay";

/// Namespace of that release.
pub const SYSTEM_NAMESPACE: &str = "mr-system";

/// The running cluster.
#[derive(Clone)]
pub struct Cluster {
    /// A client of its API server, as an administrator.
    pub client: Client,
    dir: PathBuf,
}

impl Cluster {
    /// Connects to the cluster that `scripts/cluster/up` started, in `MODELRELAY_CLUSTER_DIR` or at its default.
    ///
    /// # Panics
    /// If there is no cluster.
    pub async fn connect() -> Self {
        Self::connect_to(cluster_dir()).await
    }

    /// Connects to the cluster whose state is in this folder.
    ///
    /// # Panics
    /// If there is no cluster.
    pub async fn connect_to(dir: PathBuf) -> Self {
        // The first test installs it; the others find it installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let path = dir.join("admin.kubeconfig");
        let hint = "start one with scripts/cluster/up, or run all of this by tests/cluster/run";
        assert!(path.exists(), "no cluster: {} does not exist; {hint}", path.display());
        let kubeconfig = Kubeconfig::read_from(&path).expect("the kubeconfig is valid");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("the kubeconfig is whole")).expect("a client needs no network");
        if let Err(error) = client.apiserver_version().await {
            panic!("the cluster of {} does not respond ({error}); {hint}", dir.display());
        }
        Self { client, dir }
    }

    /// Creates a namespace whose name begins with `prefix`; it enforces the Pod security standard `restricted`.
    pub async fn namespace(&self, prefix: &str) -> Namespace {
        Namespace::create(self, prefix, "restricted").await
    }

    /// As [`Self::namespace`], under another Pod security standard.
    pub async fn namespace_with(&self, prefix: &str, pod_security: &str) -> Namespace {
        Namespace::create(self, prefix, pod_security).await
    }

    /// Waits until the namespaces of earlier tests are deleted, because that causes work for the operator too.
    pub async fn nothing_is_leaving(&self) {
        let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(self.client.clone());
        let leaving = ListParams::default().fields("status.phase=Terminating");
        // Longer than usual: many namespaces at once, on a busy machine.
        wait_until("the namespaces of earlier tests to be gone", TEST_TIMEOUT * 3, async || {
            namespaces.list(&leaving).await.is_ok_and(|list| list.items.is_empty())
        })
        .await;
    }

    /// Returns a `kubectl` command with these arguments, split at white space.
    pub fn kubectl(&self, arguments: &str) -> Command {
        self.program("kubectl").args(arguments.split_whitespace())
    }

    /// Returns a command of Helm 3 or 4 with these arguments, split at white space.
    pub fn helm(&self, major: u8, arguments: &str) -> Command {
        let home = self.dir.join(format!("helm{major}"));
        let command = self.program(&format!("helm{major}")).args(arguments.split_whitespace());
        let folders = [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")];
        folders.into_iter().fold(command, |command, (name, folder)| command.env(name, home.join(folder)))
    }

    /// Runs `kubectl`, `helm3` or `helm4` without a runtime, for clean-up that must happen even in a panic.
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

    /// Kills `apiserver`, `controllers`, `scheduler`, `etcd`, `kubelet`, `proxy` or `containerd`, starts it again
    /// `down_for` later, and returns once the API server responds. Every other test is affected, so it is for tests
    /// that run alone.
    pub async fn restart(&self, process: &str, down_for: Duration) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/cluster/restart");
        let seconds = down_for.as_secs_f32().to_string();
        Command::new(script).env("MODELRELAY_CLUSTER_DIR", &self.dir).args([process, &seconds]).await;
    }

    /// Gives an image of the node a second name, like another tag in a registry.
    pub async fn tag_image(&self, image: &str, other: &str) {
        let socket = self.dir.join("containerd/containerd.sock");
        let command = Command::new("ctr").arg("--address").arg(socket);
        command.args(["--namespace", "k8s.io", "images", "tag", "--force", image, other]).await;
    }

    /// Returns a command for a program in the cluster's own folder, with its kubeconfig.
    fn program(&self, name: &str) -> Command {
        Command::new(self.dir.join("bin").join(name)).env("KUBECONFIG", self.dir.join("admin.kubeconfig"))
    }
}

/// Polls until `condition` holds; panics with `what` when the deadline passes. For states that cannot be watched.
pub async fn wait_until(what: &str, deadline: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let held = poll_for(deadline, async || condition().await.then_some(())).await;
    held.unwrap_or_else(|| panic!("timed out after {deadline:?} waiting for: {what}"));
}

/// Polls until `find` returns a value; returns `None` if the deadline passes first.
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
