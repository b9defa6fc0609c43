//! The client for the API server, with limits on silence and on nesting depth.

use std::time::Duration;

use kube::client::ClientBuilder;
use kube::{Client, Config};
use tower::util::MapResponseLayer;

mod shallow;

/// Watches end themselves after 290 s at most, so a connection that stays silent for longer is dead. Without this
/// limit, a dead connection would block its caller indefinitely.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
/// The timeout for establishing a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a client configured from inside a Pod, or from the kubeconfig.
pub async fn client() -> Result<Client, kube::Error> {
    let mut config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.read_timeout = Some(READ_TIMEOUT);
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    Ok(ClientBuilder::try_from(config)?.with_layer(&MapResponseLayer::new(shallow::response)).build())
}
