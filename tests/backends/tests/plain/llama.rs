//! llama-server, built from source or from the wheel.

use modelrelay_backends::server::Server;
use modelrelay_backends::{engines, real};

use crate::engine::{Engine, Stack};
use crate::steps;

/// A llama-server for this number of concurrent requests.
pub(crate) async fn llama(slots: usize) -> Option<(Engine, Server)> {
    let server = engines::llama_server(&real("models/tiny-a.gguf")?, "tiny-a", slots).await?;
    let running = "llamacpp:requests_processing";
    let url = server.url.clone();
    Some((Engine { kind: "llama-server", model: "tiny-a", url, running, endless: 30_000 }, server))
}

macro_rules! steps {
    ($($step:ident),* $(,)?) => {
        $(#[tokio::test]
        async fn $step() {
            let Some((engine, _server)) = llama(2).await else { return };
            steps::$step(&engine, &Stack::start(&engine).await).await;
        })*
    };
}

steps!(
    model_is_discovered,
    responses_are_unchanged,
    errors_are_unchanged,
    concurrent_streams_are_unchanged,
    disconnect_stops_generation,
);
