//! The checks of a request before it is dispatched, and what is not checked.

use std::io::Write;

use modelrelay_harness::{
    client::{RawConnection, Request},
    relay::Relay,
};
use serde_json::json;

use crate::support::{anthropic_error, openai_error, post_bytes};

const PATH: &str = "/v1/chat/completions";

async fn refusal(relay: &Relay, body: &[u8], code: &str) -> String {
    let reply = relay.fetch(post_bytes(PATH, body)).await;
    openai_error(&reply, 400, "invalid_request_error", code)
}

async fn is_let_through(body: &[u8]) {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(post_bytes(PATH, body));
    let job = worker.expect_request().await;
    assert!(job.body == body, "the body was changed");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn body_other_than_json_object_is_400() {
    let relay = Relay::start().await;
    for body in ["", "{", "not json", "{\"model\":\"m\"", "{\"model\":\"m\"} x", "{'model':'m'}"] {
        refusal(&relay, body.as_bytes(), "invalid_json").await;
    }
    for body in ["[]", "\"m\"", "7", "null"] {
        assert_eq!(relay.fetch(post_bytes(PATH, body)).await.status, 400, "{body}");
    }
}

#[tokio::test]
async fn missing_or_empty_model_is_400_and_named() {
    let relay = Relay::start().await;
    for body in ["{}", "{\"messages\":[]}", "{\"model\":\"\"}", "{\"a\":{\"model\":\"m\"}}"] {
        let message = refusal(&relay, body.as_bytes(), "missing_model").await;
        assert!(message.contains("model"), "{message}");
    }
}

#[tokio::test]
async fn non_string_model_is_400_and_named() {
    let relay = Relay::start().await;
    for body in ["{\"model\":7}", "{\"model\":null}", "{\"model\":[\"m\"]}", "{\"model\":{}}"] {
        let reply = relay.fetch(post_bytes(PATH, body)).await;
        assert_eq!(reply.status, 400, "{body}");
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
        assert!(reply.json()["error"]["message"].as_str().is_some_and(|text| text.contains("model")), "{body}");
    }
}

#[tokio::test]
async fn duplicate_model_is_400() {
    let relay = Relay::start().await;
    for body in [
        r#"{"model":"a","model":"b"}"#,
        r#"{"model":"a","model":"a"}"#,
        r#"{"model":"a","x":[1,{"y":2}],"mod\u0065l":"b"}"#,
    ] {
        let reply = relay.fetch(post_bytes(PATH, body)).await;
        assert_eq!(reply.status, 400, "{body}");
        assert!(reply.json()["error"]["message"].as_str().is_some_and(|text| text.contains("model")), "{body}");
    }
}

#[tokio::test]
async fn non_boolean_stream_is_400_and_named() {
    let relay = Relay::start().await;
    for body in [r#"{"model":"m","stream":"yes"}"#, r#"{"model":"m","stream":1}"#] {
        let reply = relay.fetch(post_bytes(PATH, body)).await;
        assert_eq!(reply.status, 400, "{body}");
        assert!(reply.json()["error"]["message"].as_str().is_some_and(|text| text.contains("stream")), "{body}");
    }
}

#[tokio::test]
async fn null_stream_is_false() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(post_bytes(PATH, r#"{"model":"m","stream":null}"#));
    let job = worker.expect_request().await;
    assert_eq!(job.message["is_streaming"], false);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn non_string_previous_response_id_is_400() {
    let relay = Relay::start().await;
    let reply = relay.fetch(post_bytes("/v1/responses", r#"{"model":"m","previous_response_id":7}"#)).await;
    assert_eq!(reply.status, 400);
    assert!(reply.json()["error"]["message"].as_str().is_some_and(|text| text.contains("previous_response_id")));
}

#[tokio::test]
async fn bad_request_is_400_in_anthropic_dialect() {
    let relay = Relay::start().await;
    anthropic_error(&relay.fetch(post_bytes("/v1/messages", "{")).await, 400, "invalid_request_error");
    let request = post_bytes(PATH, "{}").header("anthropic-version", "2023-06-01");
    anthropic_error(&relay.fetch(request).await, 400, "invalid_request_error");
}

#[tokio::test]
async fn other_fields_are_not_validated() {
    is_let_through(br#"{"messages":"wrong","temperature":"hot","model":"m","stream_options":7,"tools":null}"#).await;
}

#[tokio::test]
async fn deep_nesting_is_not_validated() {
    let body = format!("{{\"x\":{}{},\"model\":\"m\"}}", "[".repeat(20_000), "]".repeat(20_000));
    is_let_through(body.as_bytes()).await;
}

#[tokio::test]
async fn large_numbers_and_lone_surrogates_are_not_validated() {
    is_let_through(br#"{"n":123456789012345678901234567890e9999,"s":"\ud800","model":"m"}"#).await;
}

#[tokio::test]
async fn announced_body_over_limit_is_413() {
    let relay = Relay::builder().env("MAX_REQUEST_BYTES", "1000").start().await;
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n").await;
    let answer = raw.read_head().await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(answer.contains("request_too_large") || raw.read_to_end().await.contains("request_too_large"));
}

#[tokio::test]
async fn body_over_limit_is_413_in_both_dialects() {
    let relay = Relay::builder().env("MAX_REQUEST_BYTES", "1000").start().await;
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "y".repeat(1000));
    let message =
        openai_error(&relay.fetch(post_bytes(PATH, &body)).await, 413, "invalid_request_error", "request_too_large");
    assert!(message.contains("1000"), "{message}");
    anthropic_error(&relay.fetch(post_bytes("/v1/messages", &body)).await, 413, "request_too_large");
}

#[tokio::test]
async fn chunked_body_over_limit_is_413() {
    let relay = Relay::builder().env("MAX_REQUEST_BYTES", "1000").start().await;
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").await;
    raw.write(format!("400\r\n{}\r\n", "z".repeat(0x400))).await;
    let answer = raw.read_head().await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

#[tokio::test]
async fn body_of_exactly_limit_size_passes() {
    let relay = Relay::builder().env("MAX_REQUEST_BYTES", "1000").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let frame = r#"{"model":"m","x":""}"#.len();
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "y".repeat(1000 - frame));
    assert_eq!(body.len(), 1000);
    let pending = relay.begin(post_bytes(PATH, body));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn chunked_body_passes() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
    )
    .await;
    raw.write("5\r\n{\"mod\r\n").await;
    raw.write("8\r\nel\":\"m\"}\r\n0\r\n\r\n").await;
    let job = worker.expect_request().await;
    assert_eq!(job.body, br#"{"model":"m"}"#);
    worker.answer(&job, &json!({"fine": true})).await;
    let answer = raw.read_to_end().await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"fine\":true"), "{answer}");
}

#[tokio::test]
async fn body_of_unknown_coding_is_415() {
    let relay = Relay::start().await;
    for encoding in ["br", "deflate", "gzip, gzip", "compress"] {
        let request = post_bytes(PATH, r#"{"model":"m"}"#).header("content-encoding", encoding);
        openai_error(&relay.fetch(request).await, 415, "invalid_request_error", "unsupported_encoding");
    }
    let request = post_bytes("/v1/messages", r#"{"model":"m"}"#).header("content-encoding", "br");
    anthropic_error(&relay.fetch(request).await, 415, "invalid_request_error");
}

#[tokio::test]
async fn compressed_body_reaches_worker_decoded() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let body = r#"{"model":"m"}"#;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(body.as_bytes()).expect("memory");
    // One frame with one block, uncompressed.
    let zstd = [b"\x28\xb5\x2f\xfd\x00\x58\x69\x00\x00", body.as_bytes()].concat();
    for (coding, bytes) in [("gzip", gzip.finish().expect("memory")), ("zstd", zstd)] {
        let pending = relay.begin(post_bytes(PATH, bytes).header("content-encoding", coding));
        let job = worker.expect_request().await;
        assert_eq!((job.body.as_slice(), job.header("content-encoding")), (body.as_bytes(), None), "{coding}");
        worker.answer(&job, &json!({})).await;
        pending.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn client_disconnect_mid_body_affects_no_others() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"model\":\"m\"").await;
    drop(raw);
    let pending = relay.begin(Request::post(PATH, &json!({"model": "m", "user": "whole"})));
    let job = worker.expect_request().await;
    assert_eq!(job.json()["user"], "whole");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn expect_continue_over_limit_is_413_without_upload() {
    let relay = Relay::builder().env("MAX_REQUEST_BYTES", "65536").start().await;
    let mut connection = RawConnection::open(relay.addr(), relay.log()).await;
    connection
        .write(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\
             expect: 100-continue\r\n\r\n",
        )
        .await;
    // If the relay sent a 100, this would wait for the body.
    let text = connection.read_to_end().await;
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
}
