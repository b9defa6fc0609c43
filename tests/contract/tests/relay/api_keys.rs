//! Client API keys: created, used, limited, revoked, stored.

use modelrelay_harness::{client::Request, relay::Relay, relay::RelayBuilder};
use serde_json::{Value, json};

use crate::support::{anthropic_error, chat, chat_stream, messages, model_ids, openai_error, two_providers};

fn strict() -> RelayBuilder {
    Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true")
}

/// Creates a key and returns its id and secret.
async fn new_key(relay: &Relay, settings: Value) -> (String, String) {
    let key = relay.admin_post("/admin/keys", &settings).await.with_status(201).json();
    (key["id"].as_str().expect("an id").to_owned(), key["secret"].as_str().expect("a secret").to_owned())
}

#[tokio::test]
async fn client_routes_without_required_key_are_401() {
    let relay = strict().start().await;
    for path in ["/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/rerank", "/v1/responses"] {
        let reply = relay.fetch(Request::post(path, &json!({"model": "m"}))).await;
        let message = openai_error(&reply, 401, "authentication_error", "invalid_api_key");
        assert_eq!(message, "API key required", "{path}");
        assert_eq!(reply.header("www-authenticate").as_deref(), Some("Bearer"), "{path}");
    }
    for path in ["/v1/models", "/v1/models/m", "/v1/responses/resp_1"] {
        assert_eq!(relay.get(path).await.status, 401, "{path}");
    }
    let reply = relay.fetch(messages("m")).await;
    assert_eq!(anthropic_error(&reply, 401, "authentication_error"), "API key required");
    assert_eq!(reply.header("www-authenticate").as_deref(), Some("Bearer"));
}

#[tokio::test]
async fn wrong_key_is_401() {
    let relay = strict().start().await;
    let (id, secret) = new_key(&relay, json!({"name": "k"})).await;
    let cut = &secret[..secret.len() - 1];
    for wrong in ["sk-other", "mr-", "mr-x-y", cut, &format!("{secret}x"), &format!("mr-{id}-"), ""] {
        let reply = relay.fetch(chat("m").bearer(wrong)).await;
        assert_eq!(reply.status, 401, "{wrong:?}");
    }
    let reply = relay.fetch(chat("m").bearer("mr-x-y")).await;
    assert_eq!(openai_error(&reply, 401, "authentication_error", "invalid_api_key"), "Invalid API key");
}

#[tokio::test]
async fn similar_models_are_limited_to_allowed_ones() {
    let relay = strict().start().await;
    let _worker = relay.worker(&["secret-1", "open-1"], 1).await;
    let (_, secret) = new_key(&relay, json!({"name": "k", "models": ["open-1", "open-2", "secret-3"]})).await;
    let send = async |model| relay.fetch(chat(model).bearer(&secret)).await;
    let message = openai_error(&send("open-2").await, 404, "invalid_request_error", "model_not_found");
    assert_eq!(message, "no provider for model open-2; similar: open-1");
    let message = openai_error(&send("secret-3").await, 404, "invalid_request_error", "model_not_found");
    assert_eq!(message, "no provider for model secret-3");
    // Nor does a key learn which models exist that it may not use.
    openai_error(&send("secret-2").await, 403, "permission_error", "model_forbidden");
}

#[tokio::test]
async fn key_works_as_bearer_or_x_api_key() {
    let relay = strict().start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let (_, secret) = new_key(&relay, json!({"name": "k"})).await;
    for request in [chat("m").bearer(&secret), chat("m").header("x-api-key", &secret)] {
        let pending = relay.begin(request);
        let job = worker.expect_request().await;
        assert_eq!((job.header("authorization"), job.header("x-api-key")), (None, None), "our key was forwarded");
        worker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn backend_key_next_to_relay_key_is_forwarded() {
    let relay = strict().start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let (_, secret) = new_key(&relay, json!({"name": "k"})).await;
    let pending = relay.begin(chat("m").header("x-api-key", &secret).bearer("sk-of-the-backend"));
    let job = worker.expect_request().await;
    assert_eq!(job.header("authorization"), Some("Bearer sk-of-the-backend"));
    assert_eq!(job.header("x-api-key"), None);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn keys_are_not_required_by_default() {
    let relay = Relay::start().await;
    assert_eq!(relay.get("/v1/models").await.status, 200);
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "0").start().await;
    assert_eq!(relay.get("/v1/models").await.status, 200);
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "1").start().await;
    assert_eq!(relay.get("/v1/models").await.status, 401);
}

#[tokio::test]
async fn probes_and_workers_need_no_key() {
    let relay = strict().start().await;
    for path in ["/health", "/livez"] {
        assert_eq!(relay.get(path).await.status, 200, "{path}");
    }
    let _worker = relay.worker(&["m"], 1).await;
}

#[tokio::test]
async fn key_secret_is_shown_once() {
    let relay = Relay::start().await;
    let reply = relay.admin_post("/admin/keys", &json!({"name": "production-app"})).await.with_status(201);
    let key = reply.json();
    let secret = key["secret"].as_str().expect("a secret").to_owned();
    let id = key["id"].as_str().expect("an id").to_owned();
    assert!(secret.starts_with(&format!("mr-{id}-")), "{secret}");
    assert!(secret.len() >= 32, "too short to be unguessable: {secret}");
    assert_eq!(key["name"], "production-app");
    let list = relay.admin("GET", "/admin/keys").await.with_status(200);
    let hidden = secret.strip_prefix(&format!("mr-{id}-")).expect("checked above");
    assert!(!list.text().contains(hidden), "the list shows the secret");
    let listed = list.json()["keys"][0].clone();
    assert_eq!((&listed["id"], &listed["name"]), (&json!(id), &json!("production-app")));
    assert!(listed["prefix"].is_string() && listed["last_used_at"].is_null(), "{listed}");
    assert_eq!(listed["revoked"], false);
    assert!(!relay.read_file("modelrelay-keys.json").contains(hidden), "the file holds the secret");
}

#[tokio::test]
async fn key_times_are_unix_seconds_and_text() {
    let relay = strict().start().await;
    let (_, secret) = new_key(&relay, json!({"name": "k"})).await;
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&secret)).await.status, 200);
    let key = relay.admin_json("/admin/keys").await["keys"][0].clone();
    let now = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs();
    for (seconds, text) in [("created_at", "created"), ("last_used_at", "last_used")] {
        let at = key[seconds].as_u64().unwrap_or_else(|| panic!("no {seconds} in {key}"));
        assert!(at <= now && now - at < 600, "{key}");
        assert!(key[text].as_str().is_some_and(|text| text.len() == 24 && text.ends_with('Z')), "{key}");
    }
}

#[tokio::test]
async fn key_use_sets_last_used_time() {
    let relay = strict().start().await;
    let (_, secret) = new_key(&relay, json!({"name": "k"})).await;
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&secret)).await.status, 200);
    relay
        .eventually("last_used_at is set", || async {
            relay.admin_json("/admin/keys").await["keys"][0]["last_used_at"].is_u64()
        })
        .await;
}

#[tokio::test]
async fn revoked_key_is_401() {
    let relay = strict().start().await;
    let (id, secret) = new_key(&relay, json!({"name": "k"})).await;
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&secret)).await.status, 200);
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    let reply = relay.fetch(chat("m").bearer(&secret)).await;
    assert_eq!(openai_error(&reply, 401, "authentication_error", "invalid_api_key"), "Invalid API key");
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204, "revoked twice");
    assert_eq!(relay.admin("DELETE", "/admin/keys/unknown").await.status, 404);
}

#[tokio::test]
async fn revoked_key_ends_its_requests() {
    let relay = strict().start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let (id, revoked) = new_key(&relay, json!({"name": "revoked"})).await;
    let (_, kept) = new_key(&relay, json!({"name": "kept"})).await;
    let stream = relay.begin(chat_stream("m").bearer(&revoked));
    let streamed = worker.expect_request().await;
    worker.start_stream(&streamed, "data: 1\n\n").await;
    let mut stream = stream.response().await;
    stream.read_until("data: 1").await;
    let other = relay.begin(chat("m").bearer(&kept));
    let running = worker.expect_request().await;
    let waiting = relay.begin(chat("m").bearer(&revoked));
    relay.wait_for_queue_depth("local", 1).await;
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    assert_eq!(waiting.reply().await.with_status(503).json()["error"]["code"], "cancelled_by_admin");
    worker.expect_cancel(&streamed.id).await;
    let ended = stream.read_to_end().await;
    assert!(ended.broken_stream().contains("cancelled_by_admin"), "{}", ended.text());
    worker.answer(&running, &json!({})).await;
    let _ = other.reply().await.with_status(200);
}

#[tokio::test]
async fn keys_survive_restart() {
    let relay = strict().start().await;
    let (_, kept) = new_key(&relay, json!({"name": "kept"})).await;
    let (id, revoked) = new_key(&relay, json!({"name": "revoked"})).await;
    relay.admin("DELETE", &format!("/admin/keys/{id}")).await;
    let relay = relay.restart().await;
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&kept)).await.status, 200);
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&revoked)).await.status, 401);
}

#[tokio::test]
async fn new_keys_survive_immediate_kill() {
    let mut relay = strict().start().await;
    let (_, secret) = new_key(&relay, json!({"name": "k"})).await;
    relay.process().kill().await;
    let relay = relay.restart().await;
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&secret)).await.status, 200);
}

#[tokio::test]
async fn key_is_limited_to_its_models() {
    let relay = strict().start().await;
    let mut worker = relay.worker(&["a", "b"], 1).await;
    let (_, secret) = new_key(&relay, json!({"name": "k", "models": ["a"]})).await;
    let reply = relay.fetch(chat("b").bearer(&secret)).await;
    openai_error(&reply, 403, "permission_error", "model_forbidden");
    let reply = relay.fetch(messages("b").header("x-api-key", &secret)).await;
    anthropic_error(&reply, 403, "permission_error");
    let list = relay.fetch(Request::get("/v1/models").bearer(&secret)).await.json();
    assert_eq!(model_ids(&list), ["a"]);
    let pending = relay.begin(chat("a").bearer(&secret));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

/// Backends parse some bodies differently from the relay: an ambiguous body reaches none.
#[tokio::test]
async fn body_with_two_models_cannot_bypass_key_limit() {
    let relay = strict().start().await;
    let mut worker = relay.worker(&["a", "b"], 1).await;
    let (_, secret) = new_key(&relay, json!({"name": "k", "models": ["a"]})).await;
    let form = |headers: &str| {
        let part =
            |headers: &str, value: &str| format!("--B\r\ncontent-disposition: form-data; {headers}\r\n\r\n{value}\r\n");
        format!("{}{}--B--\r\n", part("name=model", "a"), part(headers, "b"))
    };
    let json = |body: &str| ("/v1/chat/completions", "application/json", body.to_owned());
    let forms =
        ["name=x; name=model", "name*=utf-8''model", "filename=\"\\\"; name=x\"; name=model", "x=y;\r\n name=model"];
    let forms = forms.map(|headers| ("/v1/audio/transcriptions", "multipart/form-data; boundary=B", form(headers)));
    let bodies = [json(r#"{"model":"a","Model":"b"}"#), json(r#"{"model":"a","MODEL":"b"}"#)].into_iter().chain(forms);
    for (path, content_type, body) in bodies {
        let request =
            Request::new("POST", path).header("content-type", content_type).body(body.clone()).bearer(&secret);
        openai_error(&relay.fetch(request).await, 400, "invalid_request_error", "invalid_json");
    }
    let two_boundaries = "multipart/form-data; boundary=B; boundary=C";
    for types in [vec![two_boundaries], vec!["multipart/form-data; boundary=B", "multipart/form-data; boundary=C"]] {
        let request = Request::new("POST", "/v1/audio/transcriptions").body(form("name=x")).bearer(&secret);
        let request = types.iter().fold(request, |request, content_type| request.header("content-type", content_type));
        openai_error(&relay.fetch(request).await, 400, "invalid_request_error", "invalid_json");
    }
    let pending = relay.begin(chat("a").bearer(&secret));
    let job = worker.expect_request().await;
    assert!(job.message["model"] == "a", "{}", job.message);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn key_is_limited_to_its_providers() {
    let config = two_providers("  models: [{id: a}]", "  models: [{id: b}]");
    let relay = strict().config(config).start().await;
    let (_, secret) = new_key(&relay, json!({"name": "k", "providers": ["other"]})).await;
    assert_eq!(relay.fetch(chat("a").bearer(&secret)).await.status, 403);
    let list = relay.fetch(Request::get("/v1/models").bearer(&secret)).await.json();
    assert_eq!(model_ids(&list), ["b"]);
    let _pending = relay.begin(chat("b").bearer(&secret));
    relay.wait_for_queue_depth("other", 1).await;
}

#[tokio::test]
async fn expired_key_is_401() {
    let relay = strict().start().await;
    let (_, gone) = new_key(&relay, json!({"name": "k", "expires_at": "2020-01-01T00:00:00Z"})).await;
    let (_, good) = new_key(&relay, json!({"name": "k", "expires_at": "2099-01-01T00:00:00Z"})).await;
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&gone)).await.status, 401);
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&good)).await.status, 200);
}

#[tokio::test]
async fn key_over_its_in_flight_limit_is_429() {
    let relay = strict().start().await;
    let mut worker = relay.worker(&["m"], 9).await;
    let (_, secret) = new_key(&relay, json!({"name": "k", "max_in_flight": 1})).await;
    let first = relay.begin(chat("m").bearer(&secret));
    let job = worker.expect_request().await;
    let reply = relay.fetch(chat("m").bearer(&secret)).await;
    openai_error(&reply, 429, "rate_limit_error", "key_limit");
    assert_eq!(reply.header("retry-after").as_deref(), Some("1"));
    worker.answer(&job, &json!({})).await;
    let _ = first.reply().await.with_status(200);
    let again = relay.begin(chat("m").bearer(&secret));
    let job = worker.expect_request().await;
    again.abandon();
    worker.expect_cancel(&job.id).await;
    let last = relay.begin(chat("m").bearer(&secret));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = last.reply().await.with_status(200);
}

#[tokio::test]
async fn key_over_its_queue_share_is_429() {
    let relay = strict().env("MAX_QUEUE_LEN", "4").start().await;
    let (_, greedy) = new_key(&relay, json!({"name": "greedy", "max_queue_percent": 50})).await;
    let (_, other) = new_key(&relay, json!({"name": "other"})).await;
    let mut waiting = vec![relay.begin(chat("m").bearer(&greedy)), relay.begin(chat("m").bearer(&greedy))];
    relay.wait_for_queue_depth("local", 2).await;
    let reply = relay.fetch(chat("m").bearer(&greedy)).await;
    let message = openai_error(&reply, 429, "rate_limit_error", "key_limit");
    assert!(message.contains("50 percent") && message.contains("max_queue_percent"), "{message}");
    assert_eq!(reply.header("retry-after").as_deref(), Some("1"));
    anthropic_error(&relay.fetch(messages("m").bearer(&greedy)).await, 429, "rate_limit_error");
    waiting.extend([relay.begin(chat("m").bearer(&other)), relay.begin(chat("m").bearer(&other))]);
    relay.wait_for_queue_depth("local", 4).await;
    let reply = relay.fetch(chat("m").bearer(&other)).await;
    openai_error(&reply, 429, "rate_limit_error", "queue_full");
    // A free worker serves the key, whatever its share.
    let mut worker = relay.worker(&["m"], 9).await;
    for _ in 0..4 {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
    }
    for waiting in waiting {
        let _ = waiting.reply().await.with_status(200);
    }
    let mut running = Vec::new();
    for _ in 0..3 {
        running.push(relay.begin(chat("m").bearer(&greedy)));
        worker.expect_request().await;
    }
}

#[tokio::test]
async fn queue_share_survives_restart_and_is_listed() {
    let relay = strict().env("MAX_QUEUE_LEN", "4").start().await;
    let (_, key) = new_key(&relay, json!({"name": "k", "max_queue_percent": 25})).await;
    let relay = relay.restart().await;
    assert_eq!(relay.admin_json("/admin/keys").await["keys"][0]["max_queue_percent"], 25);
    let _waiting = relay.begin(chat("m").bearer(&key));
    relay.wait_for_queue_depth("local", 1).await;
    openai_error(&relay.fetch(chat("m").bearer(&key)).await, 429, "rate_limit_error", "key_limit");
}

#[tokio::test]
async fn invalid_key_request_is_400() {
    let relay = Relay::start().await;
    let share = |percent: i64| json!({"name": "k", "max_queue_percent": percent});
    for body in [json!({}), json!({"name": 7}), json!([]), share(0), share(101), share(300), share(-1)] {
        assert_eq!(relay.admin_post("/admin/keys", &body).await.status, 400, "{body}");
    }
    assert_eq!(relay.admin_json("/admin/keys").await["keys"], json!([]));
}
