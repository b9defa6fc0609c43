//! Near and far workers. The harness lets a near worker have two requests, or 100 bytes of backlog, more than a far
//! one.

use super::harness::{Provider, runs_at, settings, turn, worker};
use crate::dispatch::{
    AttemptFailure, Decision, Distance, Event, MoveReason, Placement, RequestKey, Settings, Spill, WorkerKey,
};

fn join(p: &mut Provider, key: u64, slots: u32, distance: Distance) {
    let mut new = worker(key, &["m"], slots, false);
    new.distance = distance;
    p.handle(Event::WorkerJoined(new));
}

/// Worker 1 is in the zone, 2 in the cluster, 3 elsewhere.
fn three_workers(placement: Placement, slots: u32) -> Provider {
    let mut p = Provider::with(Settings { placement, ..settings() });
    for (key, distance) in (1..).zip(Distance::ALL) {
        join(&mut p, key, slots, distance);
    }
    p
}

/// Submits requests without a conversation, and returns their workers; 0 for one that waits.
fn submit(p: &mut Provider, keys: std::ops::RangeInclusive<u64>) -> Vec<u64> {
    keys.map(|key| {
        p.submit(key, "m");
        runs_at(p, key)
    })
    .collect()
}

#[test]
fn nearest_worker_wins_within_spill() {
    let mut p = three_workers(Placement::LeastLoad, 9);
    // The near one may run two requests more than the least loaded one.
    assert_eq!(submit(&mut p, 1..=9), [1, 1, 1, 2, 2, 2, 3, 1, 2]);
}

#[test]
fn far_worker_serves_when_near_ones_are_full() {
    let mut p = three_workers(Placement::LeastLoad, 1);
    assert_eq!(submit(&mut p, 1..=4), [1, 2, 3, 0]);
    // The slot that is free first gets the request that waits, however far it is.
    assert_eq!(p.complete(3), ["finished r3 at w3 #1", "send r4 to w3 #1"]);
}

#[test]
fn spill_of_any_size_makes_no_request_wait() {
    let spill = Spill { requests: u32::MAX, bytes: u64::MAX };
    let mut p = Provider::with(Settings { spill, ..settings() });
    join(&mut p, 1, 2, Distance::Zone);
    join(&mut p, 2, 2, Distance::Elsewhere);
    assert_eq!(submit(&mut p, 1..=5), [1, 1, 2, 2, 0]);
}

#[test]
fn spill_of_zero_prefers_near_only_among_equals() {
    let spill = Spill { requests: 0, bytes: 0 };
    let mut p = Provider::with(Settings { spill, ..settings() });
    join(&mut p, 1, 9, Distance::Elsewhere);
    join(&mut p, 2, 9, Distance::Zone);
    assert_eq!(submit(&mut p, 1..=4), [2, 1, 2, 1]);
}

#[test]
fn workers_at_one_distance_share_as_before() {
    for distance in Distance::ALL {
        let mut p = Provider::new();
        join(&mut p, 1, 9, distance);
        join(&mut p, 2, 9, distance);
        assert_eq!(submit(&mut p, 1..=4), [1, 2, 1, 2], "{distance:?}");
    }
}

#[test]
fn near_worker_that_failed_request_is_not_tried_again() {
    let mut p = three_workers(Placement::LeastLoad, 9);
    assert_eq!(submit(&mut p, 1..=1), [1]);
    let sent = p.fail(1, AttemptFailure::BackendUnreachable);
    assert!(sent.contains(&"send r1 to w2 #2".to_owned()), "{sent:?}");
}

#[test]
fn near_worker_that_fails_model_is_passed_over() {
    let mut p = three_workers(Placement::LeastLoad, 9);
    p.models_failing(1, &["m"], &["m"]);
    assert_eq!(submit(&mut p, 1..=2), [2, 2]);
    p.lose(2, &[]);
    p.models_failing(3, &["m"], &["m"]);
    assert_eq!(submit(&mut p, 3..=3), [1], "all of them fail it");
}

#[test]
fn lost_near_worker_hands_its_requests_to_others() {
    let mut p = three_workers(Placement::LeastLoad, 9);
    assert_eq!(submit(&mut p, 1..=2), [1, 1]);
    p.lose(1, &[]);
    assert_eq!([runs_at(&p, 1), runs_at(&p, 2)], [2, 2]);
    join(&mut p, 4, 9, Distance::Zone);
    assert_eq!(submit(&mut p, 3..=3), [4]);
}

#[test]
fn least_load_leaves_far_home_for_near_worker() {
    let mut p = three_workers(Placement::LeastLoad, 1);
    assert_eq!(submit(&mut p, 1..=2), [1, 2]);
    assert_eq!(turn(&mut p, 3, 7, 1000), 3);
    (1..=3).for_each(|key| drop(p.complete(key)));
    assert_eq!(turn(&mut p, 4, 7, 1000), 1);
    assert_eq!(p.decision, Some(Decision::Moved(MoveReason::Nearer)));
}

#[test]
fn cached_prompt_outweighs_distance() {
    let mut p = three_workers(Placement::Cache, 1);
    assert_eq!(submit(&mut p, 1..=2), [1, 2]);
    assert_eq!(turn(&mut p, 3, 7, 1000), 3);
    (1..=3).for_each(|key| drop(p.complete(key)));
    assert_eq!(turn(&mut p, 4, 7, 1000), 3);
    assert_eq!(p.decision, Some(Decision::Home));
}

#[test]
fn distance_outweighs_small_cached_prompt() {
    let mut p = three_workers(Placement::Cache, 1);
    assert_eq!(submit(&mut p, 1..=2), [1, 2]);
    // Three times its bytes are less than the spill.
    assert_eq!(turn(&mut p, 3, 7, 30), 3);
    (1..=3).for_each(|key| drop(p.complete(key)));
    assert_eq!(turn(&mut p, 4, 7, 30), 1);
    assert_eq!(p.decision, Some(Decision::Moved(MoveReason::Nearer)));
}

#[test]
fn new_conversation_spills_by_backlog() {
    let mut p = three_workers(Placement::Cache, 9);
    let mut new = |key, bytes| turn(&mut p, key, key, bytes);
    assert_eq!([new(1, 100), new(2, 100), new(3, 100), new(4, 100)], [1, 1, 2, 2]);
    assert_eq!([new(5, 1), new(6, 100), new(7, 100)], [3, 3, 1]);
}

#[test]
fn conversations_spill_by_load_once_prompts_are_computed() {
    let mut p = three_workers(Placement::Cache, 9);
    let mut new = |key: u64| {
        let worker = turn(&mut p, key, key, 1);
        p.handle(Event::Begun { worker: WorkerKey(worker), request: RequestKey(key), attempt: 1 });
        worker
    };
    assert_eq!([1, 2, 3, 4, 5, 6, 7].map(&mut new), [1, 1, 1, 2, 2, 2, 3]);
}

#[test]
fn move_to_nearer_less_loaded_worker_names_load() {
    let mut p = three_workers(Placement::LeastLoad, 9);
    assert_eq!(submit(&mut p, 1..=6), [1, 1, 1, 2, 2, 2]);
    assert_eq!(turn(&mut p, 7, 7, 1000), 3);
    (1..=6).for_each(|key| drop(p.complete(key)));
    assert_eq!(turn(&mut p, 8, 7, 1000), 1);
    assert_eq!(p.decision, Some(Decision::Moved(MoveReason::Load)));
}

#[test]
fn changed_spill_applies_to_next_request() {
    let mut p = three_workers(Placement::LeastLoad, 9);
    assert_eq!(submit(&mut p, 1..=3), [1, 1, 1]);
    p.change(|settings| settings.spill.requests = 3);
    assert_eq!(submit(&mut p, 4..=4), [1]);
    p.change(|settings| settings.spill.requests = 0);
    assert_eq!(submit(&mut p, 5..=6), [2, 3]);
}

#[test]
fn pinned_request_goes_to_its_worker() {
    let mut p = three_workers(Placement::LeastLoad, 9);
    assert_eq!(p.submit_pinned(1, "m", 3), ["send r1 to w3 #1"]);
    assert_eq!(p.dispatch.worker(WorkerKey(3)).map(|worker| worker.load), Some(1));
}
