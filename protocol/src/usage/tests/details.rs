//! The details for traces: model, id and finish reasons.

use super::*;

/// Reads the details of a response in parts of this size. Checks that reading them changes nothing else.
fn details(body: &str, path: &str, content_type: Option<&str>, size: usize) -> ResponseDetails {
    let mut reader = UsageReader::new("POST", path, content_type).with_details(true);
    body.as_bytes().chunks(size).for_each(|part| reader.push(part));
    let usage = reader.finish();
    let without = read(body, path, content_type);
    assert_eq!((usage.token_counts, &usage.response_id), (without.token_counts, &without.response_id));
    assert_eq!(without.details, None, "details were not requested");
    *usage.details.expect("details")
}

fn expected(model: &str, id: &str, reasons: &[&str]) -> ResponseDetails {
    let named = |name: &str| Some(name.to_owned()).filter(|name| !name.is_empty());
    let finish_reasons = reasons.iter().map(|reason| (*reason).to_owned()).collect();
    ResponseDetails { backend: None, model: named(model), id: named(id), finish_reasons }
}

const CHAT: &str = concat!(
    "data: {\"id\":\"chatcmpl-1\",\"model\":\"org/m\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\"},\"finish_reason\":null}]}\n\n",
    "data: {\"id\":\"chatcmpl-1\",\"model\":\"org/m\",\"choices\":[{\"index\":1,\"delta\":{\"content\":\"\\\"finish_reason\\\":\\\"x\\\"\"},\"finish_reason\":null}]}\n\n",
    "data: {\"id\":\"chatcmpl-1\",\"model\":\"org/m\",\"choices\":[{\"index\":1,\"delta\":{},\"finish_reason\" : \"length\"}]}\n\n",
    "data: {\"id\":\"chatcmpl-1\",\"model\":\"org/m\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\n",
    "data: {\"id\":\"chatcmpl-1\",\"model\":\"org/m\",\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n\n",
    "data: [DONE]\n\n",
);

const RESPONSES: &str = concat!(
    "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"model\":\"org/m\",\"status\":\"in_progress\",\"usage\":null}}\n\n",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"hi\"}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"model\":\"org/m\",\"status\":\"completed\",\"incomplete_details\":null,\"usage\":{\"input_tokens\":2,\"output_tokens\":5}}}\n\n",
);

const MESSAGES: &str = concat!(
    "event: ping\ndata: {\"type\":\"ping\"}\n\n",
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"model\":\"org/m\",\"stop_reason\":null,\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"hi\"}}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":42}}\n\n",
);

#[test]
fn streams_of_each_dialect_give_details() {
    for size in [1, 7, 100, 10_000] {
        let read = |body, path| details(body, path, SSE, size);
        let two = expected("org/m", "chatcmpl-1", &["tool_calls", "length"]);
        assert_eq!(read(CHAT, "/v1/chat/completions"), two);
        assert_eq!(read(RESPONSES, "/v1/responses"), expected("org/m", "resp_1", &["completed"]));
        assert_eq!(read(MESSAGES, "/v1/messages"), expected("org/m", "msg_1", &["end_turn"]));
    }
}

#[test]
fn json_responses_of_each_dialect_give_details() {
    let read = |body, path| details(body, path, JSON, 9);
    let chat = r#"{"id":"c","model":"m","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}"#;
    assert_eq!(read(chat, "/v1/chat/completions"), expected("m", "c", &["stop"]));
    let message = r#"{"id":"msg","type":"message","model":"m","content":[],"stop_reason":"max_tokens"}"#;
    assert_eq!(read(message, "/v1/messages"), expected("m", "msg", &["max_tokens"]));
    let incomplete = r#"{"id":"resp","object":"response","model":"m","status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}"#;
    assert_eq!(read(incomplete, "/v1/responses"), expected("m", "resp", &["max_output_tokens"]));
    // Only a Responses response has a status of this kind.
    assert_eq!(read(incomplete, "/v1/embeddings"), expected("m", "resp", &[]));
}

#[test]
fn stream_cut_off_gives_details_so_far() {
    let begun = &CHAT[..CHAT.find("\n\n").expect("an event") + 2];
    assert_eq!(details(begun, "/v1/chat/completions", SSE, 11), expected("org/m", "chatcmpl-1", &[]));
}

#[test]
fn model_is_searched_in_first_events_only() {
    let events = |before: usize| format!("{}data: {{\"model\":\"m\"}}\n\n", "data: {\"x\":1}\n\n".repeat(before));
    assert_eq!(details(&events(3), "/v1/completions", SSE, 20), expected("m", "", &[]));
    assert_eq!(details(&events(4), "/v1/completions", SSE, 20), expected("", "", &[]));
}

#[test]
fn oversized_and_unprintable_values_are_left_out() {
    let body = |model: &str, id: &str, reason: &str| {
        format!(r#"{{"model":"{model}","id":"{id}","choices":[{{"finish_reason":"{reason}"}}]}}"#)
    };
    let read = |body: &str| details(body, "/v1/completions", JSON, 1_000);
    let (model, id, reason) = ("m".repeat(256), "i".repeat(128), "r".repeat(64));
    assert_eq!(read(&body(&model, &id, &reason)), expected(&model, &id, &[&reason]));
    assert_eq!(read(&body(&"m".repeat(257), &"i".repeat(129), &"r".repeat(65))), expected("", "", &[]));
    assert_eq!(read(&body(r"a\nb", r"\u202e", "")), expected("", "", &[]));
}

#[test]
fn finish_reasons_are_limited_to_sixteen() {
    let choices = vec![r#"{"finish_reason":"stop"}"#; 100_000].join(",");
    let body = format!(r#"{{"choices":[{choices}]}}"#);
    assert_eq!(details(&body[..900_000], "/v1/completions", JSON, 1_000), expected("", "", &[]), "invalid JSON");
    let whole = format!(r#"{{"choices":[{}]}}"#, vec![r#"{"finish_reason":"stop"}"#; 30_000].join(","));
    assert_eq!(details(&whole, "/v1/completions", JSON, 1_000), expected("", "", &["stop"; 16]));
}

#[test]
fn long_body_gives_model_and_id_only() {
    let text = "x".repeat(WHOLE_BYTES);
    let body = format!(
        r#"{{"id":"c","model":"m","choices":[{{"message":{{"content":"{text}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":1,"completion_tokens":2}}}}"#
    );
    assert_eq!(details(&body, "/v1/chat/completions", JSON, 10_000), expected("m", "c", &[]));
}

#[test]
fn skipped_response_has_empty_details() {
    assert_eq!(details("{\"id\":\"x\"}", "/tokenize", JSON, 5), ResponseDetails::default());
}

proptest! {
    #[test]
    fn details_of_arbitrary_bytes_are_independent_of_cuts(
        parts in prop::collection::vec(prop_oneof![
            prop::collection::vec(any::<u8>(), 0..20),
            prop::sample::select(vec!["data:", "\n", "{", "}", "\"", "{\"model\":\"m\",", "\"id\":\"i\"", "\"choices\":[{\"finish_reason\":\"stop\"}]"])
                .prop_map(|text| text.as_bytes().to_vec()),
        ], 0..40),
        content_type in prop::sample::select(vec![SSE, JSON, None]),
    ) {
        let read_in = |parts: &[&[u8]]| {
            let mut reader = UsageReader::new("POST", "/v1/completions", content_type).with_details(true);
            parts.iter().for_each(|part| reader.push(part));
            reader.finish()
        };
        let whole = parts.concat();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(read_in(&parts), read_in(&[&whole]));
    }
}
