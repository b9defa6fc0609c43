//! `/drain` of a worker with slots whose backends are started externally.

use std::time::Duration;

use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use serde_json::json;

use crate::rig::{LONG, Rig, chat, demand, gate, slots1};

async fn serving(backend: &FakeBackend) -> Rig {
    backend.answer_with(|_, _| Answer::json(200, &json!({"served": true})));
    let models = json!([{"id": "m", "url": backend.url(), "maxConcurrency": 2}]);
    let slots = json!([{"id": "gpu0", "driver": "static", "models": models}]);
    let mut rig = Rig::with(&slots1(), &json!({"multiplexer": {"slots": slots}}).to_string()).await;
    demand(&rig.link, "m", 1);
    gate(&mut rig.link, "m").await;
    rig
}

#[tokio::test]
async fn drain_is_reverted_after_backend_of_slot_returns() {
    let mut backend = FakeBackend::start().await;
    let mut rig = serving(&backend).await;
    let drained = async {
        rig.link.expect("drain").await;
        rig.link.send(&json!({"type": "graceful_shutdown", "reason": "drain"}));
        rig.link.closed().await;
    };
    tokio::join!(rig.worker.drain(), drained);
    let quiet = rig.relay.dial_within(Duration::from_secs(2)).await;
    assert!(quiet.is_none(), "the worker dialled while its backend was about to stop");
    backend.refuse().await;
    let quiet = rig.relay.dial_within(Duration::from_secs(2)).await;
    assert!(quiet.is_none(), "the worker dialled while its backend was down");
    backend.reopen();
    rig.link = rig.relay.accept_with(&slots1()).await;
    demand(&rig.link, "m", 1);
    gate(&mut rig.link, "m").await;
    let request = rig.link.send_request(&chat("m"));
    assert_eq!(rig.link.reply_within(LONG, &request).await.expect("a response").status, 200);
}

#[tokio::test]
async fn lost_resident_is_adopted_when_its_backend_returns() {
    let mut backend = FakeBackend::start().await;
    let mut rig = serving(&backend).await;
    let request = rig.link.send_request(&chat("m"));
    assert_eq!(rig.link.reply(&request).await.status, 200);
    demand(&rig.link, "m", 0);
    backend.refuse().await;
    let is = |state: &'static str| move |slots: &serde_json::Value| slots["slots"][0]["state"] == state;
    rig.link.message_within(LONG, "slots", is("empty")).await.expect("the slot reports that its model is gone");
    backend.reopen();
    rig.link
        .message_within(LONG, "slots", is("ready"))
        .await
        .expect("the worker reports it as loaded again without a request");
}
