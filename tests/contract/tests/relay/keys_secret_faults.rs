//! Faults between a relay and the Secret of its API keys.

use modelrelay_harness::{
    client::Request,
    fake_kubernetes::{DATA_KEY, FakeKubernetes, Fault, Mount, NAMESPACE, SECRET},
    relay::{ADMIN_TOKEN, Relay, RelayBuilder},
};
use serde_json::json;

use crate::keys_secret::{admits, names, new_key, relay_in};

/// Returns the error of an attempt to create a key.
async fn refusal(relay: &Relay, status: u16, code: &str) -> String {
    let reply = relay.admin_post("/admin/keys", &json!({"name": "k"})).await;
    let body = reply.text();
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (status, Some(code)), "{body}");
    reply.json()["error"]["message"].as_str().expect("a message").to_owned()
}

#[tokio::test]
async fn transient_faults_lose_and_duplicate_no_key() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    kubernetes.fail_reads(&[Fault::Status(503, "etcd is away"), Fault::Drop, Fault::TooManyRequests]);
    kubernetes.fail_writes(&[Fault::Drop, Fault::Status(500, "oops"), Fault::DropAfterwards]);
    let (id, key) = new_key(&relay, "k").await;
    assert!(admits(&relay, &key).await);
    assert_eq!(kubernetes.keys().len(), 1);
    kubernetes.fail_writes(&[Fault::Status(409, "conflict"), Fault::DropAfterwards]);
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    assert_eq!(kubernetes.keys()[0]["revoked"], true);
    assert!(!admits(&relay, &key).await);
}

#[tokio::test]
async fn concurrent_write_is_not_overwritten() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (id, key) = new_key(&relay, "first").await;
    let revoked = String::from_utf8(kubernetes.data().expect("a Secret")[DATA_KEY].clone()).expect("text");
    let revoked = revoked.replace("\"revoked\":false", "\"revoked\":true");
    kubernetes.after_next_read(move |data| {
        data.insert(DATA_KEY.to_owned(), revoked.into_bytes());
    });
    new_key(&relay, "second").await;
    let keys = kubernetes.keys();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys.iter().find(|key| key["id"] == id.as_str()).map(|key| &key["revoked"]), Some(&json!(true)));
    assert!(!admits(&relay, &key).await, "a revocation that was seen while writing counts");
}

#[tokio::test]
async fn rotated_account_token_is_used_at_once() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    new_key(&relay, "first").await;
    kubernetes.rotate_token("service-account-token-2");
    new_key(&relay, "second").await;
    // The server is ahead of the kubelet for a moment.
    kubernetes.expect_token("service-account-token-3");
    let refused = kubernetes.refusals();
    let request = relay.begin(Request::post("/admin/keys", &json!({"name": "third"})).bearer(ADMIN_TOKEN));
    relay.eventually("the old token is refused", || async { kubernetes.refusals() > refused }).await;
    kubernetes.rotate_token("service-account-token-3");
    let _ = request.reply().await.with_status(201);
    assert_eq!(names(&relay).await, ["first", "second", "third"]);
    assert!(!relay.log().contains("service-account-token"), "{}", relay.log().dump());
}

#[tokio::test]
async fn timed_out_attempt_does_not_hide_earlier_error() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    // One second each, so that too little time is left for the last one to be silent.
    let busy = || Fault::TooManyRequests;
    kubernetes.fail_reads(&[busy(), busy(), busy(), busy(), Fault::Silence]);
    let message = refusal(&relay, 503, "key_store_unavailable").await;
    assert!(message.contains("too many requests"), "{message}");
}

#[tokio::test]
async fn missing_permission_names_secret_and_required_verb() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    kubernetes.fail_reads(&[Fault::Status(403, "secrets is forbidden")]);
    let message = refusal(&relay, 503, "key_store_unavailable").await;
    for part in [&format!("{NAMESPACE}/{SECRET}"), "get", "Role", "403"] {
        assert!(message.contains(part), "{message}");
    }
    kubernetes.fail_writes(&[Fault::Status(403, "secrets is forbidden")]);
    let message = refusal(&relay, 503, "key_store_unavailable").await;
    assert!(message.contains("patch"), "{message}");
    assert!(names(&relay).await.is_empty() && kubernetes.data().is_some_and(|data| data.is_empty()));
}

#[tokio::test]
async fn missing_secret_is_named_with_create_command() {
    let kubernetes = FakeKubernetes::start().await;
    kubernetes.delete();
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let message = refusal(&relay, 503, "key_store_unavailable").await;
    assert!(message.contains("does not exist") && message.contains(SECRET), "{message}");
    assert!(message.contains(&format!("kubectl create secret generic {SECRET} -n {NAMESPACE}")), "{message}");
}

#[tokio::test]
async fn full_secret_refuses_further_keys_with_reason() {
    let kubernetes = FakeKubernetes::start().await;
    kubernetes.change(|data| {
        data.insert("theirs".to_owned(), vec![b'x'; (1 << 20) - 300]);
    });
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount).start().await;
    let (id, key) = new_key(&relay, "fits").await;
    let message = refusal(&relay, 409, "too_many_keys").await;
    assert!(message.contains("1 MiB") && message.contains(SECRET), "{message}");
    assert_eq!(names(&relay).await, ["fits"]);
    // The stored keys can be used and revoked to the end.
    assert!(admits(&relay, &key).await);
    assert_eq!(relay.admin("DELETE", &format!("/admin/keys/{id}")).await.status, 204);
    assert!(kubernetes.keys()[0]["last_used_at"].is_string());
}

#[tokio::test]
async fn server_of_another_authority_receives_no_token() {
    let (kubernetes, stranger) = tokio::join!(FakeKubernetes::start(), FakeKubernetes::start());
    let mount = Mount::new();
    let relay = relay_in(&kubernetes, &mount);
    let (_, port) = stranger.variables(&mount).swap_remove(1);
    let relay = relay.env("KUBERNETES_SERVICE_PORT", &port).start().await;
    let request = relay.begin(Request::post("/admin/keys", &json!({"name": "k"})).bearer(ADMIN_TOKEN));
    let reply = request.reply().await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(reply.text().contains("certificate"), "{}", reply.text());
    assert_eq!((stranger.reads(), stranger.refusals()), (0, 0), "a request reached the stranger");
}

#[tokio::test]
async fn conflicting_settings_are_refused_in_one_line() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = || relay_in(&kubernetes, &mount);
    let cases: [(RelayBuilder, &[&str]); 5] = [
        (relay().without_env("API_KEYS_FILE"), &["API_KEYS_SECRET (--api-keys-secret)", "API_KEYS_FILE"]),
        (relay().without_env("KUBERNETES_SERVICE_HOST"), &["API_KEYS_SECRET", "KUBERNETES_SERVICE_HOST"]),
        (relay().env("SERVICE_ACCOUNT_DIR", "absent"), &["POD_NAMESPACE (--pod-namespace)", "absent/namespace"]),
        (relay().env("API_KEYS_SECRET", "../x"), &["API_KEYS_SECRET (--api-keys-secret)", "../x"]),
        (relay().env("POD_NAMESPACE", "UPPER"), &["POD_NAMESPACE (--pod-namespace)", "UPPER"]),
    ];
    for (relay, parts) in cases {
        let (status, log) = relay.start_and_exit().await;
        assert_eq!(status.code(), Some(1), "{}", log.dump());
        assert!(log.lines().iter().any(|line| parts.iter().all(|part| line.contains(part))), "{}", log.dump());
    }
}

#[tokio::test]
async fn unreadable_keys_at_start_end_relay() {
    let kubernetes = FakeKubernetes::start().await;
    kubernetes.change(|data| {
        data.insert(DATA_KEY.to_owned(), b"garbage".to_vec());
    });
    let mount = Mount::new();
    mount.sync(&kubernetes);
    let (status, log) = relay_in(&kubernetes, &mount).start_and_exit().await;
    assert_eq!(status.code(), Some(1), "{}", log.dump());
    assert!(log.contains(DATA_KEY) && log.contains("left unchanged"), "{}", log.dump());
}
