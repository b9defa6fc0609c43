//! Certificates, and clients that trust them.

use std::{net::SocketAddr, sync::Arc};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// A certificate authority, in PEM, and its issuer.
pub struct Authority {
    /// Its own certificate.
    pub certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// The key.
    pub key: String,
}

impl Authority {
    /// Creates an authority.
    ///
    /// # Panics
    /// Never: all its parameters are fixed.
    #[must_use]
    pub fn make() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    /// Signs a certificate for these DNS names.
    ///
    /// # Panics
    /// If one of them is not a name.
    #[must_use]
    pub fn sign(&self, names: &[String]) -> Pair {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(names.to_vec()).expect("names");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        Pair { certificate, key: key.serialize_pem() }
    }
}

impl Pair {
    /// Returns the certificate as a server shows it.
    ///
    /// # Panics
    /// If it is not PEM.
    #[must_use]
    pub fn der(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes()).expect("a certificate")
    }
}

/// Returns a Secret as cert-manager writes it.
#[must_use]
pub fn secret(name: &str, authority: &str, certificate: &str, key: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": certificate, "tls.key": key, "ca.crt": authority},
    })
}

/// The authorities that a client trusts, and the name that it expects.
#[derive(Debug, Clone)]
pub struct Trust {
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
}

impl Trust {
    /// Trusts these authorities.
    ///
    /// # Panics
    /// If one of them is not a certificate, or the name is none.
    #[must_use]
    pub fn new(authorities: &[&Authority], name: String) -> Self {
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            let authority = CertificateDer::from_pem_slice(authority.certificate.as_bytes()).expect("PEM");
            roots.add(authority).expect("an authority");
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("ring knows them").with_root_certificates(roots).with_no_client_auth();
        Self { name: ServerName::try_from(name).expect("a name"), config: Arc::new(config) }
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// If the server cannot be reached or its certificate is not trusted.
    pub async fn connect(&self, to: SocketAddr) -> Result<TlsStream<TcpStream>, String> {
        let tcp = TcpStream::connect(to).await.map_err(|error| format!("cannot connect: {error}"))?;
        let connector = TlsConnector::from(self.config.clone());
        connector.connect(self.name.clone(), tcp).await.map_err(|error| format!("no TLS connection: {error}"))
    }

    /// True if a new connection shows this certificate.
    pub async fn is_shown(&self, to: SocketAddr, pair: &Pair) -> bool {
        let Ok(stream) = self.connect(to).await else { return false };
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        shown == Some(&pair.der())
    }
}
