//! A throw-away certificate authority, made with the `openssl` command.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
pub use rustls::version::{TLS12, TLS13};
use rustls::{ALL_VERSIONS, ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion};
use tempfile::TempDir;
use tokio_rustls::TlsAcceptor;

/// A CA, and a certificate of it for 127.0.0.1, `localhost` and `relay.example`, in a temporary directory.
#[derive(Debug)]
pub struct Certificates {
    directory: TempDir,
}

impl Certificates {
    /// Creates them.
    ///
    /// # Panics
    /// If `openssl` is missing or fails.
    #[must_use]
    pub fn make() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = directory.path();
        let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout"];
        let authority = ["ca.key", "-x509", "-out", "ca.crt", "-days", "2", "-subj", "/CN=modelrelay test CA"];
        openssl(at, &[&["req"], &key[..], &authority[..]].concat());
        let request = ["server.key", "-out", "server.csr", "-subj", "/CN=localhost"];
        openssl(at, &[&["req"], &key[..], &request[..]].concat());
        let names = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:relay.example\nbasicConstraints=CA:FALSE\n";
        std::fs::write(at.join("server.ext"), names).expect("a writable temporary directory");
        let signing = ["x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"];
        openssl(at, &[&signing[..], &["-out", "server.crt", "-days", "2", "-extfile", "server.ext"]].concat());
        Self { directory }
    }

    /// The value for `RELAY_CA_FILE`.
    #[must_use]
    pub fn ca_file(&self) -> PathBuf {
        self.directory.path().join("ca.crt")
    }

    /// The certificate of a server, in PEM.
    #[must_use]
    pub fn certificate(&self) -> String {
        self.read("server.crt")
    }

    /// The key of that certificate, in PEM.
    #[must_use]
    pub fn key(&self) -> String {
        self.read("server.key")
    }

    /// A client that trusts only this authority.
    #[must_use]
    pub fn client(&self) -> Arc<ClientConfig> {
        self.client_of(ALL_VERSIONS)
    }

    /// The same, with only these TLS versions.
    #[must_use]
    pub fn client_of(&self, versions: &[&'static SupportedProtocolVersion]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.ca_file()).expect("a certificate")).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("ring knows TLS 1.2 and 1.3")
            .with_root_certificates(roots);
        Arc::new(config.with_no_client_auth())
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.path().join(name)).expect("the object exists")
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let certificate =
            CertificateDer::from_pem_file(self.directory.path().join("server.crt")).expect("a certificate");
        let key = PrivateKeyDer::from_pem_file(self.directory.path().join("server.key")).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring knows TLS 1.2 and 1.3")
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .expect("the key belongs to the certificate");
        TlsAcceptor::from(Arc::new(config))
    }
}

fn openssl(directory: &Path, arguments: &[&str]) {
    let output = Command::new("openssl").args(arguments).current_dir(directory).output().expect("the openssl command");
    assert!(output.status.success(), "openssl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
