//! A quick run of the benchmark: every figure is present, also in the tables, and every byte was compared. The size of
//! the figures is not checked.

use std::{process::Output, time::Duration};

use modelrelay_harness::process::path_of;
use serde_json::Value;
use tokio::process::Command;

/// Some twenty seconds when nothing else runs.
const AT_MOST: Duration = Duration::from_secs(240);

/// The figures of every system.
const SHARED: [&str; 13] = [
    "alone_p50",
    "requests",
    "cpu_per_request",
    "first_event_p50",
    "first_event_p99",
    "stalls",
    "cpu_per_paced_chunk",
    "chunks",
    "cpu_per_chunk",
    "cpu_per_long_prompt",
    "cpu_per_huge_prompt",
    "cpu_per_abort",
    "burst_p99_unlogged",
];

/// The additional figures of ModelRelay.
const OURS: [&str; 20] = [
    "relay_cpu_per_paced_chunk",
    "stream_kib",
    "burst_p50",
    "burst_p99",
    "cpu_per_logged_request",
    "idle_worker_kib",
    "idle_worker_cpu",
    "dispatch_few",
    "dispatch_many",
    "queue_short",
    "queue_long",
    "workers1",
    "workers2",
    "workers4",
    "workers8",
    "slow_client_kib",
    "slow_client_peak_kib",
    "slow_client_gaps",
    "cold_start",
    "idle_relay_mb",
];

async fn quick_run(json: &std::path::Path) -> Output {
    let programs = path_of("modelrelay-relay");
    let mut run = Command::new(path_of("modelrelay-bench"));
    run.args(["run", "--quick", "--rounds", "1", "--systems", "direct,modelrelay", "--json"]).arg(json);
    run.arg("--programs").arg(programs.parent().expect("a folder")).kill_on_drop(true);
    let output = tokio::time::timeout(AT_MOST, run.output()).await.expect("a quick run ends");
    output.expect("modelrelay-bench is built")
}

#[tokio::test]
async fn quick_run_reports_every_figure_and_compares_bytes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let json = folder.path().join("speed.json");
    let output = quick_run(&json).await;
    let printed = format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}");
    let report: Value = serde_json::from_slice(&std::fs::read(&json).expect("the report is written")).expect("JSON");
    let turns = report["turns"].as_array().expect("turns");
    assert_eq!(turns.len(), 2, "{printed}");
    for (turn, extra) in turns.iter().zip([&[][..], &OURS[..]]) {
        assert_eq!(turn["faults"].as_array().map(Vec::len), Some(0), "{turn}");
        // Each of 345 bytes at least.
        let (right, bytes) = (turn["right"].as_u64().unwrap_or(0), turn["bytes"].as_u64().unwrap_or(0));
        assert!(right > 100 && bytes > right * 345, "{turn}");
        for figure in SHARED.iter().chain(extra) {
            assert!(turn["figures"][figure].as_f64().is_some_and(f64::is_finite), "{figure} is missing: {turn}");
        }
    }
    check_table(&crate::tables_of(&json));
}

/// Checks that relay and worker have a figure in every cell of their row, and each goal has its own row.
fn check_table(text: &str) {
    let row = text.lines().find(|line| line.starts_with("| **modelrelay**")).unwrap_or_else(|| panic!("{text}"));
    let cells: Vec<_> = row.trim_matches('|').split('|').skip(1).map(str::trim).collect();
    // Besides those of every system: the memory of a stream, and two with a log.
    assert!(cells.len() == SHARED.len() + 3 && cells.iter().all(|cell| cell.parse::<f64>().is_ok()), "{row}");
    for goal in 1..=13 {
        assert!(text.lines().any(|line| line.starts_with(&format!("| P{goal} |"))), "P{goal}: {text}");
    }
}
