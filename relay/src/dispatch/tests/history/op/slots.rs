//! Reports of a multiplexer, sensible or not.

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState};
use proptest::prelude::*;

use super::{ALL_MODELS, MODELS, Op, any_index};
use crate::dispatch::Gate;

pub(super) fn of_a_multiplexer() -> impl Strategy<Value = Op> {
    let gate = (0..3_u32, 0..3_u32, 0..3_u32).prop_map(|(slots, others, capacity)| Gate { slots, others, capacity });
    // May include models that were never advertised.
    let gates =
        (any_index(), 0..ALL_MODELS, gate).prop_map(|(worker, models, gate)| Op::Gates { worker, models, gate });
    prop_oneof![gates, (any_index(), slots()).prop_map(|(worker, slots)| Op::Slots { worker, slots }),]
}

/// Any report: a state that does not fit its other fields, models in two slots or in none, aliases that are ids or
/// names of several models.
pub(super) fn slots() -> impl Strategy<Value = Vec<Slot>> {
    prop::collection::vec(slot(), 0..3)
}

fn slot() -> impl Strategy<Value = Slot> {
    use SlotState::{Backoff, Draining, Empty, Evicting, Loading, Quarantined, Ready, RollingBack, Severing, Stopping};
    let state = prop_oneof![
        2 => Just(Empty),
        4 => Just(Ready),
        3 => prop::sample::select(vec![Draining, Severing, Evicting, Loading, RollingBack, Backoff]),
        1 => prop::sample::select(vec![Quarantined, Stopping]),
    ];
    let one = || prop::option::of(prop::sample::select(MODELS.to_vec()));
    let eta = prop::option::of(prop::sample::select(vec![0, 500, 2_000, 45_000]));
    let idle = prop::sample::select(vec![0, 0, 400, 2_000, 9_000]);
    let models = prop::collection::vec(prop::option::weighted(0.8, model()), 3);
    (state, one(), one(), eta, idle, 0..3_u32, models).prop_map(
        |(state, resident, target, eta, idle, wanted, models)| {
            let named = models
                .into_iter()
                .zip(MODELS)
                .filter_map(|(model, name)| Some(SlotModel { id: name.into(), ..model? }));
            Slot {
                id: "gpu".into(),
                state,
                resident: resident.map(str::to_owned),
                target: target.map(str::to_owned),
                eta_ms: eta,
                idle_ms: idle,
                wanted,
                models: named.collect(),
                ..Slot::default()
            }
        },
    )
}

fn model() -> impl Strategy<Value = SlotModel> {
    use SlotModelStatus::{Failed, Resident, Sleeping, Unloaded};
    let status = prop::sample::select(vec![Resident, Sleeping, Unloaded, Failed]);
    let code = prop::sample::select(vec![None, Some("insufficient_memory"), Some("slot_quarantined"), Some("new")]);
    let retry = prop::option::of(prop::sample::select(vec![0, 500, 3_000]));
    let cost = prop::sample::select(vec![0, 100, 1_000, 3_000]);
    let aliases = prop_oneof![
        2 => Just(vec![]),
        2 => Just(vec!["z".to_owned()]),
        1 => prop::collection::vec(prop::sample::select(MODELS.map(str::to_owned).to_vec()), 1..3),
    ];
    let flags = (prop::bool::weighted(0.1), prop::bool::weighted(0.3));
    (status, code, retry, cost, flags, aliases).prop_map(
        |(status, code, retry_ms, swap_cost_ms, (pinned, wanted), aliases)| {
            let code = code.filter(|_| status == Failed).map(str::to_owned);
            SlotModel { status, code, retry_ms, swap_cost_ms, pinned, wanted, aliases, ..SlotModel::default() }
        },
    )
}
