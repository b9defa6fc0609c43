//! The journal in a real file.

use std::fs;

use super::*;

fn line(model: &str) -> RequestLine<'_> {
    RequestLine {
        at_ms: 1_800_000_000_000,
        provider: "local",
        model,
        endpoint: "chat_completions",
        stream: true,
        body_bytes: 4096,
        conversation: Some("00112233445566778899aabbccddeeff"),
        worker: Some("box"),
        decision: Some("moved"),
        reason: Some("busy"),
        queue_ms: 5,
        ttft_ms: Some(70),
        duration_ms: 900,
        input_tokens: Some(1000),
        cached_tokens: Some(512),
        output_tokens: None,
        outcome: "ok",
    }
}

fn open(path: &Path, max_bytes: u64) -> (RequestJournal, Arc<Metrics>) {
    let (metrics, settings) = (Arc::new(Metrics::new()), RequestJournalFile { path: path.to_path_buf(), max_bytes });
    (RequestJournal::open(Some(&settings), &metrics).unwrap(), metrics)
}

#[test]
fn recorded_request_is_one_json_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("requests.jsonl");
    let (journal, metrics) = open(&path, 1 << 20);
    journal.record(&line("first\nmodel"));
    journal.record(&line("second"));
    journal.close();
    journal.record(&line("too late"));
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert_eq!((&lines[0]["model"], &lines[1]["model"]), (&"first\nmodel".into(), &"second".into()));
    let fields: Vec<_> = lines[0].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(fields.len(), 17, "{fields:?}");
    assert_eq!((&lines[0]["cached_tokens"], &lines[0]["output_tokens"]), (&512.into(), &serde_json::Value::Null));
    assert_eq!(metrics.journal_lines_lost_so_far(), 1);
}

#[test]
fn two_files_hold_newest_lines_within_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("requests.jsonl");
    let (journal, metrics) = open(&path, 64 << 10);
    let models: Vec<String> = (0..1000).map(|number| format!("model-{number}")).collect();
    for model in &models {
        journal.record(&line(model));
    }
    journal.close();
    assert_eq!(metrics.journal_lines_lost_so_far(), 0);
    let previous = fs::read_to_string(folder.path().join("requests.jsonl.1")).unwrap();
    let text = previous + &fs::read_to_string(&path).unwrap();
    for entry in fs::read_dir(folder.path()).unwrap() {
        assert!(entry.unwrap().metadata().unwrap().len() <= 64 << 10);
    }
    let model =
        |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["model"].as_str().unwrap().to_owned();
    let kept: Vec<_> = text.lines().map(model).collect();
    assert!((100..1000).contains(&kept.len()), "{}", kept.len());
    assert_eq!(kept, models[models.len() - kept.len()..]);
}

#[test]
fn full_buffer_loses_and_counts_lines() {
    let metrics = Arc::new(Metrics::new());
    // No thread reads this buffer, as if the disk hung.
    let thread = WriterThread::start("idle", || {}).unwrap();
    let recorder = Recorder { lines: Arc::default(), thread, metrics: Arc::clone(&metrics), reports: Mutex::default() };
    recorder.lines.change(|lines| push(lines, &vec![b'\n'; MAX_WAITING_BYTES - 1000]));
    for _ in 0..10 {
        recorder.record(&line("m"));
    }
    let bytes = serde_json::to_vec(&line("m")).unwrap().len() as u64 + 1;
    assert_eq!(metrics.journal_lines_lost_so_far(), 10 - 1000 / bytes);
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_loses_and_counts_lines() {
    let (journal, metrics) = open(Path::new("/dev/full"), 1 << 20);
    for _ in 0..100 {
        journal.record(&line("m"));
    }
    journal.close();
    assert_eq!(metrics.journal_lines_lost_so_far(), 100);
}

#[test]
fn pieces_are_complete_lines() {
    let long = "x".repeat(PIECE_BYTES + 7) + "\n";
    let short = "y".repeat(PIECE_BYTES / 2 - 1) + "\n";
    let lines = format!("{short}{short}{short}{long}{short}");
    let pieces: Vec<_> = pieces(lines.as_bytes()).map(<[u8]>::len).collect();
    assert_eq!(pieces, [PIECE_BYTES, PIECE_BYTES / 2, PIECE_BYTES + 8, PIECE_BYTES / 2]);
}
