//! Authentication of workers.

use modelrelay_harness::{
    client::Request,
    relay::{Relay, WORKER_SECRET},
    worker::Dial,
};
use serde_json::json;

use crate::support::{chat, check_retry_after, two_providers};

#[tokio::test]
async fn secret_in_header_admits() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.register(&["m"], 1).await;
}

#[tokio::test]
async fn secret_in_query_admits_old_worker() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().query_secret(WORKER_SECRET).open().await;
    worker.register(&["m"], 1).await;
}

#[tokio::test]
async fn secret_outside_ascii_admits() {
    let secret = "geheim-äöü-geheim-geheim";
    let relay = Relay::builder().env("WORKER_SECRET", secret).start().await;
    relay.dial().secret(secret).open().await.register(&["m"], 1).await;
    assert_eq!(relay.dial().secret("geheim-aou-geheim-geheim").refused().await.status, 401);
}

#[tokio::test]
async fn secret_is_read_from_file() {
    let relay = Relay::builder().without_env("WORKER_SECRET").file("secret", "of-a-file-of-some-length\r\n");
    let relay = relay.env("WORKER_SECRET_FILE", "secret").start().await;
    relay.dial().secret("of-a-file-of-some-length").open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn refused_secret_with_quotes_is_explained_in_log() {
    let relay = Relay::start().await;
    let reply = relay.dial().secret(&format!("\"{WORKER_SECRET}\"")).refused().await;
    assert!(reply.status == 401 && !reply.text().contains("quotes"), "{}", reply.text());
    let line = relay.log().wait_for_line("worker authentication failed").await;
    assert!(line.contains("the worker's secret is enclosed in quotes"), "{line}");
    let relay = Relay::builder().env("WORKER_SECRET", "'a-secret-in-quotes'").start().await;
    assert_eq!(relay.dial().secret("a-secret-in-quotes").refused().await.status, 401);
    let line = relay.log().wait_for_line("worker authentication failed").await;
    assert!(
        line.contains("the relay's secret is enclosed in quotes") && !line.contains("a-secret-in-quotes"),
        "{line}"
    );
}

#[tokio::test]
async fn provider_defaults_to_local() {
    let relay = Relay::start().await;
    let mut worker = Dial::new(relay.addr(), relay.log()).secret(WORKER_SECRET).open().await;
    worker.register(&["m"], 1).await;
}

#[tokio::test]
async fn wrong_or_missing_secret_is_401() {
    let relay = Relay::start().await;
    let nearly = format!("{WORKER_SECRET}x");
    for secret in ["", "wrong", nearly.as_str()] {
        assert_eq!(relay.dial().secret(secret).refused().await.status, 401, "{secret:?}");
    }
    assert_eq!(relay.dial().no_secret().refused().await.status, 401);
    assert_eq!(relay.workers().await.len(), 0);
}

#[tokio::test]
async fn empty_configured_secret_admits_no_worker() {
    let yaml = "providers:\n- name: local\n  workerSecrets: [{file: secrets/empty}]\n";
    let relay = Relay::builder().file("secrets/empty", "").config(yaml).start().await;
    assert_eq!(relay.dial().secret("").refused().await.status, 401);
    assert_eq!(relay.dial().no_secret().refused().await.status, 401);
    assert_eq!(relay.dial().query_secret("").refused().await.status, 401);
}

#[tokio::test]
async fn any_of_several_secrets_admits() {
    let yaml = "providers:\n- name: local\n  workerSecrets:\n  - {file: secrets/one}\n  - {value: two}\n  \
                - {value: long-gone, notAfter: \"2020-01-01T00:00:00Z\"}\n  - {value: still-good, notAfter: \"2099-01-01T00:00:00Z\"}\n";
    let relay = Relay::builder().file("secrets/one", "one\n").config(yaml).start().await;
    for secret in ["one", "two", "still-good"] {
        relay.dial().secret(secret).open().await.register(&["m"], 1).await;
    }
    assert_eq!(relay.dial().secret("long-gone").refused().await.status, 401);
}

#[tokio::test]
async fn unknown_provider_is_404_only_with_valid_secret() {
    let relay = Relay::start().await;
    assert_eq!(relay.dial().provider("nowhere").refused().await.status, 404);
    assert_eq!(relay.dial().provider("nowhere").secret("wrong").refused().await.status, 401);
}

#[tokio::test]
async fn disabled_provider_refuses_workers_with_403() {
    let relay = Relay::builder().config(two_providers("  enabled: false", "")).start().await;
    assert_eq!(relay.dial().refused().await.status, 403);
    assert_eq!(relay.dial().secret("wrong").refused().await.status, 401);
    relay.dial().provider("other").open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn secret_does_not_admit_to_another_provider() {
    let yaml = "providers:\n- name: local\n  workerSecrets: [{value: of-local}]\n- name: other\n  workerSecrets: [{value: of-other}]\n";
    let relay = Relay::builder().config(yaml).start().await;
    assert_eq!(relay.dial().secret("of-other").refused().await.status, 401);
    relay.dial().provider("other").secret("of-other").open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn invalid_handshake_is_refused_before_secret_check() {
    let relay = Relay::start().await;
    let plain = relay.fetch(relay.dial().secret("wrong").request()).await;
    assert!([400, 426].contains(&plain.status), "{}", plain.status);
    let old = relay
        .dial()
        .secret("wrong")
        .request()
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "8")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
    let reply = relay.fetch(old).await;
    assert_eq!(reply.status, 426, "{}", reply.text());
    assert_eq!(reply.header("sec-websocket-version").as_deref(), Some("13"));
    let keyless = relay
        .dial()
        .request()
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13");
    assert_eq!(relay.fetch(keyless).await.status, 400);
}

#[tokio::test]
async fn five_failures_lock_out_address() {
    let relay = Relay::start().await;
    for _ in 0..5 {
        assert_eq!(relay.dial().secret("wrong").refused().await.status, 401);
    }
    let reply = relay.dial().secret("wrong").refused().await;
    assert_eq!(reply.status, 429);
    check_retry_after(&reply);
    let plain = relay.fetch(relay.dial().secret("wrong").request()).await;
    assert!([400, 426].contains(&plain.status), "the handshake must be checked first");
}

#[tokio::test]
async fn valid_secret_is_never_locked_out() {
    let relay = Relay::start().await;
    for _ in 0..8 {
        relay.dial().secret("wrong").refused().await;
    }
    relay.dial().open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn forwarded_address_needs_trusted_proxy() {
    let relay = Relay::start().await;
    for number in 0..5 {
        let dial = relay.dial().secret("wrong").header("x-forwarded-for", &format!("203.0.113.{number}"));
        assert_eq!(dial.refused().await.status, 401);
    }
    let dial = relay.dial().secret("wrong").header("x-forwarded-for", "203.0.113.99");
    assert_eq!(dial.refused().await.status, 429, "a forged address escaped the lockout");
}

#[tokio::test]
async fn lockout_behind_trusted_proxy_is_per_forwarded_address() {
    let relay = Relay::builder().env("TRUSTED_PROXIES", "127.0.0.1").start().await;
    for _ in 0..5 {
        let dial = relay.dial().secret("wrong").header("x-forwarded-for", "203.0.113.1");
        assert_eq!(dial.refused().await.status, 401);
    }
    let dial = relay.dial().secret("wrong").header("x-forwarded-for", "203.0.113.1");
    assert_eq!(dial.refused().await.status, 429);
    let dial = relay.dial().secret("wrong").header("x-forwarded-for", "203.0.113.2");
    assert_eq!(dial.refused().await.status, 401);
}

#[tokio::test]
async fn api_key_never_admits_worker() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let key = relay.admin_post("/admin/keys", &json!({"name": "k"})).await.with_status(201).json();
    let secret = key["secret"].as_str().expect("a secret");
    assert_eq!(relay.dial().secret(secret).refused().await.status, 401);
    let dial = relay.dial().no_secret().header("authorization", &format!("Bearer {secret}"));
    assert_eq!(dial.refused().await.status, 401);
    relay.dial().open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn no_secret_is_ever_logged() {
    let relay = Relay::builder().env("LOG_LEVEL", "trace").start().await;
    relay.dial().secret("a-wrong-secret").refused().await;
    relay.dial().query_secret("another-wrong-secret").refused().await;
    relay.dial().query_secret(WORKER_SECRET).open().await.register(&["m"], 1).await;
    relay.log().wait_for_line("worker registered").await;
    for secret in [WORKER_SECRET, "a-wrong-secret", "another-wrong-secret"] {
        assert!(!relay.log().contains(secret), "{secret} was logged");
    }
}

#[tokio::test]
async fn workers_can_have_their_own_listener() {
    let relay = Relay::builder().env("WORKER_LISTEN_ADDR", "127.0.0.1:0").start().await;
    relay.dial().to(relay.worker_addr().await).open().await.register(&["m"], 1).await;
    relay.dial().open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn workers_can_be_excluded_from_client_listener() {
    let relay =
        Relay::builder().env("WORKER_LISTEN_ADDR", "127.0.0.1:0").env("WORKERS_ON_CLIENT_PORT", "false").start().await;
    relay.dial().to(relay.worker_addr().await).open().await.register(&["m"], 1).await;
    assert_eq!(relay.dial().refused().await.status, 404);
    let on_worker_port = Request::get("/v1/models").fetch(relay.worker_addr().await, relay.log()).await;
    assert_eq!(on_worker_port.status, 404, "clients' routes are not on the workers' listener");
}

#[tokio::test]
async fn removed_secret_drains_and_closes_its_workers() {
    let two = "providers:\n- name: local\n  workerSecrets: [{value: old}, {value: new}]\n";
    let relay = Relay::builder().config(two).start().await;
    let mut old = relay.dial().secret("old").open().await;
    old.register(&["m"], 1).await;
    let mut new = relay.dial().secret("new").open().await;
    new.register(&["n"], 1).await;
    relay.replace_file("relay.yaml", "providers:\n- name: local\n  workerSecrets: [{value: new}]\n");
    assert_eq!(old.expect("graceful_shutdown").await["drain_timeout_secs"], 30);
    assert_eq!(old.expect_close().await, (1008, "worker authentication failed".to_owned()));
    assert_eq!(relay.dial().secret("old").refused().await.status, 401);
    new.expect_quiet().await;
}

#[tokio::test]
async fn expired_secret_drains_and_closes_its_workers() {
    let soon = std::process::Command::new("date").args(["-u", "-d", "+3 seconds", "+%FT%TZ"]).output().expect("date");
    let soon = String::from_utf8(soon.stdout).expect("text");
    let secrets = format!("[{{value: old, notAfter: \"{}\"}}, {{value: new}}]", soon.trim());
    let relay =
        Relay::builder().config(format!("providers:\n- name: local\n  workerSecrets: {secrets}\n")).start().await;
    let mut old = relay.dial().secret("old").open().await;
    old.register(&["m"], 1).await;
    let mut new = relay.dial().secret("new").open().await;
    new.register(&["n"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = old.expect_request().await;
    // Time for everything that runs, not only a drain's 30 s: after a rotation, every worker ends like this at once.
    assert_eq!(old.expect("graceful_shutdown").await["drain_timeout_secs"], 86_400);
    old.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(old.expect_close().await, (1008, "worker authentication failed".to_owned()));
    assert_eq!(relay.dial().secret("old").refused().await.status, 401);
    new.expect_quiet().await;
}

#[tokio::test]
async fn changed_secret_file_is_reloaded() {
    let yaml = "providers:\n- name: local\n  workerSecrets: [{file: secrets/s}]\n";
    let relay = Relay::builder().file("secrets/s", "first").config(yaml).start().await;
    relay.dial().secret("first").open().await.register(&["m"], 1).await;
    relay.replace_file("secrets/s", "second\n");
    relay
        .eventually("the new secret admits", || async {
            let reply = relay.fetch(relay.dial().provider("nowhere").secret("second").handshake()).await;
            // An unknown provider is a 404 once the secret is accepted. A lockout does not affect a valid secret.
            reply.status == 404
        })
        .await;
    relay.dial().secret("second").open().await.register(&["m"], 1).await;
}
