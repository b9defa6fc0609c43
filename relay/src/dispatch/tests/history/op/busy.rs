//! A history with few, small workers and a long queue that is served quickly: requests overtake each other. In a third
//! of the histories the workers are larger and often have room, so that a conversation also leaves a home that has
//! room.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::{CONVERSATIONS, Kind, Op, OwnerOp, any_index, begin, cached, distance, spill};
use crate::dispatch::tests::harness::settings;
use crate::dispatch::{AttemptFailure, CancelReason, Class, Placement, Settings};

/// What holds in all of a history.
#[derive(Clone, Copy, Debug)]
struct Conditions {
    placement: Placement,
    has_room: bool,
    /// True if nothing is found in caches, so that workers lose trust.
    forgets: bool,
}

pub(super) fn history(kind: Kind) -> impl Strategy<Value = (Settings, Vec<Op>)> {
    let placement = prop_oneof![2 => Just(Placement::Cache), 1 => Just(Placement::LeastLoad)];
    let conditions = (placement, prop::bool::weighted(0.33), prop::bool::weighted(0.25))
        .prop_map(|(placement, has_room, forgets)| Conditions { placement, has_room, forgets });
    let parts = conditions.prop_flat_map(move |it| {
        let spill = kind.draw_zones(spill());
        (Just(it), prop::sample::select(vec![2, 10, 100]), spill, vec(join(kind, it), 2..4), vec(op(kind, it), 60..240))
    });
    parts.prop_map(|(conditions, max_homes, spill, mut ops, rest)| {
        ops.extend(rest);
        let long = Duration::from_secs(300);
        let settings = Settings {
            max_queue_len: 40,
            max_queue_bytes: 10_000,
            queue_timeout: long,
            request_timeout: long,
            placement: conditions.placement,
            spill: spill.unwrap_or_default(),
            max_homes,
            ..settings()
        };
        (settings, ops)
    })
}

fn join(kind: Kind, conditions: Conditions) -> impl Strategy<Value = Op> {
    let sizes = if conditions.has_room { 2..5_u32 } else { 1..3 };
    let parts = (sizes, 0..3_u8, kind.draw_zones(distance()));
    parts.prop_map(|(max_concurrent, process, distance)| Op::Join {
        models: 1,
        max_concurrent,
        load: 0,
        core1: false,
        failing: 0,
        slots: None,
        process: Some(process),
        distance,
    })
}

fn op(kind: Kind, conditions: Conditions) -> impl Strategy<Value = Op> {
    let conversation = prop::option::weighted(0.9, 0..CONVERSATIONS);
    let pin = prop::option::weighted(0.05, any_index());
    let owner = kind.draw_shared((0..2_u8).prop_map(|key| OwnerOp { key, weight: 100, class: Class::Normal }));
    let submit = (1..50_u64, pin, conversation, owner).prop_map(|(bytes, pin, conversation, owner)| Op::Submit {
        model: 0,
        bytes,
        pin,
        needs_core1: false,
        allowed: None,
        share: None,
        conversation,
        owner,
    });
    let cached = if conditions.forgets { Just(0).boxed() } else { cached().boxed() };
    let complete = (any_index(), prop::option::of(cached)).prop_map(|(request, cached)| Op::Complete {
        request,
        cached,
        used: None,
    });
    let reason = CancelReason::ClientDisconnect;
    prop_oneof![
        24 => submit,
        if conditions.has_room { 30 } else { 20 } => complete,
        6 => begin(),
        2 => any_index().prop_map(|request| Op::Fail { request, failure: AttemptFailure::SeveredBySwap }),
        1 => any_index().prop_map(move |request| Op::Cancel { request, reason }),
        1 => Just(Op::Pass { millis: 100 }),
    ]
}
