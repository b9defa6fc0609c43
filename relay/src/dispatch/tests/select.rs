//! The selection of the worker for a request.

use super::harness::Provider;

#[test]
fn least_loaded_worker_wins() {
    let mut p = Provider::new();
    p.join(1, &["m"], 4);
    p.join(2, &["m"], 4);
    p.load(1, 2);
    assert_eq!(p.submit(1, "m"), ["send r1 to w2 #1"]);
    assert_eq!(p.submit(2, "m"), ["send r2 to w2 #1"]);
}

#[test]
fn equally_loaded_workers_alternate() {
    let mut p = Provider::new();
    for worker in 1..=3 {
        p.join(worker, &["m"], 9);
    }
    let mut sent = Vec::new();
    for key in 1..=6 {
        sent.extend(p.submit(key, "m"));
    }
    assert_eq!(
        sent,
        [
            "send r1 to w1 #1",
            "send r2 to w2 #1",
            "send r3 to w3 #1",
            "send r4 to w1 #1",
            "send r5 to w2 #1",
            "send r6 to w3 #1"
        ]
    );
}

#[test]
fn idle_workers_alternate() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    for (key, worker) in [(1, 1), (2, 2), (3, 1), (4, 2)] {
        assert_eq!(p.submit(key, "m"), [format!("send r{key} to w{worker} #1")]);
        p.complete(key);
    }
}

#[test]
fn only_workers_with_model_are_selected() {
    let mut p = Provider::new();
    p.join(1, &["a"], 4);
    p.join(2, &["b"], 4);
    p.load(2, 3);
    assert_eq!(p.submit(1, "b"), ["send r1 to w2 #1"]);
    assert!(p.submit(2, "B").is_empty(), "names are exact");
}

#[test]
fn load_of_one_model_applies_to_all_models() {
    let mut p = Provider::new();
    p.join(1, &["a", "b"], 4);
    p.join(2, &["b"], 4);
    p.submit(1, "a");
    assert_eq!(p.submit(2, "b"), ["send r2 to w2 #1"]);
}

#[test]
fn old_and_new_workers_are_compared_by_load() {
    let mut p = Provider::new();
    p.join(1, &["m"], 4);
    p.join_granted(2, &["m"], 4);
    p.load(1, 1);
    assert_eq!(p.submit(1, "m"), ["send r1 to w2 #1"]);
    assert_eq!(p.submit(2, "m"), ["send r2 to w1 #1"]);
    p.grant(2, 4, 3, 1);
    assert_eq!(p.submit(3, "m"), ["send r3 to w1 #1"]);
}

#[test]
fn gained_model_is_served_at_once() {
    let mut p = Provider::new();
    p.join(1, &["a"], 1);
    p.submit(1, "b");
    assert_eq!(p.models(1, &["a", "b"]), ["send r1 to w1 #1"]);
}

#[test]
fn withdrawn_model_is_not_sent_to_worker() {
    let mut p = Provider::new();
    p.join(1, &["a", "b"], 2);
    p.submit(1, "a");
    p.models(1, &["b"]);
    assert!(p.submit(2, "a").is_empty());
    assert_eq!(p.submit(3, "b"), ["send r3 to w1 #1"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1"]);
}

#[test]
fn model_listed_twice_is_one_model() {
    let mut p = Provider::new();
    p.join(1, &["m", "m"], 1);
    p.models(1, &["m", "m", "n"]);
    p.lose(1, &[]);
    assert!(p.dispatch.models(p.instant()).is_empty());
}
