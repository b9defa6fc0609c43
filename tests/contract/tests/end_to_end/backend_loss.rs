//! A backend that is down gets no requests, and recovers by itself.

use std::time::{Duration, Instant};

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::worker_process::{Stack, WorkerProcess};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

/// Ten times the 2 s within which a worker recovers after its backend did.
const RECOVERY: Duration = Duration::from_secs(20);

fn chat() -> Request {
    Request::post(CHAT, &json!({"model": "m"}))
}

async fn withdrawn(stack: &Stack) {
    let gone = || async { !stack.relay.get("/v1/models").await.text().contains("\"m\"") };
    stack.relay.eventually("model m gone from /v1/models", gone).await;
}

#[tokio::test]
async fn request_at_dead_backend_is_retried_elsewhere() {
    let mut stack = Stack::start().await;
    let other = FakeBackend::start().await;
    other.answer_with(|_, _| Answer::json(200, &json!({"by": "the other"})));
    let _second = Stack::worker_of(&stack.relay, &other).start().await;
    stack.relay.wait_for_workers(2).await;
    stack.backend.refuse().await;
    for _ in 0..6 {
        assert_eq!(stack.relay.fetch(chat()).await.with_status(200).json(), json!({"by": "the other"}));
    }
}

#[tokio::test]
async fn recovered_backend_returns_within_two_seconds() {
    let mut stack = Stack::with(|relay| relay.env("QUEUE_TIMEOUT_SECS", "1"), |worker| worker).await;
    stack.backend.refuse().await;
    let reply = stack.relay.fetch(chat()).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (502, &json!("backend_unreachable")));
    withdrawn(&stack).await;
    stack.backend.reopen();
    let back = Instant::now();
    stack.wait_for_model("m").await;
    assert!(back.elapsed() < RECOVERY);
    stack.backend.answer_with(|_, _| Answer::json(200, &json!({"back": true})));
    assert_eq!(stack.relay.fetch(chat()).await.json(), json!({"back": true}));
}

#[tokio::test]
async fn request_waits_for_returning_backend() {
    let mut stack = Stack::start().await;
    stack.backend.refuse().await;
    let client = stack.relay.begin(chat());
    withdrawn(&stack).await;
    stack.backend.reopen();
    stack.backend.call().await.answer_json(200, &json!({"waited": true})).await;
    assert_eq!(client.reply().await.with_status(200).json(), json!({"waited": true}));
}

#[tokio::test]
async fn request_to_loading_backend_is_requeued() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(chat());
    let call = stack.backend.call().await;
    let other = FakeBackend::start().await;
    other.answer_with(|_, _| Answer::json(200, &json!({"by": "the other"})));
    let _second = Stack::worker_of(&stack.relay, &other).start().await;
    stack.relay.wait_for_workers(2).await;
    stack.backend.set_healthy(false);
    call.answer_json(503, &json!({"error": {"message": "Loading model"}})).await;
    assert_eq!(client.reply().await.with_status(200).json(), json!({"by": "the other"}));
}

#[tokio::test]
async fn request_waits_while_its_backend_loads() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(chat());
    let call = stack.backend.call().await;
    stack.backend.set_healthy(false);
    call.answer_json(503, &json!({"error": {"message": "Loading model"}})).await;
    withdrawn(&stack).await;
    stack.backend.set_healthy(true);
    stack.backend.call().await.answer_json(200, &json!({"waited": true})).await;
    assert_eq!(client.reply().await.with_status(200).json(), json!({"waited": true}));
}

#[tokio::test]
async fn model_appears_with_its_backend() {
    let stack = Stack::start().await;
    let mut late = FakeBackend::refusing().await;
    late.set_models(&["late"]);
    let _worker: WorkerProcess = Stack::worker_of(&stack.relay, &late).models("*").start().await;
    stack.relay.wait_for_workers(2).await;
    assert!(!stack.relay.get("/v1/models").await.text().contains("\"late\""));
    late.reopen();
    stack.wait_for_model("late").await;
}

#[tokio::test]
async fn queued_request_is_dispatched_when_model_is_advertised() {
    let mut stack = Stack::start().await;
    stack.backend.set_models(&[]);
    let _worker = Stack::worker_of(&stack.relay, &stack.backend).models("*").start().await;
    stack.relay.wait_for_workers(2).await;
    let client = stack.relay.begin(Request::post(CHAT, &json!({"model": "late"})));
    stack.relay.wait_for_queue_depth("local", 1).await;
    stack.backend.set_models(&["late"]);
    stack.backend.call().await.answer_json(200, &json!({"late": true})).await;
    assert_eq!(client.reply().await.with_status(200).json(), json!({"late": true}));
}

#[tokio::test]
async fn broken_connection_of_only_backend_is_retried() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(chat());
    for _ in 0..2 {
        let mut call = stack.backend.call().await;
        call.read_body().await;
        drop(call);
    }
    stack.backend.call().await.answer_json(200, &json!({"third": true})).await;
    assert_eq!(client.reply().await.with_status(200).json(), json!({"third": true}));
}

#[tokio::test]
async fn backend_breaking_every_connection_leads_to_error() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(chat());
    for _ in 0..4 {
        let mut call = stack.backend.call().await;
        call.read_body().await;
        drop(call);
    }
    assert_eq!(client.reply().await.status, 502);
}

#[tokio::test]
async fn garbage_from_backend_leads_to_clear_error() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(chat());
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.write_raw(b"\x16\x03\x01 not HTTP at all\r\n\r\n").await;
    drop(call);
    let answered = async { client.reply().await };
    let again = async {
        while let Some(mut call) = stack.backend.call_within(Duration::from_millis(500)).await {
            call.read_body().await;
            call.write_raw(b"\x16\x03\x01 not HTTP at all\r\n\r\n").await;
        }
    };
    let (reply, ()) = tokio::join!(answered, again);
    assert_eq!(reply.status, 502);
    assert!(reply.json()["error"]["message"].is_string(), "{}", reply.text());
}

#[tokio::test]
async fn relay_as_backend_is_refused() {
    let stack = Stack::start().await;
    let looped = Stack::worker_of(&stack.relay, &stack.backend).backend(stack.relay.url()).models("looped");
    let looped = looped.start().await;
    looped.process.wait_for_line("BACKEND_URL points to a ModelRelay relay").await;
    stack.relay.wait_for_workers(2).await;
    assert!(!stack.relay.get("/v1/models").await.text().contains("looped"));
    assert_eq!(looped.probe("/healthz").await.json()["backend"]["condition"], "not_ready");
}
