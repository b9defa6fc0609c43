//! The audit log: changes through `/admin` with their authors, and rejected logins.

use std::os::unix::fs::PermissionsExt;

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::{ADMIN_TOKEN, Relay};
use modelrelay_harness::worker::slot;
use serde_json::{Value, json};

use crate::support::chat;

async fn start() -> Relay {
    Relay::builder().env("AUDIT_LOG_FILE", "audit.jsonl").start().await
}

/// An admin's request with a recognizable event.
fn admin_request(method: &str, target: &str, id: &str) -> Request {
    Request::new(method, target).bearer(ADMIN_TOKEN).header("x-request-id", id)
}

fn events(relay: &Relay, file: &str) -> Vec<Value> {
    let text = relay.read_file(file);
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}"))).collect()
}

/// Returns the event of the request with this id, once it exists.
async fn event(relay: &Relay, id: &str) -> Value {
    let of_id =
        || events(relay, "audit.jsonl").into_iter().filter(|event| event["request_id"] == id).collect::<Vec<_>>();
    relay.eventually(&format!("an event of {id}"), || async { !of_id().is_empty() }).await;
    let mut found = of_id();
    assert_eq!(found.len(), 1, "more than one event: {found:?}");
    found.remove(0)
}

/// Returns an event without its time, actor and request.
fn summary_of(event: &Value) -> Value {
    json!([event["action"], event["outcome"], event["status"], event["subject"]])
}

#[tokio::test]
async fn each_change_is_audited_in_file_and_log() {
    let relay = start().await;
    let mut worker = relay.dial().open().await;
    worker.register_slots1(&["m"], &[slot("gpu0", "empty", &["m"])]).await;
    let id = worker.worker_id.clone();
    let waiting = relay.begin(chat("m").header("x-request-id", "victim"));
    relay.wait_for_queue_depth("local", 1).await;

    let made = admin_request("POST", "/admin/keys", "q-create").body(json!({"name": "laptop"}).to_string());
    let made = relay.fetch(made).await.with_status(201).json();
    let (key, secret) = (made["id"].as_str().unwrap(), made["secret"].as_str().unwrap());
    let order = json!({"command": "load", "model": "m"}).to_string();
    let order = admin_request("POST", &format!("/admin/workers/{id}/command"), "q-command").body(order);
    let op = relay.fetch(order).await.with_status(202).json()["op_id"].as_str().unwrap().to_owned();
    for (method, target, request, status, action, subject) in [
        ("POST", format!("/admin/workers/{id}/refresh"), "q-refresh", 202, "worker.refresh", id.as_str()),
        ("POST", "/admin/requests/victim/cancel".to_owned(), "q-cancel", 202, "request.cancel", "victim"),
        ("DELETE", format!("/admin/keys/{key}"), "q-revoke", 204, "key.revoke", key),
        ("POST", format!("/admin/workers/{id}/drain"), "q-drain", 202, "worker.drain", id.as_str()),
    ] {
        let _ = relay.fetch(admin_request(method, &target, request)).await.with_status(status);
        assert_eq!(summary_of(&event(&relay, request).await), json!([action, "ok", status, subject]));
    }
    let created = event(&relay, "q-create").await;
    assert_eq!(summary_of(&created), json!(["key.create", "ok", 201, key]));
    assert_eq!(created["client"], "127.0.0.1");
    assert!(created["time"].as_str().is_some_and(|time| time.ends_with('Z') && time.len() == 24), "{created}");
    let command = event(&relay, "q-command").await;
    assert_eq!(summary_of(&command), json!(["worker.command", "ok", 202, id]));
    assert_eq!(command["detail"], format!("load model=m mode=drain op_id={op}"));
    assert_eq!(waiting.reply().await.status, 503);

    let line = relay.log().wait_for_line("request_id=\"q-revoke\"").await;
    for part in ["modelrelay::audit", "action=\"key.revoke\"", "outcome=\"ok\"", "client=127.0.0.1", key] {
        assert!(line.contains(part), "{part} in {line}");
    }
    let text = relay.read_file("audit.jsonl");
    for hidden in [secret, ADMIN_TOKEN] {
        assert!(!text.contains(hidden) && !relay.log().contains(hidden), "a secret was written");
    }
}

#[tokio::test]
async fn key_change_is_audited_with_its_fields() {
    let relay = start().await;
    let made = relay.admin_post("/admin/keys", &json!({"name": "k"})).await.with_status(201).json();
    let (key, secret) = (made["id"].as_str().unwrap(), made["secret"].as_str().unwrap());
    let fields = r#"{"name":"new","max_in_flight":5,"models":null}"#;
    for (id, body, request, status, outcome, subject, detail) in [
        (key, fields, "q-1", 200, "ok", json!(key), json!("name=\"new\" max_in_flight=5 models=null")),
        (key, r#"{"max_in_flight":0}"#, "q-2", 400, "refused", json!(key), Value::Null),
        (secret, fields, "q-3", 404, "refused", Value::Null, Value::Null),
    ] {
        let change = admin_request("PATCH", &format!("/admin/keys/{id}"), request).body(body);
        let _ = relay.fetch(change).await.with_status(status);
        let event = event(&relay, request).await;
        assert_eq!(summary_of(&event), json!(["key.update", outcome, status, subject]));
        assert_eq!(event["detail"], detail);
    }
    assert!(!relay.read_file("audit.jsonl").contains(secret));
}

#[tokio::test]
async fn reads_are_not_audited() {
    let relay = start().await;
    for path in ["/admin/workers", "/admin/keys", "/admin/state", "/admin/stats", "/admin/requests", "/metrics"] {
        let _ = relay.admin("GET", path).await.with_status(200);
    }
    let _ = relay.fetch(admin_request("POST", "/admin/keys", "last").body("{\"name\":\"k\"}")).await.with_status(201);
    event(&relay, "last").await;
    assert_eq!(events(&relay, "audit.jsonl").len(), 1);
}

#[tokio::test]
async fn refused_login_is_audited_with_forwarded_address() {
    let relay =
        Relay::builder().env("AUDIT_LOG_FILE", "audit.jsonl").env("TRUSTED_PROXIES", "127.0.0.1/32").start().await;
    let wrong = Request::new("DELETE", "/admin/keys/x").bearer("guessed-token").header("x-request-id", "guess");
    let wrong = wrong.header("x-forwarded-for", "203.0.113.9");
    assert_eq!(relay.fetch(wrong).await.status, 403);
    let refused = event(&relay, "guess").await;
    assert_eq!(summary_of(&refused), json!(["login", "refused", 403, null]));
    assert_eq!(refused["client"], "203.0.113.9");
    assert!(!relay.read_file("audit.jsonl").contains("guessed-token"));
}

#[tokio::test]
async fn failed_changes_are_audited_without_unknown_targets() {
    let relay = start().await;
    let made = relay.admin_post("/admin/keys", &json!({"name": "k"})).await.with_status(201).json();
    let secret = made["secret"].as_str().unwrap();
    for (method, target, request, status, action) in [
        // The whole key in place of its id is an easy mistake.
        ("DELETE", format!("/admin/keys/{secret}"), "q-1", 404, "key.revoke"),
        ("POST", "/admin/workers/nobody/drain".to_owned(), "q-2", 404, "worker.drain"),
        ("POST", "/admin/requests/none/cancel".to_owned(), "q-3", 404, "request.cancel"),
        ("POST", "/admin/keys".to_owned(), "q-4", 400, "key.create"),
    ] {
        let _ = relay.fetch(admin_request(method, &target, request)).await.with_status(status);
        assert_eq!(summary_of(&event(&relay, request).await), json!([action, "refused", status, null]));
    }
    assert!(!relay.read_file("audit.jsonl").contains(secret) && !relay.log().contains(secret), "a key was written");
}

#[tokio::test]
async fn unstorable_key_is_audited_as_failure() {
    let relay =
        Relay::builder().env("AUDIT_LOG_FILE", "audit.jsonl").env("API_KEYS_FILE", "absent/keys.json").start().await;
    let make = admin_request("POST", "/admin/keys", "q-full").body("{\"name\":\"k\"}");
    let _ = relay.fetch(make).await.with_status(503);
    assert_eq!(summary_of(&event(&relay, "q-full").await), json!(["key.create", "failed", 503, null]));
}

#[tokio::test]
async fn audit_file_is_private_and_appended_to() {
    let relay = start().await;
    let mode = std::fs::metadata(relay.path("audit.jsonl")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let _ = relay.fetch(admin_request("POST", "/admin/keys", "first").body("{\"name\":\"k\"}")).await.with_status(201);
    let relay = relay.restart().await;
    let _ = relay.fetch(admin_request("POST", "/admin/keys", "second").body("{\"name\":\"k\"}")).await.with_status(201);
    event(&relay, "second").await;
    event(&relay, "first").await;
}

#[tokio::test]
async fn moved_audit_file_is_recreated() {
    let relay = start().await;
    let _ = relay.fetch(admin_request("POST", "/admin/keys", "before").body("{\"name\":\"k\"}")).await.with_status(201);
    event(&relay, "before").await;
    std::fs::rename(relay.path("audit.jsonl"), relay.path("audit.jsonl.1")).unwrap();
    let _ = relay.fetch(admin_request("POST", "/admin/keys", "after").body("{\"name\":\"k\"}")).await.with_status(201);
    relay.eventually("a new file", || async { relay.path("audit.jsonl").exists() }).await;
    event(&relay, "after").await;
    let mode = std::fs::metadata(relay.path("audit.jsonl")).unwrap().permissions().mode();
    assert_eq!((mode & 0o777, events(&relay, "audit.jsonl.1").len()), (0o600, 1));
}

#[tokio::test]
async fn full_disk_fails_no_action_and_is_counted() {
    let relay = Relay::builder().env("AUDIT_LOG_FILE", "/dev/full").start().await;
    for request in ["one", "two"] {
        let _ =
            relay.fetch(admin_request("POST", "/admin/keys", request).body("{\"name\":\"k\"}")).await.with_status(201);
        relay.log().wait_for_line(&format!("request_id=\"{request}\"")).await;
    }
    let lost = || async { relay.metric("modelrelay_audit_write_failures_total").await == 2.0 };
    relay.eventually("two events are counted as lost", lost).await;
    relay.log().wait_for_line("cannot write to the audit log").await;
    assert_eq!(relay.log().count_of("cannot write to the audit log"), 1, "{}", relay.log().dump());
}

#[tokio::test]
async fn unwritable_audit_file_is_refused_at_start() {
    let (status, log) = Relay::builder().env("AUDIT_LOG_FILE", "absent/audit.jsonl").start_and_exit().await;
    assert_eq!(status.code(), Some(1), "{}", log.dump());
    let parts = ["AUDIT_LOG_FILE (--audit-log-file)", "absent/audit.jsonl", "cannot write to the file"];
    assert!(log.lines().iter().any(|line| parts.iter().all(|part| line.contains(part))), "{}", log.dump());
}
