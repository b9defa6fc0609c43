//! Reads certificates and keys from the Secret's bytes, and creates them.
//!
//! Anyone with write access can edit the Secret, so readers accept any content: parts that cannot be used are `None`,
//! and [`super::plan`] decides on the consequences.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use super::plan::{Contents, Leaf, Signer, Validity};
use super::{ServedCertificate, keys};

/// The clocks of nodes differ; the API server rejects a certificate that is not valid yet.
const BACKDATED: Duration = Duration::from_secs(3600);

/// The Secret's data.
pub type Data = BTreeMap<String, ByteString>;

/// The reason that a certificate cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The key is not in the Secret.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// The value is not valid PEM.
    #[error("{key}: {source}")]
    Pem {
        /// The key of the Secret.
        key: &'static str,
        /// The parse error, which never contains the content.
        source: rustls::pki_types::pem::Error,
    },
    /// The value is PEM, but not a certificate.
    #[error("tls.crt: not a certificate")]
    Certificate,
    /// Certificate and key do not belong together, or the key is of an unknown kind.
    #[error("tls.crt and tls.key: {0}")]
    Pair(rustls::Error),
}

/// Returns the certificate to serve from this Secret, whether or not the operator wrote it.
pub fn served(data: &Data) -> Result<ServedCertificate, CertificateError> {
    let bytes = |key| data.get(key).map(|value| value.0.as_slice()).ok_or(CertificateError::Missing(key));
    let pem = |key| move |source| CertificateError::Pem { key, source };
    let chain: Vec<_> = CertificateDer::pem_slice_iter(bytes(keys::CERTIFICATE)?)
        .collect::<Result<_, _>>()
        .map_err(pem(keys::CERTIFICATE))?;
    let first = chain.first().ok_or(CertificateError::Certificate)?;
    let not_after = validity(&parse(first).ok_or(CertificateError::Certificate)?).not_after;
    let key = PrivateKeyDer::from_pem_slice(bytes(keys::KEY)?).map_err(pem(keys::KEY))?;
    let provider = rustls::crypto::ring::default_provider();
    let key = CertifiedKey::from_der(chain, key, &provider).map_err(CertificateError::Pair)?;
    Ok(ServedCertificate { key: Arc::new(key), not_after })
}

/// Returns the usable contents of the operator's Secret. `names` are the names that its certificate should be valid
/// for.
pub fn contents(data: &Data, names: &[String]) -> Contents {
    let authority = one(data, keys::AUTHORITY);
    let previous = one(data, keys::PREVIOUS_AUTHORITY);
    let signing_key = text(data, keys::AUTHORITY_KEY).and_then(|pem| KeyPair::from_pem(pem).ok());
    let authority_certificate = authority.as_ref().and_then(|(_, der)| parse(der));
    let previous_certificate = previous.as_ref().and_then(|(_, der)| parse(der));
    let can_sign = match (&authority_certificate, &signing_key) {
        (Some(certificate), Some(key)) => certificate.public_key().subject_public_key.data == key.public_key_raw(),
        _ => false,
    };
    let leaf = served(data).ok().and_then(|served| {
        let certificate = parse(served.key.cert.first()?)?;
        let by = |authority: &Option<X509Certificate<'_>>| {
            authority.as_ref().is_some_and(|one| certificate.verify_signature(Some(one.public_key())).is_ok())
        };
        let signer = match (by(&authority_certificate), by(&previous_certificate)) {
            (true, _) => Some(Signer::Current),
            (false, true) => Some(Signer::Previous),
            (false, false) => None,
        };
        Some(Leaf { validity: validity(&certificate), signer, names: names.iter().all(|name| has(&certificate, name)) })
    });
    Contents {
        authority: authority_certificate.as_ref().map(validity),
        can_sign,
        previous: previous_certificate.as_ref().map(validity),
        leaf,
    }
}

/// Returns the certificates that the API server should trust: the authority, and the previous one while it is kept.
pub fn bundle(data: &Data) -> Vec<u8> {
    let both = [one(data, keys::AUTHORITY), one(data, keys::PREVIOUS_AUTHORITY)];
    let text: String = both.into_iter().flatten().map(|(pem, _)| format!("{pem}\n")).collect();
    text.into_bytes()
}

/// Creates an authority that replaces the current one. With `keep`, the current one stays trusted and the served
/// certificate stays.
pub fn new_authority(data: &mut Data, now: SystemTime, lifetime: Duration, keep: bool) -> Result<(), rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = dated(CertificateParams::new(Vec::new())?, now, lifetime);
    // Two authorities of the same name could be distinguished only by trial.
    let name = format!("ModelRelay webhook authority {}", crate::webhook::inject::token().get(..8).unwrap_or_default());
    params.distinguished_name = common_name(&name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let certificate = params.self_signed(&key)?;
    data.remove(keys::PREVIOUS_AUTHORITY);
    let old = one(data, keys::AUTHORITY).map(|(pem, _)| format!("{pem}\n"));
    if let Some(old) = old.filter(|_| keep) {
        put(data, keys::PREVIOUS_AUTHORITY, old);
    }
    put(data, keys::AUTHORITY, certificate.pem());
    put(data, keys::AUTHORITY_KEY, key.serialize_pem());
    Ok(())
}

/// Creates a certificate signed by the current authority.
pub fn new_leaf(data: &mut Data, now: SystemTime, lifetime: Duration, names: &[String]) -> Result<(), rcgen::Error> {
    let authority_key = KeyPair::from_pem(text(data, keys::AUTHORITY_KEY).unwrap_or_default())?;
    let (_, authority) = one(data, keys::AUTHORITY).ok_or(rcgen::Error::CouldNotParseCertificate)?;
    let issuer = Issuer::from_ca_cert_der(&authority, authority_key)?;
    let key = KeyPair::generate()?;
    let mut params = dated(CertificateParams::new(names)?, now, lifetime);
    if let Some(end) = parse(&authority).map(|authority| validity(&authority).not_after) {
        params.not_after = params.not_after.min(OffsetDateTime::from(end));
    }
    // TLS reads the names from the extension. The common name is limited to 64 characters, which a Service and a
    // namespace can exceed.
    params.distinguished_name = common_name("modelrelay-operator");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let certificate = params.signed_by(&key, &issuer)?;
    put(data, keys::CERTIFICATE, certificate.pem());
    put(data, keys::KEY, key.serialize_pem());
    Ok(())
}

fn put(data: &mut Data, key: &str, text: String) {
    data.insert(key.to_owned(), ByteString(text.into_bytes()));
}

fn text<'a>(data: &'a Data, key: &str) -> Option<&'a str> {
    std::str::from_utf8(&data.get(key)?.0).ok().map(str::trim)
}

/// Returns the one certificate in a key of the Secret. The key must hold nothing else, because its text is sent to the
/// API server unchanged.
fn one<'a>(data: &'a Data, key: &str) -> Option<(&'a str, CertificateDer<'static>)> {
    let text = text(data, key)?;
    let framed = text.starts_with("-----BEGIN CERTIFICATE-----") && text.ends_with("-----END CERTIFICATE-----");
    if !framed || text.matches("-----BEGIN").count() != 1 {
        return None;
    }
    let der = CertificateDer::from_pem_slice(text.as_bytes()).ok()?;
    parse(&der)?;
    Some((text, der))
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    X509Certificate::from_der(der).ok().map(|(_, certificate)| certificate)
}

fn validity(certificate: &X509Certificate<'_>) -> Validity {
    let at = |seconds: i64| match u64::try_from(seconds) {
        Ok(seconds) => SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)),
        Err(_) => Some(SystemTime::UNIX_EPOCH),
    };
    let validity = certificate.validity();
    Validity {
        not_before: at(validity.not_before.timestamp()).unwrap_or(SystemTime::UNIX_EPOCH),
        not_after: at(validity.not_after.timestamp()).unwrap_or(SystemTime::UNIX_EPOCH),
    }
}

fn has(certificate: &X509Certificate<'_>, name: &str) -> bool {
    let Ok(Some(names)) = certificate.subject_alternative_name() else { return false };
    names.value.general_names.iter().any(|one| matches!(one, GeneralName::DNSName(known) if *known == name))
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn dated(mut params: CertificateParams, now: SystemTime, lifetime: Duration) -> CertificateParams {
    // At most a tenth of the lifetime, so that a short one is not over before it began.
    let before = BACKDATED.min(lifetime / 10);
    params.not_before = now.checked_sub(before).unwrap_or(SystemTime::UNIX_EPOCH).into();
    params.not_after = now.checked_add(lifetime).unwrap_or(now).into();
    params
}

#[cfg(test)]
mod tests;
