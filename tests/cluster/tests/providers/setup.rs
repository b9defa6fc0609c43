//! A Provider in its own namespace, and requests to it.

use std::{collections::BTreeMap, net::SocketAddr};

use k8s_openapi::api::{apps::v1::Deployment, core::v1};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use modelrelay_cluster::{
    Cluster, Namespace, TEST_TIMEOUT,
    http::{Reply, fetch},
    manifests,
    traffic::Traffic,
    wait_until,
};
use serde_json::{Value, json};

pub(crate) const VERSION: &str = "modelrelay.io/v1alpha1";

/// Name of the Provider of every test.
pub(crate) const LOCAL: &str = "local";

/// Provider `local` in a namespace.
pub(crate) struct Setup {
    pub(crate) namespace: Namespace,
    pub(crate) providers: Api<DynamicObject>,
    pub(crate) pools: Api<DynamicObject>,
}

impl Setup {
    /// Creates an empty namespace.
    pub(crate) async fn empty() -> Self {
        let namespace = Cluster::connect().await.namespace("providers").await;
        let providers = namespace.custom(VERSION, "Provider");
        let pools = namespace.custom(VERSION, "WorkerPool");
        Self { namespace, providers, pools }
    }

    /// Creates the Provider and waits until it is ready.
    pub(crate) async fn ready(spec: &Value) -> Self {
        let setup = Self::empty().await;
        setup.provide(spec).await;
        setup.condition("Ready", "True").await;
        setup
    }

    /// Creates the Provider and a connected pool that runs one demo backend.
    pub(crate) async fn serving(spec: &Value) -> Self {
        let setup = Self::empty().await;
        setup.provide(spec).await;
        setup.namespace.apply(&[manifests::worker_pool("llama", &manifests::demo_pool(LOCAL))]).await;
        setup.condition("Ready", "True").await;
        setup.connected().await;
        setup
    }

    /// Applies the Provider with this spec, without waiting.
    pub(crate) async fn provide(&self, spec: &Value) {
        self.namespace.apply(&[manifests::provider(LOCAL, spec)]).await;
    }

    /// Waits for a condition of the Provider, for its latest generation.
    pub(crate) async fn condition(&self, kind: &str, status: &str) -> DynamicObject {
        self.namespace.wait_for_condition(&self.providers, LOCAL, kind, status).await
    }

    /// Waits for a condition with this reason.
    pub(crate) async fn reason(&self, kind: &str, status: &str, reason: &str) -> DynamicObject {
        let what = format!("{kind}={status} because of {reason}");
        let holds = |object: &DynamicObject| {
            let it = condition_of(object, kind);
            (&it["status"], &it["reason"]) == (&json!(status), &json!(reason))
                && it["observedGeneration"].as_i64() == object.metadata.generation
        };
        self.namespace.wait_for(&self.providers, LOCAL, &what, holds).await
    }

    /// Waits until the pool is ready, which requires a worker that the relay knows.
    pub(crate) async fn connected(&self) {
        self.namespace.wait_for_condition(&self.pools, "llama", "Ready", "True").await;
    }

    /// Returns the relay's Pods.
    pub(crate) async fn relays(&self) -> Vec<v1::Pod> {
        self.namespace.pods(&format!("app.kubernetes.io/component=relay,modelrelay.io/provider={LOCAL}")).await
    }

    /// Sends requests until three have succeeded, and checks each response word by word; none may fail.
    pub(crate) async fn answers(&self, key: Option<&str>) {
        let traffic = Traffic::to(self.namespace.service_address(LOCAL).await).streams(2).words(10);
        let traffic = key.into_iter().fold(traffic, Traffic::api_key).start();
        traffic.wait_for_answers(3).await;
        traffic.finish().await.expect_all_answered();
    }

    /// Sends one request to the Service.
    pub(crate) async fn send_request(&self, path: &str, headers: &[(&str, &str)]) -> Reply {
        let service = self.namespace.service_address(LOCAL).await;
        let body = json!({"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
        fetch(service, &format!("POST {path}"), headers, &body).await.expect("the Service answers")
    }

    /// Sends a request to the admin API of one relay, with the token that the operator created.
    pub(crate) async fn admin(&self, relay: &v1::Pod, what: &str, body: &Value) -> Reply {
        let token = self.secret("local-admin").await["token"].clone();
        let bearer = format!("Bearer {token}");
        let address = address_of(relay, 8082);
        fetch(address, what, &[("authorization", &bearer)], body).await.expect("the admin API responds")
    }

    /// Creates an API key at one relay; returns its id and the key.
    pub(crate) async fn make_key(&self, relay: &v1::Pod) -> (String, String) {
        let made = self.admin(relay, "POST /admin/keys", &json!({"name": "a client"})).await;
        assert_eq!(made.status, 201, "{made:?}");
        let text = |name: &str| made.json()[name].as_str().expect("the response contains it").to_owned();
        (text("id"), text("secret"))
    }

    /// Waits until a relay responds to `GET /v1/models` with this status for this key.
    pub(crate) async fn wait_for_status(&self, relay: &v1::Pod, key: &str, status: u16) {
        let address = address_of(relay, 8080);
        let bearer = format!("Bearer {key}");
        let what = format!("{status} for that key from Pod {}", relay.name_any());
        // A kubelet without the annotation would take up to a minute.
        wait_until(&what, TEST_TIMEOUT / 4, async || {
            let reply = fetch(address, "GET /v1/models", &[("authorization", &bearer)], &Value::Null).await;
            reply.is_ok_and(|reply| reply.status == status)
        })
        .await;
    }

    /// Returns the values of a Secret.
    pub(crate) async fn secret(&self, name: &str) -> BTreeMap<String, String> {
        let secret = self.namespace.api::<v1::Secret>().get(name).await;
        let data = secret.unwrap_or_else(|error| panic!("no Secret {name}: {error}")).data.unwrap_or_default();
        data.into_iter().map(|(key, value)| (key, String::from_utf8(value.0).expect("text"))).collect()
    }

    /// Returns all objects that the operator created here, Pods included: kind, name and uid.
    pub(crate) async fn everything(&self) -> Vec<String> {
        let kinds = [
            ("v1", "Pod"),
            ("v1", "Service"),
            ("v1", "Secret"),
            ("v1", "ConfigMap"),
            ("v1", "ServiceAccount"),
            ("apps/v1", "Deployment"),
            ("policy/v1", "PodDisruptionBudget"),
            ("networking.k8s.io/v1", "NetworkPolicy"),
        ];
        let mut all = Vec::new();
        for (version, kind) in kinds {
            let (group, version) = version.split_once('/').unwrap_or(("", version));
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.namespace.cluster.client.clone(), &self.namespace.name, &resource);
            let managed = ListParams::default().labels("app.kubernetes.io/managed-by=modelrelay-operator");
            let found = api.list(&managed).await.expect("it can be listed").items;
            all.extend(found.iter().map(|it| format!("{kind} {} {}", it.name_any(), it.uid().unwrap_or_default())));
        }
        all.sort();
        all
    }

    pub(crate) async fn deployment(&self) -> Deployment {
        self.namespace.api::<Deployment>().get("local-relay").await.expect("the relay's Deployment exists")
    }

    /// Changes the Provider's spec by a merge patch.
    pub(crate) async fn patch(&self, spec: &Value) {
        let patch = json!({"spec": spec}).to_string();
        self.namespace.kubectl("patch provider local --type merge --patch").arg(patch).await;
    }
}

/// Returns a condition, or null.
pub(crate) fn condition_of(object: &DynamicObject, kind: &str) -> Value {
    let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
}

/// Returns the message of a condition.
pub(crate) fn message_of(object: &DynamicObject, kind: &str) -> String {
    condition_of(object, kind)["message"].as_str().unwrap_or_default().to_owned()
}

/// Returns the address of a Pod's port, which this machine reaches.
pub(crate) fn address_of(pod: &v1::Pod, port: u16) -> SocketAddr {
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).expect("the Pod has an address");
    SocketAddr::new(ip.parse().expect("an IP address"), port)
}
