//! Complete passes against an in-memory API server.

#![allow(clippy::needless_pass_by_value, reason = "values are written where they are used")]

use k8s_openapi::ByteString;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use kube::Resource;
use kube::runtime::reflector::store::Writer;
use kube::runtime::{reflector, watcher};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::cluster::cache::{Changes, Now, Requests, Triggers};
use crate::context::OperatorLocation;
use crate::crd::WorkerPool;
use crate::relays::state::{ModelReport, RelayReport, RelaySnapshot, WorkerReport};
use crate::settings::defaults::{Defaults, RelayDefaults};

mod api;
mod conditions;
mod moving;
mod reviewers;
mod secrets;
mod sharing;
mod tls;

use api::FakeApi;

const SECRETS: &str = "/api/v1/namespaces/llm/secrets";

struct World {
    api: FakeApi,
    shared: Arc<ProviderContext>,
    pods: Writer<Pod>,
    providers: Writer<Provider>,
    deployments: Writer<Deployment>,
    pools: Writer<WorkerPool>,
    pool_pods: Writer<Pod>,
    // The receivers of the triggers, without which nothing can be requested.
    _requests: Requests,
}

impl World {
    fn new() -> Self {
        Self::with(None)
    }

    fn with_binding(name: &str) -> Self {
        Self::with(Some(name.to_owned()))
    }

    fn with(token_review_binding: Option<String>) -> Self {
        let api = FakeApi::default();
        let relay = RelayDefaults { image: "r:1".into(), token_review_binding, ..RelayDefaults::default() };
        let defaults = Defaults { relay, ..Defaults::default() };
        let ctx = Context::new(api.client(), defaults, OperatorLocation::in_namespace("mr-system"), "test".into());
        let (triggers, requests) = Triggers::channels();
        let (relay_pods, pods) = reflector::store();
        let (providers, providers_writer) = reflector::store();
        let (deployments, deployments_writer) = reflector::store();
        let (pools, pools_writer) = reflector::store();
        let (pool_pods, pool_pods_writer) = reflector::store();
        let caches = Caches { providers, relay_pods, deployments, pools, pool_pods, ..Caches::empty(triggers) };
        let shared = Arc::new(ProviderContext { ctx, caches, ledger: Mutex::default() });
        Self {
            api,
            shared,
            pods,
            providers: providers_writer,
            deployments: deployments_writer,
            pools: pools_writer,
            pool_pods: pool_pods_writer,
            _requests: requests,
        }
    }

    /// Runs a pass after a change in the cluster.
    async fn changed(&self, provider: &Provider) -> Result<Action, ProviderError> {
        self.shared.caches.triggers.provider("llm", "local");
        self.pass(provider).await
    }

    /// Reports a change of one of its objects, perhaps by the operator itself.
    fn touched<K>(&self, name: &str, version: &str, now: Now)
    where
        K: Resource<DynamicType = ()> + DeserializeOwned,
    {
        let meta = json!({
            "name": name, "namespace": "llm", "resourceVersion": version, "labels": {"modelrelay.io/provider": "local"},
        });
        let object: K = serde_json::from_value(json!({"metadata": meta})).unwrap();
        self.shared.caches.triggers.object(&object, now);
    }

    async fn pass(&self, provider: &Provider) -> Result<Action, ProviderError> {
        reconcile(Arc::new(provider.clone()), self.shared.clone()).await
    }

    /// Returns status and reason of a condition as last written.
    fn condition(&self, type_: &str) -> (String, String) {
        let status = self.api.object("providers/local/status").unwrap_or_default();
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.iter().find(|condition| condition["type"] == type_);
        let text = |key: &str| found.and_then(|found| found[key].as_str()).unwrap_or_default().to_owned();
        (text("status"), text("reason"))
    }

    fn value(&self, secret: &str, key: &str) -> Option<String> {
        let bytes: ByteString =
            serde_json::from_value(self.api.object(&format!("secrets/{secret}"))?["data"].get(key)?.clone()).unwrap();
        Some(String::from_utf8(bytes.0).unwrap())
    }

    /// Adds a relay Pod that reports this configuration.
    fn relay(&mut self, hash: &str) {
        let pod = json!({
            "metadata": {"name": "relay-1", "namespace": "llm", "labels": {"modelrelay.io/provider": "local"}},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        });
        self.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
        let report = RelayReport { config_hash: Some(hash.to_owned()), ..RelayReport::default() };
        let snapshot =
            RelaySnapshot { relays: [("relay-1".to_owned(), Ok(report))].into(), ..RelaySnapshot::default() };
        self.shared.ctx.relays.keep("llm", "local", snapshot);
    }

    /// Adds an up-to-date relay with these workers, each of which serves this model.
    fn workers(&mut self, workers: &[&str], model: Option<&str>) {
        self.relay(&self.expected_hash());
        let before = self.shared.ctx.relays.of("llm", "local").unwrap();
        let report = |name: &&str| ((*name).to_owned(), WorkerReport::default());
        let model_of =
            |id: &str| (id.to_owned(), ModelReport { workers: workers.len() as u64, ..ModelReport::default() });
        let snapshot = RelaySnapshot {
            workers: workers.iter().map(report).collect(),
            models: model.into_iter().map(model_of).collect(),
            ..RelaySnapshot::clone(&before)
        };
        self.shared.ctx.relays.keep("llm", "local", snapshot);
    }

    /// Makes the next attempt due.
    fn retry_is_due(&self) {
        self.shared.ledger().memories.values_mut().for_each(ProviderMemory::reset_retries);
    }

    fn expected_hash(&self) -> String {
        self.shared.ctx.relays.expected("llm", "local").map(|expected| expected.hash).unwrap_or_default()
    }
}

fn provider(spec: Value) -> Provider {
    with_metadata(json!({}), spec)
}

fn with_metadata(more: Value, spec: Value) -> Provider {
    let mut metadata = json!({"name": "local", "namespace": "llm", "uid": "u-1", "generation": 1});
    for (key, value) in more.as_object().cloned().unwrap_or_default() {
        metadata[key] = value;
    }
    let value = json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "metadata": metadata, "spec": spec});
    serde_json::from_value(value).unwrap()
}

fn foreign(kind: &str, name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "llm", "labels": {"app": "theirs"}}})
}

#[tokio::test]
async fn first_pass_writes_everything_and_second_writes_nothing() {
    let world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    let writes = world.api.take_writes();
    let expected = [
        "PATCH secrets/local-relay",
        "PATCH secrets/local-worker",
        "PATCH secrets/local-admin",
        "PATCH serviceaccounts/local-relay",
        "PATCH services/local",
        "PATCH services/local-workers",
        "PATCH poddisruptionbudgets/local-relay",
        "PATCH networkpolicies/local-relay",
        "PATCH deployments/local-relay",
        "PATCH providers/local/status",
    ];
    assert_eq!(writes, expected);
    assert_eq!(world.value("local-worker", "worker-secret"), world.value("local-relay", "worker-secret"));
    assert_eq!(world.value("local-admin", "token").map(|token| token.len()), Some(44));
    assert_eq!(world.condition("Ready"), ("False".into(), "NoRelayReady".into()));
    world.pass(&provider(json!({}))).await.unwrap();
    assert_eq!(world.api.take_writes(), Vec::<String>::new());
}

#[tokio::test]
async fn only_externally_changed_objects_are_reapplied() {
    let world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    world.api.take_writes();
    let ours = world.api.object("services/local").unwrap()["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let cases: [(&str, &str, Now, &[&str]); 4] = [
        ("local", &ours, Now::There, &[]),
        ("local", "theirs", Now::There, &["PATCH services/local"]),
        ("local-workers", "any", Now::Gone, &["PATCH services/local-workers"]),
        // Not wanted, and known to be absent.
        ("local-lb", "any", Now::Gone, &[]),
    ];
    for (name, version, now, writes) in cases {
        world.touched::<Service>(name, version, now);
        world.pass(&provider(json!({}))).await.unwrap();
        assert_eq!(world.api.take_writes(), writes, "{name} {version}");
    }
    // The Provider itself changed, but none of its objects differs.
    world.changed(&provider(json!({}))).await.unwrap();
    assert_eq!(world.api.take_writes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn hourly_pass_reapplies_every_object() {
    let world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    world.api.take_writes();
    tokio::time::advance(IDLE_INTERVAL).await;
    world.pass(&provider(json!({}))).await.unwrap();
    let objects = world.api.take_writes().iter().filter(|write| !write.contains("providers")).count();
    assert_eq!(objects, 9);
    world.pass(&provider(json!({}))).await.unwrap();
    assert_eq!(world.api.take_writes(), Vec::<String>::new());
}

#[tokio::test]
async fn recreated_provider_adopts_previous_secrets() {
    let world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    let kept = [world.value("local-worker", "worker-secret"), world.value("local-admin", "token")];
    world.api.0.lock().unwrap().objects.remove(&format!("{SECRETS}/local-relay"));
    let successor = with_metadata(json!({"uid": "u-2"}), json!({}));
    world.changed(&successor).await.unwrap();
    assert_eq!([world.value("local-worker", "worker-secret"), world.value("local-admin", "token")], kept);
    assert_eq!(world.value("local-relay", "worker-secret"), kept[0]);
}

#[tokio::test]
async fn taken_name_stalls_while_others_are_created() {
    let world = World::new();
    world.api.put("/api/v1/namespaces/llm/services/local", foreign("Service", "local"));
    let error = world.changed(&provider(json!({}))).await.unwrap_err();
    assert!(error.to_string().contains("Service local exists and does not belong to this Provider"), "{error}");
    let writes = world.api.take_writes();
    assert!(!writes.contains(&"PATCH services/local".to_owned()), "{writes:?}");
    assert!(writes.contains(&"PATCH deployments/local-relay".to_owned()), "{writes:?}");
    assert_eq!(world.condition("Stalled"), ("True".into(), "NameTaken".into()));
    assert_eq!(world.condition("Reconciling").0, "False");
    // The name is free again: only the missing object is created.
    world.api.0.lock().unwrap().objects.remove("/api/v1/namespaces/llm/services/local");
    world.pass(&provider(json!({}))).await.unwrap();
    assert_eq!(world.api.take_writes(), ["PATCH services/local", "PATCH providers/local/status"]);
    assert_eq!(world.condition("Stalled").0, "False");
}

#[tokio::test]
async fn rejected_write_is_retried_with_growing_delay() {
    let cases = [
        (409, "ApiError", "True"),
        (429, "ApiError", "True"),
        (503, "ApiError", "True"),
        (403, "Forbidden", "True"),
        (422, "ObjectRefused", "False"),
    ];
    for (code, reason, reconciling) in cases {
        let world = World::new();
        world.api.refuse(move |method, path| {
            (method == "PATCH" && path.ends_with("deployments/local-relay")).then_some(code)
        });
        let provider = provider(json!({}));
        let error = world.changed(&provider).await.unwrap_err();
        assert_eq!(world.condition("Reconciling"), (reconciling.into(), reason.into()), "{code}");
        world.api.take_writes();

        let first = retry(Arc::new(provider.clone()), &error, world.shared.clone());
        assert_ne!(first, Action::await_change(), "{code}");
        world.retry_is_due();
        // The same failure writes no status and touches no other object.
        world.pass(&provider).await.unwrap_err();
        assert_eq!(world.api.take_writes(), ["PATCH deployments/local-relay"], "{code}");
        world.api.refuse(|_, _| None);
        world.pass(&provider).await.unwrap();
        let writes = world.api.take_writes();
        assert_eq!(writes, ["PATCH deployments/local-relay", "PATCH providers/local/status"], "{code}");
    }
}

#[tokio::test]
async fn unreadable_secret_stops_before_any_write() {
    let world = World::new();
    world.api.refuse(|method, path| (method == "GET" && path.contains("/secrets/")).then_some(500));
    world.changed(&provider(json!({}))).await.unwrap_err();
    assert_eq!(world.api.take_writes(), ["PATCH providers/local/status"]);
    assert_eq!(world.condition("Ready"), ("False".into(), "ApiError".into()));
}

#[tokio::test]
async fn relay_reports_do_not_hasten_retry() {
    let mut world = World::new();
    world.api.refuse(|method, path| (method == "PATCH" && path.ends_with("deployments/local-relay")).then_some(403));
    let provider = provider(json!({}));
    let error = world.changed(&provider).await.unwrap_err();
    retry(Arc::new(provider.clone()), &error, world.shared.clone());
    world.relay(&world.expected_hash());
    world.api.take_writes();
    world.pass(&provider).await.unwrap_err();
    let writes = world.api.take_writes();
    assert!(!writes.iter().any(|write| write.contains("deployments")), "{writes:?}");
    // The report itself is published, and a change in the cluster is handled at once.
    assert_eq!(world.condition("Ready").0, "True");
    world.changed(&provider).await.unwrap_err();
    assert!(world.api.take_writes().contains(&"PATCH deployments/local-relay".to_owned()));
}

#[tokio::test]
async fn unwritable_status_returns_error() {
    let world = World::new();
    world.api.refuse(|method, path| (method == "PATCH" && path.ends_with("/status")).then_some(429));
    let error = world.changed(&provider(json!({}))).await.unwrap_err();
    assert_eq!(error.word(), "status");
}

#[tokio::test]
async fn deleting_provider_is_left_alone() {
    let world = World::new();
    let leaving = with_metadata(json!({"deletionTimestamp": "2026-11-01T00:00:00Z"}), json!({}));
    world.changed(&leaving).await.unwrap();
    assert_eq!(world.api.take_writes(), Vec::<String>::new());
}

#[tokio::test]
async fn started_relay_is_rechecked_after_first_worker_wait() {
    let mut world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    world.relay(&world.expected_hash());
    let mut pod = Pod::clone(&world.shared.caches.relay_pods.state()[0]);
    let state = json!({"running": {"startedAt": Timestamp::now().to_string()}});
    let relay = json!({"name": "relay", "state": state, "ready": false, "restartCount": 0, "image": "", "imageID": ""});
    pod.status = serde_json::from_value(json!({"containerStatuses": [relay]})).unwrap();
    world.pods.apply_watcher_event(&watcher::Event::Apply(pod));
    let again = world.pass(&provider(json!({}))).await.unwrap();
    assert_eq!(again, Action::requeue(AWAITS_FIRST_WORKER + Duration::from_millis(50)));
}

/// Its objects are deleted one by one, and each new list contains the retained ones.
#[tokio::test]
async fn changes_of_deleted_provider_are_discarded() {
    let world = World::new();
    let leaving = with_metadata(json!({"deletionTimestamp": "2026-11-01T00:00:00Z"}), json!({}));
    let kept = || world.shared.caches.triggers.take_changes(&ObjectRef::new("local").within("llm"));
    world.changed(&provider(json!({}))).await.unwrap();
    world.touched::<Service>("local", "1", Now::Gone);
    world.changed(&leaving).await.unwrap();
    assert_eq!(kept(), Changes::default());
    world.touched::<Secret>("local-worker", "1", Now::There);
    world.shared.forget(&("llm".into(), "local".into()));
    assert_eq!(kept(), Changes::default());
}

#[tokio::test]
async fn invalid_spec_leaves_running_objects_unchanged() {
    let world = World::new();
    world.changed(&provider(json!({}))).await.unwrap();
    world.api.take_writes();
    let invalid = with_metadata(json!({"generation": 2}), json!({"models": [{"id": "a"}, {"id": "a"}]}));
    world.changed(&invalid).await.unwrap();
    assert_eq!(world.api.take_writes(), ["PATCH providers/local/status"]);
    assert_eq!(world.condition("Stalled"), ("True".into(), "InvalidSpec".into()));
    let status = world.api.object("providers/local/status").unwrap();
    assert_eq!((&status["observedGeneration"], &status["workerSecret"]["name"]), (&json!(2), &json!("local-worker")));
}

#[tokio::test]
async fn deleted_object_is_recreated() {
    let world = World::new();
    let provider = provider(json!({}));
    world.changed(&provider).await.unwrap();
    let before = world.value("local-worker", "worker-secret");
    world.api.0.lock().unwrap().objects.remove(&format!("{SECRETS}/local-worker"));
    world.touched::<Secret>("local-worker", "any", Now::Gone);
    world.pass(&provider).await.unwrap();
    assert_eq!(world.value("local-worker", "worker-secret"), before);
}

#[tokio::test]
async fn provider_is_counted_until_forgotten() {
    let world = World::new();
    let count = |world: &World| world.shared.ctx.metrics.resources.with_label_values(&["Provider", "false"]).get();
    world.changed(&provider(json!({}))).await.unwrap();
    world.changed(&provider(json!({}))).await.unwrap();
    assert_eq!(count(&world), 1);
    world.shared.forget(&("llm".into(), "local".into()));
    assert_eq!(count(&world), 0);
}
