//! The usage of streams that the relay requests for limits of tokens, and keeps from clients.

use modelrelay_harness::client::{Piece, Request, Response};
use modelrelay_harness::fake_backend::{Answer, Call, FakeBackend};
use modelrelay_harness::relay::RelayBuilder;
use modelrelay_harness::worker_process::Stack;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const REQUESTED: &str = "\"stream_options\":{\"include_usage\":true},";
const CHUNK: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n";
const USAGE: &str =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":30,\"completion_tokens\":12,\"total_tokens\":42}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const JOURNAL: &str = "requests.jsonl";

/// A relay with a worker, and one key.
struct Keyed {
    stack: Stack,
    secret: String,
}

impl Keyed {
    /// `limits` are those of the key.
    async fn start(limits: Value) -> Self {
        Self::with(limits, |relay| relay).await
    }

    async fn with(mut limits: Value, settings: impl FnOnce(RelayBuilder) -> RelayBuilder) -> Self {
        let strict = |relay: RelayBuilder| relay.env("MODELRELAY_REQUIRE_API_KEYS", "true");
        let stack = Stack::with(|relay| settings(strict(relay)), |worker| worker).await;
        limits["name"] = json!("k");
        let key = stack.relay.admin_post("/admin/keys", &limits).await.with_status(201).json();
        Self { stack, secret: key["secret"].as_str().expect("a secret").to_owned() }
    }

    fn post(&self, path: &str, body: &str) -> Request {
        Request::new("POST", path).header("content-type", "application/json").bearer(&self.secret).body(body.to_owned())
    }

    /// Sends a request, and begins a stream in response. Returns what the backend got.
    async fn begin(&mut self, path: &str, body: &str) -> (Response, Call, String) {
        let pending = self.stack.relay.begin(self.post(path, body));
        let mut call = self.stack.backend.call().await;
        let got = String::from_utf8(call.read_body().await).expect("text");
        assert_eq!(call.head.header("content-length"), Some(got.len().to_string().as_str()));
        call.start_stream().await;
        (pending.response().await, call, got)
    }

    /// Returns the body that the backend gets, and the stream that the client gets if the backend sends this one in
    /// pieces.
    async fn streamed(&mut self, (path, body): (&str, &str), stream: &str, size: usize) -> (String, String) {
        let (response, mut call, got) = self.begin(path, body).await;
        for piece in stream.as_bytes().chunks(size) {
            call.chunk(piece).await;
        }
        call.end_stream().await;
        let reply = response.read_to_end().await;
        assert!(!reply.aborted && reply.header("content-length").is_none());
        (got, reply.text())
    }

    /// Waits until the ledger has this number of requests, and returns its row.
    async fn row(&self, count: u64) -> Value {
        let rows = async || self.stack.relay.admin_json("/admin/usage").await["usage"][0].clone();
        let is_counted = async || rows().await["requests"]["answered"] == count;
        self.stack.relay.eventually("the requests are counted", is_counted).await;
        rows().await
    }
}

fn odd(rest: &str) -> String {
    format!(" {{ \"stream\":true,\r\n\t\"model\" : \"m\", \"n\": 1.0e0, \"text\": \"\\u017c\u{017c}\\/\"{rest} }}")
}

#[tokio::test]
async fn limited_stream_requests_usage_and_hides_it() {
    let journal = |relay: RelayBuilder| relay.env("REQUEST_JOURNAL_FILE", JOURNAL);
    let mut key = Keyed::with(json!({"tokens_per_day": 1000}), journal).await;
    let (body, sent) = (odd(""), [": ping\n\n", CHUNK, CHUNK, USAGE, DONE].concat());
    let mut count = 0;
    for path in [CHAT, COMPLETIONS] {
        for size in [1000, 9, 1] {
            let (got, text) = key.streamed((path, &body), &sent, size).await;
            assert_eq!(got, body.replacen('{', &format!("{{{REQUESTED}"), 1));
            assert_eq!(text, sent.replace(USAGE, ""), "pieces of {size}");
            count += 1;
        }
    }
    let row = key.row(count).await;
    assert_eq!((&row["input_tokens"], &row["output_tokens"]), (&json!(30 * count), &json!(12 * count)), "{row}");
    assert_eq!((&row["estimated_input_tokens"], &row["estimated_output_tokens"]), (&json!(0), &json!(0)), "{row}");
    let (next, _call, _) = key.begin(CHAT, &body).await;
    let remaining = next.headers.first("x-ratelimit-remaining-tokens").map(|left| left.parse::<u64>());
    assert_eq!(remaining, Some(Ok(1000 - 42 * count - (body.len() as u64).div_ceil(4))));
    let (relay, path) = (&key.stack.relay, key.stack.relay.path(JOURNAL));
    let journal = || std::fs::read_to_string(&path).unwrap_or_default();
    relay.eventually("a line in the journal", async || journal().contains('\n')).await;
    let line: Value = serde_json::from_str(journal().lines().next().expect("a line")).expect("JSON");
    assert_eq!((&line["body_bytes"], &line["output_tokens"]), (&json!(body.len()), &json!(12)));
}

#[tokio::test]
async fn options_of_client_are_completed() {
    let mut key = Keyed::start(json!({"tokens_per_minute": 1_000_000})).await;
    for (options, expected) in [
        ("null", "{\"include_usage\":true}"),
        ("{}", "{\"include_usage\":true}"),
        ("{\"other\": 1}", "{\"include_usage\":true,\"other\": 1}"),
        ("{\"include_usage\": false}", "{\"include_usage\": true}"),
    ] {
        let body = odd(&format!(",\"stream_options\":{options}"));
        let (got, text) = key.streamed((CHAT, &body), &[CHUNK, USAGE, DONE].concat(), 50).await;
        assert_eq!(got, body.replace(options, expected));
        assert_eq!(text, [CHUNK, DONE].concat());
    }
}

#[tokio::test]
async fn other_streams_pass_byte_for_byte() {
    let sent = [CHUNK, USAGE, DONE].concat();
    let requested = odd(",\"stream_options\":{\"include_usage\":true}");
    let wrong = odd(",\"stream_options\":7");
    let plain = odd("");
    let mut limited = Keyed::start(json!({"tokens_per_minute": 1_000_000})).await;
    let others = [(CHAT, &*requested), (COMPLETIONS, &requested), (CHAT, &wrong), ("/v1/responses", &plain)];
    for (path, body) in others.into_iter().chain([("/v1/messages", &*plain)]) {
        assert_eq!(limited.streamed((path, body), &sent, 50).await, (body.to_owned(), sent.clone()), "{path}");
    }
    let mut free = Keyed::start(json!({"max_in_flight": 9})).await;
    assert_eq!(free.streamed((CHAT, &plain), &sent, 50).await, (plain.clone(), sent.clone()));
    let off = |relay: RelayBuilder| relay.env("REQUEST_USAGE", "false");
    let mut off = Keyed::with(json!({"tokens_per_minute": 1_000_000}), off).await;
    assert_eq!(off.streamed((CHAT, &plain), &sent, 50).await, (plain, sent));
}

#[tokio::test]
async fn other_responses_pass_byte_for_byte() {
    let mut key = Keyed::start(json!({"tokens_per_minute": 1_000_000})).await;
    let usage = "{\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}";
    for (stream, status) in [(true, 400), (true, 200), (false, 200)] {
        let body = format!("{{\"model\":\"m\",\"stream\":{stream}}}");
        let pending = key.stack.relay.begin(key.post(CHAT, &body));
        let mut call = key.stack.backend.call().await;
        assert_eq!(call.read_body().await.len(), body.len() + if stream { REQUESTED.len() } else { 0 });
        call.answer(&Answer::new(status, &[("content-type", "application/json")], usage.as_bytes())).await;
        let reply = pending.reply().await.with_status(status);
        assert_eq!((reply.text(), reply.header("content-length")), (usage.to_owned(), Some(usage.len().to_string())));
    }
}

#[tokio::test]
async fn stream_of_known_length_ends_without_usage() {
    let mut key = Keyed::start(json!({"tokens_per_minute": 1_000_000})).await;
    let sent = [CHUNK, USAGE, DONE].concat();
    let pending = key.stack.relay.begin(key.post(CHAT, &odd("")));
    let call = key.stack.backend.call().await;
    call.answer(&Answer::new(200, &[("content-type", "text/event-stream")], sent.as_bytes())).await;
    let reply = pending.reply().await.with_status(200);
    assert_eq!((reply.text(), reply.aborted), ([CHUNK, DONE].concat(), false));
    assert_eq!(key.row(1).await["output_tokens"], 12);
}

#[tokio::test]
async fn complete_events_pass_before_next_begins() {
    let mut key = Keyed::start(json!({"tokens_per_minute": 1_000_000})).await;
    let (mut response, mut call, _) = key.begin(CHAT, &odd("")).await;
    let (first, second) = CHUNK.split_at(20);
    for (sent, passed) in [
        (CHUNK, CHUNK),
        (": ping\n", ": ping\n"),
        (&*format!("{CHUNK}{first}"), CHUNK),
        (second, CHUNK),
        (&*format!("{USAGE}{DONE}"), DONE),
    ] {
        call.chunk(sent.as_bytes()).await;
        assert_eq!(String::from_utf8_lossy(&response.read_at_least(passed.len()).await), passed);
    }
    call.end_stream().await;
    assert_eq!(response.next_piece().await, Piece::End);
}

#[tokio::test]
async fn broken_stream_passes_held_bytes_before_error() {
    let half = &CHUNK[..30];
    for limits in [json!({"tokens_per_minute": 1_000_000}), json!({})] {
        let mut key = Keyed::start(limits).await;
        let (mut response, mut call, _) = key.begin(CHAT, &odd("")).await;
        call.chunk([CHUNK, half].concat().as_bytes()).await;
        response.read_until(CHUNK).await;
        call.hang_up().await;
        let reply = response.read_to_end().await;
        let text = reply.text();
        let error = text.strip_prefix(&[CHUNK, half, "\n\n"].concat()).unwrap_or_else(|| panic!("{text}"));
        assert!(reply.aborted && error.starts_with("data: {\"error\":") && error.ends_with("\n\n"), "{text}");
    }
}

#[tokio::test]
async fn keepalive_is_sent_while_event_is_held() {
    let silence = |relay: RelayBuilder| relay.env("STREAM_KEEPALIVE_SECS", "1");
    let mut key = Keyed::with(json!({"tokens_per_minute": 1_000_000}), silence).await;
    let (mut response, mut call, _) = key.begin(CHAT, &odd("")).await;
    let (first, second) = CHUNK.split_at(30);
    call.chunk(first.as_bytes()).await;
    response.read_until(": keepalive\n\n").await;
    call.chunk(second.as_bytes()).await;
    call.chunk([USAGE, DONE].concat().as_bytes()).await;
    call.end_stream().await;
    let text = response.read_to_end().await.text();
    let events: Vec<&str> = text.split_inclusive("\n\n").filter(|event| !event.starts_with(':')).collect();
    assert_eq!(events.concat(), [CHUNK, DONE].concat(), "{text}");
}

#[tokio::test]
async fn requeued_stream_has_same_body() {
    let mut key = Keyed::start(json!({"tokens_per_minute": 1_000_000})).await;
    let pending = key.stack.relay.begin(key.post(CHAT, &odd("")));
    let mut lost = key.stack.backend.call().await;
    let first = lost.read_body().await;
    let mut other = FakeBackend::start().await;
    let _second = Stack::worker_of(&key.stack.relay, &other).env("WORKER_NAME", "second").start().await;
    key.stack.relay.wait_for_workers(2).await;
    key.stack.worker.process.kill().await;
    let mut call = other.call().await;
    assert_eq!(call.read_body().await, first);
    call.start_stream().await;
    call.chunk([CHUNK, USAGE, DONE].concat().as_bytes()).await;
    call.end_stream().await;
    assert_eq!(pending.reply().await.with_status(200).text(), [CHUNK, DONE].concat());
    assert_eq!(key.row(1).await["output_tokens"], 12);
}
