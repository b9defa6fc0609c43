//! Sends every WebSocket message back, through the relay's own listener, upgrade and socket, for Autobahn's test suite,
//! which needs an echo server. `make autobahn` runs it.
//!
//! ```sh
//! cargo run -p modelrelay-relay --example websocket_echo    # prints its address
//! ```

use std::error::Error;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use axum::routing::any;
use clap::Parser;
use futures_util::{SinkExt, StreamExt};
use http::{Request, StatusCode};
use hyper::upgrade::OnUpgrade;
use modelrelay_relay::app::server::{self, Serving};
use modelrelay_relay::net;
use modelrelay_relay::net::budget::Budget;
use modelrelay_relay::provider::shared::Shared;
use modelrelay_relay::settings::cli::Args;
use modelrelay_relay::settings::config::Config;
use modelrelay_relay::telemetry::metrics::Metrics;
use modelrelay_relay::telemetry::request_journal::RequestJournal;
use modelrelay_relay::telemetry::usage::UsageLedger;
use modelrelay_relay::workers::io::Liveness;
use modelrelay_relay::workers::upgrade::{self, Socket};
use tokio_util::task::TaskTracker;

const CONNECTIONS: usize = 64;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse_from(["websocket-echo", "--worker-secret", "not-used-by-this-example"]);
    let (config, records) = (Config::from_args(&args)?, (RequestJournal::default(), UsageLedger::in_memory(1)));
    let shared = Shared::new(config, Arc::new(Metrics::new()), None, records, "echo".to_owned());
    let listener = net::listen(([127, 0, 0, 1], 0).into()).await?;
    eprintln!("listening on ws://{}", listener.local_addr()?);
    let router = Router::new().fallback(any(connect));
    let serving = Serving { router, base_path: "".into(), shared, tls: None };
    server::serve(listener, serving, CONNECTIONS, TaskTracker::new()).await;
    Ok(())
}

async fn connect(mut request: Request<Body>) -> Response {
    let accept = match upgrade::accept(request.headers()) {
        Ok(accept) => accept,
        Err(refusal) => return *refusal,
    };
    let Some(upgrading) = request.extensions_mut().remove::<OnUpgrade>() else {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::BAD_REQUEST;
        return response;
    };
    tokio::spawn(async move {
        let Ok(upgraded) = upgrading.await else { return };
        let liveness = Liveness::new(Budget::new(u64::MAX));
        liveness.unfinished.allow_bodies();
        if let Some((socket, _place)) = upgrade::open(upgraded, &liveness).await {
            echo(socket, &liveness).await;
        }
    });
    upgrade::switching(accept)
}

/// Echoes messages until the socket ends. A lower layer responds to pings and closes.
async fn echo(mut socket: Socket, liveness: &Liveness) {
    while let Some(Ok(message)) = socket.next().await {
        liveness.unfinished.end();
        if (message.is_text() || message.is_binary()) && socket.send(message).await.is_err() {
            return;
        }
    }
}
