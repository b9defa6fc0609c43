//! Log lines for events of a slot. They contain only names and numbers, nothing of a request.
//!
//! A swap is a sequence of lines: "swap started" states the reason and the number of waiting requests, "unloading" and
//! "loading" follow, and "swap finished" states the duration of each step.

use crate::Model;
use crate::effect::{Effect, SlotEvent, Swap};
use crate::machine::{Machine, Requests};

/// Logs an effect that is about to change a backend.
#[allow(clippy::wildcard_enum_match_arm)] // All other effects concern relays and requests, not backends.
pub(super) fn announce(slot: &str, effect: &Effect) {
    match effect {
        Effect::Evict { model, .. } => tracing::info!(slot, model = &**model, "unloading"),
        Effect::ForceEvict { model, .. } => tracing::info!(slot, model = &**model, "forcing the unload"),
        Effect::Load { model, kind, .. } => tracing::info!(slot, model = &**model, ?kind, "loading"),
        _ => {}
    }
}

/// Logs an event. `machine` provides the numbers of requests.
pub(super) fn log(slot: &str, news: &SlotEvent, machine: &Machine) {
    match news {
        SlotEvent::SwapBegun { from, to, reason } => {
            let waiting = to.as_ref().map(|to| requests(machine, to).waiting);
            let running = from.as_ref().map(|from| requests(machine, from).leases);
            let (from, to, reason) = (from.as_deref(), to.as_deref(), reason.as_str());
            tracing::info!(slot, from, to, reason, waiting, running, "swap started");
        }
        SlotEvent::SwapAborted { from } => tracing::info!(slot, resident = &**from, "swap aborted"),
        SlotEvent::SwapEnded(Swap { from, to, reason, drain, evict, load, severed, result }) => tracing::info!(
            slot,
            from = from.as_deref(),
            to = to.as_deref(),
            reason = reason.as_str(),
            drain_ms = drain.as_millis() as u64,
            evict_ms = evict.as_millis() as u64,
            load_ms = load.as_millis() as u64,
            severed,
            result = result.as_str(),
            "swap finished"
        ),
        SlotEvent::ResidencyEnded { model, lasted } => {
            tracing::debug!(slot, model = &**model, lasted_ms = lasted.as_millis() as u64, "model stopped serving");
        }
        SlotEvent::Held { model, waited } => {
            tracing::debug!(slot, model = &**model, waited_ms = waited.as_millis() as u64, "held request started");
        }
        SlotEvent::Coalesced { model } => {
            tracing::debug!(slot, model = &**model, "request waits for a load in progress");
        }
        SlotEvent::LingerHit { model } => tracing::debug!(slot, model = &**model, "linger ended by a request"),
        SlotEvent::LingerMiss { model } => tracing::debug!(slot, model = &**model, "linger expired unused"),
        SlotEvent::LoadFailed { model, error } => {
            tracing::warn!(slot, model = &**model, %error, "model could not be loaded");
        }
        SlotEvent::WakeFailed { model, failure } => {
            tracing::warn!(slot, model = &**model, %failure, "model did not wake; restarting it");
        }
        SlotEvent::EvictFailed { model, detail } => {
            tracing::warn!(slot, model = &**model, detail, "model could not be unloaded");
        }
        SlotEvent::MemoryNotFreed { model } => tracing::warn!(slot, model = &**model, "GPU memory not released"),
        SlotEvent::Quarantined { model } => {
            tracing::error!(slot, model = &**model, "slot quarantined: its memory could not be freed");
        }
        SlotEvent::BackendDown { model, cause, leases } => {
            tracing::warn!(slot, model = &**model, ?cause, leases, "backend lost");
        }
        SlotEvent::Adopted { model } => tracing::info!(slot, model = &**model, "model was already loaded"),
        SlotEvent::MaxWaitInfeasible { model, cost } => tracing::warn!(
            slot,
            model = &**model,
            swap_cost_ms = cost.as_millis() as u64,
            "max_wait is shorter than four swaps to this model; raise it, or expect longer waits"
        ),
    }
}

fn requests(machine: &Machine, model: &Model) -> Requests {
    machine.requests().find(|(of, _)| *of == model).map(|(_, requests)| requests).unwrap_or_default()
}
