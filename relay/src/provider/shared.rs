//! The state that every part of one relay process shares.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;
use modelrelay_traces::Traces;
use tokio::sync::{Notify, watch};

use crate::dispatch::{RequestKey, WorkerKey};
use crate::net::budget::Budget;
use crate::net::connections::ClientConnections;
use crate::provider::affinity::Affinity;
use crate::provider::operations::Operations;
use crate::settings::config::Config;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::request_journal::RequestJournal;
use crate::telemetry::usage::UsageLedger;

/// The progress of the process towards its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessPhase {
    /// Serving.
    Running,
    /// Unready, but still accepting everything: endpoints are updated late. From here on, responses end their
    /// connections.
    Grace,
    /// No requests of new connections; those of older connections are served, also by workers that reconnect.
    Draining,
    /// No request is left, and none is accepted; workers are notified of the shutdown, and no worker is accepted.
    Leaving,
    /// The listeners close.
    Stopping,
}

/// The state that every part of one relay process shares.
pub struct Shared {
    /// The settings, replaced as a whole.
    pub config: ArcSwap<Config>,
    /// Memory for request bodies.
    pub budget: Arc<Budget>,
    /// The connections of clients.
    pub connections: Arc<ClientConnections>,
    /// The origins of stored responses.
    pub affinity: Affinity,
    /// Orders of admins to workers.
    pub operations: Operations,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// The source of spans, if traces are exported.
    pub traces: Option<Traces>,
    /// The journal of finished requests.
    pub request_journal: RequestJournal,
    /// The sums per API key, model and day.
    pub usage: UsageLedger,
    /// Random per process.
    pub relay_id: String,
    /// When the process started.
    pub started_at: Instant,
    /// Notified whenever a request ends or its response begins, so that the drain checks again.
    pub progress: Notify,
    /// Notified whenever a worker has joined or listed its models.
    pub models_listed: Notify,
    had_worker: AtomicBool,
    phase: watch::Sender<ProcessPhase>,
    next_request: AtomicU64,
    next_worker: AtomicU64,
}

impl Shared {
    /// The shared parts of a relay with these settings.
    pub fn new(
        config: Config,
        metrics: Arc<Metrics>,
        traces: Option<Traces>,
        (request_journal, usage): (RequestJournal, UsageLedger),
        relay_id: String,
    ) -> Arc<Self> {
        Arc::new(Self {
            budget: Budget::new(config.max_buffered_bytes),
            connections: Arc::default(),
            config: ArcSwap::from_pointee(config),
            affinity: Affinity::default(),
            operations: Operations::default(),
            metrics,
            traces,
            request_journal,
            usage,
            relay_id,
            started_at: Instant::now(),
            progress: Notify::new(),
            models_listed: Notify::new(),
            had_worker: AtomicBool::new(false),
            phase: watch::Sender::new(ProcessPhase::Running),
            next_request: AtomicU64::new(1),
            next_worker: AtomicU64::new(1),
        })
    }

    /// The next position in the queue.
    pub fn next_request_key(&self) -> RequestKey {
        RequestKey(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// The next connection's number.
    pub fn next_worker_key(&self) -> WorkerKey {
        WorkerKey(self.next_worker.fetch_add(1, Ordering::Relaxed))
    }

    /// True if a worker has ever attached to this process.
    pub fn had_worker(&self) -> bool {
        self.had_worker.load(Ordering::Relaxed)
    }

    /// Records that a worker has attached.
    pub fn mark_worker(&self) {
        self.had_worker.store(true, Ordering::Relaxed);
    }

    /// The present phase.
    pub fn phase(&self) -> ProcessPhase {
        *self.phase.borrow()
    }

    /// Enters a later phase.
    pub fn enter(&self, phase: ProcessPhase) {
        self.phase.send_if_modified(|current| {
            let later = phase > *current;
            *current = phase.max(*current);
            later
        });
    }

    /// Subscribes to the phase.
    pub fn watch_phase(&self) -> watch::Receiver<ProcessPhase> {
        self.phase.subscribe()
    }
}
