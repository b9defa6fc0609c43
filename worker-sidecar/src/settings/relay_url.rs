//! The address of the relays.

use modelrelay_multiplexer::net;
use url::Url;

use super::SettingError;

/// One relay address, or a name whose addresses are all relays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayUrl {
    /// True to resolve the name regularly and dial every address (`dns+http(s)`).
    pub every_address: bool,
    /// True for `https` and `wss`.
    pub tls: bool,
    /// Name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// The path before `/v1/worker/connect`, without a trailing `/`.
    pub base_path: String,
}

impl Default for RelayUrl {
    fn default() -> Self {
        Self { every_address: false, tls: false, host: "127.0.0.1".to_owned(), port: 8080, base_path: String::new() }
    }
}

impl RelayUrl {
    /// Parses a URL of one of the schemes.
    pub(crate) fn parse(setting: &str, text: &str) -> Result<Self, SettingError> {
        const ALLOWED: &str = "http://HOST:PORT, https://HOST:PORT, ws:// or wss:// likewise, or dns+http://NAME:PORT, dns+https://NAME:PORT";
        let refuse = || SettingError::url(setting, text, ALLOWED);
        let (every_address, plain) = match text.strip_prefix("dns+") {
            Some(rest) if rest.starts_with("http") => (true, rest),
            Some(_) => return Err(refuse()),
            None => (false, text),
        };
        let url = Url::parse(plain).map_err(|_| refuse())?;
        let tls = match url.scheme() {
            "http" | "ws" => false,
            "https" | "wss" => true,
            _ => return Err(refuse()),
        };
        if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
            return Err(SettingError::hidden(setting, "must not contain credentials, a query or a fragment"));
        }
        let (host, port) = net::host_and_port(&url);
        if host.is_empty() {
            return Err(refuse());
        }
        Ok(Self {
            every_address,
            tls,
            host: host.to_owned(),
            port,
            base_path: url.path().trim_end_matches('/').to_owned(),
        })
    }

    /// Formats `host:port` as in a URL.
    pub fn authority(&self) -> String {
        net::authority(&self.host, self.port)
    }

    /// Returns the URL of the worker socket, for the handshake.
    pub fn connect_url(&self, provider: &str) -> String {
        let scheme = if self.tls { "wss" } else { "ws" };
        format!("{scheme}://{}{}/v1/worker/connect?provider={provider}", self.authority(), self.base_path)
    }

    /// Returns the address as users write it.
    pub fn address(&self) -> String {
        let every = if self.every_address { "dns+" } else { "" };
        let scheme = if self.tls { "https" } else { "http" };
        format!("{every}{scheme}://{}{}", self.authority(), self.base_path)
    }
}
