//! The relay's metrics: names and labels in one place, typed handles for all other modules.
//!
//! Labels are bounded. A `model` is always one that is registered or aliased, else `unknown`, because clients choose
//! that string; endpoints, outcomes and reasons are enums; no histogram has a worker label; at most 32 zones have
//! series; no label contains a key's secret, and at most 200 keys have series. Events are counted where they happen,
//! through handles that are looked up once ([`ProviderSeries`], [`RequestSeries`]). State (depths, workers, slots) is
//! not mirrored: a [`StateSource`] provides it at scrape time, so that it cannot drift, and a worker or provider that
//! is gone has no series.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use modelrelay_platform::log;
use modelrelay_protocol::message::TokenCounts;
use modelrelay_protocol::paths::Endpoint;
use modelrelay_traces::Loss;
use prometheus::proto::MetricFamily;
use prometheus::{Encoder, TextEncoder};

mod families;
mod keys;
mod labels;
mod mapping;
mod process;
mod register;
mod series;
mod state;
mod zones;

pub use labels::{
    ClientKind, ConnectionResult, DisconnectReason, Outcome, QueueOutcome, Realm, RequeueReason, Stage, TokenKind,
    UNKNOWN,
};
pub use series::{ProviderSeries, RequestEnd, RequestSeries};
pub use state::{ModelGauges, ProviderGauges, RelayGauges, StateSource, WorkerGauges};

use families::Families;

/// The content type of the scrape endpoint.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// All metrics of one relay.
pub struct Metrics {
    families: Arc<Families>,
    /// Looked up when a request or a worker arrives, not per chunk.
    providers: RwLock<HashMap<String, Arc<ProviderSeries>>>,
    /// Serializes scrapes: gauges are rewritten as a whole.
    scrape: Mutex<()>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers every family, with all counters at zero.
    pub fn new() -> Self {
        let families = Arc::new(Families::new());
        families.build_info.with_label_values(&[crate_version(), revision(), rustc()]).set(1);
        Self { families, providers: RwLock::default(), scrape: Mutex::new(()) }
    }

    /// The series of a configured provider, created on first use. A name that a client or worker chose must be looked
    /// up in the configuration first; see [`Metrics::worker_of_unknown_provider`].
    pub fn provider(&self, name: &str) -> Arc<ProviderSeries> {
        let known = self.providers.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        known.unwrap_or_else(|| {
            let mut providers = self.providers.write().unwrap_or_else(PoisonError::into_inner);
            let make = || Arc::new(ProviderSeries::new(name, Arc::clone(&self.families)));
            Arc::clone(providers.entry(name.to_owned()).or_insert_with(make))
        })
    }

    /// Deletes a removed provider's series. Counts of requests that still hold its handles are dropped from now on.
    pub fn remove_provider(&self, name: &str) {
        let removed = self.providers.write().unwrap_or_else(PoisonError::into_inner).remove(name);
        if let Some(series) = removed {
            series.retire();
        }
        self.families.delete_where("provider", name);
    }

    /// Counts a request that ended before it had a provider: no key, no such model, no such route. `provider` and
    /// `model` are `unknown`.
    pub fn unrouted_request_finished(&self, endpoint: Endpoint, outcome: Outcome, code: u16) {
        let code = code.to_string();
        let labels = [UNKNOWN, UNKNOWN, endpoint.as_str(), outcome.as_str(), &code];
        self.families.requests.with_label_values(&labels).inc();
    }

    /// Counts a worker that was rejected because it named an unknown provider.
    pub fn worker_of_unknown_provider(&self, result: ConnectionResult) {
        let labels = [UNKNOWN, result.as_str()];
        self.families.worker_connections.with_label_values(&labels).inc();
    }

    /// Observes the size of a request's body.
    pub fn request_body_received(&self, endpoint: Endpoint, bytes: u64) {
        self.families.request_body.with_label_values(&[endpoint.as_str()]).observe(bytes as f64);
    }

    /// Observes the size of a response's body, whole or not.
    pub fn response_body_sent(&self, endpoint: Endpoint, bytes: u64) {
        self.families.response_body.with_label_values(&[endpoint.as_str()]).observe(bytes as f64);
    }

    /// Observes the relay's own time on a request: from its last byte to the worker, and from the worker's head to the
    /// client.
    pub fn overhead_observed(&self, endpoint: Endpoint, spent: Duration) {
        self.families.overhead.with_label_values(&[endpoint.as_str()]).observe(spent.as_secs_f64());
    }

    /// Counts an SDK's `x-stainless-retry-count` above zero.
    pub fn client_retried(&self, client: ClientKind) {
        self.families.client_retries.with_label_values(&[client.as_str()]).inc();
    }

    /// Counts a failed login.
    pub fn login_failed(&self, realm: Realm) {
        self.families.auth_failures.with_label_values(&[realm.as_str()]).inc();
    }

    /// Counts an event of the audit log that could not be written to its file.
    pub fn audit_event_lost(&self) {
        self.families.audit_lost.inc();
    }

    /// Counts lines of the request journal that could not be written.
    pub fn journal_lines_lost(&self, lines: u64) {
        self.families.journal_lines_lost.inc_by(lines);
    }

    /// The number of lines of the request journal that could not be written.
    #[cfg(test)]
    pub fn journal_lines_lost_so_far(&self) -> u64 {
        self.families.journal_lines_lost.get()
    }

    /// Counts a write of the usage file that failed.
    pub fn usage_write_failed(&self) {
        self.families.usage_write_failures.inc();
    }

    /// Counts the tokens and the slot time of a request of the API key with this name.
    pub fn key_used(&self, name: &str, tokens: Option<TokenCounts>, slot_time: Duration) {
        self.families.keys.used(name, tokens, slot_time);
    }

    /// Counts spans that the collector of traces did not receive.
    pub fn spans_dropped(&self, loss: Loss, spans: u64) {
        self.families.spans_dropped.with_label_values(&[loss.as_str()]).inc_by(spans);
    }

    /// Records that a configuration is active; the series of the previous one is deleted.
    pub fn config_loaded(&self, hash: &str) {
        self.families.config_info.reset();
        self.families.config_info.with_label_values(&[hash]).set(1);
        self.families.config_ok.set(1);
    }

    /// Records that a changed configuration could not be used; the previous one stays active.
    pub fn config_refused(&self) {
        self.families.config_ok.set(0);
    }

    /// Records that a TLS certificate is active, until `not_after` in seconds since 1970.
    pub fn tls_loaded(&self, not_after: i64) {
        self.families.tls_expiry.with_label_values::<&str>(&[]).set(not_after);
        self.tls_accepted();
    }

    /// Records that the certificate's files are in use.
    pub fn tls_accepted(&self) {
        self.families.tls_ok.with_label_values::<&str>(&[]).set(1);
    }

    /// Records that changed files of the certificate could not be used; the previous pair stays active.
    pub fn tls_refused(&self) {
        self.families.tls_ok.with_label_values::<&str>(&[]).set(0);
    }

    /// The present values of all families.
    pub fn gather(&self, source: &dyn StateSource) -> Vec<MetricFamily> {
        let state = source.state();
        let _one_at_a_time = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
        self.families.gauges.show(&state);
        self.families.zones.show(&state);
        process::show(&self.families.process);
        let dropped = &self.families.log_lines_dropped;
        dropped.inc_by(log::dropped_lines().saturating_sub(dropped.get()));
        self.families.registry.gather()
    }

    /// The response to a scrape.
    pub fn render(&self, source: &dyn StateSource) -> String {
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.gather(source), &mut text) {
            tracing::error!(%error, "cannot encode metrics");
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

fn crate_version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The revision, which release builds set; a build from a clone need not have it.
fn revision() -> &'static str {
    option_env!("MODELRELAY_REVISION").unwrap_or(UNKNOWN)
}

fn rustc() -> &'static str {
    option_env!("MODELRELAY_RUSTC").unwrap_or(UNKNOWN)
}

#[cfg(test)]
mod tests;
