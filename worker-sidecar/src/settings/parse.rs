//! Parsers of single values.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use modelrelay_protocol::limits::MAX_WORKER_NAME_CHARS;
use modelrelay_protocol::location::{ALLOWED_LABEL, is_label};
use modelrelay_protocol::names::{is_model_name, is_unprintable};
use modelrelay_protocol::units::parse_size;
use url::Url;

use super::{Engine, Models, SettingError};
use crate::telemetry::{LogFilter, LogFormat};

/// A value and the name of the setting as the user wrote it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given<'a> {
    pub(crate) setting: &'a str,
    pub(crate) value: &'a str,
}

impl<'a> Given<'a> {
    /// Returns the first one that is given.
    pub(super) fn first<const N: usize>(of: [(&'a str, &'a Option<String>); N]) -> Option<Self> {
        of.into_iter().find_map(|(setting, value)| {
            let value = value.as_deref()?.trim();
            (!value.is_empty()).then_some(Self { setting, value })
        })
    }

    fn refuse(self, allowed: &str) -> SettingError {
        SettingError::new(self.setting, self.value, allowed)
    }

    pub(crate) fn provider(self) -> Result<String, SettingError> {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.value.len() <= 128 && self.value.chars().all(known) {
            Ok(self.value.to_owned())
        } else {
            Err(self.refuse("letters, digits, '-', '_' and '.', at most 128"))
        }
    }

    pub(crate) fn label(self) -> Result<String, SettingError> {
        if self.value.chars().count() <= MAX_WORKER_NAME_CHARS && !self.value.contains(is_unprintable) {
            Ok(self.value.to_owned())
        } else {
            Err(self.refuse("at most 128 printable characters"))
        }
    }

    pub(super) fn location_label(self) -> Result<String, SettingError> {
        if is_label(self.value) { Ok(self.value.to_owned()) } else { Err(self.refuse(ALLOWED_LABEL)) }
    }

    pub(super) fn log_filter(self) -> Result<LogFilter, SettingError> {
        LogFilter::parse(self.value).ok_or_else(|| self.refuse(LogFilter::ALLOWED))
    }

    pub(super) fn log_format(self) -> Result<LogFormat, SettingError> {
        match self.value {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(self.refuse("text or json")),
        }
    }

    pub(crate) fn engine(self) -> Result<Engine, SettingError> {
        match self.value {
            "vllm" => Ok(Engine::Vllm),
            "sglang" => Ok(Engine::Sglang),
            "llama-server" => Ok(Engine::LlamaServer),
            "ollama" => Ok(Engine::Ollama),
            "openai" => Ok(Engine::OpenAi),
            _ => Err(self.refuse("vllm, sglang, llama-server, ollama or openai")),
        }
    }

    pub(crate) fn concurrency(self) -> Result<u32, SettingError> {
        concurrency(self.setting, self.value)
    }

    pub(super) fn socket_addr(self) -> Result<SocketAddr, SettingError> {
        self.value.parse().map_err(|_| self.refuse("ADDRESS:PORT such as 127.0.0.1:17990 or [::]:17990"))
    }

    /// The worker's routes begin with `/v1`, and so does the base URL that users copy for an SDK: it is cut off.
    pub(crate) fn backend_url(self) -> Result<Url, SettingError> {
        const ALLOWED: &str = "http://HOST:PORT or https://HOST:PORT, with a path if the backend has one";
        let refuse = || SettingError::url(self.setting, self.value, ALLOWED);
        let url = Url::parse(self.value).map_err(|_| refuse())?;
        let plain =
            url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none();
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(refuse());
        }
        if !plain {
            // It may contain a password, so it is not repeated.
            return Err(SettingError::hidden(self.setting, "must not contain credentials, a query or a fragment"));
        }
        let mut base = url.clone();
        let path = url.path().trim_end_matches('/');
        base.set_path(path.strip_suffix("/v1").unwrap_or(path));
        Ok(base)
    }
}

pub(super) fn seconds(setting: &str, text: &str) -> Result<Duration, SettingError> {
    match text.trim().parse::<u64>() {
        Ok(seconds) if seconds <= 86_400 => Ok(Duration::from_secs(seconds)),
        Ok(_) | Err(_) => Err(SettingError::new(setting, text, "whole seconds, 0 to 86400")),
    }
}

pub(super) fn size(setting: &str, text: &str) -> Result<u64, SettingError> {
    parse_size(text.trim()).map_err(|error| SettingError::new(setting, text, error.allowed()))
}

pub(super) fn concurrency(setting: &str, text: &str) -> Result<u32, SettingError> {
    match text.trim().parse::<u32>() {
        Ok(number @ 1..=100_000) => Ok(number),
        Ok(_) | Err(_) => Err(SettingError::new(setting, text, "a whole number, 1 to 100000")),
    }
}

/// `*` alone requests the backend's list; blanks and repetitions are dropped.
pub(super) fn models<'a>(setting: &str, list: impl Iterator<Item = &'a str>) -> Result<Models, SettingError> {
    let mut models: Vec<String> = Vec::new();
    for name in list.map(str::trim).filter(|name| !name.is_empty()) {
        if !is_model_name(name) {
            return Err(SettingError::new(setting, name, "names of at most 256 printable characters"));
        }
        if !models.iter().any(|known| known == name) {
            models.push(name.to_owned());
        }
    }
    match models.as_slice() {
        [] => Err(SettingError::new(setting, "", "model names separated by commas, or *")),
        [only] if only == "*" => Ok(Models::Listed),
        names if names.iter().any(|name| name == "*") => {
            Err(SettingError::new(setting, models.join(","), "either * or names, not both"))
        }
        _ => Ok(Models::Fixed(models)),
    }
}

pub(super) fn headers(of: Option<&BTreeMap<String, String>>) -> Result<HeaderMap, SettingError> {
    const OURS: [&str; 4] = ["host", "content-length", "transfer-encoding", "connection"];
    let mut headers = HeaderMap::new();
    for (name, value) in of.into_iter().flatten() {
        let setting = "backend.headers";
        let parsed = name.parse::<HeaderName>().ok().filter(|name| !OURS.contains(&name.as_str()));
        let Some(parsed) = parsed else {
            return Err(SettingError::new(setting, name, "header names other than connection headers"));
        };
        // A value may be a credential, so it is not repeated.
        let mut value = HeaderValue::from_str(value)
            .map_err(|_| SettingError::hidden(format!("{setting}.{name}"), "the value must be one line of text"))?;
        value.set_sensitive(true);
        headers.insert(parsed, value);
    }
    Ok(headers)
}
