//! The HTTP proxy between this machine and a relay, from the variables that most programs know: `HTTPS_PROXY`,
//! `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`, each in lower case too.
//!
//! A loopback address is never reached through a proxy. The value of a variable is validated only when it is needed:
//! many machines have a proxy that none of their relays is reached through.

use std::net::IpAddr;

use crate::cidr::Cidr;
use crate::secret::Secret;

/// The form of a value, for an error that must not repeat it: it may hold a password.
pub const PROXY_FORM: &str = "its value (not shown) must be http://HOST:PORT or https://HOST:PORT, with USER:PASSWORD@ before HOST if \
    the proxy requires it; SOCKS proxies are not supported";

/// The variables, not validated yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProxyVariables {
    http: Option<ProxyVariable>,
    https: Option<ProxyVariable>,
    all: Option<ProxyVariable>,
    except: String,
}

/// A variable that names a proxy.
#[derive(Clone, Debug, PartialEq)]
pub struct ProxyVariable {
    /// The name, as it is spelled in the environment.
    pub name: String,
    /// The URL of the proxy. It may hold a password.
    pub url: Secret,
}

impl ProxyVariables {
    /// Reads the environment, of which `variable` returns one value.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        let first = |name: &str| {
            let both = [name.to_owned(), name.to_ascii_lowercase()];
            both.into_iter().find_map(|name| {
                let value = variable(&name)?.trim().to_owned();
                (!value.is_empty()).then_some((name, value))
            })
        };
        let proxy = |name: &str| {
            let (name, value) = first(name)?;
            let url = if value.contains("://") { value } else { format!("http://{value}") };
            Some(ProxyVariable { name, url: Secret::new(url) })
        };
        let except = first("NO_PROXY").map(|(_, list)| list).unwrap_or_default();
        Self { http: proxy("HTTP_PROXY"), https: proxy("HTTPS_PROXY"), all: proxy("ALL_PROXY"), except }
    }

    /// The proxy for the relay at `host`, or at one address behind that name; `None` if the relay is reached directly.
    pub fn of(&self, tls: bool, host: &str, address: Option<IpAddr>) -> Option<&ProxyVariable> {
        let host = host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
        let written = host.parse::<IpAddr>().ok();
        let addresses: Vec<IpAddr> = written.into_iter().chain(address).map(|address| address.to_canonical()).collect();
        let is_loopback = addresses.iter().any(IpAddr::is_loopback) || is_below(host, "localhost");
        let is_excepted = self.excepts(|entry| match entry.parse::<Cidr>() {
            Ok(network) => addresses.iter().any(|address| network.contains(*address)),
            Err(_) => entry == "*" || (written.is_none() && is_below(host, entry)),
        });
        let proxy = if tls { &self.https } else { &self.http };
        proxy.as_ref().or(self.all.as_ref()).filter(|_| !is_loopback && !is_excepted)
    }

    fn excepts(&self, matches: impl Fn(&str) -> bool) -> bool {
        // `*.example` is as common as `.example`, and means the same.
        let entries = self.except.split(',').map(str::trim);
        let mut entries =
            entries.map(|entry| entry.strip_prefix("*.").or_else(|| entry.strip_prefix('.')).unwrap_or(entry));
        entries.any(|entry| !entry.is_empty() && matches(entry))
    }
}

/// True if `name` is `domain` or a name below it.
fn is_below(name: &str, domain: &str) -> bool {
    let (name, domain) = (name.to_ascii_lowercase(), domain.to_ascii_lowercase());
    name.strip_suffix(&domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(known: &[(&str, &str)]) -> ProxyVariables {
        ProxyVariables::read(|name| {
            known.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn relay_scheme_selects_proxy_variable() {
        let all = [("HTTPS_PROXY", "http://secure:1"), ("http_proxy", "plain:2"), ("ALL_PROXY", "http://all:3")];
        let chosen = |known: &[_], tls| {
            let variables = variables(known);
            variables.of(tls, "relay.example", None).map(|proxy| (proxy.name.clone(), proxy.url.expose().to_owned()))
        };
        let proxy = |name: &str, url: &str| Some((name.to_owned(), url.to_owned()));
        assert_eq!(chosen(&all, true), proxy("HTTPS_PROXY", "http://secure:1"));
        assert_eq!(chosen(&all, false), proxy("http_proxy", "http://plain:2"));
        assert_eq!(chosen(&all[2..], false), proxy("ALL_PROXY", "http://all:3"));
        assert_eq!(chosen(&all[..1], false), None);
        assert_eq!(
            chosen(&[("ALL_PROXY", " "), ("all_proxy", "https://[::1]")], false),
            proxy("all_proxy", "https://[::1]")
        );
    }

    #[test]
    fn loopback_and_exceptions_are_reached_directly() {
        for (no, host, is_direct) in [
            ("", "127.0.0.2", true),
            ("", "[::1]", true),
            ("", "::ffff:127.0.0.1", true),
            ("", "relay.localhost", true),
            ("", "LOCALHOST.", true),
            ("", "relay.example", false),
            ("example", "relay.example", true),
            (".Example", "relay.example", true),
            ("a, *.example", "relay.EXAMPLE", true),
            ("relay.example", "relay.example", true),
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.1.2.3", "10.1.2.3", true),
            ("fd00::/8", "[fd00::1]", true),
            ("10.0.0.0/8", "11.1.2.3", false),
            ("3", "10.1.2.3", false),
            ("ample", "relay.example", false),
            (",", "relay.example", false),
            ("*", "relay.example", true),
            ("*", "11.1.2.3", true),
        ] {
            let variables = variables(&[("ALL_PROXY", "http://proxy:1"), ("no_proxy", no)]);
            assert_eq!(variables.of(true, host, None).is_none(), is_direct, "{no} {host}");
        }
    }

    #[test]
    fn exception_matches_resolved_address() {
        let variables = variables(&[("ALL_PROXY", "http://proxy:1"), ("NO_PROXY", "10.0.0.0/8")]);
        let is_direct = |address: &str| variables.of(false, "relay.example", address.parse().ok()).is_none();
        assert!(is_direct("10.0.0.1") && is_direct("127.0.0.1") && is_direct("::ffff:10.0.0.1"));
        assert!(!is_direct("11.0.0.1"));
    }

    #[test]
    fn passwords_are_never_shown() {
        let variables = variables(&[("HTTP_PROXY", "http://me:planted@proxy:1")]);
        assert!(!format!("{variables:?}").contains("planted"));
    }
}
