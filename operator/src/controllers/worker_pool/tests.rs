//! The controller against an API server that can fail in ways that a real one cannot be made to fail.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use http::{Method, Request, Response};
use http_body_util::BodyExt;
use k8s_openapi::api::apps::v1::Deployment;
use kube::Client;
use kube::client::Body;
use kube::runtime::{reflector, watcher};
use serde_json::{Value, json};

use super::*;
use crate::cluster::cache::Triggers;
use crate::context::OperatorLocation;
use crate::crd::Provider;
use crate::manifests::testing;
use crate::relays::state::{RelayReport, RelaySnapshot, WorkerReport};
use crate::settings::defaults::{Defaults, WorkerDefaults};

mod access;
mod foreign_pods;
mod leaving;
mod numbers;
mod ownership;
mod sharing;
mod target;
mod tls;

const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/llm/deployments/llama-backend";
const CONFIG_MAP: &str = "/api/v1/namespaces/llm/configmaps/llama-worker";
pub(super) const POOL: &str = "/apis/modelrelay.io/v1alpha1/namespaces/llm/workerpools/llama";
const STATUS: &str = "/apis/modelrelay.io/v1alpha1/namespaces/llm/workerpools/llama/status";
const UNTYPEABLE: &str =
    "failed to create typed patch object (llm/llama-backend): .spec.x: field not declared in schema";

/// Stores applied objects, and fails as configured.
#[derive(Default)]
struct Server {
    objects: HashMap<String, Value>,
    /// Status and message, by method and path.
    faults: HashMap<(Method, &'static str), (u16, &'static str)>,
    /// The manager that scales the Deployment, and the number, after it was read and just before the next apply.
    race: Option<(&'static str, i32)>,
    writes: Vec<String>,
    events: Vec<String>,
    version: u64,
    requests: usize,
}

impl Server {
    fn answer(&mut self, method: &Method, path: &str, body: &Value) -> (u16, Value) {
        self.requests += 1;
        let fault = self.faults.iter().find(|((of, at), _)| of == method && *at == path).map(|(_, fault)| *fault);
        if method != Method::GET && !path.contains("/events") {
            self.writes.push(format!("{method} {path}"));
        }
        if let Some((code, message)) = fault {
            return (code, failure(code, message));
        }
        match *method {
            Method::POST => {
                self.events.push(body["reason"].as_str().unwrap_or_default().to_owned());
                (201, body.clone())
            }
            Method::PATCH if path == STATUS => {
                let pool = self.objects.get_mut(POOL).unwrap();
                pool["status"] = body["status"].clone();
                (200, pool.clone())
            }
            Method::PATCH if path == POOL => {
                let pool = self.objects.get_mut(POOL).unwrap();
                json_patch::merge(pool, body);
                pool["metadata"]["generation"] = json!(pool["metadata"]["generation"].as_i64().unwrap() + 1);
                (200, pool.clone())
            }
            Method::GET | Method::PATCH if path.ends_with("/scale") => {
                let object = self.objects.get_mut(path.trim_end_matches("/scale"));
                object.map_or((404, failure(404, "not found")), |object| target::scale(object, body))
            }
            Method::DELETE => {
                self.objects.remove(path).map_or((404, failure(404, "not found")), |object| (200, object))
            }
            Method::PATCH => {
                if let Some((manager, number)) = self.race.take_if(|_| path == DEPLOYMENT) {
                    self.scale(manager, number);
                }
                self.version += 1;
                let mut object = body.clone();
                if path.contains("/deployments/") {
                    ownership::apply(self.objects.get(path), &mut object);
                }
                object["metadata"]["uid"] = json!(path);
                object["metadata"]["resourceVersion"] = json!(self.version.to_string());
                if path.starts_with("/apis/apps") {
                    object["metadata"]["generation"] = json!(self.version);
                }
                self.objects.insert(path.to_owned(), object.clone());
                (200, object)
            }
            _ => self.objects.get(path).map_or((404, failure(404, "not found")), |object| (200, object.clone())),
        }
    }

    /// Scales the Deployment directly, as another manager.
    fn scale(&mut self, manager: &str, number: i32) {
        self.version += 1;
        let deployment = self.objects.get_mut(DEPLOYMENT).unwrap();
        deployment["metadata"]["generation"] = json!(self.version);
        ownership::scale(deployment, manager, number, self.version);
    }
}

fn failure(code: u16, message: &str) -> Value {
    let reason = if code == 404 { "NotFound" } else { "Test" };
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": reason})
}

/// A pool, the controller and the server.
pub(super) struct Scene {
    server: Arc<Mutex<Server>>,
    pub(super) shared: Arc<PoolContext>,
    pub(super) providers: reflector::store::Writer<Provider>,
    pods: reflector::store::Writer<Pod>,
    pools: reflector::store::Writer<WorkerPool>,
    deployments: reflector::store::Writer<Deployment>,
    _writers: Vec<Box<dyn std::any::Any>>,
}

impl Scene {
    pub(super) fn new(change: &Value) -> Self {
        let mut spec = json!({
            "provider": "local", "replicas": 2,
            "template": {"spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}]}},
        });
        json_patch::merge(&mut spec, change);
        let server = Arc::new(Mutex::new(Server::default()));
        let pool = serde_json::to_value(testing::pool(&spec)).unwrap();
        server.lock().unwrap().objects.insert(POOL.to_owned(), pool);
        let (service, handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        tokio::spawn(serve(handle, server.clone()));
        let defaults = Defaults { worker: testing::defaults(), ..Defaults::default() };
        let ctx = Context::new(
            Client::new(service, "default"),
            defaults,
            OperatorLocation::in_namespace("system"),
            "operator-0".into(),
        );
        let (providers, mut providers_writer) = reflector::store();
        let (pools, pools_writer) = reflector::store();
        let (relay_pods, relay_pods_writer) = reflector::store();
        let (pool_pods, pool_pods_writer) = reflector::store();
        let (deployments, deployments_writer) = reflector::store();
        let (daemon_sets, daemon_sets_writer) = reflector::store();
        providers_writer.apply_watcher_event(&watcher::Event::Apply(provider()));
        let (triggers, _) = Triggers::channels();
        let caches =
            Caches { providers, pools, relay_pods, pool_pods, deployments, daemon_sets, ..Caches::empty(triggers) };
        Self {
            server,
            shared: Arc::new(PoolContext { ctx, caches, memory: PoolMemories::default() }),
            providers: providers_writer,
            pods: pool_pods_writer,
            pools: pools_writer,
            deployments: deployments_writer,
            _writers: vec![Box::new(relay_pods_writer), Box::new(daemon_sets_writer)],
        }
    }

    /// Returns the pool as the server has it: the cache is up to date.
    pub(super) fn pool(&self) -> Arc<WorkerPool> {
        Arc::new(serde_json::from_value(self.server.lock().unwrap().objects[POOL].clone()).unwrap())
    }

    async fn reconcile(&self) -> Result<Action, ReconcileError> {
        reconcile(self.pool(), self.shared.clone()).await
    }

    pub(super) fn fail(&self, method: Method, path: &'static str, code: u16, message: &'static str) {
        self.server.lock().unwrap().faults.insert((method, path), (code, message));
    }

    pub(super) fn heal(&self) {
        self.server.lock().unwrap().faults.clear();
    }

    /// Returns and clears the writes since the last call.
    pub(super) fn writes(&self) -> Vec<String> {
        std::mem::take(&mut self.server.lock().unwrap().writes)
    }

    fn events(&self) -> Vec<String> {
        std::mem::take(&mut self.server.lock().unwrap().events)
    }

    fn condition(&self, type_: &str) -> (String, String) {
        let conditions = self.pool().status.clone().unwrap_or_default().conditions;
        let one =
            conditions.into_iter().find(|condition| condition.type_ == type_).unwrap_or_else(|| panic!("no {type_}"));
        (one.status, one.reason)
    }

    /// Returns the delays of the next three attempts if each fails.
    fn delays(&self, error: &ReconcileError) -> Vec<Action> {
        (0..3).map(|_| retry(self.pool(), error, self.shared.clone())).collect()
    }

    /// Gives the Provider a certificate, in Secret relay-tls.
    pub(super) fn certify(&mut self) {
        let mut provider = provider();
        provider.spec.relay.tls = Some(crate::crd::provider::Tls { secret_name: "relay-tls".to_owned() });
        self.providers.apply_watcher_event(&watcher::Event::Apply(provider));
    }

    pub(super) fn report(&self, snapshot: RelaySnapshot) {
        self.shared.ctx.relays.keep("llm", "local", snapshot);
    }
}

async fn serve(mut handle: tower_test::mock::Handle<Request<Body>, Response<Body>>, server: Arc<Mutex<Server>>) {
    while let Some((request, send)) = handle.next_request().await {
        let (parts, body) = request.into_parts();
        let bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let body = serde_json::from_slice(&bytes).unwrap_or_default();
        let (code, answer) = server.lock().unwrap().answer(&parts.method, parts.uri.path(), &body);
        let answer = serde_json::to_vec(&answer).unwrap();
        send.send_response(Response::builder().status(code).body(Body::from(answer)).unwrap());
    }
}

fn provider() -> Provider {
    serde_json::from_value(json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
        "metadata": {"name": "local", "namespace": "llm", "uid": "p"}, "spec": {},
    }))
    .unwrap()
}

fn serving() -> RelaySnapshot {
    let worker = WorkerReport {
        name: "llama-backend-1".into(),
        pool: Some("llama".into()),
        models: ["qwen".to_owned()].into(),
        ..WorkerReport::default()
    };
    RelaySnapshot {
        relays: [("r".to_owned(), Ok(RelayReport::default()))].into(),
        workers: [("w".to_owned(), worker)].into(),
        ..RelaySnapshot::default()
    }
}

fn written(paths: &[&str]) -> Vec<String> {
    paths.iter().map(|path| format!("PATCH {path}")).collect()
}

#[tokio::test]
async fn correct_objects_are_left_alone() {
    let scene = Scene::new(&json!({}));
    scene.report(serving());
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[CONFIG_MAP, DEPLOYMENT, STATUS]));
    assert_eq!(scene.condition("Ready"), ("True".into(), "Serving".into()));
    assert_eq!(scene.events(), ["Serving"]);
    scene.reconcile().await.unwrap();
    assert_eq!((scene.writes(), scene.events()), (vec![], vec![]));
}

#[tokio::test]
async fn external_changes_are_reverted() {
    let scene = Scene::new(&json!({}));
    scene.reconcile().await.unwrap();
    scene.writes();
    let template = |scene: &Scene| scene.server.lock().unwrap().objects[DEPLOYMENT]["spec"]["template"].clone();
    let before = template(&scene);
    scene.server.lock().unwrap().objects.get_mut(DEPLOYMENT).unwrap()["spec"]["template"]["spec"]["x"] = json!(1);
    scene.server.lock().unwrap().objects.get_mut(DEPLOYMENT).unwrap()["metadata"]["generation"] = json!(77);
    scene.server.lock().unwrap().objects.remove(CONFIG_MAP);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[CONFIG_MAP, DEPLOYMENT]));
    assert_eq!(template(&scene), before);
}

#[tokio::test]
async fn conflicts_and_throttling_are_retried_without_condition() {
    for (code, message) in [(409, "the object has been modified"), (429, "too many requests"), (503, "no")] {
        let scene = Scene::new(&json!({}));
        scene.fail(Method::PATCH, DEPLOYMENT, code, message);
        let error = scene.reconcile().await.unwrap_err();
        assert!(matches!(error, ReconcileError::Apply(ApplyError::Api { .. })), "{error}");
        assert_eq!(scene.writes(), written(&[CONFIG_MAP, DEPLOYMENT]));
        let delays = scene.delays(&error);
        assert_ne!(delays[0], delays[2], "the delay must grow");
        scene.heal();
        scene.reconcile().await.unwrap();
        assert_eq!(scene.writes(), written(&[DEPLOYMENT, STATUS]));
    }
}

#[tokio::test]
async fn forbidden_write_is_reported_and_retried() {
    for (code, message) in [
        (403, "deployments.apps is forbidden"),
        (422, "deployments.apps is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"),
        (400, "admission webhook \"validate.example.com\" denied the request: no"),
    ] {
        let scene = Scene::new(&json!({}));
        scene.fail(Method::PATCH, DEPLOYMENT, code, message);
        let error = scene.reconcile().await.unwrap_err();
        assert!(matches!(error, ReconcileError::Stalled { reason: Reason::Forbidden, .. }), "{error}");
        assert_eq!(scene.condition("Stalled"), ("True".into(), "Forbidden".into()));
        assert_eq!(scene.events(), ["Forbidden"]);
        scene.writes();
        scene.reconcile().await.unwrap_err();
        assert_eq!((scene.writes(), scene.events()), (written(&[DEPLOYMENT]), vec![]));
        scene.heal();
        scene.reconcile().await.unwrap();
        assert_eq!(scene.condition("Stalled").0, "False");
    }
}

#[tokio::test]
async fn untypable_template_is_not_sent_twice() {
    for (code, message) in [(500, UNTYPEABLE), (422, "invalid"), (400, "bad request")] {
        let scene = Scene::new(&json!({}));
        scene.fail(Method::PATCH, DEPLOYMENT, code, message);
        scene.reconcile().await.unwrap();
        assert_eq!(scene.condition("Stalled"), ("True".into(), "TemplateInvalid".into()));
        scene.writes();
        scene.reconcile().await.unwrap();
        assert_eq!(scene.writes(), [""; 0]);
        // A changed pool is applied again.
        scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["spec"]["replicas"] = json!(1);
        scene.reconcile().await.unwrap();
        assert_eq!(scene.writes(), written(&[DEPLOYMENT]));
    }
}

#[tokio::test]
async fn api_server_failure_stalls_nothing() {
    let scene = Scene::new(&json!({}));
    scene.fail(Method::PATCH, DEPLOYMENT, 500, "etcdserver: request timed out");
    assert!(matches!(scene.reconcile().await, Err(ReconcileError::Apply(ApplyError::Api { .. }))));
    scene.reconcile().await.unwrap_err();
    assert_eq!(scene.writes(), written(&[CONFIG_MAP, DEPLOYMENT, DEPLOYMENT]));
}

#[tokio::test]
async fn taken_name_is_left_to_its_owner() {
    let scene = Scene::new(&json!({}));
    let theirs = json!({"metadata": {"name": "llama-backend", "namespace": "llm", "uid": "theirs", "generation": 1}});
    scene.server.lock().unwrap().objects.insert(DEPLOYMENT.to_owned(), theirs.clone());
    let error = scene.reconcile().await.unwrap_err();
    assert!(matches!(error, ReconcileError::Stalled { reason: Reason::NameTaken, .. }), "{error}");
    assert_eq!(scene.condition("Ready"), ("False".into(), "NameTaken".into()));
    assert_eq!(scene.writes(), written(&[CONFIG_MAP, STATUS]));
    assert_eq!(scene.server.lock().unwrap().objects[DEPLOYMENT], theirs);
}

#[tokio::test]
async fn pool_without_provider_starts_no_backend() {
    let mut scene = Scene::new(&json!({}));
    scene.providers.apply_watcher_event(&watcher::Event::Delete(provider()));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[CONFIG_MAP, STATUS]));
    assert_eq!(
        (scene.condition("Ready").1, scene.events()),
        ("ProviderNotFound".into(), vec!["ProviderNotFound".into()])
    );
    scene.reconcile().await.unwrap();
    assert_eq!((scene.writes(), scene.events()), (vec![], vec![]));
    scene.providers.apply_watcher_event(&watcher::Event::Apply(provider()));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[DEPLOYMENT, STATUS]));
    // A running one is kept when the Provider is deleted.
    scene.providers.apply_watcher_event(&watcher::Event::Delete(provider()));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[STATUS]));
}

#[tokio::test]
async fn backend_is_silent_if_its_own_worker_idles() {
    for (pod, said) in [("llama-backend-1", "BackendsNotAnswering"), ("another", "WaitingForWorkers")] {
        let mut scene = Scene::new(&json!({}));
        let idle = WorkerReport { models: [].into(), ..serving().workers["w"].clone() };
        scene.report(RelaySnapshot { workers: [("w".to_owned(), idle)].into(), ..serving() });
        let condition = json!({"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let pod = json!({
            "metadata": {"name": pod, "namespace": "llm", "labels": {"modelrelay.io/pool": "llama"}},
            "spec": {"containers": [{
                "name": "modelrelay-worker", "env": [{"name": "WORKER_CONFIG", "value": sidecar::CONFIG_FILE}],
            }]},
            "status": {"conditions": [condition]},
        });
        scene.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
        scene.reconcile().await.unwrap();
        assert_eq!(scene.condition("Ready"), ("False".into(), said.into()));
    }
}

#[tokio::test]
async fn pool_without_relays_shows_problem_of_provider() {
    let mut scene = Scene::new(&json!({"template": null, "replicas": null}));
    let mut refused = serde_json::to_value(provider()).unwrap();
    let why = format!("Deployment local-relay was refused: exceeded quota{}", ", and so on".repeat(100));
    refused["status"] = json!({"conditions": [{
        "type": "Ready", "status": "False", "reason": "Forbidden", "message": why,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]});
    scene.providers.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(refused).unwrap()));
    scene.reconcile().await.unwrap();
    let message = scene.pool().status.clone().unwrap().conditions[0].message.clone();
    let start = "no relay of Provider local has been polled yet; the Provider is not ready: Forbidden: Deployment \
                 local-relay was refused: exceeded quota";
    assert!(message.starts_with(start) && message.ends_with('…') && message.chars().count() < 400, "{message}");
}

#[tokio::test]
async fn deleting_pool_is_not_rebuilt() {
    let scene = Scene::new(&json!({}));
    scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["metadata"]["deletionTimestamp"] =
        json!("2026-01-01T00:00:00Z");
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), [""; 0]);
}

#[tokio::test]
async fn absent_replicas_are_written_once_with_stable_token() {
    let scene = Scene::new(&json!({"replicas": null}));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[CONFIG_MAP, DEPLOYMENT, POOL, STATUS]));
    assert_eq!(scene.pool().spec.replicas, Some(1));
    let token = |scene: &Scene| {
        let template = scene.server.lock().unwrap().objects[DEPLOYMENT]["spec"]["template"].clone();
        sidecar::drain_token_of(&template).unwrap().to_owned()
    };
    let before = token(&scene);
    assert_eq!(before.len(), 32);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.pool().spec.replicas, Some(1));
    assert!(!scene.writes().contains(&format!("PATCH {POOL}")));
    assert_eq!(token(&scene), before);
}

#[tokio::test]
async fn other_operator_release_sends_same_template() {
    let scene = Scene::new(&json!({}));
    scene.reconcile().await.unwrap();
    let template = scene.server.lock().unwrap().objects[DEPLOYMENT]["spec"]["template"].clone();
    let defaults = Defaults {
        worker: WorkerDefaults { image: "worker:next".into(), ..WorkerDefaults::default() },
        ..Defaults::default()
    };
    let ctx = Context::new(
        scene.shared.ctx.client.clone(),
        defaults,
        OperatorLocation::in_namespace("system"),
        "operator-1".into(),
    );
    let next = Arc::new(PoolContext { ctx, caches: scene.shared.caches.clone(), memory: PoolMemories::default() });
    reconcile(scene.pool(), next).await.unwrap();
    assert_eq!(scene.server.lock().unwrap().objects[DEPLOYMENT]["spec"]["template"], template);
}

#[tokio::test(start_paused = true)]
async fn burst_of_changes_causes_one_reconciliation_per_interval() {
    let (triggers, requests) = Triggers::channels();
    let crowd = tokio::spawn(async move {
        for _ in 0..100 {
            triggers.pool("llm", "llama");
            tokio::time::sleep(GATHER / 10).await;
        }
    });
    let looks = gathered(requests.pools).count().await;
    crowd.await.unwrap();
    assert!((9..=11).contains(&looks), "{looks}");
}

#[tokio::test]
async fn status_and_events_contain_no_secret() {
    let scene = Scene::new(&json!({}));
    scene.fail(Method::PATCH, STATUS, 500, "etcdserver: request timed out");
    assert!(matches!(scene.reconcile().await, Err(ReconcileError::Write { what: "status", .. })));
    scene.heal();
    scene.reconcile().await.unwrap();
    let objects: BTreeMap<String, Value> = scene.server.lock().unwrap().objects.clone().into_iter().collect();
    let template = &objects[DEPLOYMENT]["spec"]["template"];
    let token = sidecar::drain_token_of(template).unwrap();
    assert!(!objects[POOL].to_string().contains(token));
}
