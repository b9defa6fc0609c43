//! Journals as a relay writes them.

use super::*;

/// A line of a conversation with these bytes of body; the backend reported no tokens.
fn line(at_ms: u64, conversation: Option<&str>, body_bytes: u64) -> serde_json::Value {
    serde_json::json!({
        "at_ms": at_ms, "provider": "local", "model": "m", "endpoint": "chat_completions", "stream": true,
        "body_bytes": body_bytes, "conversation": conversation, "worker": "one", "decision": "home", "reason": null,
        "queue_ms": 0, "ttft_ms": 100, "duration_ms": 350, "input_tokens": null, "cached_tokens": null,
        "output_tokens": null, "outcome": "ok",
    })
}

fn with(mut line: serde_json::Value, field: &str, value: impl Into<serde_json::Value>) -> serde_json::Value {
    line[field] = value.into();
    line
}

fn read(lines: &[serde_json::Value], model: Option<&str>) -> Result<Journal, JournalError> {
    let text = lines.iter().map(|line| format!("{line}\n")).collect();
    Journal::read(&[("requests.jsonl".to_owned(), text)], model)
}

fn turns(lines: &[serde_json::Value]) -> Vec<Turn> {
    read(lines, None).unwrap().play(Engine::USUAL).0
}

#[test]
fn prompt_extends_previous_one_of_conversation() {
    let block = 4 * u64::from(BLOCK_TOKENS);
    let turns = turns(&[
        line(5000, Some("a"), 2 * block),
        line(5010, Some("b"), block),
        line(7000, Some("a"), 4 * block + 40),
        line(8000, Some("a"), 3 * block),
        line(9000, Some("a"), 4 * block),
        line(9000, None, block),
    ]);
    let blocks: Vec<_> = turns.iter().map(|turn| &*turn.blocks).collect();
    let expected: [&[Block]; 6] = [&[0, 1], &[2], &[0, 1, 3, 4], &[0, 1, 3], &[0, 1, 3, 5], &[6]];
    assert_eq!(blocks, expected);
    let conversations: Vec<_> = turns.iter().map(|turn| turn.conversation).collect();
    assert_eq!(conversations, [1, 2, 1, 1, 1, 3]);
    assert_eq!((turns[2].at, turns[2].tokens, turns[2].bytes), (Duration::from_secs(2), 2058, 4 * block + 40));
}

#[test]
fn reported_tokens_replace_estimates() {
    let reported = with(with(line(1, None, 4000), "input_tokens", 700), "output_tokens", 30);
    let turns = turns(&[line(0, None, 4000), reported]);
    // 250 ms at 25 ms a token.
    assert_eq!((turns[0].tokens, turns[0].output), (1000, 10));
    assert_eq!((turns[1].tokens, turns[1].output, turns[1].bytes), (700, 30, 4000));
}

#[test]
fn only_servable_prompts_are_replayed() {
    let turns = turns(&[
        with(line(0, None, 4000), "endpoint", "embeddings"),
        with(line(1, None, 4000), "outcome", "client_error"),
        with(with(line(2, None, 4000), "outcome", "queue_full"), "worker", serde_json::Value::Null),
        with(line(3, None, 4000), "outcome", "cancelled"),
    ]);
    assert_eq!(turns.iter().map(|turn| turn.at.as_millis()).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn files_are_merged_by_time() {
    let text = |at, conversation| format!("{}\n", line(at, Some(conversation), 4096));
    let files = [("new".to_owned(), text(2000, "b")), ("old".to_owned(), text(1000, "a") + &text(3000, "a"))];
    let journal = Journal::read(&files, None).unwrap();
    let at: Vec<_> = journal.play(Engine::USUAL).0.iter().map(|turn| (turn.at.as_secs(), turn.conversation)).collect();
    assert_eq!(at, [(0, 1), (1, 2), (2, 1)]);
    assert_eq!(journal.to_string(), "3 requests in 0 minutes, 3 of them in 2 conversations");
}

#[test]
fn invalid_line_is_named() {
    let mut incomplete = line(0, None, 1);
    incomplete.as_object_mut().unwrap().remove("duration_ms");
    for (lines, expected) in [
        (format!("{}\nnonsense\n", line(0, None, 1)), "requests.jsonl, line 2: expected ident (column 2)"),
        (format!("{incomplete}\n"), "requests.jsonl, line 1: missing field `duration_ms`"),
        ("\n".to_owned(), "requests.jsonl, line 1: EOF while parsing a value"),
        (format!("{}\n", with(line(0, None, 1), "at_ms", "now")), "requests.jsonl, line 1: invalid type: string"),
        (format!("{}\n", with(line(0, None, 1), "output_tokens", 1_u64 << 40)), "`output_tokens` is too large"),
        (format!("{}\n", line(0, None, 1 << 40)), "`body_bytes` is too large"),
    ] {
        let error = Journal::read(&[("requests.jsonl".to_owned(), lines)], None).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains("line 1 column"), "{error}");
    }
}

#[test]
fn several_models_require_choice() {
    let lines = [line(0, None, 4000), with(line(1, None, 4000), "model", "n")];
    assert_eq!(read(&lines, None), Err(JournalError::Models(vec!["m".to_owned(), "n".to_owned()])));
    assert_eq!(read(&lines, Some("n")).unwrap().0.len(), 1);
    let error = read(&lines, Some("x")).unwrap_err().to_string();
    assert_eq!(error, "the journal has no request with a prompt for the model x");
    assert_eq!(read(&[], None).unwrap_err().to_string(), "the journal has no request with a prompt");
}

#[test]
fn recorded_figures_describe_journal() {
    let cached = with(with(line(1, Some("a"), 4000), "input_tokens", 1000), "cached_tokens", 600);
    let cancelled = with(with(line(2, Some("a"), 4000), "outcome", "cancelled"), "ttft_ms", serde_json::Value::Null);
    let journal =
        read(&[line(0, Some("a"), 4000), with(cached, "worker", "two"), with(cancelled, "worker", "two")], None);
    let journal = journal.unwrap();
    let Outcome { turns, tokens, cached, waits, moves, .. } = journal.outcome();
    assert_eq!((turns, tokens, cached, moves, journal.workers()), (2, 1000, 600, 1, 2));
    assert_eq!(waits, [100, 100, 350].map(Duration::from_millis));
}
