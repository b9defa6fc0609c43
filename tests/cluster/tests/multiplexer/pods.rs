//! Slots inside Pods: engines in their own containers, and engines that the worker starts.

use std::time::{Duration, Instant};

use modelrelay_cluster::manifests;
use serde_json::{Value, json};

use super::setup::{Setup, quick};

/// A Pod with two engines, each a container with a port, which gets its worker by injection.
fn two_engines(pool: &str) -> Value {
    let engine = |model: &str, port: u16| {
        let mut container = manifests::demo_container();
        container["name"] = json!(model);
        container["args"] = json!(["demo", "--listen", format!("0.0.0.0:{port}"), "--model", model]);
        container["ports"] = json!([{"containerPort": port}]);
        container["readinessProbe"]["httpGet"]["port"] = json!(port);
        container
    };
    let mut backend = manifests::demo_backend("pair", 1).swap_remove(0);
    let template = &mut backend["spec"]["template"];
    template["metadata"]["labels"]["modelrelay.io/pool"] = json!(pool);
    template["spec"]["containers"] = json!([engine("alpha", 8001), engine("beta", 8002)]);
    backend
}

#[tokio::test]
async fn injected_worker_swaps_between_containers_of_its_pod() {
    let model = |id: &str, port: u16| json!({"id": id, "url": format!("http://127.0.0.1:{port}"), "maxConcurrency": 4});
    let slot = json!({"id": "gpu0", "driver": "static", "models": [model("alpha", 8001), model("beta", 8002)]});
    let pool = json!({"provider": "local", "shutdownTimeout": "10s", "multiplexer": quick(&slot)});
    let setup = Setup::start("mux-injected", &pool, &[two_engines(super::setup::POOL)]).await;
    setup.swaps_between("alpha", "beta", 4).await;
    setup.answers("alpha").await;
    setup.resident("alpha").await;
    // Whichever container ends first, its running requests can finish.
    let pod = setup.namespace.pods("app=pair").await.remove(0);
    let containers = pod.spec.expect("Pods have a spec").containers;
    assert!(containers.iter().all(|container| container.lifecycle.is_some()), "each engine waits for its requests");
}

/// A pool whose one Pod is a worker that starts its engines itself, `alpha` first.
fn processes() -> Value {
    let program = "/modelrelay-worker";
    let model = |id: &str| {
        let command = json!([program, "demo", "--listen", "127.0.0.1:${PORT}", "--model", id]);
        json!({"id": id, "command": command, "maxConcurrency": 4})
    };
    let slot =
        json!({"id": "gpu0", "driver": "process", "default": "alpha", "models": [model("alpha"), model("beta")]});
    // The engines' image: in production it is vLLM's, and the worker's program is copied into it.
    let container = json!({
        "name": "modelrelay-worker", "image": manifests::WORKER_IMAGE, "imagePullPolicy": "Never",
        "securityContext": manifests::container_security(),
    });
    let template = json!({"spec": {"automountServiceAccountToken": false, "containers": [container]}});
    json!({
        "provider": "local", "replicas": 1, "shutdownTimeout": "10s", "multiplexer": quick(&slot), "template": template,
    })
}

#[tokio::test]
async fn template_worker_starts_and_ends_engines() {
    let setup = Setup::start("mux-process", &processes(), &[]).await;
    setup.resident("alpha").await;
    setup.swaps_between("alpha", "beta", 4).await;
    setup.answers("beta").await;
    setup.resident("beta").await;
}

/// Without a catalogue, a worker that serves it could still connect.
#[tokio::test]
async fn unknown_model_is_rejected_and_unloads_nothing() {
    let provider = json!({"queue": {"timeout": "60s"}});
    let setup = Setup::start_at(&provider, "mux-open", &processes(), &[]).await;
    setup.resident("alpha").await;
    let start = Instant::now();
    let (status, error) = setup.refused("unheard-of").await;
    assert_eq!((status, &error["code"]), (404, &json!("model_not_found")), "{error}");
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    setup.resident("alpha").await;
    setup.swaps_between("alpha", "beta", 1).await;
}

#[tokio::test]
async fn model_outside_catalogue_is_rejected_immediately() {
    let provider =
        json!({"models": [{"id": "alpha", "aliases": ["first"]}, {"id": "beta"}], "queue": {"timeout": "60s"}});
    let setup = Setup::start_at(&provider, "mux-catalogue", &processes(), &[]).await;
    setup.resident("alpha").await;
    let start = Instant::now();
    let (status, error) = setup.refused("unheard-of").await;
    assert_eq!((status, &error["code"]), (404, &json!("model_not_found")), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    setup.swaps_between("first", "beta", 2).await;
}
