//! `slots1`: aliases of a multiplexer's models, which share the gate of the model's id.

use modelrelay_harness::{
    client::Request,
    relay::Relay,
    worker::{FakeWorker, slot},
};
use serde_json::{Value, json};

use crate::support::{chat, messages, model_ids, openai_error};

/// A slot for `a`, which has the alias `x`, and `b`.
fn named() -> Value {
    let mut slot = slot("gpu0", "empty", &["a", "b"]);
    slot["models"][0]["aliases"] = json!(["x"]);
    slot
}

async fn worker_with_alias(relay: &Relay) -> FakeWorker {
    let mut worker = relay.dial().open().await;
    worker.register_slots1(&["a", "b", "x"], &[named()]).await;
    worker
}

#[tokio::test]
async fn requests_by_id_and_alias_share_one_gate() {
    let relay = Relay::start().await;
    let mut worker = worker_with_alias(&relay).await;
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["a", "b", "x"]);
    let by_alias = relay.begin(messages("x"));
    worker.expect_demand("x", 1).await;
    worker.open_gates(&[("a", 1)]).await;
    let job = worker.expect_request().await;
    assert_eq!(job.message["model"], "x");
    let by_id = relay.begin(chat("a"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_demand("a", 1).await;
    worker.expect_quiet().await;
    worker.answer(&job, &json!({})).await;
    let _ = by_alias.reply().await.with_status(200);
    let job = worker.expect_request().await;
    assert_eq!(job.message["model"], "a");
    worker.answer(&job, &json!({})).await;
    let _ = by_id.reply().await.with_status(200);
}

#[tokio::test]
async fn metrics_and_state_count_alias_as_model() {
    let relay = Relay::start().await;
    let mut worker = worker_with_alias(&relay).await;
    worker.open_gates(&[("a", 1)]).await;
    let running = relay.begin(chat("x"));
    let job = worker.expect_request().await;
    let _waiting = relay.begin(chat("x"));
    relay.wait_for_queue_depth("local", 1).await;
    for gauge in ["queue_depth", "requests_in_flight", "model_workers"] {
        let of = |model: &str| format!("modelrelay_{gauge}{{model=\"{model}\",provider=\"local\"}}");
        assert_eq!((relay.metric(&of("a")).await, relay.metric(&of("x")).await.abs()), (1.0, 0.0), "{gauge}");
    }
    let models = relay.admin_json("/admin/state?residency=true").await["providers"][0]["models"].clone();
    let x = models.as_array().into_iter().flatten().find(|model| model["id"] == "x").expect("the alias is listed");
    assert_eq!((&x["residency"][0]["slot"], &x["residency"][0]["open"]), (&json!("gpu0"), &json!(true)), "{x}");
    worker.answer(&job, &json!({})).await;
    let _ = running.reply().await.with_status(200);
    let page = relay.admin("GET", "/metrics").await.text();
    let counted = page.lines().filter(|line| line.starts_with("modelrelay_requests_total{"));
    let counted: Vec<_> = counted.filter(|line| line.contains("outcome=\"ok\"")).collect();
    assert!(counted.len() == 1 && counted[0].contains("model=\"a\""), "{counted:?}");
}

#[tokio::test]
async fn orders_accept_alias() {
    let relay = Relay::start().await;
    let mut worker = worker_with_alias(&relay).await;
    let target = format!("/admin/workers/{}/command", worker.worker_id);
    let _ = relay.admin_post(&target, &json!({"command": "load", "model": "x"})).await.with_status(202);
    assert_eq!(worker.expect("command").await["model"], "x");
}

#[tokio::test]
async fn key_for_id_admits_its_unambiguous_alias() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let mut worker = worker_with_alias(&relay).await;
    worker.open_gates(&[("a", 4), ("b", 4)]).await;
    let key = |models: Value| {
        let limits = json!({"name": "k", "models": models});
        let relay = &relay;
        async move {
            let key = relay.admin_post("/admin/keys", &limits).await.with_status(201).json();
            key["secret"].as_str().expect("a secret").to_owned()
        }
    };
    let (for_a, for_b, for_x) = (key(json!(["a"])).await, key(json!(["b"])).await, key(json!(["x"])).await);
    for secret in [&for_a, &for_x] {
        let pending = relay.begin(chat("x").bearer(secret));
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
    let forbidden = async |model: &str, secret: &str| {
        let reply = relay.fetch(chat(model).bearer(secret)).await;
        openai_error(&reply, 403, "permission_error", "model_forbidden");
    };
    forbidden("x", &for_b).await;
    forbidden("a", &for_x).await;
    let listed = relay.fetch(Request::get("/v1/models").bearer(&for_a)).await.json();
    assert_eq!(model_ids(&listed), ["a", "x"]);
    let mut other = relay.dial().open().await;
    let mut slot = slot("gpu0", "empty", &["b"]);
    slot["models"][0]["aliases"] = json!(["x"]);
    other.register_slots1(&["b", "x"], &[slot]).await;
    forbidden("x", &for_a).await;
}

#[tokio::test]
async fn workers_may_mean_different_models_by_one_name() {
    let relay = Relay::start().await;
    let mut a = worker_with_alias(&relay).await;
    let mut b = relay.dial().open().await;
    let mut slot = slot("gpu0", "empty", &["b"]);
    slot["models"][0]["aliases"] = json!(["x"]);
    b.register_slots1(&["b", "x"], &[slot]).await;
    a.open_gates(&[("a", 1)]).await;
    b.open_gates(&[("b", 1)]).await;
    let pending = [relay.begin(chat("x")), relay.begin(chat("x"))];
    let jobs = (a.expect_request().await, b.expect_request().await);
    a.answer(&jobs.0, &json!({})).await;
    b.answer(&jobs.1, &json!({})).await;
    for pending in pending {
        let _ = pending.reply().await.with_status(200);
    }
}
