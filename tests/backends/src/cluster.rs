//! A fake Kubernetes API server with the parts that a worker uses: the scale of Deployments, and a list and a watch of
//! Pods. Pods are processes of this machine.
//!
//! Like the real one, it omits a scale of zero from the specification, responds with `Status` objects, sends bookmarks,
//! ends watches, and does nothing at once: a controller creates Pods some time after a Deployment was scaled, a kubelet
//! finds them ready some time later, and a deleted one lingers. Undocumented requests are not served, and every request
//! is recorded.

mod api;
mod kubelet;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use modelrelay_multiplexer::driver::kubernetes::Access;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The namespace of all objects.
pub const NAMESPACE: &str = "llm";

/// A Deployment, and the delays of its Pods.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// The command of its container.
    pub command: Vec<String>,
    /// Its container port.
    pub port: u16,
    /// The delay from scaling up to the Pod's creation.
    pub created_after: Duration,
    /// The delay from deletion to removal; its process runs meanwhile.
    pub lingers: Duration,
    /// The status of its Pods, if they never run.
    pub trouble: Option<Value>,
}

/// The cluster. Dropping it kills its Pods.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<Shared>,
    access: Access,
    account: TempDir,
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    /// Never locked across an await.
    state: Mutex<State>,
    /// Signals a change.
    version: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    token: String,
    deployments: BTreeMap<String, (Deployment, u32)>,
    pods: BTreeMap<String, Value>,
    /// The changes, with their versions.
    log: Vec<(u64, Value)>,
    version: u64,
    forbidden: BTreeSet<String>,
    deleted: BTreeSet<String>,
    is_away: bool,
    /// The number of requests so far, and of those that were rejected because it is away.
    received: u32,
    turned_away: u32,
    /// Deployments that have a Pod, or whose controller is about to create one.
    busy: BTreeSet<String>,
    /// The delay of each response, except watch events.
    delay: Duration,
    /// The number of next requests of a kind to which it responds with 503.
    hiccups: BTreeMap<String, u32>,
    has_expired: bool,
    requests: BTreeSet<String>,
    most_pods: usize,
    next_pod: u32,
}

impl Deployment {
    /// A fast Deployment.
    #[must_use]
    pub fn new(command: Vec<String>, port: u16) -> Self {
        let short = Duration::from_millis(50);
        Self { command, port, created_after: short, lingers: short, trouble: None }
    }
}

impl Cluster {
    /// Starts a cluster with these Deployments, all at zero.
    ///
    /// # Panics
    /// If it cannot listen.
    pub async fn start(deployments: Vec<(&str, Deployment)>) -> Self {
        let account = tempfile::tempdir().expect("the folder can be created");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let server = format!("http://{}", listener.local_addr().expect("the listener has an address"));
        let access = Access::new(server.parse().expect("this is a URL"), account.path(), NAMESPACE);
        let names: Vec<String> = deployments.iter().map(|(name, _)| (*name).to_owned()).collect();
        let state = State {
            token: "token-1".to_owned(),
            deployments: deployments.into_iter().map(|(name, of)| (name.to_owned(), (of, 0))).collect(),
            pods: BTreeMap::new(),
            log: Vec::new(),
            version: 1,
            forbidden: BTreeSet::new(),
            deleted: BTreeSet::new(),
            is_away: false,
            received: 0,
            turned_away: 0,
            busy: BTreeSet::new(),
            delay: Duration::ZERO,
            hiccups: BTreeMap::new(),
            has_expired: false,
            requests: BTreeSet::new(),
            most_pods: 0,
            next_pod: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), version: watch::Sender::new(1) });
        let mut tasks = JoinSet::new();
        let router = api::router(Arc::clone(&shared));
        tasks.spawn(async move { axum::serve(listener, router).await.expect("it serves") });
        for name in names {
            tasks.spawn(kubelet::drive(Arc::clone(&shared), name));
        }
        write_token(account.path(), "token-1");
        Self { shared, access, account, _tasks: tasks }
    }

    /// Returns the access data of a worker in one of its Pods.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access.clone()
    }

    /// Scales a Deployment as `kubectl`, an HPA or GitOps would.
    pub fn scale(&self, deployment: &str, replicas: u32) {
        self.shared.scale(deployment, replicas);
    }

    /// Deletes a Deployment, and with it its Pods.
    pub fn delete(&self, deployment: &str) {
        self.shared.state().deleted.insert(deployment.to_owned());
        self.shared.scale(deployment, 0);
    }

    /// Returns a Deployment's desired number of Pods.
    ///
    /// # Panics
    /// If it does not exist.
    #[must_use]
    pub fn replicas(&self, deployment: &str) -> u32 {
        self.shared.state().deployments[deployment].1
    }

    /// Returns the number of Pods, including terminating ones.
    #[must_use]
    pub fn pods(&self) -> usize {
        self.shared.state().pods.len()
    }

    /// Returns the largest number of Pods at once.
    #[must_use]
    pub fn most_pods(&self) -> usize {
        self.shared.state().most_pods
    }

    /// Returns the Deployments that have a Pod, or whose controller is about to create one, regardless of later
    /// changes.
    #[must_use]
    pub fn busy(&self) -> Vec<String> {
        self.shared.state().busy.iter().cloned().collect()
    }

    /// Returns the number of requests so far, including pending ones.
    #[must_use]
    pub fn received(&self) -> u32 {
        self.shared.state().received
    }

    /// Returns the number of requests so far that arrived while it was away.
    #[must_use]
    pub fn turned_away(&self) -> u32 {
        self.shared.state().turned_away
    }

    /// Returns every kind of request so far, such as `patch deployments/scale`.
    #[must_use]
    pub fn received_requests(&self) -> Vec<String> {
        self.shared.state().requests.iter().cloned().collect()
    }

    /// Revokes a right: `get deployments/scale`, `watch pods`.
    pub fn forbid(&self, right: &str) {
        self.shared.state().forbidden.insert(right.to_owned());
    }

    /// Grants it again.
    pub fn allow(&self, right: &str) {
        self.shared.state().forbidden.remove(right);
    }

    /// If true, responds to everything with 503, and ends its watches.
    pub fn set_away(&self, is_away: bool) {
        self.shared.change(|state| state.is_away = is_away);
    }

    /// Sets the delay of each response.
    pub fn set_delay(&self, delay: Duration) {
        self.shared.state().delay = delay;
    }

    /// Makes the next request of this kind, such as `get deployments/scale`, fail with 503.
    pub fn fail_next(&self, right: &str) {
        *self.shared.state().hiccups.entry(right.to_owned()).or_default() += 1;
    }

    /// From now on, every watch receives an error that its version is too old.
    pub fn expire_watches(&self) {
        self.shared.change(|state| state.has_expired = true);
    }

    /// Accepts only another token from now on, which the kubelet delivers.
    pub fn rotate_token(&self) {
        "token-2".clone_into(&mut self.shared.state().token);
        write_token(self.account.path(), "token-2");
    }
}

fn write_token(account: &Path, token: &str) {
    std::fs::write(account.join("token"), token).expect("a file can be written");
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state();
        let changed = change(&mut state);
        state.version += 1;
        let version = state.version;
        drop(state);
        self.version.send_replace(version);
        changed
    }

    fn scale(&self, deployment: &str, replicas: u32) {
        self.change(|state| {
            if let Some((_, wanted)) = state.deployments.get_mut(deployment) {
                *wanted = replicas;
            }
        });
    }

    /// Adds a Pod or updates its status.
    fn put_pod(&self, mut pod: Value) {
        self.change(|state| {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let version = state.version + 1;
            pod["metadata"]["resourceVersion"] = json!(version.to_string());
            let kind = if state.pods.contains_key(&name) { "MODIFIED" } else { "ADDED" };
            state.log.push((version, json!({"type": kind, "object": pod})));
            state.pods.insert(name, pod);
            state.most_pods = state.most_pods.max(state.pods.len());
        });
    }

    fn remove_pod(&self, name: &str) {
        self.change(|state| {
            if let Some(pod) = state.pods.remove(name) {
                let version = state.version + 1;
                state.log.push((version, json!({"type": "DELETED", "object": pod})));
            }
        });
    }
}
