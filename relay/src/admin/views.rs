//! The read-only views: workers, requests, queues, totals. Metadata only, never a prompt or a response.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::aside;
use super::residency::{self, Messages};
use crate::dispatch::WorkerKey;
use crate::http::problem::problem_in;
use crate::provider::{LiveRequest, Provider, WorkerState};
use crate::state::{Relay, gauges};

/// `GET /admin/workers`
pub(super) async fn workers(State(relay): State<Arc<Relay>>) -> Response {
    json_aside(move || {
        let workers = relay.all_providers().into_iter().flat_map(|p| p.snapshot().workers);
        let workers: Vec<Value> = workers.map(|w| worker(&w, Messages::Told)).collect();
        json!({ "workers": workers })
    })
    .await
}

async fn json_aside(build: impl FnOnce() -> Value + Send + 'static) -> Response {
    aside("application/json", move || build().to_string()).await
}

/// `GET /admin/stats`
pub(super) async fn stats(State(relay): State<Arc<Relay>>) -> Json<Value> {
    let (mut depth, mut in_flight, mut totals) = (Map::new(), Map::new(), Map::new());
    let mut active_workers = 0;
    for provider in relay.providers.all() {
        let state = provider.snapshot();
        depth.insert(provider.name.to_string(), json!(state.queue_depth));
        in_flight.insert(provider.name.to_string(), json!(state.in_flight));
        totals.insert(provider.name.to_string(), json!(provider.series.stats()));
        active_workers += state.workers.iter().filter(|worker| !worker.core.draining).count();
    }
    let budget = &relay.shared.budget;
    Json(json!({
        "queue_depth": depth,
        "active_workers": active_workers,
        "in_flight": in_flight,
        "providers": totals,
        "buffered_bytes": budget.used(),
        "unread_bytes": budget.unread(),
        "uptime_secs": relay.shared.started_at.elapsed().as_secs_f64(),
    }))
}

/// The optional parts of the snapshot.
#[derive(Deserialize)]
pub(super) struct Wanted {
    /// The slots of each model: as much data again as all slots of all workers.
    #[serde(default)]
    residency: bool,
}

/// `GET /admin/state`: one snapshot for machines. Large parts are left out, or included only on request: it is read
/// every few seconds, and its readers bound its size.
pub(super) async fn state(State(relay): State<Arc<Relay>>, wanted: Result<Query<Wanted>, QueryRejection>) -> Response {
    let Ok(Query(Wanted { residency })) = wanted else {
        let why = "residency must be true or false";
        return problem_in(StatusCode::BAD_REQUEST, "invalid_query", why, Some("residency"));
    };
    json_aside(move || state_of(&relay, residency)).await
}

fn state_of(relay: &Relay, residency: bool) -> Value {
    let status = relay.config_watch.status();
    let location = &relay.shared.config.load().location;
    let providers: Vec<Value> = relay.providers.all().iter().map(|p| provider(relay, p, residency)).collect();
    json!({
        "relay_id": relay.shared.relay_id,
        "zone": location.zone,
        "cluster": location.cluster,
        "version": env!("CARGO_PKG_VERSION"),
        "config_hash": status.hash,
        "config_loaded_at": time(status.loaded_at),
        "config_error": status.last_error,
        "api_keys_error": relay.keys.error(),
        "worker_tokens_error": relay.identities.error(),
        "client_tokens_error": relay.client_tokens.identities.error(),
        "phase": format!("{:?}", relay.shared.phase()).to_lowercase(),
        "providers": providers,
    })
}

/// `GET /admin/requests`
pub(super) async fn requests(State(relay): State<Arc<Relay>>) -> Response {
    json_aside(move || {
        let live = relay.all_providers();
        let of_provider = |provider: &Arc<Provider>| {
            let positions = provider.queue_positions();
            let live = provider.live_requests().into_iter();
            live.map(move |live| request(&live, positions.get(&live.record.key).copied()))
        };
        json!({ "requests": live.iter().flat_map(of_provider).collect::<Vec<_>>() })
    })
    .await
}

fn worker(worker: &WorkerState, messages: Messages) -> Value {
    let (info, core) = (&worker.link.info, &worker.core);
    json!({
        "worker_id": &*info.id,
        "provider": &*info.provider,
        "worker_name": &*info.name,
        "models": core.models.iter().map(AsRef::as_ref).collect::<Vec<&str>>(),
        "failing_models": core.failing.iter().map(AsRef::as_ref).collect::<Vec<&str>>(),
        "max_concurrent": core.max_concurrent,
        "reported_load": core.reported_load,
        "load": core.load,
        "in_flight_count": core.in_flight.len(),
        "is_draining": core.draining,
        "backlog_bytes": core.backlog,
        "cache_trust": f64::from(core.trust) / 1000.0,
        "cache_hit_rate": worker.link.prompt_tokens().hit_rate(),
        "connected_at": time(info.connected_at),
        "last_heartbeat_at": time(worker.link.heard_at()),
        "address": info.address.to_string(),
        "identity": info.credential.identity(),
        "version": info.version,
        "instance_id": info.instance.as_deref(),
        "pool": info.pool,
        "zone": info.location.zone,
        "cluster": info.location.cluster,
        "core1": core.core1,
        "grant": core.grant.map(|grant| json!({
            "slots": grant.slots, "others": grant.others, "capacity": grant.capacity, "links": grant.links,
        })),
        "slots": residency::slots(worker, messages),
        "gates": residency::gates(worker),
    })
}

fn provider(relay: &Relay, provider: &Provider, with_residency: bool) -> Value {
    let (state, config) = (provider.snapshot(), provider.config());
    let id_of = |key: WorkerKey| state.workers.iter().find(|worker| worker.core.key == key).map(|w| &*w.link.info.id);
    let models = gauges::models(&state, &config).map(|model| {
        json!({
            "id": &*model.model,
            "known": relay.providers.knows(provider, &model.model),
            "waiting": model.waiting,
            "oldest_ms": model.oldest.map(millis),
            "workers": model.workers,
            "open_workers": model.open_workers,
            "asked_worker": model.assigned.and_then(id_of),
            "residency": with_residency.then(|| residency::of_model(&model.model, &state.workers)),
            "in_flight": state.in_flight_by_model.get(&model.model).copied().unwrap_or(0),
        })
    });
    json!({
        "name": &*provider.name,
        "enabled": config.enabled,
        "queue_depth": state.queue_depth,
        "queue_bytes": state.queue_bytes,
        "oldest_ms": state.oldest_age.map(millis),
        "in_flight": state.in_flight,
        "usage": usage(relay, provider),
        "models": models.collect::<Vec<_>>(),
        "workers": state.workers.iter().map(|w| worker(w, Messages::LeftOut)).collect::<Vec<_>>(),
    })
}

/// The requests and tokens of a provider since the relay's start. Its time is to the second, because it is computed for
/// each response.
fn usage(relay: &Relay, provider: &Provider) -> Value {
    let (stats, now) = (provider.series.stats(), SystemTime::now());
    let since = now.checked_sub(relay.shared.started_at.elapsed()).unwrap_or(now);
    let tokens = |kind: &str| stats.tokens.get(kind).copied().unwrap_or(0);
    json!({
        "since": humantime::format_rfc3339_seconds(since).to_string(),
        "requests": stats.requests.values().sum::<u64>(),
        "input_tokens": tokens("input"),
        "output_tokens": tokens("output"),
    })
}

fn request(live: &LiveRequest, position: Option<usize>) -> Value {
    let (record, progress) = (&live.record, live.record.progress().clone());
    json!({
        "request_id": record.id,
        "provider": &*record.provider,
        "model": &*record.model,
        "endpoint": record.endpoint.as_str(),
        "state": live.stage(),
        "position": position,
        "stream": record.is_streaming,
        "worker": progress.worker.as_deref(),
        "attempts": progress.attempts,
        "placement": progress.placement(),
        "received_at": time(record.arrived),
        "age_ms": millis(record.received_at.elapsed()),
        "request_bytes": record.body_bytes,
    })
}

fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
