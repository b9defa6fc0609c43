//! TLS of the listeners: a certificate and its key in files, read again while the relay runs.
//!
//! Both files are read each second and compared by content, like every watched file. A new pair is used for new
//! connections; open connections keep the previous one. A pair that cannot be used leaves the previous one in place, is
//! logged once, and shows in `tls_last_reload_successful` and in `/readyz`.

mod accept;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{Error, InconsistentKeys, ServerConfig};
use sha2::{Digest, Sha256};
use tracing::{error, info, warn};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use crate::settings::config::TlsFiles;
use crate::settings::error::ConfigError;
use crate::system::blocking;
use crate::system::file_watch::{INTERVAL, read_bounded};
use crate::telemetry::metrics::Metrics;

pub use stream::{Connection, MaybeTls};

/// The largest file; a chain is a few certificates.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The only protocol that clients of a relay may use on an encrypted connection.
const ALPN: &[u8] = b"http/1.1";

const CERT_SETTING: &str = "TLS_CERT_FILE (--tls-cert-file)";
const KEY_SETTING: &str = "TLS_KEY_FILE (--tls-key-file)";
const NO_KEY: &str = "the file contains no PEM private key";

/// The certificate that the listeners present.
#[derive(Debug)]
pub struct Tls {
    current: ArcSwap<ServerConfig>,
    last_error: ArcSwapOption<String>,
    metrics: Arc<Metrics>,
}

/// A certificate and its key at one moment.
struct Pair {
    digest: [u8; 32],
    config: Arc<ServerConfig>,
    /// The expiry of the certificate, in seconds since 1970.
    not_after: i64,
}

/// The result of one read of the files.
enum CertificateRead {
    Unchanged,
    Changed(Pair),
    Refused(String),
}

impl Tls {
    /// Loads the pair, and follows its files until the returned value is dropped. Needs a tokio runtime.
    pub fn start(files: &TlsFiles, metrics: Arc<Metrics>) -> Result<Arc<Self>, ConfigError> {
        let pair = Pair::read(files)?;
        let digest = pair.digest;
        metrics.tls_loaded(pair.not_after);
        let current = ArcSwap::new(pair.config);
        let tls = Arc::new(Self { current, last_error: ArcSwapOption::empty(), metrics });
        tokio::spawn(follow(files.clone(), digest, Arc::downgrade(&tls)));
        Ok(tls)
    }

    /// Why the present files are not in use; `None` if they are.
    pub fn error(&self) -> Option<Arc<String>> {
        self.last_error.load_full()
    }

    fn take(&self, pair: Pair) {
        self.current.store(pair.config);
        self.last_error.store(None);
        self.metrics.tls_loaded(pair.not_after);
        info!("TLS certificate reloaded for new connections");
    }

    fn refuse(&self, why: String) {
        if self.error().is_some_and(|before| *before == why) {
            return;
        }
        error!(error = why, "TLS certificate reload failed; keeping previous certificate");
        self.metrics.tls_refused();
        self.last_error.store(Some(Arc::new(why)));
    }

    fn forgive(&self) {
        if self.last_error.swap(None).is_some() {
            info!("TLS certificate files reverted to the active pair");
            self.metrics.tls_accepted();
        }
    }
}

async fn follow(files: TlsFiles, mut digest: [u8; 32], tls: Weak<Tls>) {
    let mut suspected = None;
    loop {
        tokio::time::sleep(INTERVAL).await;
        let here = files.clone();
        // A file on a network mount may be slow, and must not block a thread that serves requests.
        let Ok(found) = blocking::run(move || read_certificate(&here, &digest)).await else { continue };
        let Some(tls) = tls.upgrade() else { return };
        match found {
            CertificateRead::Unchanged => {
                suspected = None;
                tls.forgive();
            }
            CertificateRead::Changed(pair) => {
                suspected = None;
                digest = pair.digest;
                tls.take(pair);
            }
            // Two files are usually copied one after the other: a mismatch that only one read finds is not reported.
            CertificateRead::Refused(why) if suspected.as_ref() == Some(&why) => tls.refuse(why),
            CertificateRead::Refused(why) => suspected = Some(why),
        }
    }
}

fn read_certificate(files: &TlsFiles, digest: &[u8; 32]) -> CertificateRead {
    match PemFiles::read(files) {
        Ok(sources) if sources.digest == *digest => CertificateRead::Unchanged,
        Ok(sources) => match Pair::of(files, &sources) {
            Ok(pair) => CertificateRead::Changed(pair),
            Err(error) => CertificateRead::Refused(error.to_string()),
        },
        Err(error) => CertificateRead::Refused(error.to_string()),
    }
}

/// The content of both files.
struct PemFiles {
    chain: Vec<u8>,
    key: Vec<u8>,
    digest: [u8; 32],
}

impl PemFiles {
    fn read(files: &TlsFiles) -> Result<Self, ConfigError> {
        let read =
            |setting, path: &PathBuf| read_bounded(path, MAX_FILE_BYTES).map_err(|why| refused(setting, path, &why));
        let (chain, key) = (read(CERT_SETTING, &files.cert)?, read(KEY_SETTING, &files.key)?);
        let both = Sha256::new().chain_update(Sha256::digest(&chain)).chain_update(Sha256::digest(&key));
        Ok(Self { digest: both.finalize().into(), chain, key })
    }
}

impl Pair {
    fn read(files: &TlsFiles) -> Result<Self, ConfigError> {
        Self::of(files, &PemFiles::read(files)?)
    }

    fn of(files: &TlsFiles, sources: &PemFiles) -> Result<Self, ConfigError> {
        let in_cert = |why: &str| refused(CERT_SETTING, &files.cert, why);
        let in_key = |why: &str| refused(KEY_SETTING, &files.key, why);
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&sources.chain).collect();
        let chain = chain.map_err(|_| in_cert("the file contains an invalid PEM certificate"))?;
        let Some(leaf) = chain.first() else { return Err(in_cert("the file contains no PEM certificate")) };
        let not_after = match X509Certificate::from_der(leaf) {
            Ok((_, leaf)) => leaf.validity().not_after.timestamp(),
            Err(_) => return Err(in_cert("the first certificate cannot be parsed")),
        };
        let key = PrivateKeyDer::from_pem_slice(&sources.key).map_err(|error| {
            // Other error messages may repeat the content.
            in_key(if matches!(error, pem::Error::NoItemsFound) { NO_KEY } else { "the private key is not valid PEM" })
        })?;
        let config = server_config(chain, key).map_err(|error| {
            if matches!(error, Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) {
                in_key("the key does not match the certificate in TLS_CERT_FILE")
            } else if matches!(error, Error::InvalidCertificate(_)) {
                in_cert("the first certificate is not usable by a server")
            } else {
                in_key("unsupported key type: use RSA, ECDSA (P-256, P-384) or Ed25519")
            }
        })?;
        if not_after < now() {
            let file = files.cert.display();
            warn!(%file, "the TLS certificate has expired: clients will reject it");
        }
        Ok(Self { digest: sources.digest, config: Arc::new(config), not_after })
    }
}

fn server_config(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Resumption without memory of the relay: a thousand workers return at once. A new pair has new tickets.
    config.ticketer = ring::Ticketer::new()?;
    Ok(config)
}

fn refused(setting: &str, path: &Path, why: &str) -> ConfigError {
    ConfigError::refused(setting, &path.display().to_string(), why)
}

fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}
