//! A backend that is healthy but fails every request.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::worker_process::{Stack, WorkerProcess};
use serde_json::{Value, json};

fn chat() -> Request {
    Request::post("/v1/chat/completions", &json!({"model": "m"}))
}

fn fail(backend: &FakeBackend) {
    backend.answer_with(|_, _| Answer::json(500, &json!({"error": {"message": "CUDA error"}})));
}

fn serve(backend: &FakeBackend) {
    backend.answer_with(|_, _| Answer::json(200, &json!({"served": true})));
}

async fn status(stack: &Stack) -> u16 {
    stack.relay.fetch(chat()).await.status
}

/// A relay, a worker whose backend fails every request, and one whose backend serves.
async fn one_fails() -> (Stack, WorkerProcess, FakeBackend) {
    let stack = Stack::start().await;
    fail(&stack.backend);
    let sound = FakeBackend::start().await;
    serve(&sound);
    let worker = Stack::worker_of(&stack.relay, &sound).start().await;
    stack.relay.wait_for_serving(2).await;
    (stack, worker, sound)
}

async fn wait_for_failing(stack: &Stack, failing: &Value) {
    let is_reported =
        || async { stack.relay.workers().await.iter().any(|worker| worker["failing_models"] == *failing) };
    stack.relay.eventually(&format!("a worker that reports {failing} as failing"), is_reported).await;
}

#[tokio::test]
async fn backend_failing_every_request_is_ejected() {
    let (stack, _sound, _backend) = one_fails().await;
    let mut statuses = Vec::new();
    for _ in 0..60 {
        statuses.push(status(&stack).await);
    }
    let failed = statuses.iter().filter(|status| **status != 200).count();
    assert!((5..=10).contains(&failed), "{failed} of 60 failed");
    assert!(statuses[20..].iter().all(|status| *status == 200), "{statuses:?}");
    wait_for_failing(&stack, &json!(["m"])).await;
    let health = stack.worker.probe("/healthz").await.json();
    assert_eq!((&health["failing_models"], &health["models"]), (&json!(["m"]), &json!(["m"])));
    assert_eq!(stack.worker.metric("modelrelay_worker_failing_models").await, 1.0);
    assert_eq!(stack.worker.log().matches("the backend fails every request").count(), 1, "{}", stack.worker.log());
}

#[tokio::test]
async fn only_worker_is_never_ejected() {
    let stack = Stack::start().await;
    fail(&stack.backend);
    for _ in 0..12 {
        assert_eq!(stack.relay.fetch(chat()).await.with_status(500).json()["error"]["message"], "CUDA error");
    }
    wait_for_failing(&stack, &json!(["m"])).await;
    assert_eq!(status(&stack).await, 500);
    serve(&stack.backend);
    assert_eq!(status(&stack).await, 200);
    wait_for_failing(&stack, &json!([])).await;
    stack.worker.process.wait_for_line("the backend responds to requests for the model again").await;
}

#[tokio::test]
async fn ejected_worker_returns_when_sound_one_leaves() {
    let (stack, sound, _backend) = one_fails().await;
    while !stack.worker.log().contains("the backend fails every request") {
        status(&stack).await;
    }
    wait_for_failing(&stack, &json!(["m"])).await;
    assert_eq!(status(&stack).await, 200);
    serve(&stack.backend);
    sound.terminate().await;
    stack.relay.wait_for_workers(1).await;
    assert_eq!(status(&stack).await, 200);
    wait_for_failing(&stack, &json!([])).await;
    assert_eq!(stack.worker.metric("modelrelay_worker_failing_models").await, 0.0);
}
