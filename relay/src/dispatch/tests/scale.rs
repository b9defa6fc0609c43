//! Sizes at which anything that looks at everything would not come to an end in the time of a test.

use super::harness::{Provider, settings};
use super::slots::empty;
use crate::dispatch::{Event, Settings, WorkerKey};

const MANY: u64 = 100_000;

fn roomy() -> Provider {
    Provider::with(Settings { max_queue_len: usize::MAX, max_queue_bytes: u64::MAX, ..settings() })
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
fn workers_move_to_new_links_while_hundred_thousand_wait() {
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
fn five_thousand_multiplexers_are_asked_for_fifty_models_and_serve_them() {
    let mut p = roomy();
    let names: Vec<_> = (0..50).map(|number| format!("m{number}")).collect();
    let models: Vec<_> = names.iter().map(String::as_str).collect();
    for worker in 0..5_000 {
        p.join_slots(worker, &models[..worker as usize % 50 + 1], vec![empty(&models)]);
    }
    for key in 0..MANY {
        p.submit(key, models[key as usize % 50]);
    }
    let asked = p.dispatch.models(p.instant()).into_iter().filter_map(|model| model.asked).collect::<Vec<_>>();
    assert_eq!(asked.len(), 50, "one for each model");
    for worker in asked {
        p.gates(worker.0, &models.iter().map(|model| (*model, 40)).collect::<Vec<_>>());
    }
    assert!(p.dispatch.in_flight() >= 50 * 40, "each model was sent");
    for key in MANY..MANY + MANY / 4 {
        p.submit(key, models[key as usize % 50]);
    }
}
