//! Changes to client API keys: `PATCH /admin/keys/{id}`.

use modelrelay_harness::{
    client::{Reply, Request},
    fake_kubernetes::{DATA_KEY, FakeKubernetes, Fault, Mount},
    relay::{ADMIN_TOKEN, Relay, RelayBuilder},
};
use serde_json::{Value, json};

use crate::keys_secret::{TwoRelays, admits, names, new_key, relay_in};
use crate::support::{chat, chat_stream, model_ids, openai_error};

fn strict() -> RelayBuilder {
    Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true")
}

fn change_of(id: &str, fields: &Value) -> Request {
    Request::new("PATCH", &format!("/admin/keys/{id}")).bearer(ADMIN_TOKEN).body(fields.to_string())
}

pub(crate) async fn change(relay: &Relay, id: &str, fields: Value) -> Reply {
    relay.fetch(change_of(id, &fields)).await
}

/// Returns the only key as it is listed.
async fn listed(relay: &Relay) -> Value {
    relay.admin_json("/admin/keys").await["keys"][0].clone()
}

#[tokio::test]
async fn change_applies_at_once_and_keeps_other_fields() {
    let relay = strict().start().await;
    let _worker = relay.worker(&["a", "b"], 1).await;
    let wanted = json!({"name": "k", "models": ["a"], "max_in_flight": 4, "expires_at": "2099-01-01T00:00:00Z"});
    let key = relay.admin_post("/admin/keys", &wanted).await.with_status(201).json();
    let (id, secret) = (key["id"].as_str().unwrap(), key["secret"].as_str().unwrap());
    let fields = json!({"name": "renamed", "models": ["b"], "max_queue_percent": 50, "max_in_flight": null});
    let changed = change(&relay, id, fields).await.with_status(200).json();
    assert_eq!(changed, listed(&relay).await);
    assert_eq!(
        [&changed["name"], &changed["models"], &changed["max_queue_percent"], &changed["max_in_flight"]],
        [&json!("renamed"), &json!(["b"]), &json!(50), &Value::Null]
    );
    assert_eq!(changed["expires_at"], "2099-01-01T00:00:00.000Z");
    let list = relay.fetch(Request::get("/v1/models").bearer(secret)).await.json();
    assert_eq!(model_ids(&list), ["b"]);
    openai_error(&relay.fetch(chat("a").bearer(secret)).await, 403, "permission_error", "model_forbidden");
    let changed = change(&relay, id, json!({})).await.with_status(200).json();
    assert_eq!(changed, listed(&relay).await);
}

#[tokio::test]
async fn lower_limit_applies_to_new_requests_only() {
    let relay = strict().start().await;
    let mut worker = relay.worker(&["m"], 9).await;
    let (id, secret) = new_key(&relay, "k").await;
    let running = [relay.begin(chat("m").bearer(&secret)), relay.begin(chat("m").bearer(&secret))];
    let jobs = [worker.expect_request().await, worker.expect_request().await];
    let changed = change(&relay, &id, json!({"max_in_flight": 2})).await.with_status(200).json();
    assert_eq!((&changed["in_flight"], changed["last_used_at"].is_u64()), (&json!(2), true), "{changed}");
    openai_error(&relay.fetch(chat("m").bearer(&secret)).await, 429, "rate_limit_error", "key_limit");
    let _ = change(&relay, &id, json!({"max_in_flight": 3})).await.with_status(200);
    let third = relay.begin(chat("m").bearer(&secret));
    let last = worker.expect_request().await;
    for job in jobs.iter().chain([&last]) {
        worker.answer(job, &json!({})).await;
    }
    for running in running.into_iter().chain([third]) {
        let _ = running.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn past_expiry_rejects_at_once_and_ends_nothing() {
    let relay = strict().start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let (id, secret) = new_key(&relay, "k").await;
    let stream = relay.begin(chat_stream("m").bearer(&secret));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let mut stream = stream.response().await;
    stream.read_until("data: 1").await;
    let _ = change(&relay, &id, json!({"expires_at": "2020-01-01T00:00:00Z"})).await.with_status(200);
    assert_eq!(relay.fetch(chat("m").bearer(&secret)).await.status, 401);
    worker.stream_on(&job, "data: [DONE]\n\n").await;
    worker.end_stream(&job).await;
    assert!(stream.read_to_end().await.text().contains("[DONE]"));
    let _ = change(&relay, &id, json!({"expires_at": null})).await.with_status(200);
    assert!(admits(&relay, &secret).await, "an expired key can be extended");
}

#[tokio::test]
async fn change_survives_immediate_kill() {
    let mut relay = strict().start().await;
    let (id, _) = new_key(&relay, "k").await;
    let changed =
        change(&relay, &id, json!({"max_in_flight": 7, "providers": ["local"]})).await.with_status(200).json();
    relay.process().kill().await;
    let relay = relay.restart().await;
    assert_eq!(listed(&relay).await, changed);
}

#[tokio::test]
async fn unknown_and_revoked_keys_are_404() {
    let relay = Relay::start().await;
    let (id, _) = new_key(&relay, "k").await;
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    for id in [&id, "unknown"] {
        let reply = change(&relay, id, json!({"name": "new"})).await.with_status(404);
        assert_eq!(reply.json()["error"]["code"], "key_not_found");
    }
    assert_eq!(listed(&relay).await["name"], "k");
}

#[tokio::test]
async fn invalid_change_is_400_and_changes_nothing() {
    let relay = Relay::start().await;
    let (id, _) = new_key(&relay, "k").await;
    let before = listed(&relay).await;
    for (fields, code, parts) in [
        (
            json!({"name": "new", "max_inflight": 1}),
            "invalid_key",
            ["max_inflight", "max_in_flight, max_queue_percent"],
        ),
        (json!({"name": "new", "max_in_flight": 0}), "invalid_key", ["max_in_flight: ", "from 1 to"]),
        (json!({"name": "new", "max_queue_percent": 101}), "invalid_key", ["max_queue_percent: ", "from 1 to 100"]),
        (json!({"name": null}), "invalid_key", ["name: ", "1 to 128 characters"]),
        (json!({"name": "new", "expires_at": 5}), "invalid_key", ["expires_at: ", "UTC time"]),
        (json!({"name": "new", "models": []}), "invalid_key", ["models: ", "1 to 256 names"]),
        (json!(["name"]), "invalid_json", ["body", "object"]),
    ] {
        let error = change(&relay, &id, fields.clone()).await.with_status(400).json()["error"].clone();
        let message = error["message"].as_str().expect("a message");
        assert!(error["code"] == code && parts.iter().all(|part| message.contains(part)), "{fields}: {error}");
    }
    assert_eq!(listed(&relay).await, before);
}

#[tokio::test]
async fn change_that_cannot_be_stored_is_503() {
    let relay = Relay::start().await;
    let (id, _) = new_key(&relay, "k").await;
    let before = listed(&relay).await;
    std::fs::write(relay.path("modelrelay-keys.json"), "garbage").expect("written");
    let reply = change(&relay, &id, json!({"name": "new"})).await.with_status(503);
    assert_eq!(reply.json()["error"]["code"], "key_store_unavailable");
    assert_eq!(listed(&relay).await, before);
}

#[tokio::test]
async fn weight_and_class_are_stored_and_listed() {
    let mut relay = Relay::start().await;
    let wanted = json!({"name": "k", "weight": 2.5, "class": "interactive"});
    let key = relay.admin_post("/admin/keys", &wanted).await.with_status(201).json();
    let id = key["id"].as_str().expect("an id");
    assert_eq!((&key["weight"], &key["class"]), (&json!(2.5), &json!("interactive")));
    let changed = change(&relay, id, json!({"weight": 0.01, "class": "batch"})).await.with_status(200).json();
    assert_eq!((&changed["weight"], &changed["class"]), (&json!(0.01), &json!("batch")));
    relay.process().kill().await;
    let relay = relay.restart().await;
    assert_eq!(listed(&relay).await, changed);
    let changed = change(&relay, id, json!({"weight": null, "class": null})).await.with_status(200).json();
    assert_eq!((&changed["weight"], &changed["class"]), (&json!(1), &json!("normal")));
    let text = relay.read_file("modelrelay-keys.json");
    assert!(!text.contains("weight") && !text.contains("class"), "defaults are not stored: {text}");
}

#[tokio::test]
async fn token_limits_are_stored_and_removed() {
    let relay = Relay::start().await;
    let wanted = json!({"name": "k", "tokens_per_minute": 5000, "tokens_per_day": 1_000_000});
    let key = relay.admin_post("/admin/keys", &wanted).await.with_status(201).json();
    let id = key["id"].as_str().expect("an id");
    assert_eq!((&key["tokens_per_minute"], &key["tokens_per_day"]), (&json!(5000), &json!(1_000_000)));
    let changed = change(&relay, id, json!({"tokens_per_minute": null})).await.with_status(200).json();
    let relay = relay.restart().await;
    assert_eq!(listed(&relay).await, changed);
    assert_eq!((&changed["tokens_per_minute"], &changed["tokens_per_day"]), (&Value::Null, &json!(1_000_000)));
}

#[tokio::test]
async fn full_secret_rejects_longer_key_and_accepts_shorter() {
    let kubernetes = FakeKubernetes::start().await;
    kubernetes.change(|data| {
        data.insert("theirs".to_owned(), vec![b'x'; (1 << 20) - 330]);
    });
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (id, _) = new_key(&relay, "fits").await;
    let error = change(&relay, &id, json!({"name": "x".repeat(128)})).await.with_status(409).json()["error"].clone();
    assert!(error["code"] == "too_many_keys" && error["message"].as_str().is_some_and(|why| why.contains("1 MiB")));
    assert_eq!(names(&relay).await, ["fits"]);
    let _ = change(&relay, &id, json!({"name": "f"})).await.with_status(200);
    assert_eq!(kubernetes.keys()[0]["name"], "f");
}

#[tokio::test]
async fn concurrent_changes_of_relays_are_all_kept() {
    let TwoRelays { kubernetes, here: _here, there: _there, one, other, id, .. } = TwoRelays::start().await;
    for round in 1..=5 {
        let (left, right) = tokio::join!(
            change(&one, &id, json!({"max_in_flight": round})),
            change(&other, &id, json!({"max_queue_percent": round, "weight": round + 1})),
        );
        let _ = (left.with_status(200), right.with_status(200));
        let key = &kubernetes.keys()[0];
        let limits = json!({"max_in_flight": round, "max_queue_percent": round});
        assert_eq!((&key["limits"], &key["weight"]), (&limits, &json!(round + 1)));
    }
}

#[tokio::test]
async fn change_during_write_of_another_relay_loses_nothing() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (id, _) = new_key(&relay, "k").await;
    let text = String::from_utf8(kubernetes.data().expect("a Secret")[DATA_KEY].clone()).expect("text");
    let limited = text.replace("\"limits\":{}", "\"revision\":1,\"limits\":{\"models\":[\"m\"]}");
    assert_ne!(limited, text);
    kubernetes.after_next_read(move |data| {
        data.insert(DATA_KEY.to_owned(), limited.into_bytes());
    });
    kubernetes.fail_writes(&[Fault::Status(500, "oops"), Fault::DropAfterwards]);
    let changed = change(&relay, &id, json!({"max_in_flight": 3})).await.with_status(200).json();
    assert_eq!((&changed["models"], &changed["max_in_flight"]), (&json!(["m"]), &json!(3)));
    assert_eq!(kubernetes.keys()[0]["limits"], json!({"models": ["m"], "max_in_flight": 3}));
}

#[tokio::test]
async fn change_applies_elsewhere_after_mount_update() {
    let TwoRelays { kubernetes, here: _here, there, one, other, id, key } = TwoRelays::start().await;
    assert!(admits(&other, &key).await);
    let _ = change(&one, &id, json!({"expires_at": "2020-01-01T00:00:00Z"})).await.with_status(200);
    let reads = kubernetes.reads();
    there.sync(&kubernetes);
    other.eventually("the key has expired there", || async { !admits(&other, &key).await }).await;
    assert_eq!(kubernetes.reads(), reads, "the mount was enough");
}

#[tokio::test]
async fn outdated_mount_does_not_undo_change() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (id, key) = new_key(&relay, "first").await;
    let behind = kubernetes.data().expect("a Secret");
    let _ = change(&relay, &id, json!({"name": "second", "expires_at": "2020-01-01T00:00:00Z"})).await.with_status(200);
    let reads = kubernetes.reads();
    mount.show(&behind);
    relay.eventually("the relay reads the Secret", || async { kubernetes.reads() > reads }).await;
    assert!(!admits(&relay, &key).await);
    assert_eq!(names(&relay).await, ["second"]);
    // A Secret restored from a backup is adopted once the API server has confirmed it.
    kubernetes.change(|data| {
        *data = behind;
        data.get_mut(DATA_KEY).expect("keys").push(b'\n');
    });
    mount.sync(&kubernetes);
    relay.eventually("the restored key is accepted", || admits(&relay, &key)).await;
}
