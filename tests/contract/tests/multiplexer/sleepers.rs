//! Engines that were started externally, in the state in which a previous worker left them.

use modelrelay_harness::fake_relay::FakeRelay;
use modelrelay_harness::process::{Process, Spawn};
use modelrelay_harness::{TEST_TIMEOUT, poll_for};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::rig::{LONG, demand, gate, slots1, worker_with};

/// A running fake of vLLM or SGLang.
struct Engine {
    port: u16,
    _process: Process,
}

impl Engine {
    async fn start(kind: &str, model: &str) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        drop(listener);
        let process = Spawn::program("fake-engine").arg(kind).arg(model).arg(port.to_string()).start();
        let engine = Self { port, _process: process };
        let is_up = poll_for(TEST_TIMEOUT, async || exchange(port, "GET", "/v1/models", "").await).await;
        assert!(is_up.is_some(), "the engine of {model} listens");
        engine
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Sends a request in the background.
    fn begin(&self, path: &'static str, body: &Value) {
        let (port, body) = (self.port, body.to_string());
        drop(tokio::spawn(async move { exchange(port, "POST", path, &body).await }));
    }

    /// Sends a command, and returns the response.
    async fn send(&self, path: &str) -> String {
        exchange(self.port, "POST", path, "{}").await.unwrap_or_default()
    }

    async fn page(&self, path: &str) -> String {
        exchange(self.port, "GET", path, "").await.unwrap_or_default()
    }

    async fn until_page(&self, path: &str, part: &str) {
        let held = poll_for(TEST_TIMEOUT, async || self.page(path).await.contains(part).then_some(())).await;
        assert!(held.is_some(), "{path} shows {part}");
    }
}

async fn exchange(port: u16, method: &str, path: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}

/// The file of a worker with one slot of the models `a` and `b`. `more`: further settings of each model.
fn slot_of(driver: &str, a: &Engine, b: &Engine, more: &Value) -> String {
    let models = [("a", a), ("b", b)].map(|(id, engine)| {
        let mut model = json!({"id": id, "url": engine.url(), "maxConcurrency": 4});
        let settings = more.as_object().cloned().unwrap_or_default();
        model.as_object_mut().expect("an object").extend(settings);
        model
    });
    let slots = json!([{"id": "gpu0", "driver": driver, "models": models}]);
    json!({"multiplexer": {"minResidency": "1ms", "linger": "off", "slots": slots}}).to_string()
}

#[tokio::test]
async fn model_loads_only_after_waiting_sleep_ends() {
    let (a, b) = (Engine::start("vllm", "a").await, Engine::start("vllm", "b").await);
    a.begin("/sleep", &json!({}));
    a.until_page("/is_sleeping", "true").await;
    b.begin("/v1/completions", &json!({"model": "b", "prompt": "Hi", "max_tokens": 1000}));
    b.until_page("/metrics", "vllm:num_requests_running{engine=\"0\",model_name=\"b\"} 1.0").await;
    b.begin("/sleep?level=1&mode=wait", &json!({}));
    b.until_page("/is_sleeping", "true").await;

    let mut relay = FakeRelay::start().await;
    let (_config, builder) = worker_with(&slot_of("vllm-sleep", &a, &b, &Value::Null));
    let _worker = builder.relay(relay.url()).start().await;
    let mut link = relay.accept_with(&slots1()).await;
    demand(&link, "a", 1);
    assert!(tokio::time::timeout(LONG, gate(&mut link, "a")).await.is_ok(), "a is loaded");
    let metrics = b.page("/metrics").await;
    assert!(metrics.contains("sleep_state=\"weights_offloaded\"} 1.0"), "b holds its memory: {metrics}");
}

#[tokio::test]
async fn interrupted_wake_is_reverted_before_load() {
    let (a, b) = (Engine::start("vllm", "a").await, Engine::start("vllm", "b").await);
    for engine in [&a, &b] {
        engine.send("/sleep?level=2&mode=wait").await;
    }
    b.send("/wake_up?tags=weights").await;

    let mut relay = FakeRelay::start().await;
    let (_config, builder) = worker_with(&slot_of("vllm-sleep", &a, &b, &json!({"level": 2})));
    let _worker = builder.relay(relay.url()).start().await;
    let mut link = relay.accept_with(&slots1()).await;
    demand(&link, "a", 1);
    assert!(tokio::time::timeout(LONG, gate(&mut link, "a")).await.is_ok(), "a is loaded");
    // If its weights were still loaded, this would wake the whole server.
    let woken = b.send("/wake_up?tags=kv_cache").await;
    assert!(woken.contains("\"sleeping\""), "b holds its weights: {woken}");
}

#[tokio::test]
async fn paused_sglang_is_loaded_again() {
    let (a, b) = (Engine::start("sglang", "a").await, Engine::start("sglang", "b").await);
    let mut relay = FakeRelay::start().await;
    let (_config, builder) = worker_with(&slot_of("sglang", &a, &b, &Value::Null));
    let _worker = builder.relay(relay.url()).start().await;
    let mut link = relay.accept_with(&slots1()).await;
    for model in ["a", "b", "a"] {
        demand(&link, model, 1);
        let opened = tokio::time::timeout(LONG, gate(&mut link, model)).await;
        assert!(opened.is_ok(), "{model} is loaded");
    }
}
