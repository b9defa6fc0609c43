//! Neither log contains secrets at LOG_LEVEL=debug, after everything that can happen to a request.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, sse};
use modelrelay_harness::relay::{ADMIN_TOKEN, WORKER_SECRET};
use modelrelay_harness::worker_process::Stack;
use serde_json::json;

const CHAT: &str = "/v1/chat/completions?trace=planted-query-55";

const PLANTED: [&str; 6] =
    [WORKER_SECRET, ADMIN_TOKEN, "planted-prompt-77", "planted-answer-88", "planted-client-key-66", "planted-query-55"];

fn prompt(stream: bool) -> Request {
    let messages = json!([{"role": "user", "content": "planted-prompt-77"}]);
    Request::post(CHAT, &json!({"model": "m", "stream": stream, "messages": messages})).bearer("planted-client-key-66")
}

async fn eventful_life(stack: &mut Stack) {
    for status in [200, 400, 500] {
        let client = stack.relay.begin(prompt(false));
        stack.backend.call().await.answer(&Answer::json(status, &json!({"content": "planted-answer-88"}))).await;
        client.reply().await.with_status(status);
    }
    let client = stack.relay.begin(prompt(true));
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    call.chunk(&sse("planted-answer-88")).await;
    let mut response = client.response().await;
    response.read_until("planted-answer-88").await;
    call.reset();
    response.read_to_end().await;
    let client = stack.relay.begin(prompt(true));
    let mut call = stack.backend.call().await;
    client.abandon();
    call.closed().await;
    let broken =
        Request::new("POST", CHAT).body("{\"model\": \"m\", \"planted-prompt-77").bearer("planted-client-key-66");
    stack.relay.fetch(broken).await.with_status(400);
    stack.relay.fetch(Request::post("/planted-query-55", &json!({}))).await.with_status(404);
    stack.relay.admin("GET", "/admin/workers").await.with_status(200);
    let wrong = Request::get("/admin/workers").bearer("planted-client-key-66");
    stack.relay.fetch(wrong).await.with_status(403);
}

#[tokio::test]
async fn neither_program_logs_secrets() {
    let mut stack = Stack::with(|relay| relay, |worker| worker).await;
    eventful_life(&mut stack).await;
    let client = stack.relay.begin(prompt(false));
    let _lost = stack.backend.call().await;
    stack.worker.process.kill().await;
    drop(client);
    for (program, log) in [("relay", stack.relay.log().lines().join("\n")), ("worker", stack.worker.log())] {
        for planted in PLANTED {
            assert!(!log.contains(planted), "{planted} is in the {program}'s log:\n{log}");
        }
        assert!(log.lines().count() > 5, "the {program} logged too few lines at debug");
    }
}

#[tokio::test]
async fn api_keys_are_neither_logged_nor_forwarded() {
    let mut stack =
        Stack::with(|relay| relay.env("MODELRELAY_REQUIRE_API_KEYS", "true"), |worker| worker.models("m,k")).await;
    let made = stack.relay.admin_post("/admin/keys", &json!({"name": "test"})).await.with_status(201).json();
    let key = made["secret"].as_str().expect("the key's secret").to_owned();
    let request = Request::post("/v1/chat/completions", &json!({"model": "m"}));
    let client = stack.relay.begin(request.bearer(&key).header("x-api-key", &key));
    let call = stack.backend.call().await;
    assert_eq!((call.head.header("authorization"), call.head.header("x-api-key")), (None, None));
    call.answer_json(200, &json!({})).await;
    client.reply().await.with_status(200);
    for log in [stack.relay.log().lines().join("\n"), stack.worker.log()] {
        assert!(!log.contains(&key), "an API key was logged");
    }
}
