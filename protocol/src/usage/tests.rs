use proptest::prelude::*;

use super::*;

mod details;

const SSE: Option<&str> = Some("text/event-stream; charset=utf-8");
const JSON: Option<&str> = Some("application/json");

fn counts(prompt: u64, completion: u64, total: u64, cached: Option<u64>) -> Option<TokenCounts> {
    Some(TokenCounts {
        prompt_tokens: prompt,
        completion_tokens: completion,
        total_tokens: total,
        cached_tokens: cached,
    })
}

fn read_in(parts: impl IntoIterator<Item = impl AsRef<[u8]>>, path: &str, content_type: Option<&str>) -> Usage {
    let mut reader = UsageReader::new("POST", path, content_type);
    parts.into_iter().for_each(|part| reader.push(part.as_ref()));
    reader.finish()
}

fn read(body: &str, path: &str, content_type: Option<&str>) -> Usage {
    read_in([body], path, content_type)
}

const CHAT_STREAM: &str = concat!(
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"delta\":{\"content\":\"the \\\"usage\\\":{\\\"prompt_tokens\\\":9}\"}}],\"usage\":null}\r\n\r\n",
    "data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"delta\":{\"content\":\"é😀\"}}],\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":1,\"total_tokens\":12}}\n\n",
    ": keep-alive\n\n",
    "data: {\"id\":\"chatcmpl-1\",\"choices\":[],\"usage\" : {\"prompt_tokens\":11,\"completion_tokens\":7,\"total_tokens\":18,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
    "data: [DONE]\n\n",
);

const RESPONSES_STREAM: &str = concat!(
    "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"object\":\"response\",\"usage\":null}}\n\n",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"item_id\":\"msg_1\",\"delta\":\"hi\"}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"output\":[{\"id\":\"msg_1\"}],",
    "\"usage\":{\"input_tokens\":20,\"input_tokens_details\":{\"cached_tokens\":0},\"output_tokens\":5,\"output_tokens_details\":{\"reasoning_tokens\":2},\"total_tokens\":25}}}\n\n",
);

const MESSAGES_STREAM: &str = concat!(
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"content\":[],\"usage\":{\"input_tokens\":10,\"cache_creation_input_tokens\":3,\"cache_read_input_tokens\":2,\"output_tokens\":1}}}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"hi\"}}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":42}}\n\n",
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
);

#[test]
fn chat_stream_usage_is_read_from_last_chunk() {
    let usage = read(CHAT_STREAM, "/v1/chat/completions?x=1", SSE);
    assert_eq!(usage.token_counts, counts(11, 7, 18, Some(4)));
    assert_eq!(usage.response_id, None);
}

#[test]
fn responses_stream_gives_id_first_and_usage_last() {
    let usage = read(RESPONSES_STREAM, "/v1/responses", SSE);
    assert_eq!(usage.token_counts, counts(20, 5, 25, Some(0)));
    assert_eq!(usage.response_id.as_deref(), Some("resp_1"));
    // Cut off after the first event: the id is known, the usage is not.
    let begun = read(&RESPONSES_STREAM[..200], "/v1/responses", SSE);
    assert_eq!(begun, Usage { response_id: Some("resp_1".into()), ..Usage::default() });
}

#[test]
fn leading_blanks_of_untyped_response_are_skipped() {
    let document = "{\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":7,\"total_tokens\":18}}";
    for answer in [document, &format!("data: {document}\n")] {
        let blanks = format!("\n \u{c}\t{answer}");
        for size in [1, 3, blanks.len()] {
            let usage = read_in(blanks.as_bytes().chunks(size), "/v1/chat/completions", None);
            assert_eq!(usage.token_counts, counts(11, 7, 18, None), "{answer} in parts of {size}");
        }
    }
}

#[test]
fn messages_stream_gives_input_first_and_output_last() {
    let usage = read(MESSAGES_STREAM, "/v1/messages", SSE);
    assert_eq!(usage, Usage { token_counts: counts(15, 42, 57, Some(2)), ..Usage::default() });
}

#[test]
fn json_responses_of_each_route_are_read() {
    let chat = r#"{"choices":[{"message":{"content":"x"}}],"object":"chat.completion","usage":{"completion_tokens":5,"prompt_tokens":3,"total_tokens":8},"id":"chatcmpl-1"}"#;
    assert_eq!(read(chat, "/v1/chat/completions", JSON).token_counts, counts(3, 5, 8, None));
    let embeddings = r#"{"data":[{"embedding":[0.5,1]}],"usage":{"prompt_tokens":6,"total_tokens":6}}"#;
    assert_eq!(read(embeddings, "/v1/embeddings", JSON).token_counts, counts(6, 0, 6, None));
    let rerank = r#"{"results":[],"usage":{"total_tokens":9}}"#;
    assert_eq!(read(rerank, "/v1/rerank", JSON).token_counts, counts(9, 0, 9, None));
    let message = r#"{"type":"message","id":"msg_1","content":[],"usage":{"input_tokens":4,"output_tokens":2}}"#;
    assert_eq!(read(message, "/v1/messages", JSON).token_counts, counts(4, 2, 6, None));
    let response = r#"{"completed_at":1,"id":"resp_2","object":"response","output":[{"id":"msg"}],"usage":{"input_tokens":4,"output_tokens":2,"total_tokens":6}}"#;
    let usage = read(response, "/v1/responses", Some("Application/JSON"));
    assert_eq!(usage, Usage { token_counts: counts(4, 2, 6, None), response_id: Some("resp_2".into()), details: None });
}

#[test]
fn missing_or_malformed_usage_stays_absent() {
    for body in [
        "",
        "{}",
        "[]",
        "null",
        "{\"usage\":null}",
        "{\"usage\":{}}",
        "{\"usage\":\"much\"}",
        "{\"usage\":{\"prompt_tokens\":\"3\",\"total_tokens\":-1}}",
        "{\"choices\":[{\"message\":{\"content\":\"\\\"usage\\\":{\\\"prompt_tokens\\\":3}\"}}]}",
        "{\"error\":{\"message\":\"no\"},\"message\":\"no\",\"response\":7}",
        "not JSON",
    ] {
        for content_type in [SSE, JSON, None] {
            assert_eq!(read(body, "/v1/chat/completions", content_type), Usage::default(), "{body}");
            assert_eq!(
                read(&format!("data: {body}\n\n"), "/v1/chat/completions", content_type),
                Usage::default(),
                "{body}"
            );
        }
    }
}

#[test]
fn routes_and_types_without_usage_are_not_read() {
    let body = r#"{"object":"response","id":"resp_1","usage":{"input_tokens":4,"output_tokens":2}}"#;
    for (method, path) in [
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
    ] {
        let mut reader = UsageReader::new(method, path, JSON);
        reader.push(body.as_bytes());
        assert_eq!(reader.finish(), Usage::default(), "{method} {path}");
    }
    assert_eq!(read(body, "/v1/audio/speech", Some("audio/mpeg")), Usage::default());
}

#[test]
fn first_byte_decides_format_without_content_type() {
    assert_eq!(read(CHAT_STREAM, "/v1/chat/completions", None).token_counts, counts(11, 7, 18, Some(4)));
    let body = "\n {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}";
    assert_eq!(read(body, "/v1/chat/completions", None).token_counts, counts(3, 1, 4, None));
}

#[test]
fn response_of_20_mb_is_read_at_edges() {
    let numbers = "0.123456789,".repeat(20 << 20 >> 4);
    let body = format!(
        r#"{{"object":"response","model":"a\\\"b","id":"resp_9","output":[{{"id":"m","usage":{{"x":1}},"n":[{numbers}0]}}],"usage":{{"input_tokens":7,"output_tokens":1,"total_tokens":8}},"metadata":{{"usage":{{"kind":"x"}}}}}}"#
    );
    let usage = read_in(body.as_bytes().chunks(16_384), "/v1/responses", JSON);
    assert_eq!(usage, Usage { token_counts: counts(7, 1, 8, None), response_id: Some("resp_9".into()), details: None });
}

#[test]
fn one_event_of_2_mb_is_read() {
    let text = "x".repeat(2 << 20);
    let stream = format!(
        "data: {{\"type\":\"response.completed\",\"response\":{{\"id\":\"resp_1\",\"text\":\"{text}\",\"usage\":{{\"input_tokens\":7,\"output_tokens\":9}}}}}}\n\ndata: {{}}\n\n"
    );
    assert_eq!(read_in(stream.as_bytes().chunks(10_000), "/v1/responses", SSE).token_counts, counts(7, 9, 16, None));
}

#[test]
fn unterminated_last_line_is_read() {
    let stream = "data:{\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}";
    assert_eq!(read(stream, "/v1/completions", SSE).token_counts, counts(1, 2, 3, None));
}

#[test]
fn extreme_numbers_ids_and_nesting_are_handled() {
    let body =
        format!(r#"{{"usage":{{"input_tokens":{0},"cache_read_input_tokens":{0},"output_tokens":{0}}}}}"#, u64::MAX);
    assert_eq!(read(&body, "/v1/messages", JSON).token_counts, counts(u64::MAX, u64::MAX, u64::MAX, Some(u64::MAX)));
    let long = format!(r#"{{"object":"response","id":"{}"}}"#, "r".repeat(129));
    assert_eq!(read(&long, "/v1/responses", JSON).response_id, None);
    for hostile in [
        "{\"usage\":".repeat(50_000),
        "[".repeat(500_000),
        "\"usage\":{\"a\":[".repeat(100_000),
        "\"\\".repeat(700_000),
    ] {
        for content_type in [JSON, SSE] {
            assert_eq!(read(&hostile, "/v1/responses", content_type), Usage::default());
            assert_eq!(read(&format!("data: {hostile}"), "/v1/responses", content_type), Usage::default());
        }
    }
}

proptest! {
    #[test]
    fn usage_is_independent_of_stream_cuts(which in 0_usize..3, sizes in prop::collection::vec(1_usize..90, 1..40)) {
        let (stream, path) = [
            (CHAT_STREAM, "/v1/chat/completions"),
            (RESPONSES_STREAM, "/v1/responses"),
            (MESSAGES_STREAM, "/v1/messages"),
        ][which];
        let mut rest = stream.as_bytes();
        let mut parts = Vec::new();
        for size in sizes.into_iter().cycle() {
            if rest.is_empty() { break }
            let (part, after) = rest.split_at(size.min(rest.len()));
            parts.push(part);
            rest = after;
        }
        prop_assert_eq!(read_in(parts, path, SSE), read(stream, path, SSE));
    }

    #[test]
    fn usage_of_arbitrary_bytes_is_independent_of_cuts(
        parts in prop::collection::vec(prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            prop::sample::select(vec!["data:", "\n", "{\"usage\":", "{", "}", "\"", "\\", "\"response\":{\"id\":\"", "\"input_tokens\":1,"])
                .prop_map(|text| text.as_bytes().to_vec()),
        ], 0..40),
        content_type in prop::sample::select(vec![SSE, JSON, None]),
    ) {
        let path = "/v1/responses";
        let whole = parts.concat();
        prop_assert_eq!(read_in(&parts, path, content_type), read_in([&whole], path, content_type));
    }
}

#[test]
fn id_of_long_response_is_read_for_responses() {
    let text = "x".repeat(WHOLE_BYTES);
    let body = format!(r#"{{"error":{{"id":"no"}},"tools":[{{"id":"no"}}],"id":"resp_1","output":"{text}"}}"#);
    assert_eq!(read(&body, "/v1/responses", JSON).response_id.as_deref(), Some("resp_1"));
    assert_eq!(read(&body, "/v1/chat/completions", JSON).response_id, None);
}

#[test]
fn long_comment_is_ignored() {
    let stream =
        format!(": {}{{\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":4}}}}\n\n", "x".repeat(WHOLE_BYTES));
    assert_eq!(read(&stream, "/v1/chat/completions", SSE), Usage::default());
}

#[test]
fn usage_of_long_response_is_independent_of_cuts() {
    let filler = "x".repeat(WHOLE_BYTES);
    for (before_end, is_found) in [(EDGE_BYTES / 2, true), (EDGE_BYTES * 3 / 2, false)] {
        let end = "y".repeat(before_end);
        let json =
            format!(r#"{{"text":"{filler}","usage":{{"prompt_tokens":3,"completion_tokens":4}},"end":"{end}"}}"#);
        for (body, content_type) in [(json.clone(), JSON), (format!("data: {json}\n\n"), SSE)] {
            for size in [1_000, EDGE_BYTES, WHOLE_BYTES, body.len()] {
                let usage = read_in(body.as_bytes().chunks(size), "/v1/chat/completions", content_type);
                assert_eq!(usage.token_counts.is_some(), is_found, "{content_type:?} in parts of {size}");
            }
        }
    }
}
