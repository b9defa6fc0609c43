//! A client of the admin API.

use std::fmt::Write;
use std::time::Duration;

use http::{Method, StatusCode};
use modelrelay_protocol::names::marked;
use modelrelay_protocol::proxies::{PROXY_FORM, ProxyVariable, ProxyVariables};
use reqwest::{Certificate, Client, Proxy, RequestBuilder, Url};
use serde_json::Value;

use super::AdminCliError;
use crate::settings::admin_token;
use crate::settings::commands::{RelayAccess, RelayAddress};

/// The timeout of a request; a running relay responds at once.
const TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct Api {
    client: Client,
    url: Url,
    token: String,
    /// The name of the variable that configured the proxy.
    proxy: Option<String>,
}

impl Api {
    pub(super) fn new(relay: &RelayAccess) -> Result<Self, AdminCliError> {
        Self::at(&relay.address)
    }

    pub(super) fn at(relay: &RelayAddress) -> Result<Self, AdminCliError> {
        let url = Url::parse(&relay.url).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let url = url.ok_or_else(|| {
            AdminCliError(format!(
                "MODELRELAY_URL (--url): {:?} is not allowed: a URL such as http://127.0.0.1:8080",
                relay.url
            ))
        })?;
        let token = token(relay)?;
        // An error means that a provider is already installed, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // reqwest's own rules would send requests to loopback addresses through a proxy, too.
        let mut client = Client::builder().timeout(TIMEOUT).redirect(reqwest::redirect::Policy::none()).no_proxy();
        let variables = ProxyVariables::read(|name| std::env::var(name).ok());
        let variable = variables.of(url.scheme() == "https", url.host_str().unwrap_or_default(), None);
        if let Some(variable) = variable {
            client = client.proxy(proxy(variable)?);
        }
        if let Some(file) = &relay.ca_file {
            let refused = |why: String| AdminCliError(format!("RELAY_CA_FILE (--ca-file) {}: {why}", file.display()));
            let pem = std::fs::read(file).map_err(|error| refused(error.to_string()))?;
            let certificates = Certificate::from_pem_bundle(&pem).map_err(|error| refused(error.to_string()))?;
            client = client.tls_certs_merge(certificates);
        }
        let client =
            client.build().map_err(|error| AdminCliError(format!("cannot create the HTTP client: {error}")))?;
        Ok(Self { client, url, token, proxy: variable.map(|variable| variable.name.clone()) })
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value, AdminCliError> {
        self.call(Method::GET, path, None).await
    }

    /// Returns the response's JSON for a path with these parameters; absent ones are left out.
    pub(super) async fn query(&self, path: &str, query: &[(&str, Option<&str>)]) -> Result<Value, AdminCliError> {
        let mut url = self.url_of(path);
        for (name, value) in query.iter().filter_map(|(name, value)| Some((name, (*value)?))) {
            url.query_pairs_mut().append_pair(name, value);
        }
        self.send(self.client.get(url)).await
    }

    /// Returns the response's JSON; null if it has none.
    pub(super) async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, AdminCliError> {
        let mut request = self.client.request(method, self.url_of(path));
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        self.send(request).await
    }

    fn url_of(&self, path: &str) -> Url {
        let mut url = self.url.clone();
        url.set_path(&format!("{}{path}", self.url.path().trim_end_matches('/')));
        url
    }

    async fn send(&self, request: RequestBuilder) -> Result<Value, AdminCliError> {
        let unreached = |error: reqwest::Error| {
            let (url, error) = (&self.url, in_full(&error));
            let way = self.proxy.as_ref().map(|name| format!(" through the proxy in {name}")).unwrap_or_default();
            AdminCliError(format!("cannot reach the relay at {url}{way}: {error}; check the address (--url)"))
        };
        let response = request.bearer_auth(&self.token).send().await.map_err(unreached)?;
        let status = response.status();
        let text = response.text().await.map_err(unreached)?;
        let answer: Value = serde_json::from_str(&text).unwrap_or_default();
        if status.is_success() {
            return Ok(answer);
        }
        let message = answer["error"]["message"].as_str().unwrap_or("no further details");
        let hint = match status {
            StatusCode::FORBIDDEN => "; set MODELRELAY_ADMIN_TOKEN (--token) to its admin token",
            StatusCode::NOT_FOUND if answer.is_null() => "; check that a relay serves this address (--url)",
            _ => "",
        };
        Err(AdminCliError(format!("the relay returned {}: {}{hint}", status.as_u16(), marked(message))))
    }
}

fn proxy(variable: &ProxyVariable) -> Result<Proxy, AdminCliError> {
    let url = Url::parse(variable.url.expose()).ok();
    let url = url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    let proxy = url.and_then(|url| Proxy::all(url).ok());
    proxy.ok_or_else(|| AdminCliError(format!("{}: {PROXY_FORM}", variable.name)))
}

fn token(relay: &RelayAddress) -> Result<String, AdminCliError> {
    match (&relay.token_file, &relay.token) {
        (Some(file), _) => {
            let token = admin_token::read(file).map_err(|why| {
                AdminCliError(format!("MODELRELAY_ADMIN_TOKEN_FILE (--token-file) {}: {why}", file.display()))
            })?;
            Ok(token.expose().to_owned())
        }
        (None, Some(token)) => Ok(token.expose().to_owned()),
        (None, None) => Err(AdminCliError(
            "MODELRELAY_ADMIN_TOKEN (--token) is missing: set it to the relay's admin token".to_owned(),
        )),
    }
}

/// Returns the innermost cause of an error, because reqwest's own message names none.
fn in_full(error: &dyn std::error::Error) -> String {
    let last = std::iter::successors(Some(error), |error| error.source()).last();
    last.map_or_else(String::new, ToString::to_string)
}

/// Percent-encodes a text as one segment of a path.
pub(super) fn segment(text: &str) -> String {
    let mut segment = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            segment.push(char::from(byte));
        } else {
            // Writing into a string cannot fail.
            let _ = write!(segment, "%{byte:02X}");
        }
    }
    segment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_segment_is_escaped() {
        assert_eq!(segment("w-12.a_~"), "w-12.a_~");
        assert_eq!(segment("a/../b?c#d e%ä"), "a%2F..%2Fb%3Fc%23d%20e%25%C3%A4");
    }
}
