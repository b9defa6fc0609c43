//! A slot's backend that is healthy but fails every request.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::{Stack, wait_for_model};
use serde_json::json;

use crate::rig::worker_with;

#[tokio::test]
async fn slot_failing_every_request_is_ejected() {
    let relay = Relay::start().await;
    let failing = FakeBackend::start().await;
    failing.answer_with(|_, _| Answer::json(500, &json!({"error": {"message": "CUDA error"}})));
    let models =
        json!([{"id": "real", "aliases": ["m"], "url": failing.url(), "maxConcurrency": 4, "expectModel": "m"}]);
    let slots = json!([{"id": "gpu0", "driver": "static", "default": "real", "models": models}]);
    let (_config, builder) = worker_with(&json!({"multiplexer": {"slots": slots}}).to_string());
    let url = format!("http://{}", relay.addr());
    let slotted = builder.relay(url).env("WORKER_SECRET", WORKER_SECRET).start().await;
    wait_for_model(&relay, "m").await;
    let send = |model: &str| relay.fetch(Request::post("/v1/chat/completions", &json!({"model": model})));
    for _ in 0..5 {
        assert_eq!(send("m").await.status, 500);
    }
    slotted.process.wait_for_line("the backend fails every request for the model").await;
    assert_eq!(slotted.probe("/healthz").await.json()["failing_models"], json!(["real", "m"]));
    assert_eq!(send("real").await.status, 500, "no other worker serves this name");

    let sound = FakeBackend::start().await;
    sound.answer_with(|_, _| Answer::json(200, &json!({"served": true})));
    let _plain = Stack::worker_of(&relay, &sound).start().await;
    let serves = || async {
        relay
            .workers()
            .await
            .iter()
            .filter(|it| it["models"].as_array().is_some_and(|all| all.contains(&json!("m"))))
            .count()
            == 2
    };
    relay.eventually("two workers with model m", serves).await;
    for _ in 0..8 {
        assert_eq!(send("m").await.status, 200);
    }
}
