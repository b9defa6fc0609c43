//! Comparable streams.

use std::collections::HashMap;

use modelrelay_backends::engines;
use modelrelay_harness::client::{Reply, Request};
use modelrelay_harness::process::Log;
use serde_json::{Value, json};

/// A stream of this number of tokens: the models never end by themselves. At temperature 0 they generate the same text
/// each time.
pub(crate) fn stream(model: &str, tokens: u32) -> Request {
    Request::post("/v1/completions", &body(model, tokens, true))
}

/// The same as a non-streamed response.
pub(crate) fn answer(model: &str, tokens: u32) -> Request {
    Request::post("/v1/completions", &body(model, tokens, false))
}

fn body(model: &str, tokens: u32, stream: bool) -> Value {
    json!({
        "model": model, "prompt": "Once upon a time", "max_tokens": tokens, "stream": stream,
        "temperature": 0, "seed": 1, "ignore_eos": true, "cache_prompt": false,
    })
}

/// A stream of a chat, in either dialect.
pub(crate) fn chat(path: &str, model: &str, tokens: u32) -> Request {
    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    let body = json!({"model": model, "max_tokens": tokens, "stream": true, "temperature": 0, "messages": messages});
    Request::post(path, &body)
}

/// Returns the events of a whole stream, without the parts that differ between responses: name, time and duration.
///
/// # Panics
/// If it was truncated, does not end with `[DONE]`, or contains the name of another response.
pub(crate) fn events(reply: &Reply) -> String {
    let text = reply.text();
    assert!(reply.status == 200 && !reply.aborted, "{} {}", reply.status, end_of(&text));
    let lines: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
    let Some((&"data: [DONE]", lines)) = lines.split_last() else { panic!("no end: {}", end_of(&text)) };
    let mut name = None;
    let line = |line: &&str| {
        let data = line.strip_prefix("data: ").unwrap_or_else(|| panic!("no event: {line}"));
        let mut event: Value = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {line}"));
        let event = event.as_object_mut().expect("an event is an object");
        let own = event.remove("id");
        assert_eq!(*name.get_or_insert_with(|| own.clone()), own, "two responses in one");
        for differs in ["created", "timings"] {
            event.remove(differs);
        }
        json!(event).to_string() + "\n"
    };
    lines.iter().map(line).collect()
}

/// Returns the text, because servers split it into events differently.
pub(crate) fn text(reply: &Reply) -> String {
    let events = events(reply);
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned)).collect()
}

pub(crate) fn end_of(text: &str) -> String {
    let from = text.char_indices().rev().nth(400).map_or(0, |(at, _)| at);
    text[from..].to_owned()
}

/// Returns each model's output for a direct request, for each of these numbers of tokens.
pub(crate) async fn expected(tokens: &[u32]) -> Option<HashMap<(&'static str, u32), String>> {
    let folder = tempfile::tempdir().expect("the folder can be created");
    let models = ["tiny-a", "tiny-b"];
    let weights = engines::weights(folder.path(), "direct-", &models)?;
    let mut expected = HashMap::new();
    for (model, weights) in models.into_iter().zip(weights) {
        let server = engines::llama_server(&weights, model, 1).await?;
        let address = server.url.socket_addrs(|| None).expect("the URL has an address")[0];
        for &tokens in tokens {
            let reply = stream(model, tokens).fetch(address, &Log::new("llama-server")).await;
            let received = events(&reply);
            // One more event reports how it ended.
            assert_eq!(received.lines().count(), tokens as usize + 1, "{}", end_of(&received));
            expected.insert((model, tokens), received);
        }
    }
    Some(expected)
}
