use serde_json::json;

use super::*;
use crate::manifests::testing;
use crate::relays::state::{LastFailure, RelayReport, Since, SlotReport, WorkerReport};

const NOON: i64 = 1_790_000_000;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn slot(state: SlotState, failures: &[(&str, &str)]) -> SlotReport {
    let failure = |(model, code): &(&str, &str)| SlotFailure {
        model: (*model).to_owned(),
        code: (*code).to_owned(),
        message: "it said no".to_owned(),
    };
    SlotReport {
        id: "gpu0".to_owned(),
        state,
        resident: (state == SlotState::Ready).then(|| "qwen".to_owned()),
        target: None,
        since: Since(at(NOON)),
        failures: failures.iter().map(failure).collect(),
        last_failure: None,
    }
}

fn snapshot(workers: &[(&str, SlotReport)]) -> RelaySnapshot {
    let worker = |(name, slot): &(&str, SlotReport)| {
        let report = WorkerReport {
            name: (*name).to_owned(),
            pool: Some("llama".to_owned()),
            slots: vec![slot.clone()],
            ..WorkerReport::default()
        };
        ((*name).to_owned(), report)
    };
    RelaySnapshot {
        relays: [("r".to_owned(), Ok(RelayReport::default()))].into(),
        workers: workers.iter().map(worker).collect(),
        ..RelaySnapshot::default()
    }
}

fn residency(workers: &[(&str, SlotReport)]) -> Residency {
    Residency::of("llama", Some(&snapshot(workers))).unwrap()
}

fn pool() -> WorkerPool {
    let models = json!([{"id": "qwen", "url": "http://127.0.0.1:1"}]);
    testing::pool(&json!({
        "provider": "local", "multiplexer": {"slots": [{"id": "gpu0", "driver": "static", "models": models}]},
    }))
}

#[test]
fn listed_slots_are_truncated_and_all_are_counted() {
    let many: Vec<_> = (0..40).map(|i| format!("w{i:02}")).collect();
    let workers: Vec<_> = many.iter().rev().map(|name| (name.as_str(), slot(SlotState::Ready, &[]))).collect();
    let summary = Residency::status(Some(&residency(&workers)), &pool(), &WorkerPoolStatus::default());
    assert_eq!((summary.listed.len(), summary.count, summary.quarantined), (LISTED, Some(40), Some(0)));
    let first = &summary.listed[0];
    assert_eq!(
        (first.worker.as_str(), first.resident.as_deref(), first.state),
        ("w00", Some("qwen"), SlotState::Ready)
    );
    assert_eq!(first.since.as_ref().unwrap().0, at(NOON));
}

#[test]
fn unchanged_state_keeps_its_first_start_time() {
    let since = |second: i64, before: &WorkerPoolStatus| {
        let later = SlotReport { since: Since(at(second)), ..slot(SlotState::Ready, &[]) };
        let summary = Residency::status(Some(&residency(&[("w", later)])), &pool(), before);
        WorkerPoolStatus { slots: summary.listed, ..WorkerPoolStatus::default() }
    };
    let of = |status: &WorkerPoolStatus| status.slots[0].since.as_ref().unwrap().0.as_second() - NOON;
    let first = since(NOON, &WorkerPoolStatus::default());
    assert_eq!(of(&since(NOON + 3, &first)), 0, "the same, reckoned a little differently");
    assert_eq!(of(&since(NOON + 30, &first)), 30, "it was loaded once more in between");
}

#[test]
fn slots_are_kept_while_relays_are_silent() {
    let summary = Residency::status(
        Some(&residency(&[("w", slot(SlotState::Ready, &[]))])),
        &pool(),
        &WorkerPoolStatus::default(),
    );
    let before = WorkerPoolStatus { slots: summary.listed, slot_count: Some(1), ..WorkerPoolStatus::default() };
    let mut silent = snapshot(&[]);
    silent.relays.insert("r".to_owned(), Err("no answer".to_owned()));
    assert_eq!(Residency::of("llama", Some(&silent)), None);
    let kept = Residency::status(None, &pool(), &before);
    assert_eq!((kept.listed.len(), kept.count), (1, Some(1)));
    let plain = testing::pool(&json!({"provider": "local"}));
    let none = Residency::status(None, &plain, &before);
    assert_eq!((none.listed.len(), none.count, none.quarantined), (0, None, None));
}

#[test]
fn failed_load_is_reported_once_per_ten_minutes() {
    let failing = residency(&[
        ("w1", slot(SlotState::Ready, &[("bad", "backend_unavailable")])),
        ("w2", slot(SlotState::Backoff, &[("bad", "backend_unavailable")])),
    ]);
    let (mut told, now) = (PublishedEvents::default(), Instant::now());
    let note = "failed to load model bad into slot gpu0 of worker w1 and 1 more: backend_unavailable: it said no";
    assert_eq!(told.new_events(&failing, now, at(NOON)), [("LoadFailed", note.to_owned())]);
    assert_eq!(told.new_events(&failing, now + Duration::from_secs(1), at(NOON + 1)), []);
    // It is retried, and fails again.
    let loading = residency(&[("w1", slot(SlotState::Loading, &[]))]);
    assert_eq!(told.new_events(&loading, now + Duration::from_secs(60), at(NOON + 60)), []);
    assert_eq!(told.new_events(&failing, now + Duration::from_secs(120), at(NOON + 120)), []);
    let other = residency(&[("w1", slot(SlotState::Ready, &[("bad", "insufficient_memory")]))]);
    assert_eq!(told.new_events(&other, now + Duration::from_secs(130), at(NOON + 130)).len(), 1, "for another reason");
    assert_eq!(told.new_events(&failing, now + AGAIN_AFTER, at(NOON + 600)).len(), 1);
}

/// A slot in which a load failed at this time, and which waits for nothing any more.
fn passed(code: &str, message: &str, second: i64) -> SlotReport {
    let failure = SlotFailure { model: "bad".into(), code: code.into(), message: message.into() };
    let last_failure = Some(LastFailure { failure, at: at(second) });
    SlotReport { last_failure, ..slot(SlotState::Ready, &[]) }
}

#[test]
fn failure_after_backoff_is_reported_once_with_age() {
    let failed = residency(&[
        ("w1", passed("backend_unavailable", "no Pod", NOON - 200)),
        ("w2", passed("backend_unavailable", "no Pod", NOON - 30)),
    ]);
    let (mut told, now) = (PublishedEvents::default(), Instant::now());
    // After a restart of the operator, nothing is remembered.
    let note =
        "failed to load model bad into slot gpu0 of worker w1 and 1 more 3 minutes ago: backend_unavailable: no Pod";
    assert_eq!(told.new_events(&failed, now, at(NOON)), [("LoadFailed", note.to_owned())]);
    for second in [1, 300, 599, 600, 900] {
        let later = now + Duration::from_secs(second);
        assert_eq!(told.new_events(&failed, later, at(NOON + second as i64)), [], "after {second} s");
    }
}

#[test]
fn repeated_failure_is_reported_after_ten_minutes() {
    let (mut told, now) = (PublishedEvents::default(), Instant::now());
    let at_noon = residency(&[("w1", passed("backend_unavailable", "no Pod", NOON))]);
    assert_eq!(told.new_events(&at_noon, now, at(NOON)).len(), 1);
    let since = residency(&[("w1", passed("backend_unavailable", "no Pod", NOON + 500))]);
    assert_eq!(told.new_events(&since, now + Duration::from_secs(505), at(NOON + 505)), []);
    assert_eq!(told.new_events(&since, now + AGAIN_AFTER, at(NOON + 600)).len(), 1);
    assert_eq!(told.new_events(&since, now + AGAIN_AFTER, at(NOON + 600)), []);
}

#[test]
fn failure_without_message_ends_without_colon() {
    let wordless = residency(&[("w1", passed("backend_unavailable", "", NOON))]);
    let events = PublishedEvents::default().new_events(&wordless, Instant::now(), at(NOON));
    let note = "failed to load model bad into slot gpu0 of worker w1: backend_unavailable";
    assert_eq!(events, [("LoadFailed", note.to_owned())]);
    let quarantined = SlotReport { state: SlotState::Quarantined, ..passed("slot_quarantined", "", NOON) };
    let events = PublishedEvents::default().new_events(&residency(&[("w1", quarantined)]), Instant::now(), at(NOON));
    assert!(events.iter().any(|(_, note)| note.ends_with("its memory could not be freed")), "{events:?}");
}

#[test]
fn last_failure_appears_in_status_and_fingerprint() {
    let (fine, failed) = (slot(SlotState::Ready, &[]), passed("backend_unavailable", "no Pod", NOON));
    let prints = [fine, failed.clone()].map(|slot| fingerprint("llama", Some(&snapshot(&[("w", slot)]))));
    assert_ne!(prints[0], prints[1]);
    let summary = Residency::status(Some(&residency(&[("w", failed)])), &pool(), &WorkerPoolStatus::default());
    let failure = summary.listed[0].failure.as_ref().unwrap();
    assert_eq!((failure.model.as_str(), failure.message.as_str()), ("bad", "no Pod"));
}

#[test]
fn each_quarantine_is_reported() {
    let quarantined = slot(SlotState::Quarantined, &[]);
    let both = residency(&[("w1", quarantined.clone()), ("w2", quarantined)]);
    let (mut told, now) = (PublishedEvents::default(), Instant::now());
    let events = told.new_events(&both, now, at(NOON));
    assert!(events.iter().all(|(reason, _)| *reason == "SlotQuarantined"), "{events:?}");
    assert!(events[1].1.starts_with("slot gpu0 of worker w2 is quarantined"), "{events:?}");
    assert_eq!((events.len(), told.new_events(&both, now, at(NOON))), (2, vec![]));
}

#[test]
fn state_age_does_not_change_fingerprint() {
    let later = SlotReport { since: Since(at(NOON + 1)), ..slot(SlotState::Ready, &[]) };
    let (one, other) = (snapshot(&[("w", slot(SlotState::Ready, &[]))]), snapshot(&[("w", later)]));
    assert_eq!(one, other);
    assert_eq!(fingerprint("llama", Some(&one)), fingerprint("llama", Some(&other)));
    let swapped = snapshot(&[("w", slot(SlotState::Loading, &[]))]);
    assert_ne!(fingerprint("llama", Some(&one)), fingerprint("llama", Some(&swapped)));
}
