//! The paths that may reach a backend: a closed list, checked by the relay for clients and again by the worker, which
//! is the last barrier before a backend's admin interface.

use crate::dialect::Dialect;

/// A route that a backend serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses` and paths below it.
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/messages/count_tokens`
    CountTokens,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/rerank` and its other names.
    Rerank,
    /// `/v1/score`
    Score,
    /// `/classify`, `/pooling` and their other names.
    Classify,
    /// `/v1/images/…`
    Images,
    /// `/v1/audio/…`
    Audio,
    /// A server's native API: `/completion` and `/infill` of llama-server, `/api/…` of Ollama.
    Native,
    /// `/tokenize`, `/detokenize`
    Tokenize,
    /// `/v1/models`, which the relay serves itself.
    Models,
    /// Any other path.
    Other,
}

/// `POST` paths that are routed by the body's model.
pub const POST_PATHS: [(&str, Endpoint); 33] = [
    ("/v1/chat/completions", Endpoint::ChatCompletions),
    ("/v1/chat/completions/batch", Endpoint::ChatCompletions),
    ("/v1/completions", Endpoint::Completions),
    ("/v1/responses", Endpoint::Responses),
    ("/v1/responses/input_tokens", Endpoint::Responses),
    ("/v1/messages", Endpoint::Messages),
    ("/v1/messages/count_tokens", Endpoint::CountTokens),
    ("/v1/embeddings", Endpoint::Embeddings),
    ("/v2/embed", Endpoint::Embeddings),
    ("/v1/rerank", Endpoint::Rerank),
    ("/rerank", Endpoint::Rerank),
    ("/v2/rerank", Endpoint::Rerank),
    ("/v1/reranking", Endpoint::Rerank),
    ("/v1/score", Endpoint::Score),
    ("/score", Endpoint::Score),
    ("/classify", Endpoint::Classify),
    ("/v1/classify", Endpoint::Classify),
    ("/pooling", Endpoint::Classify),
    ("/v1/pooling", Endpoint::Classify),
    ("/v1/images/generations", Endpoint::Images),
    ("/v1/images/edits", Endpoint::Images),
    ("/v1/images/variations", Endpoint::Images),
    ("/v1/audio/transcriptions", Endpoint::Audio),
    ("/v1/audio/translations", Endpoint::Audio),
    ("/v1/audio/speech", Endpoint::Audio),
    ("/tokenize", Endpoint::Tokenize),
    ("/detokenize", Endpoint::Tokenize),
    ("/completion", Endpoint::Native),
    ("/infill", Endpoint::Native),
    ("/api/chat", Endpoint::Native),
    ("/api/generate", Endpoint::Native),
    ("/api/embed", Endpoint::Native),
    ("/api/show", Endpoint::Native),
];

impl Endpoint {
    /// The metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Classify => "classify",
            Self::Images => "images",
            Self::Audio => "audio",
            Self::Native => "native",
            Self::Tokenize => "tokenize",
            Self::Models => "models",
            Self::Other => "other",
        }
    }

    /// The dialect of this endpoint's errors and stream ends.
    pub fn dialect(self) -> Dialect {
        match self {
            Self::Messages | Self::CountTokens => Dialect::Anthropic,
            Self::Responses => Dialect::Responses,
            Self::ChatCompletions
            | Self::Completions
            | Self::Embeddings
            | Self::Rerank
            | Self::Score
            | Self::Classify
            | Self::Images
            | Self::Audio
            | Self::Native
            | Self::Tokenize
            | Self::Models
            | Self::Other => Dialect::OpenAi,
        }
    }

    /// True if the clients of this endpoint's streams raise or show an error frame of its [`Dialect`], however the body
    /// then ends. Known for the clients that `docs/compatibility.md` lists.
    pub fn raises_error_frame(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions | Self::Responses | Self::Messages)
    }
}

/// A path and query that may be sent to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendPath<'a> {
    /// The route.
    pub endpoint: Endpoint,
    /// The path, beginning with `/`.
    pub path: &'a str,
    /// The query without its `?`.
    pub query: Option<&'a str>,
}

/// Checks a worker's `endpoint_path` against the allow-list; `None` means `bad_path`.
pub fn backend_path<'a>(method: &str, path_and_query: &'a str) -> Option<BackendPath<'a>> {
    let (path, query) = match path_and_query.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (path_and_query, None),
    };
    let clean_query = query.is_none_or(|q| q.bytes().all(|b| b.is_ascii_graphic() && b != b'#'));
    let endpoint = clean_query.then(|| endpoint(method, path))??;
    Some(BackendPath { endpoint, path, query })
}

/// Returns the backend's route for `method` and `path`, if there is one.
pub fn endpoint(method: &str, path: &str) -> Option<Endpoint> {
    match method {
        "POST" => POST_PATHS
            .iter()
            .find(|(known, _)| *known == path)
            .map(|(_, endpoint)| *endpoint)
            .or_else(|| response_id(path.strip_suffix("/cancel")?).map(|_| Endpoint::Responses)),
        "GET" => response_id(path).map(|_| Endpoint::Responses),
        _ => None,
    }
}

/// Returns the id of `/v1/responses/{id}`, if a backend could have created it.
pub fn response_id(path: &str) -> Option<&str> {
    let id = path.strip_prefix("/v1/responses/")?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    (!id.is_empty() && id.len() <= crate::limits::MAX_ID_BYTES && id != "input_tokens" && id.bytes().all(plain))
        .then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_has_unique_label() {
        let endpoints = POST_PATHS.iter().map(|(_, endpoint)| *endpoint).chain([Endpoint::Models, Endpoint::Other]);
        let endpoints = endpoints.collect::<std::collections::HashSet<_>>();
        let labels = endpoints.iter().map(|endpoint| endpoint.as_str()).collect::<std::collections::HashSet<_>>();
        assert_eq!(labels.len(), endpoints.len());
        assert!(labels.iter().all(|label| label.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')));
        assert_eq!(Endpoint::ChatCompletions.as_str(), "chat_completions");
    }

    #[test]
    fn listed_paths_pass_with_their_query() {
        assert_eq!(
            backend_path("POST", "/v1/messages?beta=true"),
            Some(BackendPath { endpoint: Endpoint::Messages, path: "/v1/messages", query: Some("beta=true") })
        );
        for (path, endpoint) in POST_PATHS {
            assert_eq!(backend_path("POST", path).map(|p| p.endpoint), Some(endpoint), "{path}");
        }
        assert!(backend_path("GET", "/v1/responses/resp_1-a").is_some());
        assert!(backend_path("POST", "/v1/responses/resp_1/cancel").is_some());
    }

    #[test]
    fn unlisted_paths_never_reach_backend() {
        for path in [
            "",
            "/",
            "/metrics",
            "/v1/models",
            "/sleep",
            "/admin",
            "//v1/messages",
            "/v1/messages/",
            "/v1/../admin",
            "/v1/%2e%2e/admin",
            "http://evil/v1/messages",
            "@evil/v1/messages",
            "/v1/messages#x",
            "/v1/messages?a b",
            "/v1/messages?a\r\nx: y",
            "/v1/responses/a/b",
            "/v1/responses/../x/cancel",
            "/v1/responses//cancel",
            "/v1\\messages",
            "/V1/messages",
        ] {
            assert_eq!(backend_path("POST", path), None, "{path:?}");
        }
        assert_eq!(backend_path("GET", "/v1/messages"), None);
        assert_eq!(backend_path("GET", "/v1/responses/input_tokens"), None);
        assert_eq!(backend_path("DELETE", "/v1/responses/resp_1"), None);
    }
}
