//! The Secret of `spec.relay.tls`: the certificate that relays serve, and the authority that workers and the operator
//! trust.
//!
//! It is checked before it is used. A relay whose key does not belong to its certificate exits at once, and one whose
//! certificate is for another name cannot serve the cluster. Neither is rolled out, and no worker is sent there.
//! Running Pods continue: relays and workers keep the previous pair themselves.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{Error, InconsistentKeys, ServerConfig};

/// Key of the certificate chain in the Secret, and name of the file.
pub const CERTIFICATE: &str = "tls.crt";
/// Key of the private key in the Secret, and name of the file.
pub const PRIVATE_KEY: &str = "tls.key";
/// Key of the authority in the Secret, if any: cert-manager writes it.
pub const AUTHORITY: &str = "ca.crt";

/// The usable contents of a Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayTls {
    /// The additional authority to trust, in PEM, besides the system's roots.
    pub authority: Option<String>,
    /// resourceVersion of the Secret.
    pub version: Option<String>,
}

/// The reason that relays cannot serve with a Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnusableSecret {
    /// A key is missing.
    Missing(String),
    /// A value cannot be used.
    Wrong(String),
}

/// Checks the Secret; `host` is the name that workers and the operator dial.
pub fn judge(secret: &Secret, host: &str) -> Result<RelayTls, UnusableSecret> {
    let chain = certificates(CERTIFICATE, entry(secret, CERTIFICATE).ok_or_else(|| missing(CERTIFICATE))?)?;
    let key = entry(secret, PRIVATE_KEY).ok_or_else(|| missing(PRIVATE_KEY))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| wrong("has no private key in PEM form in tls.key"))?;
    is_for(&chain, host)?;
    is_a_pair(chain, key)?;
    let authority = match entry(secret, AUTHORITY) {
        Some(pem) => {
            certificates(AUTHORITY, pem)?;
            Some(String::from_utf8_lossy(pem).into_owned())
        }
        None => None,
    };
    Ok(RelayTls { authority, version: secret.metadata.resource_version.clone() })
}

/// Returns a value, or `None` if it is empty: cert-manager leaves `ca.crt` empty if it does not know the authority.
fn entry<'a>(secret: &'a Secret, key: &str) -> Option<&'a [u8]> {
    let bytes = &secret.data.as_ref()?.get(key)?.0;
    (!bytes.trim_ascii().is_empty()).then_some(bytes)
}

fn certificates(key: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, UnusableSecret> {
    match CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>() {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) | Err(_) => Err(wrong(format!("has no certificate in PEM form in {key}"))),
    }
}

fn is_for(chain: &[CertificateDer<'static>], host: &str) -> Result<(), UnusableSecret> {
    let [leaf, ..] = chain else { return Err(missing(CERTIFICATE)) };
    let leaf = rustls::server::ParsedCertificate::try_from(leaf)
        .map_err(|_| wrong("has a first certificate in tls.crt that is not valid for a server"))?;
    let is_named =
        ServerName::try_from(host).is_ok_and(|name| rustls::client::verify_server_name(&leaf, &name).is_ok());
    if is_named {
        return Ok(());
    }
    Err(wrong(format!(
        "has a certificate that is not valid for {host}, to which workers in the cluster and the operator connect: add this name \
         (dnsNames of a cert-manager Certificate)"
    )))
}

fn is_a_pair(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<(), UnusableSecret> {
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key));
    config.map(|_| ()).map_err(|error| {
        if matches!(error, Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) {
            wrong("has a key in tls.key that does not belong to the certificate in tls.crt")
        } else {
            wrong("has an unsupported key in tls.key: use RSA, ECDSA (P-256, P-384) or Ed25519")
        }
    })
}

fn missing(key: &str) -> UnusableSecret {
    UnusableSecret::Missing(format!(
        "has no key {key}, or no content in it: the Secret must be of type kubernetes.io/tls, with tls.crt and tls.key"
    ))
}

fn wrong(problem: impl Into<String>) -> UnusableSecret {
    UnusableSecret::Wrong(problem.into())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::ByteString;
    use rcgen::{CertificateParams, KeyPair};
    use serde_json::{Value, json};

    use super::*;

    pub(crate) const HOST: &str = "local-workers.llm.svc";

    /// Returns a self-signed certificate for these names and its key, in PEM.
    pub(crate) fn pair(names: &[&str]) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let certificate = CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    pub(crate) fn secret(entries: &[(&str, &str)]) -> Secret {
        let entry = |(key, text): &(&str, &str)| ((*key).to_owned(), ByteString(text.as_bytes().to_vec()));
        let data: BTreeMap<_, _> = entries.iter().map(entry).collect();
        let mut secret = Secret { data: Some(data), ..Secret::default() };
        secret.metadata.resource_version = Some("7".to_owned());
        secret
    }

    /// Returns the Secret as the API server would.
    pub(crate) fn json_of(entries: &[(&str, &str)]) -> Value {
        let mut value = serde_json::to_value(secret(entries)).unwrap();
        value["metadata"]["name"] = json!("relay-tls");
        value
    }

    fn why(entries: &[(&str, &str)]) -> String {
        match judge(&secret(entries), HOST).unwrap_err() {
            UnusableSecret::Missing(why) => format!("missing: {why}"),
            UnusableSecret::Wrong(why) => format!("wrong: {why}"),
        }
    }

    #[test]
    fn pair_for_dialled_name_is_usable() {
        for names in [&[HOST, "local.llm.svc"][..], &["*.llm.svc"]] {
            let (certificate, key) = pair(names);
            let authority = pair(&["ca"]).0;
            let entries = [(CERTIFICATE, &*certificate), (PRIVATE_KEY, &*key), (AUTHORITY, &*authority)];
            let found = judge(&secret(&entries), HOST).unwrap();
            assert_eq!(found, RelayTls { authority: Some(authority.clone()), version: Some("7".to_owned()) });
            for none in [&entries[..2], &[entries[0], entries[1], (AUTHORITY, "\n")]] {
                assert_eq!(judge(&secret(none), HOST).unwrap().authority, None);
            }
        }
    }

    #[test]
    fn fatal_secret_error_names_its_key() {
        let ((certificate, key), (_, other_key)) = (pair(&[HOST]), pair(&[HOST]));
        let (certificate, key) = (certificate.as_str(), key.as_str());
        let missing = why(&[(PRIVATE_KEY, key)]);
        assert!(missing.starts_with("missing: has no key tls.crt"), "{missing}");
        let missing = why(&[(CERTIFICATE, certificate), (PRIVATE_KEY, "")]);
        assert!(missing.starts_with("missing: has no key tls.key"), "{missing}");
        for (entries, wanted) in [
            (vec![(CERTIFICATE, "no PEM"), (PRIVATE_KEY, key)], "no certificate in PEM form in tls.crt"),
            (vec![(CERTIFICATE, certificate), (PRIVATE_KEY, "no PEM")], "no private key in PEM form in tls.key"),
            (vec![(CERTIFICATE, certificate), (PRIVATE_KEY, &other_key)], "does not belong to the certificate"),
            (
                vec![(CERTIFICATE, certificate), (PRIVATE_KEY, key), (AUTHORITY, "no PEM")],
                "no certificate in PEM form in ca.crt",
            ),
        ] {
            let why = why(&entries);
            assert!(why.starts_with("wrong: ") && why.contains(wanted), "{why}");
        }
    }

    #[test]
    fn certificate_for_other_names_is_rejected() {
        let (certificate, key) = pair(&["local.llm.svc", "llm.example.com"]);
        let why = why(&[(CERTIFICATE, &certificate), (PRIVATE_KEY, &key)]);
        assert!(why.contains("not valid for local-workers.llm.svc") && why.contains("dnsNames"), "{why}");
    }
}
