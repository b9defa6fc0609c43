//! The inference servers of this machine.

use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::future::join_all;
use http::HeaderMap;
use modelrelay_protocol::names::marked;
use modelrelay_protocol::secret::Secret;
use tokio::net::TcpStream;
use url::Url;

use crate::backend::Backend;
use crate::backend::health::{self, Listed};
use crate::settings::{BackendSettings, Engine};

/// On the same machine a connection takes no time, or nothing listens.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);

/// The number of a server's models that are shown.
const MODELS_SHOWN: usize = 4;

/// The ports that inference servers usually listen on: vLLM, llama-server, Ollama, SGLang, LM Studio.
pub const USUAL_PORTS: &str = "8000,8080,11434,30000,1234";

/// A server that responds.
#[derive(Debug)]
pub struct FoundBackend {
    /// Its address.
    pub url: Url,
    /// Its kind.
    pub engine: Engine,
    /// The models that it lists.
    pub models: Vec<String>,
    /// The name that it reports, or that of the server that usually listens there.
    name: &'static str,
}

/// Probes ports of this machine. A port without a listener yields nothing, any other a server or the reason why it is
/// none.
pub async fn discover(ports: &[u16]) -> Vec<Result<FoundBackend, String>> {
    let looks = ports.iter().map(|&port| async move {
        let dial = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        tokio::time::timeout(DIAL_TIMEOUT, dial).await.ok()?.ok()?;
        let url = Url::parse(&format!("http://127.0.0.1:{port}")).ok()?;
        Some(probe_address(url, None).await.map_err(|why| format!("port {port}: {why}")))
    });
    join_all(looks).await.into_iter().flatten().collect()
}

/// Probes one server, by the list of models that a worker would read.
pub(super) async fn probe_address(url: Url, api_key: Option<Secret>) -> Result<FoundBackend, String> {
    let settings = BackendSettings { url: url.clone(), engine: Engine::OpenAi, api_key, headers: HeaderMap::new() };
    let backend = Backend::new(settings);
    let (is_relay, listed) = tokio::join!(health::is_relay(&backend), health::listed_models(&backend));
    if is_relay {
        return Err("a ModelRelay relay, not a backend".to_owned());
    }
    let listed = listed?;
    let (engine, name) = engine_of(&listed, url.port_or_known_default());
    Ok(FoundBackend { url, engine, models: listed.models, name })
}

/// Servers name themselves as the owner of their models. A server that does not is treated as one of unknown kind,
/// which works as well: the kind only decides how its health is checked.
fn engine_of(listed: &Listed, port: Option<u16>) -> (Engine, &'static str) {
    match (listed.owner.as_deref(), port) {
        (Some("vllm"), _) => (Engine::Vllm, "vLLM"),
        (Some("sglang"), _) => (Engine::Sglang, "SGLang"),
        (Some("llamacpp"), _) => (Engine::LlamaServer, "llama-server"),
        // Ollama's owner is the publisher of the model.
        (_, Some(11434)) => (Engine::Ollama, "Ollama"),
        (Some("organization_owner"), _) | (_, Some(1234)) => (Engine::OpenAi, "LM Studio"),
        _ => (Engine::OpenAi, "OpenAI-compatible"),
    }
}

impl FoundBackend {
    /// Formats the server as one human-readable line. Model names are untrusted, so control characters in them are
    /// replaced.
    pub fn line(&self) -> String {
        let shown: Vec<String> = self.models.iter().take(MODELS_SHOWN).map(|model| marked(model)).collect();
        let models = match self.models.len().saturating_sub(MODELS_SHOWN) {
            _ if shown.is_empty() => "no model yet".to_owned(),
            0 => shown.join(", "),
            more => format!("{} and {more} more", shown.join(", ")),
        };
        format!("{}  {}: {models}", self.url.as_str().trim_end_matches('/'), self.name)
    }

    /// Returns the number of requests that such a server usually runs at once, unless it was started with another one.
    pub(super) fn at_once(&self) -> u32 {
        match self.engine {
            Engine::Vllm | Engine::Sglang => 16,
            Engine::LlamaServer | Engine::Ollama | Engine::OpenAi => 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(owner: Option<&str>, url: &str, models: &[&str]) -> FoundBackend {
        let url = Url::parse(url).unwrap();
        let models: Vec<String> = models.iter().map(|&model| model.to_owned()).collect();
        let listed = Listed { models: models.clone(), owner: owner.map(str::to_owned) };
        let (engine, name) = engine_of(&listed, url.port());
        FoundBackend { url, engine, models, name }
    }

    #[test]
    fn engine_is_detected_by_owner_before_port() {
        let engine = |owner, url| found(owner, url, &[]).engine;
        assert_eq!(engine(Some("vllm"), "http://h:11434"), Engine::Vllm);
        assert_eq!(engine(Some("llamacpp"), "http://h:8000"), Engine::LlamaServer);
        assert_eq!(engine(Some("sglang"), "http://h:1"), Engine::Sglang);
        assert_eq!(engine(Some("library"), "http://h:11434"), Engine::Ollama);
        assert_eq!(engine(None, "http://h:8000"), Engine::OpenAi);
    }

    #[test]
    fn server_summary_is_one_line_for_any_names() {
        let many = found(None, "http://127.0.0.1:9/base", &["a", "b\u{1b}[2J", "c", "d", "e", "f"]);
        assert_eq!(many.line(), "http://127.0.0.1:9/base  OpenAI-compatible: a, b\u{fffd}[2J, c, d and 2 more");
        assert!(found(None, "http://127.0.0.1:9", &[]).line().ends_with(": no model yet"));
    }

    /// Responds to `/v1/models` at once, and to `/health` as late as a busy relay.
    async fn slow_relay() -> Url {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut peer, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut request = [0; 1024];
                    let read = peer.read(&mut request).await.unwrap();
                    let body = if request[..read].starts_with(b"GET /health") {
                        tokio::time::sleep(health::TIMEOUT - Duration::from_secs(1)).await;
                        r#"{"workers_connected":1}"#
                    } else {
                        r#"{"data":[{"id":"qwen"}]}"#
                    };
                    let head =
                        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                    peer.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
                });
            }
        });
        Url::parse(&url).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn slow_relay_is_not_offered_as_backend() {
        assert_eq!(probe_address(slow_relay().await, None).await.unwrap_err(), "a ModelRelay relay, not a backend");
    }
}
