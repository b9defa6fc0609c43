//! A relay with only the seeds' protocol: text messages, no `error`, no grants.

use std::time::Duration;

use modelrelay_harness::TEST_TIMEOUT;
use modelrelay_harness::fake_backend::{Answer, sse};
use modelrelay_harness::fake_relay::{Ack, Event, RelayLink, RequestSpec};
use modelrelay_harness::worker_process::Rig;
use serde_json::{Value, json};

/// The messages that a relay of the seeds can read.
const SEED_MESSAGES: [&str; 5] = ["models_update", "pong", "response_chunk", "response_complete", "register"];

/// Checks that everything unread so far is a message of the seeds.
async fn only_seed_messages(link: &mut RelayLink) {
    link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    link.expect("pong").await;
    let foreign = |event: &Event| match event {
        Event::Message(message) => !SEED_MESSAGES.contains(&message.kind()),
        Event::Piece { .. } | Event::Closed { .. } => true,
        Event::Ping(_) => false,
    };
    let found = link.next_where(Duration::ZERO, foreign).await;
    assert!(found.is_none(), "{found:?}");
}

#[tokio::test]
async fn unary_response_is_one_response_complete() {
    let mut rig = Rig::old().await;
    let body = json!({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}});
    let reply = rig.answered(&RequestSpec::chat("m"), &Answer::json(200, &body)).await;
    assert_eq!((reply.status, reply.json()), (200, body));
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert!(reply.parts.is_empty(), "a unary response in chunks");
    let counts = json!({"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6});
    assert_eq!(reply.end["token_counts"], counts);
}

#[tokio::test]
async fn backend_error_passes_with_its_status() {
    let mut rig = Rig::old().await;
    for status in [400, 404, 429, 500, 503] {
        let answer = Answer::new(status, &[("content-type", "text/plain")], b"the backend's own words");
        let reply = rig.answered(&RequestSpec::chat("m"), &answer).await;
        assert_eq!((reply.status, reply.body.as_slice()), (status, &b"the backend's own words"[..]));
    }
}

#[tokio::test]
async fn stream_becomes_chunks_and_completion() {
    let mut rig = Rig::old().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    for data in ["one", "two"] {
        call.chunk(&sse(data)).await;
        assert_eq!(rig.link.part(&request).await, sse(data));
    }
    call.end_stream().await;
    let end = rig.link.expect("response_complete").await;
    assert_eq!((end["request_id"].as_str(), end["status_code"].as_u64()), (Some(request.id.as_str()), Some(200)));
}

#[tokio::test]
async fn chunks_end_on_character_boundaries() {
    let mut rig = Rig::old().await;
    let body = sse("zażółć 🦙 \u{10ffff} ok");
    for cut in 1..body.len() {
        let request = rig.link.send_request(&RequestSpec::stream("m"));
        let mut call = rig.backend.call().await;
        call.start_stream().await;
        call.chunk(&body[..cut]).await;
        let whole = whole_characters(&body[..cut]);
        let mut got = Vec::new();
        while got.len() < whole {
            got.extend(rig.link.part(&request).await);
        }
        assert_eq!(got.len(), whole, "cut at {cut}");
        call.chunk(&body[cut..]).await;
        call.end_stream().await;
        got.extend(rig.link.reply(&request).await.body);
        assert!(got == body, "cut at {cut}: {:?}", String::from_utf8_lossy(&got));
    }
}

/// Returns the number of bytes that form whole characters.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.len(),
        Err(error) => error.valid_up_to(),
    }
}

#[tokio::test]
async fn stream_request_failing_at_backend_keeps_status() {
    let mut rig = Rig::old().await;
    let body = json!({"error": {"message": "no such thing"}});
    let reply = rig.answered(&RequestSpec::stream("m"), &Answer::json(404, &body)).await;
    assert_eq!((reply.status, reply.json()), (404, body));
    assert!(reply.parts.is_empty(), "the first chunk means 200 to this relay");
}

#[tokio::test]
async fn unreachable_backend_leads_to_response_without_error_message() {
    let mut rig = Rig::old().await;
    rig.backend.refuse().await;
    let reply = rig.link.exchange(&RequestSpec::chat("m")).await;
    assert_eq!(reply.status, 502);
    assert_eq!(reply.json()["error"]["code"], "backend_unreachable");
    assert_eq!(reply.json()["error"]["type"], "server_error");
    only_seed_messages(&mut rig.link).await;
}

#[tokio::test]
async fn failures_use_dialect_of_path() {
    let mut rig = Rig::old().await;
    rig.backend.refuse().await;
    let reply = rig.link.exchange(&RequestSpec::chat("m").path("/v1/messages")).await;
    assert_eq!(reply.status, 502);
    assert_eq!((&reply.json()["type"], &reply.json()["error"]["type"]), (&json!("error"), &json!("api_error")));
}

#[tokio::test]
async fn forbidden_path_leads_to_response_without_error_message() {
    let mut rig = Rig::old().await;
    let reply = rig.link.exchange(&RequestSpec::chat("m").path("/admin")).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (502, &json!("bad_path")));
    only_seed_messages(&mut rig.link).await;
    rig.still_serves().await;
}

/// Breaks a stream by a reset of the backend after the first event; returns the last chunk and the completion.
async fn broken_stream(rig: &mut Rig, path: &str) -> (String, Value) {
    let request = rig.link.send_request(&RequestSpec::stream("m").path(path));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    assert_eq!(rig.link.part(&request).await, sse("first"));
    call.reset();
    let reply = rig.link.reply(&request).await;
    (String::from_utf8(reply.body).expect("chunks are text"), reply.end)
}

#[tokio::test]
async fn broken_stream_ends_with_error_frame() {
    let mut rig = Rig::old().await;
    let (frame, end) = broken_stream(&mut rig, "/v1/chat/completions").await;
    let data = frame.trim().strip_prefix("data: ").expect("one data frame");
    let error: Value = serde_json::from_str(data).expect("JSON in the frame");
    assert!(error["error"]["message"].is_string() && error["error"]["code"].is_string(), "{error}");
    assert!(frame.ends_with("\n\n"), "{frame:?}");
    assert_eq!(end["type"], "response_complete");
    only_seed_messages(&mut rig.link).await;
}

#[tokio::test]
async fn broken_messages_stream_ends_with_anthropic_error_event() {
    let mut rig = Rig::old().await;
    let (frame, _) = broken_stream(&mut rig, "/v1/messages").await;
    let data = frame.strip_prefix("event: error\ndata: ").expect("an error event").trim();
    let error: Value = serde_json::from_str(data).expect("JSON in the frame");
    assert_eq!((&error["type"], error["error"]["type"].is_string()), (&json!("error"), true));
}

#[tokio::test]
async fn broken_responses_stream_ends_with_nested_error_event() {
    let mut rig = Rig::old().await;
    let (frame, _) = broken_stream(&mut rig, "/v1/responses").await;
    let data = frame.split_once("data: ").expect("a data line").1.trim();
    let error: Value = serde_json::from_str(data).expect("JSON in the frame");
    assert!(error["error"]["message"].is_string(), "{error}");
}

#[tokio::test]
async fn requests_over_capacity_wait_in_arrival_order() {
    let mut rig = Rig::with(&Ack::old(), 1, |worker| worker).await;
    let requests: Vec<_> = (0..4)
        .map(|number| rig.link.send_request(&RequestSpec::chat("m").body(number.to_string().as_bytes())))
        .collect();
    for (number, request) in requests.iter().enumerate() {
        let mut call = rig.backend.call().await;
        assert_eq!(call.read_body().await, number.to_string().as_bytes());
        let crowd = rig.backend.call_within(Duration::from_millis(50)).await;
        assert!(crowd.is_none(), "two requests at once on one slot");
        call.answer_json(200, &json!(number)).await;
        assert_eq!(rig.link.reply(request).await.json(), json!(number));
    }
    only_seed_messages(&mut rig.link).await;
}

#[tokio::test]
async fn cancelled_request_is_aborted_and_still_completed() {
    let mut rig = Rig::old().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    rig.link.cancel(&request.id, "client_disconnect");
    call.closed().await;
    let reply = rig.link.reply(&request).await;
    assert!(reply.is_complete());
}

#[tokio::test]
async fn cancelled_waiting_request_completes_without_reaching_backend() {
    let mut rig = Rig::with(&Ack::old(), 1, |worker| worker).await;
    let first = rig.link.send_request(&RequestSpec::chat("m"));
    let held = rig.backend.call().await;
    let waiting = rig.link.send_request(&RequestSpec::chat("m").body(b"cancelled"));
    rig.link.cancel(&waiting.id, "timeout");
    assert!(rig.link.reply(&waiting).await.is_complete());
    held.answer_json(200, &json!("first")).await;
    assert_eq!(rig.link.reply(&first).await.json(), json!("first"));
    rig.still_serves().await;
}

#[tokio::test]
async fn old_relay_receives_no_model_details() {
    let mut rig = Rig::with(&Ack::old(), 1, |worker| worker.models("*")).await;
    rig.backend.set_details(&json!({"max_model_len": 40960}));
    rig.link.send(&json!({"type": "models_refresh", "reason": "periodic"}));
    let update = rig.link.expect("models_update").await;
    assert_eq!((&update["models"], update.body.get("model_details")), (&json!(["m"]), None));
}

#[tokio::test]
async fn whole_session_uses_only_seed_messages() {
    let mut rig = Rig::old().await;
    rig.still_serves().await;
    rig.link.send(&json!({"type": "models_refresh", "reason": "periodic"}));
    rig.link.expect("models_update").await;
    rig.worker.terminate().await;
    let withdrawn = rig.link.expect_where("models_update", |update| update["models"] == json!([])).await;
    assert_eq!(withdrawn["current_load"], 0);
    let foreign = |event: &Event| match event {
        Event::Message(message) => !SEED_MESSAGES.contains(&message.kind()),
        Event::Piece { .. } => true,
        Event::Ping(_) | Event::Closed { .. } => false,
    };
    assert!(rig.link.next_where(Duration::from_secs(4), foreign).await.is_none());
}

#[tokio::test]
async fn request_crossing_withdrawal_is_served() {
    let mut rig = Rig::old().await;
    let running = rig.link.send_request(&RequestSpec::chat("m"));
    let held = rig.backend.call().await;
    rig.worker.terminate().await;
    rig.link.expect_where("models_update", |update| update["models"] == json!([])).await;
    let crossing = rig.link.send_request(&RequestSpec::chat("m"));
    rig.backend.call().await.answer_json(200, &json!("crossed")).await;
    assert_eq!(rig.link.reply(&crossing).await.json(), json!("crossed"));
    held.answer_json(200, &json!("finished")).await;
    assert_eq!(rig.link.reply(&running).await.json(), json!("finished"));
    assert_eq!(rig.worker.process.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn query_string_is_part_of_endpoint_path() {
    let mut rig = Rig::old().await;
    let request = rig.link.send_request(&RequestSpec::chat("m").path("/v1/messages?beta=true"));
    let call = rig.backend.call().await;
    assert_eq!(call.head.target, "/v1/messages?beta=true");
    call.answer_json(200, &json!({})).await;
    rig.link.reply(&request).await;
}

#[tokio::test]
async fn drain_pings_only_after_withdrawal() {
    let mut rig = Rig::old().await;
    rig.worker.terminate().await;
    let withdrawal_or_ping = |event: &Event| match event {
        Event::Message(message) => message.kind() == "models_update" && message["models"] == json!([]),
        // A worker that started slowly may ping the relay at the same time.
        Event::Ping(payload) => &payload[..] == b"drain",
        Event::Piece { .. } | Event::Closed { .. } => false,
    };
    let first = rig.link.next_where(TEST_TIMEOUT, withdrawal_or_ping).await;
    assert!(matches!(first, Some(Event::Message(_))), "a pong must not count as proof of support: {first:?}");
    assert!(matches!(rig.link.next_where(TEST_TIMEOUT, withdrawal_or_ping).await, Some(Event::Ping(_))));
}

#[tokio::test]
async fn models_follow_acknowledged_registration() {
    let mut rig = Rig::old().await;
    drop(rig.link);
    let mut link = rig.relay.accept_with(&Ack::old()).await;
    assert_eq!(link.registration["models"], json!(["m"]));
    link.expect_where("models_update", |update| update["models"] == json!(["m"])).await;
}
