//! Parsers of single values. An error is the end of the sentence "… is not allowed: ", so it states the allowed values.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use http::HeaderName;
use modelrelay_protocol::cidr::Cidr;
use modelrelay_protocol::headers;
use modelrelay_protocol::location::{ALLOWED_LABEL, is_label};
use modelrelay_protocol::units::{MAX_DURATION, MIN_DURATION, parse_duration_or_zero, parse_size};

use super::{Accounts, Names, OptionalAddr, OptionalPath, OptionalText, Proxies};
use crate::http::base_path;
use crate::settings::config::{
    CacheIsolation, FairnessMode, MOST_HOMES, MOST_SPILL_REQUESTS, MOST_USAGE_DAYS, Placement, RawAliases,
};
use crate::telemetry::log::{LogFilter, LogFormat};

type AllowedValues = String;

/// The longest queue. More queued requests are a mistake: each holds its body.
const MAX_QUEUE_LEN: usize = 1_000_000;
/// The most networks in `TRUSTED_PROXIES`.
const MAX_PROXIES: usize = 256;
/// The most names in `ALLOWED_HOSTS` and `RESPONSE_HEADERS`.
const MAX_NAMES: usize = 64;
/// The smallest request journal.
const MIN_JOURNAL_BYTES: u64 = 64 << 10;
/// The most days, as in the longest duration.
const MAX_DAYS: u32 = 3650;
/// The most ServiceAccounts in `WORKER_SERVICE_ACCOUNTS`.
const MAX_ACCOUNTS: usize = 64;

pub(super) fn listen_addr(text: &str) -> Result<SocketAddr, AllowedValues> {
    if let Some(port) = text.strip_prefix("localhost:").and_then(|port| port.parse().ok()) {
        return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    }
    text.parse().map_err(|_| "an address and a port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::]:8080".to_owned())
}

/// Parses an address to listen on; an empty text is none.
pub fn optional_listen_addr(text: &str) -> Result<OptionalAddr, AllowedValues> {
    if text.is_empty() { Ok(OptionalAddr(None)) } else { listen_addr(text).map(|address| OptionalAddr(Some(address))) }
}

pub(super) fn path(text: &str) -> Result<PathBuf, AllowedValues> {
    if text.is_empty() { Err("the path of a file".to_owned()) } else { Ok(PathBuf::from(text)) }
}

/// Parses the path of a file; an empty text is none.
pub fn optional_path(text: &str) -> Result<OptionalPath, AllowedValues> {
    Ok(OptionalPath((!text.is_empty()).then(|| PathBuf::from(text))))
}

/// Parses a URL and removes slashes at its end, because paths are appended to it; an empty text is none.
pub(super) fn optional_url(text: &str) -> Result<OptionalText, AllowedValues> {
    let rest =
        text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).map(|rest| rest.trim_end_matches('/'));
    let is_plain =
        |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_graphic() && !br#"'"`<>\?#@"#.contains(&b));
    match (text, rest) {
        ("", _) => Ok(OptionalText(None)),
        (_, Some(rest)) if is_plain(rest) => Ok(OptionalText(Some(text.trim_end_matches('/').to_owned()))),
        _ => Err("a URL such as https://relay.example or http://192.0.2.1:8080".to_owned()),
    }
}

/// Parses a URL like [`optional_url`] whose path is one below which a proxy can serve the relay.
pub(super) fn optional_public_url(text: &str) -> Result<OptionalText, AllowedValues> {
    let url = optional_url(text)?;
    if url.0.as_deref().is_none_or(|url| base_path::is_usable(base_path::of(url))) {
        return Ok(url);
    }
    let own = base_path::RESERVED.join(", /");
    Err(format!("a URL whose path has no empty segment and does not begin with one of the relay's own paths: /{own}"))
}

/// Parses the name of a Kubernetes object, which becomes part of a path; an empty text is none.
pub(super) fn optional_object_name(text: &str) -> Result<OptionalText, AllowedValues> {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    match bytes {
        [] => Ok(OptionalText(None)),
        _ if bytes.len() <= 253 && bytes.iter().copied().all(inner) && ends(bytes.first()) && ends(bytes.last()) => {
            Ok(OptionalText(Some(text.to_owned())))
        }
        _ => Err("a name of up to 253 lowercase letters, digits, - and .".to_owned()),
    }
}

/// Parses a provider's name. The published relay had no rule for it, so this one is wider than that of `relay.yaml`.
pub(super) fn provider_name(text: &str) -> Result<String, AllowedValues> {
    let allowed_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if (1..=52).contains(&text.len()) && text.bytes().all(allowed_byte) {
        Ok(text.to_owned())
    } else {
        Err("1 to 52 letters, digits, - _ and .".to_owned())
    }
}

pub(super) fn queue_len(text: &str) -> Result<usize, AllowedValues> {
    integer(text, 0, MAX_QUEUE_LEN)
}

pub(super) fn placement(text: &str) -> Result<Placement, AllowedValues> {
    Placement::parse(text).ok_or_else(|| Placement::ALLOWED.to_owned())
}

pub(super) fn cache_isolation(text: &str) -> Result<CacheIsolation, AllowedValues> {
    CacheIsolation::parse(text).ok_or_else(|| CacheIsolation::ALLOWED.to_owned())
}

pub(super) fn fairness_mode(text: &str) -> Result<FairnessMode, AllowedValues> {
    FairnessMode::parse(text).ok_or_else(|| FairnessMode::ALLOWED.to_owned())
}

pub(super) fn homes(text: &str) -> Result<usize, AllowedValues> {
    integer(text, 1, MOST_HOMES)
}

pub(super) fn spill_requests(text: &str) -> Result<u32, AllowedValues> {
    integer(text, 0, MOST_SPILL_REQUESTS)
}

/// Parses the name of a zone or cluster; an empty text is none.
pub(super) fn optional_label(text: &str) -> Result<OptionalText, AllowedValues> {
    match text {
        "" => Ok(OptionalText(None)),
        _ if is_label(text) => Ok(OptionalText(Some(text.to_owned()))),
        _ => Err(ALLOWED_LABEL.to_owned()),
    }
}

pub(super) fn models_per_worker(text: &str) -> Result<usize, AllowedValues> {
    integer(text, 1, crate::settings::config::MAX_MODELS_PER_WORKER)
}

pub(super) fn connections(text: &str) -> Result<usize, AllowedValues> {
    integer(text, 1, 1_000_000)
}

pub(super) fn usage_days(text: &str) -> Result<u32, AllowedValues> {
    integer(text, 1, MOST_USAGE_DAYS)
}

pub(super) fn relay_count(text: &str) -> Result<u32, AllowedValues> {
    integer(text, 1, crate::settings::config::MAX_RELAY_COUNT)
}

pub(super) fn size(text: &str) -> Result<u64, AllowedValues> {
    parse_size(text).map_err(|error| error.allowed().to_owned())
}

/// Parses the size of a file that has room for many lines.
pub(super) fn journal_size(text: &str) -> Result<u64, AllowedValues> {
    let size = parse_size(text).ok().filter(|size| *size >= MIN_JOURNAL_BYTES);
    size.ok_or_else(|| "a size of at least 64Ki, such as 64Mi or 1Gi".to_owned())
}

/// Parses seconds as a number, or with a unit as in `relay.yaml`; at least a millisecond.
pub(super) fn seconds(text: &str) -> Result<Duration, AllowedValues> {
    scan_seconds(text)
        .filter(|duration| *duration >= MIN_DURATION)
        .ok_or_else(|| "seconds from 0.001 to 315360000, or with units such as 500ms or 1h30m".to_owned())
}

pub(super) fn seconds_or_zero(text: &str) -> Result<Duration, AllowedValues> {
    scan_seconds(text).ok_or_else(|| "seconds from 0 to 315360000, or with units such as 500ms or 1h30m".to_owned())
}

pub(super) fn days_or_zero(text: &str) -> Result<u32, AllowedValues> {
    integer(text, 0, MAX_DAYS)
}

pub(super) fn boolean(text: &str) -> Result<bool, AllowedValues> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => Err("true, false, 1 or 0".to_owned()),
    }
}

pub(super) fn proxies(text: &str) -> Result<Proxies, AllowedValues> {
    let allowed = || format!("at most {MAX_PROXIES} addresses or networks, such as 10.0.0.0/8,192.168.1.1,fd00::/8");
    let networks: Option<Vec<Cidr>> =
        text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect();
    networks.filter(|networks| networks.len() <= MAX_PROXIES).map(Proxies).ok_or_else(allowed)
}

pub(super) fn accounts(text: &str) -> Result<Accounts, AllowedValues> {
    let allowed = || format!("at most {MAX_ACCOUNTS} ServiceAccounts as NAMESPACE/NAME, such as llm/gpu-workers");
    let accounts: Option<Vec<_>> =
        text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect();
    accounts.filter(|accounts| accounts.len() <= MAX_ACCOUNTS).map(Accounts).ok_or_else(allowed)
}

/// Splits a list of aliases. The names are validated with the other settings.
pub(super) fn aliases(text: &str) -> Result<RawAliases, AllowedValues> {
    let pair = |part: &str| {
        let (alias, model) = part.split_once('=')?;
        Some((alias.trim().to_owned(), model.trim().to_owned()))
    };
    let pairs: Option<Vec<_>> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(pair).collect();
    pairs.map(RawAliases).ok_or_else(|| "a list of NAME=MODEL, such as gpt-4o-mini=qwen,gpt-4o=qwen".to_owned())
}

pub(super) fn optional_text(text: &str) -> Result<OptionalText, AllowedValues> {
    Ok(OptionalText((!text.is_empty()).then(|| text.to_owned())))
}

/// Parses names of hosts, without ports.
pub(super) fn hosts(text: &str) -> Result<Names, AllowedValues> {
    let is_host = |name: &str| {
        name.len() <= 253 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    names(text, is_host)
        .ok_or_else(|| format!("at most {MAX_NAMES} host names without ports, such as relay.example,relay.lan"))
}

/// Parses names of headers that belong neither to the connection nor to the relay.
pub(super) fn request_headers(text: &str) -> Result<Names, AllowedValues> {
    let may_pass = |name: &str| HeaderName::try_from(name).is_ok() && headers::may_be_request_header(name);
    names(text, may_pass).ok_or_else(|| {
        format!("at most {MAX_NAMES} header names, such as user-agent,x-tenant; no connection headers, and no headers for the relay itself, such as cookie, host or x-worker-secret")
    })
}

/// Parses names of headers that do not steer the browser or proxy that reads a response.
pub(super) fn response_headers(text: &str) -> Result<Names, AllowedValues> {
    let may_pass = |name: &str| HeaderName::try_from(name).is_ok() && headers::may_be_client_header(name);
    names(text, may_pass).ok_or_else(|| {
        format!("at most {MAX_NAMES} header names, such as x-build,x-cache; no connection headers, and no headers that control a browser or a proxy, such as set-cookie, location or x-accel-redirect")
    })
}

fn names(text: &str, is_one: impl Fn(&str) -> bool) -> Option<Names> {
    let names = text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_ascii_lowercase);
    let names: Vec<String> = names.collect();
    (names.len() <= MAX_NAMES && names.iter().all(|name| is_one(name))).then_some(Names(names))
}

/// Parses an audience. Workers that present another one see it, in a log and in place of a header.
pub(super) fn audience(text: &str) -> Result<String, AllowedValues> {
    if (1..=253).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(text.to_owned())
    } else {
        Err("1 to 253 printable ASCII characters without spaces".to_owned())
    }
}

pub(super) fn log_filter(text: &str) -> Result<LogFilter, AllowedValues> {
    text.parse()
}

pub(super) fn log_format(text: &str) -> Result<LogFormat, AllowedValues> {
    text.parse()
}

fn integer<T>(text: &str, least: T, most: T) -> Result<T, AllowedValues>
where
    T: std::str::FromStr + PartialOrd + std::fmt::Display + Copy,
{
    text.parse()
        .ok()
        .filter(|value| (least..=most).contains(value))
        .ok_or_else(|| format!("an integer from {least} to {most}"))
}

fn scan_seconds(text: &str) -> Option<Duration> {
    // `f64::from_str` would also accept "inf", "1e3" and "+1".
    let duration = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        Duration::try_from_secs_f64(text.parse().ok()?).ok()?
    } else {
        parse_duration_or_zero(text).ok()?
    };
    (duration <= MAX_DURATION).then_some(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_numbers_or_have_unit() {
        assert_eq!(seconds("30"), Ok(Duration::from_secs(30)));
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(seconds("500ms"), Ok(Duration::from_millis(500)));
        for text in ["", "-1", "inf", "nan", "1e3", "1.2.3", ".", "30x", "99999999999999999999"] {
            assert!(seconds(text).is_err() && seconds_or_zero(text).is_err(), "{text}");
        }
        assert!(seconds("0").is_err());
        assert_eq!(seconds_or_zero("0"), Ok(Duration::ZERO));
    }

    #[test]
    fn empty_variable_of_optional_setting_means_none() {
        assert_eq!(optional_listen_addr(""), Ok(OptionalAddr(None)));
        assert_eq!(optional_path(""), Ok(OptionalPath(None)));
        assert_eq!(proxies(""), Ok(Proxies(Vec::new())));
    }

    #[test]
    fn localhost_is_accepted_as_name() {
        assert_eq!(listen_addr("localhost:8081").map(|address| address.to_string()), Ok("127.0.0.1:8081".to_owned()));
        assert!(listen_addr("localhost").is_err() && listen_addr("127.0.0.1:70000").is_err());
    }
}
