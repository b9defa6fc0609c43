//! The way of a client's request line and headers to the backend, through the relay's filter and then the worker's; and
//! of the backend's headers back.

#![no_main]

use std::sync::LazyLock;

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use libfuzzer_sys::fuzz_target;
use modelrelay_protocol::headers::response_pairs;
use modelrelay_protocol::paths::backend_path;
use modelrelay_protocol::secret::Secret;
use modelrelay_relay::clients::backend_headers::{OwnCredentials, backend_headers};
use modelrelay_worker::backend::Backend;
use modelrelay_worker::settings::{BackendSettings, Engine};
use url::Url;

const ADMIN_TOKEN: &str = "admin-0123456789";
/// Of a tenant: its payload is `{"aud":"modelrelay-clients"}`.
const TENANT_TOKEN: &str = "eyJhIjoxfQ.eyJhdWQiOiJtb2RlbHJlbGF5LWNsaWVudHMifQ.c2ln";
const BACKEND_KEY: &str = "backend-0123456789";
const BASES: [&str; 4] =
    ["http://127.0.0.1:9", "https://gpu.example:8443/base/", "http://[::1]:9/a%20b/c", "http://h/v1/v1"];

/// A backend at each base, without and with a key of its own.
static BACKENDS: LazyLock<Vec<Backend>> = LazyLock::new(|| {
    let backend = |(base, key): (&str, Option<&str>)| {
        let settings = BackendSettings {
            url: base.parse().expect("a URL"),
            engine: Engine::OpenAi,
            api_key: key.map(Secret::new),
            headers: HeaderMap::new(),
        };
        Backend::new(settings)
    };
    BASES.iter().flat_map(|base| [(*base, None), (*base, Some(BACKEND_KEY))]).map(backend).collect()
});

/// Text, so that the corpus is readable: `BACKEND METHOD LENGTH PATH`, then a line per header, `>` from the client, `~`
/// as a foreign relay may send it, `<` from the backend. `\r` and `\n` are escaped.
#[derive(Debug, Default)]
struct Input {
    backend: usize,
    method: Method,
    length: u64,
    path: String,
    client: Vec<(String, String)>,
    wire: Vec<(String, String)>,
    response: Vec<(String, String)>,
}

impl Input {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.split('\n').map(|line| line.replace("\\r", "\r").replace("\\n", "\n"));
        let first = lines.next()?;
        let mut words = first.splitn(4, ' ');
        let mut input = Self {
            backend: words.next()?.parse().ok()?,
            method: words.next()?.parse().ok()?,
            length: words.next()?.parse().ok()?,
            path: words.next()?.to_owned(),
            ..Self::default()
        };
        for line in lines {
            let Some((name, value)) = line.get(1..).and_then(|header| header.split_once(": ")) else { continue };
            let header = (name.to_owned(), value.to_owned());
            match line.as_bytes()[0] {
                b'>' => input.client.push(header),
                b'~' => input.wire.push(header),
                b'<' => input.response.push(header),
                _ => {}
            }
        }
        Some(input)
    }
}

/// Headers that belong to one connection, or to one message on it.
const OF_A_CONNECTION: [&str; 11] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
    "content-length",
];

/// All headers that a client can send to a backend; `content-length` and `host` are the worker's own.
const ALLOWED: [&str; 18] = [
    "content-type",
    "accept",
    "anthropic-version",
    "anthropic-beta",
    "openai-organization",
    "openai-project",
    "openai-beta",
    "x-request-id",
    "traceparent",
    "tracestate",
    "baggage",
    "idempotency-key",
    "x-session-affinity",
    "x-session-id",
    "authorization",
    "x-api-key",
    "content-length",
    "host",
];

fuzz_target!(|text: &str| {
    let Some(input) = Input::parse(text) else { return };
    let backend = &BACKENDS[input.backend % BACKENDS.len()];
    let admin_token = Secret::new(ADMIN_TOKEN);
    let own = OwnCredentials { admin_token: Some(&admin_token), client_audience: "modelrelay-clients" };
    let forwarded = backend_headers(&header_map(&input.client), &own, &[]);
    for (name, value) in &forwarded {
        check_header(name, value);
        let has_token = value.split([' ', '\t', ',']).any(|word| [ADMIN_TOKEN, TENANT_TOKEN].contains(&word));
        assert!(!is_credential(name) || !has_token, "a token for the relay leaves it");
    }
    request(backend, &input, forwarded.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    request(backend, &input, input.wire.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    response(&input.response);
});

fn request<'a>(backend: &Backend, input: &Input, headers: impl Iterator<Item = (&'a str, &'a str)>) {
    let method = &input.method;
    let Some(path) = backend_path(method.as_str(), &input.path) else { return };
    assert!(
        input.path.starts_with(path.path)
            && path.path.starts_with('/')
            && !path.path.contains("..")
            && !path.path.contains("//")
    );
    assert!(path.path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/_-".contains(&byte)), "{}", path.path);

    let head = backend.request_head(method, &path, headers, &[], input.length);
    let head = head.expect("a listed path has a place under any base");
    let base = &backend.settings().url;
    let uri = head.uri();
    // In the origin form, which cannot leave the base.
    assert!(uri.scheme().is_none() && uri.authority().is_none(), "{uri}");
    assert_eq!(uri.path(), format!("{}{}", base.path().trim_end_matches('/'), path.path));
    let target = uri.path_and_query().expect("a target").as_str();
    assert!(target.bytes().all(|byte| byte > b' ' && byte != 127 && byte != b'#'), "{target:?}");
    let resolved = base.join(target).expect("a URL");
    assert_eq!(place(&resolved), place(base), "{target}");
    assert_eq!(resolved.path(), uri.path());

    let sent = head.headers();
    for (name, value) in sent {
        check_header(name.as_str(), &String::from_utf8_lossy(value.as_bytes()));
        assert!(value.as_bytes().iter().all(|byte| *byte == b'\t' || (*byte >= b' ' && *byte != 127)));
    }
    let host = base.port().map_or_else(
        || base.host_str().unwrap_or_default().to_owned(),
        |port| format!("{}:{port}", base.host_str().unwrap_or_default()),
    );
    assert_eq!(only(sent, "host").as_deref(), Some(host.as_str()));
    let length = (*method != Method::GET || input.length > 0).then(|| input.length.to_string());
    assert_eq!(only(sent, "content-length"), length);
    if backend.settings().api_key.is_some() {
        assert_eq!(only(sent, "authorization"), Some(format!("Bearer {BACKEND_KEY}")));
        assert!(only(sent, "x-api-key").is_none_or(|key| key == BACKEND_KEY));
    }
}

fn place(url: &Url) -> (&str, Option<&str>, Option<u16>) {
    (url.scheme(), url.host_str(), url.port_or_known_default())
}

fn is_credential(name: &str) -> bool {
    matches!(name, "authorization" | "x-api-key")
}

fn check_header(name: &str, value: &str) {
    assert!(ALLOWED.contains(&name), "{name} is forwarded");
    let is_key = value.split([' ', '\t', ',']).any(|word| word.starts_with("mr-"));
    assert!(!is_credential(name) || !is_key, "{name}: {value:?} is forwarded");
}

/// The value of a header that exists at most once.
fn only(headers: &HeaderMap, name: &str) -> Option<String> {
    let mut values = headers.get_all(name).iter();
    let first = values.next().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    assert!(values.next().is_none(), "{name} is there twice");
    first
}

fn response(headers: &[(String, String)]) {
    let headers = header_map(headers);
    let pairs = response_pairs(&headers);
    let values = |name: &str| headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect::<Vec<_>>();
    let named: Vec<String> = values("connection")
        .iter()
        .flat_map(|value| value.split(','))
        .map(|token| token.trim().to_ascii_lowercase())
        .collect();
    for (name, value) in &pairs {
        assert!(!OF_A_CONNECTION.contains(&name.as_str()) && !named.contains(name), "{name} goes to the client");
        assert!(!matches!(name.as_str(), "x-request-id" | "request-id"));
        assert!(value.bytes().all(|byte| byte == b'\t' || (byte >= b' ' && byte != 127)));
    }
    for name in headers.keys().map(HeaderName::as_str) {
        let stays = OF_A_CONNECTION.contains(&name) || named.iter().any(|token| token == name);
        if !stays && !matches!(name, "x-request-id" | "request-id") {
            let kept: Vec<&str> =
                pairs.iter().filter(|(kept, _)| kept == name).map(|(_, value)| value.as_str()).collect();
            assert_eq!(kept, values(name), "{name} lost a value, or its order");
        }
    }
}

/// The headers that hyper would have accepted.
fn header_map(of: &[(String, String)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in of {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
            map.append(name, value);
        }
    }
    map
}
