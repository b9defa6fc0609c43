//! vLLM on a CPU, with a model of random weights.

use std::process::Stdio;

use modelrelay_backends::{engines, vllm};
use modelrelay_harness::client::Request;
use serde_json::{Value, json};
use tokio::process::Command;
use url::Url;

use crate::engine::{CONCURRENCY, Engine, Stack};
use crate::{death, sleep, steps};

/// The context length of the model that `scripts/backends/vllm` creates.
const CONTEXT: u32 = 16_384;

pub(crate) fn engine(url: Url) -> Engine {
    Engine {
        kind: "vllm",
        model: engines::VLLM_MODEL,
        url,
        running: "vllm:num_requests_running",
        endless: CONTEXT - 100,
    }
}

/// One test, because its steps share a server: the last ones put it to sleep.
#[tokio::test]
async fn vllm_serves_through_worker_and_sleeps() {
    let Some(url) = engines::shared_vllm().await else { return };
    let engine = engine(url);
    // A previous attempt may have left it asleep.
    engine.fetch(Request::post("/wake_up", &json!({}))).await.with_status(200);
    let stack = Stack::start(&engine).await;
    steps::model_is_discovered(&engine, &stack).await;
    steps::responses_are_unchanged(&engine, &stack).await;
    steps::errors_are_unchanged(&engine, &stack).await;
    context_is_the_models(&engine, &stack).await;
    steps::concurrent_streams_are_unchanged(&engine, &stack).await;
    steps::disconnect_stops_generation(&engine, &stack).await;
    benchmark_fails_no_request(&engine, &stack).await;
    drop(stack);
    sleep::idle_server_sleeps_and_wakes(&engine).await;
    sleep::running_request_ends_before_sleep(&engine).await;
    sleep::endless_request_prevents_sleep(&engine).await;
}

#[tokio::test]
async fn vllm_process_dies_restarts_and_stops() {
    let Some(command) = engines::vllm_command("${PORT}") else { return };
    death::process_dies_restarts_and_stops(command).await;
}

/// The length limit that clients see is the model's, and vLLM's rejection arrives unchanged.
async fn context_is_the_models(engine: &Engine, stack: &Stack) {
    let listed = engine.fetch(Request::get("/v1/models")).await.json();
    assert_eq!(listed["data"][0]["max_model_len"], json!(CONTEXT));
    let request = || engine.completion_request("/v1/completions", CONTEXT + 1, true);
    let (reply, direct) = (stack.relay.fetch(request()).await, engine.fetch(request()).await);
    assert_eq!((reply.status, reply.text()), (400, direct.text()));
    assert!(direct.text().contains(&format!("max_model_len={CONTEXT}")), "{}", direct.text());
}

/// Runs vLLM's own benchmark against the relay.
async fn benchmark_fails_no_request(engine: &Engine, stack: &Stack) {
    const REQUESTS: u32 = 160;
    let (Some(program), Some(model)) = (vllm("bin/vllm"), vllm("models/tiny")) else { return };
    let folder = tempfile::tempdir().expect("the folder can be created");
    let mut bench = Command::new(program);
    bench.args(["bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]);
    bench.args(["--base-url", &stack.relay.url(), "--model", engine.model, "--tokenizer"]).arg(model);
    bench.args(["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "64", "--ignore-eos"]);
    bench.args(["--num-prompts", &REQUESTS.to_string(), "--max-concurrency", &CONCURRENCY.to_string()]);
    bench.args(["--save-result", "--result-filename", "result.json", "--result-dir"]).arg(folder.path());
    let output = bench.stdin(Stdio::null()).kill_on_drop(true).output();
    let output =
        tokio::time::timeout(engines::VLLM_START, output).await.expect("the benchmark ends").expect("it starts");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    let result = std::fs::read(folder.path().join("result.json")).expect("a result");
    let result: Value = serde_json::from_slice(&result).expect("JSON");
    assert_eq!((&result["completed"], &result["failed"]), (&json!(REQUESTS), &json!(0)), "{printed}");
    eprintln!("vllm bench serve: {} tokens/s through the relay", result["output_throughput"]);
}
