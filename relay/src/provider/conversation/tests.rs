use std::collections::BTreeMap;
use std::time::Instant;

use http::{HeaderMap, HeaderName, HeaderValue};
use modelrelay_protocol::paths::Endpoint;
use modelrelay_protocol::secret::Secret;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{HashKey, Prompt, PromptField, PromptSpans, of_request};
use crate::settings::config::CacheIsolation;

/// A request of a client.
#[derive(Clone)]
struct Turn {
    endpoint: Endpoint,
    headers: Vec<(&'static str, String)>,
    body: String,
}

/// Makes a turn: the session, the first user message, and the number of the turn.
type Client = fn(&str, &str, usize) -> Turn;

/// The clients whose conversations differ by the first message of the user.
const CLIENTS: [(&str, Client); 7] = [
    ("Claude Code", claude_code),
    ("OpenAI SDK, LangChain, aider", openai_chat),
    ("OpenAI SDK, responses", responses),
    ("Codex", codex),
    ("Open WebUI", open_webui),
    ("opencode and kilo", opencode),
    ("curl, completions", completions),
];

fn instructions() -> String {
    "You are a coding agent. ".repeat(200)
}

fn post(endpoint: Endpoint, headers: &[(&'static str, &str)], body: &impl ToString) -> Turn {
    let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Turn { endpoint, headers, body: body.to_string() }
}

/// Text of the system and the tools behind the messages; `cache_control` at the newest message, whose content is blocks
/// only then; and a billing block that changes.
fn claude_code(session: &str, first: &str, turn: usize) -> Turn {
    let marked = |text: &str| json!([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]);
    let first = if turn == 0 { marked(first) } else { json!(first) };
    let mut messages = vec![json!({"role": "user", "content": first})];
    for at in 1..=turn {
        let content = if at == turn { marked("next") } else { json!("next") };
        messages.extend([json!({"role": "assistant", "content": "done"}), json!({"role": "user", "content": content})]);
    }
    let billing = format!("x-anthropic-billing-header: cc_version=2.1; cch={turn};");
    let system = json!([{"type": "text", "text": billing}, {"type": "text", "text": instructions()}]);
    let tools = json!([{"name": "Bash", "input_schema": {"type": "object", "cache_control": turn, "required": ["a"]}}]);
    let body = format!(
        r#"{{"model":"m","messages":{},"system":{system},"tools":{tools},"metadata":{{"user_id":"{session}"}},"stream":true}}"#,
        Value::from(messages)
    );
    post(Endpoint::Messages, &[("x-claude-code-session-id", session)], &body)
}

fn chat_messages(first: &str, turn: usize) -> Value {
    let mut messages =
        vec![json!({"role": "system", "content": instructions()}), json!({"role": "user", "content": first})];
    for at in 0..turn {
        messages.push(json!({"role": "assistant", "content": format!("answer {at}")}));
        messages.push(json!({"role": "user", "content": "next"}));
    }
    Value::from(messages)
}

fn openai_chat(_: &str, first: &str, turn: usize) -> Turn {
    post(
        Endpoint::ChatCompletions,
        &[],
        &json!({"model": "m", "messages": chat_messages(first, turn), "temperature": turn}),
    )
}

fn open_webui(session: &str, first: &str, turn: usize) -> Turn {
    Turn { headers: vec![("x-openwebui-chat-id", session.to_owned())], ..openai_chat(session, first, turn) }
}

fn opencode(session: &str, first: &str, turn: usize) -> Turn {
    Turn { headers: vec![("x-session-affinity", session.to_owned())], ..openai_chat(session, first, turn) }
}

fn response_items(first: &str, turn: usize) -> Vec<Value> {
    let mut items =
        vec![json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": first}]})];
    items.extend((0..turn).map(|at| json!({"type": "function_call_output", "call_id": at, "output": "ok"})));
    items
}

fn responses(_: &str, first: &str, turn: usize) -> Turn {
    let body = json!({"model": "m", "instructions": instructions(), "input": response_items(first, turn)});
    post(Endpoint::Responses, &[], &body)
}

fn codex(session: &str, first: &str, turn: usize) -> Turn {
    let mut items = vec![json!({"role": "developer", "content": "permissions"})];
    items.extend(response_items(first, turn));
    let body = json!({"model": "m", "instructions": instructions(), "input": items, "prompt_cache_key": session});
    post(Endpoint::Responses, &[], &body)
}

fn completions(_: &str, first: &str, turn: usize) -> Turn {
    let prompt = format!("{first}{}{}", instructions(), "more ".repeat(turn));
    post(Endpoint::Completions, &[], &json!({"model": "m", "prompt": prompt}))
}

fn hash_key() -> HashKey {
    HashKey::derive([&Secret::new("a secret of the workers")]).unwrap()
}

fn key_with(turn: &Turn, model: &str, api_key: &str, isolation: CacheIsolation) -> Option<u64> {
    let mut headers = HeaderMap::new();
    for (name, value) in &turn.headers {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
    }
    let (endpoint, body) = (turn.endpoint, turn.body.as_bytes());
    let spans = &spans_of(body)?;
    let prompt = Prompt { endpoint, headers: &headers, body, spans, model, api_key: Some(api_key), isolation };
    of_request(&hash_key(), &prompt)
}

/// Finds the prompt's fields as the scan for the model does.
fn spans_of(body: &[u8]) -> Option<PromptSpans> {
    let fields: BTreeMap<String, &RawValue> = serde_json::from_slice(body).ok()?;
    let mut spans = PromptSpans::default();
    for (name, value) in &fields {
        let start = value.get().as_ptr() as usize - body.as_ptr() as usize;
        if let Some(field) = PromptField::named(name.as_bytes()) {
            spans.set(field, start..start + value.get().len());
        }
    }
    Some(spans)
}

fn key(turn: &Turn) -> Option<u64> {
    key_with(turn, "m", "k", CacheIsolation::None)
}

fn key_of(endpoint: Endpoint, body: &impl ToString) -> Option<u64> {
    key(&post(endpoint, &[], body))
}

#[test]
fn turns_of_one_conversation_share_key() {
    for (name, client) in CLIENTS {
        let first = key(&client("s", "fix the bug", 0));
        assert!(first.is_some(), "{name}");
        for turn in 1..5 {
            assert_eq!(key(&client("s", "fix the bug", turn)), first, "{name}, turn {turn}");
        }
    }
}

#[test]
fn conversations_with_different_first_messages_differ() {
    for (name, client) in CLIENTS {
        assert_ne!(key(&client("s", "fix the bug", 1)), key(&client("s", "write a test", 1)), "{name}");
    }
}

#[test]
fn equal_prompts_of_two_sessions_differ() {
    for (name, client) in [CLIENTS[0], CLIENTS[3], CLIENTS[4], CLIENTS[5]] {
        assert_ne!(key(&client("s", "fix the bug", 1)), key(&client("t", "fix the bug", 1)), "{name}");
    }
}

#[test]
fn model_separates_conversations() {
    let turn = openai_chat("", "fix", 0);
    assert_ne!(key(&turn), key_with(&turn, "n", "k", CacheIsolation::None));
}

#[test]
fn api_keys_separate_only_with_isolation() {
    let turn = openai_chat("", "fix", 0);
    assert_eq!(key(&turn), key_with(&turn, "m", "other", CacheIsolation::None));
    let isolated = |api_key| key_with(&turn, "m", api_key, CacheIsolation::Key);
    assert_ne!(isolated("k"), isolated("other"));
}

#[test]
fn whitespace_and_field_order_are_ignored() {
    for (name, client) in CLIENTS {
        let compact = client("s", "fix the bug", 1);
        let value: Value = serde_json::from_str(&compact.body).unwrap();
        let fields = value.as_object().unwrap().iter().rev();
        let fields: Vec<_> = fields
            .map(|(name, value)| format!("{name:?} :\n{}", serde_json::to_string_pretty(value).unwrap()))
            .collect();
        let spaced = Turn { body: format!("{{ {} }}", fields.join(" ,\t")), ..compact.clone() };
        // serde_json sorts the members of a nested object, and so the compact body must be sorted too.
        assert_eq!(key(&spaced), key(&Turn { body: value.to_string(), ..compact }), "{name}");
    }
}

#[test]
fn string_equals_one_text_block() {
    let text = instructions();
    let body = |content: Value| json!({"system": content.clone(), "messages": [{"role": "user", "content": content}]});
    let string = key_of(Endpoint::Messages, &body(json!(text)));
    assert!(string.is_some());
    assert_eq!(string, key_of(Endpoint::Messages, &body(json!([{"type": "text", "text": text}]))));
    let input = |input: Value| key_of(Endpoint::Responses, &json!({"input": input}));
    assert_eq!(input(json!(text)), input(json!([{"role": "user", "content": [{"type": "input_text", "text": text}]}])));
}

#[test]
fn cache_control_is_ignored_in_all_places() {
    let (text, control) = (instructions(), json!({"type": "ephemeral", "ttl": ["1h", {"a": "}"}]}));
    let body = |mark: bool| {
        let mut image = json!({"type": "image", "source": {"data": text}});
        let mut tool = json!({"name": "t", "a": 1, "z": [1, 2]});
        if mark {
            image["cache_control"] = control.clone();
            tool["cache_control"] = json!(null);
        }
        json!({"tools": [tool], "messages": [{"role": "user", "content": [image]}]})
    };
    assert_eq!(key_of(Endpoint::Messages, &body(true)), key_of(Endpoint::Messages, &body(false)));
}

#[test]
fn adjacent_numbers_are_not_joined() {
    let body =
        |tokens: Value| key_of(Endpoint::Completions, &json!({"user": "u", "prompt": tokens, "pad": instructions()}));
    assert!(body(json!([1, 23])).is_some());
    assert_ne!(body(json!([1, 23])), body(json!([12, 3])));
}

#[test]
fn short_prompt_has_key_only_with_session() {
    assert_eq!(
        key_of(Endpoint::ChatCompletions, &json!({"user": "u", "messages": [{"role": "user", "content": "hi"}]})),
        None
    );
    let long = |user: Value| {
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": instructions()}]);
        key_of(Endpoint::ChatCompletions, &json!({"messages": messages, "user": user}))
    };
    assert_eq!(long(json!(null)), None);
    assert_eq!(long(json!("")), None);
    assert!(long(json!("u")).is_some());
}

#[test]
fn unreadable_request_has_no_key() {
    let chat = openai_chat("", "fix", 0);
    for cut in [1, 100, 3000, chat.body.len() - 1] {
        assert_eq!(key(&Turn { body: chat.body[..cut].to_owned(), ..chat.clone() }), None, "{cut}");
    }
    for endpoint in [Endpoint::Embeddings, Endpoint::Images, Endpoint::Audio, Endpoint::Other] {
        assert_eq!(key(&Turn { endpoint, ..chat.clone() }), None);
    }
}

#[test]
fn hash_key_ignores_order_of_secrets() {
    let (one, two) = (Secret::new("one"), Secret::new("two"));
    let derived = HashKey::derive([&one, &two]);
    assert!(derived.is_some() && derived == HashKey::derive([&two, &one]));
    assert!(HashKey::derive([&one]) != HashKey::derive([&two]));
    assert!(HashKey::derive([]).is_none());
}

#[test]
#[ignore = "a measurement: run it in a release build"]
#[expect(clippy::print_stdout, reason = "its result")]
fn measure_long_conversations() {
    for bytes in [200 << 10, 2 << 20] {
        let mut turn = claude_code("s", "fix the bug", 1);
        let (reply, tool) = ("\\\"x\\\" = 1;\\n".repeat(100), "Runs a command in a shell. ".repeat(1500));
        let message = format!(r#"{{"role":"assistant","content":"{reply}"}},"#);
        let count = (bytes - turn.body.len() - tool.len()) / message.len();
        let at = turn.body.find("},{").unwrap() + 2;
        turn.body.insert_str(at, &message.repeat(count));
        turn.body = turn.body.replace(r#""name":"Bash""#, &format!(r#""description":"{tool}","name":"Bash""#));
        let (body, headers) = (turn.body.as_bytes(), HeaderMap::new());
        let (spans, isolation) = (&spans_of(body).unwrap(), CacheIsolation::None);
        let prompt =
            Prompt { endpoint: turn.endpoint, headers: &headers, body, spans, model: "m", api_key: None, isolation };
        assert!(of_request(&hash_key(), &prompt).is_some());
        let (rounds, begin) = (200, Instant::now());
        for _ in 0..rounds {
            std::hint::black_box(of_request(&hash_key(), std::hint::black_box(&prompt)));
        }
        println!("{} bytes: {:?} behind the scan of the body", body.len(), begin.elapsed() / rounds);
    }
}
