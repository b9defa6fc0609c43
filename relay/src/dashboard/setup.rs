//! What the page "Add a machine" has to know: this relay's addresses, as far as the browser's one tells, and what a worker has
//! to show.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde_json::json;
use tracing::info;

use super::{Addresses, is_encrypted};
use crate::admin::{Told, problem, problem_in};
use crate::config::ProviderConfig;
use crate::relay::Relay;

/// A provider's name.
const MAX_BODY_BYTES: usize = 4 << 10;

/// `GET /admin/setup`
pub(crate) async fn overview(State(relay): State<Arc<Relay>>, headers: HeaderMap) -> Response {
    let config = relay.shared.config.load();
    let providers = config.providers.iter().map(|provider| {
        json!({ "name": provider.name, "enabled": provider.enabled, "has_secret": secret_of(provider).is_some() })
    });
    let Addresses { clients, workers } = relay.dashboard.addresses;
    let host = headers.get(http::header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let is_encrypted = is_encrypted(&relay, &headers);
    let reached = |listener: Option<SocketAddr>| match listener {
        None => url(is_encrypted, host),
        // Past a proxy that encrypts for the listener that the browser came by.
        Some(listener) => url(relay.tls.is_some(), &with_port(host, listener.port())),
    };
    let of_clients = config.admin_listen_addr.and(clients);
    // What a proxy encrypts is not left for a port that nobody does, where workers may come that way, too.
    let is_encrypted_by_proxy = is_encrypted && relay.tls.is_none() && config.workers_on_client_port;
    let of_workers = match config.worker_listen_addr {
        Some(_) if !is_encrypted_by_proxy => workers,
        _ => of_clients,
    };
    let worker_url = config.worker_public_url.as_ref().or(config.public_url.as_ref());
    Json(json!({
        "relay_url": config.public_url.clone().unwrap_or_else(|| reached(of_clients)),
        "worker_url": worker_url.cloned().unwrap_or_else(|| reached(of_workers)),
        "network_url": if worker_url.is_some() { None } else { network_url(&relay) },
        "listen_with": workers.map(|workers| listen_with(config.worker_listen_addr.is_some(), workers.port())),
        "providers": providers.collect::<Vec<_>>(),
        "version": env!("CARGO_PKG_VERSION"),
        "require_api_keys": config.require_api_keys,
    }))
    .into_response()
}

/// `POST /admin/setup/secret`. A POST, so that it is a change for whoever looks into the audit log, and no address that a
/// browser remembers.
pub(crate) async fn secret(State(relay): State<Arc<Relay>>, body: Body) -> Response {
    #[derive(Deserialize)]
    struct Asked {
        provider: String,
    }
    let body = Limited::new(body, MAX_BODY_BYTES).collect().await.map(http_body_util::Collected::to_bytes);
    let asked = body.ok().and_then(|body| serde_json::from_slice::<Asked>(&body).ok());
    let Some(Asked { provider: name }) = asked else {
        return problem(StatusCode::BAD_REQUEST, "invalid_json", "the body must be {\"provider\": \"NAME\"}");
    };
    let config = relay.shared.config.load();
    let Some(provider) = config.providers.iter().find(|provider| provider.name == name) else {
        let message = "no provider of this relay has that name";
        return problem_in(StatusCode::NOT_FOUND, "provider_not_found", message, Some("provider"));
    };
    let Some(secret) = secret_of(provider) else {
        let message =
            format!("provider {name} has no worker secret: set WORKER_SECRET, or workerSecrets in relay.yaml");
        return problem_in(StatusCode::CONFLICT, "no_worker_secret", message, Some("provider"));
    };
    info!(provider = name, "an admin asked for the worker secret");
    let mut response = Json(json!({ "provider": name, "secret": secret })).into_response();
    response.headers_mut().insert(http::header::CACHE_CONTROL, http::HeaderValue::from_static("no-store"));
    response.extensions_mut().insert(Told { subject: Some(name), detail: None });
    response
}

/// The one that lasts longest: a machine that is added now should not have to be told another soon.
fn secret_of(provider: &ProviderConfig) -> Option<&str> {
    let now = SystemTime::now();
    let good = provider.worker_secrets.iter().filter(|secret| secret.not_after.is_none_or(|end| end > now));
    let lasting = good.max_by_key(|secret| (secret.not_after.is_none(), secret.not_after));
    lasting.map(|secret| secret.secret.expose())
}

fn url(is_encrypted: bool, authority: &str) -> String {
    format!("{}://{authority}", if is_encrypted { "https" } else { "http" })
}

/// `host` as the browser wrote it, with the port of another listener.
fn with_port(host: &str, port: u16) -> String {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(name, _)| name);
    format!("{name}:{port}")
}

/// What has the relay listen to workers of all machines.
fn listen_with(is_their_own: bool, port: u16) -> String {
    format!("{}=0.0.0.0:{port}", if is_their_own { "WORKER_LISTEN_ADDR" } else { "LISTEN_ADDR" })
}

/// What a worker on another machine may dial to reach this relay, as far as this machine can tell; `None` where it cannot. Not over TLS,
/// for which the name counts, and not in a container, whose addresses mean nothing outside.
fn network_url(relay: &Relay) -> Option<String> {
    if relay.tls.is_some() || is_in_container() {
        return None;
    }
    let listener = relay.dashboard.addresses.workers?;
    network_ip(listener.ip()).map(|ip| format!("http://{}", SocketAddr::new(ip, listener.port())))
}

fn is_in_container() -> bool {
    let signs = ["/.dockerenv", "/run/.containerenv"];
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() || signs.iter().any(|sign| Path::new(sign).exists())
}

/// The address of a listener; of one on all addresses, that by which this machine reaches the rest of the world.
fn network_ip(listener: IpAddr) -> Option<IpAddr> {
    if !listener.is_unspecified() {
        return Some(listener).filter(|ip| !ip.is_loopback());
    }
    // Of RFC 5737: to connect a UDP socket sends nothing, and chooses the address that would be sent from.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_another_listener_takes_the_place_of_the_browsers() {
        assert_eq!(with_port("relay.example:9090", 8080), "relay.example:8080");
        assert_eq!(with_port("relay.example", 8080), "relay.example:8080");
        assert_eq!(with_port("[::1]:9090", 8080), "[::1]:8080");
        assert_eq!(with_port("[::1]", 8080), "[::1]:8080");
    }

    #[test]
    fn a_listener_for_this_machine_alone_has_no_address_for_others() {
        let network = |ip: &str| network_ip(ip.parse().unwrap()).map(|ip| ip.to_string());
        assert_eq!((network("127.0.0.1"), network("::1")), (None, None));
        assert_eq!(network("192.168.1.5").as_deref(), Some("192.168.1.5"));
    }
}
