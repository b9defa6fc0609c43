//! `GET /v1/models`, served by the relay itself: one object that both APIs' SDKs can list. In addition to its name, a
//! model has the limits and capabilities that its workers report, which agents use to configure themselves; `GET
//! /props` has the context length alone.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use http::Request;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::model_details::ModelDetails;
use modelrelay_protocol::paths::Endpoint;
use serde::Deserialize;
use serde_json::{Value, json};

use super::auth::Caller;
use super::browser;
use crate::http::respond::Client;
use crate::provider::Details;
use crate::provider::routing::Named;
use crate::state::Relay;
use crate::telemetry::metrics::Outcome;

/// `GET /v1/models`
pub async fn list(State(relay): State<Arc<Relay>>, request: Request<Body>) -> Response {
    respond(&relay, request, |caller, anthropic| {
        let created = created(&relay);
        let names = allowed_names(&relay, caller);
        let mut known = Known::default();
        let entry = |name: &Named| entry(name, created, &known.details(name), anthropic);
        let data: Vec<Value> = names.iter().map(entry).collect();
        let mut body = json!({ "object": "list", "data": data });
        if anthropic {
            body["has_more"] = json!(false);
            body["first_id"] = json!(names.first().map(|first| &*first.name));
            body["last_id"] = json!(names.last().map(|last| &*last.name));
        }
        Ok(body)
    })
    .await
}

/// `GET /v1/models/{id}`; ids may contain `/` and `:`.
pub async fn one(State(relay): State<Arc<Relay>>, Path(id): Path<String>, request: Request<Body>) -> Response {
    respond(&relay, request, |caller, anthropic| {
        let names = allowed_names(&relay, caller);
        let found = find(&relay, &names, &id).ok_or_else(|| not_found(&id))?;
        Ok(entry(found, created(&relay), &Known::default().details(found), anthropic))
    })
    .await
}

/// The query of `GET /props`.
#[derive(Deserialize)]
pub struct PropsQuery {
    model: Option<String>,
}

/// `GET /props`, in the format of a llama-server with several models. Without `model`, the context length is the
/// smallest of all.
pub async fn props(
    State(relay): State<Arc<Relay>>,
    wanted: Result<Query<PropsQuery>, QueryRejection>,
    request: Request<Body>,
) -> Response {
    let wanted = wanted.map(|Query(query)| query.model).unwrap_or_default();
    respond(&relay, request, |caller, _| {
        let mut names = allowed_names(&relay, caller);
        if let Some(model) = &wanted {
            let found = find(&relay, &names, model).ok_or_else(|| not_found(model))?;
            let name = Arc::clone(&found.name);
            names.retain(|named| named.name == name);
        }
        let mut known = Known::default();
        let lengths = names.iter().filter_map(|named| known.details(named).context_length());
        let mut settings = json!({ "params": {} });
        if let Some(smallest) = lengths.min() {
            settings["n_ctx"] = json!(smallest);
        }
        let alias = wanted.as_deref().unwrap_or("modelrelay");
        Ok(json!({ "model_alias": alias, "default_generation_settings": settings }))
    })
    .await
}

/// Returns the model of this name, or the one that a request for this name would be sent to.
fn find<'a>(relay: &Relay, names: &'a [Named], name: &str) -> Option<&'a Named> {
    let named = |name: &str| names.iter().find(|named| *named.name == *name);
    named(name).or_else(|| named(&relay.providers.route(None, name).ok()?.model))
}

/// The details of each provider, read once per response.
#[derive(Default)]
struct Known(HashMap<Arc<str>, Details>);

impl Known {
    fn details(&mut self, Named { name, model, provider }: &Named) -> ModelDetails {
        self.0.entry(Arc::clone(&provider.name)).or_insert_with(|| provider.details()).of(name, model)
    }
}

fn not_found(model: &str) -> ApiError {
    let shown: String = model.chars().take(256).collect();
    ApiError::new(ErrorKind::ModelNotFound, format!("no provider for model {shown}"))
}

/// Responds with the JSON that `make` returns for the caller, in Anthropic's dialect or not.
async fn respond(
    relay: &Relay,
    request: Request<Body>,
    make: impl FnOnce(&Caller, bool) -> Result<Value, ApiError>,
) -> Response {
    let (client, headers, config) = (Client::of(&request), request.headers(), relay.shared.config.load_full());
    let admitted = match browser::check_host(&config, headers) {
        Ok(()) => Caller::authenticate(relay, headers, request.extensions()).await,
        Err(error) => Err(error),
    };
    let made = admitted.and_then(|caller| make(&caller, headers.contains_key("anthropic-version")));
    let response = match made {
        Ok(body) => client.json(200, body.to_string().into_bytes()),
        Err(error) => {
            let outcome = Outcome::of_error(error.kind());
            relay.shared.metrics.unrouted_request_finished(Endpoint::Models, outcome, error.status());
            client.refuse(request.method(), request.uri(), &error)
        }
    };
    browser::share(&config, headers, response)
}

pub(super) fn allowed_names(relay: &Relay, caller: &Caller) -> Vec<Named> {
    let mut names = relay.providers.names();
    // A key may list an alias or the id behind it: it shows all names that it may request.
    names.retain(|named| caller.allows_model(&named.provider, &[&named.name, &named.model]));
    names
}

/// The relay's own fields come last, so that a worker's fields cannot replace them.
fn entry(Named { name, provider, .. }: &Named, created: u64, details: &ModelDetails, anthropic: bool) -> Value {
    let mut entry = Value::Object(details.fields().clone());
    entry["id"] = json!(**name);
    entry["object"] = json!("model");
    entry["created"] = json!(created);
    entry["owned_by"] = json!(*provider.name);
    if anthropic {
        let at = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(created)).to_string();
        entry["type"] = json!("model");
        entry["display_name"] = json!(**name);
        entry["created_at"] = json!(at);
    }
    entry
}

/// The creation time of a model is unknown; the time of the relay's start at least does not change between two calls.
fn created(relay: &Relay) -> u64 {
    let started = SystemTime::now() - relay.shared.started_at.elapsed();
    started.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
