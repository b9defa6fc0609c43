//! The request journal: metadata of finished requests in a file, and the replay that reads it.

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use modelrelay_harness::client::Request;
use modelrelay_harness::process::path_of;
use modelrelay_harness::relay::{Relay, RelayBuilder};
use modelrelay_harness::secrecy::PROMPT;
use modelrelay_harness::worker::{FakeWorker, Job};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::chat;

const FILE: &str = "requests.jsonl";

fn journaled() -> RelayBuilder {
    Relay::builder().env("REQUEST_JOURNAL_FILE", FILE)
}

/// Returns a turn of a conversation whose prompt is long enough to be recognized.
fn turn(session: &str, turns: usize, stream: bool) -> Request {
    let mut messages = vec![json!({"role": "user", "content": format!("{PROMPT} ").repeat(100)})];
    for number in 1..turns {
        messages.push(json!({"role": "assistant", "content": format!("answer {number}")}));
        messages.push(json!({"role": "user", "content": format!("question {number}")}));
    }
    let body = json!({"model": "m", "stream": stream, "messages": messages, "prompt_cache_key": session});
    Request::post("/v1/chat/completions", &body)
}

/// Ends a response with these tokens.
async fn finish(worker: &mut FakeWorker, job: &Job, tokens: [u64; 3]) {
    let [prompt, cached, completion] = tokens;
    let counts = json!({"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion,
        "total_tokens": prompt + completion});
    worker.send(&json!({"type": "response_complete", "request_id": job.id, "token_counts": counts})).await;
}

/// Returns the lines once there are this many of them.
async fn lines(relay: &Relay, count: usize) -> Vec<Value> {
    let text = || std::fs::read_to_string(relay.path(FILE)).unwrap_or_default();
    relay.eventually(&format!("{count} lines"), || async { text().lines().count() >= count }).await;
    let lines: Vec<Value> = text()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}")))
        .collect();
    assert_eq!(lines.len(), count, "{lines:#?}");
    lines
}

fn fields<const N: usize>(line: &Value, names: [&str; N]) -> [Value; N] {
    names.map(|name| line[name].clone())
}

#[tokio::test]
async fn journal_has_one_line_per_finished_request() {
    let relay = journaled().start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;

    let whole = relay.begin(turn("s-1", 1, false));
    let job = worker.expect_request().await;
    let first_bytes = job.body.len();
    worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
    worker.pieces(&job, b"{\"secret-answer\": 1}").await;
    finish(&mut worker, &job, [900, 0, 3]).await;
    let _ = whole.reply().await.with_status(200);
    lines(&relay, 1).await;

    let streamed = relay.begin(turn("s-1", 2, true));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: secret-answer\n\n").await;
    finish(&mut worker, &job, [950, 896, 7]).await;
    let _ = streamed.reply().await.with_status(200);
    lines(&relay, 2).await;

    let cancelled = relay.begin(turn("s-2", 1, true));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let mut response = cancelled.response().await;
    response.read_until("data: 1").await;
    drop(response);
    worker.expect_cancel(&job.id).await;

    let recorded = lines(&relay, 3).await;
    let [whole, streamed, cancelled] = &recorded[..] else { panic!("{recorded:#?}") };
    for line in &recorded {
        let expected =
            [json!("local"), json!("m"), json!("chat_completions"), json!("hand-played"), json!("least_load")];
        assert_eq!(fields(line, ["provider", "model", "endpoint", "worker", "decision"]), expected);
        let [at, duration] = fields(line, ["at_ms", "duration_ms"]).map(|time| time.as_u64().expect("a number"));
        assert!(at > 1_700_000_000_000 && duration < 60_000, "{line}");
        assert!(line["ttft_ms"].as_u64().is_some_and(|first| first <= duration), "{line}");
        assert_eq!(line.as_object().map(serde_json::Map::len), Some(17), "{line}");
    }
    assert_eq!(whole["body_bytes"], first_bytes);
    let figures = ["stream", "input_tokens", "cached_tokens", "output_tokens", "outcome"];
    assert_eq!(fields(whole, figures), [json!(false), json!(900), json!(0), json!(3), json!("ok")]);
    assert_eq!(fields(streamed, figures), [json!(true), json!(950), json!(896), json!(7), json!("ok")]);
    assert_eq!(fields(cancelled, figures), [json!(true), Value::Null, Value::Null, Value::Null, json!("cancelled")]);
    let names = [whole, streamed, cancelled].map(|line| line["conversation"].as_str().expect("a pseudonym").to_owned());
    assert!(names[0] == names[1] && names[0] != names[2] && names[0].len() == 32, "{names:?}");

    let text = relay.read_file(FILE);
    for hidden in [PROMPT, "secret-answer", "s-1", "127.0.0.1"] {
        assert!(!text.contains(hidden), "{hidden} is in the journal: {text}");
    }
    let mode = std::fs::metadata(relay.path(FILE)).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn rejected_request_has_line_without_worker() {
    let relay = journaled().env("MAX_QUEUE_LEN", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let _ = relay.fetch(chat("m")).await.with_status(429);
    let line = lines(&relay, 1).await.remove(0);
    let names = ["worker", "decision", "conversation", "ttft_ms", "outcome"];
    let [worker_name, decision, conversation, _, outcome] = fields(&line, names);
    assert_eq!(
        [worker_name, decision, conversation, outcome],
        [Value::Null, Value::Null, Value::Null, json!("queue_full")]
    );
    worker.answer(&job, &json!({})).await;
    let _ = running.reply().await.with_status(200);
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = waiting.reply().await.with_status(200);
    lines(&relay, 3).await;
}

#[tokio::test]
async fn last_lines_are_written_before_exit() {
    let relay = journaled().start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    drop(worker);
    let relay = relay.restart().await;
    assert_eq!(lines(&relay, 1).await[0]["outcome"], "ok");
}

#[tokio::test]
async fn full_disk_fails_no_request_and_is_counted() {
    let relay = Relay::builder().env("REQUEST_JOURNAL_FILE", "/dev/full").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    for count in [1.0, 2.0] {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
        let lost = || async { relay.metric("modelrelay_request_journal_lines_lost_total").await >= count };
        relay.eventually("the line is counted as lost", lost).await;
    }
    relay.log().wait_for_line("cannot write to the request journal").await;
    assert_eq!(relay.log().count_of("cannot write to the request journal"), 1, "{}", relay.log().dump());
}

#[tokio::test]
async fn unwritable_journal_is_refused_at_start() {
    for (name, value, expected) in [
        ("REQUEST_JOURNAL_FILE", "absent/requests.jsonl", "REQUEST_JOURNAL_FILE (--request-journal-file)"),
        ("REQUEST_JOURNAL_BYTES", "1Ki", "REQUEST_JOURNAL_BYTES (--request-journal-bytes)"),
    ] {
        let (status, log) = Relay::builder().env(name, value).start_and_exit().await;
        assert!(!status.success(), "{}", log.dump());
        assert!(log.lines().iter().any(|line| line.contains(expected) && line.contains(value)), "{}", log.dump());
    }
}

/// Replays the relay's journal. Returns the rows.
async fn replay(relay: &Relay, arguments: &[&str]) -> Vec<Value> {
    let mut program = Command::new(path_of("replay-placement"));
    program.arg("--journal").arg(relay.path(FILE)).args(["--json", "--seeds", "1"]).args(arguments);
    let output = program.stdin(Stdio::null()).kill_on_drop(true).output().await.expect("replay-placement is built");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("rows as JSON")
}

#[tokio::test]
async fn journal_can_be_replayed_with_other_settings() {
    let relay = journaled().start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    for turns in 1..=4 {
        let pending = relay.begin(turn("s", turns, false));
        let job = worker.expect_request().await;
        worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
        worker.pieces(&job, b"{}").await;
        let tokens = 2048 * turns as u64;
        finish(&mut worker, &job, [tokens, tokens / 2, 5]).await;
        let _ = pending.reply().await.with_status(200);
    }
    lines(&relay, 4).await;
    let rows = replay(&relay, &["--workers", "2", "--cache", "100000"]).await;
    let policies: Vec<_> = rows.iter().map(|row| row["policy"].as_str().expect("a name")).collect();
    assert_eq!(policies, ["recorded", "least-load", "cache", "cache-2", "oracle"]);
    assert!(rows.iter().all(|row| row["turns"] == 4.0), "{rows:#?}");
    let hit_rate = |row: &Value| row["hit_rate"].as_f64().expect("a number");
    // The last three turns have the previous prompt in the cache: 12,288 of 20,480 tokens.
    let (recorded, cache) = (hit_rate(&rows[0]), hit_rate(&rows[2]));
    assert!((recorded - 0.5).abs() < 0.001 && (cache - 0.6).abs() < 0.001, "{rows:#?}");
    let small = replay(&relay, &["--policy", "cache", "--cache", "512"]).await;
    assert!(hit_rate(&small[1]) < 0.1, "{small:#?}");
}
