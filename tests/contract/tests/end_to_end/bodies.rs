//! Large and unusual bodies through both programs, and clients that read slowly.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, sse};
use modelrelay_harness::worker_process::Stack;
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

fn chat() -> Request {
    Request::post(CHAT, &json!({"model": "m"}))
}

/// Returns bytes without a pattern of a power of two.
fn noise(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

#[tokio::test]
async fn response_of_twenty_megabytes_passes_exactly() {
    let stack = Stack::start().await;
    stack.backend.answer_with(|_, _| Answer::new(200, &[("content-type", "audio/mpeg")], &noise(20 << 20)));
    let reply = stack.relay.fetch(chat()).await;
    assert!(reply.status == 200 && reply.body == noise(20 << 20), "{} bytes", reply.body.len());
}

#[tokio::test]
async fn event_of_one_megabyte_passes_exactly() {
    let mut stack = Stack::start().await;
    let answering = stack.relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})));
    let mut call = stack.backend.call().await;
    call.read_body().await;
    let event = sse(&"ż".repeat(1 << 19));
    let sent = event.clone();
    tokio::spawn(async move {
        call.start_stream().await;
        call.chunk(&sent).await;
        call.end_stream().await;
    });
    let reply = answering.reply().await;
    assert!(reply.body == event && !reply.aborted, "{} bytes", reply.body.len());
}

#[tokio::test]
async fn largest_prompt_of_control_characters_arrives_exactly() {
    let mut stack = Stack::start().await;
    let mut body = b"{\"model\":\"m\",\"prompt\":\"".to_vec();
    let escapes = ((32 << 20) - body.len() - 2) / 6;
    body.extend(b"\\u0001".repeat(escapes));
    body.extend(b"\"}");
    let answering = stack.relay.begin(Request::new("POST", "/v1/completions").body(body.clone()));
    let mut call = stack.backend.call().await;
    assert!(call.read_body().await == body, "the prompt was changed");
    call.answer_json(200, &json!({"ok": true})).await;
    answering.reply().await.with_status(200);
}

#[tokio::test]
async fn body_over_limit_is_rejected_unforwarded() {
    let stack = Stack::start().await;
    let body = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "p".repeat(32 << 20));
    let reply = stack.relay.fetch(Request::new("POST", "/v1/completions").body(body)).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (413, &json!("request_too_large")));
    assert_eq!(stack.backend.request_count("/v1/completions"), 0);
}

#[tokio::test]
async fn multipart_body_arrives_exactly() {
    let mut stack = Stack::start().await;
    let mut body = b"--xYz\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n".to_vec();
    body.extend(noise(200_000));
    body.extend(b"\r\n--xYz\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xYz--\r\n");
    let request =
        Request::new("POST", "/v1/audio/transcriptions").header("content-type", "multipart/form-data; boundary=xYz");
    let answering = stack.relay.begin(request.body(body.clone()));
    let mut call = stack.backend.call().await;
    assert_eq!(call.head.header("content-type"), Some("multipart/form-data; boundary=xYz"));
    assert!(call.read_body().await == body, "the form was changed");
    call.answer_json(200, &json!({"text": "hi"})).await;
    answering.reply().await.with_status(200);
}

#[tokio::test]
async fn large_uploads_do_not_disturb_neighbours() {
    let mut stack = Stack::start().await;
    let body = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "p".repeat(16 << 20));
    let _stuck = stack.relay.begin(Request::new("POST", "/v1/completions").body(body));
    let _unread = stack.backend.call().await;
    let answering = stack.relay.begin(chat());
    stack.backend.call().await.answer_json(200, &json!({"ok": true})).await;
    answering.reply().await.with_status(200);
}

#[tokio::test]
async fn client_not_reading_does_not_slow_others() {
    let mut stack = Stack::start().await;
    let slow = stack.relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})).small_receive_buffer());
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    let endless = tokio::spawn(async move { while call.chunk(&[b'x'; 65_536]).await {} });
    let _unread = slow.response().await;
    stack.backend.answer_with(|_, _| Answer::new(200, &[], &noise(4 << 20)));
    for _ in 0..5 {
        let reply = stack.relay.fetch(chat()).await;
        assert!(reply.body == noise(4 << 20), "{} bytes", reply.body.len());
    }
    assert!(!endless.is_finished(), "the slow client was cut");
    endless.abort();
}

#[tokio::test]
async fn client_not_reading_stops_its_backend() {
    let mut stack = Stack::start().await;
    let slow = stack.relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})).small_receive_buffer());
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    let mut response = slow.response().await;
    let block = vec![b'x'; 1 << 20];
    let mut written = 0_usize;
    while tokio::time::timeout(std::time::Duration::from_secs(1), call.chunk(&block)).await.is_ok() {
        written += 1;
        assert!(written < 64, "64 MiB were read for a client that does not read");
    }
    assert_eq!(response.read_at_least(written << 20).await.len() >> 20, written);
}

#[tokio::test]
async fn concurrent_requests_get_their_own_responses() {
    let stack = Stack::with(|relay| relay, |worker| worker.concurrency(16)).await;
    stack.backend.answer_with(|_, body| Answer::new(200, &[], body));
    let bodies: Vec<_> =
        (0..100).map(|number| json!({"model": "m", "number": number, "pad": "p".repeat(number * 997)})).collect();
    let pending: Vec<_> = bodies.iter().map(|body| stack.relay.begin(Request::post(CHAT, body))).collect();
    for (body, pending) in bodies.iter().zip(pending) {
        assert_eq!(pending.reply().await.with_status(200).json(), *body);
    }
}
