//! Probes the backend: whether it is alive, and which models it serves.

use std::collections::BTreeMap;
use std::time::Duration;

use http::StatusCode;
use modelrelay_protocol::model_details::ModelDetails;
use serde::Deserialize;
use serde_json::Value;

use super::{Backend, BackendError};
use crate::settings::Engine;

/// The timeout of a probe. A backend that computes may be slow to respond, but not this slow.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// The most bytes that are read of a health check's body.
const MAX_HEALTH_BYTES: usize = 4 << 10;

/// The reason to reject a relay as a backend.
const IS_RELAY: &str = "BACKEND_URL points to a ModelRelay relay; set it to the address of the inference server";

/// The most bytes of a list of models.
const MAX_LIST_BYTES: usize = 4 << 20;

/// The result of a probe.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// It accepts requests.
    Alive,
    /// It is running, but does not accept requests yet.
    NotReady(String),
    /// It does not respond: it may only be busy.
    Silent(String),
    /// It is not running.
    Gone(String),
}

/// The result of a request for the models.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    /// The models' ids, their details by id, the number of entries without an id, and the owner of the first.
    Models { listed: Vec<String>, details: BTreeMap<String, ModelDetails>, odd: usize, owner: Option<String> },
    /// The list could not be read.
    Failed(String),
}

/// Probes the backend as its engine requires. SGLang's `/health` generates a token, its newer `/ready` does not.
pub(crate) async fn probe(backend: &Backend) -> Health {
    let engine = backend.settings().engine;
    let paths: &[&str] = match engine {
        Engine::Sglang => &["/ready", "/health"],
        Engine::Vllm | Engine::LlamaServer | Engine::OpenAi => &["/health"],
        Engine::Ollama => &[],
    };
    for path in paths {
        match find(backend, path).await {
            // The backend has no such route.
            Ok(Some(ProbeReply { status: StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, .. })) => {}
            found => return judge(engine, path, found),
        }
    }
    judge(Engine::OpenAi, "/v1/models", find(backend, "/v1/models").await)
}

/// Reads `/v1/models`.
pub(crate) async fn list(backend: &Backend) -> Listing {
    match read(backend).await {
        Ok((entries, odd)) => {
            let owner = owner(&entries);
            let details = entries.iter().map(|entry| (entry.id.trim().to_owned(), entry.details.clone())).collect();
            Listing::Models { listed: entries.into_iter().map(|entry| entry.id).collect(), details, odd, owner }
        }
        Err(why) => Listing::Failed(why),
    }
}

/// The models that a backend lists.
#[derive(Debug)]
pub struct Listed {
    /// The ids of its models.
    pub models: Vec<String>,
    /// The owner of the first, by which most servers identify themselves.
    pub owner: Option<String>,
}

/// Lists the models once. The error is human-readable.
pub async fn listed_models(backend: &Backend) -> Result<Listed, String> {
    let (entries, _) = read(backend).await?;
    let owner = owner(&entries);
    Ok(Listed { models: entries.into_iter().map(|entry| entry.id).collect(), owner })
}

fn owner(entries: &[ListedModel]) -> Option<String> {
    entries.first().and_then(|entry| entry.owned_by.as_str().map(str::to_owned))
}

async fn read(backend: &Backend) -> Result<(Vec<ListedModel>, usize), String> {
    let read = async {
        let mut answer = backend.fetch("/v1/models").await.map_err(|error| error.to_string())?;
        match answer.head.status {
            StatusCode::OK => {}
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                return Err(format!(
                    "/v1/models returned {status}: the backend requires an API key; set BACKEND_API_KEY_FILE"
                ));
            }
            status => return Err(format!("/v1/models returned {status}")),
        }
        let body = answer.read_all(MAX_LIST_BYTES).await?;
        parse(&body)
    };
    tokio::time::timeout(TIMEOUT, read)
        .await
        .unwrap_or_else(|_| Err("/v1/models did not respond within 5 s".to_owned()))
}

/// The response to a probe.
struct ProbeReply {
    status: StatusCode,
    is_relay: bool,
}

/// Returns the response at a path, `None` on a timeout.
async fn find(backend: &Backend, path: &str) -> Result<Option<ProbeReply>, BackendError> {
    let found = async {
        let mut answer = backend.fetch(path).await?;
        let status = answer.head.status;
        // A list of models may be long, and a body without a length may be endless.
        let is_short = answer.content_length().is_some_and(|length| length <= MAX_HEALTH_BYTES as u64);
        let body = if is_short { answer.read_all(MAX_HEALTH_BYTES).await.unwrap_or_default() } else { Vec::new() };
        Ok::<_, BackendError>(ProbeReply { status, is_relay: is_relays(&body) })
    };
    tokio::time::timeout(TIMEOUT, found).await.map_or(Ok(None), |found| found.map(Some))
}

/// True if a ModelRelay relay responds. Requests to it would loop back to the worker.
pub async fn is_relay(backend: &Backend) -> bool {
    matches!(find(backend, "/health").await, Ok(Some(ProbeReply { is_relay: true, .. })))
}

/// True for the body that a relay's `/health` returns.
fn is_relays(body: &[u8]) -> bool {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    body.get("workers_connected").is_some()
}

fn judge(engine: Engine, path: &str, found: Result<Option<ProbeReply>, BackendError>) -> Health {
    match found {
        Ok(Some(ProbeReply { is_relay: true, .. })) => Health::NotReady(IS_RELAY.to_owned()),
        Ok(Some(ProbeReply { status, .. })) if is_alive(engine, status) => Health::Alive,
        Ok(Some(ProbeReply { status, .. })) => Health::NotReady(format!("{path} returned {status}")),
        Ok(None) => Health::Silent(format!("{path} did not respond within 5 s")),
        Err(BackendError::Unreachable(error)) => Health::Gone(error.to_string()),
        Err(BackendError::Reset(why) | BackendError::BadAnswer(why)) => Health::NotReady(why),
    }
}

fn is_alive(engine: Engine, status: StatusCode) -> bool {
    match engine {
        Engine::Vllm | Engine::Sglang | Engine::LlamaServer => status.is_success(),
        // An unknown server may require a key, or have another page there. Only a server error means that it cannot
        // serve.
        Engine::Ollama | Engine::OpenAi => !status.is_server_error(),
    }
}

#[derive(Deserialize)]
struct List {
    // Required: an object without it is no list. With this attribute, serde no longer accepts a missing `Option`.
    #[serde(deserialize_with = "Option::deserialize")]
    data: Option<Vec<Value>>,
    /// llama-server's second list, with fields that its first one lacks.
    #[serde(default)]
    models: Value,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    // Of any type: the catalogue does not depend on it.
    #[serde(default)]
    owned_by: Value,
    #[serde(skip)]
    details: ModelDetails,
}

impl ListedModel {
    fn parse(mut entry: Value, others: &Value) -> Option<Self> {
        let id = entry.get("id")?.as_str()?;
        if entry.get("capabilities").is_none()
            && let Some(capabilities) = capabilities(others, id)
        {
            entry["capabilities"] = capabilities;
        }
        let details = ModelDetails::listed(&entry);
        Some(Self { details, ..serde_json::from_value(entry).ok()? })
    }
}

/// Returns a model's capabilities in a second list.
fn capabilities(others: &Value, id: &str) -> Option<Value> {
    let of_model =
        |other: &&Value| other.get("name").or_else(|| other.get("model")).and_then(Value::as_str) == Some(id);
    others.as_array()?.iter().find(of_model)?.get("capabilities").cloned()
}

/// Parses a list: its entries, and the number of those without an id. Ollama returns null if it has no model.
fn parse(body: &[u8]) -> Result<(Vec<ListedModel>, usize), String> {
    let list: List =
        serde_json::from_slice(body).map_err(|error| format!("/v1/models returned no list of models: {error}"))?;
    let listed = list.data.unwrap_or_default();
    let count = listed.len();
    let entries: Vec<ListedModel> =
        listed.into_iter().filter_map(|entry| ListedModel::parse(entry, &list.models)).collect();
    let odd = count - entries.len();
    Ok((entries, odd))
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::{get, post};
    use http::HeaderMap;
    use serde_json::json;

    use super::*;
    use crate::settings::BackendSettings;

    #[test]
    fn engine_health_check_must_return_success() {
        for engine in [Engine::Vllm, Engine::LlamaServer, Engine::Sglang] {
            assert!(is_alive(engine, StatusCode::OK));
            assert!(!is_alive(engine, StatusCode::SERVICE_UNAVAILABLE) && !is_alive(engine, StatusCode::UNAUTHORIZED));
        }
    }

    #[test]
    fn unknown_engine_fails_only_on_server_error() {
        for status in [StatusCode::OK, StatusCode::UNAUTHORIZED, StatusCode::FOUND] {
            assert!(is_alive(Engine::OpenAi, status), "{status}");
        }
        for status in [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::BAD_GATEWAY, StatusCode::SERVICE_UNAVAILABLE] {
            assert!(!is_alive(Engine::OpenAi, status), "{status}");
        }
    }

    #[test]
    fn list_yields_its_ids() {
        let body = br#"{"object":"list","data":[{"id":"a","object":"model"},{"id":"b/c:1"}]}"#;
        let ids: Vec<_> = parse(body).unwrap().0.into_iter().map(|entry| entry.id).collect();
        assert_eq!(ids, ["a", "b/c:1"]);
        assert!(parse(br#"{"object":"list","data":null}"#).unwrap().0.is_empty());
        assert!(parse(b"{}").is_err() && parse(b"<html>").is_err());
    }

    #[test]
    fn malformed_entry_does_not_hide_others() {
        let (entries, odd) = parse(br#"{"data":[{"id":"a"},{"name":"b"},"c",{"id":4},null,{"id":"d"}]}"#).unwrap();
        let ids: Vec<_> = entries.into_iter().map(|entry| entry.id).collect();
        assert_eq!((ids, odd), (vec!["a".to_owned(), "d".to_owned()], 4));
    }

    fn details_of(body: &Value) -> Vec<Value> {
        let details = |entry: ListedModel| Value::Object(entry.details.fields().clone());
        parse(body.to_string().as_bytes()).unwrap().0.into_iter().map(details).collect()
    }

    #[test]
    fn list_yields_model_details() {
        let body = json!({"data": [
            {"id": "a", "max_model_len": 40960, "owned_by": "vllm", "root": "x"},
            {"id": "b", "max_model_len": "many", "meta": 5},
        ]});
        assert_eq!(details_of(&body), [json!({"max_model_len": 40960}), json!({})]);
    }

    #[test]
    fn capabilities_in_second_list_are_found() {
        let body = json!({
            "models": [{"name": "a", "model": "a", "capabilities": ["completion", "multimodal"]}, 7],
            "data": [{"id": "a", "meta": {"n_ctx": 4096}}, {"id": "b"}],
        });
        let expected = json!({"capabilities": ["completion", "multimodal"], "meta": {"n_ctx": 4096}});
        assert_eq!(details_of(&body), [expected, json!({})]);
        assert_eq!(details_of(&json!({"models": "a", "data": [{"id": "a"}]})), [json!({})]);
    }

    #[test]
    fn relay_is_recognised_by_its_health() {
        assert!(is_relays(br#"{"status":"ok","version":"0.3.0","workers_connected":1,"queue_depth":0}"#));
        assert!(!is_relays(br#"{"status":"ok"}"#) && !is_relays(b"") && !is_relays(b"OK"));
    }

    async fn probed(engine: Engine, router: Router) -> Health {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        drop(tokio::spawn(async move { axum::serve(listener, router).await }));
        let settings = BackendSettings { url, engine, api_key: None, headers: HeaderMap::new() };
        probe(&Backend::new(settings)).await
    }

    #[tokio::test]
    async fn missing_health_path_is_no_failure() {
        let without = || Router::new().route("/v1/models", get(async || "{}"));
        for engine in [Engine::Vllm, Engine::OpenAi] {
            assert_eq!(probed(engine, without()).await, Health::Alive);
            let post_only = without().route("/health", post(async || "ok"));
            assert_eq!(probed(engine, post_only).await, Health::Alive);
        }
    }

    #[tokio::test]
    async fn sglang_probe_prefers_cheaper_path() {
        let old = || Router::new().route("/health", get(async || "ok"));
        assert_eq!(probed(Engine::Sglang, old()).await, Health::Alive);
        let loading = old().route("/ready", get(async || StatusCode::SERVICE_UNAVAILABLE));
        assert!(matches!(probed(Engine::Sglang, loading).await, Health::NotReady(_)));
    }

    #[tokio::test]
    async fn relay_is_not_ready() {
        let relay = Router::new().route("/health", get(async || r#"{"status":"ok","workers_connected":0}"#));
        assert_eq!(probed(Engine::OpenAi, relay).await, Health::NotReady(IS_RELAY.to_owned()));
    }
}
