//! Client API keys: list, create, revoke.

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
use crate::keys::{KeyRequest, KeyStoreError, NewKey};
use crate::login::actor::AuditDetail;
use crate::provider::Provider;
use crate::state::Relay;

/// The largest body; a key's name and limits fit easily.
const MAX_BODY_BYTES: usize = 64 << 10;

/// `GET /admin/keys`
pub(super) async fn list(State(relay): State<Arc<Relay>>) -> Response {
    Json(json!({ "keys": relay.keys.list() })).into_response()
}

/// `POST /admin/keys`
pub(super) async fn create(State(relay): State<Arc<Relay>>, body: Body) -> Response {
    let Some(body) = read_small(body, MAX_BODY_BYTES).await else {
        return problem(StatusCode::BAD_REQUEST, "invalid_json", "the body cannot be read or exceeds 64 KiB");
    };
    let wanted: KeyRequest = match serde_json::from_slice(&body) {
        Ok(wanted) => wanted,
        Err(error) => {
            return problem(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is invalid: {error}"));
        }
    };
    let request = match NewKey::try_from(wanted) {
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
        Ok(false) => problem(StatusCode::NOT_FOUND, "key_not_found", "no key with this id can be revoked"),
        Err(error) => store_problem(&error),
    }
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
