//! Placement by cache over two real engines: what of the prompts of later turns comes from their caches, and how soon
//! the first token does.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::iter;
use modelrelay_backends::engines::{self, VLLM_START};
use modelrelay_backends::server::{self, Server, free_port};
use modelrelay_harness::client::{Reply, Request};
use modelrelay_harness::poll_for;
use modelrelay_harness::relay::Relay;
use serde_json::{Value, json};

use crate::engine::{Engine, text_of, worker};
use crate::llama::llama;
use crate::vllm;

/// The size of what all turns of a conversation begin with. In these models a character is a token.
const HEAD_CHARACTERS: usize = 4096;

/// The number of tokens of each response.
const RESPONSE_TOKENS: u32 = 32;

/// Requests that run at once, fewer than conversations: the others think.
const CONCURRENCY: usize = 4;

/// The number of conversations and the number of turns of each.
#[derive(Clone, Copy)]
struct Workload {
    conversations: usize,
    turns: usize,
}

/// The turns after the first of each conversation.
#[derive(Debug, Default)]
struct Measured {
    prompt_tokens: u64,
    cached_tokens: u64,
    first_bytes: Vec<Duration>,
}

/// A streamed turn: the time to its first token, and its response.
struct Turn {
    first_byte: Duration,
    reply: Reply,
}

impl Measured {
    /// The share of the prompts that came from a cache.
    fn hit_rate(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens as f64
    }

    fn row(&mut self, engine: &str, placement: &str) -> String {
        self.first_bytes.sort_unstable();
        let mean = self.first_bytes.iter().sum::<Duration>() / self.first_bytes.len() as u32;
        let late = self.first_bytes[self.first_bytes.len() * 95 / 100];
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        format!(
            "| {engine} | `{placement}` | {:.0} % | {:.0} ms | {:.0} ms |",
            self.hit_rate() * 100.0,
            ms(mean),
            ms(late)
        )
    }
}

/// Runs a workload over the engines, each behind a worker of its own.
async fn run(engines: &[Engine], placement: &str, workload: Workload) -> Measured {
    let relay = Relay::builder().env("PLACEMENT", placement).start().await;
    let mut workers = Vec::new();
    for engine in engines {
        workers.push(worker(&relay, engine, &engine.url).await);
    }
    let model = engines[0].model;
    let are_ready = async || {
        let listed = relay.admin_json("/admin/workers").await;
        let serves = |worker: &&Value| worker["models"].as_array().is_some_and(|models| models.contains(&json!(model)));
        listed["workers"].as_array().into_iter().flatten().filter(serves).count() == engines.len()
    };
    server::until("all workers serve the model", are_ready).await;
    let system = |number: usize| format!("{placement} {number} ").repeat(HEAD_CHARACTERS / 8);
    let mut conversations: Vec<Vec<Value>> = (0..workload.conversations)
        .map(|number| vec![json!({"role": "system", "content": &system(number)[..HEAD_CHARACTERS]})])
        .collect();
    let mut measured = Measured::default();
    for turn in 0..workload.turns {
        for messages in &mut conversations {
            messages.push(json!({"role": "user", "content": format!("question {turn} ").repeat(20)}));
        }
        // Another order each time, so that neither worker gets a conversation again by chance.
        let order = (0..workload.conversations).map(|at| (at * 5 + turn * 3) % workload.conversations);
        let (relay, texts) = (&relay, &conversations);
        let turns: Vec<_> = iter(order)
            .map(async |number| (number, send(relay, model, &texts[number]).await))
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        for (number, Turn { first_byte, reply }) in turns {
            conversations[number].push(json!({"role": "assistant", "content": text_of(&reply)}));
            if turn > 0 {
                let usage = usage_of(&reply);
                measured.prompt_tokens += usage["prompt_tokens"].as_u64().expect("a number of tokens");
                measured.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
                measured.first_bytes.push(first_byte);
            }
        }
    }
    measured
}

async fn send(relay: &Relay, model: &str, messages: &[Value]) -> Turn {
    let body = json!({
        "model": model, "messages": messages, "max_tokens": RESPONSE_TOKENS, "temperature": 0, "seed": 1,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let began = Instant::now();
    let mut stream = relay.send(Request::post("/v1/chat/completions", &body)).await;
    stream.read_until("data: ").await;
    let first_byte = began.elapsed();
    Turn { first_byte, reply: stream.read_to_end().await }
}

/// Returns the usage that a stream ends with.
fn usage_of(reply: &Reply) -> Value {
    let text = reply.text();
    let events = text.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let usage = events.map(|event| event["usage"].clone()).find(Value::is_object);
    usage.unwrap_or_else(|| panic!("no usage in {text}"))
}

/// Starts two llama-servers that keep this number of prompts each.
async fn llama_servers(prompts: usize) -> Option<[(Engine, Server); 2]> {
    Some([llama(prompts).await?, llama(prompts).await?])
}

/// Starts two vLLMs, which takes some minutes.
async fn vllm_servers() -> Option<[(Engine, Server); 2]> {
    let start = async || {
        let port = free_port();
        let mut command = engines::vllm_command(&port.to_string())?;
        command.push("--enable-prompt-tokens-details".to_owned());
        let server = Server::start_within(VLLM_START, &command, &[], port).await;
        let is_healthy = async || server::get(&server.url, "/health").await.filter(|(status, _)| *status == 200);
        assert!(poll_for(VLLM_START, is_healthy).await.is_some(), "vLLM is not healthy: {}", server.log());
        Some((vllm::engine(server.url.clone()), server))
    };
    let (one, two) = tokio::join!(start(), start());
    Some([one?, two?])
}

#[tokio::test]
async fn later_turns_are_cached_at_their_home() {
    let Some([(one, _one), (two, _two)]) = llama_servers(CONCURRENCY).await else { return };
    let measured = run(&[one, two], "cache", Workload { conversations: 4, turns: 3 }).await;
    assert!(measured.hit_rate() > 0.8, "{measured:?}");
}

/// Prints two rows of the table in docs/placement.md.
async fn compare(name: &str, servers: [(Engine, Server); 2]) {
    let workload = Workload { conversations: 16, turns: 8 };
    let engines = servers.each_ref().map(|(engine, _)| engine.clone());
    let mut by_load = run(&engines, "least-load", workload).await;
    let mut by_cache = run(&engines, "cache", workload).await;
    eprintln!("{}\n{}", by_load.row(name, "least-load"), by_cache.row(name, "cache"));
    assert!(by_cache.hit_rate() > by_load.hit_rate(), "{name}");
}

#[tokio::test]
#[ignore = "a measurement; run by scripts/test placement"]
async fn llama_servers_hit_more_by_cache() {
    let Some(servers) = llama_servers(8).await else { return };
    compare("llama-server", servers).await;
}

#[tokio::test]
#[ignore = "a measurement of some minutes; run by scripts/test placement"]
async fn vllms_hit_more_by_cache() {
    let Some(servers) = vllm_servers().await else { return };
    compare("vLLM", servers).await;
}
