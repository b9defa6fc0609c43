//! Checks of a plain worker that apply to every engine.

use futures_util::future::join_all;
use serde_json::json;

use modelrelay_harness::client::Request;

use crate::engine::{Engine, Stack, text_of};

/// The routes that every engine serves.
const ROUTES: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/messages"];

/// Checks that the worker discovers the model.
pub(crate) async fn model_is_discovered(engine: &Engine, stack: &Stack) {
    let listed = stack.relay.get("/v1/models").await.with_status(200).json();
    let ids: Vec<_> = listed["data"].as_array().into_iter().flatten().map(|model| &model["id"]).collect();
    assert_eq!(ids, [engine.model]);
    let health = stack.worker.probe("/healthz").await.json();
    assert_eq!((&health["backend_up"], &health["models"]), (&json!(true), &json!([engine.model])), "{health}");
}

/// Checks that a client gets the bytes that the engine sent, and that their text equals that of a direct request.
pub(crate) async fn responses_are_unchanged(engine: &Engine, stack: &Stack) {
    for (route, stream) in ROUTES.into_iter().flat_map(|route| [(route, false), (route, true)]) {
        let reply = stack.relay.fetch(engine.completion_request(route, 60, stream)).await.with_status(200);
        assert!(stack.tap.bodies().contains(&reply.body), "{route}, stream {stream}: {}", reply.text());
        let direct = engine.fetch(engine.completion_request(route, 60, stream)).await.with_status(200);
        assert_eq!(text_of(&reply), text_of(&direct), "{route}, stream {stream}");
        assert_eq!(reply.header("content-type"), direct.header("content-type"), "{route}, stream {stream}");
    }
}

/// Checks that the engine's own error reaches the client.
pub(crate) async fn errors_are_unchanged(engine: &Engine, stack: &Stack) {
    let request = Request::post("/v1/chat/completions", &json!({"model": engine.model, "messages": "not a list"}));
    let (reply, direct) = (stack.relay.fetch(request.clone()).await, engine.fetch(request).await);
    assert!((400..500).contains(&direct.status), "{} {}", direct.status, direct.text());
    assert_eq!((reply.status, reply.text()), (direct.status, direct.text()));
}

/// Checks that concurrent streams do not mix.
pub(crate) async fn concurrent_streams_are_unchanged(engine: &Engine, stack: &Stack) {
    let lengths = [40, 80, 120, 160];
    let request = |tokens| engine.completion_request("/v1/completions", tokens, true);
    let mut expected = Vec::new();
    for tokens in lengths {
        expected.push(text_of(&engine.fetch(request(tokens)).await));
    }
    let replies = join_all((0..16).map(|number| stack.relay.fetch(request(lengths[number % lengths.len()])))).await;
    let bodies = stack.tap.bodies();
    for (number, reply) in replies.iter().enumerate() {
        assert_eq!(text_of(reply), expected[number % lengths.len()], "{} tokens", lengths[number % lengths.len()]);
        assert!(bodies.contains(&reply.body), "{}", reply.text());
    }
}

/// Checks that the engine stops working on a request whose client disconnects, before and after the first byte.
pub(crate) async fn disconnect_stops_generation(engine: &Engine, stack: &Stack) {
    engine.until_running(0).await;
    let mut stream = stack.relay.send(engine.completion_request("/v1/chat/completions", engine.endless, true)).await;
    stream.read_until("data: ").await;
    let waiting = stack.relay.begin(engine.completion_request("/v1/completions", engine.endless, false));
    engine.until_running(2).await;
    drop(stream);
    engine.until_running(1).await;
    assert!(!waiting.is_answered());
    waiting.abandon();
    engine.until_running(0).await;
}
