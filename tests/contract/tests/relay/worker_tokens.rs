//! Workers that present the token of their ServiceAccount.

use modelrelay_harness::{
    client::Reply,
    fake_kubernetes::{AN_HOUR, FakeKubernetes, Mount, made_up},
    relay::{Relay, RelayBuilder},
};
use serde_json::{Value, json};

use crate::support::{chat, check_retry_after};

const AUDIENCE: &str = "modelrelay";
const GPU: &str = "llm/gpu";

/// A relay in a Pod of this cluster that accepts workers of [`GPU`], and has no secret.
pub(crate) fn relay_in(kubernetes: &FakeKubernetes) -> RelayBuilder {
    let relay = Relay::builder().without_env("WORKER_SECRET");
    kubernetes.reviewing(GPU).into_iter().fold(relay, |relay, (name, value)| relay.env(name, &value))
}

/// A relay that reads this file instead, and reviews the tokens of connected workers ten times a second.
fn relay_with(kubernetes: &FakeKubernetes, yaml: &str) -> RelayBuilder {
    relay_in(kubernetes).without_env("WORKER_SERVICE_ACCOUNTS").config(yaml).env("WORKER_TOKEN_RECHECK_SECS", "0.1")
}

fn yaml(accounts: &str, more: &str) -> String {
    format!("providers:\n- name: local\n  workerServiceAccounts: {accounts}\n{more}")
}

fn reason(reply: &Reply) -> String {
    reply.json()["error"]["message"].as_str().expect("a message").to_owned()
}

#[tokio::test]
async fn token_of_listed_account_admits_with_identity() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    let mut worker = relay.dial().token(&token).open().await;
    worker.register(&["m"], 1).await;
    assert_eq!(relay.workers().await[0]["identity"], GPU);
    let line = relay.log().wait_for_line("worker registered").await;
    assert!(line.contains(GPU), "{line}");
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(kubernetes.reviewed(), [token]);
}

#[tokio::test]
async fn secret_and_token_are_both_accepted() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).env("WORKER_SECRET", "a-secret-of-workers").start().await;
    let mut by_secret = relay.dial().secret("a-secret-of-workers").open().await;
    by_secret.register(&["m"], 1).await;
    assert_eq!(relay.workers().await[0]["identity"], Value::Null);
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    relay.dial().token(&token).open().await.register(&["m"], 1).await;
    // An outdated secret does not invalidate a valid token, or the reverse.
    relay.dial().token(&token).header("x-worker-secret", "an-old-secret").open().await.register(&["m"], 1).await;
    let bad = made_up(GPU, AUDIENCE, AN_HOUR, 1);
    relay.dial().token(&bad).header("x-worker-secret", "a-secret-of-workers").open().await.register(&["m"], 1).await;
    assert!(!kubernetes.reviewed().contains(&bad), "a good secret needs no review");
}

#[tokio::test]
async fn invalid_tokens_are_401() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let refused = [
        (made_up(GPU, AUDIENCE, AN_HOUR, 1), "worker authentication failed"),
        (kubernetes.token("llm/other", AUDIENCE, AN_HOUR), "worker authentication failed"),
        (kubernetes.token(GPU, "somebody-else", AN_HOUR), "wrong audience; it must be modelrelay"),
        (kubernetes.token(GPU, AUDIENCE, -61), "expired"),
    ];
    for (token, why) in &refused {
        let reply = relay.dial().token(token).refused().await;
        assert!(reply.status == 401 && reason(&reply).contains(why), "{}", reply.text());
    }
    // Only a plausible token causes a review.
    assert_eq!(kubernetes.reviewed(), [refused[0].0.clone()]);
    assert_eq!(relay.workers().await.len(), 0);
    let failed = "modelrelay_worker_connections_total{provider=\"local\",result=\"auth_failed\"}";
    assert_eq!(relay.metric(failed).await, 4.0);
}

#[tokio::test]
async fn malformed_token_is_401_without_review() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).env("TRUSTED_PROXIES", "127.0.0.1").start().await;
    let good = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    let long = format!("{good}{}", "x".repeat(9000));
    let parts: Vec<_> = good.split('.').collect();
    let without_signature = format!("{}.{}.", parts[0], parts[1]);
    for (number, token) in
        ["", "x", "..", "mr-f7ipcwmraanq-mqx2fcp3hkw6d7kq", &long, &without_signature].into_iter().enumerate()
    {
        // Each from its own address, so that none is locked out.
        let dial = relay.dial().token(token).header("x-forwarded-for", &format!("203.0.113.{number}"));
        assert_eq!(dial.refused().await.status, 401, "{token}");
    }
    let dial = relay.dial().no_secret().header("authorization", &format!("Basic {good}"));
    assert_eq!(dial.refused().await.status, 401);
    assert_eq!(relay.dial().no_secret().query("token", &good).refused().await.status, 401);
    assert_eq!(kubernetes.reviewed(), Vec::<String>::new());
}

#[tokio::test]
async fn token_reviewed_without_audience_is_401() {
    let kubernetes = FakeKubernetes::start().await;
    kubernetes.forget_audiences();
    let relay = relay_in(&kubernetes).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    assert_eq!(relay.dial().token(&token).refused().await.status, 401);
}

#[tokio::test]
async fn token_without_configured_accounts_is_401_naming_setting() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = Relay::start().await;
    let reply = relay.dial().token(&kubernetes.token(GPU, AUDIENCE, AN_HOUR)).refused().await;
    assert_eq!(reply.status, 401);
    assert!(reason(&reply).contains("workerServiceAccounts (WORKER_SERVICE_ACCOUNTS)"), "{}", reply.text());
}

#[tokio::test]
async fn account_does_not_admit_to_another_provider() {
    let kubernetes = FakeKubernetes::start().await;
    let other =
        "- name: other\n  workerServiceAccounts: [llm/other]\n- name: third\n  workerSecrets: [{value: of-third}]\n";
    let relay = relay_with(&kubernetes, &yaml("[llm/gpu]", other)).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    let reply = relay.dial().provider("other").token(&token).refused().await;
    assert!(
        reply.status == 401 && reason(&reply).contains("do not include ServiceAccount llm/gpu"),
        "{}",
        reply.text()
    );
    assert_eq!(relay.dial().provider("third").token(&token).refused().await.status, 401);
    relay.dial().token(&token).open().await.register(&["m"], 1).await;
    let of_other = kubernetes.token("llm/other", AUDIENCE, AN_HOUR);
    relay.dial().provider("other").token(&of_other).open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn unknown_provider_is_404_only_with_valid_token() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let nowhere = |token: &str| relay.dial().provider("nowhere").token(token).refused();
    assert_eq!(nowhere(&kubernetes.token(GPU, AUDIENCE, AN_HOUR)).await.status, 404);
    assert_eq!(nowhere(&made_up(GPU, AUDIENCE, AN_HOUR, 1)).await.status, 401);
    assert_eq!(nowhere(&kubernetes.token("llm/other", AUDIENCE, AN_HOUR)).await.status, 401);
}

#[tokio::test]
async fn refused_tokens_lock_address_but_valid_one_admits() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    for number in 0..5 {
        assert_eq!(relay.dial().token(&made_up(GPU, AUDIENCE, AN_HOUR, number)).refused().await.status, 401);
    }
    let reply = relay.dial().token(&made_up(GPU, AUDIENCE, AN_HOUR, 9)).refused().await;
    assert_eq!(reply.status, 429);
    check_retry_after(&reply);
    relay.dial().token(&kubernetes.token(GPU, AUDIENCE, AN_HOUR)).open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn configured_audience_is_required() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).env("WORKER_TOKEN_AUDIENCE", "gpus.example").start().await;
    assert_eq!(relay.dial().token(&kubernetes.token(GPU, AUDIENCE, AN_HOUR)).refused().await.status, 401);
    relay.dial().token(&kubernetes.token(GPU, "gpus.example", AN_HOUR)).open().await.register(&["m"], 1).await;
}

#[tokio::test]
async fn revoked_token_drains_and_closes_its_workers() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, &yaml("[llm/gpu]", "")).start().await;
    let (token, other) = (kubernetes.token(GPU, AUDIENCE, AN_HOUR), kubernetes.token(GPU, AUDIENCE, AN_HOUR));
    let mut gone = relay.dial().token(&token).open().await;
    gone.register(&["m"], 1).await;
    let mut stays = relay.dial().token(&other).open().await;
    stays.register(&["n"], 1).await;
    kubernetes.revoke(&token);
    assert_eq!(gone.expect("graceful_shutdown").await["drain_timeout_secs"], 30);
    assert_eq!(gone.expect_close().await, (1008, "worker authentication failed".to_owned()));
    assert_eq!(relay.dial().token(&token).refused().await.status, 401, "a cached review must expire by then");
    stays.expect_quiet().await;
}

#[tokio::test]
async fn removed_account_drains_and_closes_its_workers() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, &yaml("[llm/gpu, llm/other]", "")).start().await;
    let mut gone = relay.dial().token(&kubernetes.token(GPU, AUDIENCE, AN_HOUR)).open().await;
    gone.register(&["m"], 1).await;
    let mut stays = relay.dial().token(&kubernetes.token("llm/other", AUDIENCE, AN_HOUR)).open().await;
    stays.register(&["n"], 1).await;
    relay.replace_file("relay.yaml", &yaml("[llm/other]", ""));
    assert_eq!(gone.expect("graceful_shutdown").await["drain_timeout_secs"], 30);
    assert_eq!(gone.expect_close().await, (1008, "worker authentication failed".to_owned()));
    stays.expect_quiet().await;
}

#[tokio::test]
async fn expired_token_drains_link_with_long_timeout() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, &yaml("[llm/gpu]", "")).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, 2);
    let mut worker = relay.dial().token(&token).open().await;
    worker.register(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    assert_eq!(worker.expect("graceful_shutdown").await["drain_timeout_secs"], 86_400);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(worker.expect_close().await, (1008, "worker authentication failed".to_owned()));
}

#[tokio::test]
async fn no_token_is_ever_logged() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).env("LOG_LEVEL", "trace").start().await;
    let (good, bad) = (kubernetes.token(GPU, AUDIENCE, AN_HOUR), made_up(GPU, AUDIENCE, AN_HOUR, 1));
    relay.dial().token(&bad).refused().await;
    relay.dial().token(&good).open().await.register(&["m"], 1).await;
    relay.log().wait_for_line("worker registered").await;
    for token in [good, bad] {
        let signature = token.rsplit('.').next().expect("a signature");
        assert!(!relay.log().contains(signature), "{}", relay.log().dump());
    }
}

#[tokio::test]
async fn conflicting_settings_are_refused_in_one_line() {
    let kubernetes = FakeKubernetes::start().await;
    let outside = |relay: RelayBuilder| relay.without_env("KUBERNETES_SERVICE_HOST");
    let cases: [(RelayBuilder, &[&str]); 4] = [
        (
            outside(relay_in(&kubernetes)),
            &["WORKER_SERVICE_ACCOUNTS (--worker-service-accounts) requires a Pod", "use a worker secret"],
        ),
        (outside(relay_with(&kubernetes, &yaml("[llm/gpu]", ""))), &["workerServiceAccounts requires a Pod"]),
        (relay_in(&kubernetes).env("WORKER_SERVICE_ACCOUNTS", "llm"), &["--worker-service-accounts", "NAMESPACE/NAME"]),
        (relay_in(&kubernetes).env("WORKER_SERVICE_ACCOUNTS", ""), &["WORKER_SECRET", "WORKER_SERVICE_ACCOUNTS"]),
    ];
    for (relay, parts) in cases {
        let (status, log) = relay.start_and_exit().await;
        assert_eq!(status.code(), Some(1), "{}", log.dump());
        assert!(log.lines().iter().any(|line| parts.iter().all(|part| line.contains(part))), "{}", log.dump());
    }
}

#[tokio::test]
async fn keys_and_tokens_share_relays_own_account() {
    let kubernetes = FakeKubernetes::start().await;
    let mount = Mount::new();
    let relay = kubernetes.variables(&mount).into_iter().fold(relay_in(&kubernetes), |relay, (n, v)| relay.env(n, &v));
    let relay = relay.start().await;
    let _ = relay.admin_post("/admin/keys", &json!({"name": "k"})).await.with_status(201);
    relay.dial().token(&kubernetes.token(GPU, AUDIENCE, AN_HOUR)).open().await.register(&["m"], 1).await;
}
