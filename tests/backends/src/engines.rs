//! Real inference servers with models of random weights. Each runs on one thread: two models of this size gain nothing
//! from more, and on a busy machine their threads would wait for each other.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use url::Url;

use crate::server::{Server, free_port};
use crate::{real, server, vllm};

/// The name of vLLM's model.
pub const VLLM_MODEL: &str = "tiny";

/// A bound for vLLM's start, which takes one to three minutes of a processor.
pub const VLLM_START: Duration = Duration::from_secs(600);

/// Options of a llama-server besides its model, its name and its port.
pub const LLAMA_OPTIONS: [&str; 6] = ["-t", "1", "-tb", "1", "--no-warmup", "--metrics"];

/// Links the models' weights into a folder as `PREFIXname`. The folder's path then identifies every process that has
/// them open.
#[must_use]
pub fn weights(folder: &Path, prefix: &str, models: &[&str]) -> Option<Vec<PathBuf>> {
    let link = |model: &&str| {
        let link = folder.join(format!("{prefix}{model}.gguf"));
        std::os::unix::fs::symlink(real(&format!("models/{model}.gguf"))?, &link).expect("a link can be made");
        Some(link)
    };
    models.iter().map(link).collect()
}

/// Returns the command line of a llama-server for this number of concurrent requests, each of up to 32,768 tokens.
#[must_use]
pub fn llama_command(weights: &Path, name: &str, slots: usize, port: &str) -> Option<Vec<String>> {
    let (program, weights) = (real("bin/llama-server")?, weights.to_string_lossy().into_owned());
    let (slots, context) = (slots.to_string(), (slots * 32_768).to_string());
    let words = ["-m", &weights, "--alias", name, "-np", &slots, "-c", &context, "--port", port];
    let program = program.to_string_lossy().into_owned();
    Some([&[program.as_str()], &words[..], &LLAMA_OPTIONS].concat().into_iter().map(str::to_owned).collect())
}

/// Starts a llama-server for this number of concurrent requests and waits until it has loaded its model.
pub async fn llama_server(weights: &Path, name: &str, slots: usize) -> Option<Server> {
    let port = free_port();
    let server = Server::start(&llama_command(weights, name, slots, &port.to_string())?, &[], port).await;
    until_healthy(&server).await;
    Some(server)
}

/// Waits until the server is healthy: it listens before it is ready.
async fn until_healthy(server: &Server) {
    let is_healthy = async || server::get(&server.url, "/health").await.is_some_and(|(status, _)| status == 200);
    server::until("llama-server is healthy", is_healthy).await;
}

/// Starts a llama-server as a router with these sections of a preset.
pub async fn llama_router(folder: &Path, preset: &str) -> Option<Server> {
    let (program, port) = (real("bin/llama-server")?, free_port());
    let file = folder.join("models.ini");
    std::fs::write(&file, preset).expect("a file can be written");
    let (program, file, on) = (program.to_string_lossy(), file.to_string_lossy(), port.to_string());
    let options = ["--models-max", "0", "--no-models-autoload", "--port", &on];
    let command = [&[&*program, "--models-preset", &*file], &options[..]].concat();
    let command: Vec<String> = command.into_iter().map(str::to_owned).collect();
    let server = Server::start(&command, &[], port).await;
    until_healthy(&server).await;
    Some(server)
}

/// Returns the command line of a vLLM that serves the model [`VLLM_MODEL`].
#[must_use]
pub fn vllm_command(port: &str) -> Option<Vec<String>> {
    let program = vllm("bin/serve")?.to_string_lossy().into_owned();
    Some(vec![program, "--port".to_owned(), port.to_owned()])
}

/// Returns the address of the vLLM that `scripts/backends/vllm run` has started, once it is ready.
///
/// # Panics
/// If it ends, or is not ready within [`VLLM_START`].
pub async fn shared_vllm() -> Option<Url> {
    vllm("bin/serve")?;
    let variable =
        |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is missing: use scripts/backends/vllm run"));
    let url: Url = variable("MODELRELAY_VLLM_URL").parse().expect("this is a URL");
    let log = variable("MODELRELAY_VLLM_LOG");
    let began = Instant::now();
    while server::get(&url, "/health").await.is_none_or(|(status, _)| status != 200) {
        let lines = std::fs::read_to_string(&log).unwrap_or_default();
        let has_ended = lines.lines().next_back().is_some_and(|line| line.starts_with("ended:"));
        assert!(!has_ended && began.elapsed() < VLLM_START, "no vLLM after {:?}:\n{lines}", began.elapsed());
        #[expect(clippy::disallowed_methods, reason = "the pause between two polls of a start that takes minutes")]
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    Some(url)
}

/// Starts an Ollama with these models, none of them loaded. Its storage is in the folder.
pub async fn ollama(folder: &Path, models: &[&str]) -> Option<Server> {
    let (program, port) = (real("bin/ollama")?, free_port());
    let server = ollama_on(folder, port).await?;
    for model in models {
        let file = folder.join(model);
        let from = format!("FROM {}\nPARAMETER num_thread 1\n", real(&format!("models/{model}.gguf"))?.display());
        std::fs::write(&file, from).expect("a file can be written");
        let mut create = tokio::process::Command::new(&program);
        create.args(["create", model, "-f"]).arg(&file).env("OLLAMA_HOST", server.url.authority()).env("HOME", folder);
        let created = create.output().await.expect("Ollama's client runs");
        assert!(created.status.success(), "{}\n{}", String::from_utf8_lossy(&created.stderr), server.log());
    }
    Some(server)
}

/// Starts an Ollama on this port, with the storage in the folder.
pub async fn ollama_on(folder: &Path, port: u16) -> Option<Server> {
    let program = real("bin/ollama")?.to_string_lossy().into_owned();
    let env = [
        ("OLLAMA_HOST", format!("127.0.0.1:{port}")),
        ("OLLAMA_MODELS", folder.join("models").to_string_lossy().into_owned()),
        ("OLLAMA_MAX_LOADED_MODELS", "1".to_owned()),
        ("OLLAMA_KEEP_ALIVE", "-1".to_owned()),
        ("OLLAMA_NUM_PARALLEL", "2".to_owned()),
        ("HOME", folder.to_string_lossy().into_owned()),
    ];
    Some(Server::start(&[program, "serve".to_owned()], &env, port).await)
}
