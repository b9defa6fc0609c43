//! The usage ledger: sums per API key, model and day, in memory and in a file.

use std::collections::BTreeSet;
use std::path::Path;

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::{Relay, RelayBuilder};
use modelrelay_harness::secrecy::PROMPT;
use modelrelay_harness::worker::{FakeWorker, Job};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::{chat, chat_stream, openai_error};

const FILE: &str = "usage.jsonl";

pub(crate) fn stored() -> RelayBuilder {
    Relay::builder().env("USAGE_FILE", FILE)
}

pub(crate) fn with_keys(relay: RelayBuilder) -> RelayBuilder {
    relay.env("MODELRELAY_REQUIRE_API_KEYS", "true")
}

pub(crate) async fn new_key(relay: &Relay, settings: &Value) -> (String, String) {
    let key = relay.admin_post("/admin/keys", settings).await.with_status(201).json();
    (key["id"].as_str().expect("an id").to_owned(), key["secret"].as_str().expect("a secret").to_owned())
}

/// Ends a response with these tokens of prompt, cache and response.
pub(crate) async fn finish(worker: &mut FakeWorker, job: &Job, [prompt, cached, completion]: [u64; 3]) {
    let counts = json!({"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion,
        "total_tokens": prompt + completion});
    worker.send(&json!({"type": "response_complete", "request_id": job.id, "token_counts": counts})).await;
}

/// Sends a request and answers it with these tokens.
async fn answered(relay: &Relay, worker: &mut FakeWorker, request: Request, tokens: [u64; 3]) {
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
    worker.pieces(&job, b"{\"secret-answer\": 1}").await;
    finish(worker, &job, tokens).await;
    let _ = pending.reply().await.with_status(200);
}

/// Returns the rows of `/admin/usage` with this query, without their days, slots and waits.
async fn rows(relay: &Relay, query: &str) -> Vec<Value> {
    let answer = relay.admin_json(&format!("/admin/usage{query}")).await;
    let rows = answer["usage"].as_array().unwrap_or_else(|| panic!("no rows in {answer}")).clone();
    let plain = |mut row: Value| {
        for (name, value) in row.as_object_mut().expect("a row") {
            if ["day", "slot_seconds", "wait_seconds"].contains(&name.as_str()) {
                *value = Value::Null;
            }
        }
        row
    };
    rows.into_iter().map(plain).collect()
}

/// Waits until the requests of all rows are this many: one is counted when its connection has ended.
pub(crate) async fn wait_for_requests(relay: &Relay, count: u64) {
    let what = format!("{count} requests in the ledger");
    relay
        .eventually(&what, || async {
            let rows = rows(relay, "").await;
            let counts = rows.iter().flat_map(|row| row["requests"].as_object().expect("counts").values());
            counts.filter_map(Value::as_u64).sum::<u64>() == count
        })
        .await;
}

/// Waits until the file has this many requests.
pub(crate) async fn wait_for_stored(relay: &Relay, count: u64) {
    let in_file = || {
        let text = std::fs::read_to_string(relay.path(FILE)).unwrap_or_default();
        let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let counts = lines.iter().flat_map(|line| line["requests"].as_object().expect("counts").values());
        counts.filter_map(Value::as_u64).sum::<u64>()
    };
    relay.eventually(&format!("{count} requests in the file"), || async { in_file() == count }).await;
}

fn row(key: (&Value, &Value), model: &str, requests: [u64; 4], reported: [u64; 3], estimated: [u64; 2]) -> Value {
    let [answered, failed, cancelled, refused] = requests;
    json!({
        "day": null, "key_id": key.0, "key": key.1, "model": model,
        "requests": {"answered": answered, "failed": failed, "cancelled": cancelled, "refused": refused},
        "input_tokens": reported[0], "cached_tokens": reported[1], "output_tokens": reported[2],
        "estimated_input_tokens": estimated[0], "estimated_output_tokens": estimated[1],
        "slot_seconds": null, "wait_seconds": null,
    })
}

#[tokio::test]
async fn sums_equal_what_workers_reported() {
    let relay = with_keys(Relay::builder()).start().await;
    let mut worker = relay.core1_worker(&["m", "n"], 4).await;
    let (laptop, secret) = new_key(&relay, &json!({"name": "laptop"})).await;
    let (phone, other_secret) = new_key(&relay, &json!({"name": "phone"})).await;
    answered(&relay, &mut worker, chat("m").bearer(&secret), [900, 800, 3]).await;
    answered(&relay, &mut worker, chat("m").bearer(&secret), [950, 0, 7]).await;
    answered(&relay, &mut worker, chat("n").bearer(&secret), [10, 0, 1]).await;
    answered(&relay, &mut worker, chat("m").bearer(&other_secret), [20, 5, 2]).await;
    wait_for_requests(&relay, 4).await;

    let laptop = (&json!(laptop), &json!("laptop"));
    let phone = (&json!(phone), &json!("phone"));
    let expected = [
        row(laptop, "m", [2, 0, 0, 0], [1850, 800, 10], [0, 0]),
        row(laptop, "n", [1, 0, 0, 0], [10, 0, 1], [0, 0]),
        row(phone, "m", [1, 0, 0, 0], [20, 5, 2], [0, 0]),
    ];
    let all = rows(&relay, "").await;
    assert!(all.len() == 3 && expected.iter().all(|row| all.contains(row)), "{all:#?}");
    assert_eq!(rows(&relay, "?key=laptop&model=n").await, expected[1..2]);
    assert_eq!(rows(&relay, &format!("?key={}", phone.0.as_str().unwrap())).await, expected[2..]);
    assert_eq!(rows(&relay, "?until=2020-01-01").await, [] as [Value; 0]);
    let whole = relay.admin_json("/admin/usage?since=2020-01-01").await;
    let first = &whole["usage"][0];
    assert!(first["slot_seconds"].as_f64() > Some(0.0) && first["wait_seconds"].as_f64() >= Some(0.0), "{whole}");
    assert_eq!(first["day"].as_str().map(str::len), Some("2026-11-25".len()));
    assert_eq!(
        (&whole["stored"], whole["since"].as_str().map(str::len)),
        (&json!(false), Some("2026-11-25T10:00:00Z".len()))
    );

    assert_eq!(relay.metric("modelrelay_key_tokens_total{key=\"laptop\",type=\"input\"}").await, 1860.0);
    assert_eq!(relay.metric("modelrelay_key_tokens_total{key=\"phone\",type=\"cached_input\"}").await, 5.0);
    assert!(relay.metric("modelrelay_key_slot_seconds_total{key=\"laptop\"}").await > 0.0);
    for name in dashboard_metrics() {
        assert!(relay.metric(&name).await > 0.0, "{name} is on the dashboard");
    }
}

/// The metrics that the Grafana dashboard queries.
fn dashboard_metrics() -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts/modelrelay/files/dashboards/usage.json");
    let board = std::fs::read_to_string(path).expect("a dashboard");
    let uses = board.match_indices("modelrelay_key_").map(|(at, _)| &board[at..]);
    let names: BTreeSet<_> = uses.map(|text| text.split(['{', ',', '"']).next().expect("a name").to_owned()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    names
}

#[tokio::test]
async fn request_without_key_has_null_key() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    answered(&relay, &mut worker, chat("m"), [5, 0, 1]).await;
    wait_for_requests(&relay, 1).await;
    let none = (&Value::Null, &Value::Null);
    assert_eq!(rows(&relay, "").await, [row(none, "m", [1, 0, 0, 0], [5, 0, 1], [0, 0])]);
}

#[tokio::test]
async fn cancelled_stream_is_estimated() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let cancelled = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    let bytes = job.body.len() as u64;
    worker.start_stream(&job, "data: 1\n\ndata: 2\n\n").await;
    worker.stream_on(&job, "data: 3\n\n").await;
    let mut response = cancelled.response().await;
    response.read_until("data: 3\n\n").await;
    drop(response);
    worker.expect_cancel(&job.id).await;
    wait_for_requests(&relay, 1).await;
    let none = (&Value::Null, &Value::Null);
    assert_eq!(rows(&relay, "").await, [row(none, "m", [0, 0, 1, 0], [0, 0, 0], [bytes.div_ceil(4), 3])]);
}

#[tokio::test]
async fn failed_and_refused_requests_are_counted() {
    let relay = with_keys(Relay::builder()).env("MAX_QUEUE_LEN", "1").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let (id, secret) = new_key(&relay, &json!({"name": "k", "models": ["m", "missing"]})).await;
    let running = relay.begin(chat("m").bearer(&secret));
    let job = worker.expect_request().await;
    let waiting = relay.begin(chat("m").bearer(&secret));
    relay.wait_for_queue_depth("local", 1).await;
    let _ = relay.fetch(chat("m").bearer(&secret)).await.with_status(429);
    // Neither of these models is named in the ledger, as no worker lists them, or the key may not use it.
    openai_error(&relay.fetch(chat("forbidden").bearer(&secret)).await, 403, "permission_error", "model_forbidden");
    let _ = relay.fetch(chat("missing").bearer(&secret)).await.with_status(404);
    // A client without a valid key has no row.
    let _ = relay.fetch(chat("m").bearer("mr-x-y")).await.with_status(401);
    worker.fail(&job.id, "backend_error", "it failed").await;
    assert!(running.reply().await.status >= 500);
    let job = worker.expect_request().await;
    worker.response_start(&job, 400, &[("content-type", "application/json")]).await;
    worker.pieces(&job, b"{}").await;
    worker.send(&json!({"type": "response_complete", "request_id": job.id})).await;
    let _ = waiting.reply().await.with_status(400);
    wait_for_requests(&relay, 5).await;
    let key = (&json!(id), &json!("k"));
    let expected = [row(key, "m", [0, 2, 0, 1], [0; 3], [0, 0]), row(key, "other", [0, 0, 0, 2], [0; 3], [0, 0])];
    assert_eq!(rows(&relay, "").await, expected);
    let waited = relay.admin_json("/admin/usage?model=m").await["usage"][0]["wait_seconds"].as_f64();
    assert!(waited > Some(0.0), "{waited:?}");
}

#[tokio::test]
async fn backend_error_after_keep_alive_has_no_tokens() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "0.2").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let mut response = relay.send(chat_stream("m")).await;
    assert_eq!(response.status, 200);
    let _ = response.read_until("\n\n").await;
    let job = worker.expect_request().await;
    worker.answer_with(&job, 400, &[("content-type", "application/json")], b"{\"error\": \"too long\"}").await;
    assert!(response.read_to_end().await.broken_stream().contains("400"), "the error is reported in the stream");
    wait_for_requests(&relay, 1).await;
    let rows = rows(&relay, "").await;
    let estimated = ["estimated_input_tokens", "estimated_output_tokens"].map(|name| &rows[0][name]);
    assert_eq!(estimated, [&json!(0), &json!(0)], "{rows:?}");
}

#[tokio::test]
async fn slots_are_charged_over_all_attempts() {
    let relay = Relay::start().await;
    let mut first = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    first.expect_request().await;
    let held = std::time::Instant::now();
    first.expect_quiet().await;
    let held = held.elapsed().as_secs_f64();
    let mut second = relay.core1_worker(&["m"], 1).await;
    first.vanish();
    let job = second.expect_request().await;
    second.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    wait_for_requests(&relay, 1).await;
    let row = relay.admin_json("/admin/usage").await["usage"][0].clone();
    assert!(row["slot_seconds"].as_f64() >= Some(held), "{held} in {row}");
    assert_eq!(row["requests"]["answered"], 1);
}

#[tokio::test]
async fn sums_survive_kill() {
    let relay = with_keys(stored()).start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    let (id, secret) = new_key(&relay, &json!({"name": "laptop"})).await;
    answered(&relay, &mut worker, chat("m").bearer(&secret), [900, 800, 3]).await;
    wait_for_stored(&relay, 1).await;
    answered(&relay, &mut worker, chat("m").bearer(&secret), [100, 0, 4]).await;
    wait_for_stored(&relay, 2).await;
    let text = relay.read_file(FILE);
    for hidden in [PROMPT, "secret-answer", &secret, "127.0.0.1"] {
        assert!(!text.contains(hidden), "{hidden} is in the file: {text}");
    }
    let relay = relay.restart_after_kill().await;
    let key = (&json!(id), &json!("laptop"));
    assert_eq!(rows(&relay, "").await, [row(key, "m", [2, 0, 0, 0], [1000, 800, 7], [0, 0])]);
    assert_eq!(relay.admin_json("/admin/usage").await["stored"], true);
}

#[tokio::test]
async fn forgotten_key_keeps_its_name() {
    let relay = with_keys(stored()).start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    let (id, secret) = new_key(&relay, &json!({"name": "laptop"})).await;
    answered(&relay, &mut worker, chat("m").bearer(&secret), [1, 0, 1]).await;
    wait_for_stored(&relay, 1).await;
    std::fs::remove_file(relay.path("modelrelay-keys.json")).expect("a file with keys");
    let relay = relay.restart_after_kill().await;
    assert_eq!(relay.admin_json("/admin/keys").await["keys"], json!([]));
    assert_eq!(rows(&relay, "?key=laptop").await[0]["key_id"], json!(id));
}

#[tokio::test]
async fn last_sums_are_written_before_exit() {
    let relay = stored().start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    answered(&relay, &mut worker, chat("m"), [5, 0, 1]).await;
    drop(worker);
    let relay = relay.restart().await;
    assert_eq!(rows(&relay, "").await[0]["input_tokens"], 5);
}

#[tokio::test]
async fn damaged_lines_are_reported_and_skipped() {
    let line = |day: &str| {
        json!({"day": day, "key_id": null, "key": null, "model": "m",
            "requests": {"answered": 1, "failed": 0, "cancelled": 0, "refused": 0}, "input_tokens": 5, "cached_tokens": 0,
            "output_tokens": 1, "slot_seconds": 0.5, "wait_seconds": 0.0})
        .to_string()
    };
    // Written an hour ago at most: it has not expired.
    let today = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a time").as_secs() / 86_400;
    let output = Command::new("date").args(["-u", "-d", &format!("@{}", today * 86_400), "+%F"]).output().await;
    let today = String::from_utf8(output.expect("date runs").stdout).expect("text");
    let good = line(today.trim());
    let relay = stored().file(FILE, format!("{good}\nnonsense\n{good}\n{}", &good[..40])).start().await;
    assert_eq!(rows(&relay, "").await[0]["input_tokens"], 10);
    let is_reported = |number: u32, part: &str| {
        let number = format!("line={number}");
        relay.log().lines().iter().any(|line| line.contains(&number) && line.contains(part))
    };
    assert!(is_reported(2, "is damaged") && is_reported(4, "incomplete"), "{}", relay.log().dump());
    assert!(relay.read_file("usage.jsonl.damaged").contains("nonsense"));
    assert_eq!(relay.read_file(FILE).lines().count(), 1);
}

#[tokio::test]
async fn full_disk_fails_no_request_and_loses_no_sum() {
    // The kernel refuses to let files grow beyond a kilobyte at most, until the test lifts the limit.
    let limited = "trap '' XFSZ; ulimit -S -f 1; exec \"$0\" \"$@\"";
    let mut relay = stored().under(["sh", "-c", limited]).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let failures = || async { relay.metric("modelrelay_usage_write_failures_total").await };
    let mut sent = 0;
    while failures().await == 0.0 {
        answered(&relay, &mut worker, chat("m"), [5, 0, 1]).await;
        sent += 1;
        let is_noticed = || async {
            let stored: u64 = relay.read_file(FILE).lines().map(requests_of).sum();
            stored == sent || failures().await > 0.0
        };
        relay.eventually("the file has grown, or cannot", is_noticed).await;
    }
    answered(&relay, &mut worker, chat("m"), [5, 0, 1]).await;
    sent += 1;
    relay.eventually("it is tried again", || async { failures().await > 1.0 }).await;
    assert_eq!(rows(&relay, "").await[0]["input_tokens"], 5 * sent);
    assert_eq!(relay.log().count_of("cannot write to the usage file"), 1, "{}", relay.log().dump());
    let pid = relay.process().pid().expect("it runs").to_string();
    let lifted = Command::new("prlimit").args(["--pid", &pid, "--fsize=unlimited:unlimited"]).status().await;
    assert!(lifted.expect("prlimit runs").success());
    wait_for_stored(&relay, sent).await;
    relay.log().wait_for_line("usage file is writable again").await;
    let relay = relay.restart_after_kill().await;
    assert_eq!(rows(&relay, "").await[0]["input_tokens"], 5 * sent);
}

fn requests_of(line: &str) -> u64 {
    let line: Value = serde_json::from_str(line).unwrap_or_default();
    line["requests"]["answered"].as_u64().unwrap_or_default()
}

#[tokio::test]
async fn unwritable_file_is_refused_at_start() {
    for (name, value) in [("USAGE_FILE", "absent/usage.jsonl"), ("USAGE_FILE", "/dev/null"), ("USAGE_DAYS", "0")] {
        let (status, log) = Relay::builder().env(name, value).start_and_exit().await;
        assert!(!status.success(), "{}", log.dump());
        assert!(log.lines().iter().any(|line| line.contains(name) && line.contains(value)), "{}", log.dump());
    }
}

#[tokio::test]
async fn usage_is_next_to_keys_by_default() {
    let relay = with_keys(Relay::builder()).env("API_KEYS_FILE", "keys.json").start().await;
    assert!(relay.path("modelrelay-usage.jsonl").exists());
    let relay = Relay::builder().env("API_KEYS_FILE", "absent/keys.json").start().await;
    relay.log().wait_for_line("usage is kept in memory only").await;
    let relay = Relay::start().await;
    assert!(!relay.path("modelrelay-usage.jsonl").exists());
}

#[tokio::test]
async fn invalid_filter_names_what_is_expected() {
    let relay = Relay::start().await;
    for (query, field, part) in [
        ("?since=yesterday", json!("since"), "such as 2026-11-01"),
        ("?until=2026-11-31", json!("until"), "such as 2026-11-30"),
        ("?since=2026-11-02&until=2026-11-01", json!("until"), "not be before since"),
        ("?modle=m", Value::Null, "since, until, key and model"),
    ] {
        let reply = relay.admin("GET", &format!("/admin/usage{query}")).await.with_status(400).json();
        assert_eq!((&reply["error"]["param"], &reply["error"]["code"]), (&field, &json!("invalid_query")), "{query}");
        assert!(reply["error"]["message"].as_str().is_some_and(|text| text.contains(part)), "{reply}");
    }
    assert_eq!(relay.get("/admin/usage").await.status, 403);
}

#[tokio::test]
async fn state_has_sums_of_provider_since_start() {
    let relay = Relay::start().await;
    let usage = async || relay.admin_json("/admin/state").await["providers"][0]["usage"].clone();
    let before = usage().await;
    let counts = |usage: &Value| ["requests", "input_tokens", "output_tokens"].map(|name| usage[name].clone());
    assert_eq!(counts(&before), [json!(0), json!(0), json!(0)]);
    assert!(before["since"].as_str().is_some_and(|since| since.len() == "2026-11-28T10:00:00Z".len()), "{before}");
    let mut worker = relay.core1_worker(&["m"], 1).await;
    answered(&relay, &mut worker, chat("m"), [30, 10, 7]).await;
    answered(&relay, &mut worker, chat("m"), [5, 0, 2]).await;
    wait_for_requests(&relay, 2).await;
    assert_eq!(counts(&usage().await), [json!(2), json!(35), json!(9)]);
}
