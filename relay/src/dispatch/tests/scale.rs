//! Sizes at which any full scan would exceed the time of a test.

use super::harness::{Provider, secs, settings};
use super::slots::empty;
use crate::dispatch::{Event, Settings, WorkerKey};

const MANY: u64 = 100_000;

fn unbounded() -> Settings {
    Settings { max_queue_len: usize::MAX, max_queue_bytes: u64::MAX, ..settings() }
}

fn roomy() -> Provider {
    Provider::with(unbounded())
}

#[test]
fn hundred_thousand_wait_are_cancelled_served_and_expired() {
    let mut p = roomy();
    for key in 0..MANY {
        p.submit(key, ["a", "b", "c", "d"][key as usize % 4]);
    }
    // From the middle outwards, neither end first.
    for key in MANY / 4..MANY / 2 {
        p.cancel(key);
    }
    p.join(1, &["a", "b", "c"], 1);
    let mut running = 0;
    for _ in 0..MANY / 4 {
        let lines = p.complete(running);
        running = lines[1][6..].split(' ').next().unwrap().parse().unwrap();
    }
    assert_eq!(p.dispatch.queue_len(), MANY as usize / 2 - 1);
    assert_eq!(p.pass(30.0).len(), MANY as usize / 2 - 1);
}

#[test]
fn ten_thousand_workers_share_fifty_models() {
    let mut p = roomy();
    let names: Vec<_> = (0..50).map(|number| format!("m{number}")).collect();
    for worker in 0..10_000 {
        let models: Vec<_> = (0..5).map(|n| names[(worker + n * 7) % 50].as_str()).collect();
        p.join(worker as u64, &models, 4);
    }
    for key in 0..MANY {
        assert_eq!(p.submit(key, &names[key as usize % 50]).len(), 1);
        if key >= 1_000 {
            assert_eq!(p.complete(key - 1_000).len(), 1);
        }
    }
    assert_eq!(p.dispatch.in_flight(), 1_000);
}

#[test]
fn workers_change_links_while_hundred_thousand_wait() {
    let mut p = roomy();
    for key in 0..MANY {
        p.submit(key, "a");
    }
    p.join_core1(1, &["b"]);
    p.submit_pinned(MANY, "b", 1);
    for newer in 2..20_000 {
        p.join_core1(newer, &["b"]);
        p.handle(Event::WorkerSucceeded { older: WorkerKey(newer - 1), newer: WorkerKey(newer) });
        p.lose(newer - 1, &[]);
    }
    assert_eq!(p.grant(19_999, 1, 0, 1), ["send r100000 to w19999 #1"], "its pin moved along");
}

#[test]
fn two_thousand_multiplexers_load_and_serve_fifty_models() {
    let mut p = roomy();
    let names: Vec<_> = (0..50).map(|number| format!("m{number}")).collect();
    let models: Vec<_> = names.iter().map(String::as_str).collect();
    for worker in 0..2_000 {
        p.join_slots(worker, &models[..worker as usize % 50 + 1], vec![empty(&models)]);
    }
    for key in 0..MANY {
        p.submit(key, models[key as usize % 50]);
    }
    let assigned = p.dispatch.models(p.instant()).into_iter().filter_map(|model| model.assigned).collect::<Vec<_>>();
    assert_eq!(assigned.len(), 50, "one for each model");
    for worker in assigned {
        p.gates(worker.0, &models.iter().map(|model| (*model, 40)).collect::<Vec<_>>());
    }
    assert!(p.dispatch.in_flight() >= 50 * 40, "each model was sent");
    for key in MANY..MANY + MANY / 4 {
        p.submit(key, models[key as usize % 50]);
    }
}

#[test]
fn worker_gets_its_oldest_request_in_long_queue() {
    let mut p = roomy();
    let names: Vec<_> = (0..2_000).map(|number| format!("m{number}")).collect();
    for key in 0..MANY {
        p.submit(key, &names[key as usize % 2_000]);
    }
    // One worker with few of many models, the last ones; and one lane pinned to each of many other workers.
    for worker in 1..=1_000 {
        p.join_core1(worker, &["pinned"]);
        p.submit_pinned(MANY + worker, "pinned", worker);
    }
    let few = [names[1_998].as_str(), names[1_999].as_str()];
    assert_eq!(p.join(2_000, &few, 1), ["send r1998 to w2000 #1"]);
    let (mut running, mut expected) = (1_998, 1_999);
    for _ in 0..95 {
        let lines = p.complete(running);
        assert_eq!(lines[1], format!("send r{expected} to w2000 #1"));
        (running, expected) = (expected, if expected % 2_000 == 1_999 { expected + 1_999 } else { expected + 1 });
    }
    assert_eq!(p.grant(7, 1, 0, 1), [format!("send r{} to w7 #1", MANY + 7)]);
    for worker in 8..=1_000 {
        assert_eq!(p.lose(worker, &[]), [format!("fail r{}: AffinityLost", MANY + worker)]);
    }
}

#[test]
fn earlier_deadlines_expire_behind_hundred_thousand() {
    let mut p = roomy();
    for key in 0..MANY {
        p.submit(key, "a");
    }
    // Earlier deadlines than those of all requests before.
    p.handle(Event::SettingsChanged(Settings { queue_timeout: secs(10.0), ..unbounded() }));
    for key in MANY..2 * MANY {
        p.submit(key, "a");
    }
    assert_eq!(p.pass(10.0).len(), MANY as usize);
    assert_eq!(p.join(1, &["a"], 1), ["send r0 to w1 #1"]);
    assert_eq!(p.lose(1, &[]), ["requeued r0 #1: WorkerLost"], "it comes back before all others");
    assert_eq!(p.join(2, &["a"], 1), ["send r0 to w2 #2"]);
    assert_eq!(p.pass(20.0).len(), MANY as usize - 1);
}
