//! Sends one batch to the collector: one connection, one POST, one deadline.
//!
//! It uses hyper and rustls, which the programs depend on anyway. A batch leaves every five seconds at most, so keeping
//! the connection is not worthwhile: if the network dropped it meanwhile, a batch would be lost.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use crate::settings::{SettingError, Target};

/// More than any collector returns.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// The data that a collector receives.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal {
    Traces,
    Metrics,
}

impl Signal {
    /// The log line for a collector that has become unavailable.
    fn away(self) -> &'static str {
        match self {
            Self::Traces => "cannot export traces; dropping them until the collector is reachable again",
            Self::Metrics => "cannot export metrics; retrying at each interval",
        }
    }

    /// The log line for a collector that is available again.
    fn back(self) -> &'static str {
        match self {
            Self::Traces => "trace export resumed",
            Self::Metrics => "metric export resumed",
        }
    }
}

/// The collector, as the exporter's thread uses it.
pub(crate) struct Collector {
    signal: Signal,
    shown: String,
    timeout: Duration,
    /// Present if the address is `https`.
    tls: Option<TlsConnector>,
    /// The runtime that sends; `None` if nothing will be sent.
    runtime: Option<Handle>,
    /// The last batch failed, and that has been logged.
    is_away: AtomicBool,
}

impl fmt::Debug for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collector").field("shown", &self.shown).finish_non_exhaustive()
    }
}

impl Collector {
    pub(crate) fn new(target: &Target, signal: Signal, runtime: Option<Handle>) -> Result<Self, SettingError> {
        let tls = (target.url.scheme() == "https").then(|| connector(target.ca_file.as_deref())).transpose()?;
        let (shown, timeout) = (target.shown(), target.timeout);
        Ok(Self { signal, shown, timeout, tls, runtime, is_away: AtomicBool::new(false) })
    }

    /// Logs one line when the collector becomes unavailable, and one when it is available again.
    fn note(&self, problem: Option<&str>) {
        let was_away = self.is_away.swap(problem.is_some(), Ordering::Relaxed);
        match (problem, was_away) {
            (Some(problem), false) => tracing::warn!(collector = self.shown, problem, "{}", self.signal.away()),
            (None, true) => tracing::info!(collector = self.shown, "{}", self.signal.back()),
            (Some(_), true) | (None, false) => {}
        }
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // The exporter's thread has no reactor. It waits only for this task, at most until the deadline.
        let (tls, limit) = (self.tls.clone(), self.timeout);
        let runtime = self.runtime.as_ref().ok_or("the export is disabled")?;
        let sending = runtime.spawn(async move { tokio::time::timeout(limit, post(tls, request)).await });
        let sent = match sending.await {
            Ok(Ok(sent)) => sent,
            Ok(Err(_)) => Err(format!("no response within {limit:?}").into()),
            // The runtime is gone, so a warning would not be delivered.
            Err(_) => return Err("the program is exiting".into()),
        };
        match &sent {
            Ok(answer) if answer.status().is_success() => self.note(None),
            Ok(answer) => self.note(Some(&format!("the collector returned {}", answer.status().as_u16()))),
            Err(error) => self.note(Some(&error.to_string())),
        }
        sent
    }
}

async fn post(tls: Option<TlsConnector>, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let uri = request.uri().clone();
    let host = uri.host().ok_or("the collector's URL has no host")?;
    let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = uri.port_u16().unwrap_or(if tls.is_some() { 443 } else { 80 });
    let tcp = TcpStream::connect((bare.as_str(), port)).await?;
    match tls {
        Some(tls) => exchange(tls.connect(ServerName::try_from(bare)?, tcp).await?, &uri, request).await,
        None => exchange(tcp, &uri, request).await,
    }
}

async fn exchange<S>(stream: S, uri: &Uri, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Dropping this future closes the connection.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let mut request = request.map(Full::new);
    if let Some(authority) = uri.authority() {
        request.headers_mut().insert(HOST, HeaderValue::from_str(authority.as_str())?);
    }
    *request.uri_mut() = uri.path_and_query().map_or("/", |path| path.as_str()).parse()?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await?.to_bytes();
    Ok(Response::from_parts(head, body))
}

/// Trusts the system's roots, and those in `OTEL_EXPORTER_OTLP_CERTIFICATE`.
fn connector(ca_file: Option<&str>) -> Result<TlsConnector, SettingError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = ca_file {
        let refuse = |error: &dyn fmt::Display| {
            SettingError::new(
                "OTEL_EXPORTER_OTLP_CERTIFICATE",
                format!("{path}: {error}; the file must contain certificates (PEM)"),
            )
        };
        let certificates = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let certificates = certificates.map_err(|error| refuse(&error))?;
        if certificates.is_empty() {
            return Err(refuse(&"no certificate found"));
        }
        for certificate in certificates {
            roots.add(certificate).map_err(|error| refuse(&error))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let versions = versions.map_err(|error| SettingError::new("TLS", error.to_string()))?;
    let config = versions.with_root_certificates(roots).with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}
