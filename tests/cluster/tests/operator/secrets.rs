//! Secret values never appear in logs, events and status: every secret of a Provider that uses them all.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, ResourceExt, api::ListParams};
use modelrelay_cluster::http::fetch;
use modelrelay_cluster::manifests::{DEMO_MODEL, demo_backend, provider, worker_pool};
use modelrelay_cluster::traffic::Traffic;
use modelrelay_cluster::{Cluster, Namespace, SYSTEM_NAMESPACE, TEST_TIMEOUT, wait_until};
use serde_json::{Value, json};

use super::replicas::Operator;

/// Credentials of an unauthorized client: no log needs them either.
const WRONG_KEY: &str = "sk-mr-9f7d11aa0c5e4b73b6e2wrongkey";
const WRONG_TOKEN: &str = "7c1fb0e2d9a94835wrongtoken";

#[tokio::test]
async fn no_secret_is_exposed() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("secrets").await;
    let operator = Operator::settled(&cluster).await;
    let key = use_every_secret(&namespace).await;

    let mut hidden = secrets(&namespace, "modelrelay.io/provider=local").await;
    assert!(hidden.iter().any(|(of, _)| of.starts_with("local-worker/")), "no worker secret: {hidden:?}");
    assert!(hidden.iter().any(|(of, _)| of.starts_with("local-admin/")), "no admin token");
    assert!(hidden.iter().any(|(of, _)| of.starts_with("local-relay/worker-secret-previous")), "no secret was rotated");
    hidden.push(("the API key".to_owned(), key));
    hidden.push(("a wrong API key".to_owned(), WRONG_KEY.to_owned()));
    hidden.push(("a wrong token".to_owned(), WRONG_TOKEN.to_owned()));
    hidden.push(("the drain token".to_owned(), drain_token(&namespace).await));
    hidden.extend(certificate_keys(&cluster).await);

    let mut outputs = logs(&namespace).await;
    for pod in operator.pods().await {
        let logs = format!("--namespace {SYSTEM_NAMESPACE} logs {}", pod.name_any());
        outputs.push((pod.name_any(), cluster.kubectl(&logs).await));
    }
    outputs.push(("events".to_owned(), namespace.kubectl("get events --output json").await));
    outputs.push(("status".to_owned(), status_of_everything(&namespace).await));
    for (place, words) in
        [("local-relay", "API key created"), ("vllm", "advertised models"), ("status", "\"workers\":1")]
    {
        let written = outputs.iter().filter(|(name, _)| name.starts_with(place)).any(|(_, text)| text.contains(words));
        assert!(written, "{place} does not contain {words:?}, so the search is not valid");
    }
    for (what, value) in &hidden {
        assert!(value.len() >= 16, "{what} is too short to search for: {} characters", value.len());
        for (place, text) in &outputs {
            assert!(!text.contains(value), "{place} discloses {what}");
            assert!(!text.contains(&base64(value.as_bytes())), "{place} discloses {what}, in base64");
        }
    }
}

/// Uses a Provider that requires keys, an injected worker, clients and administrators with right and wrong secrets, and
/// a rotation, with verbose logs. Returns the client's key.
async fn use_every_secret(namespace: &Namespace) -> String {
    let pool = json!({"provider": "local", "sidecar": {"logLevel": "debug"}});
    let relay = json!({"requireApiKeys": true, "logLevel": "debug"});
    namespace.apply(&[provider("local", &json!({"relay": relay})), worker_pool("llama", &pool)]).await;
    let mut backend = demo_backend("vllm", 1);
    backend[0]["spec"]["template"]["metadata"]["labels"]["modelrelay.io/pool"] = json!("llama");
    namespace.apply(&backend).await;
    let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
    namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
    let service = namespace.service_address("local").await;
    let key = make_key(namespace).await;
    let reached = async |key: &str| models_status(service, key).await;
    wait_until("the relay to take the key", TEST_TIMEOUT, async || reached(&key).await == 200).await;
    assert_eq!(reached(WRONG_KEY).await, 401);

    let pools = namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
    let connected = |pool: &kube::api::DynamicObject| pool.data["status"]["connected"] == 1;
    namespace.wait_for(&pools, "llama", "a connected worker", connected).await;
    let traffic = Traffic::to(service).streams(2).words(5).api_key(&key).start();
    traffic.wait_for_answers(4).await;
    namespace.kubectl("annotate provider local modelrelay.io/rotate=now").await;
    let rotated = |provider: &kube::api::DynamicObject| {
        provider.data["status"]["workerSecret"]["previousUntil"].is_string() && provider.data["status"]["workers"] == 1
    };
    namespace.wait_for(&providers, "local", "the worker secret to be rotated", rotated).await;
    traffic.wait_for_answers(4).await;
    traffic.finish().await.expect_all_answered();
    key
}

async fn models_status(service: SocketAddr, key: &str) -> u16 {
    let bearer = format!("Bearer {key}");
    let body = json!({"model": DEMO_MODEL, "messages": []});
    let headers = [("authorization", bearer.as_str())];
    let Ok(refused) = fetch(service, "GET /v1/models", &headers, &Value::Null).await else { return 0 };
    let _ = fetch(service, "POST /v1/chat/completions", &headers, &body).await;
    refused.status
}

/// Creates an API key through the admin API of the relay's Pod, which rejects a wrong token.
async fn make_key(namespace: &Namespace) -> String {
    let pods = namespace.pods("modelrelay.io/provider=local,app.kubernetes.io/component=relay").await;
    let ip = pods.first().and_then(|pod| pod.status.as_ref()?.pod_ip.clone()).expect("the relay's Pod has an address");
    let admin = SocketAddr::new(ip.parse().expect("an address"), 8082);
    let token = namespace.api::<Secret>().get("local-admin").await.expect("the operator makes the admin token");
    let token = token.data.and_then(|mut data| data.remove("token")).expect("its key is token").0;
    let token = format!("Bearer {}", String::from_utf8_lossy(&token));
    let wrong = format!("Bearer {WRONG_TOKEN}");
    let body = json!({"name": "a client"});
    let refused = fetch(admin, "POST /admin/keys", &[("authorization", &wrong)], &body).await;
    assert_eq!(refused.expect("the relay responds").status, 403);
    let made = fetch(admin, "POST /admin/keys", &[("authorization", &token)], &body).await.expect("the relay responds");
    made.json()["secret"].as_str().unwrap_or_else(|| panic!("no key was made: {}", made.status)).to_owned()
}

/// Returns every value of the Secrets with these labels that is secret as a whole, by Secret and key.
async fn secrets(namespace: &Namespace, labels: &str) -> Vec<(String, String)> {
    let list = namespace.api::<Secret>().list(&ListParams::default().labels(labels)).await;
    let mut values = Vec::new();
    for secret in list.expect("Secrets can be listed").items {
        let name = secret.name_any();
        for (key, value) in secret.data.unwrap_or_default() {
            // The relay's configuration is not secret; the secrets that it names are separate keys.
            if key != "relay.yaml" {
                values.push((format!("{name}/{key}"), String::from_utf8_lossy(&value.0).into_owned()));
            }
        }
    }
    values
}

async fn drain_token(namespace: &Namespace) -> String {
    let pods: Vec<Pod> = namespace.pods("app=vllm").await;
    let spec = pods.first().and_then(|pod| pod.spec.as_ref()).expect("the backend has a Pod");
    let worker = spec.init_containers.iter().flatten().find(|container| container.name == "modelrelay-worker");
    let env = worker.and_then(|worker| worker.env.as_ref()).expect("the Pod has a worker");
    let token = env.iter().find(|variable| variable.name == "DRAIN_TOKEN").and_then(|variable| variable.value.clone());
    token.expect("the worker has a drain token")
}

/// Returns the private keys of the webhook, without their headers.
async fn certificate_keys(cluster: &Cluster) -> Vec<(String, String)> {
    let secrets = Api::<Secret>::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let secret = secrets.get("modelrelay-webhook-certificate").await.expect("the operator created its certificate");
    let data = secret.data.unwrap_or_default();
    let keys = ["tls.key", "ca.key"].map(|key| {
        let text = String::from_utf8_lossy(&data.get(key).expect("it holds its keys").0).into_owned();
        (format!("the webhook's {key}"), text.lines().nth(1).unwrap_or_default().to_owned())
    });
    keys.to_vec()
}

/// Returns the logs of every container in the namespace, by Pod.
async fn logs(namespace: &Namespace) -> Vec<(String, String)> {
    let mut logs = Vec::new();
    for pod in namespace.api::<Pod>().list(&ListParams::default()).await.expect("Pods can be listed").items {
        let name = pod.name_any();
        let text = namespace.kubectl(&format!("logs {name} --all-containers")).await;
        logs.push((name, text));
    }
    logs
}

/// Returns the status of every object in the namespace that has one.
async fn status_of_everything(namespace: &Namespace) -> String {
    let kinds = namespace.kubectl("api-resources --namespaced --verbs list --output name").await;
    let kinds: Vec<&str> = kinds.lines().filter(|kind| !kind.contains("metrics.k8s.io")).collect();
    let objects = namespace.kubectl(&format!("get {} --output json", kinds.join(","))).await;
    let objects: Value = serde_json::from_str(&objects).expect("kubectl writes JSON");
    let statuses = objects["items"].as_array().into_iter().flatten().map(|object| object["status"].clone());
    Value::Array(statuses.filter(|status| !status.is_null()).collect()).to_string()
}

fn base64(bytes: &[u8]) -> String {
    let encoded = k8s_openapi::ByteString(bytes.to_owned());
    serde_json::to_value(encoded).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}
