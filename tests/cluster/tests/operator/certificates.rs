//! The webhook's certificates change while Pods are being created.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, api::PostParams};
use modelrelay_cluster::manifests::worker_pool;
use modelrelay_cluster::{Cluster, Namespace, SYSTEM_NAMESPACE, TEST_TIMEOUT, wait_until};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::replicas::{OPERATOR, Operator};

const SECRET: &str = "modelrelay-webhook-certificate";

/// Short enough to see several certificates; the next one is created when a third of the lifetime is left.
const LIFETIME: &str = "CERTIFICATE_LIFETIME=30s";

/// The interval between two Pods.
const PACE: Duration = Duration::from_millis(250);

#[tokio::test]
async fn certificate_renewal_fails_no_pod() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("certificates").await;
    Operator::settled(&cluster).await;
    namespace.apply(&[worker_pool("llama", &json!({"provider": "local"}))]).await;
    let secrets = Api::<Secret>::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let long = value(&secrets.get(SECRET).await.expect("the operator created its certificate"), "tls.crt");

    // An existing certificate keeps its lifetime, so it is deleted; until the API server knows the next one, Pods may
    // fail.
    let short = ShortLived::set(&cluster).await;
    cluster.kubectl(&format!("--namespace {SYSTEM_NAMESPACE} delete secret {SECRET}")).await;
    let served = changed(&namespace, &secrets, "tls.crt", &long).await;
    let pods = namespace.api::<Pod>();
    wait_until("the webhook to be trusted", TEST_TIMEOUT, async || create(&pods, "first").await.is_ok()).await;

    let creating = Creating::start(&namespace);
    changed(&namespace, &secrets, "tls.crt", &served).await;
    creating.further(8).await;
    // Without its key the authority is replaced too: a second one is published, then used, then the first is removed.
    let authority = value(&secrets.get(SECRET).await.expect("the certificate exists"), "ca.crt");
    let lose = r#"[{"op": "remove", "path": "/data/ca.key"}]"#;
    let patch = format!("--namespace {SYSTEM_NAMESPACE} patch secret {SECRET} --type json --patch");
    cluster.kubectl(&patch).arg(lose).await;
    changed(&namespace, &secrets, "ca.crt", &authority).await;
    let forgotten = |secret: &Secret| value(secret, "ca-previous.crt").is_empty();
    namespace.wait_for(&secrets, SECRET, "the old authority to be forgotten", forgotten).await;
    creating.further(8).await;
    let served = value(&secrets.get(SECRET).await.expect("the certificate exists"), "tls.crt");
    short.restore().await;
    // The last of the short-lived ones is replaced too.
    changed(&namespace, &secrets, "tls.crt", &served).await;
    creating.further(8).await;
    creating.finish().await;
    Operator::settled(&cluster).await;
}

/// Waits until the Secret holds another value than `old` under this key, and returns it.
async fn changed(namespace: &Namespace, secrets: &Api<Secret>, key: &str, old: &[u8]) -> Vec<u8> {
    let another = |secret: &Secret| !value(secret, key).is_empty() && value(secret, key) != old;
    value(&namespace.wait_for(secrets, SECRET, &format!("another {key}"), another).await, key)
}

fn value(secret: &Secret, key: &str) -> Vec<u8> {
    let data = secret.data.as_ref().and_then(|data| data.get(key));
    data.map(|value| value.0.clone()).unwrap_or_default()
}

/// Makes the operator create short-lived certificates. Dropping it reverts that, for the tests that follow a failed
/// one.
struct ShortLived<'a> {
    cluster: &'a Cluster,
    restored: bool,
}

impl<'a> ShortLived<'a> {
    async fn set(cluster: &'a Cluster) -> Self {
        let short = Self { cluster, restored: false };
        short.set_env(LIFETIME).await;
        short
    }

    async fn restore(mut self) {
        self.restored = true;
        self.set_env("CERTIFICATE_LIFETIME-").await;
    }

    async fn set_env(&self, variable: &str) {
        let set = format!("--namespace {SYSTEM_NAMESPACE} set env deployment/{OPERATOR} {variable}");
        self.cluster.kubectl(&set).await;
        let status = format!("--namespace {SYSTEM_NAMESPACE} rollout status deployment/{OPERATOR} --timeout 90s");
        self.cluster.kubectl(&status).await;
    }
}

impl Drop for ShortLived<'_> {
    fn drop(&mut self) {
        if !self.restored {
            let arguments =
                format!("--namespace {SYSTEM_NAMESPACE} set env deployment/{OPERATOR} CERTIFICATE_LIFETIME-");
            eprintln!("{}", self.cluster.blocking("kubectl", &arguments).output_text());
        }
    }
}

/// Creates labelled Pods at an interval, and checks that each got its worker.
struct Creating {
    task: JoinHandle<()>,
    created: watch::Receiver<usize>,
    stop: watch::Sender<bool>,
}

impl Creating {
    fn start(namespace: &Namespace) -> Self {
        let pods = namespace.api::<Pod>();
        let (count, created) = watch::channel(0);
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut pace = tokio::time::interval(PACE);
            for number in 0.. {
                if *stopped.borrow() {
                    return;
                }
                pace.tick().await;
                let created = create(&pods, &number.to_string()).await;
                created.unwrap_or_else(|error| panic!("Pod {number}: {error}"));
                count.send_replace(number + 1);
            }
        });
        Self { task, created, stop }
    }

    /// Waits for this number of further Pods.
    async fn further(&self, number: usize) {
        let mut created = self.created.clone();
        let goal = *created.borrow() + number;
        let waited = created.wait_for(|created| *created >= goal).await;
        waited.expect("the creation of a Pod failed: see above");
    }

    async fn finish(self) {
        self.stop.send_replace(true);
        self.task.await.expect("every Pod was created, with its worker");
    }
}

/// Creates a Pod; the error explains why it was not created with its worker.
async fn create(pods: &Api<Pod>, name: &str) -> Result<(), String> {
    let pod: Pod = serde_json::from_value(unschedulable_pod(name)).expect("this is a Pod");
    let created = pods.create(&PostParams::default(), &pod).await.map_err(|error| error.to_string())?;
    if has_worker(&created) { Ok(()) } else { Err("the Pod has no worker".to_owned()) }
}

/// A labelled Pod that cannot be scheduled.
pub(crate) fn unschedulable_pod(name: &str) -> Value {
    let mut container = modelrelay_cluster::manifests::demo_container();
    container["resources"] = json!({"requests": {"cpu": "1m"}});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{name}"), "labels": {"modelrelay.io/pool": "llama"}},
        "spec": {
            "automountServiceAccountToken": false,
            "nodeSelector": {"nobody": "has-this"},
            "containers": [container],
        },
    })
}

fn has_worker(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|spec| spec.init_containers.as_ref());
    init.into_iter().flatten().any(|container| container.name == "modelrelay-worker")
}
