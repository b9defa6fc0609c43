//! What the page "Add a machine" has to know: this relay's address as the browser reaches it, and what a worker has to show.

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

use super::is_encrypted;
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
    let separate = config.admin_listen_addr.and(relay.dashboard.clients_addr);
    let url = config.public_url.clone().unwrap_or_else(|| {
        let host = headers.get(http::header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
        address(host, is_encrypted(&relay, &headers), separate)
    });
    Json(json!({
        "relay_url": url,
        "network_url": if config.public_url.is_some() { None } else { network_url(&relay) },
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

/// `host` as the browser wrote it, its port replaced where clients come in by another listener.
fn address(host: &str, is_encrypted: bool, clients: Option<SocketAddr>) -> String {
    let scheme = if is_encrypted { "https" } else { "http" };
    let Some(clients) = clients else { return format!("{scheme}://{host}") };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(name, _)| name);
    format!("{scheme}://{name}:{}", clients.port())
}

/// What another machine may dial to reach this relay, as far as this machine can tell; `None` where it cannot. Not over TLS,
/// for which the name counts, and not in a container, whose addresses mean nothing outside.
fn network_url(relay: &Relay) -> Option<String> {
    if relay.tls.is_some() || is_in_container() {
        return None;
    }
    let listener = relay.dashboard.clients_addr?;
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
    fn the_address_is_the_browsers_or_its_host_with_the_port_of_clients() {
        assert_eq!(address("relay.example", true, None), "https://relay.example");
        let clients = Some("0.0.0.0:8080".parse().unwrap());
        assert_eq!(address("relay.example:9090", false, clients), "http://relay.example:8080");
        assert_eq!(address("relay.example", false, clients), "http://relay.example:8080");
        assert_eq!(address("[::1]:9090", false, clients), "http://[::1]:8080");
        assert_eq!(address("[::1]", false, clients), "http://[::1]:8080");
    }

    #[test]
    fn a_listener_for_this_machine_alone_has_no_address_for_others() {
        let network = |ip: &str| network_ip(ip.parse().unwrap()).map(|ip| ip.to_string());
        assert_eq!((network("127.0.0.1"), network("::1")), (None, None));
        assert_eq!(network("192.168.1.5").as_deref(), Some("192.168.1.5"));
    }
}
