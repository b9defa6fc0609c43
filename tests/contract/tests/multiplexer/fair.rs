//! With a real relay and API keys: which model a busy slot loads next.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::wait_for_model;
use serde_json::json;

use crate::rig::worker_with;

fn chat(model: &str, key: &str) -> Request {
    Request::post("/v1/chat/completions", &json!({"model": model, "messages": []})).bearer(key)
}

async fn new_key(relay: &Relay, name: &str, class: &str) -> String {
    let key = relay.admin_post("/admin/keys", &json!({"name": name, "class": class})).await.with_status(201).json();
    key["secret"].as_str().expect("a secret").to_owned()
}

#[tokio::test]
async fn chat_for_third_model_precedes_batch_for_second() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let (job, person) = (new_key(&relay, "job", "batch").await, new_key(&relay, "person", "interactive").await);
    let mut backends = Vec::new();
    for model in ["a", "b", "c"] {
        backends.push(FakeBackend::with_models(&[model]).await);
    }
    let [a, b, c] = &mut backends[..] else { unreachable!("three backends") };
    let model = |id: &str, backend: &FakeBackend| json!({"id": id, "url": backend.url(), "maxConcurrency": 8});
    let slot = json!({"id": "gpu0", "driver": "static", "models": [model("a", a), model("b", b), model("c", c)]});
    let knobs = json!({"minResidency": "1ms", "linger": "off", "drainTimeout": "300s", "slots": [slot]});
    let (_config, builder) = worker_with(&json!({"multiplexer": knobs}).to_string());
    let url = format!("http://{}", relay.addr());
    let worker = builder.relay(url).env("WORKER_SECRET", WORKER_SECRET).start().await;

    wait_for_model(&relay, "c").await;
    let mut clients = vec![relay.begin(chat("a", &job))];
    let running = a.call().await;
    clients.extend((0..5).map(|_| relay.begin(chat("b", &job))));
    relay
        .eventually("the batch waits", async || worker.metric(r#"modelrelay_worker_waiting{model="b"}"#).await == 5.0)
        .await;
    clients.push(relay.begin(chat("c", &person)));
    relay
        .eventually("the chat waits", async || worker.metric(r#"modelrelay_worker_waiting{model="c"}"#).await == 1.0)
        .await;
    // A swap that had begun for the batch gets a new target, once that was checked.
    let target = || async { worker.probe("/healthz").await.json()["slots"][0]["target"].clone() };
    relay.eventually("the chat's model is next", async || target().await == "c").await;
    running.answer_json(200, &json!({})).await;
    let answered_first = c.call().await;
    assert_eq!(b.request_count("/v1/chat/completions"), 0, "the batch still waits");
    answered_first.answer_json(200, &json!({})).await;
    for _ in 0..5 {
        b.call().await.answer_json(200, &json!({})).await;
    }
    for client in clients {
        client.reply().await.with_status(200);
    }
}
