//! A name with one dead address, as with broken IPv6: packets get neither a rejection nor a reply.

use modelrelay_harness::{
    client::Request,
    fake_backend::FakeBackend,
    relay::{Relay, WORKER_SECRET},
    worker_process::{WorkerProcess, wait_for_model},
};
use serde_json::json;

use crate::inside;

const DEAD: &str = "10.9.9.9";
const ALIVE: &str = "127.0.0.1";

#[tokio::test]
async fn worker_links_to_responsive_address() {
    inside("dead_address::worker_links_to_responsive_address", |namespace| async move {
        namespace.add_dead_network().await;
        namespace.set_addresses(&[DEAD, ALIVE]);
        let (relay, backend) = (Relay::start().await, FakeBackend::start().await);
        let url = format!("http://relays.test:{}", relay.addr().port());
        let _worker = WorkerProcess::builder()
            .env("WORKER_SECRET", WORKER_SECRET)
            .relay(url)
            .backend(backend.url())
            .start()
            .await;
        wait_for_model(&relay, "m").await;
    })
    .await;
}

#[tokio::test]
async fn backend_is_reached_at_responsive_address() {
    inside("dead_address::backend_is_reached_at_responsive_address", |namespace| async move {
        namespace.add_dead_network().await;
        namespace.set_addresses(&[DEAD, ALIVE]);
        let (relay, mut backend) = (Relay::start().await, FakeBackend::start().await);
        let url = backend.url().replace(ALIVE, "relays.test");
        let _worker =
            WorkerProcess::builder().env("WORKER_SECRET", WORKER_SECRET).relay(relay.url()).backend(url).start().await;
        wait_for_model(&relay, "m").await;
        let pending = relay.begin(Request::post("/v1/chat/completions", &json!({"model": "m"})));
        backend.call().await.answer_json(200, &json!({"ok": true})).await;
        assert_eq!(pending.reply().await.with_status(200).json(), json!({"ok": true}));
    })
    .await;
}
