//! A worker with one slot of two models, `a` and `b`, each a demo backend that the worker starts itself.

use std::time::Duration;

use modelrelay_harness::fake_relay::{Ack, FakeRelay, RelayLink, Reply, RequestSpec, SentRequest};
use modelrelay_harness::process::path_of;
use modelrelay_harness::secrecy::PROMPT;
use modelrelay_harness::worker_process::{WorkerBuilder, WorkerProcess};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

/// The timeout for a load and a drain on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Settings of the two models' slot.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// Lines of the `multiplexer` block.
    pub(crate) knobs: &'static str,
    /// The pause before each word of a response.
    pub(crate) delay: &'static str,
    /// Lines of the slot.
    pub(crate) slot: &'static str,
}

impl Default for Slot {
    fn default() -> Self {
        Self { knobs: "minResidency: 1ms", delay: "1ms", slot: "" }
    }
}

impl Slot {
    /// The `multiplexer` block.
    pub(crate) fn yaml(&self) -> String {
        let program = path_of("modelrelay-worker");
        let model = |id: &str, more: &str| {
            json!({
                "id": id, "maxConcurrency": 4, "expectModel": "demo", "env": {"DEMO_DELAY": self.delay, "NAME": more},
                "command": [program, "demo", "--listen", "127.0.0.1:${PORT}"],
            })
        };
        let (knobs, slot) = (self.knobs, self.slot);
        let (a, b) = (model("a", "first"), model("b", "second"));
        format!(
            "multiplexer:\n  {knobs}\n  linger: off\n  slots:\n  - id: gpu0\n    driver: process\n    {slot}\n    \
             models:\n    - {a}\n    - {b}\n"
        )
    }
}

/// The worker and its relays.
pub(crate) struct Rig {
    pub(crate) relay: FakeRelay,
    pub(crate) link: RelayLink,
    pub(crate) worker: WorkerProcess,
    config: NamedTempFile,
}

/// The acknowledgement of a relay that supports slots.
pub(crate) fn slots1() -> Ack {
    Ack { capabilities: vec!["core1".to_owned(), "slots1".to_owned()], ..Ack::core1() }
}

/// A worker with this file.
pub(crate) fn worker_with(yaml: &str) -> (NamedTempFile, WorkerBuilder) {
    let config = NamedTempFile::new().expect("a temporary file");
    std::fs::write(config.path(), yaml).expect("a writable file");
    let builder = WorkerProcess::builder().without("MODELS").arg("--config").arg(&config.path().to_string_lossy());
    (config, builder)
}

impl Rig {
    pub(crate) async fn start(ack: &Ack, slot: &Slot) -> Self {
        Self::with(ack, &slot.yaml()).await
    }

    pub(crate) async fn with(ack: &Ack, yaml: &str) -> Self {
        let mut relay = FakeRelay::start().await;
        let (config, builder) = worker_with(yaml);
        let worker = builder.relay(relay.url()).start().await;
        let link = relay.accept_with(ack).await;
        Self { relay, link, worker, config }
    }

    /// Changes the worker's file.
    pub(crate) fn rewrite(&self, yaml: &str) {
        std::fs::write(self.config.path(), yaml).expect("a writable file");
    }
}

/// A chat request for this model; its backend calls it `demo`.
pub(crate) fn chat(model: &str) -> RequestSpec {
    RequestSpec::chat(model).body(body(false).to_string().as_bytes())
}

/// A streamed request with a dozen words or more.
pub(crate) fn stream(model: &str) -> RequestSpec {
    RequestSpec::stream(model).body(body(true).to_string().as_bytes())
}

fn body(is_streaming: bool) -> Value {
    let content = format!("say hello to me, {PROMPT}");
    json!({"model": "demo", "stream": is_streaming, "messages": [{"role": "user", "content": content}]})
}

/// Reports that this number of requests for this model waits at the relay.
pub(crate) fn demand(link: &RelayLink, model: &str, waiting: u64) {
    let models = json!([{"id": model, "waiting": waiting, "oldest_ms": 10, "sum_ms": 10 * waiting}]);
    link.send(&json!({"type": "demand", "models": if waiting > 0 { models } else { json!([]) }}));
}

/// Returns the part of the grant's capacity for this model, or `None` while its gate is closed.
pub(crate) fn granted(grant: &Value, model: &str) -> Option<u64> {
    grant["models"].as_array()?.iter().find(|entry| entry["id"] == model)?["slots"].as_u64()
}

/// Waits until the model's gate is open for this relay.
pub(crate) async fn gate(link: &mut RelayLink, model: &str) -> u64 {
    let open = link.message_within(LONG, "grant", |grant| granted(grant, model).is_some_and(|slots| slots > 0)).await;
    let open = open.unwrap_or_else(|| panic!("the gate of {model} stays closed"));
    granted(&open.body, model).unwrap_or_default()
}

/// Has the model loaded, and sends one request to it.
pub(crate) async fn request_once_loaded(link: &mut RelayLink, spec: &RequestSpec, model: &str) -> SentRequest {
    demand(link, model, 1);
    gate(link, model).await;
    let request = link.send_request(spec);
    demand(link, model, 0);
    request
}

/// Returns the text of a streamed response.
pub(crate) fn text(reply: &Reply) -> String {
    String::from_utf8_lossy(&reply.body).into_owned()
}
