//! The position that a client receives while its request waits, and when the queue rejects or ends it.

use modelrelay_protocol::queue_position::QueuePosition;

use super::harness::{Provider, request, settings};
use crate::dispatch::{Class, Effect, Event, NewRequest, Owner, QueueShare, RequestKey, Settings, Weight};
use Class::{Batch, Interactive, Normal};

/// A provider with one slot, which request 0 uses.
fn busy(settings: Settings) -> Provider {
    let mut p = Provider::with(settings);
    p.join(1, &["m"], 1);
    submit(&mut p, 0, "z", Normal);
    p
}

/// Submits a request, and returns the positions of those that the queue rejects or ends.
fn submit(p: &mut Provider, key: u64, owner: &str, class: Class) -> Vec<(u64, QueuePosition)> {
    submit_with(p, key, |new| new.owner = Some(Owner { key: Some(owner.into()), weight: Weight::default(), class }))
}

fn submit_with(p: &mut Provider, key: u64, change: impl FnOnce(&mut NewRequest)) -> Vec<(u64, QueuePosition)> {
    let mut new = request(key, "m");
    change(&mut new);
    failed(p, Event::Submit(new))
}

fn failed(p: &mut Provider, event: Event) -> Vec<(u64, QueuePosition)> {
    let mut out = Vec::new();
    p.dispatch.handle(event, p.instant(), &mut out);
    let position = |effect| {
        let Effect::Fail { request, position, .. } = effect else { return None };
        Some((request.0, position?))
    };
    out.into_iter().filter_map(position).collect()
}

fn position(p: &mut Provider, request: u64) -> Option<u32> {
    let now = p.instant();
    p.dispatch.queue_position(RequestKey(request), now).map(|it| it.position)
}

fn at(request: u64, position: u32, waiting: u32) -> (u64, QueuePosition) {
    (request, QueuePosition { position, waiting })
}

#[test]
fn waiting_request_has_position_running_one_none() {
    let mut p = busy(settings());
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    submit(&mut p, 4, "b", Normal);
    let now = p.instant();
    assert_eq!(p.dispatch.queue_position(RequestKey(2), now), Some(at(2, 3, 4).1));
    assert_eq!(
        [0, 1, 2, 3, 4, 5].map(|request| position(&mut p, request)),
        [None, Some(1), Some(3), Some(4), Some(2), None]
    );
    p.complete(0);
    assert_eq!([1, 2, 3, 4].map(|request| position(&mut p, request)), [None, Some(2), Some(3), Some(1)]);
}

#[test]
fn rejected_request_has_position_it_would_have() {
    let mut p = busy(Settings { max_queue_len: 4, ..settings() });
    (1..=3).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    submit(&mut p, 4, "b", Normal);
    assert_eq!(submit(&mut p, 5, "a", Normal), [at(5, 5, 4)]);
    assert_eq!(submit(&mut p, 6, "b", Normal), [at(6, 4, 4)], "behind its own request and the second of the other key");
    assert_eq!(submit(&mut p, 7, "c", Normal), [at(7, 3, 4)], "behind the first one of each");
    assert_eq!(submit(&mut p, 8, "c", Batch), [at(8, 5, 4)]);
}

#[test]
fn rejected_request_of_full_share_has_position() {
    let mut p = busy(Settings { max_queue_len: 4, ..settings() });
    let shared = |new: &mut NewRequest| new.share = Some(QueueShare { key: "a".into(), percent: 50 });
    (1..=2).for_each(|request| assert_eq!(submit_with(&mut p, request, shared), []));
    assert_eq!(submit_with(&mut p, 3, shared), [at(3, 3, 2)]);
}

#[test]
fn displaced_request_has_position_it_had() {
    let mut p = busy(Settings { max_queue_len: 3, ..settings() });
    (1..=2).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    submit(&mut p, 3, "b", Batch);
    assert_eq!(submit(&mut p, 4, "c", Interactive), [at(3, 2, 3)]);
    assert_eq!(submit(&mut p, 5, "c", Interactive), [at(2, 3, 3)]);
}

#[test]
fn timed_out_request_has_position_it_had() {
    let mut p = busy(settings());
    (1..=2).for_each(|request| _ = submit(&mut p, request, "a", Batch));
    p.pass(10.0);
    (3..=5).for_each(|request| _ = submit(&mut p, request, "b", Interactive));
    p.advance_late(20.0);
    assert_eq!(failed(&mut p, Event::Tick), [at(1, 4, 5), at(2, 4, 4)]);
}

#[test]
fn request_of_deleted_provider_has_no_position() {
    let mut p = busy(settings());
    submit(&mut p, 1, "a", Normal);
    assert_eq!(failed(&mut p, Event::Deleted), []);
}

#[test]
fn positions_are_recomputed_after_second_or_change() {
    let mut p = busy(settings());
    (1..=20).for_each(|request| _ = submit(&mut p, request, "a", Normal));
    assert_eq!(position(&mut p, 20), Some(20));
    p.complete(0);
    p.complete(1);
    assert_eq!(position(&mut p, 20), Some(20), "less than an eighth");
    submit(&mut p, 21, "a", Normal);
    assert_eq!(position(&mut p, 21), Some(21), "behind all that were sorted");
    let now = p.instant();
    assert_eq!(p.dispatch.queue_position(RequestKey(21), now).map(|at| at.waiting), Some(21), "it waits too");
    p.advance_late(0.9);
    assert_eq!(position(&mut p, 20), Some(20));
    p.advance_late(0.2);
    assert_eq!(position(&mut p, 20), Some(18));
    (2..=4).for_each(|request| _ = p.complete(request));
    assert_eq!(position(&mut p, 20), Some(15), "three of nineteen");
}
