//! Client API keys: list, create, change, revoke.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::json;
use tracing::{info, warn};

use crate::dispatch::CancelReason;
use crate::http::body::read_small;
use crate::http::problem::problem;
use crate::keys::{KeyEdits, KeyFields, KeyStoreError, NewKey};
use crate::login::actor::AuditDetail;
use crate::provider::Provider;
use crate::state::Relay;

/// The largest body; a key's name and limits fit easily.
const MAX_BODY_BYTES: usize = 64 << 10;

/// `GET /admin/keys`: the keys, and the tenants, which act as keys but are part of the configuration.
pub(super) async fn list(State(relay): State<Arc<Relay>>) -> Response {
    let tenants = relay.client_tokens.tenants.load().list();
    Json(json!({ "keys": relay.keys.list(), "tenants": tenants })).into_response()
}

/// `POST /admin/keys`
pub(super) async fn create(State(relay): State<Arc<Relay>>, body: Body) -> Response {
    let fields = match read_fields(body).await {
        Ok(fields) => fields,
        Err(refusal) => return refusal,
    };
    let request = match NewKey::try_from(fields) {
        Ok(request) => request,
        Err(error) => return store_problem(&error),
    };
    match relay.keys.create(request).await {
        Ok(created) => {
            info!(key_id = created.info.id, name = created.info.name, "API key created");
            let mut body = json!(created.info);
            body["secret"] = json!(created.secret);
            let mut response = (StatusCode::CREATED, Json(body)).into_response();
            response.extensions_mut().insert(AuditDetail { subject: Some(created.info.id), detail: None });
            response
        }
        Err(error) => store_problem(&error),
    }
}

/// `PATCH /admin/keys/{id}`
pub(super) async fn update(State(relay): State<Arc<Relay>>, Path(id): Path<String>, body: Body) -> Response {
    let fields = match read_fields(body).await {
        Ok(fields) => fields,
        Err(refusal) => return refusal,
    };
    let changes = fields.to_string();
    let edits = match KeyEdits::try_from(fields) {
        Ok(edits) => edits,
        Err(error) => return store_problem(&error),
    };
    match relay.keys.update(&id, edits).await {
        Ok(Some(key)) => {
            info!(key_id = key.id, name = key.name, changes, "API key changed");
            let mut response = Json(key).into_response();
            response.extensions_mut().insert(AuditDetail { subject: None, detail: Some(changes) });
            response
        }
        Ok(None) => not_found(&relay, &id, "no key with this id can be changed"),
        Err(error) => store_problem(&error),
    }
}

/// `DELETE /admin/keys/{id}`
pub(super) async fn revoke(State(relay): State<Arc<Relay>>, Path(id): Path<String>) -> Response {
    match relay.keys.revoke(&id).await {
        Ok(true) => {
            let ended = end_requests(&relay, &id);
            info!(key_id = id, ended, "API key revoked");
            StatusCode::NO_CONTENT.into_response()
        }
        // The published relay responds the same: the key is revoked, as the caller wants.
        Ok(false) if relay.keys.snapshot().lookup(&id).is_some() => StatusCode::NO_CONTENT.into_response(),
        Ok(false) => not_found(&relay, &id, "no key with this id can be revoked"),
        Err(error) => store_problem(&error),
    }
}

fn not_found(relay: &Relay, id: &str, why: &'static str) -> Response {
    if relay.client_tokens.tenants.load().has(id) {
        let why = "this is a tenant, not a key: change tenants in the Provider's spec.relay or in relay.yaml";
        return problem(StatusCode::CONFLICT, "configured_tenant", why);
    }
    problem(StatusCode::NOT_FOUND, "key_not_found", why)
}

/// Reads the fields of a key; an error is the response.
async fn read_fields(body: Body) -> Result<KeyFields, Response> {
    let invalid = |why: String| problem(StatusCode::BAD_REQUEST, "invalid_json", why);
    let body = read_small(body, MAX_BODY_BYTES).await;
    let body = body.ok_or_else(|| invalid("the body cannot be read or exceeds 64 KiB".to_owned()))?;
    serde_json::from_slice(&body).map_err(|error| invalid(format!("the body is invalid: {error}")))
}

/// Ends the waiting and running requests of a revoked key at this relay; returns their number.
fn end_requests(relay: &Relay, id: &str) -> usize {
    let of_provider = |provider: Arc<Provider>| {
        let requests = provider.requests_of_key(id);
        requests.iter().for_each(|request| provider.cancel(*request, CancelReason::Admin));
        requests.len()
    };
    relay.all_providers().into_iter().map(of_provider).sum()
}

fn store_problem(error: &KeyStoreError) -> Response {
    let (status, code) = match error {
        KeyStoreError::Invalid(_) => (StatusCode::BAD_REQUEST, "invalid_key"),
        KeyStoreError::Full(_) => (StatusCode::CONFLICT, "too_many_keys"),
        KeyStoreError::Unavailable(_) => {
            warn!(%error, "cannot store API keys");
            (StatusCode::SERVICE_UNAVAILABLE, "key_store_unavailable")
        }
    };
    problem(status, code, error.to_string())
}
