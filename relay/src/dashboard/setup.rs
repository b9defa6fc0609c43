//! The data of the page "Add a machine": this relay's addresses, as far as the browser's address shows them, and the
//! credential of a worker.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::json;
use tracing::info;

use super::{Addresses, Dashboard, is_encrypted};
use crate::http::body::read_small;
use crate::http::problem::{problem, problem_in};
use crate::login::actor::AuditDetail;
use crate::settings::config::ProviderConfig;

/// The largest body, with the name of a provider.
const MAX_BODY_BYTES: usize = 4 << 10;

/// `GET /admin/setup`
pub(super) async fn overview(State(dashboard): State<Arc<Dashboard>>, headers: HeaderMap) -> Response {
    let relay = &dashboard.relay;
    let config = relay.shared.config.load();
    let providers = config.providers.iter().map(|provider| {
        json!({ "name": provider.name, "enabled": provider.enabled, "has_secret": secret_of(provider).is_some() })
    });
    let Addresses { clients, workers } = dashboard.addresses;
    let host = headers.get(http::header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let is_encrypted = is_encrypted(relay, &headers);
    let reached = |listener: Option<SocketAddr>| match listener {
        None => url(is_encrypted, host),
        // Bypasses a proxy that encrypts for the listener of the browser.
        Some(listener) => url(relay.tls.is_some(), &with_port(host, listener.port())),
    };
    let of_clients = config.admin_listen_addr.and(clients);
    // A connection that a proxy encrypts is not replaced with a plain port if workers may use it, too.
    let is_encrypted_by_proxy = is_encrypted && relay.tls.is_none() && config.workers_on_client_port;
    let of_workers = match config.worker_listen_addr {
        Some(_) if !is_encrypted_by_proxy => workers,
        _ => of_clients,
    };
    let worker_url = config.worker_public_url.as_ref().or(config.public_url.as_ref());
    Json(json!({
        "relay_url": config.public_url.clone().unwrap_or_else(|| reached(of_clients)),
        "worker_url": worker_url.cloned().unwrap_or_else(|| reached(of_workers)),
        "network_url": if worker_url.is_some() { None } else { network_url(&dashboard) },
        "listen_with": workers.map(|workers| listen_with(config.worker_listen_addr.is_some(), workers.port())),
        "providers": providers.collect::<Vec<_>>(),
        "version": env!("CARGO_PKG_VERSION"),
        "require_api_keys": config.require_api_keys,
    }))
    .into_response()
}

/// `POST /admin/setup/secret`. It is a POST, so that it appears as a change in the audit log, and in no history of a
/// browser.
pub(super) async fn secret(State(dashboard): State<Arc<Dashboard>>, body: Body) -> Response {
    #[derive(Deserialize)]
    struct SecretBody {
        provider: String,
    }
    let body = read_small(body, MAX_BODY_BYTES).await;
    let Some(SecretBody { provider: name }) = body.and_then(|body| serde_json::from_slice(&body).ok()) else {
        return problem(StatusCode::BAD_REQUEST, "invalid_json", "the body must be {\"provider\": \"NAME\"}");
    };
    let config = dashboard.relay.shared.config.load();
    let Some(provider) = config.providers.iter().find(|provider| provider.name == name) else {
        let message = "no provider of this relay has that name";
        return problem_in(StatusCode::NOT_FOUND, "provider_not_found", message, Some("provider"));
    };
    let Some(secret) = secret_of(provider) else {
        let message =
            format!("provider {name} has no worker secret: set WORKER_SECRET, or workerSecrets in relay.yaml");
        return problem_in(StatusCode::CONFLICT, "no_worker_secret", message, Some("provider"));
    };
    info!(provider = name, "worker secret read by an admin");
    let mut response = Json(json!({ "provider": name, "secret": secret })).into_response();
    response.headers_mut().insert(http::header::CACHE_CONTROL, http::HeaderValue::from_static("no-store"));
    response.extensions_mut().insert(AuditDetail { subject: Some(name), detail: None });
    response
}

/// Returns the secret that expires last: a machine that is added now should not need another one soon.
fn secret_of(provider: &ProviderConfig) -> Option<&str> {
    let now = SystemTime::now();
    let good = provider.worker_secrets.iter().filter(|secret| secret.not_after.is_none_or(|end| end > now));
    let lasting = good.max_by_key(|secret| (secret.not_after.is_none(), secret.not_after));
    lasting.map(|secret| secret.secret.expose())
}

fn url(is_encrypted: bool, authority: &str) -> String {
    format!("{}://{authority}", if is_encrypted { "https" } else { "http" })
}

/// The browser's `host` with the port of another listener.
fn with_port(host: &str, port: u16) -> String {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(name, _)| name);
    format!("{name}:{port}")
}

/// The setting with which the relay listens for workers of all machines.
fn listen_with(is_their_own: bool, port: u16) -> String {
    format!("{}=0.0.0.0:{port}", if is_their_own { "WORKER_LISTEN_ADDR" } else { "LISTEN_ADDR" })
}

/// The address at which a worker on another machine may reach this relay, as far as this machine knows; `None` if it
/// does not. Not over TLS, where the name matters, and not in a container, whose addresses are not reachable from
/// outside.
fn network_url(dashboard: &Dashboard) -> Option<String> {
    if dashboard.relay.tls.is_some() || is_in_container() {
        return None;
    }
    let listener = dashboard.addresses.workers?;
    network_ip(listener.ip()).map(|ip| format!("http://{}", SocketAddr::new(ip, listener.port())))
}

fn is_in_container() -> bool {
    let signs = ["/.dockerenv", "/run/.containerenv"];
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() || signs.iter().any(|sign| Path::new(sign).exists())
}

/// The address of a listener; for one on all addresses, the source address of this machine's connections to the
/// internet.
fn network_ip(listener: IpAddr) -> Option<IpAddr> {
    if !listener.is_unspecified() {
        return Some(listener).filter(|ip| !ip.is_loopback());
    }
    // An address of RFC 5737. Connecting a UDP socket sends nothing, but selects the source address.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_port_replaces_port_of_browser_address() {
        assert_eq!(with_port("relay.example:9090", 8080), "relay.example:8080");
        assert_eq!(with_port("relay.example", 8080), "relay.example:8080");
        assert_eq!(with_port("[::1]:9090", 8080), "[::1]:8080");
        assert_eq!(with_port("[::1]", 8080), "[::1]:8080");
    }

    #[test]
    fn loopback_listener_has_no_network_address() {
        let network = |ip: &str| network_ip(ip.parse().unwrap()).map(|ip| ip.to_string());
        assert_eq!((network("127.0.0.1"), network("::1")), (None, None));
        assert_eq!(network("192.168.1.5").as_deref(), Some("192.168.1.5"));
    }
}
