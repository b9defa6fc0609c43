//! The HTTP proxy in front of this worker, from the variables that most programs know: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`
//! and `NO_PROXY`, each in lower case too.
//!
//! Only relays are dialled through it. Backends, which are near the worker, and the API of Kubernetes never are. Neither is a
//! loopback address. A variable is judged only where it is needed: many machines have one that no relay of theirs needs.

use std::net::{IpAddr, SocketAddr};

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;
use modelrelay_protocol::secret::Secret;
use url::Url;

use super::{RelayUrl, SettingError};
use crate::net::{self, Proxy};

/// The variables, not judged yet. They may hold passwords.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proxies {
    http: Option<Named>,
    https: Option<Named>,
    all: Option<Named>,
    except: String,
}

#[derive(Clone, Debug, PartialEq)]
struct Named {
    variable: String,
    value: Secret,
}

impl Proxies {
    /// From the environment.
    pub fn from_env() -> Self {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Self {
        let first = |name: &str| {
            let both = [name.to_owned(), name.to_ascii_lowercase()];
            both.into_iter().find_map(|name| {
                let value = variable(&name).filter(|value| !value.trim().is_empty())?;
                Some(Named { variable: name, value: Secret::new(value.trim()) })
            })
        };
        let except = first("NO_PROXY").map(|no| no.value.expose().to_ascii_lowercase()).unwrap_or_default();
        Self { http: first("HTTP_PROXY"), https: first("HTTPS_PROXY"), all: first("ALL_PROXY"), except }
    }

    /// The proxy through which this relay is dialled, or one address behind its name.
    pub fn of(&self, relay: &RelayUrl, addr: Option<SocketAddr>) -> Result<Option<Proxy>, SettingError> {
        let of_scheme = if relay.tls { &self.https } else { &self.http };
        let Some(given) = of_scheme.as_ref().or(self.all.as_ref()) else { return Ok(None) };
        let is_direct = is_loopback(&relay.host)
            || addr.is_some_and(|addr| addr.ip().to_canonical().is_loopback())
            || self.excepts(&relay.authority())
            || addr.is_some_and(|addr| self.excepts(&addr.to_string()));
        if is_direct { Ok(None) } else { given.proxy().map(Some) }
    }

    fn excepts(&self, authority: &str) -> bool {
        // `*.example` is as common as `.example`, and means the same.
        let list = self.except.split(',').map(str::trim);
        let list: Vec<&str> = list.map(|name| name.strip_prefix("*.").unwrap_or(name)).collect();
        let matcher = Matcher::builder().all("http://proxy.invalid").no(list.join(",")).build();
        let uri = format!("http://{}/", authority.to_ascii_lowercase()).parse::<Uri>();
        uri.is_ok_and(|uri| matcher.intercept(&uri).is_none())
    }
}

impl Named {
    fn proxy(&self) -> Result<Proxy, SettingError> {
        const ALLOWED: &str = "its value (not shown) must be http://HOST:PORT or https://HOST:PORT, with USER:PASSWORD@ before \
            HOST where the proxy requires it; proxies that speak SOCKS are not supported";
        let refuse = || SettingError::hidden(&self.variable, ALLOWED);
        let text = self.value.expose();
        let text = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let url = Url::parse(&text).map_err(|_| refuse())?;
        let (host, port) = net::host_and_port(&url);
        if host.is_empty() {
            return Err(refuse());
        }
        let tls = match url.scheme() {
            "http" => false,
            "https" => true,
            _ => return Err(refuse()),
        };
        // The library decodes the credentials, which may be percent-encoded.
        let matcher = Matcher::builder().all(url.as_str()).build();
        let intercept = matcher.intercept(&Uri::from_static("http://relay.invalid/")).ok_or_else(refuse)?;
        Ok(Proxy { tls, host: host.to_owned(), port, authorization: intercept.basic_auth().cloned() })
    }
}

fn is_loopback(host: &str) -> bool {
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    let is_address = name.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
    is_address || name == "localhost" || name.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(variables: &[(&str, &str)], relay: &str) -> Result<Option<String>, String> {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let relay = RelayUrl::parse("PROXY_URL", relay).unwrap();
        let proxy = Proxies::from(find).of(&relay, None).map_err(|error| error.to_string())?;
        Ok(proxy.map(|proxy| proxy.to_string()))
    }

    #[test]
    fn scheme_of_the_relay_chooses_the_variable() {
        let all = [("HTTPS_PROXY", "http://secure:1"), ("http_proxy", "plain:2"), ("ALL_PROXY", "http://all:3")];
        let told = |variables: &[_], relay| through(variables, relay).unwrap().unwrap_or_default();
        assert_eq!(told(&all, "wss://relay.example"), "http://secure:1");
        assert_eq!(told(&all, "http://relay.example"), "http://plain:2");
        assert_eq!(told(&all[2..], "ws://relay.example"), "http://all:3");
        assert_eq!(told(&all[..1], "ws://relay.example"), "");
        assert_eq!(
            told(&[("ALL_PROXY", " "), ("all_proxy", "https://[::1]")], "ws://relay.example"),
            "https://[::1]:443"
        );
    }

    #[test]
    fn loopback_and_exceptions_are_dialled_directly() {
        let except = |no| [("ALL_PROXY", "http://proxy:1"), ("no_proxy", no)];
        for (no, relay, is_direct) in [
            ("", "http://127.0.0.2:8080", true),
            ("", "http://[::1]:8080", true),
            ("", "http://[::ffff:127.0.0.1]:8080", true),
            ("", "http://relay.localhost", true),
            ("", "http://relay.example", false),
            ("example", "http://relay.example", true),
            (".Example", "http://relay.example", true),
            ("a, *.example", "http://relay.EXAMPLE", true),
            ("10.0.0.0/8", "http://10.1.2.3:8080", true),
            ("fd00::/8", "http://[fd00::1]:8080", true),
            ("10.0.0.0/8", "http://11.1.2.3:8080", false),
            ("ample", "http://relay.example", false),
            ("*", "https://relay.example", true),
        ] {
            assert_eq!(through(&except(no), relay).unwrap().is_none(), is_direct, "{no} {relay}");
        }
        let proxies = Proxies::from(|name| (name == "ALL_PROXY").then(|| "http://proxy:1".to_owned()));
        let proxies = Proxies { except: "10.0.0.0/8".to_owned(), ..proxies };
        let relay = RelayUrl::parse("PROXY_URL", "dns+http://relay.example").unwrap();
        let at = |addr: &str| proxies.of(&relay, Some(addr.parse().unwrap())).unwrap();
        assert!(at("10.0.0.1:80").is_none() && at("127.0.0.1:80").is_none() && at("11.0.0.1:80").is_some());
    }

    #[test]
    fn credentials_are_decoded_and_never_shown() {
        let proxies = Proxies::from(|name| (name == "HTTP_PROXY").then(|| "http://me:p%40ss@proxy:1".to_owned()));
        let relay = RelayUrl::parse("PROXY_URL", "http://relay.example").unwrap();
        let proxy = proxies.of(&relay, None).unwrap().unwrap();
        assert_eq!(proxy.authorization.as_ref().unwrap(), "Basic bWU6cEBzcw==");
        let shown = format!("{proxies:?} {proxy:?} {proxy}");
        assert!(!shown.contains("p%40ss") && !shown.contains("bWU6"), "{shown}");
    }

    #[test]
    fn wrong_variable_is_an_error_where_needed() {
        for wrong in ["socks5://me:planted@proxy:1", "http://", "ftp://proxy"] {
            let error = through(&[("all_proxy", wrong)], "https://relay.example").unwrap_err();
            assert!(error.starts_with("all_proxy: ") && !error.contains("planted"), "{error}");
            assert_eq!(through(&[("all_proxy", wrong)], "http://127.0.0.1:8080"), Ok(None));
        }
    }
}
