//! Placement by cache: conversations go back to the worker that computed their last prompt.

use super::harness::{Provider, runs_at, settings, turn, worker};
use crate::dispatch::{
    AttemptFailure, Conversation, Decision, Event, MoveReason, Placement, RequestKey, Settings, WorkerKey,
};

const LONG: u64 = 1000;

fn provider(placement: Placement) -> Provider {
    Provider::with(Settings { placement, max_queue_bytes: u64::MAX, ..settings() })
}

/// Two workers with four slots each.
fn two_workers(placement: Placement) -> Provider {
    let mut p = provider(placement);
    p.join(1, &["m"], 4);
    p.join(2, &["m"], 4);
    p
}

/// The first byte of the request's response comes.
fn begin(p: &mut Provider, key: u64) {
    let worker = WorkerKey(runs_at(p, key));
    p.handle(Event::Begun { worker, request: RequestKey(key), attempt: 1 });
}

/// The request ends, with this part of its prompt found in the cache.
fn complete(p: &mut Provider, key: u64, cached: u16) {
    let worker = WorkerKey(runs_at(p, key));
    p.handle(Event::Completed { worker, request: RequestKey(key), attempt: 1, cached: Some(cached), usage: None });
}

fn backlog(p: &Provider, worker: u64) -> u64 {
    p.dispatch.worker(WorkerKey(worker)).map_or(0, |worker| worker.backlog)
}

#[test]
fn turns_go_home_in_both_placements() {
    for placement in [Placement::LeastLoad, Placement::Cache] {
        let mut p = two_workers(placement);
        for key in (1..9).step_by(2) {
            assert_eq!(turn(&mut p, key, 7, LONG), 1, "{placement:?}");
            complete(&mut p, key, 1000);
            // The worker that was used least recently is the other one, which gets a request without a conversation.
            p.submit(key + 1, "m");
            assert_eq!(runs_at(&p, key + 1), 2, "{placement:?}");
            p.complete(key + 1);
        }
    }
}

#[test]
fn least_load_leaves_home_that_is_busier() {
    let mut p = two_workers(Placement::LeastLoad);
    assert_eq!([turn(&mut p, 1, 7, LONG), turn(&mut p, 2, 7, LONG)], [1, 2]);
    assert_eq!(turn(&mut p, 3, 7, LONG), 2);
}

#[test]
fn cache_keeps_home_that_is_busier() {
    let mut p = two_workers(Placement::Cache);
    for key in 1..=4 {
        assert_eq!(turn(&mut p, key, 7, LONG), 1);
        begin(&mut p, key);
    }
    assert_eq!(turn(&mut p, 5, 7, LONG), 2, "the home has no room");
}

#[test]
fn conversation_moves_where_backlog_is_smaller() {
    let mut p = two_workers(Placement::Cache);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    complete(&mut p, 1, 0);
    // Another conversation, of which the worker computes more than three times what this one saves there.
    assert_eq!([turn(&mut p, 2, 8, 50), turn(&mut p, 3, 9, 3 * LONG + 51)], [2, 1]);
    assert_eq!(turn(&mut p, 4, 7, LONG), 2);
}

#[test]
fn conversation_stays_where_moving_costs_more() {
    let mut p = two_workers(Placement::Cache);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    complete(&mut p, 1, 0);
    assert_eq!([turn(&mut p, 2, 8, 50), turn(&mut p, 3, 9, 3 * LONG + 50)], [2, 1]);
    assert_eq!(turn(&mut p, 4, 7, LONG), 1);
}

#[test]
fn backlog_ends_with_first_byte_or_request() {
    let mut p = two_workers(Placement::Cache);
    assert_eq!([turn(&mut p, 1, 1, LONG), turn(&mut p, 2, 2, LONG)], [1, 2]);
    assert_eq!([backlog(&p, 1), backlog(&p, 2)], [LONG, LONG]);
    begin(&mut p, 1);
    begin(&mut p, 1);
    p.cancel(2);
    assert_eq!([backlog(&p, 1), backlog(&p, 2)], [0, 0]);
    complete(&mut p, 1, 0);
    assert_eq!(backlog(&p, 1), 0);
}

#[test]
fn least_load_counts_no_backlog() {
    let mut p = two_workers(Placement::LeastLoad);
    turn(&mut p, 1, 1, LONG);
    assert_eq!(backlog(&p, 1), 0);
}

#[test]
fn lost_trust_moves_conversations() {
    let mut p = two_workers(Placement::Cache);
    for key in 1..20 {
        assert_eq!(turn(&mut p, key, 7, LONG), 1);
        complete(&mut p, key, 0);
    }
    let trust = p.dispatch.worker(WorkerKey(1)).map(|worker| worker.trust);
    assert!(trust.is_some_and(|trust| trust < 200), "{trust:?}");
    assert_eq!([turn(&mut p, 20, 8, 50), turn(&mut p, 21, 9, LONG / 2)], [2, 1]);
    assert_eq!(turn(&mut p, 22, 7, LONG), 2);
}

#[test]
fn home_survives_reconnect_of_its_process() {
    let mut p = two_processes();
    p.lose(1, &[]);
    assert_eq!(p.dispatch.homes_len(), 1);
    join_process(&mut p, 3, "a");
    p.submit(2, "m");
    p.complete(2);
    assert_eq!(turn(&mut p, 3, 7, LONG), 3);
}

/// Two worker processes; conversation 7 is at home at the first.
fn two_processes() -> Provider {
    let mut p = provider(Placement::Cache);
    join_process(&mut p, 1, "a");
    join_process(&mut p, 2, "b");
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    complete(&mut p, 1, 0);
    p
}

fn join_process(p: &mut Provider, key: u64, instance: &str) {
    let mut new = worker(key, &["m"], 4, false);
    new.instance = Some(instance.into());
    p.handle(Event::WorkerJoined(new));
}

#[test]
fn home_lost_before_reconnect_stays_lost() {
    for is_joined_before_loss in [false, true] {
        let mut p = two_processes();
        p.models(1, &[]);
        p.models(1, &["m"]);
        if is_joined_before_loss {
            join_process(&mut p, 3, "a");
        }
        p.lose(1, &[]);
        if !is_joined_before_loss {
            join_process(&mut p, 3, "a");
        }
        // Without a home it goes to the worker that was used least recently.
        p.submit(2, "m");
        p.complete(2);
        assert_eq!([turn(&mut p, 3, 8, LONG), turn(&mut p, 4, 7, LONG)], [3, 2], "{is_joined_before_loss}");
    }
}

#[test]
fn older_link_ends_homes_of_its_process() {
    let mut p = two_processes();
    join_process(&mut p, 3, "a");
    p.models(1, &[]);
    p.submit(2, "m");
    p.complete(2);
    assert_eq!([turn(&mut p, 3, 8, LONG), turn(&mut p, 4, 7, LONG)], [3, 2]);
}

#[test]
fn home_ends_with_withdrawn_model() {
    let mut p = two_workers(Placement::Cache);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    complete(&mut p, 1, 0);
    p.models(1, &[]);
    p.models(1, &["m"]);
    assert_eq!(turn(&mut p, 2, 7, LONG), 2);
}

#[test]
fn home_that_fails_the_model_is_gone() {
    let mut p = two_workers(Placement::Cache);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    complete(&mut p, 1, 0);
    p.models_failing(1, &["m"], &["m"]);
    assert_eq!(turn(&mut p, 2, 7, LONG), 2);
    assert_eq!(p.decision, Some(Decision::Moved(MoveReason::Gone)));
}

#[test]
fn home_that_stays_silent_is_gone() {
    let mut p = two_workers(Placement::Cache);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    p.silent(1);
    assert_eq!(runs_at(&p, 1), 2);
    assert_eq!(p.decision, Some(Decision::Moved(MoveReason::Gone)));
}

#[test]
fn home_without_core1_is_left_if_needed() {
    let mut p = provider(Placement::Cache);
    p.join(1, &["m"], 4);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    complete(&mut p, 1, 0);
    p.join_granted(2, &["m"], 4);
    p.submit_with(2, "m", |new| {
        (new.conversation, new.bytes, new.needs_core1) = (Some(Conversation(7)), LONG, true);
    });
    assert_eq!(runs_at(&p, 2), 2);
    assert_eq!(p.decision, Some(Decision::Moved(MoveReason::Gone)));
}

#[test]
fn cached_tokens_after_change_of_placement_prove_nothing() {
    let mut p = two_workers(Placement::Cache);
    for key in [1, 2] {
        assert_eq!(turn(&mut p, key, 7, LONG), 1);
        begin(&mut p, key);
    }
    p.change(|settings| settings.placement = Placement::LeastLoad);
    p.silent(2);
    assert_eq!(runs_at(&p, 2), 2);
    p.handle(Event::Completed {
        worker: WorkerKey(2),
        request: RequestKey(2),
        attempt: 2,
        cached: Some(0),
        usage: None,
    });
    assert_eq!(p.dispatch.worker(WorkerKey(2)).map(|worker| worker.trust), Some(1000));
}

#[test]
fn reported_home_and_backlog_count() {
    let mut p = two_workers(Placement::Cache);
    let homes = vec![(Conversation(7), LONG)];
    p.handle(Event::HomesReported { worker: WorkerKey(2), homes, backlog: LONG });
    assert_eq!(backlog(&p, 2), LONG);
    assert_eq!(turn(&mut p, 1, 8, LONG), 1, "the other worker has a backlog");
    assert_eq!(turn(&mut p, 2, 7, LONG), 2);
}

#[test]
fn request_without_conversation_follows_contract() {
    let mut p = two_workers(Placement::Cache);
    assert_eq!(turn(&mut p, 1, 7, LONG), 1);
    begin(&mut p, 1);
    assert_eq!(turn(&mut p, 2, 7, 10), 1);
    for key in [3, 4] {
        p.submit(key, "m");
        assert_eq!(runs_at(&p, key), 2);
    }
}

/// One worker per conversation 1 and 2, both busy; the slot of worker 1 is taken by request 1.
fn busy(placement: Placement) -> Provider {
    let mut p = provider(placement);
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    assert_eq!([turn(&mut p, 1, 1, LONG), turn(&mut p, 2, 2, LONG)], [1, 2]);
    p
}

#[test]
fn free_slot_takes_waiting_request_at_home() {
    let mut p = busy(Placement::Cache);
    assert_eq!([turn(&mut p, 3, 2, LONG), turn(&mut p, 4, 1, LONG)], [0, 0]);
    complete(&mut p, 1, 0);
    assert_eq!([runs_at(&p, 3), runs_at(&p, 4)], [0, 1]);
}

#[test]
fn least_load_keeps_order_of_arrival() {
    let mut p = busy(Placement::LeastLoad);
    assert_eq!([turn(&mut p, 3, 2, LONG), turn(&mut p, 4, 1, LONG)], [0, 0]);
    complete(&mut p, 1, 0);
    assert_eq!([runs_at(&p, 3), runs_at(&p, 4)], [1, 0]);
}

#[test]
fn request_is_overtaken_eight_times_at_most() {
    let mut p = busy(Placement::Cache);
    assert_eq!(turn(&mut p, 3, 2, LONG), 0);
    for key in 4..30 {
        assert_eq!(turn(&mut p, key, 1, LONG), 0);
    }
    let mut at = 1;
    for next in 4..12 {
        complete(&mut p, at, 1000);
        assert_eq!([runs_at(&p, 3), runs_at(&p, next)], [0, 1]);
        at = next;
    }
    complete(&mut p, at, 1000);
    assert_eq!(runs_at(&p, 3), 1);
}

#[test]
fn requeued_request_overtakes_no_older_one() {
    let mut p = busy(Placement::Cache);
    assert_eq!([turn(&mut p, 3, 2, LONG), turn(&mut p, 4, 1, LONG)], [0, 0]);
    complete(&mut p, 1, 1000);
    assert_eq!([runs_at(&p, 3), runs_at(&p, 4)], [0, 1]);
    p.fail(4, AttemptFailure::SeveredBySwap);
    assert_eq!([runs_at(&p, 3), runs_at(&p, 4)], [1, 0]);
}

#[test]
fn look_ahead_ends_after_sixteen_requests() {
    for (others, taken) in [(15, 1), (16, 0)] {
        let mut p = busy(Placement::Cache);
        for key in 3..3 + others {
            assert_eq!(turn(&mut p, key, 2, LONG), 0);
        }
        assert_eq!(turn(&mut p, 90, 1, LONG), 0);
        complete(&mut p, 1, 0);
        assert_eq!(runs_at(&p, 90), taken, "{others} before it");
    }
}

#[test]
fn look_ahead_stops_at_another_lane() {
    let mut p = busy(Placement::Cache);
    assert_eq!(turn(&mut p, 3, 2, LONG), 0);
    p.submit_pinned(4, "m", 1);
    assert_eq!(turn(&mut p, 5, 1, LONG), 0);
    complete(&mut p, 1, 0);
    assert_eq!(runs_at(&p, 3), 1, "a request at home may not overtake one of another lane");
}

#[test]
fn change_of_placement_applies_to_connected_workers() {
    let mut p = two_workers(Placement::LeastLoad);
    p.change(|settings| settings.placement = Placement::Cache);
    assert_eq!([turn(&mut p, 1, 7, 10), turn(&mut p, 2, 7, 10), turn(&mut p, 3, 8, LONG)], [1, 1, 2]);
    p.change(|settings| settings.placement = Placement::LeastLoad);
    assert_eq!(turn(&mut p, 4, 7, 10), 2);
}

#[test]
fn smaller_limit_applies_to_remembered_homes() {
    let mut p = two_workers(Placement::Cache);
    for key in 1..=4 {
        turn(&mut p, key, key, LONG);
        complete(&mut p, key, 0);
    }
    assert_eq!(p.dispatch.homes_len(), 4);
    p.change(|settings| settings.max_homes = 0);
    assert_eq!(p.dispatch.homes_len(), 0);
}
