//! The one way to the API server: with a limit on silence, and on depth.

use std::time::Duration;

use kube::client::ClientBuilder;
use kube::{Client, Config};
use tower::util::MapResponseLayer;

mod shallow;

/// Watches end themselves after 290 s at most, so whoever says nothing for longer is gone. Without this limit a connection
/// into nowhere would hold whoever asked for ever.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
/// To reach it at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// From inside a Pod, or as kubeconfig says.
pub async fn client() -> Result<Client, kube::Error> {
    let mut config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.read_timeout = Some(READ_TIMEOUT);
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    Ok(ClientBuilder::try_from(config)?.with_layer(&MapResponseLayer::new(shallow::response)).build())
}
