//! Headers that the worker adds to each request that it sends to a relay, for a service in front of the relay:
//! Cloudflare Access, or a reverse proxy with basic authentication.
//!
//! A variable separates headers by line breaks or `;`, because many env files cannot contain line breaks. A file has
//! one header on each line, and its values may contain `;`.

use std::path::{Path, PathBuf};

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};
use modelrelay_platform::files;
use modelrelay_protocol::secret::Secret;

use super::Args;
use super::SettingError;
use super::credential::CredentialSource;
use super::file::File;

/// Headers of the connection, of the WebSocket handshake, and of the worker itself.
const RESERVED: [&str; 12] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-worker-secret",
];

/// The source of the headers.
#[derive(Clone, Debug, PartialEq)]
pub enum RelayHeaders {
    /// Headers, given directly.
    Fixed(HeaderMap),
    /// A file, read again at every dial: a rotation needs no restart.
    File(PathBuf),
}

impl Default for RelayHeaders {
    fn default() -> Self {
        Self::Fixed(HeaderMap::new())
    }
}

impl RelayHeaders {
    /// Returns the current headers. An error never contains a value.
    pub fn read(&self) -> Result<HeaderMap, SettingError> {
        match self {
            Self::Fixed(headers) => Ok(headers.clone()),
            Self::File(path) => read_file("RELAY_HEADERS_FILE", path),
        }
    }

    /// Validates the headers of flags, variables or `worker.yaml`.
    pub(super) fn judge(args: &Args, file: &File, credential: Option<&CredentialSource>) -> Result<Self, SettingError> {
        let path = |path: &Option<PathBuf>| path.clone().filter(|path| !path.as_os_str().is_empty());
        let text = args.relay_headers.as_ref().filter(|text| !text.expose().trim().is_empty());
        let (setting, headers) = if let Some(text) = text {
            ("RELAY_HEADERS", Self::Fixed(parse("RELAY_HEADERS", text, &['\n', ';'])?))
        } else if let Some(path) = path(&args.relay_headers_file) {
            ("RELAY_HEADERS_FILE", Self::File(path))
        } else if let Some(map) = &file.relay_headers.0 {
            let pairs = map.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            ("relayHeaders", Self::Fixed(collect("relayHeaders", pairs)?))
        } else if let Some(path) = path(&file.relay_headers_file) {
            ("relayHeadersFile", Self::File(path))
        } else {
            return Ok(Self::default());
        };
        let now = match &headers {
            Self::Fixed(headers) => headers.clone(),
            Self::File(path) => read_file(setting, path)?,
        };
        if now.contains_key(AUTHORIZATION) && matches!(credential, Some(CredentialSource::TokenFile(_))) {
            let why = "authorization carries the token of WORKER_TOKEN_FILE; use WORKER_SECRET with this header";
            return Err(SettingError::new(setting, "authorization", why));
        }
        Ok(headers)
    }
}

fn read_file(setting: &str, path: &Path) -> Result<HeaderMap, SettingError> {
    let text = files::read_text(path).map_err(|error| {
        SettingError::new(setting, path.display().to_string(), format!("the file cannot be read: {error}"))
    })?;
    parse(setting, &Secret::new(text), &['\n'])
}

fn parse(setting: &str, text: &Secret, separators: &[char]) -> Result<HeaderMap, SettingError> {
    let entries = text.expose().split(separators).map(str::trim).filter(|entry| !entry.is_empty());
    // Without a colon, an entry may be part of a value, so it is not repeated.
    let malformed = || SettingError::hidden(setting, "each header (not shown) must have the form NAME: VALUE");
    let pairs = entries.map(|entry| entry.split_once(':').ok_or_else(malformed));
    collect(setting, pairs.collect::<Result<Vec<_>, _>>()?.into_iter())
}

fn collect<'a>(setting: &str, pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<HeaderMap, SettingError> {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        let parsed = name.trim().parse::<HeaderName>();
        let name = parsed.map_err(|_| SettingError::hidden(setting, "a header (not shown) has an invalid name"))?;
        if RESERVED.contains(&name.as_str()) || name.as_str().starts_with("sec-websocket-") {
            let why = "this header is reserved for the connection, the WebSocket handshake or the worker";
            return Err(SettingError::new(setting, name.as_str(), why));
        }
        let value = HeaderValue::from_str(value.trim()).ok().filter(|value| !value.is_empty());
        let hidden = |why| SettingError::hidden(setting, format!("{name}: {why}"));
        let mut value = value.ok_or_else(|| hidden("the value (not shown) must be one line of text"))?;
        value.set_sensitive(true);
        if headers.insert(&name, value).is_some() {
            return Err(hidden("set more than once"));
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(text: &str) -> Result<HeaderMap, SettingError> {
        parse("RELAY_HEADERS", &Secret::new(text), &['\n', ';'])
    }

    #[test]
    fn variable_separates_headers_by_lines_or_semicolons() {
        for text in [
            "CF-Access-Client-Id: a.b; cf-access-client-secret:c:d",
            "cf-access-client-id: a.b\r\n\nCF-Access-Client-Secret: c:d\n",
        ] {
            let headers = variable(text).unwrap();
            assert_eq!(
                (&headers["cf-access-client-id"], &headers["cf-access-client-secret"]),
                (&"a.b".parse().unwrap(), &"c:d".parse().unwrap())
            );
        }
        assert_eq!(variable(" ;\n").unwrap(), HeaderMap::new());
    }

    #[test]
    fn file_keeps_semicolons_in_values() {
        let headers = parse("RELAY_HEADERS_FILE", &Secret::new("Cookie: a=1; b=2\n"), &['\n']).unwrap();
        assert_eq!(headers["cookie"], "a=1; b=2");
    }

    #[test]
    fn refusal_names_header_without_value() {
        for (text, told) in [
            ("Host: planted", "\"host\" is not allowed"),
            ("Upgrade: planted", "\"upgrade\""),
            ("Sec-WebSocket-Protocol: planted", "\"sec-websocket-protocol\""),
            ("X-Worker-Secret: planted", "\"x-worker-secret\""),
            ("x-a: planted; X-A: planted", "x-a: set more than once"),
            ("x-a:", "x-a: the value (not shown)"),
            ("x-a: planted\u{1}", "x-a: the value (not shown)"),
            ("planted", "NAME: VALUE"),
            ("plan ted: x", "invalid name"),
        ] {
            let error = variable(text).unwrap_err().to_string();
            assert!(error.starts_with("RELAY_HEADERS: ") && error.contains(told), "{error}");
            assert!(!error.contains("planted") && !error.contains("plan ted"), "{error}");
        }
    }
}
