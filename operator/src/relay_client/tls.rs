//! Verifies a relay that uses TLS: by the authority in its Secret, and by the name that workers dial.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::context::Context;
use crate::crd::Provider;
use crate::names;
use crate::relay_tls::{RelayTls, Unusable, judge};

/// Returns a client for relays of this Provider, or `None` if they use plain HTTP.
pub(super) async fn client(ctx: &Context, provider: &Provider) -> Option<Result<reqwest::Client, String>> {
    let tls = provider.spec.relay.tls.as_ref()?;
    let namespace = provider.namespace().unwrap_or_default();
    let host = names::worker_host(&provider.name_any(), &namespace);
    let api: Api<Secret> = Api::namespaced(ctx.client.clone(), &namespace);
    let name = &tls.secret_name;
    let read = match api.get_opt(name).await {
        Ok(Some(secret)) => judge(&secret, &host).map_err(|(Unusable::Missing(why) | Unusable::Wrong(why))| why),
        Ok(None) => Err("does not exist".to_owned()),
        Err(error) => Err(format!("could not be read: {error}")),
    };
    let client = read.and_then(|tls| client_of(&tls, &host));
    Some(client.map_err(|why| format!("cannot connect with TLS: Secret {name} {why}")))
}

/// Builds a client that trusts the same authorities as the Provider's workers.
pub(super) fn client_of(tls: &RelayTls, host: &str) -> Result<reqwest::Client, String> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let authority = tls.authority.as_deref().unwrap_or_default();
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(authority.as_bytes()).flatten());
    let failed = |error: &dyn std::fmt::Display| format!("cannot be used to verify the relay: {error}");
    let provider = Arc::new(ring::default_provider());
    let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
    let inner = inner.map_err(|error| failed(&error))?;
    let name = ServerName::try_from(host.to_owned()).map_err(|error| failed(&error))?;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Named { inner, name }))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    super::client_builder().tls_backend_preconfigured(config).build().map_err(|error| failed(&error))
}

/// Verifies a certificate as usual, but for one fixed name: Pods are polled at their addresses, which no certificate
/// contains.
#[derive(Debug)]
struct Named {
    inner: Arc<WebPkiServerVerifier>,
    name: ServerName<'static>,
}

impl ServerCertVerifier for Named {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _address: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.inner.verify_server_cert(end_entity, intermediates, &self.name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
