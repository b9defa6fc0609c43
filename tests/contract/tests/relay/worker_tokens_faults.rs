//! Faults between a relay and the API server that reviews tokens. An unknown result is not a rejection.

use modelrelay_harness::fake_kubernetes::{AN_HOUR, FakeKubernetes, Fault, made_up};
use modelrelay_harness::relay::Relay;
use serde_json::Value;

use crate::support::check_retry_after;
use crate::worker_tokens::relay_in;

const AUDIENCE: &str = "modelrelay";
const GPU: &str = "llm/gpu";

async fn error(relay: &Relay) -> Value {
    relay.admin_json("/admin/state").await["worker_tokens_error"].clone()
}

#[tokio::test]
async fn unavailable_api_server_is_503_without_lockout() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    for fault in [
        Fault::Drop,
        Fault::Status(500, "etcd is away"),
        Fault::Status(503, "starting"),
        Fault::TooManyRequests,
        Fault::Status(403, "tokenreviews is forbidden"),
        Fault::Status(401, "Unauthorized"),
        Fault::Status(404, "no such page"),
    ] {
        kubernetes.fail_reviews(std::slice::from_ref(&fault));
        let reply = relay.dial().token(&token).refused().await;
        assert_eq!(reply.status, 503, "{fault:?}");
        check_retry_after(&reply);
        assert!(reply.text().contains("cannot review the token"), "{}", reply.text());
        assert!(error(&relay).await.is_string());
    }
    let unverified = "modelrelay_worker_connections_total{provider=\"local\",result=\"unverified\"}";
    assert_eq!(relay.metric(unverified).await, 7.0);
    // No failure was counted: a fifth wrong one still gets 401, and a valid one is accepted.
    for number in 0..5 {
        assert_eq!(relay.dial().token(&made_up(GPU, AUDIENCE, AN_HOUR, number)).refused().await.status, 401);
    }
    relay.dial().token(&token).open().await.register(&["m"], 1).await;
    assert_eq!(error(&relay).await, Value::Null);
}

#[tokio::test]
async fn missing_permission_is_reported_with_its_remedy() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    let forbidden = Fault::Status(403, "tokenreviews is forbidden");
    kubernetes.fail_reviews(&[forbidden.clone(), forbidden.clone(), forbidden]);
    for _ in 0..3 {
        assert_eq!(relay.dial().token(&token).refused().await.status, 503);
    }
    let reason = error(&relay).await;
    let reason = reason.as_str().expect("an error");
    assert!(reason.contains("ClusterRole") && reason.contains("create") && reason.contains("tokenreviews"), "{reason}");
    assert_eq!(relay.log().count_of("cannot review worker tokens"), 1, "{}", relay.log().dump());
    // The rejected worker learns nothing of that.
    kubernetes.fail_reviews(&[Fault::Status(403, "tokenreviews is forbidden")]);
    assert!(!relay.dial().token(&token).refused().await.text().contains("ClusterRole"));
}

#[tokio::test]
async fn connected_worker_stays_while_reviews_fail() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).env("WORKER_TOKEN_RECHECK_SECS", "0.05").start().await;
    // It expires soon; the grace period for a new one starts only if the API server rejects the token.
    let mut worker = relay.dial().token(&kubernetes.token(GPU, AUDIENCE, 2)).open().await;
    worker.register(&["m"], 1).await;
    kubernetes.fail_reviews(&vec![Fault::Status(503, "away"); 60]);
    let reviews = kubernetes.reviewed().len();
    relay.eventually("many reviews have failed", || async { kubernetes.reviewed().len() >= reviews + 60 }).await;
    assert_eq!(relay.log().count_of("graceful shutdown"), 0, "{}", relay.log().dump());
    assert_eq!(worker.expect("graceful_shutdown").await["drain_timeout_secs"], 86_400);
}

#[tokio::test]
async fn shared_token_is_reviewed_once() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    let held = kubernetes.hold_reviews();
    let mut dials = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let dial = relay.dial().token(&token);
        dials.spawn(async move { dial.open().await });
    }
    relay.eventually("a review", || async { kubernetes.waiting_reviews() == 1 }).await;
    drop(held);
    while let Some(worker) = dials.join_next().await {
        worker.expect("the worker is accepted").register(&["m"], 1).await;
    }
    assert_eq!(kubernetes.reviewed(), std::slice::from_ref(&token));
    // A returning fleet causes no further reviews either.
    relay.dial().token(&token).open().await.register(&["m"], 1).await;
    assert_eq!(kubernetes.reviewed().len(), 1);
}

#[tokio::test]
async fn invalid_token_flood_does_not_block_valid_token() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).env("TRUSTED_PROXIES", "127.0.0.1").start().await;
    // This address is known for many failures.
    for number in 0..5 {
        assert_eq!(relay.dial().token(&made_up(GPU, AUDIENCE, AN_HOUR, number)).refused().await.status, 401);
    }
    let held = kubernetes.hold_reviews();
    let mut flood = tokio::task::JoinSet::new();
    for number in 100..300 {
        flood.spawn(relay.dial().token(&made_up(GPU, AUDIENCE, AN_HOUR, number)).refused());
    }
    let one = flood.join_next().await.expect("a flood").expect("a response");
    assert_eq!(one.status, 503, "the queue of addresses with many failures must be full");
    relay.eventually("a review", || async { kubernetes.waiting_reviews() == 1 }).await;
    let good = relay.dial().token(&kubernetes.token(GPU, AUDIENCE, AN_HOUR)).header("x-forwarded-for", "203.0.113.1");
    let good = tokio::spawn(good.open());
    relay.eventually("a separate review", || async { kubernetes.waiting_reviews() == 2 }).await;
    drop(held);
    good.await.expect("the worker is accepted").register(&["m"], 1).await;
    let mut statuses: Vec<u16> = flood.join_all().await.iter().map(|reply| reply.status).collect();
    statuses.sort_unstable();
    assert!(statuses.iter().all(|status| [429, 503].contains(status)), "{statuses:?}");
    assert!(kubernetes.reviewed().len() < 40, "{} reviews", kubernetes.reviewed().len());
}

#[tokio::test]
async fn at_most_eight_tokens_are_reviewed_concurrently() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let held = kubernetes.hold_reviews();
    let mut dials = tokio::task::JoinSet::new();
    for _ in 0..30 {
        let dial = relay.dial().token(&kubernetes.token(GPU, AUDIENCE, AN_HOUR));
        dials.spawn(async move { dial.open().await });
    }
    relay.eventually("eight reviews", || async { kubernetes.waiting_reviews() == 8 }).await;
    drop(held);
    let workers = dials.join_all().await;
    assert_eq!((workers.len(), kubernetes.reviewed().len()), (30, 30));
}

#[tokio::test]
async fn disconnect_of_worker_does_not_cancel_shared_review() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).start().await;
    let token = kubernetes.token(GPU, AUDIENCE, AN_HOUR);
    let held = kubernetes.hold_reviews();
    let first = tokio::spawn(relay.dial().token(&token).open());
    relay.eventually("a review", || async { kubernetes.waiting_reviews() == 1 }).await;
    let second = tokio::spawn(relay.dial().token(&token).open());
    first.abort();
    let _ = first.await;
    drop(held);
    second.await.expect("the worker is accepted").register(&["m"], 1).await;
    assert_eq!(kubernetes.reviewed().len(), 1);
}
