//! Faults between a relay and the API server that reviews tokens of clients. An unknown result is not a rejection.

use modelrelay_harness::fake_kubernetes::{AN_HOUR, FakeKubernetes, Fault, made_up};
use modelrelay_harness::relay::Relay;
use serde_json::{Value, json};

use crate::support::{anthropic_error, chat, check_retry_after, messages, openai_error};
use crate::tenants::{AUDIENCE, CHAT, relay_with, served};
use crate::usage::new_key;

const TENANTS: &str = "[{namespace: apps}]";

async fn error(relay: &Relay) -> Value {
    relay.admin_json("/admin/state").await["client_tokens_error"].clone()
}

#[tokio::test]
async fn unavailable_api_server_is_503_for_unknown_tokens() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, TENANTS).start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let (_, key) = new_key(&relay, &json!({"name": "k"})).await;
    let (known, new) = (kubernetes.token(CHAT, AUDIENCE, AN_HOUR), kubernetes.token(CHAT, AUDIENCE, AN_HOUR));
    served(&relay, &mut worker, chat("m").bearer(&known)).await;
    for fault in [
        Fault::Drop,
        Fault::Status(500, "etcd is away"),
        Fault::TooManyRequests,
        Fault::Status(403, "tokenreviews is forbidden"),
    ] {
        kubernetes.fail_reviews(&[fault]);
        let reply = relay.fetch(chat("m").bearer(&new)).await;
        let message = openai_error(&reply, 503, "service_unavailable_error", "token_unverified");
        assert!(message.contains("cannot review the token with the cluster now; try again"), "{message}");
        check_retry_after(&reply);
        assert!(error(&relay).await.is_string());
        for credential in [&known, &key] {
            served(&relay, &mut worker, chat("m").bearer(credential)).await;
        }
    }
    kubernetes.fail_reviews(&[Fault::Drop]);
    anthropic_error(&relay.fetch(messages("m").header("x-api-key", &new)).await, 503, "overloaded_error");
    let error_text = error(&relay).await.to_string();
    served(&relay, &mut worker, chat("m").bearer(&new)).await;
    assert_eq!(error(&relay).await, Value::Null, "after {error_text}");
}

#[tokio::test]
async fn requests_with_one_token_share_its_review() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, TENANTS).start().await;
    let mut worker = relay.worker(&["m"], 32).await;
    let (_, key) = new_key(&relay, &json!({"name": "k"})).await;
    let token = kubernetes.token(CHAT, AUDIENCE, AN_HOUR);
    let held = kubernetes.hold_reviews();
    let abandoned = relay.begin(chat("m").bearer(&token));
    relay.eventually("a review", async || kubernetes.waiting_reviews() == 1).await;
    let pending: Vec<_> = (0..20).map(|_| relay.begin(chat("m").bearer(&token))).collect();
    abandoned.abandon();
    // Clients with keys do not wait for it.
    served(&relay, &mut worker, chat("m").bearer(&key)).await;
    drop(held);
    for _ in 0..20 {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
    }
    for client in pending {
        let _ = client.reply().await.with_status(200);
    }
    assert_eq!(kubernetes.reviewed(), [token]);
}

#[tokio::test]
async fn forged_tokens_do_not_delay_valid_ones() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, TENANTS).env("TRUSTED_PROXIES", "127.0.0.1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let known = kubernetes.token(CHAT, AUDIENCE, AN_HOUR);
    served(&relay, &mut worker, chat("m").bearer(&known)).await;
    let forged = |number| chat("m").bearer(&made_up(CHAT, AUDIENCE, AN_HOUR, number));
    // This address is known for many failures.
    for number in 0..5 {
        assert_eq!(relay.fetch(forged(number)).await.status, 401);
    }
    let held = kubernetes.hold_reviews();
    let flood: Vec<_> = (100..200).map(|number| relay.begin(forged(number))).collect();
    relay
        .eventually("most are rejected", async || flood.iter().filter(|client| client.is_answered()).count() >= 80)
        .await;
    // It begins a moment after the review before it.
    relay.eventually("one of them is reviewed", async || kubernetes.waiting_reviews() == 1).await;
    // It has not lost its access, and other addresses have reviews of their own.
    served(&relay, &mut worker, chat("m").bearer(&known)).await;
    let other = kubernetes.token("apps/other", AUDIENCE, AN_HOUR);
    let pending = relay.begin(chat("m").bearer(&other).header("x-forwarded-for", "203.0.113.1"));
    relay.eventually("a separate review", async || kubernetes.waiting_reviews() == 2).await;
    drop(held);
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    for client in flood {
        let status = client.reply().await.status;
        assert!([401, 503].contains(&status), "{status}");
    }
}
