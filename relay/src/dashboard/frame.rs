//! The state that the dashboard shows at one moment, and the changes since another.
//!
//! Each part is stored as the text that is sent, so that a part has changed exactly if its text has. Times are points
//! in time, to the second: an age would change in every frame.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use modelrelay_protocol::message::Slot;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::history::Point;
use super::{Dashboard, unix_millis_rounded};
use crate::dispatch::{RequestKey, RequestPlace, WorkerKey};
use crate::provider::{LiveRequest, Provider, ProviderState, WorkerState};
use crate::state::{Relay, gauges};
use crate::system::unix_time::unix_millis;

/// The most models of a provider, the busiest first.
const MAX_MODELS: usize = 200;
/// The most models of a worker.
const MAX_WORKER_MODELS: usize = 50;
/// The most requests, the oldest first.
const MAX_REQUESTS: usize = 500;
/// The most entries of the event log in a snapshot.
const MAX_JOURNAL: usize = 200;

type Parts = BTreeMap<Arc<str>, String>;

/// The whole state at one moment.
#[derive(Default)]
pub(super) struct Frame {
    at: u64,
    relay: String,
    providers: Parts,
    workers: Parts,
    requests: Parts,
    requests_total: usize,
    /// The positions of those that wait, as an object. Each one that is sent changes many, so they are not in
    /// `requests`.
    positions: String,
    /// The newest point of the history.
    point: Option<Arc<Point>>,
    journal_seq: u64,
}

impl Frame {
    pub(super) fn of(dashboard: &Dashboard) -> Self {
        let relay = &dashboard.relay;
        let now = SystemTime::now();
        let mut frame = Self {
            at: unix_millis(now),
            relay: overview(relay, now).to_string(),
            point: dashboard.history.last(),
            journal_seq: dashboard.journal.since(0).last().map_or(0, |entry| entry.seq),
            ..Self::default()
        };
        let (mut live, mut ids, mut positions) = (Vec::new(), HashMap::new(), BTreeMap::new());
        for provider in relay.all_providers() {
            let state = provider.snapshot();
            let part = provider_part(relay, &provider, &state, now);
            frame.providers.insert(Arc::clone(&provider.name), part.to_string());
            for worker in &state.workers {
                frame.workers.insert(Arc::clone(&worker.link.info.id), worker_part(worker, now).to_string());
                ids.insert(worker.core.key, Arc::clone(&worker.link.info.id));
            }
            live.extend(provider.live_requests());
            if state.queue_depth > 0 {
                positions.append(&mut provider.queue_positions());
            }
        }
        frame.requests_total = live.len();
        live.sort_by_key(|request| request.record.received_at);
        live.truncate(MAX_REQUESTS);
        for request in &live {
            frame.requests.insert(request.record.id.as_str().into(), request_part(request, &ids).to_string());
        }
        frame.positions = positions_part(&live, &positions).to_string();
        frame
    }

    /// The whole state, for a new page.
    pub(super) fn snapshot(&self, dashboard: &Dashboard) -> String {
        let last = self.point.as_ref().map_or(0, |point| point.at);
        let points = dashboard.history.points();
        let points: Vec<_> = points.iter().map(AsRef::as_ref).filter(|point: &&Point| point.at <= last).collect();
        let mut journal = dashboard.journal.since(0);
        journal.retain(|entry| entry.seq <= self.journal_seq);
        let journal = journal.split_off(journal.len().saturating_sub(MAX_JOURNAL));
        let mut parts = Map::new();
        parts.insert("at".into(), self.at.into());
        parts.insert("requests_total".into(), self.requests_total.into());
        parts.insert(
            "history".into(),
            json!({ "interval_ms": super::history::INTERVAL.as_millis() as u64, "points": points }),
        );
        parts.insert("journal".into(), json!(journal));
        let lists = [("providers", &self.providers), ("workers", &self.workers), ("requests", &self.requests)];
        let lists = lists.map(|(name, parts)| (name, raw_list(parts.values())));
        let objects = [("relay", raw(&self.relay)), ("positions", raw(&self.positions))];
        written(parts, objects.into_iter().chain(lists))
    }

    /// The changes since `before`; `None` if there are none.
    pub(super) fn changes_since(&self, before: &Self, dashboard: &Dashboard) -> Option<String> {
        let (mut parts, mut lists) = (Map::new(), Vec::new());
        if self.relay != before.relay {
            lists.push(("relay", raw(&self.relay)));
        }
        if self.positions != before.positions {
            lists.push(("positions", raw(&self.positions)));
        }
        let kinds = [
            (("providers", "gone_providers"), &self.providers, &before.providers),
            (("workers", "gone_workers"), &self.workers, &before.workers),
            (("requests", "gone_requests"), &self.requests, &before.requests),
        ];
        for ((name, gone_name), now, then) in kinds {
            let changed: Vec<_> = now.iter().filter(|(id, text)| then.get(*id) != Some(text)).collect();
            if !changed.is_empty() {
                lists.push((name, raw_list(changed.into_iter().map(|(_, text)| text))));
            }
            let gone: Vec<&str> = then.keys().filter(|id| !now.contains_key(*id)).map(|id| &**id).collect();
            if !gone.is_empty() {
                parts.insert(gone_name.into(), json!(gone));
            }
        }
        if self.requests_total != before.requests_total {
            parts.insert("requests_total".into(), self.requests_total.into());
        }
        if self.point.as_ref().map(|point| point.at) != before.point.as_ref().map(|point| point.at) {
            parts.insert("point".into(), json!(self.point.as_deref()));
        }
        if self.journal_seq != before.journal_seq {
            let mut journal = dashboard.journal.since(before.journal_seq);
            journal.retain(|entry| entry.seq <= self.journal_seq);
            parts.insert("journal".into(), json!(journal));
        }
        if parts.is_empty() && lists.is_empty() {
            return None;
        }
        parts.insert("at".into(), self.at.into());
        Some(written(parts, lists))
    }

    /// The message without changes, which shows a page that its connection still works.
    pub(super) fn heartbeat(&self) -> String {
        json!({ "at": self.at }).to_string()
    }
}

/// Serializes an object of values and of texts that are JSON already.
fn written(values: Map<String, Value>, texts: impl IntoIterator<Item = (&'static str, Box<RawValue>)>) -> String {
    let values = values.into_iter().map(|(name, value)| (name, raw(&value.to_string())));
    let all: BTreeMap<String, Box<RawValue>> =
        values.chain(texts.into_iter().map(|(name, text)| (name.to_owned(), text))).collect();
    serde_json::to_string(&all).unwrap_or_default()
}

fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap_or_default()
}

fn raw_list<'a>(texts: impl Iterator<Item = &'a String>) -> Box<RawValue> {
    let mut list = String::from("[");
    for text in texts {
        if list.len() > 1 {
            list.push(',');
        }
        list.push_str(text);
    }
    list.push(']');
    raw(&list)
}

fn overview(relay: &Relay, now: SystemTime) -> Value {
    let (shared, status) = (&relay.shared, relay.config_watch.status());
    let started = now.checked_sub(shared.started_at.elapsed()).unwrap_or(now);
    json!({
        "relay_id": shared.relay_id,
        "version": env!("CARGO_PKG_VERSION"),
        "phase": format!("{:?}", shared.phase()).to_lowercase(),
        "started_at": unix_millis_rounded(started),
        "buffered_bytes": shared.budget.used(),
        "buffered_bytes_limit": shared.budget.limit(),
        "config_hash": status.hash,
        "config_error": status.last_error,
        "api_keys_error": relay.keys.error(),
        "client_tokens_error": relay.client_tokens.identities.error(),
        "require_api_keys": shared.config.load().require_api_keys,
    })
}

fn provider_part(relay: &Relay, provider: &Provider, state: &ProviderState, now: SystemTime) -> Value {
    let config = provider.config();
    let name_of = |key: WorkerKey| {
        let worker = state.workers.iter().find(|worker| worker.core.key == key);
        worker.map(|worker| &*worker.link.info.name)
    };
    let in_flight = |model: &str| state.in_flight_by_model.get(model).copied().unwrap_or(0);
    let mut models: Vec<_> = gauges::models(state, &config).collect();
    let total = models.len();
    models.sort_by_cached_key(|model| {
        (std::cmp::Reverse(u64::from(model.waiting) + in_flight(&model.model)), Arc::clone(&model.model))
    });
    let part = |model: &crate::dispatch::ModelSnapshot| {
        json!({
            "id": &*model.model,
            "known": relay.providers.knows(provider, &model.model),
            "waiting": model.waiting,
            "oldest_at": model.oldest.map(|age| before(now, age)),
            "in_flight": in_flight(&model.model),
            "workers": model.workers,
            "open_workers": model.open_workers,
            "asked_worker": model.assigned.and_then(name_of),
        })
    };
    let sum = |of: fn(&WorkerState) -> u32| state.workers.iter().map(|worker| u64::from(of(worker))).sum::<u64>();
    json!({
        "name": &*provider.name,
        "enabled": config.enabled,
        "queue_depth": state.queue_depth,
        "queue_capacity": config.max_queue_len,
        "oldest_at": state.oldest_age.map(|age| before(now, age)),
        "in_flight": state.in_flight,
        "workers": state.workers.len(),
        "draining_workers": state.workers.iter().filter(|worker| worker.core.draining).count(),
        "load": sum(|worker| worker.core.load),
        "capacity": sum(|worker| worker.core.max_concurrent),
        "models": models.iter().take(MAX_MODELS).map(part).collect::<Vec<_>>(),
        "models_total": total,
        "totals": provider.series.stats(),
    })
}

fn worker_part(worker: &WorkerState, now: SystemTime) -> Value {
    let (info, core) = (&worker.link.info, &worker.core);
    json!({
        "worker_id": &*info.id,
        "provider": &*info.provider,
        "name": &*info.name,
        "models": core.models.iter().take(MAX_WORKER_MODELS).map(AsRef::as_ref).collect::<Vec<&str>>(),
        "models_total": core.models.len(),
        "failing_models": core.failing.iter().take(MAX_WORKER_MODELS).map(AsRef::as_ref).collect::<Vec<&str>>(),
        "capacity": core.max_concurrent,
        "load": core.load,
        "in_flight": core.in_flight.len(),
        "draining": core.draining,
        "backlog_bytes": core.backlog,
        "cache_trust": f64::from(core.trust) / 1000.0,
        "cache_hit_rate": worker.link.prompt_tokens().hit_rate(),
        "connected_at": unix_millis(info.connected_at),
        "address": info.address.to_string(),
        "version": info.version,
        "instance_id": info.instance.as_deref(),
        "pool": info.pool,
        "zone": info.location.zone,
        "cluster": info.location.cluster,
        "rtt_ms": (worker.link.round_trip().as_secs_f64() * 1e4).round() / 10.0,
        "slots": slots_part(worker, now),
    })
}

fn slots_part(worker: &WorkerState, now: SystemTime) -> Option<Vec<Value>> {
    if !worker.link.info.slots1 {
        return None;
    }
    let (slots, age) = worker.link.slots();
    let reported_at = now.checked_sub(age).unwrap_or(now);
    let part = |slot: &Slot| {
        let models = slot.models.iter().take(MAX_WORKER_MODELS).map(|model| {
            json!({
                "id": model.id,
                "status": model.status,
                "pinned": model.pinned,
                "wanted": model.wanted,
                "message": model.message,
            })
        });
        let failure = worker
            .link
            .last_failure(&slot.id)
            .map(|failure| json!({ "model": failure.model, "code": failure.code, "message": failure.message }));
        json!({
            "id": slot.id,
            "state": slot.state,
            "resident": slot.resident,
            "target": slot.target,
            "since": before(reported_at, Duration::from_millis(slot.since_ms)),
            "eta": slot.eta_ms.map(|eta| unix_millis_rounded(reported_at + Duration::from_millis(eta.min(MAX_ETA_MS)))),
            "models": models.collect::<Vec<_>>(),
            "last_failure": failure,
        })
    };
    Some(slots.iter().map(part).collect())
}

/// The most time that a worker may state: a day. It keeps the relay's clock from overflowing.
const MAX_ETA_MS: u64 = 86_400_000;

fn request_part(live: &LiveRequest, ids: &HashMap<WorkerKey, Arc<str>>) -> Value {
    let (record, progress) = (&live.record, live.record.progress().clone());
    let worker = match live.place {
        Some(RequestPlace::Running { worker, .. }) => Some(worker),
        Some(RequestPlace::Queued) | None => None,
    };
    json!({
        "request_id": record.id,
        "provider": &*record.provider,
        "model": &*record.model,
        "endpoint": record.endpoint.as_str(),
        "state": live.stage(),
        "stream": record.is_streaming,
        "worker": worker.and_then(|worker| ids.get(&worker)).map(AsRef::as_ref),
        "attempts": progress.attempts,
        "placement": progress.placement(),
        "received_at": unix_millis(record.arrived),
        "request_bytes": record.body_bytes,
    })
}

/// Returns the position of each of these requests that waits, by its id.
fn positions_part(live: &[LiveRequest], positions: &BTreeMap<RequestKey, usize>) -> Value {
    let position =
        |live: &LiveRequest| Some((live.record.id.clone(), positions.get(&live.record.key).copied()?.into()));
    Value::Object(live.iter().filter_map(position).collect())
}

fn before(now: SystemTime, age: Duration) -> u64 {
    unix_millis_rounded(now.checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH))
}
