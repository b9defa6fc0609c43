//! The position of a waiting request: in the headers of a refusal, and in the comments of a stream that waits.

use modelrelay_harness::client::{Reply, Response};
use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{chat, chat_stream, messages_stream, tag_of, tagged};

/// The position and the number of waiting requests in the headers.
fn position(reply: &Reply) -> (Option<String>, Option<String>) {
    (reply.header("x-modelrelay-queue-position"), reply.header("x-modelrelay-queue-length"))
}

fn at(position: &str, waiting: &str) -> (Option<String>, Option<String>) {
    (Some(position.to_owned()), Some(waiting.to_owned()))
}

#[tokio::test]
async fn refusal_of_full_queue_states_position() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "2").start().await;
    let _first = relay.begin(chat("m"));
    let _second = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 2).await;
    let refused = relay.fetch(chat("m")).await.with_status(429);
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    assert_eq!(position(&refused), at("3", "2"));
}

#[tokio::test]
async fn displaced_request_states_position() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "2").start().await;
    let _first = relay.begin(chat("m").header("x-modelrelay-class", "batch"));
    relay.wait_for_queue_depth("local", 1).await;
    let second = relay.begin(chat("m").header("x-modelrelay-class", "batch"));
    relay.wait_for_queue_depth("local", 2).await;
    let _higher = relay.begin(chat("m"));
    let displaced = second.reply().await.with_status(429);
    assert_eq!(displaced.json()["error"]["code"], "displaced");
    assert_eq!(position(&displaced), at("2", "2"));
}

#[tokio::test]
async fn timed_out_request_states_position() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").start().await;
    let expired = relay.fetch(chat("m")).await.with_status(504);
    assert_eq!(expired.json()["error"]["code"], "queue_timeout");
    assert_eq!(position(&expired), at("1", "1"));
}

#[tokio::test]
async fn other_responses_state_no_position() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.fail(&job.id, "bad_path", "no such path").await;
    let failed = pending.reply().await.with_status(502);
    assert_eq!(position(&failed), (None, None));
    let unknown = relay.fetch(chat("unknown")).await;
    assert_eq!(position(&unknown), (None, None));
}

/// Reads keep-alives until this one.
async fn read_position(stream: &mut Response, position: &str) {
    let _ = stream.read_until(&format!(": waiting, position {position}\n")).await;
}

#[tokio::test]
async fn waiting_stream_receives_falling_position() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "0.2").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let _running = relay.begin(tagged("m", "running"));
    let mut job = worker.expect_request().await;
    let _next = relay.begin(tagged("m", "next"));
    relay.wait_for_queue_depth("local", 1).await;
    let mut stream = relay.send(chat_stream("m")).await;
    assert_eq!(stream.status, 200);
    read_position(&mut stream, "2 of 2").await;
    let _last = relay.begin(chat("m"));
    read_position(&mut stream, "2 of 3").await;
    worker.answer(&job, &json!({})).await;
    job = worker.expect_request().await;
    assert_eq!(tag_of(&job), "next");
    read_position(&mut stream, "1 of 2").await;
    worker.answer(&job, &json!({})).await;
    job = worker.expect_request().await;
    let text = stream.read_until(": keepalive\n\n").await;
    assert!(text.ends_with(": keepalive\n\n"), "it waits no more: {text:?}");
    worker.start_stream(&job, "data: real\n\n").await;
    worker.end_stream(&job).await;
    let reply = stream.read_to_end().await;
    assert!(reply.text().ends_with("data: real\n\n") && !reply.aborted, "{}", reply.text());
}

#[tokio::test]
async fn position_precedes_unchanged_ping_of_anthropic() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "0.2").start().await;
    let mut stream = relay.send(messages_stream("m")).await;
    let text = stream.read_until("\n\n").await;
    assert_eq!(text, ": waiting, position 1 of 1\nevent: ping\ndata: {\"type\": \"ping\"}\n\n");
}
