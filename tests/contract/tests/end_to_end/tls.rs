//! Client, relay and worker over TLS.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::sse;
use modelrelay_harness::tls::Certificates;
use modelrelay_harness::worker_process::Stack;
use serde_json::json;

async fn start(certificates: &Certificates) -> Stack {
    Stack::with(|relay| relay.tls(certificates), |worker| worker.file("RELAY_CA_FILE", &certificates.ca_file())).await
}

fn chat(stream: bool) -> Request {
    Request::post("/v1/chat/completions", &json!({"model": "m", "stream": stream, "messages": []}))
}

#[tokio::test]
async fn responses_and_streams_pass_byte_for_byte() {
    let mut stack = start(&Certificates::make()).await;
    // More than any buffer on the way, both ways.
    let large = "x".repeat(3_000_000);
    let request = Request::post("/v1/chat/completions", &json!({"model": "m", "messages": [], "user": large}));
    let client = stack.relay.begin(request);
    let mut call = stack.backend.call().await;
    assert!(call.read_body().await.windows(20).filter(|part| *part == &large.as_bytes()[..20]).count() > 2_000_000);
    call.answer_json(200, &json!({ "content": large })).await;
    assert_eq!(client.reply().await.with_status(200).json()["content"], large);

    let client = stack.relay.begin(chat(true));
    let mut call = stack.backend.call().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    let mut response = client.response().await;
    // Not held back until there is more.
    assert_eq!(response.read_until("first").await, "data: first\n\n");
    call.chunk(&sse("second")).await;
    response.read_until("second").await;
    call.end_stream().await;
    let reply = response.read_to_end().await;
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: first\n\ndata: second\n\n", false));
}

#[tokio::test]
async fn vanished_client_cancels_request() {
    let mut stack = start(&Certificates::make()).await;
    let client = stack.relay.begin(chat(true));
    let mut call = stack.backend.call().await;
    call.start_stream().await;
    client.abandon();
    call.closed().await;
}

#[tokio::test]
async fn running_stream_continues_during_certificate_renewal() {
    let (old, new) = (Certificates::make(), Certificates::make());
    let mut stack = start(&old).await;
    let client = stack.relay.begin(chat(true));
    let mut call = stack.backend.call().await;
    call.start_stream().await;
    call.chunk(&sse("before")).await;
    let mut response = client.response().await;
    response.read_until("before").await;
    stack.relay.replace_file("tls.crt", &new.certificate());
    stack.relay.replace_file("tls.key", &new.key());
    stack.relay.log().wait_for_line("TLS certificate reloaded").await;
    stack.relay.trust(&new);
    assert_eq!(stack.relay.get("/livez").await.status, 200);
    call.chunk(&sse("after")).await;
    call.end_stream().await;
    let reply = response.read_to_end().await;
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: before\n\ndata: after\n\n", false));
    assert_eq!(stack.relay.workers().await.len(), 1, "the worker's link was cut");
}
