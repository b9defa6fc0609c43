//! Every route over a real socket, as a worker would use it.

mod client;

use std::time::Duration;

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{Demo, MODEL, serve_demo};
use client::Client;

const SPOKEN: &str = "This is ModelRelay's built-in demo backend, not a model. You said: hi";

fn chat(extra: Value) -> Value {
    with(json!({"model": "demo", "messages": [{"role": "user", "content": "hi"}]}), extra)
}

fn with(mut body: Value, mut extra: Value) -> Value {
    let extra = extra.as_object_mut().unwrap();
    body.as_object_mut().unwrap().append(extra);
    body
}

fn parsed(frames: &[(Option<String>, String)]) -> Vec<Value> {
    frames.iter().filter_map(|(_, data)| serde_json::from_str(data).ok()).collect()
}

fn joined<'a>(frames: impl IntoIterator<Item = &'a Value>, pointer: &str) -> String {
    frames.into_iter().filter_map(|frame| frame.pointer(pointer)?.as_str()).collect()
}

#[tokio::test]
async fn demo_serves_only_its_configured_model_name() {
    let mut client = Client::of_model("other", Duration::ZERO).await;
    assert_eq!(client.get("/v1/models").await.1["data"][0]["id"], "other");
    assert_eq!(client.post("/v1/chat/completions", chat(json!({}))).await.0, 404);
    let (status, answer) = client.post("/v1/chat/completions", chat(json!({"model": "other"}))).await;
    assert_eq!((status, &answer["model"]), (200, &json!("other")));
}

#[tokio::test]
async fn health_and_model_routes_match_backend() {
    let mut client = Client::new(Duration::ZERO).await;
    assert_eq!(client.get("/health").await, (200, json!({"status": "ok", "backend": "demo", "answering": 0})));
    let (_, models) = client.get("/v1/models").await;
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("demo")));
    assert_eq!(client.get("/v1/models/demo").await.1["object"], "model");
    let (status, missing) = client.get("/v1/models/org/other").await;
    assert_eq!((status, &missing["error"]["code"]), (404, &json!("model_not_found")));
}

#[tokio::test]
async fn chat_returns_complete_response_with_usage() {
    let mut client = Client::new(Duration::ZERO).await;
    let (status, answer) = client.post("/v1/chat/completions", chat(json!({}))).await;
    assert_eq!(status, 200);
    assert_eq!(answer["choices"][0]["message"], json!({"role": "assistant", "content": SPOKEN}));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], 1);
    assert!(usage["completion_tokens"].as_u64() > Some(10));
    let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
}

#[tokio::test]
async fn chat_streams_words_with_usage_only_on_request() {
    let mut client = Client::new(Duration::ZERO).await;
    let frames = client.stream("/v1/chat/completions", chat(json!({"stream": true}))).await;
    assert_eq!(frames.last().unwrap().1, "[DONE]");
    let chunks = parsed(&frames);
    assert_eq!(joined(&chunks, "/choices/0/delta/content"), SPOKEN);
    assert_eq!(chunks.len(), SPOKEN.split(' ').count() + 2);
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");

    let asking = json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 2});
    let chunks = parsed(&client.stream("/v1/chat/completions", chat(asking)).await);
    let [.., closing, usage] = &chunks[..] else { panic!("{chunks:?}") };
    assert_eq!(closing["choices"][0]["finish_reason"], "length");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(2)));
}

#[tokio::test]
async fn completions_return_complete_and_streamed_responses() {
    let mut client = Client::new(Duration::ZERO).await;
    let body = json!({"model": "demo", "prompt": "hi", "stop": " You"});
    let (_, answer) = client.post("/v1/completions", body.clone()).await;
    let spoken = SPOKEN.split(" You").next().unwrap();
    assert_eq!((&answer["object"], &answer["choices"][0]["text"]), (&json!("text_completion"), &json!(spoken)));
    let frames = client.stream("/v1/completions", with(body, json!({"stream": true}))).await;
    assert_eq!(joined(&parsed(&frames), "/choices/0/text"), spoken);
    assert_eq!(frames.last().unwrap().1, "[DONE]");
}

#[tokio::test]
async fn responses_are_remembered_and_continued() {
    let mut client = Client::new(Duration::ZERO).await;
    let (_, first) = client.post("/v1/responses", json!({"model": "demo", "input": "hi"})).await;
    assert_eq!(first["output"][0]["content"][0]["text"], SPOKEN);
    let id = first["id"].as_str().unwrap();
    assert_eq!(client.get(&format!("/v1/responses/{id}")).await, (200, first.clone()));

    let next = json!({"model": "demo", "input": "again", "previous_response_id": id});
    let (_, second) = client.post("/v1/responses", next).await;
    let text = second["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("Before, you said: hi — now you said: again"), "{text}");

    let unknown = json!({"model": "demo", "input": "again", "previous_response_id": "resp_other"});
    let (status, refusal) = client.post("/v1/responses", unknown).await;
    assert_eq!((status, &refusal["error"]["code"]), (404, &json!("previous_response_not_found")));
    assert_eq!(client.get("/v1/responses/resp_other").await.0, 404);
    assert_eq!(client.post(&format!("/v1/responses/{id}/cancel"), json!({})).await.0, 400);
    assert_eq!(client.post("/v1/responses/resp_other/cancel", json!({})).await.0, 404);
    let forgotten = json!({"model": "demo", "input": "hi", "store": false});
    let (_, forgotten) = client.post("/v1/responses", forgotten).await;
    assert_eq!(client.get(&format!("/v1/responses/{}", forgotten["id"].as_str().unwrap())).await.0, 404);
    let (_, counted) = client.post("/v1/responses/input_tokens", json!({"model": "demo", "input": "hi"})).await;
    assert_eq!(counted["input_tokens"], 1);
}

#[tokio::test]
async fn responses_stream_typed_events_without_done_marker() {
    let mut client = Client::new(Duration::ZERO).await;
    let frames = client.stream("/v1/responses", json!({"model": "demo", "input": "hi", "stream": true})).await;
    let events = parsed(&frames);
    assert_eq!(events.len(), frames.len(), "every frame is JSON");
    for (at, ((name, _), event)) in frames.iter().zip(&events).enumerate() {
        assert_eq!((name.as_deref(), &event["sequence_number"]), (event["type"].as_str(), &json!(at)));
    }
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(joined(&events, "/delta"), SPOKEN);
    let end = &events.last().unwrap()["response"];
    assert_eq!((&end["status"], &end["output"][0]["content"][0]["text"]), (&json!("completed"), &json!(SPOKEN)));
    let id = end["id"].as_str().unwrap();
    assert_eq!(client.get(&format!("/v1/responses/{id}")).await.1["id"], id);

    let cut = json!({"model": "demo", "input": "hi", "stream": true, "max_output_tokens": 3});
    let (name, _) = client.stream("/v1/responses", cut).await.pop().unwrap();
    assert_eq!(name.as_deref(), Some("response.incomplete"));
}

#[tokio::test]
async fn messages_return_complete_response_with_stop_reason() {
    let mut client = Client::new(Duration::ZERO).await;
    let (_, message) = client.post("/v1/messages?beta=true", chat(json!({"max_tokens": 100}))).await;
    assert_eq!(message["content"], json!([{"type": "text", "text": SPOKEN}]));
    assert_eq!((&message["type"], &message["stop_reason"]), (&json!("message"), &json!("end_turn")));
    assert!(message["usage"]["output_tokens"].as_u64() > Some(10));
    let stopping = chat(json!({"max_tokens": 100, "stop_sequences": ["not"]}));
    let (_, message) = client.post("/v1/messages", stopping).await;
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("stop_sequence"), &json!("not")));
}

#[tokio::test]
async fn messages_stream_events_in_order() {
    let mut client = Client::new(Duration::ZERO).await;
    let frames = client.stream("/v1/messages", chat(json!({"max_tokens": 100, "stream": true}))).await;
    let events = parsed(&frames);
    for ((name, _), event) in frames.iter().zip(&events) {
        assert_eq!(name.as_deref(), event["type"].as_str());
    }
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "message_start",
            "content_block_start",
            "ping",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    assert_eq!(joined(&events, "/delta/text"), SPOKEN);
    let delta = &events[events.len() - 2];
    assert_eq!(delta["delta"]["stop_reason"], "end_turn");
    assert!(delta["usage"]["output_tokens"].as_u64() > Some(10));
}

#[tokio::test]
async fn tokens_are_counted_and_detokenized() {
    let mut client = Client::new(Duration::ZERO).await;
    let (_, counted) = client.post("/v1/messages/count_tokens", chat(json!({"system": "be kind"}))).await;
    assert!(counted["input_tokens"].as_u64() > Some(1));
    let text = "naïve 日本語 text 🦀";
    let (_, tokens) = client.post("/tokenize", json!({"model": "demo", "prompt": text})).await;
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    let back = json!({"model": "demo", "tokens": tokens["tokens"]});
    assert_eq!(client.post("/detokenize", back).await, (200, json!({"prompt": text})));
    assert_eq!(client.post("/detokenize", json!({"tokens": [5]})).await.0, 400);
    assert!(client.post("/tokenize", chat(json!({}))).await.1["count"].as_u64() == Some(1));
}

#[tokio::test]
async fn embeddings_agree_as_numbers_and_base64() {
    let mut client = Client::new(Duration::ZERO).await;
    let ask = |extra: Value| with(json!({"model": "demo", "input": ["one", "two"], "dimensions": 3}), extra);
    let (_, plain) = client.post("/v1/embeddings", ask(json!({}))).await;
    let (_, coded) = client.post("/v1/embeddings", ask(json!({"encoding_format": "base64"}))).await;
    assert_eq!(plain["data"].as_array().unwrap().len(), 2);
    assert_eq!(plain["data"][1]["index"], 1);
    assert_eq!(plain["data"][0]["embedding"].as_array().unwrap().len(), 3);
    assert_eq!(coded["data"][0]["embedding"].as_str().unwrap().len(), 16, "3 × 4 bytes");
    assert_eq!(client.post("/v1/embeddings", ask(json!({}))).await.1["data"], plain["data"]);
    for input in [json!([1, 2]), json!([[1], [2, 3]]), json!("text")] {
        assert_eq!(client.post("/v1/embeddings", ask(json!({"input": input}))).await.0, 200);
    }
    for wrong in [json!({"input": []}), json!({"input": {}}), json!({"dimensions": 0}), json!({"encoding_format": "x"})]
    {
        assert_eq!(client.post("/v1/embeddings", ask(wrong)).await.0, 400);
    }
}

#[tokio::test]
async fn bad_bodies_are_refused_in_route_dialect() {
    let mut client = Client::new(Duration::ZERO).await;
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"] {
        let (status, text) = client.text("POST", path, "{not json").await;
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &error["error"]["code"]), (400, &json!("invalid_json")), "{path}");
    }
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let (status, text) = client.text("POST", path, "[]").await;
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &error["type"]), (400, &json!("error")), "{path}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
    let chats = [
        (json!({"model": "gpt"}), 404, "model"),
        (json!({"model": null}), 400, "model"),
        (json!({"messages": []}), 400, "messages"),
        (json!({"stream": "yes"}), 400, "stream"),
        (json!({"max_tokens": -1}), 400, "max_tokens"),
    ];
    for (wrong, expected, param) in chats {
        let (status, error) = client.post("/v1/chat/completions", chat(wrong)).await;
        assert_eq!((status, &error["error"]["param"]), (expected, &json!(param)));
    }
    assert_eq!(client.post("/v1/messages", chat(json!({}))).await.0, 400, "max_tokens is required there");
    assert_eq!(client.get("/v1/nothing").await.1["error"]["code"], "not_found");
    let refused = client.send("GET", "/v1/chat/completions", "").await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["allow"]), (405, &"POST".parse().unwrap()));
}

#[tokio::test]
async fn response_ends_when_client_disconnects() {
    let mut watcher = Client::new(Duration::from_secs(3600)).await;
    let mut leaving = Client::connect(watcher.1).await;
    let response = leaving.send("POST", "/v1/chat/completions", chat(json!({"stream": true})).to_string()).await;
    assert_eq!(watcher.get("/health").await.1["answering"], 1);
    drop((response, leaving));
    let gone = async {
        while watcher.get("/health").await.1["answering"] != 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.expect("the answer goes on without its client");
}

#[tokio::test]
async fn shutdown_lets_running_response_finish() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve_demo(listener, Demo::new(MODEL, Duration::from_millis(5)), async {
        let _ = stopped.await;
    }));
    let mut client = Client::connect(address).await;
    let response = client.send("POST", "/v1/chat/completions", chat(json!({"stream": true})).to_string()).await;
    stop.send(()).unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
    server.await.unwrap().unwrap();
}
