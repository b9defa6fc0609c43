//! `GET /v1/models`, answered by the relay: one object that both APIs' SDKs can list.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use http::Request;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::paths::Endpoint;
use serde_json::{Value, json};

use super::auth::Caller;
use super::browser;
use super::respond::Client;
use crate::metrics::Outcome;
use crate::provider::Provider;
use crate::relay::Relay;

/// `GET /v1/models`
pub async fn list(State(relay): State<Arc<Relay>>, request: Request<Body>) -> Response {
    respond(&relay, &request, |caller, anthropic| {
        let created = created(&relay);
        let names = allowed_names(&relay, caller);
        let data: Vec<Value> = names.iter().map(|(name, owner)| entry(name, &owner.name, created, anthropic)).collect();
        let mut body = json!({ "object": "list", "data": data });
        if anthropic {
            body["has_more"] = json!(false);
            body["first_id"] = json!(names.first().map(|(name, _)| &**name));
            body["last_id"] = json!(names.last().map(|(name, _)| &**name));
        }
        Ok(body)
    })
}

/// `GET /v1/models/{id}`; ids hold `/` and `:`.
pub async fn one(State(relay): State<Arc<Relay>>, Path(id): Path<String>, request: Request<Body>) -> Response {
    respond(&relay, &request, |caller, anthropic| {
        let names = allowed_names(&relay, caller);
        let found = names.iter().find(|(name, _)| **name == *id);
        found.map(|(name, owner)| entry(name, &owner.name, created(&relay), anthropic)).ok_or_else(|| {
            let shown: String = id.chars().take(256).collect();
            ApiError::new(ErrorKind::ModelNotFound, format!("no provider for model {shown}"))
        })
    })
}

/// Answers with the JSON that is made for the caller, in Anthropic's dialect or not.
fn respond(
    relay: &Relay,
    request: &Request<Body>,
    make: impl FnOnce(&Caller, bool) -> Result<Value, ApiError>,
) -> Response {
    let (client, headers, config) = (Client::of(request), request.headers(), relay.shared.config.load());
    let made = browser::check_host(&config, headers)
        .and_then(|()| Caller::authenticate(relay, headers))
        .and_then(|caller| make(&caller, headers.contains_key("anthropic-version")));
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

pub(super) fn allowed_names(relay: &Relay, caller: &Caller) -> Vec<(Arc<str>, Arc<Provider>)> {
    let mut names = relay.providers.names();
    // A key may list an alias or the id behind it: what it may ask for, it may see.
    names.retain(|(name, provider)| {
        let config = provider.config();
        let id = config.resolve(name).unwrap_or(name);
        caller.allows_model(provider, &[name, id])
    });
    names
}

fn entry(name: &str, owner: &str, created: u64, anthropic: bool) -> Value {
    let mut entry = json!({ "id": name, "object": "model", "created": created, "owned_by": owner });
    if anthropic {
        let at = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(created)).to_string();
        entry["type"] = json!("model");
        entry["display_name"] = json!(name);
        entry["created_at"] = json!(at);
    }
    entry
}

/// Nobody knows when a model was made; that of the relay's start at least does not change between two calls.
fn created(relay: &Relay) -> u64 {
    let started = SystemTime::now() - relay.shared.started_at.elapsed();
    started.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
