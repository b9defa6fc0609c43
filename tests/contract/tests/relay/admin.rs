//! The admin API.

use modelrelay_harness::{
    client::Request,
    relay::{ADMIN_TOKEN, Relay},
};
use serde_json::json;

use crate::support::{anthropic_error, chat, messages, one_provider, openai_error};

const ROUTES: [(&str, &str); 13] = [
    ("GET", "/admin/workers"),
    ("GET", "/admin/stats"),
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys"),
    ("PATCH", "/admin/keys/x"),
    ("DELETE", "/admin/keys/x"),
    ("POST", "/admin/workers/x/drain"),
    ("GET", "/admin/requests"),
    ("POST", "/admin/requests/x/cancel"),
    ("GET", "/admin/state"),
    ("GET", "/admin/live"),
    ("GET", "/admin/setup"),
    ("POST", "/admin/setup/secret"),
];

#[tokio::test]
async fn admin_routes_without_configured_token_are_403() {
    let unset = Relay::builder().without_env("MODELRELAY_ADMIN_TOKEN").start().await;
    let empty = Relay::builder().env("MODELRELAY_ADMIN_TOKEN", "").start().await;
    for relay in [unset, empty] {
        for (method, path) in ROUTES {
            for token in ["", ADMIN_TOKEN] {
                let reply = relay.fetch(Request::new(method, path).bearer(token)).await;
                assert_eq!(reply.status, 403, "{method} {path} with {token:?}");
            }
            assert_eq!(relay.fetch(Request::new(method, path)).await.status, 403, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn wrong_token_is_403_before_parsing() {
    let relay = Relay::start().await;
    for (method, path) in ROUTES {
        assert_eq!(relay.fetch(Request::new(method, path)).await.status, 403, "{method} {path}");
        let wrong = Request::new(method, path).bearer("wrong").body("{not json");
        assert_eq!(relay.fetch(wrong).await.status, 403, "{method} {path}");
        let as_key = Request::new(method, path).header("x-api-key", ADMIN_TOKEN);
        assert_eq!(relay.fetch(as_key).await.status, 403, "{method} {path}");
    }
}

#[tokio::test]
async fn workers_are_listed_with_their_details() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut registration = modelrelay_harness::worker::registration(&["a", "b"], 3);
    registration["current_load"] = json!(1);
    registration["version"] = json!("9.8.7");
    worker.register_with(registration).await;
    let _running = relay.begin(chat("a"));
    worker.expect_request().await;
    let listed = relay.workers().await.remove(0);
    assert_eq!(listed["worker_id"], worker.worker_id);
    assert_eq!(listed["provider"], "local");
    assert_eq!(listed["worker_name"], "hand-played");
    assert_eq!(listed["models"], json!(["a", "b"]));
    assert_eq!(listed["max_concurrent"], 3);
    assert_eq!(listed["in_flight_count"], 1);
    assert_eq!(listed["is_draining"], false);
    assert_eq!(listed["version"], "9.8.7");
    assert!(listed["reported_load"].is_u64(), "{listed}");
    assert!(listed["address"].as_str().is_some_and(|address| address.starts_with("127.0.0.1")), "{listed}");
    assert!(listed["connected_at"].is_string() && listed.get("last_heartbeat_at").is_some(), "{listed}");
}

#[tokio::test]
async fn stats_count_queued_and_running_requests() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let _running = relay.begin(chat("m"));
    worker.expect_request().await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let stats = relay.admin_json("/admin/stats").await;
    assert_eq!(stats["active_workers"], 1);
    assert_eq!(stats["in_flight"]["local"], 1);
}

#[tokio::test]
async fn requests_are_listed_without_their_content() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "a very private prompt"}]});
    let _running = relay.begin(Request::post("/v1/chat/completions?secret=query", &body).bearer("sk-private"));
    worker.expect_request().await;
    let _waiting = relay.begin(chat("m").header("x-request-id", "the-waiting-one"));
    relay.wait_for_queue_depth("local", 1).await;
    let reply = relay.admin("GET", "/admin/requests").await.with_status(200);
    let requests = reply.json()["requests"].as_array().expect("a list").clone();
    assert_eq!(requests.len(), 2, "{}", reply.text());
    assert!(requests.iter().all(|request| request["model"] == "m"), "{}", reply.text());
    for private in ["private", "secret=query", "sk-private"] {
        assert!(!reply.text().contains(private), "{}", reply.text());
    }
}

/// Returns the ids of current requests in `/admin/requests`.
async fn request_ids(relay: &Relay) -> Vec<String> {
    let requests = relay.admin_json("/admin/requests").await["requests"].as_array().expect("a list").clone();
    let id = |request: &serde_json::Value| {
        ["id", "request_id"].iter().find_map(|key| request[key].as_str()).expect("an id").to_owned()
    };
    requests.iter().map(id).collect()
}

#[tokio::test]
async fn admin_cancels_running_request() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let id = request_ids(&relay).await.remove(0);
    let reply = relay.admin("POST", &format!("/admin/requests/{id}/cancel")).await;
    assert!((200..300).contains(&reply.status), "{}", reply.text());
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "client_disconnect");
    let reply = pending.reply().await;
    openai_error(&reply, 503, "service_unavailable_error", "cancelled_by_admin");
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("false"));
}

#[tokio::test]
async fn admin_cancels_queued_request() {
    let relay = Relay::start().await;
    let pending = relay.begin(messages("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let id = request_ids(&relay).await.remove(0);
    relay.admin("POST", &format!("/admin/requests/{id}/cancel")).await;
    let reply = pending.reply().await;
    anthropic_error(&reply, 503, "api_error");
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("false"));
    relay.wait_for_queue_depth("local", 0).await;
}

#[tokio::test]
async fn unknown_admin_targets_are_404() {
    let relay = Relay::start().await;
    for (method, path) in [
        ("POST", "/admin/workers/nobody/drain"),
        ("POST", "/admin/workers/nobody/refresh"),
        ("POST", "/admin/requests/nothing/cancel"),
        ("DELETE", "/admin/keys/none"),
        ("GET", "/admin/ops/none"),
        ("GET", "/admin/nope"),
    ] {
        assert_eq!(relay.admin(method, path).await.status, 404, "{method} {path}");
    }
}

#[tokio::test]
async fn state_includes_workers_pools_and_queued_models() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let instance = modelrelay_harness::worker::new_instance_id();
    let mut message = modelrelay_harness::worker::core1_registration(&["m"], 1, &instance);
    message["pool"] = json!("llama");
    worker.register_with(message).await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let state = relay.admin_json("/admin/state").await.to_string();
    for part in [instance.as_str(), "llama", "local", "\"m\""] {
        assert!(state.contains(part), "{part} in {state}");
    }
    assert!(!relay.get("/health").await.text().contains(&instance), "an instance_id without the token");
}

#[tokio::test]
async fn state_includes_workers_and_load_per_model() {
    let more = "  coldModels: [cold]\n  models: [{id: m}, {id: cold}, {id: idle}]";
    let relay = Relay::builder().config(one_provider(more)).start().await;
    let mut worker = relay.dial().open().await;
    let instance = modelrelay_harness::worker::new_instance_id();
    let mut message = modelrelay_harness::worker::core1_registration(&["m"], 3, &instance);
    message["pool"] = json!("llama");
    worker.register_with(message).await;
    worker.grant(3).await;
    let _running = relay.begin(chat("m"));
    worker.expect_request().await;
    let _cold = relay.begin(chat("cold"));
    relay.wait_for_queue_depth("local", 1).await;
    let state = relay.admin_json("/admin/state").await;
    assert!(state["config_hash"].as_str().is_some_and(|hash| hash.len() == 64), "{state}");
    assert_eq!((&state["config_error"], &state["api_keys_error"]), (&json!(null), &json!(null)));
    let provider = &state["providers"][0];
    assert_eq!((&provider["name"], &provider["enabled"]), (&json!("local"), &json!(true)));
    assert_eq!((&provider["queue_depth"], &provider["in_flight"]), (&json!(1), &json!(1)));
    let entry = &provider["workers"][0];
    for (name, value) in [
        ("instance_id", json!(instance)),
        ("pool", json!("llama")),
        ("models", json!(["m"])),
        ("is_draining", json!(false)),
        ("in_flight_count", json!(1)),
        ("max_concurrent", json!(3)),
    ] {
        assert_eq!(entry[name], value, "{name} in {entry}");
    }
    let models = provider["models"].as_array().expect("a list of models");
    let counts = |id: &str| {
        let model = models.iter().find(|model| model["id"] == id).unwrap_or_else(|| panic!("no {id} in {models:?}"));
        assert_eq!(model["oldest_ms"].is_u64(), model["waiting"] != 0, "{model}");
        ["waiting", "workers", "in_flight"].map(|name| model[name].as_u64().expect("a number"))
    };
    assert_eq!([counts("m"), counts("cold"), counts("idle")], [[0, 1, 1], [1, 0, 0], [0, 0, 0]]);
}

#[tokio::test]
async fn admin_responses_contain_no_secrets() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["m"], 1).await;
    for path in ["/admin/workers", "/admin/stats", "/admin/keys", "/admin/requests", "/admin/state"] {
        let text = relay.admin("GET", path).await.with_status(200).text();
        for secret in [ADMIN_TOKEN, modelrelay_harness::relay::WORKER_SECRET] {
            assert!(!text.contains(secret), "{path} shows {secret}");
        }
    }
}

#[tokio::test]
async fn admin_api_can_have_its_own_listener() {
    let relay = Relay::builder().env("ADMIN_LISTEN_ADDR", "127.0.0.1:0").start().await;
    let admin = relay.admin_addr().await;
    let get = |path: &str, to| Request::get(path).bearer(ADMIN_TOKEN).fetch(to, relay.log());
    for path in ["/admin/workers", "/metrics"] {
        assert_eq!(get(path, admin).await.status, 200, "{path} on its own listener");
        assert_eq!(get(path, relay.addr()).await.status, 404, "{path} on the clients'");
    }
    for path in ["/livez", "/readyz", "/health"] {
        assert_ne!(get(path, admin).await.status, 404, "{path} on its own listener");
        assert_ne!(get(path, relay.addr()).await.status, 404, "{path} on the clients'");
    }
    assert_eq!(get("/v1/models", admin).await.status, 404);
}
