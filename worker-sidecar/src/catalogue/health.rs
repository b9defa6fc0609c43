//! Asking the backend: is it alive, and what does it serve.

use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;

use crate::backend::{Backend, BackendError};
use crate::config::Engine;

/// A backend that computes may be slow to answer, but not this slow.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// A list of models at most.
const MAX_LIST_BYTES: usize = 4 << 20;

/// What a probe found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// It can be asked.
    Alive,
    /// Something is there that cannot be asked yet.
    NotReady(String),
    /// Something is there that says nothing: it may only be busy.
    Silent(String),
    /// Nothing is there.
    Gone(String),
}

/// What asking for models gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Listing {
    /// Their ids.
    Models(Vec<String>),
    /// No list.
    Failed(String),
}

/// Probes the backend as its engine requires. SGLang's `/health` generates a token, its newer `/ready` does not.
pub(super) async fn probe(backend: &Backend) -> Health {
    let engine = backend.settings().engine;
    let paths: &[&str] = match engine {
        Engine::Sglang => &["/ready", "/health"],
        Engine::Vllm | Engine::LlamaServer | Engine::OpenAi => &["/health"],
        Engine::Ollama => &[],
    };
    for path in paths {
        match status(backend, path).await {
            // There is no such route.
            Ok(Some(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)) => {}
            found => return judge(engine, path, found),
        }
    }
    judge(Engine::OpenAi, "/v1/models", status(backend, "/v1/models").await)
}

/// Reads `/v1/models`.
pub(super) async fn list(backend: &Backend) -> Listing {
    match read(backend).await {
        Ok(entries) => Listing::Models(entries.into_iter().map(|entry| entry.id).collect()),
        Err(why) => Listing::Failed(why),
    }
}

/// What a backend lists.
#[derive(Debug)]
pub struct Listed {
    /// The ids of its models.
    pub models: Vec<String>,
    /// Who owns the first, by which most servers name themselves.
    pub owner: Option<String>,
}

/// The same, once and for people: an error says why there is no list.
pub async fn look(backend: &Backend) -> Result<Listed, String> {
    let entries = read(backend).await?;
    let owner = entries.first().and_then(|entry| entry.owned_by.as_str().map(str::to_owned));
    Ok(Listed { models: entries.into_iter().map(|entry| entry.id).collect(), owner })
}

async fn read(backend: &Backend) -> Result<Vec<Entry>, String> {
    let read = async {
        let mut answer = backend.ask("/v1/models").await.map_err(|error| error.to_string())?;
        match answer.head.status {
            StatusCode::OK => {}
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                return Err(format!("/v1/models answers {status}: it wants an API key, as BACKEND_API_KEY_FILE"));
            }
            status => return Err(format!("/v1/models answers {status}")),
        }
        let body = answer.read_all(MAX_LIST_BYTES).await?;
        parse(&body)
    };
    tokio::time::timeout(TIMEOUT, read).await.unwrap_or_else(|_| Err("/v1/models takes more than 5 s".to_owned()))
}

/// The status of an answer, `None` when it takes too long.
async fn status(backend: &Backend, path: &str) -> Result<Option<StatusCode>, BackendError> {
    match tokio::time::timeout(TIMEOUT, backend.ask(path)).await {
        Ok(answer) => answer.map(|answer| Some(answer.head.status)),
        Err(_) => Ok(None),
    }
}

fn judge(engine: Engine, path: &str, found: Result<Option<StatusCode>, BackendError>) -> Health {
    match found {
        Ok(Some(status)) if is_alive(engine, status) => Health::Alive,
        Ok(Some(status)) => Health::NotReady(format!("{path} answers {status}")),
        Ok(None) => Health::Silent(format!("{path} takes more than 5 s")),
        Err(BackendError::Unreachable(error)) => Health::Gone(error.to_string()),
        Err(BackendError::Reset(why) | BackendError::BadAnswer(why)) => Health::NotReady(why),
    }
}

fn is_alive(engine: Engine, status: StatusCode) -> bool {
    match engine {
        Engine::Vllm | Engine::Sglang | Engine::LlamaServer => status.is_success(),
        // An unknown program may want a key, or have another page there. Only a server error means that it cannot serve.
        Engine::Ollama | Engine::OpenAi => !status.is_server_error(),
    }
}

#[derive(Deserialize)]
struct List {
    // Required: an object without it is no list. With this attribute an `Option` may no longer be left out.
    #[serde(deserialize_with = "Option::deserialize")]
    data: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
    // Whatever it is: nothing of the catalogue depends on it.
    #[serde(default)]
    owned_by: serde_json::Value,
}

/// Ollama says null where it has no model.
fn parse(body: &[u8]) -> Result<Vec<Entry>, String> {
    let list: List =
        serde_json::from_slice(body).map_err(|error| format!("/v1/models is no list of models: {error}"))?;
    Ok(list.data.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_with_a_health_check_must_pass_it() {
        for engine in [Engine::Vllm, Engine::LlamaServer, Engine::Sglang] {
            assert!(is_alive(engine, StatusCode::OK));
            assert!(!is_alive(engine, StatusCode::SERVICE_UNAVAILABLE) && !is_alive(engine, StatusCode::UNAUTHORIZED));
        }
    }

    #[test]
    fn unknown_program_fails_only_by_a_server_error() {
        for status in [StatusCode::OK, StatusCode::UNAUTHORIZED, StatusCode::FOUND] {
            assert!(is_alive(Engine::OpenAi, status), "{status}");
        }
        for status in [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::BAD_GATEWAY, StatusCode::SERVICE_UNAVAILABLE] {
            assert!(!is_alive(Engine::OpenAi, status), "{status}");
        }
    }

    #[test]
    fn a_list_gives_its_ids() {
        let body = br#"{"object":"list","data":[{"id":"a","object":"model"},{"id":"b/c:1"}]}"#;
        let ids: Vec<_> = parse(body).unwrap().into_iter().map(|entry| entry.id).collect();
        assert_eq!(ids, ["a", "b/c:1"]);
        assert!(parse(br#"{"object":"list","data":null}"#).unwrap().is_empty());
        assert!(parse(b"{}").is_err() && parse(b"<html>").is_err());
    }
}
