//! With a real relay: clients request both models, and each is served by its own backend.

use std::time::Duration;

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::wait_for_model;
use serde_json::{Value, json};

use modelrelay_harness::worker_process::WorkerProcess;
use tempfile::NamedTempFile;

use crate::rig::worker_with;

/// A relay and a worker whose one slot has models `a` and `b`, at these backends.
struct Both {
    relay: Relay,
    worker: WorkerProcess,
    _config: NamedTempFile,
}

impl Both {
    async fn start(drain_timeout: &str, a: &FakeBackend, b: &FakeBackend) -> Self {
        let relay = Relay::start().await;
        let model = |id: &str, url: String| json!({"id": id, "url": url, "maxConcurrency": 2});
        let models = [model("a", a.url()), model("b", b.url())];
        let slots = json!([{"id": "gpu0", "driver": "static", "models": models}]);
        let knobs = json!({"minResidency": "1ms", "linger": "off", "drainTimeout": drain_timeout, "slots": slots});
        let (config, builder) = worker_with(&json!({"multiplexer": knobs}).to_string());
        let url = format!("http://{}", relay.addr());
        let worker = builder.relay(url).env("WORKER_SECRET", WORKER_SECRET).start().await;
        wait_for_model(&relay, "b").await;
        Self { relay, worker, _config: config }
    }
}

/// A backend that responds with the name of its model.
async fn backend(model: &'static str) -> FakeBackend {
    let backend = FakeBackend::with_models(&[model]).await;
    backend.answer_with(move |_, _| Answer::json(200, &json!({"served_by": model})));
    backend
}

fn chat(model: &str) -> Request {
    Request::post("/v1/chat/completions", &json!({"model": model, "messages": []}))
}

#[tokio::test]
async fn clients_of_both_models_are_served_alternately() {
    let (a, b) = (backend("a").await, backend("b").await);
    let Both { relay, worker, _config } = Both::start("30s", &a, &b).await;
    for model in ["a", "b", "a"] {
        let reply = relay.fetch(chat(model)).await.with_status(200);
        assert_eq!(reply.json()["served_by"], model);
    }
    let models: Vec<_> = (0..12).map(|n| if n % 2 == 0 { "a" } else { "b" }).collect();
    let pending: Vec<_> = models.iter().map(|model| (model, relay.begin(chat(model)))).collect();
    for (model, pending) in pending {
        assert_eq!(pending.reply().await.with_status(200).json()["served_by"], Value::from(*model));
    }
    assert!(worker.metric("modelrelay_worker_swaps_total{").await >= 3.0);
}

#[tokio::test]
async fn request_severed_before_its_response_is_requeued() {
    let (mut a, b) = (FakeBackend::with_models(&["a"]).await, backend("b").await);
    let Both { relay, worker, _config } = Both::start("0s", &a, &b).await;
    let pending = relay.begin(chat("a"));
    let mut severed = a.call().await;
    assert_eq!(relay.fetch(chat("b")).await.with_status(200).json()["served_by"], "b");
    severed.closed().await;
    a.call().await.answer_json(200, &json!({"served_by": "a"})).await;
    assert_eq!(pending.reply().await.with_status(200).json()["served_by"], "a");
    assert_eq!(worker.metric("modelrelay_worker_severed_total").await, 1.0);
}

/// The relay treats its only worker as failed for the request until the worker reports that its backend works after
/// all.
#[tokio::test]
async fn request_with_broken_connection_is_requeued() {
    let (mut a, b) = (FakeBackend::with_models(&["a"]).await, backend("b").await);
    let Both { relay, worker: _worker, _config } = Both::start("30s", &a, &b).await;
    let pending = relay.begin(chat("a"));
    a.call().await.reset();
    let again = a.call_within(Duration::from_secs(10)).await.expect("the request is sent again");
    again.answer_json(200, &json!({"served_by": "a"})).await;
    assert_eq!(pending.reply().await.with_status(200).json()["served_by"], "a");
}

#[tokio::test]
async fn severed_stream_reports_error_in_client_dialect() {
    let (mut a, b) = (FakeBackend::with_models(&["a"]).await, backend("b").await);
    let Both { relay, worker: _worker, _config } = Both::start("0s", &a, &b).await;
    for (path, code) in [("/v1/chat/completions", "severed_by_swap"), ("/v1/messages", "overloaded_error")] {
        let body =
            json!({"model": "a", "stream": true, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]});
        let pending = relay.begin(Request::post(path, &body));
        let mut call = a.call().await;
        call.start_stream().await;
        call.chunk(b"data: {\"text\": \"first\"}\n\n").await;
        let mut response = pending.response().await;
        response.read_until("first").await;
        assert_eq!(relay.fetch(chat("b")).await.with_status(200).json()["served_by"], "b");
        let reply = response.read_to_end().await;
        assert!(reply.broken_stream().contains(code), "{}", reply.text());
        call.closed().await;
    }
}
