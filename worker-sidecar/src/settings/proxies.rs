//! The HTTP proxy in front of this worker; see [`modelrelay_protocol::proxies`].
//!
//! Only relays are dialled through it; backends, which are near the worker, and the Kubernetes API never are.

use std::net::SocketAddr;

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;
use modelrelay_multiplexer::net::{self, Proxy};
use modelrelay_protocol::proxies::{PROXY_FORM, ProxyVariable, ProxyVariables};
use url::Url;

use super::{RelayUrl, SettingError};

/// The variables, not validated yet. They may contain passwords.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proxies(ProxyVariables);

impl Proxies {
    /// Reads the variables of the environment.
    pub fn from_env() -> Self {
        Self(ProxyVariables::read(|name| std::env::var(name).ok()))
    }

    /// Returns the proxy through which this relay, or one address behind its name, is dialled.
    pub fn of(&self, relay: &RelayUrl, addr: Option<SocketAddr>) -> Result<Option<Proxy>, SettingError> {
        self.0.of(relay.tls, &relay.host, addr.map(|addr| addr.ip())).map(proxy).transpose()
    }
}

fn proxy(variable: &ProxyVariable) -> Result<Proxy, SettingError> {
    let refuse = || SettingError::hidden(&variable.name, PROXY_FORM);
    let url = Url::parse(variable.url.expose()).map_err(|_| refuse())?;
    let (host, port) = net::host_and_port(&url);
    if host.is_empty() {
        return Err(refuse());
    }
    let tls = match url.scheme() {
        "http" => false,
        "https" => true,
        _ => return Err(refuse()),
    };
    // hyper-util decodes the credentials, which may be percent-encoded.
    let matcher = Matcher::builder().all(url.as_str()).build();
    let intercept = matcher.intercept(&Uri::from_static("http://relay.invalid/")).ok_or_else(refuse)?;
    Ok(Proxy { tls, host: host.to_owned(), port, authorization: intercept.basic_auth().cloned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, value: &str, relay: &str) -> Result<Option<Proxy>, String> {
        let proxies = Proxies(ProxyVariables::read(|known| (known == name).then(|| value.to_owned())));
        let relay = RelayUrl::parse("PROXY_URL", relay).unwrap();
        proxies.of(&relay, None).map_err(|error| error.to_string())
    }

    #[test]
    fn proxy_port_defaults_by_scheme() {
        let shown = |value: &str| of("all_proxy", value, "ws://relay.example").unwrap().unwrap().to_string();
        assert_eq!(shown("plain:2"), "http://plain:2");
        assert_eq!(shown("plain"), "http://plain:80");
        assert_eq!(shown("https://[::1]"), "https://[::1]:443");
    }

    #[test]
    fn credentials_are_decoded_and_never_shown() {
        let proxy = of("HTTP_PROXY", "http://me:p%40ss@proxy:1", "http://relay.example").unwrap().unwrap();
        assert_eq!(proxy.authorization.as_ref().unwrap(), "Basic bWU6cEBzcw==");
        let shown = format!("{proxy:?} {proxy}");
        assert!(!shown.contains("p%40ss") && !shown.contains("bWU6"), "{shown}");
    }

    #[test]
    fn invalid_proxy_variable_fails_only_where_needed() {
        for wrong in ["socks5://me:planted@proxy:1", "http://", "ftp://proxy"] {
            let error = of("all_proxy", wrong, "https://relay.example").unwrap_err();
            assert!(error.starts_with("all_proxy: ") && !error.contains("planted"), "{error}");
            assert_eq!(of("all_proxy", wrong, "http://127.0.0.1:8080"), Ok(None));
        }
    }
}
