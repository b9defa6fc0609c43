//! The relay's state, as opposed to events: gauges, rewritten at each scrape.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use modelrelay_protocol::location::Location;
use prometheus::{GaugeVec, IntGauge, IntGaugeVec, Registry};

use super::labels::UNKNOWN;
use super::register::{float_gauge_vec, gauge_vec, int_gauge};

/// The source of the state, called once per scrape.
pub trait StateSource {
    /// The present state.
    fn state(&self) -> RelayGauges;
}

impl<F: Fn() -> RelayGauges> StateSource for F {
    fn state(&self) -> RelayGauges {
        self()
    }
}

/// The state of a relay.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RelayGauges {
    /// Every configured provider, idle ones too.
    pub providers: Vec<ProviderGauges>,
    /// Bytes of bodies in memory.
    pub buffered_bytes: u64,
    /// `MAX_BUFFERED_BYTES`.
    pub buffered_bytes_limit: u64,
    /// True if the stored API keys cannot be used; the last valid ones are in effect.
    pub are_keys_broken: bool,
}

/// The state of a provider.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProviderGauges {
    /// Its name.
    pub name: String,
    /// The most requests that may wait.
    pub queue_capacity: u64,
    /// The waiting time of the oldest request.
    pub queue_oldest_age: Option<Duration>,
    /// Bytes of waiting bodies.
    pub queued_bytes: u64,
    /// Conversations with a home.
    pub homes: u64,
    /// Every model with a worker, a catalogue entry, or a request.
    pub models: Vec<ModelGauges>,
    /// Every attached worker.
    pub workers: Vec<WorkerGauges>,
}

/// The state of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelGauges {
    /// Its id.
    pub name: String,
    /// True if a worker, the catalogue or `coldModels` names it. Otherwise only a client named it, and its label is
    /// `unknown`.
    pub known: bool,
    /// Workers that serve it and are not draining.
    pub workers: u64,
    /// Requests that wait for it.
    pub queued: u64,
    /// Requests dispatched to workers.
    pub in_flight: u64,
}

/// The state of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerGauges {
    /// The id from the relay.
    pub id: String,
    /// Its zone and cluster.
    pub location: Location,
    /// True if it accepts no more requests.
    pub is_draining: bool,
    /// Requests of this relay at the worker.
    pub used: u64,
    /// The most requests of this relay that it accepts now.
    pub slots: u64,
    /// The slots that it granted (`core1`), else 0.
    pub granted: u64,
    /// Bytes of bodies sent to it whose response has not begun.
    pub backlog_bytes: u64,
    /// The time of its last message.
    pub last_heartbeat: SystemTime,
}

/// The gauges that show a [`RelayGauges`].
pub(super) struct StateGauges {
    queue_depth: IntGaugeVec,
    queue_capacity: IntGaugeVec,
    queue_oldest_age: GaugeVec,
    queued_bytes: IntGaugeVec,
    homes: IntGaugeVec,
    in_flight: IntGaugeVec,
    workers: IntGaugeVec,
    worker_slots: IntGaugeVec,
    model_workers: IntGaugeVec,
    last_heartbeat: GaugeVec,
    worker_backlog: IntGaugeVec,
    grants: IntGaugeVec,
    buffered_bytes: IntGauge,
    buffered_bytes_limit: IntGauge,
    keys_ok: IntGauge,
}

impl StateGauges {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name, help, labels: &[&str]| gauge_vec(registry, name, help, labels);
        Self {
            queue_depth: gauge("queue_depth", "Requests waiting for a worker.", &["provider", "model"]),
            queue_capacity: gauge("queue_capacity", "Maximum number of waiting requests.", &["provider"]),
            queue_oldest_age: float_gauge_vec(
                registry,
                "queue_oldest_age_seconds",
                "Waiting time of the oldest request.",
                &["provider"],
            ),
            queued_bytes: gauge("queued_bytes", "Size of the bodies of waiting requests.", &["provider"]),
            homes: gauge("homes", "Conversations whose worker is remembered.", &["provider"]),
            in_flight: gauge("requests_in_flight", "Requests dispatched to workers.", &["provider", "model"]),
            workers: gauge("workers", "Connected workers.", &["provider", "state"]),
            worker_slots: gauge(
                "worker_slots",
                "Used and free request slots of connected workers.",
                &["provider", "state"],
            ),
            model_workers: gauge(
                "model_workers",
                "Workers that serve a model; 0 if the model is down.",
                &["provider", "model"],
            ),
            last_heartbeat: float_gauge_vec(
                registry,
                "worker_last_heartbeat_timestamp_seconds",
                "Time of the last message from a worker.",
                &["provider", "worker"],
            ),
            worker_backlog: gauge(
                "worker_backlog_bytes",
                "Bytes of requests sent to a worker whose response has not begun.",
                &["provider", "worker"],
            ),
            grants: gauge("worker_grants", "Slots granted to this relay by workers.", &["provider"]),
            buffered_bytes: int_gauge(
                registry,
                "buffered_bytes",
                "Bytes of requests, unread responses and unfinished messages in memory.",
            ),
            keys_ok: int_gauge(
                registry,
                "api_keys_last_reload_successful",
                "1 if the last reload of the API keys succeeded.",
            ),
            buffered_bytes_limit: int_gauge(
                registry,
                "buffered_bytes_limit",
                "Limit of the bytes in memory (MAX_BUFFERED_BYTES).",
            ),
        }
    }

    /// Shows `state` and nothing else: anything that is not in it has no series afterwards.
    pub(super) fn show(&self, state: &RelayGauges) {
        let ints = [
            &self.queue_depth,
            &self.queue_capacity,
            &self.queued_bytes,
            &self.homes,
            &self.in_flight,
            &self.worker_backlog,
            &self.workers,
            &self.worker_slots,
            &self.model_workers,
            &self.grants,
        ];
        ints.into_iter().for_each(IntGaugeVec::reset);
        self.queue_oldest_age.reset();
        self.last_heartbeat.reset();
        self.buffered_bytes.set(signed(state.buffered_bytes));
        self.buffered_bytes_limit.set(signed(state.buffered_bytes_limit));
        self.keys_ok.set(i64::from(!state.are_keys_broken));
        for provider in &state.providers {
            self.show_queue(provider);
            self.show_models(provider);
            self.show_workers(provider);
        }
    }

    fn show_queue(&self, provider: &ProviderGauges) {
        let name = [&*provider.name];
        self.queue_capacity.with_label_values(&name).set(signed(provider.queue_capacity));
        self.queued_bytes.with_label_values(&name).set(signed(provider.queued_bytes));
        self.homes.with_label_values(&name).set(signed(provider.homes));
        let age = provider.queue_oldest_age.unwrap_or_default();
        self.queue_oldest_age.with_label_values(&name).set(age.as_secs_f64());
    }

    fn show_models(&self, provider: &ProviderGauges) {
        // A scaler that queries a provider's sum must get 0, and not no result, before the first request for a model.
        let mut by_label: BTreeMap<&str, (bool, u64, u64, u64)> = BTreeMap::from([(UNKNOWN, (false, 0, 0, 0))]);
        for model in &provider.models {
            let label = if model.known { &*model.name } else { UNKNOWN };
            let sums = by_label.entry(label).or_default();
            *sums = (sums.0 || model.known, sums.1 + model.workers, sums.2 + model.queued, sums.3 + model.in_flight);
        }
        for (model, (known, workers, queued, in_flight)) in by_label {
            let labels = [&*provider.name, model];
            self.queue_depth.with_label_values(&labels).set(signed(queued));
            self.in_flight.with_label_values(&labels).set(signed(in_flight));
            // An unknown model has no workers: a 0 here would be an alarm about a client's typing error.
            if known {
                self.model_workers.with_label_values(&labels).set(signed(workers));
            }
        }
    }

    fn show_workers(&self, provider: &ProviderGauges) {
        let name = &*provider.name;
        let count = |wanted: &str| provider.workers.iter().filter(|worker| worker_state(worker) == wanted).count();
        for state in ["idle", "busy", "draining"] {
            self.workers.with_label_values(&[name, state]).set(signed(count(state) as u64));
        }
        let used = provider.workers.iter().map(|worker| worker.used).sum();
        let free = provider
            .workers
            .iter()
            .filter(|worker| !worker.is_draining)
            .map(|worker| worker.slots.saturating_sub(worker.used))
            .sum();
        let granted = provider.workers.iter().map(|worker| worker.granted).sum();
        self.worker_slots.with_label_values(&[name, "used"]).set(signed(used));
        self.worker_slots.with_label_values(&[name, "free"]).set(signed(free));
        self.grants.with_label_values(&[name]).set(signed(granted));
        for worker in &provider.workers {
            let heard = worker.last_heartbeat.duration_since(UNIX_EPOCH).unwrap_or_default();
            let labels = [name, &*worker.id];
            self.last_heartbeat.with_label_values(&labels).set(heard.as_secs_f64());
            self.worker_backlog.with_label_values(&labels).set(signed(worker.backlog_bytes));
        }
    }
}

fn worker_state(worker: &WorkerGauges) -> &'static str {
    match worker {
        WorkerGauges { is_draining: true, .. } => "draining",
        WorkerGauges { used: 0, .. } => "idle",
        WorkerGauges { .. } => "busy",
    }
}

pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
