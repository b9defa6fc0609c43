//! The demo backend: `modelrelay-worker demo`, so that a first run needs neither a GPU nor a download.
//!
//! It is no model. It repeats the prompt, states that in every response, and supports the dialects of a real backend
//! (chat, completions, Responses, Messages, embeddings, tokens), so that a client which works with it works with vLLM.
//! It streams word by word at a human pace, which reveals a proxy in between that buffers.
//!
//! Rules:
//! - A response body owns everything that the response needs. A client that disconnects drops the body, and with it the
//!   response.
//! - Nothing grows without bound: prompts are echoed as an excerpt, and only the newest [`responses::STORED`] Responses
//!   are stored.
//! - An invalid body is rejected in the dialect of its route, as by a real backend.

mod answer;
mod embeddings;
mod messages;
mod openai;
mod reply;
mod responses;
mod tokens;

#[cfg(test)]
mod tests;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, Uri};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Json, Router};
use modelrelay_platform::{readiness, sockets};
use modelrelay_protocol::units::parse_duration_or_zero;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::shutdown;
use reply::{DemoError, Dialect};

/// The default id of the demo backend's only model.
pub const MODEL: &str = "demo";

/// The longest accepted body: above the relay's default, so that users meet the relay's limit first.
const MAX_BODY_BYTES: usize = 64 << 20;

/// The reported context length; nothing is ever cut because of it.
const CONTEXT_TOKENS: u64 = 32_768;

/// Settings of `modelrelay-worker demo`.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoArgs {
    /// Address to listen on; port 0 selects a free port, which the first log line reports
    #[arg(long, env = "DEMO_LISTEN", default_value = "127.0.0.1:8000", value_name = "ADDR")]
    pub listen: SocketAddr,

    /// Id of the only model that it serves; run several demo backends for several models of a multiplexer
    #[arg(long, env = "DEMO_MODEL", default_value = MODEL, value_name = "ID")]
    pub model: String,

    /// Delay before each word of a response: `40ms`, `1s`, `0ms` for none
    #[arg(long, env = "DEMO_DELAY", default_value = "40ms", value_name = "DURATION", value_parser = parse_duration_or_zero)]
    pub delay: Duration,
}

/// Serves the demo backend until SIGINT or SIGTERM.
///
/// # Errors
/// The address cannot be bound.
pub async fn run(args: DemoArgs) -> io::Result<()> {
    let listener = sockets::listen(args.listen, sockets::BACKLOG)?;
    tracing::info!(address = %listener.local_addr()?, model = args.model, "demo backend listening; it is not a model");
    let first_signal = shutdown::first_signal()?;
    readiness::report();
    let shutdown = async {
        let signal = first_signal.await;
        tracing::info!(signal, "graceful shutdown");
    };
    serve_demo(listener, Demo::new(&args.model, args.delay), shutdown).await
}

/// Serves the demo backend at its default pace on `listener`, until `shutdown` resolves and the running responses have
/// ended.
///
/// # Errors
/// Those of the listener.
pub async fn serve(listener: TcpListener, shutdown: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    serve_demo(listener, Demo::new(MODEL, Duration::from_millis(40)), shutdown).await
}

async fn serve_demo(
    listener: TcpListener,
    demo: Demo,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let listener = listener.tap_io(|stream| {
        // Without it, a word may wait for the acknowledgement of the previous one.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
    });
    axum::serve(listener, router(demo)).with_graceful_shutdown(shutdown).await
}

/// The state that the routes share.
#[derive(Debug, Clone)]
struct Demo {
    model: Arc<str>,
    delay: Duration,
    answering: Answering,
    stored: responses::Store,
}

impl Demo {
    fn new(model: &str, delay: Duration) -> Self {
        Self { model: model.into(), delay, answering: Answering::default(), stored: responses::Store::default() }
    }
}

/// Counts the responses in progress; `/health` reports the number, which proves that a cancel arrived here.
#[derive(Debug, Clone, Default)]
struct Answering(Arc<AtomicUsize>);

impl Answering {
    fn begin(&self) -> Underway {
        self.0.fetch_add(1, Ordering::Relaxed);
        Underway(self.0.clone())
    }
}

/// One response in progress, until dropped.
#[derive(Debug)]
struct Underway(Arc<AtomicUsize>);

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn router(demo: Demo) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*id}", get(one_model))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::retrieve))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(demo)
}

async fn health(State(demo): State<Demo>) -> Json<Value> {
    Json(json!({"status": "ok", "backend": "demo", "answering": demo.answering.0.load(Ordering::Relaxed)}))
}

async fn list_models(State(demo): State<Demo>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_card(&demo)]}))
}

async fn one_model(State(demo): State<Demo>, Path(id): Path<String>) -> Result<Json<Value>, DemoError> {
    if *id == *demo.model {
        Ok(Json(model_card(&demo)))
    } else {
        Err(DemoError::no_such_model(&demo, Dialect::OpenAi, &id))
    }
}

fn model_card(demo: &Demo) -> Value {
    json!({"id": &*demo.model, "object": "model", "created": 0, "owned_by": "modelrelay", "max_model_len": CONTEXT_TOKENS})
}

async fn no_such_path(uri: Uri) -> DemoError {
    DemoError::new(Dialect::of_path(uri.path()), StatusCode::NOT_FOUND, "not_found", "no such path")
}

/// The router adds the `Allow` header.
async fn wrong_method(uri: Uri) -> DemoError {
    DemoError::new(
        Dialect::of_path(uri.path()),
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        "method not allowed",
    )
}
