//! The paths that reach a worker, and that requests reach it unchanged.

use modelrelay_harness::{client::Request, relay::Relay};
use serde_json::json;

use crate::support::{anthropic_error, chat, messages, openai_error, post_bytes, wait_for_model};

const MODEL_ROUTES: [&str; 33] = [
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v2/embed",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/reranking",
    "/v1/score",
    "/score",
    "/classify",
    "/v1/classify",
    "/pooling",
    "/v1/pooling",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/tokenize",
    "/detokenize",
    "/completion",
    "/infill",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/show",
];

#[tokio::test]
async fn every_client_route_reaches_worker_by_model() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    for path in MODEL_ROUTES {
        let pending = relay.begin(Request::post(path, &json!({"model": "m", "input": "x"})));
        let job = worker.expect_request().await;
        assert_eq!(job.path(), path);
        assert_eq!(job.message["model"], "m");
        assert_eq!(job.message["is_streaming"], false);
        worker.answer(&job, &json!({"of": path})).await;
        let reply = pending.reply().await.with_status(200);
        assert_eq!(reply.json(), json!({"of": path}));
    }
}

#[tokio::test]
async fn query_string_is_part_of_endpoint_path() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(Request::post("/v1/messages?beta=true&x=%20y", &json!({"model": "m"})));
    let job = worker.expect_request().await;
    assert_eq!(job.path(), "/v1/messages?beta=true&x=%20y");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn body_reaches_worker_byte_for_byte() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m/é:7b"], 1).await;
    let body = " {\r\n\t\"z\" : 1.0e+2 , \"model\":\"m/\\u00e9:7b\",\"a\":{\"model\":\"x\",\"model\":\"y\"},\n\"s\":\"ü\\n\\ud83d\\ude00\" } \n";
    let pending = relay.begin(post_bytes("/v1/chat/completions", body));
    let job = worker.expect_request().await;
    assert_eq!(job.body, body.as_bytes());
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn non_utf8_body_passes_byte_for_byte() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let body = b"{\"model\":\"m\",\"prompt\":\"\xff\xfe\x80 broken\"}";
    let pending = relay.begin(post_bytes("/v1/completions", body));
    let job = worker.expect_request().await;
    assert_eq!(job.body, body);
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn multipart_request_is_routed_by_model_field() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["whisper"], 1).await;
    let mut body = b"--XyZ\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n".to_vec();
    body.extend((0..=255_u8).cycle().take(70_000));
    body.extend_from_slice(
        b"\r\n--XyZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--XyZ--\r\n",
    );
    let request = Request::new("POST", "/v1/audio/transcriptions")
        .header("content-type", "multipart/form-data; boundary=XyZ")
        .body(body.clone());
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    assert_eq!(job.path(), "/v1/audio/transcriptions");
    assert_eq!(job.header("content-type"), Some("multipart/form-data; boundary=XyZ"));
    assert!(job.body == body, "the multipart body was changed");
    worker.answer(&job, &json!({"text": "hello"})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn multipart_request_without_model_is_400() {
    let relay = Relay::start().await;
    let body = "--b\r\ncontent-disposition: form-data; name=\"language\"\r\n\r\nde\r\n--b--\r\n";
    let request = Request::new("POST", "/v1/audio/transcriptions")
        .header("content-type", "multipart/form-data; boundary=b")
        .body(body);
    let message = openai_error(&relay.fetch(request).await, 400, "invalid_request_error", "missing_model");
    assert!(message.contains("model"), "{message}");
}

#[tokio::test]
async fn unknown_path_is_404_in_openai_dialect() {
    let relay = Relay::start().await;
    for path in ["/", "/v1", "/v1/nope", "/v1/chat", "/api/tags", "/v1/realtime"] {
        let reply = relay.get(path).await;
        assert_eq!(reply.status, 404, "{path}");
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error", "{path}");
    }
}

#[tokio::test]
async fn unknown_path_is_404_in_anthropic_dialect() {
    let relay = Relay::start().await;
    let below_messages = relay.fetch(Request::post("/v1/messages/nope", &json!({"model": "m"}))).await;
    anthropic_error(&below_messages, 404, "not_found_error");
    let with_version = relay.fetch(Request::get("/v1/nope").header("anthropic-version", "2023-06-01")).await;
    anthropic_error(&with_version, 404, "not_found_error");
}

#[tokio::test]
async fn backend_admin_paths_are_never_reachable() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let paths = [
        "/sleep",
        "/wake_up",
        "/slots",
        "/v1/load_lora_adapter",
        "/models/load",
        "/collective_rpc",
        "/v1/chat/completions/../../../sleep",
        "/v1/chat%2Fcompletions",
        "/v1/./chat/completions",
    ];
    for path in paths {
        let reply = relay.fetch(Request::post(path, &json!({"model": "m"}))).await;
        assert_eq!(reply.status, 404, "{path}");
    }
    // The relay itself serves a GET of this path.
    assert_eq!(relay.fetch(Request::post("/props", &json!({"model": "m"}))).await.status, 405);
    worker.expect_quiet().await;
}

#[tokio::test]
async fn wrong_method_is_405_with_allow_header() {
    let relay = Relay::start().await;
    for path in ["/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/responses"] {
        let reply = relay.get(path).await;
        assert_eq!(reply.status, 405, "{path}");
        assert!(reply.header("allow").is_some_and(|allow| allow.contains("POST")), "{path}");
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error", "{path}");
    }
    let reply = relay.fetch(Request::post("/v1/models", &json!({}))).await;
    assert_eq!(reply.status, 405);
    assert!(reply.header("allow").is_some_and(|allow| allow.contains("GET")));
    let reply = relay.fetch(Request::new("DELETE", "/v1/messages")).await;
    anthropic_error(&reply, 405, "not_found_error");
}

#[tokio::test]
async fn backend_error_passes_unchanged() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    for status in [400, 404, 422, 429, 500, 503] {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        let body = format!("{{\"error\" :\"of the backend\", \"n\": {status}}}");
        let headers = [("content-type", "application/json"), ("openai-model", "yes"), ("retry-after", "7")];
        worker.answer_with(&job, status, &headers, body.as_bytes()).await;
        let reply = pending.reply().await;
        assert_eq!((reply.status, reply.text()), (status, body));
        assert_eq!(reply.header("openai-model").as_deref(), Some("yes"));
        assert_eq!(reply.header("retry-after").as_deref(), Some("7"));
    }
}

#[tokio::test]
async fn backend_error_of_stream_keeps_status_and_body() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(crate::support::chat_stream("m"));
    let job = worker.expect_request().await;
    assert_eq!(job.message["is_streaming"], true);
    worker.answer_with(&job, 400, &[("content-type", "application/json")], b"{\"error\":\"too long\"}").await;
    let reply = pending.reply().await;
    assert_eq!((reply.status, reply.text().as_str()), (400, "{\"error\":\"too long\"}"));
    assert_eq!(reply.header("content-type").as_deref(), Some("application/json"));
}

#[tokio::test]
async fn unknown_model_is_404_in_both_dialects() {
    let relay = Relay::builder().config(crate::support::one_provider("  models: [{id: known}]")).start().await;
    let reply = relay.fetch(chat("nope")).await;
    let message = openai_error(&reply, 404, "invalid_request_error", "model_not_found");
    assert_eq!(message, "no provider for model nope");
    assert_eq!(reply.json()["error"]["param"], "model");
    let message = anthropic_error(&relay.fetch(messages("nope")).await, 404, "not_found_error");
    assert_eq!(message, "no provider for model nope");
}

#[tokio::test]
async fn misspelt_model_is_404_naming_similar_ones() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["qwen3:8b", "nomic-embed-text"], 1).await;
    let reply = relay.fetch(chat("qwen3:9b")).await;
    let message = openai_error(&reply, 404, "invalid_request_error", "model_not_found");
    assert_eq!(message, "no provider for model qwen3:9b; similar: qwen3:8b");
    // A relay that has just started may still get a worker with it.
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("true"));
    assert_eq!(reply.header("retry-after").as_deref(), Some("5"));
    let message = anthropic_error(&relay.fetch(messages("nomic")).await, 404, "not_found_error");
    assert_eq!(message, "no provider for model nomic; similar: nomic-embed-text");
}

#[tokio::test]
async fn request_waits_for_model_of_disconnected_worker() {
    let relay = Relay::start().await;
    let _other = relay.worker(&["other"], 1).await;
    drop(relay.worker(&["m"], 1).await);
    wait_for_model(&relay, "m", false).await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let mut worker = relay.worker(&["m"], 1).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn unknown_model_waits_while_worker_lists_nothing() {
    let relay = Relay::start().await;
    let _other = relay.worker(&["other"], 1).await;
    let _loading = relay.worker(&[], 1).await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
}

/// Such a name would appear in the log, in `/admin/state` and in a response for as long as it waits.
#[tokio::test]
async fn overlong_model_name_is_404_at_once() {
    let relay = Relay::start().await;
    let _asking = relay.worker(&[], 1).await;
    let _waits = relay.begin(chat(&"x".repeat(256)));
    relay.wait_for_queue_depth("local", 1).await;
    let message =
        openai_error(&relay.fetch(chat(&"x".repeat(1 << 20))).await, 404, "invalid_request_error", "model_not_found");
    assert_eq!(message, format!("no provider for model {}", "x".repeat(256)));
    assert!(relay.log().lines().iter().all(|line| line.len() < 4096), "the name is in the log");
}

#[tokio::test]
async fn empty_backend_response_passes() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer_with(&job, 204, &[], b"").await;
    let reply = pending.reply().await;
    assert_eq!((reply.status, reply.body.len(), reply.aborted), (204, 0, false));
}

#[tokio::test]
async fn large_upload_to_wrong_route_gets_error() {
    let relay = Relay::start().await;
    for (method, path, status) in [("POST", "/v1/files", 404), ("PUT", "/v1/embeddings", 405)] {
        for _ in 0..5 {
            let reply = relay.fetch(Request::new(method, path).body(vec![b'x'; 8 << 20])).await;
            assert_eq!(reply.status, status);
        }
    }
}
