//! One Secret through the Kubernetes API: read it, and write its keys if nobody else wrote meanwhile.
//!
//! Two requests of one shape, so a plain HTTP client and not a Kubernetes library, which would make the program twice as
//! large and cost each relay more memory than its own idle heap. A client is built for each request: one a minute
//! is much, token and authority are read fresh (both rotate), and in between nothing is held.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Method, StatusCode};
use modelrelay_protocol::config_hash::secret_of_file;
use reqwest::{Client, RequestBuilder, Response};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::DATA_KEY;
use crate::config::ConfigError;
use crate::file_watch::read_bounded;

/// One request, however much time is left for the change.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// A full Secret in base64, with what other managers noted about it.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// Certificates of an authority, a token, a name.
const MAX_ACCOUNT_FILE_BYTES: u64 = 1 << 20;
/// The kubelet may be just bringing a new token.
const AFTER_UNAUTHORIZED: Duration = Duration::from_millis(500);

/// Where the Secret is, and as whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterAccess {
    server: String,
    account: PathBuf,
    namespace: String,
    secret: String,
}

pub(super) struct SecretApi {
    access: ClusterAccess,
}

/// The Secret as it was read.
pub(super) struct StoredSecret {
    pub(super) version: String,
    /// What is at [`DATA_KEY`].
    pub(super) keys: Option<Vec<u8>>,
    /// Bytes at all other keys.
    pub(super) other_bytes: usize,
}

/// Why the Secret was not read or written.
#[derive(Debug)]
pub(super) enum ApiError {
    /// Somebody else wrote it since it was read.
    Conflict,
    /// It may go better soon.
    Passing { why: String, retry_after: Option<Duration> },
    /// A person has to change something first.
    Refused(String),
}

impl ClusterAccess {
    /// What a Pod knows of its cluster: the API server from the kubelet's variables, token and authority in the folder of
    /// its ServiceAccount. Each error names the setting.
    pub fn of_this_pod(secret: &str, namespace: Option<&str>, account: &Path) -> Result<Self, ConfigError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (Some(host), port) = (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT")) else {
            return Err(ConfigError::new(
                "API_KEYS_SECRET (--api-keys-secret) works only in a Pod: KUBERNETES_SERVICE_HOST is not set; use API_KEYS_FILE alone",
            ));
        };
        // An IPv6 address comes without brackets.
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let server = format!("https://{host}:{}", port.as_deref().unwrap_or("443"));
        let namespace = match namespace {
            Some(namespace) => namespace.to_owned(),
            None => read_text(&account.join("namespace"))
                .map_err(|why| ConfigError::new(format!("POD_NAMESPACE (--pod-namespace) is not set, and {why}")))?,
        };
        Ok(Self { server, account: account.to_path_buf(), namespace, secret: secret.to_owned() })
    }
}

impl SecretApi {
    pub(super) fn new(access: ClusterAccess) -> Self {
        Self { access }
    }

    /// For people.
    pub(super) fn name(&self) -> String {
        format!("Secret {}/{}", self.access.namespace, self.access.secret)
    }

    pub(super) async fn read(&self, deadline: Instant) -> Result<StoredSecret, ApiError> {
        let answer = self.send(Method::GET, deadline, |request| request).await?;
        parse(&answer)
    }

    /// Writes the keys if the Secret is still the one of that version. Whatever else is in it stays.
    pub(super) async fn write(&self, version: &str, keys: &[u8], deadline: Instant) -> Result<(), ApiError> {
        let patch = json!({
            "metadata": { "resourceVersion": version },
            "data": { DATA_KEY: STANDARD.encode(keys) },
        });
        let with_patch = |request: RequestBuilder| {
            request.header(http::header::CONTENT_TYPE, "application/merge-patch+json").body(patch.to_string())
        };
        self.send(Method::PATCH, deadline, with_patch).await.map(|_| ())
    }

    async fn send(
        &self,
        method: Method,
        deadline: Instant,
        finish: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> Result<Bytes, ApiError> {
        let ClusterAccess { server, account, namespace, secret } = &self.access;
        // Two small files in memory, at most a few times a minute.
        let client = client(&account.join("ca.crt"))?;
        let token = read_text(&account.join("token")).map_err(ApiError::passing)?;
        let url = format!("{server}/api/v1/namespaces/{namespace}/secrets/{secret}");
        let request = client.request(method.clone(), url).bearer_auth(token);
        let request = finish(request.header(http::header::ACCEPT, "application/json"));
        let exchange = async {
            let answer = request.send().await?;
            let (status, retry_after) = (answer.status(), retry_after(&answer));
            Ok((status, retry_after, body(answer).await?))
        };
        let until = deadline.min(Instant::now() + REQUEST_TIMEOUT);
        match tokio::time::timeout_at(until, exchange).await {
            Ok(Ok((status, _, body))) if status.is_success() => Ok(body),
            Ok(Ok((status, retry_after, body))) => Err(self.refusal(&method, status, retry_after, &body)),
            Ok(Err(error)) => Err(ApiError::passing(describe(error))),
            Err(_) => Err(ApiError::passing("the API server does not answer".to_owned())),
        }
    }

    fn refusal(&self, method: &Method, status: StatusCode, retry_after: Option<Duration>, body: &[u8]) -> ApiError {
        #[derive(Deserialize)]
        struct Status {
            message: String,
        }
        let said = serde_json::from_slice(body).map_or_else(|_| String::new(), |Status { message }| message);
        let said: String = said.chars().filter(|char| !char.is_control()).take(500).collect();
        let passing = |why: String, retry_after| ApiError::Passing { why, retry_after };
        match status {
            StatusCode::CONFLICT => ApiError::Conflict,
            StatusCode::UNAUTHORIZED => passing(
                "the API server refuses the token of the ServiceAccount (401)".to_owned(),
                Some(AFTER_UNAUTHORIZED),
            ),
            StatusCode::FORBIDDEN => ApiError::Refused(format!(
                "the ServiceAccount may not {} it: grant get and patch on this one Secret in a Role (403: {said})",
                if *method == Method::GET { "get" } else { "patch" },
            )),
            StatusCode::NOT_FOUND => ApiError::Refused(format!(
                "it does not exist, and a relay only changes it: create it, empty (kubectl create secret generic {} -n {})",
                self.access.secret, self.access.namespace,
            )),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                passing(format!("the API server answered {status}: {said}"), retry_after)
            }
            _ if status.is_server_error() => passing(format!("the API server answered {status}: {said}"), retry_after),
            _ => ApiError::Refused(format!("the API server answered {status}: {said}")),
        }
    }
}

impl ApiError {
    fn passing(why: String) -> Self {
        Self::Passing { why, retry_after: None }
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Passing { retry_after, .. } => *retry_after,
            Self::Conflict | Self::Refused(_) => None,
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conflict => f.write_str("others change it all the time (409)"),
            Self::Passing { why, .. } | Self::Refused(why) => f.write_str(why),
        }
    }
}

fn parse(answer: &[u8]) -> Result<StoredSecret, ApiError> {
    #[derive(Deserialize)]
    struct Object {
        metadata: Metadata,
        #[serde(default)]
        data: Option<std::collections::BTreeMap<String, String>>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        resource_version: String,
    }
    let unreadable = |why: &dyn fmt::Display| ApiError::Refused(format!("the API server's answer is no Secret: {why}"));
    let object: Object = serde_json::from_slice(answer).map_err(|error| unreadable(&error))?;
    let mut keys = None;
    let mut other_bytes = 0;
    for (name, value) in object.data.unwrap_or_default() {
        let value = STANDARD.decode(value).map_err(|error| unreadable(&error))?;
        if name == DATA_KEY {
            keys = Some(value);
        } else {
            other_bytes += value.len();
        }
    }
    Ok(StoredSecret { version: object.metadata.resource_version, keys, other_bytes })
}

/// Trusts the cluster's authority and nobody else, and goes through no proxy.
fn client(authority: &Path) -> Result<Client, ApiError> {
    let pem = read_bounded(authority, MAX_ACCOUNT_FILE_BYTES)
        .map_err(|why| ApiError::passing(format!("{}: {why}", authority.display())))?;
    let mut roots = RootCertStore::empty();
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
    if roots.add_parsable_certificates(certificates).0 == 0 {
        return Err(ApiError::passing(format!("{}: no certificate is in it", authority.display())));
    }
    let tls = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| ApiError::Refused(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Client::builder()
        .tls_backend_preconfigured(tls)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .pool_max_idle_per_host(0)
        .user_agent(concat!("modelrelay-relay/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| ApiError::Refused(describe(error)))
}

async fn body(mut answer: Response) -> Result<Bytes, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(piece) = answer.chunk().await? {
        body.extend_from_slice(&piece);
        if body.len() > MAX_ANSWER_BYTES {
            break;
        }
    }
    Ok(body.into())
}

fn retry_after(answer: &Response) -> Option<Duration> {
    let seconds = answer.headers().get(http::header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// An error and what it came from, which is where its reason is. The address is known.
fn describe(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn read_text(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let bytes = read_bounded(path, MAX_ACCOUNT_FILE_BYTES).map_err(|why| format!("{shown}: {why}"))?;
    let text = String::from_utf8(bytes).map_err(|_| format!("{shown}: a text file is needed"))?;
    Ok(secret_of_file(&text).to_owned())
}
