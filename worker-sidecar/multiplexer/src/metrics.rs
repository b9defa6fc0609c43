//! The slots' metrics, `modelrelay_worker_…`. Labels are bounded: slots and models are those of the configuration.
//!
//! Events are counted when they happen. Gauges are read from the slots when the metrics are requested.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use prometheus::core::Collector;
use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry};

use modelrelay_protocol::message::SlotState;

use super::actor::history::{Report, Shares};
use super::effect::{Reason, SlotEvent, Swap, SwapResult};

/// Loads and holds take from milliseconds to an hour.
const SECONDS: [f64; 16] =
    [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0];

/// The label for no model.
const NONE: &str = "none";

const STATES: [SlotState; 10] = [
    SlotState::Empty,
    SlotState::Ready,
    SlotState::Draining,
    SlotState::Severing,
    SlotState::Evicting,
    SlotState::Loading,
    SlotState::RollingBack,
    SlotState::Backoff,
    SlotState::Quarantined,
    SlotState::Stopping,
];

/// All metrics of the multiplexer.
#[derive(Debug)]
pub struct MultiplexerMetrics {
    state: IntGaugeVec,
    resident: IntGaugeVec,
    swaps: IntCounterVec,
    phases: HistogramVec,
    cost: GaugeVec,
    held: HistogramVec,
    waiting: IntGaugeVec,
    leases: IntGaugeVec,
    severed: IntCounter,
    aborted: IntCounter,
    linger_hits: IntCounter,
    linger_misses: IntCounter,
    coalesced: IntCounter,
    load_failures: IntCounterVec,
    memory_not_freed: IntCounter,
    residency: HistogramVec,
    share: GaugeVec,
    /// The existing series, by slot and model: a series that is no longer reported is removed. Never held over an
    /// await.
    seen: Mutex<KnownLabels>,
}

#[derive(Debug, Default)]
struct KnownLabels {
    residents: BTreeSet<(String, String)>,
    models: BTreeSet<String>,
}

impl MultiplexerMetrics {
    /// Registers all metrics, at zero.
    ///
    /// # Panics
    ///
    /// If `registry` already has them.
    pub fn new(registry: &Registry) -> Self {
        let counter = |name: &str, help: &str| register(registry, IntCounter::with_opts(opts(name, help)));
        Self {
            state: register(
                registry,
                IntGaugeVec::new(opts("slot_state", "1 for the current state of the slot"), &["slot", "state"]),
            ),
            resident: register(
                registry,
                IntGaugeVec::new(opts("resident_info", "Model that the slot holds"), &["slot", "model"]),
            ),
            swaps: register(
                registry,
                IntCounterVec::new(
                    opts("swaps_total", "Swaps past their commit point"),
                    &["from", "to", "reason", "result"],
                ),
            ),
            phases: histogram(registry, "swap_phase_seconds", "Duration of swaps, by phase", "phase"),
            cost: register(
                registry,
                GaugeVec::new(opts("swap_cost_ema_seconds", "Expected cost of a swap to the model"), &["model"]),
            ),
            held: histogram(registry, "hold_seconds", "Time that requests were held before they started", "model"),
            waiting: register(
                registry,
                IntGaugeVec::new(opts("waiting", "Waiting requests, here or at relays"), &["model"]),
            ),
            leases: register(registry, IntGaugeVec::new(opts("leases", "Running requests"), &["model"])),
            severed: counter("severed_total", "Requests severed by a swap"),
            aborted: counter("swaps_aborted_total", "Aborted swaps"),
            linger_hits: counter("linger_hits_total", "Lingering residents that received another request"),
            linger_misses: counter("linger_misses_total", "Lingering residents that received no further request"),
            coalesced: counter("coalesced_total", "Requests that joined a load in progress"),
            load_failures: register(
                registry,
                IntCounterVec::new(opts("load_failures_total", "Failed loads"), &["model"]),
            ),
            memory_not_freed: counter("memory_not_freed_total", "Unloads after which GPU memory was not released"),
            residency: histogram(registry, "residency_seconds", "Time that models stayed loaded", "model"),
            share: register(
                registry,
                GaugeVec::new(
                    opts("gpu_time_share", "Share of the slot's time by activity, since the start"),
                    &["slot", "activity"],
                ),
            ),
            seen: Mutex::default(),
        }
    }

    /// Records an event.
    pub fn note(&self, news: &SlotEvent) {
        match news {
            SlotEvent::SwapEnded(swap) => self.note_swap(swap),
            SlotEvent::SwapAborted { .. } => self.aborted.inc(),
            SlotEvent::Held { model, waited } => self.held.with_label_values(&[&**model]).observe(waited.as_secs_f64()),
            SlotEvent::Coalesced { .. } => self.coalesced.inc(),
            SlotEvent::LingerHit { .. } => self.linger_hits.inc(),
            SlotEvent::LingerMiss { .. } => self.linger_misses.inc(),
            SlotEvent::LoadFailed { model, .. } => self.load_failures.with_label_values(&[&**model]).inc(),
            SlotEvent::MemoryNotFreed { .. } => self.memory_not_freed.inc(),
            SlotEvent::ResidencyEnded { model, lasted } => {
                self.residency.with_label_values(&[&**model]).observe(lasted.as_secs_f64());
            }
            SlotEvent::SwapBegun { .. }
            | SlotEvent::WakeFailed { .. }
            | SlotEvent::EvictFailed { .. }
            | SlotEvent::Quarantined { .. }
            | SlotEvent::BackendDown { .. }
            | SlotEvent::Adopted { .. }
            | SlotEvent::MaxWaitInfeasible { .. } => {}
        }
    }

    fn note_swap(&self, swap: &Swap) {
        let (from, to) = (swap.from.as_deref().unwrap_or(NONE), swap.to.as_deref().unwrap_or(NONE));
        self.swaps.with_label_values(&[from, to, swap.reason.as_str(), swap.result.as_str()]).inc();
        for (phase, took) in [("drain", swap.drain), ("evict", swap.evict), ("load", swap.load)] {
            self.phases.with_label_values(&[phase]).observe(took.as_secs_f64());
        }
        self.severed.inc_by(u64::from(swap.severed));
    }

    /// Updates the gauges from the slots' reports.
    pub fn observe(&self, reports: &[Report]) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut now = KnownLabels::default();
        let mut models: BTreeMap<&str, (i64, i64, f64)> = BTreeMap::new();
        for report in reports {
            let slot = report.slot.id.as_str();
            for state in STATES {
                self.state.with_label_values(&[slot, state_label(state)]).set(i64::from(report.slot.state == state));
            }
            if let Some(resident) = &report.slot.resident {
                self.resident.with_label_values(&[slot, resident]).set(1);
                now.residents.insert((slot.to_owned(), resident.clone()));
            }
            self.observe_shares(slot, &report.shares);
            for (model, requests) in &report.requests {
                let sums = models.entry(model).or_default();
                sums.0 += i64::from(requests.waiting);
                sums.1 += i64::try_from(requests.leases).unwrap_or(i64::MAX);
            }
            for model in &report.slot.models {
                let sums = models.entry(&model.id).or_default();
                sums.2 = model.swap_cost_ms as f64 / 1e3;
            }
        }
        for (model, (waiting, leases, cost)) in models {
            self.waiting.with_label_values(&[model]).set(waiting);
            self.leases.with_label_values(&[model]).set(leases);
            self.cost.with_label_values(&[model]).set(cost);
            now.models.insert(model.to_owned());
        }
        for (slot, model) in seen.residents.difference(&now.residents) {
            let _ = self.resident.remove_label_values(&[slot, model]);
        }
        for model in seen.models.difference(&now.models) {
            let _ = self.waiting.remove_label_values(&[model]);
            let _ = self.leases.remove_label_values(&[model]);
            let _ = self.cost.remove_label_values(&[model]);
        }
        *seen = now;
    }

    fn observe_shares(&self, slot: &str, shares: &Shares) {
        let all = (shares.serving + shares.swapping + shares.idle).as_secs_f64().max(f64::MIN_POSITIVE);
        for (activity, time) in [("serving", shares.serving), ("swapping", shares.swapping), ("idle", shares.idle)] {
            self.share.with_label_values(&[slot, activity]).set(time.as_secs_f64() / all);
        }
    }
}

impl Reason {
    /// The reason as a label value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Quantum => "quantum",
            Self::Wanted => "wanted",
            Self::Order => "order",
            Self::Default => "default",
            Self::Ttl => "ttl",
            Self::Removed => "removed",
        }
    }
}

impl SwapResult {
    /// The result as a label value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::LoadFailed => "load_failed",
            Self::Quarantined => "quarantined",
        }
    }
}

fn state_label(state: SlotState) -> &'static str {
    match state {
        SlotState::Empty => "empty",
        SlotState::Ready => "ready",
        SlotState::Draining => "draining",
        SlotState::Severing => "severing",
        SlotState::Evicting => "evicting",
        SlotState::Loading => "loading",
        SlotState::RollingBack => "rolling_back",
        SlotState::Backoff => "backoff",
        SlotState::Stopping => "stopping",
        SlotState::Quarantined => "quarantined",
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("modelrelay_worker_{name}"), help)
}

fn histogram(registry: &Registry, name: &str, help: &str, label: &str) -> HistogramVec {
    let opts = HistogramOpts::from(opts(name, help)).buckets(SECONDS.to_vec());
    register(registry, HistogramVec::new(opts, &[label]))
}

/// Names and labels are constants of this file, so neither step can fail at run time.
fn register<C: Collector + Clone + 'static>(registry: &Registry, metric: prometheus::Result<C>) -> C {
    let metric = metric.expect("a metric with a valid name");
    registry.register(Box::new(metric.clone())).expect("a metric registered once");
    metric
}

#[cfg(test)]
mod tests;
