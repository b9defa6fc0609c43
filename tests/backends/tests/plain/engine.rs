//! An engine, and the programs in front of it.

use std::net::SocketAddr;
use std::time::Duration;

use modelrelay_backends::server::until;
use modelrelay_backends::tap::Tap;
use modelrelay_harness::client::{Pending, Reply, Request};
use modelrelay_harness::process::Log;
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use modelrelay_multiplexer::driver::served::gauges;
use serde_json::{Value, json};
use url::Url;

/// The largest number of requests that the worker accepts at once. vLLM runs as many; the others queue in llama-server.
pub(crate) const CONCURRENCY: u32 = 32;

/// The pause between two reads of an engine's metrics. llama-server notices that the client of a non-streamed response
/// has disconnected only in a second without any other result, and the metrics are one.
const METRICS_PAUSE: Duration = Duration::from_millis(1200);

/// A running inference server with one model.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    /// Its name in `BACKEND_ENGINE`.
    pub(crate) kind: &'static str,
    pub(crate) model: &'static str,
    pub(crate) url: Url,
    /// The metric with the number of requests that it executes.
    pub(crate) running: &'static str,
    /// More tokens than any test waits for, and fewer than the context holds.
    pub(crate) endless: u32,
}

/// Relay and worker, with a tap between worker and engine.
pub(crate) struct Stack {
    pub(crate) relay: Relay,
    pub(crate) worker: WorkerProcess,
    pub(crate) tap: Tap,
}

impl Engine {
    /// A request for `tokens` tokens, to which the engine responds with the same text each time.
    pub(crate) fn completion_request(&self, path: &str, tokens: u32, stream: bool) -> Request {
        let mut body = json!({
            "model": self.model, "max_tokens": tokens, "stream": stream, "temperature": 0, "seed": 1, "cache_prompt": false,
        });
        let prompt = "Once upon a time";
        if path == "/v1/completions" {
            body["prompt"] = json!(prompt);
        } else {
            body["messages"] = json!([{"role": "user", "content": prompt}]);
        }
        Request::post(path, &body)
    }

    /// Sends a request directly to the engine.
    pub(crate) async fn fetch(&self, request: Request) -> Reply {
        request.fetch(self.address(), &Log::new(self.kind)).await
    }

    /// Sends a request directly to the engine, in the background.
    pub(crate) fn begin(&self, request: Request) -> Pending {
        request.start(self.address(), &Log::new(self.kind))
    }

    /// Returns the number of requests that the engine executes.
    pub(crate) async fn running(&self) -> u32 {
        let page = self.fetch(Request::get("/metrics")).await.with_status(200).text();
        gauges(&page, &[self.running]).unwrap_or_else(|| panic!("no {} in {page}", self.running)) as u32
    }

    pub(crate) async fn until_running(&self, count: u32) {
        let is_so = async || {
            #[expect(clippy::disallowed_methods, reason = "the engine notices only in a second without questions")]
            tokio::time::sleep(METRICS_PAUSE).await;
            self.running().await == count
        };
        until(&format!("{count} requests run"), is_so).await;
    }

    fn address(&self) -> SocketAddr {
        self.url.socket_addrs(|| None).expect("an address")[0]
    }
}

impl Stack {
    /// Starts both, and waits until the relay has the engine's model.
    pub(crate) async fn start(engine: &Engine) -> Self {
        let (relay, tap) = (Relay::start().await, Tap::on(&engine.url).await);
        let worker = worker(&relay, engine, &tap.url).await;
        wait_for_model(&relay, engine.model).await;
        Self { relay, worker, tap }
    }
}

/// Starts a plain worker of the relay that reaches the engine at this address.
pub(crate) async fn worker(relay: &Relay, engine: &Engine, url: &Url) -> WorkerProcess {
    let worker = WorkerProcess::builder().without("MODELS").relay(relay.url()).backend(url.as_str());
    let worker = worker.env("WORKER_SECRET", WORKER_SECRET).env("BACKEND_ENGINE", engine.kind);
    worker.concurrency(CONCURRENCY).start().await
}

/// Returns the text of a response, on any route, streamed or not. Servers group the tokens of a stream differently.
pub(crate) fn text_of(reply: &Reply) -> String {
    let body = reply.text();
    assert!(reply.status == 200 && !reply.aborted, "{} {body}", reply.status);
    let documents: Vec<&str> = if body.starts_with('{') {
        vec![&body]
    } else {
        body.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
    };
    let places =
        ["/choices/0/text", "/choices/0/delta/content", "/choices/0/message/content", "/delta/text", "/content/0/text"];
    let text = |document: &&str| {
        let document: Value = serde_json::from_str(document).ok()?;
        places.iter().find_map(|place| document.pointer(place)?.as_str().map(str::to_owned))
    };
    let text: String = documents.iter().filter_map(text).collect();
    assert!(!text.is_empty(), "no text in {body}");
    text
}
