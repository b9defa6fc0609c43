//! The ledger with a real file.

use std::path::Path;

use super::*;

fn settings(path: &Path) -> UsageSettings {
    UsageSettings { file: Some(path.to_path_buf()), is_default_file: false, days: 3 }
}

fn open(path: &Path) -> UsageLedger {
    UsageLedger::open(&settings(path), &Arc::new(Metrics::new())).unwrap()
}

fn key() -> RowKey {
    RowKey { key_id: Some("k1".into()), model: "m".into() }
}

fn tokens(input_tokens: u64) -> UsageSums {
    UsageSums { input_tokens, ..UsageSums::default() }
}

/// Returns the day of each row with its tokens.
fn rows(ledger: &UsageLedger) -> Vec<(Day, u64)> {
    ledger.table().rows(&UsageFilter::default()).map(|row| (row.day, row.sums.input_tokens)).collect()
}

#[test]
fn sums_survive_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("usage.jsonl");
    let now = SystemTime::now();
    for expected in [3, 6] {
        let ledger = open(&path);
        for input in [1, 2] {
            ledger.record(key(), Some("laptop"), &tokens(input), now);
        }
        assert_eq!(rows(&ledger), [(Day::of(now), expected)]);
        ledger.close();
    }
    let ledger = open(&path);
    assert!(ledger.is_stored() && ledger.since() <= now);
    assert_eq!(ledger.table().rows(&UsageFilter::default()).next().unwrap().key.as_deref(), Some("laptop"));
}

#[test]
fn ledger_without_file_counts_from_start() {
    let before = SystemTime::now();
    let ledger = UsageLedger::in_memory(400);
    ledger.record(key(), None, &tokens(1), SystemTime::now());
    assert!(!ledger.is_stored() && ledger.since() >= before);
    assert_eq!(rows(&ledger).len(), 1);
    ledger.close();
}

#[test]
fn new_day_deletes_expired_days() {
    let ledger = UsageLedger::in_memory(3);
    let start = Day::parse("2026-11-25").unwrap().start();
    let days = [0, 1, 2, 3].map(|days| start + Duration::from_secs(86_400) * days);
    for now in days {
        ledger.record(key(), None, &tokens(1), now);
    }
    assert_eq!(rows(&ledger), [days[1], days[2], days[3]].map(|day| (Day::of(day), 1)));
}

#[test]
fn unusable_file_is_error_only_if_it_was_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent").join("usage.jsonl");
    let metrics = Arc::new(Metrics::new());
    let error = UsageLedger::open(&settings(&path), &metrics).unwrap_err().to_string();
    assert!(error.contains("USAGE_FILE (--usage-file)") && error.contains("absent"), "{error}");
    let by_default = UsageSettings { is_default_file: true, ..settings(&path) };
    assert!(!UsageLedger::open(&by_default, &metrics).unwrap().is_stored());
}
