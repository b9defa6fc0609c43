//! Workers and requests by the workers' zone and cluster. Workers without these labels have no series here.

use std::collections::BTreeMap;

use modelrelay_protocol::location::Location;
use prometheus::{IntCounter, IntCounterVec, IntGaugeVec, Registry};

use super::labels::{FirstValues, OTHER};
use super::register::{counter_vec, gauge_vec};
use super::state::{RelayGauges, signed};

/// The most pairs of cluster and zone: workers choose them.
const MAX_LOCATIONS: usize = 32;

pub(super) struct ZoneFamilies {
    pub(super) requests: IntCounterVec,
    workers: IntGaugeVec,
    in_flight: IntGaugeVec,
    locations: FirstValues<Location>,
}

impl ZoneFamilies {
    pub(super) fn new(registry: &Registry) -> Self {
        let labels = ["provider", "cluster", "zone"];
        Self {
            requests: counter_vec(
                registry,
                "zone_requests_total",
                "Requests sent to workers, by the cluster and zone of the worker.",
                &labels,
            ),
            workers: gauge_vec(registry, "zone_workers", "Connected workers, by their cluster and zone.", &labels),
            in_flight: gauge_vec(
                registry,
                "zone_requests_in_flight",
                "Requests of this relay at workers, by the cluster and zone of the worker.",
                &labels,
            ),
            locations: FirstValues::new(MAX_LOCATIONS),
        }
    }

    /// Returns the counter of requests that are sent to workers there.
    pub(super) fn requests_to(&self, provider: &str, location: &Location) -> Option<IntCounter> {
        let [cluster, zone] = Some(location).filter(|location| !location.is_unknown()).map(|it| self.labels(it))?;
        Some(self.requests.with_label_values(&[provider, cluster, zone]))
    }

    /// Shows the workers of `state` and nothing else.
    pub(super) fn show(&self, state: &RelayGauges) {
        self.workers.reset();
        self.in_flight.reset();
        for provider in &state.providers {
            let mut sums: BTreeMap<[&str; 2], (u64, u64)> = BTreeMap::new();
            for worker in provider.workers.iter().filter(|worker| !worker.location.is_unknown()) {
                let sum = sums.entry(self.labels(&worker.location)).or_default();
                *sum = (sum.0 + 1, sum.1 + worker.used);
            }
            for ([cluster, zone], (workers, used)) in sums {
                let labels = [&*provider.name, cluster, zone];
                self.workers.with_label_values(&labels).set(signed(workers));
                self.in_flight.with_label_values(&labels).set(signed(used));
            }
        }
    }

    /// Returns cluster and zone; a missing one is empty.
    fn labels<'a>(&self, location: &'a Location) -> [&'a str; 2] {
        let label = |label: &'a Option<String>| label.as_deref().unwrap_or("");
        if self.locations.has_room(location) { [label(&location.cluster), label(&location.zone)] } else { [OTHER; 2] }
    }
}
