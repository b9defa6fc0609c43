//! Advice for a backend that runs many requests at once behind a worker that sends it one at a time.

use serde::Deserialize;

use crate::backend::Backend;
use crate::backend::health::TIMEOUT;
use crate::settings::Engine;

/// The most bytes of llama-server's properties: they contain its chat template, which may be long.
const MAX_PROPS_BYTES: usize = 1 << 20;

/// Returns a warning if the backend runs several requests at once. `owner` is the owner of its first model, by which
/// most servers name themselves.
pub(super) async fn advice(backend: &Backend, owner: Option<&str>) -> Option<String> {
    let advice = |runs: String| format!("MAX_CONCURRENCY is 1, the default, but {runs}; raise it to use them");
    match (backend.settings().engine, owner) {
        (Engine::Vllm, _) | (_, Some("vllm")) => {
            Some(advice("vLLM runs up to --max-num-seqs requests at once".to_owned()))
        }
        (Engine::Sglang, _) | (_, Some("sglang")) => {
            Some(advice("SGLang runs up to --max-running-requests requests at once".to_owned()))
        }
        (Engine::LlamaServer, _) | (_, Some("llamacpp")) => {
            let slots = tokio::time::timeout(TIMEOUT, total_slots(backend)).await.ok()??;
            (slots > 1).then(|| advice(format!("llama-server has {slots} slots")))
        }
        (Engine::Ollama | Engine::OpenAi, _) => None,
    }
}

#[derive(Deserialize)]
struct Props {
    total_slots: u32,
}

async fn total_slots(backend: &Backend) -> Option<u32> {
    let mut answer = backend.fetch("/props").await.ok()?;
    let body = answer.read_all(MAX_PROPS_BYTES).await.ok()?;
    serde_json::from_slice(&body).ok().map(|Props { total_slots }| total_slots)
}
