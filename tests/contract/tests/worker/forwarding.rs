//! Forwarding to the backend and back: paths, headers, bodies, statuses.

use std::time::Duration;

use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::fake_relay::{Ack, FakeRelay, RequestSpec};
use modelrelay_harness::worker_process::{Rig, WorkerBuilder, WorkerProcess};
use serde_json::json;

const ROUTES: [&str; 17] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/reranking",
    "/v1/score",
    "/v1/audio/transcriptions",
    "/v1/audio/speech",
    "/tokenize",
    "/detokenize",
    "/v1/responses/resp_1/cancel",
];

/// Everything that could lead a backend, or an HTTP client, elsewhere.
const BAD_PATHS: [&str; 17] = [
    "/admin",
    "/metrics",
    "/v1/load_lora_adapter",
    "/v1/models/../../admin",
    "/v1/chat/completions/../../../sleep",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/%2e%2e/admin",
    "/v1/responses/..%2f..%2fadmin",
    "/v1/responses/%2E%2E",
    "/v1/responses/..",
    "@evil.example/v1/chat/completions",
    "http://evil.example/v1/chat/completions",
    "/v1/chat/completions\r\nx-injected: 1",
    "/v1\\chat\\completions",
    "v1/chat/completions",
    "",
];

fn ok() -> Answer {
    Answer::json(200, &json!({"ok": true}))
}

#[tokio::test]
async fn every_client_route_is_forwarded_to_same_path() {
    let mut rig = Rig::core1().await;
    for route in ROUTES {
        let request = rig.link.send_request(&RequestSpec::post(route, "m").body(b"{\"model\":\"m\"}"));
        let call = rig.backend.call().await;
        assert_eq!((call.head.method.as_str(), call.head.target.as_str()), ("POST", route));
        call.answer(&ok()).await;
        assert_eq!(rig.link.reply(&request).await.status, 200);
    }
}

#[tokio::test]
async fn stored_response_is_fetched_with_bodiless_get() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::post("/v1/responses/resp_1", "m").method("GET"));
    let mut call = rig.backend.call().await;
    assert_eq!((call.head.method.as_str(), call.head.target.as_str()), ("GET", "/v1/responses/resp_1"));
    assert!(call.read_body().await.is_empty());
    call.answer(&ok()).await;
    assert_eq!(rig.link.reply(&request).await.status, 200);
}

#[tokio::test]
async fn unlisted_path_never_reaches_backend() {
    let mut rig = Rig::core1().await;
    for path in BAD_PATHS {
        let reply = rig.link.exchange(&RequestSpec::chat("m").path(path)).await;
        assert_eq!(reply.error_code(), Some("bad_path"), "{path:?}: {}", reply.end);
    }
    rig.still_serves().await;
    let targets: Vec<_> = rig.backend.received_heads().into_iter().filter(|head| head.method == "POST").collect();
    assert_eq!(targets.len(), 1, "{targets:#?}");
}

#[tokio::test]
async fn query_string_is_kept_unchanged() {
    let mut rig = Rig::core1().await;
    let target = "/v1/messages?beta=true&q=%20y+z&empty=";
    let request = rig.link.send_request(&RequestSpec::chat("m").path(target));
    let call = rig.backend.call().await;
    assert_eq!(call.head.target, target);
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
}

#[tokio::test]
async fn path_in_backend_url_is_prefix() {
    let (mut relay, mut backend) = (FakeRelay::start().await, FakeBackend::start().await);
    let base = format!("{}/engine/", backend.url());
    let _worker = WorkerProcess::builder().relay(relay.url()).backend(base).start().await;
    let mut link = relay.accept_registered(&["core1"]).await;
    let request = link.send_request(&RequestSpec::chat("m"));
    let call = backend.call().await;
    assert_eq!(call.head.target, "/engine/v1/chat/completions");
    call.answer(&ok()).await;
    assert_eq!(link.reply(&request).await.status, 200);
}

#[tokio::test]
async fn only_listed_headers_reach_backend() {
    const LISTED: [(&str, &str); 12] = [
        ("content-type", "application/json; charset=utf-8"),
        ("accept", "text/event-stream"),
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "a-1, b-2"),
        ("openai-organization", "org"),
        ("openai-project", "proj"),
        ("openai-beta", "assistants=v2"),
        ("x-request-id", "req-1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "vendor=1"),
        ("baggage", "user=7"),
        ("idempotency-key", "idem"),
    ];
    const UNLISTED: [(&str, &str); 14] = [
        ("cookie", "session=1"),
        ("user-agent", "planted-agent/1"),
        ("host", "evil.example"),
        ("content-length", "3"),
        ("transfer-encoding", "chunked"),
        ("connection", "keep-alive, x-hop"),
        ("upgrade", "h2c"),
        ("te", "trailers"),
        ("accept-encoding", "gzip"),
        ("x-forwarded-for", "10.0.0.1"),
        ("x-forwarded-host", "evil.example"),
        ("x-stainless-lang", "python"),
        ("x-conversation-id", "c-1"),
        ("x-hop", "1"),
    ];
    let mut rig = Rig::core1().await;
    let spec =
        LISTED.iter().chain(&UNLISTED).fold(RequestSpec::chat("m"), |spec, (key, value)| spec.header(key, value));
    let request = rig.link.send_request(&spec);
    let mut call = rig.backend.call().await;
    for (key, value) in LISTED {
        assert_eq!(call.head.header(key), Some(value), "{key}");
    }
    let mut names: Vec<_> = LISTED.iter().map(|(key, _)| (*key).to_owned()).collect();
    names.extend(["host".to_owned(), "content-length".to_owned()]);
    names.sort();
    assert_eq!(call.head.header_names(), names);
    assert_eq!(call.head.header("host"), Some(rig.backend.addr().to_string().as_str()));
    let body = call.read_body().await;
    assert_eq!(call.head.header("content-length"), Some(body.len().to_string().as_str()));
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
}

#[tokio::test]
async fn relay_adds_request_headers_except_connection_headers() {
    const REFUSED: [&str; 5] = ["cookie", "host", "te", "content-length", "x-modelrelay-provider"];
    let named = REFUSED.into_iter().chain(["x-tenant", "user-agent"]);
    let ack = Ack { request_headers: named.clone().collect(), ..Ack::core1() };
    let mut rig = Rig::with(&ack, 4, |worker| worker).await;
    let request = rig.link.send_request(
        &named.chain(["x-other"]).fold(RequestSpec::chat("m"), |spec, name| spec.header(name, "planted")),
    );
    let call = rig.backend.call().await;
    let is_planted = |name: &str| call.head.header(name) == Some("planted");
    assert!(is_planted("x-tenant") && is_planted("user-agent") && !is_planted("x-other"));
    assert!(!REFUSED.into_iter().any(is_planted), "{:?}", call.head.header_names());
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
}

#[tokio::test]
async fn compressed_responses_are_never_requested() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    assert_eq!(call.head.header("accept-encoding"), None);
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
}

#[tokio::test]
async fn client_backend_key_is_forwarded_unlike_api_key() {
    let mut rig = Rig::core1().await;
    let with_credentials =
        RequestSpec::chat("m").header("authorization", "Bearer sk-theirs").header("x-api-key", "ak-theirs");
    let request = rig.link.send_request(&with_credentials);
    let call = rig.backend.call().await;
    assert_eq!(call.head.header("authorization"), Some("Bearer sk-theirs"));
    assert_eq!(call.head.header("x-api-key"), Some("ak-theirs"));
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
    let with_relay_key =
        RequestSpec::chat("m").header("authorization", "Bearer mr-id-secret").header("x-api-key", "mr-id-secret");
    let request = rig.link.send_request(&with_relay_key);
    let call = rig.backend.call().await;
    assert_eq!(call.head.header("authorization"), None);
    assert_eq!(call.head.header("x-api-key"), None);
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
}

#[tokio::test]
async fn configured_backend_key_replaces_client_key() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "backend-key\n").expect("a writable file");
    let settings = |worker: WorkerBuilder| worker.file("BACKEND_API_KEY_FILE", file.path()).models("*");
    let mut rig = Rig::with(&Ack::core1(), 1, settings).await;
    let with_credentials =
        RequestSpec::chat("m").header("authorization", "Bearer sk-theirs").header("x-api-key", "ak-theirs");
    let request = rig.link.send_request(&with_credentials);
    let call = rig.backend.call().await;
    assert_eq!(call.head.header("authorization"), Some("Bearer backend-key"));
    assert_eq!(call.head.header("x-api-key"), None);
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
    let listing = rig
        .backend
        .received_heads()
        .into_iter()
        .find(|head| head.path() == "/v1/models")
        .expect("the worker requested the models");
    assert_eq!(listing.header("authorization"), Some("Bearer backend-key"));
}

#[tokio::test]
async fn request_body_of_any_bytes_arrives_exactly() {
    let mut rig = Rig::core1().await;
    let body: Vec<u8> = (0..300_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let multipart =
        RequestSpec::post("/v1/audio/transcriptions", "m").header("content-type", "multipart/form-data; boundary=xYz");
    let request = rig.link.send_request(&multipart.body(&body));
    let mut call = rig.backend.call().await;
    assert_eq!(call.head.header("content-type"), Some("multipart/form-data; boundary=xYz"));
    assert!(call.read_body().await == body, "the body was changed");
    call.answer(&ok()).await;
    rig.link.reply(&request).await;
}

#[tokio::test]
async fn statuses_bodies_and_content_types_pass_verbatim() {
    let mut rig = Rig::core1().await;
    for status in [200, 201, 202, 299, 400, 401, 403, 404, 409, 413, 418, 422, 429, 500, 501, 502, 503, 504, 599] {
        let body = format!("not even JSON: {status} \u{1f600}\u{0}");
        let answer = Answer::new(status, &[("content-type", "text/x-odd")], body.as_bytes());
        let reply = rig.answered(&RequestSpec::chat("m"), &answer).await;
        assert!(reply.is_complete(), "{}", reply.end);
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("content-type"), Some("text/x-odd"));
        assert_eq!(reply.body, body.as_bytes());
    }
}

#[tokio::test]
async fn failing_backend_stays_advertised() {
    let mut rig = Rig::core1().await;
    rig.answered(&RequestSpec::chat("m"), &Answer::json(500, &json!({"error": "broken"}))).await;
    rig.link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    rig.link.expect("pong").await;
    let withdrawn = rig.link.message_within(Duration::ZERO, "models_update", |update| update["models"] == json!([]));
    assert!(withdrawn.await.is_none());
    rig.still_serves().await;
}

#[tokio::test]
async fn redirects_are_passed_and_not_followed() {
    let mut rig = Rig::core1().await;
    for status in [301, 302, 303, 307, 308] {
        let location = format!("{}/v1/completions", rig.backend.url());
        let reply =
            rig.answered(&RequestSpec::chat("m"), &Answer::new(status, &[("location", &location)], b"elsewhere")).await;
        assert_eq!((reply.status, reply.header("location")), (status, Some(location.as_str())));
    }
    assert_eq!(rig.backend.request_count("/v1/completions"), 0);
}

#[tokio::test]
async fn repeated_response_headers_stay_repeated() {
    let mut rig = Rig::core1().await;
    let answer =
        Answer::new(200, &[("set-cookie", "a=1"), ("x-odd", "1"), ("set-cookie", "b=2"), ("x-odd", "2")], b"{}");
    let reply = rig.answered(&RequestSpec::chat("m"), &answer).await;
    assert_eq!(reply.header_values("set-cookie"), ["a=1", "b=2"]);
    assert_eq!(reply.header_values("x-odd"), ["1", "2"]);
}

#[tokio::test]
async fn hop_by_hop_response_headers_are_dropped() {
    let mut rig = Rig::core1().await;
    let hops = [
        ("connection", "keep-alive, x-hop"),
        ("keep-alive", "timeout=5"),
        ("proxy-authenticate", "Basic"),
        ("trailer", "x-end"),
        ("x-hop", "1"),
        ("x-kept", "yes"),
    ];
    let reply = rig.answered(&RequestSpec::chat("m"), &Answer::new(200, &hops, b"{}")).await;
    assert_eq!(reply.header("x-kept"), Some("yes"));
    for name in
        ["connection", "keep-alive", "proxy-authenticate", "trailer", "x-hop", "content-length", "transfer-encoding"]
    {
        assert_eq!(reply.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn known_content_length_is_announced() {
    let mut rig = Rig::core1().await;
    let reply = rig.answered(&RequestSpec::chat("m"), &Answer::new(200, &[], b"12345")).await;
    let start = reply.start.expect("a response_start");
    assert!(start.get("content_length").is_none_or(|length| length == 5), "{start}");
}

#[tokio::test]
async fn informational_responses_are_skipped() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    call.write_raw(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n").await;
    call.answer(&ok()).await;
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.status, reply.header("link")), (200, None));
}

#[tokio::test]
async fn response_without_body_is_complete() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    call.head(204, &[]).await;
    call.keep_alive();
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.status, reply.body.len(), reply.is_complete()), (204, 0, true));
}

#[tokio::test]
async fn concurrent_requests_do_not_block_each_other() {
    let mut rig = Rig::core1().await;
    let slow = rig.link.send_request(&RequestSpec::chat("m"));
    let held = rig.backend.call().await;
    rig.still_serves().await;
    held.answer(&ok()).await;
    assert_eq!(rig.link.reply(&slow).await.status, 200);
}

#[tokio::test]
async fn forwarded_request_is_logged() {
    let mut rig = Rig::core1().await;
    rig.still_serves().await;
    rig.worker.process.wait_for_line("forwarding request").await;
}
