//! Limits and capabilities that a backend lists appear in the relay's list.

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::{Stack, WorkerBuilder, wait_for_model};
use serde_json::{Value, json};

async fn listed(relay: &Relay, field: &str) -> Value {
    relay.get("/v1/models/m").await.with_status(200).json()[field].clone()
}

async fn wait_for(relay: &Relay, field: &str, wanted: Value) {
    relay.eventually(&format!("m has the {field} {wanted}"), || async { listed(relay, field).await == wanted }).await;
}

/// A worker that advertises the models that its backend lists.
fn worker_of(relay: &Relay, backend: &FakeBackend) -> WorkerBuilder {
    Stack::worker_of(relay, backend).models("*")
}

async fn backend(details: &Value) -> FakeBackend {
    let backend = FakeBackend::start().await;
    backend.set_details(details);
    backend
}

#[tokio::test]
async fn details_of_two_backends_are_merged() {
    let relay = Relay::start().await;
    let hostile = "x".repeat(100_000);
    let large = backend(&json!({"max_model_len": 40960, "capabilities": ["tools", "vision"], "root": hostile})).await;
    let _first = worker_of(&relay, &large).start().await;
    wait_for_model(&relay, "m").await;
    wait_for(&relay, "max_model_len", json!(40960)).await;
    let small = backend(&json!({"max_model_len": 32768, "capabilities": ["tools"], "owned_by": ["evil"]})).await;
    let _second = worker_of(&relay, &small).start().await;
    wait_for(&relay, "max_model_len", json!(32768)).await;
    assert_eq!(listed(&relay, "capabilities").await, json!(["tools"]));
    assert_eq!((listed(&relay, "root").await, listed(&relay, "owned_by").await), (Value::Null, json!("local")));
}

#[tokio::test]
async fn change_of_details_alone_reaches_relay() {
    let relay = Relay::start().await;
    let backend = backend(&json!({"meta": {"n_ctx": 4096}})).await;
    let worker = worker_of(&relay, &backend).start().await;
    wait_for_model(&relay, "m").await;
    wait_for(&relay, "meta", json!({"n_ctx": 4096})).await;
    backend.set_details(&json!({"meta": {"n_ctx": 8192}}));
    let id = relay.workers().await[0]["worker_id"].as_str().expect("an id").to_owned();
    relay.admin("POST", &format!("/admin/workers/{id}/refresh")).await;
    wait_for(&relay, "meta", json!({"n_ctx": 8192})).await;
    worker.process.wait_for_line("details of advertised models changed").await;
}
