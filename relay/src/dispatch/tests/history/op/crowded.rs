//! A history in which a few keys want more than the workers can do: all of one class, with equal weights, for workers
//! that can all serve them. There the service of two keys that wait differs by at most a constant.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::{Op, OwnerOp, any_index};
use crate::dispatch::tests::harness::settings;
use crate::dispatch::{AttemptFailure, CancelReason, Class, Fairness, Settings};

pub(super) fn history() -> impl Strategy<Value = (Settings, Vec<Op>)> {
    let joins = vec(join(), 1..3);
    (class(), joins, 1..5_u8).prop_flat_map(|(class, joins, greedy)| {
        vec(op(class, greedy), 200..500).prop_map(move |rest| {
            let mut ops = joins.clone();
            ops.extend(rest);
            let long = Duration::from_secs(3_000);
            let limits = Settings {
                max_queue_len: 60,
                max_queue_bytes: 100_000,
                queue_timeout: long,
                request_timeout: long,
                fairness: Fairness::Shared { promote_after: Duration::from_secs(3) },
                ..settings()
            };
            (limits, ops)
        })
    })
}

fn class() -> impl Strategy<Value = Class> {
    prop::sample::select(vec![Class::Interactive, Class::Normal, Class::Batch])
}

fn join() -> impl Strategy<Value = Op> {
    (1..3_u32).prop_map(|max_concurrent| Op::Join {
        models: 1,
        max_concurrent,
        load: 0,
        core1: false,
        failing: 0,
        slots: None,
        process: None,
        distance: None,
    })
}

/// One key sends this multiple of the requests of each other.
fn op(class: Class, greedy: u8) -> impl Strategy<Value = Op> {
    let key = prop_oneof![u32::from(greedy) => Just(0_u8), 1 => Just(1), 1 => Just(2)];
    let submit = (1..400_u64, key).prop_map(move |(bytes, key)| Op::Submit {
        model: 0,
        bytes,
        pin: None,
        needs_core1: false,
        allowed: None,
        share: None,
        conversation: None,
        owner: Some(OwnerOp { key, weight: 100, class }),
    });
    let tokens = || (0..60_u64, 0..20_u64);
    let use_tokens = (any_index(), tokens()).prop_map(|(request, (input, output))| Op::Use { request, input, output });
    let complete = (any_index(), prop::option::of(tokens())).prop_map(|(request, used)| Op::Complete {
        request,
        cached: None,
        used,
    });
    let reason = CancelReason::ClientDisconnect;
    prop_oneof![
        20 => submit,
        12 => use_tokens,
        15 => complete,
        2 => any_index().prop_map(|request| Op::Fail { request, failure: AttemptFailure::SeveredBySwap }),
        1 => any_index().prop_map(move |request| Op::Cancel { request, reason }),
        2 => Just(Op::Pass { millis: 1_000 }),
    ]
}
