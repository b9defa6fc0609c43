//! The four supported requests.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::{NAMESPACE, Shared};

type Cluster = State<Arc<Shared>>;
type QueryParameters = Query<BTreeMap<String, String>>;

pub(super) fn router(shared: Arc<Shared>) -> Router {
    let scale = get(get_scale).patch(patch_scale);
    Router::new()
        .route(&format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{{name}}/scale"), scale)
        .route(&format!("/api/v1/namespaces/{NAMESPACE}/pods"), get(pods))
        .fallback(undocumented)
        .layer(from_fn_with_state(Arc::clone(&shared), take_time))
        .with_state(shared)
}

async fn take_time(State(shared): Cluster, request: Request, next: Next) -> Response {
    let delay = {
        let mut state = shared.state();
        state.received += 1;
        state.delay
    };
    #[expect(clippy::disallowed_methods, reason = "the pace of the API server that is played")]
    tokio::time::sleep(delay).await;
    next.run(request).await
}

async fn undocumented(State(shared): Cluster, method: axum::http::Method, uri: axum::http::Uri) -> Response {
    shared.state().requests.insert(format!("{method} {}", uri.path()));
    status(StatusCode::NOT_FOUND, "the server could not find the requested resource")
}

fn status(code: StatusCode, message: &str) -> Response {
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code.as_u16()});
    (code, axum::Json(status)).into_response()
}

/// Records the request, and returns the rejection if it is not allowed.
fn refusal(shared: &Shared, right: &str, headers: &HeaderMap) -> Option<Response> {
    let mut state = shared.state();
    state.requests.insert(right.to_owned());
    let hiccups = state.hiccups.get_mut(right).filter(|left| **left > 0);
    let is_hiccup = hiccups.map(|left| *left -= 1).is_some();
    state.turned_away += u32::from(state.is_away);
    if is_hiccup || state.is_away {
        return Some(status(StatusCode::SERVICE_UNAVAILABLE, "the server is currently unable to handle the request"));
    }
    if headers.get("authorization").is_none_or(|sent| *sent != *format!("Bearer {}", state.token)) {
        return Some(status(StatusCode::UNAUTHORIZED, "Unauthorized"));
    }
    if state.forbidden.contains(right) {
        let (verb, resource) = right.split_once(' ').unwrap_or_default();
        let account = format!("system:serviceaccount:{NAMESPACE}:worker");
        let message = format!("{resource} is forbidden: User \"{account}\" cannot {verb} resource \"{resource}\"");
        return Some(status(StatusCode::FORBIDDEN, &message));
    }
    None
}

async fn get_scale(State(shared): Cluster, Path(name): Path<String>, headers: HeaderMap) -> Response {
    refusal(&shared, "get deployments/scale", &headers).unwrap_or_else(|| scale_of(&shared, &name))
}

async fn patch_scale(
    State(shared): Cluster,
    Path(name): Path<String>,
    Query(query): QueryParameters,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if let Some(refused) = refusal(&shared, "patch deployments/scale", &headers) {
        return refused;
    }
    if headers.get("content-type").is_none_or(|kind| kind != "application/merge-patch+json") {
        return status(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the body of the request was in an unknown format");
    }
    let patch: Value = serde_json::from_slice(&body).unwrap_or_default();
    let Some(replicas) = patch["spec"]["replicas"].as_u64().and_then(|number| u32::try_from(number).ok()) else {
        return status(StatusCode::UNPROCESSABLE_ENTITY, "spec.replicas: Required value");
    };
    if query.get("dryRun").is_none_or(|kind| kind != "All") {
        shared.scale(&name, replicas);
    }
    scale_of(&shared, &name)
}

fn scale_of(shared: &Shared, name: &str) -> Response {
    let state = shared.state();
    let Some((_, replicas)) = state.deployments.get(name).filter(|_| !state.deleted.contains(name)) else {
        return status(StatusCode::NOT_FOUND, &format!("deployments.apps \"{name}\" not found"));
    };
    // As Go serializes it: an optional number is omitted if zero.
    let spec = if *replicas == 0 { json!({}) } else { json!({"replicas": replicas}) };
    let current = state.pods.values().filter(|pod| pod["metadata"]["labels"]["app"] == name).count();
    let scale = json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec, "status": {"replicas": current, "selector": format!("app={name}")},
    });
    axum::Json(scale).into_response()
}

async fn pods(State(shared): Cluster, Query(query): QueryParameters, headers: HeaderMap) -> Response {
    let Some(app) = query.get("labelSelector").and_then(|selector| selector.strip_prefix("app=")) else {
        return status(StatusCode::BAD_REQUEST, "no selector that is known here");
    };
    if query.get("watch").is_none_or(|watch| watch != "1") {
        return refusal(&shared, "list pods", &headers).unwrap_or_else(|| list(&shared, app));
    }
    if let Some(refused) = refusal(&shared, "watch pods", &headers) {
        return refused;
    }
    let number = |name: &str| query.get(name).and_then(|text| text.parse().ok());
    let from: u64 = number("resourceVersion").unwrap_or_default();
    let until = Instant::now() + Duration::from_secs(number("timeoutSeconds").unwrap_or(1800));
    watch(shared, app.to_owned(), from, until)
}

fn list(shared: &Shared, app: &str) -> Response {
    let state = shared.state();
    let items: Vec<_> = state.pods.values().filter(|pod| pod["metadata"]["labels"]["app"] == app).collect();
    let version = state.version.to_string();
    axum::Json(json!({"kind": "PodList", "metadata": {"resourceVersion": version}, "items": items})).into_response()
}

/// Sends one line per change, a bookmark first, in pieces that do not match lines.
fn watch(shared: Arc<Shared>, app: String, from: u64, until: Instant) -> Response {
    let bookmark =
        json!({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": from.to_string()}}});
    let pending = format!("{bookmark}\n").into_bytes();
    let begun = (shared, app, from, pending);
    let lines = stream::unfold(begun, move |(shared, app, mut sent_version, mut pending)| async move {
        let mut changes = shared.version.subscribe();
        while pending.is_empty() {
            changes.borrow_and_update();
            {
                let state = shared.state();
                if state.is_away {
                    return None;
                }
                if state.has_expired {
                    let error = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"});
                    sent_version = u64::MAX;
                    pending = format!("{}\n", json!({"type": "ERROR", "object": error})).into_bytes();
                } else if sent_version == u64::MAX {
                    return None;
                } else {
                    let new = state.log.iter().filter(|(version, _)| *version > sent_version);
                    let of_app = new.filter(|(_, event)| event["object"]["metadata"]["labels"]["app"] == app.as_str());
                    pending = of_app.flat_map(|(_, event)| format!("{event}\n").into_bytes()).collect();
                    sent_version = state.version;
                }
            }
            if pending.is_empty() && timeout_at(until, changes.changed()).await.is_err() {
                return None;
            }
        }
        let rest = pending.split_off(pending.len().div_ceil(2));
        Some((Ok::<_, Infallible>(Bytes::from(pending)), (shared, app, sent_version, rest)))
    });
    Body::from_stream(lines).into_response()
}
