//! The API server of the cluster that this process runs in, called as the ServiceAccount of its Pod.
//!
//! There are few requests, all of one shape. So this is a plain HTTP client and not a Kubernetes library, which would
//! double the size of the program and cost each relay more memory than its own idle heap. A client is built for each
//! request: token and authority are read each time (both rotate), and nothing is held in between.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use modelrelay_protocol::config_hash::secret_of_file;
use modelrelay_protocol::names::printable;
use reqwest::{Client, Response};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use tokio::time::Instant;

use crate::settings::error::ConfigError;
use crate::system::file_watch::read_bounded;

/// The timeout of one request, even if its caller has more time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest response: a full Secret in base64, with the metadata of other managers.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// The largest file of an account: certificates of an authority, a token, a name.
const MAX_ACCOUNT_FILE_BYTES: u64 = 1 << 20;
/// The longest quote of the server's message.
const MAX_MESSAGE_CHARS: usize = 500;

/// The address of the API server, and the account for its requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterApi {
    server: String,
    account: PathBuf,
}

/// Why a call has no result.
#[derive(Debug)]
pub enum CallError {
    /// The server was not reached or did not respond in time, or this Pod has no account.
    Unreached(String),
    /// The server responded with another status than success.
    Answered {
        /// The status.
        status: StatusCode,
        /// The server's message, truncated and without control characters.
        message: String,
        /// The `Retry-After` of the response.
        retry_after: Option<Duration>,
    },
}

/// The body of a request.
pub struct Body {
    /// The media type.
    pub media_type: &'static str,
    /// The text.
    pub text: String,
}

impl ClusterApi {
    /// The cluster of this Pod: the API server from the kubelet's variables, token and authority from the folder of its
    /// ServiceAccount. The error names the `setting` that needs it, and what to do `instead`.
    pub fn of_this_pod(setting: &str, instead: &str, account: &Path) -> Result<Self, ConfigError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (Some(host), port) = (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT")) else {
            return Err(ConfigError::new(format!(
                "{setting} requires a Pod, but KUBERNETES_SERVICE_HOST is not set; {instead}"
            )));
        };
        // An IPv6 address has no brackets here.
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let server = format!("https://{host}:{}", port.as_deref().unwrap_or("443"));
        Ok(Self { server, account: account.to_path_buf() })
    }

    /// The namespace of the account.
    pub fn namespace(&self) -> Result<String, String> {
        read_text(&self.account.join("namespace"))
    }

    /// Sends one request; it must complete before `deadline`.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<Body>,
        deadline: Instant,
    ) -> Result<Bytes, CallError> {
        // Two small files in memory, at most a few times a second.
        let client = client(&self.account.join("ca.crt")).map_err(CallError::Unreached)?;
        let token = read_text(&self.account.join("token")).map_err(CallError::Unreached)?;
        let request = client.request(method, format!("{}{path}", self.server)).bearer_auth(token);
        let mut request = request.header(http::header::ACCEPT, "application/json");
        if let Some(Body { media_type, text }) = body {
            request = request.header(http::header::CONTENT_TYPE, media_type).body(text);
        }
        let exchange = async {
            let answer = request.send().await?;
            let (status, retry_after) = (answer.status(), retry_after(&answer));
            Ok((status, retry_after, body_of(answer).await?))
        };
        let until = deadline.min(Instant::now() + REQUEST_TIMEOUT);
        match tokio::time::timeout_at(until, exchange).await {
            Ok(Ok((status, _, body))) if status.is_success() => Ok(body),
            Ok(Ok((status, retry_after, body))) => {
                Err(CallError::Answered { status, message: message_of(&body), retry_after })
            }
            Ok(Err(error)) => Err(CallError::Unreached(describe(error))),
            Err(_) => Err(CallError::Unreached("the API server does not respond".to_owned())),
        }
    }
}

fn message_of(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct ApiStatus {
        message: String,
    }
    let message = serde_json::from_slice(body).map_or_else(|_| String::new(), |ApiStatus { message }| message);
    printable(&message, MAX_MESSAGE_CHARS)
}

/// Trusts only the cluster's authority, and uses no proxy.
fn client(authority: &Path) -> Result<Client, String> {
    let pem =
        read_bounded(authority, MAX_ACCOUNT_FILE_BYTES).map_err(|why| format!("{}: {why}", authority.display()))?;
    let mut roots = RootCertStore::empty();
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
    if roots.add_parsable_certificates(certificates).0 == 0 {
        return Err(format!("{}: the file contains no certificate", authority.display()));
    }
    let tls = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Client::builder()
        .tls_backend_preconfigured(tls)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .pool_max_idle_per_host(0)
        .user_agent(concat!("modelrelay-relay/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(describe)
}

async fn body_of(mut answer: Response) -> Result<Bytes, reqwest::Error> {
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

/// An error with its causes, which contain the reason. The address is left out, because it is known.
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
    let text = String::from_utf8(bytes).map_err(|_| format!("{shown}: the file is not UTF-8 text"))?;
    Ok(secret_of_file(&text).to_owned())
}
