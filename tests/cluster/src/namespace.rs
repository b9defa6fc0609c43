//! A namespace for one test: created for it, printed on failure, deleted afterwards.

use std::{env, fmt, io::Write, net::SocketAddr, time::Duration};

use k8s_openapi::{NamespaceResourceScope, api::core::v1};
use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, PostParams},
    runtime::wait::await_condition,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use tokio::net::TcpStream;

use crate::{Cluster, Command, TEST_TIMEOUT, wait_until};

/// Set this variable to keep the namespaces of tests for inspection.
const KEEP: &str = "MODELRELAY_KEEP_NAMESPACES";

/// The timeout for a connection to a Service, on a slow machine.
const CONNECT: Duration = Duration::from_secs(2);

/// The number of log lines per container that a failed test prints.
const LOG_LINES: u32 = 300;

/// A namespace. Dropping it deletes it without waiting; in a panic its objects, events and logs are printed.
pub struct Namespace {
    /// The cluster that it is in.
    pub cluster: Cluster,
    /// Its name.
    pub name: String,
}

impl Namespace {
    pub(crate) async fn create(cluster: &Cluster, prefix: &str, pod_security: &str) -> Self {
        let random = getrandom::u32().expect("the operating system provides random numbers");
        let name = format!("{prefix}-{random:08x}");
        let labels = json!({"pod-security.kubernetes.io/enforce": pod_security, "modelrelay-test": "true"});
        let namespace = json!({"metadata": {"name": name, "labels": labels}});
        let namespace: v1::Namespace = serde_json::from_value(namespace).expect("this is a namespace");
        let created = Api::all(cluster.client.clone()).create(&PostParams::default(), &namespace).await;
        created.unwrap_or_else(|error| panic!("cannot create the namespace {name}: {error}"));
        Self { cluster: cluster.clone(), name }
    }

    /// Returns a `kubectl` command in this namespace, with arguments split at white space.
    pub fn kubectl(&self, arguments: &str) -> Command {
        self.cluster.kubectl(&format!("--namespace {}", self.name)).args(arguments.split_whitespace())
    }

    /// Applies manifests server-side, as `kubectl apply` does.
    pub async fn apply(&self, manifests: &[Value]) {
        self.apply_command(manifests).await;
    }

    /// Applies manifests, expects a rejection, and returns its message.
    pub async fn refused(&self, manifests: &[Value]) -> String {
        self.apply_command(manifests).expect_failure().await
    }

    /// Applies YAML with one or more documents.
    pub async fn apply_yaml(&self, yaml: &str) {
        self.kubectl("apply --server-side --force-conflicts --filename -").input(yaml).await;
    }

    /// Returns the API of a kind that k8s-openapi defines, such as `v1::Pod`.
    #[must_use]
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.cluster.client.clone(), &self.name)
    }

    /// Returns the API of Providers, WorkerPools or other kinds without a type here: `custom("modelrelay.io/v1alpha1",
    /// "Provider")`.
    ///
    /// # Panics
    /// If the version has no group.
    #[must_use]
    pub fn custom(&self, api_version: &str, kind: &str) -> Api<DynamicObject> {
        let (group, version) = api_version.split_once('/').expect("GROUP/VERSION");
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        Api::namespaced_with(self.cluster.client.clone(), &self.name, &resource)
    }

    /// Watches an object until it exists and `condition` holds, and returns it. A watch that breaks, as when the API
    /// server restarts, is restarted.
    ///
    /// # Panics
    /// After [`TEST_TIMEOUT`], with `what` and the object's last state.
    pub async fn wait_for<K>(&self, api: &Api<K>, name: &str, what: &str, condition: impl Fn(&K) -> bool) -> K
    where
        K: Resource + Clone + fmt::Debug + Serialize + DeserializeOwned + Send + 'static,
    {
        self.wait_at_most(TEST_TIMEOUT, api, name, what, condition).await
    }

    /// As [`Self::wait_for`], with its own deadline: for rules that state a time.
    pub async fn wait_at_most<K>(
        &self,
        deadline: Duration,
        api: &Api<K>,
        name: &str,
        what: &str,
        condition: impl Fn(&K) -> bool,
    ) -> K
    where
        K: Resource + Clone + fmt::Debug + Serialize + DeserializeOwned + Send + 'static,
    {
        let holds = |object: Option<&K>| object.is_some_and(&condition);
        match tokio::time::timeout(deadline, watch_until(api, name, holds)).await {
            Ok(found) => found.expect("the condition wants an object"),
            Err(_) => {
                let last = match api.get(name).await {
                    Ok(object) => serde_yaml::to_string(&object).unwrap_or_default(),
                    Err(error) => error.to_string(),
                };
                panic!("timed out after {deadline:?} waiting for: {what}; last state of {name}:\n{last}")
            }
        }
    }

    /// Waits until an object is gone.
    pub async fn wait_gone<K>(&self, api: &Api<K>, name: &str)
    where
        K: Resource + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
    {
        let gone = watch_until(api, name, |object: Option<&K>| object.is_none());
        let gone = tokio::time::timeout(TEST_TIMEOUT, gone).await;
        gone.unwrap_or_else(|_| panic!("timed out after {TEST_TIMEOUT:?} waiting for the deletion of {name}"));
    }

    /// Waits until a condition of a custom resource has this status for its latest generation.
    pub async fn wait_for_condition(
        &self,
        api: &Api<DynamicObject>,
        name: &str,
        kind: &str,
        status: &str,
    ) -> DynamicObject {
        self.wait_for(api, name, &format!("condition {kind}={status}"), |object| has_condition(object, kind, status))
            .await
    }

    /// Waits until a Deployment or DaemonSet (`deployment/NAME`) runs only its latest template.
    pub async fn rolled_out(&self, workload: &str) {
        self.kubectl(&format!("rollout status --timeout {}s {workload}", TEST_TIMEOUT.as_secs())).await;
    }

    /// Returns the address of a Service's first port at its ClusterIP, which this machine reaches like a Pod does.
    /// Waits until connections are accepted there: a ready Pod is not yet an endpoint, and an endpoint not yet a rule.
    ///
    /// # Panics
    /// If the Service does not exist.
    pub async fn service_address(&self, name: &str) -> SocketAddr {
        let accepts = async || self.service_accepts(name).await;
        wait_until(&format!("connections to Service {name}"), TEST_TIMEOUT, accepts).await;
        self.cluster_address(name).await
    }

    /// True if connections are accepted there now. A rule can still lead to a Pod that is gone and never responds: the
    /// kernel would retry for two minutes.
    ///
    /// # Panics
    /// If the Service does not exist.
    pub async fn service_accepts(&self, name: &str) -> bool {
        let address = self.cluster_address(name).await;
        let connected = tokio::time::timeout(CONNECT, TcpStream::connect(address)).await;
        connected.is_ok_and(|connected| connected.is_ok())
    }

    async fn cluster_address(&self, name: &str) -> SocketAddr {
        let service = self.api::<v1::Service>().get(name).await;
        let spec =
            service.unwrap_or_else(|error| panic!("no Service {name}: {error}")).spec.expect("Services have a spec");
        let ip = spec.cluster_ip.unwrap_or_default();
        let port = spec.ports.unwrap_or_default().first().map(|port| port.port);
        let port = port.and_then(|port| u16::try_from(port).ok()).expect("the Service has a port");
        let ip = ip.parse().unwrap_or_else(|_| panic!("Service {name} has no ClusterIP but {ip:?}"));
        SocketAddr::new(ip, port)
    }

    /// Returns the Pods with these labels (`app=NAME`) that are not being deleted.
    pub async fn pods(&self, selector: &str) -> Vec<v1::Pod> {
        let list = kube::api::ListParams::default().labels(selector);
        let pods = self.api::<v1::Pod>().list(&list).await.expect("Pods can be listed");
        pods.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect()
    }

    /// Returns their names, sorted.
    pub async fn pod_names(&self, selector: &str) -> Vec<String> {
        let mut names: Vec<String> = self.pods(selector).await.iter().map(ResourceExt::name_any).collect();
        names.sort();
        names
    }

    fn apply_command(&self, manifests: &[Value]) -> Command {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": manifests});
        self.kubectl("apply --server-side --force-conflicts --filename -").input(list.to_string())
    }

    /// Prints everything that helps to explain a failure. Blocking, because it runs in a panic.
    fn print_state(&self) {
        let mut text = format!("\n---- namespace {} ----\n", self.name);
        let shown = [
            "get pods,deployments,replicasets,daemonsets,services,endpointslices,configmaps,secrets --output wide",
            "get providers.modelrelay.io,workerpools.modelrelay.io --output yaml",
            "get events --sort-by lastTimestamp",
        ];
        for arguments in shown {
            text += &self.blocking(arguments);
        }
        for pod in self.blocking("get pods --output name").lines().filter(|line| line.starts_with("pod/")) {
            text += &format!("---- logs of {pod}\n");
            text += &self.blocking(&format!("logs {pod} --all-containers --prefix --tail {LOG_LINES}"));
        }
        // Written in one piece, bypassing the capture of a test's output: several tests may fail at once.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }

    fn blocking(&self, arguments: &str) -> String {
        let arguments = format!("--namespace {} --request-timeout 10s {arguments}", self.name);
        self.cluster.blocking("kubectl", &arguments).output_text()
    }
}

async fn watch_until<K>(api: &Api<K>, name: &str, condition: impl Fn(Option<&K>) -> bool) -> Option<K>
where
    K: Resource + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
{
    loop {
        match await_condition(api.clone(), name, &condition).await {
            Ok(object) => return object,
            #[expect(clippy::disallowed_methods, reason = "a broken watch is opened again; the callers have deadlines")]
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_state();
        }
        if env::var_os(KEEP).is_none() {
            self.blocking(&format!("delete namespace {} --wait=false", self.name));
        }
    }
}

/// True if a condition has this status, and was written for the object's latest generation.
#[must_use]
pub fn has_condition(object: &DynamicObject, kind: &str, status: &str) -> bool {
    let conditions = object.data["status"]["conditions"].as_array();
    let current = |condition: &Value| condition["observedGeneration"].as_i64() >= object.metadata.generation;
    conditions.into_iter().flatten().any(|it| it["type"] == kind && it["status"] == status && current(it))
}

/// True if the Pod is ready.
#[must_use]
pub fn is_ready(pod: &v1::Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
