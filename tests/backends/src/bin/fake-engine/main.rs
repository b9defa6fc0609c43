//! `fake-engine vllm|sglang MODEL PORT [ARGUMENT…] [DEFECT…]`: the endpoints of vLLM and SGLang that load and unload,
//! and their failures, each with a reference. There is no model: a completion is one word.
//!
//! Defects: `fails-to-start` (exit code 3 after a line), `never-ready`, `deaf` (does not sleep, but reports that it
//! did), `no-dev-mode`, `no-sleep-state` (vLLM without that gauge), `stale-count` (a page of vLLM's metrics has the
//! requests of the previous page), `no-reload` (weights cannot be read again), `slow-wake` (half a second), `no-backup`
//! (SGLang without `--enable-weights-cpu-backup`), `no-ready` (SGLang without `/ready`). Arguments, for SGLang:
//! `--api-key KEY`, `--admin-api-key KEY`.

mod sglang;
mod vllm;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The common state of both fakes.
#[derive(Debug)]
struct Engine {
    model: String,
    defects: Vec<String>,
    running: AtomicU32,
    /// The number of calls that abort all running requests.
    aborts: AtomicU32,
    /// The number of running requests at the last read of vLLM's metrics.
    counted: AtomicU32,
    memory: Mutex<Memory>,
}

#[derive(Debug)]
struct Memory {
    has_weights: bool,
    has_cache: bool,
    /// True if the weights are those of the model.
    weights_are_good: bool,
    is_paused: bool,
    /// The level at which vLLM sleeps.
    sleep_level: Option<u8>,
    /// The number of times that vLLM has released its memory.
    releases: u32,
    /// The released tags of SGLang.
    released: BTreeSet<String>,
    /// True if SGLang's last health check failed.
    is_unhealthy: bool,
}

impl Memory {
    fn is_resident(&self) -> bool {
        self.has_weights && self.has_cache
    }
}

impl Engine {
    fn has(&self, defect: &str) -> bool {
        self.defects.iter().any(|known| known == defect)
    }

    /// Returns the value that follows this argument.
    fn argument(&self, name: &str) -> Option<&str> {
        let mut words = self.defects.iter().skip_while(|word| *word != name);
        words.nth(1).map(String::as_str)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> u32 {
        self.running.load(Ordering::SeqCst)
    }

    fn models(&self) -> Json<Value> {
        Json(json!({"object": "list", "data": [{"id": self.model, "object": "model"}]}))
    }

    /// Generates the requested tokens, with a pause of 100 ms for each.
    async fn complete(&self, body: &Value) -> Response {
        if body["model"] != self.model.as_str() {
            let error = json!({"message": "The model does not exist.", "type": "NotFoundError", "code": 404});
            return (StatusCode::NOT_FOUND, Json(json!({"error": error}))).into_response();
        }
        let _one_more = Counted::new(&self.running);
        let aborts = self.aborts.load(Ordering::SeqCst);
        let mut finish_reason = "length";
        for _ in 1..body["max_tokens"].as_u64().unwrap_or(1) {
            #[expect(clippy::disallowed_methods, reason = "the pace of the engine that is played")]
            tokio::time::sleep(Duration::from_millis(100)).await;
            if self.aborts.load(Ordering::SeqCst) != aborts {
                finish_reason = "abort";
                break;
            }
        }
        if !self.memory().weights_are_good {
            let error = json!({"error": {"message": "garbage"}});
            return (StatusCode::INTERNAL_SERVER_ERROR, Json(error)).into_response();
        }
        let answer = json!({"choices": [{"index": 0, "text": "word", "finish_reason": finish_reason}]});
        if body["stream"] == true {
            return ([(CONTENT_TYPE, "text/event-stream")], format!("data: {answer}\n\ndata: [DONE]\n\n"))
                .into_response();
        }
        Json(answer).into_response()
    }

    /// Ends all running requests. To their clients the responses look complete: status 200, a finish reason, `[DONE]`.
    fn abort(&self) {
        self.aborts.fetch_add(1, Ordering::SeqCst);
    }

    async fn wait_until_scheduling(&self) {
        while self.memory().is_paused {
            #[expect(clippy::disallowed_methods, reason = "the pace of the engine that is played")]
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// A running request; it ends with its client too.
struct Counted<'a>(&'a AtomicU32);

impl<'a> Counted<'a> {
    fn new(running: &'a AtomicU32) -> Self {
        running.fetch_add(1, Ordering::SeqCst);
        Self(running)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Crashes the engine, shortly after a possible response.
#[allow(clippy::print_stderr)]
fn crash(why: &'static str) {
    tokio::spawn(async move {
        #[expect(clippy::disallowed_methods, reason = "the pace of the engine that is played")]
        tokio::time::sleep(Duration::from_millis(20)).await;
        eprintln!("EngineDeadError: {why}");
        std::process::exit(1);
    });
}

#[tokio::main(flavor = "current_thread")]
#[allow(clippy::print_stderr)]
async fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(kind), Some(model), Some(port)) = (args.next(), args.next(), args.next()) else {
        eprintln!("fake-engine vllm|sglang MODEL PORT [ARGUMENT…] [DEFECT…]");
        std::process::exit(2);
    };
    let memory = Memory {
        has_weights: true,
        has_cache: true,
        weights_are_good: true,
        is_paused: false,
        sleep_level: None,
        releases: 0,
        released: BTreeSet::new(),
        is_unhealthy: false,
    };
    let [running, aborts, counted] = [0; 3].map(AtomicU32::new);
    let engine =
        Arc::new(Engine { model, defects: args.collect(), running, aborts, counted, memory: Mutex::new(memory) });
    if engine.has("fails-to-start") {
        eprintln!("torch.OutOfMemoryError: CUDA out of memory");
        std::process::exit(3);
    }
    let router = if kind == "sglang" { sglang::router(engine) } else { vllm::router(engine) };
    let listener = tokio::net::TcpListener::bind(format!("127.0.0.1:{port}")).await.expect("the port is free");
    axum::serve(listener, router).await.expect("it serves");
}
