//! A quick run of the measurement of size and features: every part is present, every byte was compared, and nothing is
//! left behind.

use std::{process::Output, time::Duration};

use modelrelay_harness::process::path_of;
use serde_json::Value;
use tokio::process::Command;

/// Some twenty seconds when nothing else runs.
const AT_MOST: Duration = Duration::from_secs(240);

/// They need a mount namespace and network namespaces, which not every machine has; the report then states so.
const MAY_BE_ABSENT: [&str; 2] = ["Network", "TwoRelays"];

async fn quick_run(json: &std::path::Path) -> Output {
    let programs = path_of("modelrelay-relay");
    let mut run = Command::new(path_of("modelrelay-bench"));
    run.args(["scale", "--quick", "--json"]).arg(json).arg("--programs").arg(programs.parent().expect("a folder"));
    let output = tokio::time::timeout(AT_MOST, run.kill_on_drop(true).output()).await;
    output.expect("a quick run ends").expect("modelrelay-bench is built")
}

fn is_absent(report: &Value, part: &str) -> bool {
    let absent = report["absent"].as_array().expect("a list");
    absent.iter().any(|why| why.as_str().is_some_and(|why| why.starts_with(part)))
}

/// Checks that each figure of an object is present and a number.
fn check_figures(what: &Value, names: &[&str]) {
    for name in names {
        assert!(what[name].as_f64().is_some_and(|value| value.is_finite() && value >= 0.0), "{name}: {what}");
    }
}

#[tokio::test]
async fn quick_run_measures_every_part_and_cleans_up() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let json = folder.path().join("scale.json");
    let output = quick_run(&json).await;
    let printed = format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}");
    let report: Value = serde_json::from_slice(&std::fs::read(&json).expect("the report is written")).expect("JSON");
    assert_eq!(report["faults"].as_array().map(Vec::len), Some(0), "{printed}");
    for absent in report["absent"].as_array().expect("a list") {
        let may_be = MAY_BE_ABSENT.iter().any(|part| absent.as_str().is_some_and(|why| why.starts_with(part)));
        assert!(may_be, "{absent}");
    }
    check_crowds(&report);
    check_comparisons(&report, &printed);
    check_tables(&report, &crate::tables_of(&json));
    check_namespaces();
}

/// Checks that every worker reconnected, every event of every stream arrived, and every client disconnected or received
/// a response.
fn check_crowds(report: &Value) {
    let (workers, queue) = (&report["workers"], &report["queue"]);
    assert_eq!(workers["back"]["count"], workers["count"], "{workers}");
    check_figures(workers, &["kib", "handshake_micros", "scrape_kib", "back_seconds", "return_micros"]);
    let streams = report["streams"].as_array().expect("a list");
    let count = report["extent"]["streams"].as_u64().expect("a number");
    let events = count * report["extent"]["stream_chunks"].as_u64().expect("a number");
    assert_eq!(streams.iter().map(|way| way["events"].as_u64()).collect::<Vec<_>>(), [Some(events); 2], "{streams:?}");
    check_figures(&streams[1], &["relay_kib", "worker_kib", "relay_micros", "worker_micros"]);
    let (left, expired) = (queue["left"].as_u64(), queue["expired"].as_u64());
    assert_eq!(left.zip(expired).map(|(left, expired)| left + expired), queue["count"].as_u64(), "{queue}");
    assert_eq!(queue["late"]["count"], queue["expired"], "{queue}");
}

fn check_comparisons(report: &Value, printed: &str) {
    assert_eq!(report["throughput"].as_array().map(Vec::len), Some(4), "{printed}");
    let features = report["features"].as_array().expect("a list");
    assert_eq!(features.len(), if is_absent(report, "TwoRelays") { 6 } else { 7 }, "{printed}");
    for feature in features {
        check_figures(feature, &["alone_p50_ms", "request_micros", "relay_request_micros", "chunk_micros"]);
    }
    let ways = report["network"].as_array().expect("a list");
    assert_eq!(ways.len(), if is_absent(report, "Network") { 0 } else { 2 }, "{printed}");
    for way in ways {
        check_figures(way, &["alone_p50_ms", "first_p50_ms", "first_p99_ms"]);
        assert!(way["first_events"].as_u64().is_some_and(|events| events >= 32), "{way}");
    }
    let right = report["right"].as_u64().unwrap_or(0);
    // Each of 345 bytes at least.
    assert!(right > 100 && report["bytes"].as_u64().is_some_and(|bytes| bytes > right * 345), "{printed}");
}

/// Checks that every part that each machine can run has a table.
fn check_tables(report: &Value, text: &str) {
    let title = |part: &Value, what: &str| format!("| {} {what} |", part["count"]);
    for begin in [
        title(&report["workers"], "idle workers"),
        title(&report["streams"][1], "streams at once"),
        title(&report["queue"], "waiting requests"),
        "| workers, 4 requests".to_owned(),
        "| **plain**".to_owned(),
        "| relays |".to_owned(),
    ] {
        assert!(text.lines().any(|line| line.starts_with(&begin)), "{begin}: {text}");
    }
}

/// Checks that no namespace of this run is left: other runs may be active, but this one has ended, and so has its
/// process.
fn check_namespaces() {
    let listed = std::process::Command::new("ip").args(["netns", "list"]).output();
    let listed = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    for name in listed.lines().filter_map(|line| line.strip_prefix("modelrelay-bench-")) {
        let pid = name.split('-').next().unwrap_or_default();
        assert!(std::path::Path::new("/proc").join(pid).exists(), "left behind: {listed}");
    }
}
