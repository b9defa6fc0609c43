//! Fair shares between API keys.

use super::harness::{Provider, secs, settings};
use crate::dispatch::{
    AttemptFailure, CancelReason, Class, Event, Fairness, Owner, QueueShare, RequestKey, Settings, TokenUsage, Weight,
    WorkerKey,
};
use Class::{Batch, Interactive, Normal};

const NOTHING: [&str; 0] = [];

fn submit(p: &mut Provider, request: u64, key: &str, class: Class) -> Vec<String> {
    submit_weighing(p, request, key, (100, class))
}

fn submit_weighing(p: &mut Provider, request: u64, key: &str, (hundredths, class): (u16, Class)) -> Vec<String> {
    let weight = Weight::from_hundredths(hundredths).unwrap();
    p.submit_with(request, "m", |new| new.owner = Some(Owner { key: Some(key.into()), weight, class }))
}

fn submit_pinned(p: &mut Provider, request: u64, key: &str, class: Class) {
    let owner = Owner { key: Some(key.into()), weight: Weight::default(), class };
    p.submit_with(request, "m", |new| (new.owner, new.pin) = (Some(owner), Some(WorkerKey(1))));
}

/// A provider with one slot, which request 0 of the key `z` uses.
fn busy() -> Provider {
    busy_with(settings())
}

fn busy_with(settings: Settings) -> Provider {
    busy_in(Normal, settings)
}

/// The same with a request 0 of this class, which is in use then.
fn busy_in(class: Class, settings: Settings) -> Provider {
    let mut p = Provider::with(settings);
    p.join(1, &["m"], 1);
    submit(&mut p, 0, "z", class);
    p
}

/// The running request and its successors end one after the other. Returns their order.
fn order(p: &mut Provider, mut running: u64, count: usize) -> Vec<u64> {
    let mut order = Vec::new();
    for _ in 0..count {
        let lines = p.complete(running);
        running = lines[1].split([' ', 'r']).find_map(|word| word.parse().ok()).unwrap();
        order.push(running);
    }
    order
}

fn use_tokens(p: &mut Provider, request: u64, input: u64, output: u64) {
    let (request, usage) = (RequestKey(request), TokenUsage { input, output });
    assert_eq!(p.handle(Event::Used { request, usage }), NOTHING);
}

/// The running request ends with this usage. Returns the next one.
fn complete_with(p: &mut Provider, request: u64, usage: TokenUsage) -> u64 {
    let (worker, request, usage) = (WorkerKey(1), RequestKey(request), Some(usage));
    let lines = p.handle(Event::Completed { worker, request, attempt: 1, cached: None, usage });
    lines[1].split([' ', 'r']).find_map(|word| word.parse().ok()).unwrap()
}

#[test]
fn keys_alternate_whoever_came_first() {
    let mut p = busy();
    (1..=4).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    (5..=6).for_each(|request| _ = submit(&mut p, request, "b", Normal));
    assert_eq!(order(&mut p, 0, 6), [1, 5, 2, 6, 3, 4]);
}

#[test]
fn fifo_ignores_owners() {
    let mut p = busy_with(Settings { fairness: Fairness::Fifo, max_queue_len: 4, ..settings() });
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    submit(&mut p, 4, "b", Interactive);
    assert_eq!(submit(&mut p, 5, "b", Interactive), ["fail r5: QueueFull { retry_after_secs: 30 }"]);
    assert_eq!(order(&mut p, 0, 4), [1, 2, 3, 4]);
}

#[test]
fn requests_without_owner_share_one_key() {
    let mut p = busy();
    (1..=3).for_each(|request| _ = p.submit(request, "m"));
    submit(&mut p, 4, "a", Normal);
    assert_eq!(order(&mut p, 0, 4), [1, 4, 2, 3]);
}

#[test]
fn class_without_key_keeps_its_flow() {
    let mut p = busy();
    let batch = Owner { key: None, weight: Weight::default(), class: Batch };
    p.submit_with(1, "m", |new| new.owner = Some(batch));
    (2..=3).for_each(|request| _ = p.submit(request, "m"));
    submit(&mut p, 4, "a", Normal);
    assert_eq!(p.dispatch.keys_known(), 2, "only the keys `z` and `a`");
    assert_eq!(order(&mut p, 0, 4), [2, 4, 3, 1]);
}

#[test]
fn higher_class_goes_first() {
    let mut p = busy();
    submit(&mut p, 1, "a", Batch);
    p.submit(2, "m");
    submit(&mut p, 3, "c", Interactive);
    assert_eq!(order(&mut p, 0, 3), [3, 2, 1]);
}

#[test]
fn heavier_key_is_served_more_often() {
    let mut p = busy();
    (1..=6).for_each(|request| _ = submit_weighing(&mut p, request, "a", (100, Normal)));
    (7..=12).for_each(|request| _ = submit_weighing(&mut p, request, "b", (200, Normal)));
    assert_eq!(order(&mut p, 0, 9), [1, 7, 8, 2, 9, 10, 3, 11, 12]);
}

#[test]
fn usage_replaces_estimate() {
    let mut p = busy();
    (1..=4).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    (5..=8).for_each(|request| _ = submit(&mut p, request, "b", Normal));
    assert_eq!(order(&mut p, 0, 1), [1]);
    // Worth four requests of 25 tokens.
    let next = complete_with(&mut p, 1, TokenUsage { input: 40, output: 30 });
    assert_eq!((next, order(&mut p, next, 5)), (5, vec![6, 7, 8, 2, 3]));
}

#[test]
fn estimated_usage_is_charged_like_reported_one() {
    let mut p = busy();
    (1..=20).for_each(|request| _ = submit(&mut p, request, if request % 2 == 0 { "a" } else { "b" }, Normal));
    let mut running = order(&mut p, 0, 1)[0];
    let mut counts = [0; 2];
    for _ in 0..10 {
        let reports = running.is_multiple_of(2);
        counts[usize::from(reports)] += 1;
        let usage = if reports { TokenUsage { input: 25, output: 50 } } else { TokenUsage::estimated(100, 50) };
        running = complete_with(&mut p, running, usage);
    }
    assert_eq!(counts, [5, 5]);
}

#[test]
fn usage_of_cancelled_request_is_charged() {
    let mut p = busy();
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    (4..=6).for_each(|request| _ = submit(&mut p, request, "b", Normal));
    assert_eq!(order(&mut p, 0, 1), [1]);
    use_tokens(&mut p, 1, 40, 20);
    let reason = CancelReason::ClientDisconnect;
    let lines = p.handle(Event::Cancel { request: RequestKey(1), reason });
    assert_eq!(lines[2], "send r4 to w1 #1");
    assert_eq!(order(&mut p, 4, 3), [5, 6, 2]);
}

#[test]
fn usage_of_earlier_attempt_is_ignored() {
    let mut p = busy();
    submit(&mut p, 1, "z", Normal);
    submit(&mut p, 2, "b", Normal);
    let usage = Some(TokenUsage { input: 1 << 20, output: 0 });
    let (request, cached) = (RequestKey(0), None);
    p.handle(Event::Completed { worker: WorkerKey(1), request, attempt: 2, cached, usage });
    p.handle(Event::Completed { worker: WorkerKey(2), request, attempt: 1, cached, usage });
    submit(&mut p, 3, "b", Normal);
    submit(&mut p, 4, "z", Normal);
    assert_eq!(order(&mut p, 0, 4), [2, 1, 3, 4]);
}

#[test]
fn waiting_request_has_used_nothing() {
    let mut p = busy();
    submit(&mut p, 1, "a", Normal);
    use_tokens(&mut p, 1, 1 << 20, 0);
    submit(&mut p, 2, "a", Normal);
    submit(&mut p, 3, "b", Normal);
    assert_eq!(order(&mut p, 0, 3), [1, 3, 2]);
}

#[test]
fn estimate_of_running_request_lifts_no_other_key() {
    let mut p = busy();
    submit(&mut p, 1, "a", Normal);
    submit(&mut p, 2, "a", Normal);
    assert_eq!(order(&mut p, 0, 1), [1]);
    // The estimate of the running request is 25 tokens, and it uses one.
    submit(&mut p, 3, "b", Normal);
    use_tokens(&mut p, 1, 1, 0);
    assert_eq!(order(&mut p, 1, 2), [3, 2]);
}

#[test]
fn idle_key_gets_no_credit() {
    let mut p = busy();
    (1..=8).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    assert_eq!(order(&mut p, 0, 4), [1, 2, 3, 4]);
    // Without the lift `b` would be sent four requests in a row.
    (9..=12).for_each(|request| _ = submit(&mut p, request, "b", Normal));
    assert_eq!(order(&mut p, 4, 4), [9, 5, 10, 6]);
}

#[test]
fn key_keeps_debt_after_short_pause() {
    let mut p = busy();
    submit(&mut p, 1, "a", Normal);
    (2..=4).for_each(|request| _ = submit(&mut p, request, "b", Normal));
    assert_eq!(order(&mut p, 0, 1), [1]);
    use_tokens(&mut p, 1, 1_000, 0);
    assert_eq!(order(&mut p, 1, 1), [2]);
    submit(&mut p, 5, "a", Normal);
    assert_eq!(order(&mut p, 2, 3), [3, 4, 5]);
}

#[test]
fn promoted_request_goes_before_busier_higher_class() {
    let mut p = busy();
    submit(&mut p, 1, "slow", Batch);
    submit(&mut p, 2, "slow", Batch);
    p.pass(14.9);
    (3..=5).for_each(|request| _ = submit(&mut p, request, "chat", Interactive));
    assert_eq!(order(&mut p, 0, 1), [3], "not promoted yet");
    p.pass(0.1);
    assert_eq!(order(&mut p, 3, 4), [1, 4, 2, 5], "by service");
}

#[test]
fn promoted_request_does_not_pass_its_own_class() {
    let mut p = busy();
    (1..=2).for_each(|request| _ = submit(&mut p, request, "old", Normal));
    p.pass(20.0);
    (3..=4).for_each(|request| _ = submit(&mut p, request, "new", Normal));
    assert_eq!(order(&mut p, 0, 4), [1, 3, 2, 4]);
}

#[test]
fn promoted_request_goes_before_pinned_higher_class() {
    let mut p = busy();
    submit(&mut p, 1, "slow", Batch);
    (2..=3).for_each(|request| submit_pinned(&mut p, request, "chat", Interactive));
    assert_eq!(order(&mut p, 0, 1), [2]);
    p.pass(15.0);
    assert_eq!(order(&mut p, 2, 2), [1, 3]);
}

#[test]
fn oldest_of_equal_promoted_requests_goes_first() {
    let mut p = busy();
    submit_pinned(&mut p, 1, "slow", Batch);
    submit_pinned(&mut p, 2, "slower", Batch);
    (3..=4).for_each(|request| _ = submit(&mut p, request, "chat", Interactive));
    assert_eq!(order(&mut p, 0, 1), [3]);
    p.pass(15.0);
    assert_eq!(order(&mut p, 3, 3), [1, 2, 4]);
}

#[test]
fn new_promotion_age_applies_to_waiting_requests() {
    let mut p = busy();
    submit(&mut p, 1, "slow", Batch);
    p.pass(2.0);
    (2..=3).for_each(|request| _ = submit(&mut p, request, "chat", Interactive));
    assert_eq!(order(&mut p, 0, 1), [2]);
    p.change(|settings| settings.fairness = Fairness::Shared { promote_after: secs(1.0) });
    assert_eq!(order(&mut p, 2, 1), [1]);
}

#[test]
fn requeue_returns_charge_and_keeps_place() {
    let mut p = busy();
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    (4..=5).for_each(|request| _ = submit(&mut p, request, "b", Normal));
    assert_eq!(order(&mut p, 0, 1), [1]);
    let lines = p.fail(1, AttemptFailure::SeveredBySwap);
    assert_eq!(lines, ["requeued r1 #1: SeveredBySwap", "send r1 to w1 #2"]);
    assert_eq!(order(&mut p, 1, 4), [4, 2, 5, 3]);
}

#[test]
fn lost_requests_are_placed_by_share() {
    let mut p = Provider::new();
    p.join(1, &["m"], 3);
    (1..=2).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    submit(&mut p, 3, "b", Interactive);
    p.join(2, &["m"], 1);
    let lines = p.lose(1, &[]);
    assert_eq!(lines.last().unwrap(), "send r3 to w2 #2");
}

#[test]
fn higher_class_displaces_youngest_of_lowest() {
    let mut p = busy_with(Settings { max_queue_len: 3, ..settings() });
    submit(&mut p, 1, "a", Batch);
    submit(&mut p, 2, "b", Batch);
    submit(&mut p, 3, "c", Normal);
    let displaced = |request: u64| vec![format!("fail r{request}: Displaced {{ retry_after_secs: 30 }}")];
    assert_eq!(submit(&mut p, 4, "d", Batch), ["fail r4: QueueFull { retry_after_secs: 30 }"]);
    assert_eq!(submit(&mut p, 5, "e", Interactive), displaced(2));
    assert_eq!(submit(&mut p, 6, "c", Normal), ["fail r1: Displaced { retry_after_secs: 30 }"]);
    assert_eq!(submit(&mut p, 7, "c", Normal), ["fail r7: QueueFull { retry_after_secs: 1 }"]);
    assert_eq!(submit(&mut p, 8, "e", Interactive), ["fail r6: Displaced { retry_after_secs: 1 }"]);
}

#[test]
fn large_request_displaces_several_or_none() {
    let mut p = busy_in(Interactive, Settings { max_queue_bytes: 400, ..settings() });
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    submit(&mut p, 4, "b", Interactive);
    let large = |p: &mut Provider, request, bytes| {
        let owner = Owner { key: Some("c".into()), weight: Weight::default(), class: Interactive };
        p.submit_with(request, "m", |new| (new.owner, new.bytes) = (Some(owner), bytes))
    };
    assert_eq!(large(&mut p, 5, 301), ["fail r5: QueueFull { retry_after_secs: 30 }"]);
    assert_eq!(large(&mut p, 6, 200).len(), 2, "two have made room");
    assert_eq!((p.dispatch.queue_len(), p.dispatch.queue_bytes()), (3, 400));
}

#[test]
fn lower_class_keeps_tenth_of_queue() {
    let mut p = busy_in(Interactive, Settings { max_queue_len: 20, ..settings() });
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    (4..=20).for_each(|request| assert_eq!(submit(&mut p, request, "b", Interactive), NOTHING));
    assert_eq!(submit(&mut p, 21, "b", Interactive), ["fail r3: Displaced { retry_after_secs: 30 }"]);
    assert_eq!(submit(&mut p, 22, "b", Interactive), ["fail r22: QueueFull { retry_after_secs: 30 }"]);
}

#[test]
fn lower_class_keeps_tenth_of_bytes() {
    let mut p = busy_in(Interactive, Settings { max_queue_bytes: 2_000, ..settings() });
    (1..=2).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    (3..=20).for_each(|request| assert_eq!(submit(&mut p, request, "b", Interactive), NOTHING));
    assert_eq!(submit(&mut p, 21, "b", Interactive), ["fail r21: QueueFull { retry_after_secs: 30 }"]);
}

#[test]
fn refused_class_gets_next_free_place() {
    let long = secs(600.0);
    let mut p =
        busy_in(Interactive, Settings { max_queue_len: 10, queue_timeout: long, request_timeout: long, ..settings() });
    (1..=10).for_each(|request| assert_eq!(submit(&mut p, request, "b", Interactive), NOTHING));
    let is_refused = |lines: Vec<String>| lines.iter().any(|line| line.contains("QueueFull"));
    assert!(is_refused(submit(&mut p, 11, "a", Batch)));
    assert_eq!(order(&mut p, 0, 1), [1]);
    assert!(is_refused(submit(&mut p, 12, "b", Interactive)), "the place is kept for a batch request");
    assert_eq!(submit(&mut p, 13, "a", Batch), NOTHING);
    assert_eq!(order(&mut p, 1, 10), [2, 3, 4, 5, 6, 7, 8, 9, 10, 13]);
    (14..=22).for_each(|request| assert_eq!(submit(&mut p, request, "b", Interactive), NOTHING));
    assert!(is_refused(submit(&mut p, 23, "b", Interactive)));
    p.pass(61.0);
    assert_eq!(submit(&mut p, 24, "b", Interactive), NOTHING, "no batch request has come for a minute");
}

#[test]
fn request_displaces_others_in_its_share() {
    let mut p = busy_with(Settings { max_queue_len: 10, ..settings() });
    let submit = |p: &mut Provider, request, key: &str, class| {
        let owner = Owner { key: Some(key.into()), weight: Weight::default(), class };
        let share = QueueShare { key: key.into(), percent: 20 };
        p.submit_with(request, "m", |new| (new.owner, new.share) = (Some(owner), Some(share)))
    };
    submit(&mut p, 1, "b", Batch);
    (2..=3).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    submit(&mut p, 4, "b", Batch);
    assert_eq!(submit(&mut p, 5, "a", Normal), ["fail r3: Displaced { retry_after_secs: 30 }"]);
    assert_eq!(submit(&mut p, 6, "a", Batch), ["fail r6: QueueShareFull { percent: 20 }"]);
}

#[test]
fn position_is_order_of_dispatch() {
    let mut p = busy();
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    (4..=5).for_each(|request| _ = submit(&mut p, request, "b", Normal));
    submit(&mut p, 6, "c", Batch);
    p.submit(7, "other");
    let positions: Vec<_> = p.dispatch.positions().into_iter().map(|(key, place)| (key.0, place)).collect();
    assert_eq!(positions, [(1, 1), (2, 3), (3, 5), (4, 2), (5, 4), (6, 6), (7, 1)], "0 runs");
    assert_eq!(order(&mut p, 0, 6), [1, 4, 2, 5, 3, 6]);
}

#[test]
fn keys_without_debt_are_forgotten() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    for request in 0..100 {
        submit(&mut p, request, &format!("key {request}"), Normal);
        p.complete(request);
    }
    assert_eq!(p.dispatch.keys_known(), 100);
    for request in 100..102 {
        submit(&mut p, request, "busy", Normal);
        p.complete(request);
    }
    assert_eq!(p.dispatch.keys_known(), 1, "the others have attained no more than it had before");
}

#[test]
fn keys_with_debt_are_limited() {
    let mut p = Provider::new();
    p.submit(0, "no worker");
    p.join(1, &["m"], 1);
    for request in 1..3_000 {
        submit(&mut p, request, &format!("key {request}"), Normal);
        p.complete(request);
        assert!(p.dispatch.keys_known() <= 1_001, "{} keys", p.dispatch.keys_known());
    }
    assert_eq!(p.dispatch.keys_known(), 1_000, "those with a debt are remembered");
}
