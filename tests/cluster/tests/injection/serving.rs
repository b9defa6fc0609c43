//! Injected Pods serve, and only authorized callers can drain them.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::Pod;
use modelrelay_cluster::{http::fetch, manifests, traffic::Traffic};
use serde_json::{Value, json};

use super::setup::{Setup, deployment, drain_token, json_of, pod, worker};

#[tokio::test]
async fn labelled_pod_gets_sidecar_and_serves() {
    let setup = Setup::provided(&json!({})).await;
    setup.namespace.apply(&[pod("vllm", "llama")]).await;
    let running = json_of(&setup.running("vllm").await);
    let (list, sidecar) = worker(&running).expect("the Pod has a worker");
    assert_eq!((list, &sidecar["restartPolicy"]), ("initContainers", &json!("Always")));
    assert_eq!(sidecar["image"], manifests::WORKER_IMAGE);
    let hook = &running["spec"]["containers"][0]["lifecycle"]["preStop"]["httpGet"];
    assert_eq!((&hook["path"], &hook["port"]), (&json!("/drain"), &json!(17990)));
    // 10 s for requests, 20 s for the backend to end, 10 s for the rest.
    assert_eq!(running["spec"]["terminationGracePeriodSeconds"], 40);
    // The worker cannot read the ServiceAccount's token, which the backend has.
    let token = "/var/run/secrets/kubernetes.io/serviceaccount";
    let mounted = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().cloned().unwrap_or_default();
        let mount = mounts.into_iter().find(|mount| mount["mountPath"] == token).expect("a volume is mounted there");
        mount["name"].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(mounted(sidecar), "modelrelay-no-token");
    assert!(mounted(&running["spec"]["containers"][0]).starts_with("kube-api-access-"));
    setup.reason("True", "Serving").await;
    let selector = "modelrelay.io/pool=llama";
    let wanted = json!({
        "mode": "Inject", "selector": selector, "replicas": 1, "injected": 1, "connected": 1, "outdated": 0, "modelCount": 1,
        "models": ["demo"], "notInjected": null,
    });
    setup.status(&wanted).await;
    setup.answers().await;
}

#[tokio::test]
async fn worker_may_be_plain_container() {
    let setup = Setup::provided(&json!({"injectMode": "Container"})).await;
    setup.namespace.apply(&[pod("vllm", "llama")]).await;
    let running = json_of(&setup.running("vllm").await);
    let (list, container) = worker(&running).expect("the Pod has a worker");
    assert_eq!((list, container.get("restartPolicy")), ("containers", None));
    assert_eq!(running["spec"].get("initContainers"), None);
    setup.reason("True", "Serving").await;
    setup.status(&json!({"injected": 1, "connected": 1})).await;
    setup.answers().await;
}

#[tokio::test]
async fn backend_with_own_hook_receives_no_new_requests() {
    let setup = Setup::provided(&json!({"maxConcurrency": 16})).await;
    let mut backend = deployment("vllm", "llama", 2);
    // Longer than one response takes, and shorter than two in sequence.
    backend["spec"]["template"]["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 6}}});
    setup.namespace.apply(&[backend]).await;
    setup.namespace.rolled_out("deployment/vllm").await;
    setup.status(&json!({"connected": 2})).await;
    let traffic = Traffic::to(setup.namespace.service_address("local").await).streams(12).words(60).start();
    traffic.wait_for_underway(12).await;
    let leaving = setup.namespace.pod_names("app=vllm").await.remove(0);
    setup.namespace.kubectl(&format!("delete pod {leaving} --wait=true")).await;
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn pod_drain_requires_its_own_token() {
    let setup = Setup::provided(&json!({})).await;
    setup.namespace.apply(&[deployment("vllm", "llama", 2)]).await;
    setup.namespace.rolled_out("deployment/vllm").await;
    let pods = setup.namespace.pods("app=vllm").await;
    let [one, other] = pods.as_slice() else { panic!("two Pods, not {}", pods.len()) };
    let tokens = [one, other].map(|pod| drain_token(&json_of(pod)));
    assert_ne!(tokens[0], tokens[1]);
    for (pod, token) in [one, other].into_iter().zip(&tokens) {
        assert!(token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit()), "a weak token");
        let hook = &json_of(pod)["spec"]["containers"][0]["lifecycle"]["preStop"]["httpGet"];
        assert_eq!(hook["httpHeaders"], json!([{"name": "x-modelrelay-drain-token", "value": token}]));
    }
    setup.status(&json!({"connected": 2})).await;

    let drain = async |token: Option<&str>| {
        let headers: Vec<(&str, &str)> = token.into_iter().map(|token| ("x-modelrelay-drain-token", token)).collect();
        let reply = fetch(sidecar_of(one), "GET /drain", &headers, &Value::Null).await.expect("the worker responds");
        reply.status
    };
    assert_eq!((drain(None).await, drain(Some("")).await, drain(Some(&tokens[1])).await), (403, 403, 403));
    assert_eq!(draining(one).await, Value::Null);
    setup.answers().await;
    assert_eq!(drain(Some(&tokens[0])).await, 200);
    assert_ne!(draining(one).await, Value::Null);
    // The other one continues.
    assert_eq!(draining(other).await, Value::Null);
    setup.answers().await;
}

fn sidecar_of(pod: &Pod) -> SocketAddr {
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).expect("the Pod has an address");
    SocketAddr::new(ip.parse().expect("an IP address"), 17990)
}

/// Returns the drain state that a worker reports: null while it is not draining.
async fn draining(pod: &Pod) -> Value {
    let health = fetch(sidecar_of(pod), "GET /healthz", &[], &Value::Null).await.expect("the worker responds").json();
    health.get("drain").expect("health reports the drain state").clone()
}
