//! The webhook's certificates: creating, serving and publishing them.
//!
//! They are stored in one Secret. Every replica follows the Secret and serves its certificate ([`run_reader`]). Only
//! the leader writes it ([`run_manager`]): its own certificate authority for ten years, a certificate for ninety days,
//! both renewed after two thirds of their lifetime, and the authority's certificate in the `caBundle` of the webhook
//! configuration. With certificates from elsewhere (cert-manager, an administrator), only the reader runs, and nothing
//! is ever written.
//!
//! A new authority is introduced in three steps, each of which leaves a working pair: the API server trusts the old and
//! the new authority; then a certificate of the new one is served; then the old one is removed. [`plan`] derives the
//! next step from the current state, so a leader that dies halfway leaves nothing undone.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

mod manager;
pub mod material;
pub mod plan;
mod reader;

pub use manager::run_manager;
pub use reader::run_reader;

/// Keys of the Secret.
pub mod keys {
    /// The served certificate.
    pub const CERTIFICATE: &str = "tls.crt";
    /// The private key of the served certificate.
    pub const KEY: &str = "tls.key";
    /// The authority's certificate.
    pub const AUTHORITY: &str = "ca.crt";
    /// The authority's private key.
    pub const AUTHORITY_KEY: &str = "ca.key";
    /// The previous authority's certificate, while it may be needed.
    pub const PREVIOUS_AUTHORITY: &str = "ca-previous.crt";
}

/// The location and purpose of the certificates.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The operator's namespace.
    pub namespace: String,
    /// The Secret.
    pub secret: String,
    /// The Service by whose names the API server calls the webhook.
    pub service: String,
    /// The MutatingWebhookConfiguration that receives the authority. It owns the Secret: both are removed with the
    /// release.
    pub configuration: String,
}

impl Settings {
    /// Returns the names that the certificate is valid for. The API server uses the first.
    pub fn names(&self) -> Vec<String> {
        let Self { service, namespace, .. } = self;
        vec![
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
            format!("{service}.{namespace}"),
            service.clone(),
        ]
    }
}

/// Lifetimes and intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The lifetime of a served certificate.
    pub leaf_lifetime: Duration,
    /// The lifetime of an authority.
    pub ca_lifetime: Duration,
    /// The time from an authority's publication until its first certificate is served. Every API server must have
    /// received the authority by then.
    pub settle: Duration,
    /// The time for which the old authority stays trusted after that: a replica that was cut off may still serve its
    /// certificate.
    pub overlap: Duration,
    /// The interval between checks of the wall clock. Sleeps use a clock that stops while a machine is suspended, so
    /// they are short, and each decision reads the current time.
    pub check_interval: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self::of(90 * DAY)
    }
}

const DAY: Duration = Duration::from_secs(24 * 3600);

impl Policy {
    /// Derives all values from the lifetime of a served certificate. Below a few days, which is for tests, the others
    /// shrink with it, so that a certificate that is renewed at two thirds of its lifetime has time left for each step.
    pub fn of(leaf_lifetime: Duration) -> Self {
        // With a shorter lifetime, the leader would do nothing but create certificates.
        let leaf_lifetime = leaf_lifetime.max(Duration::from_secs(10));
        Self {
            leaf_lifetime,
            // Ten years; for tests, the lifetime of some certificates.
            ca_lifetime: (3650 * DAY).min(leaf_lifetime * 41),
            settle: Duration::from_secs(60).min(leaf_lifetime / 10),
            overlap: DAY.min(leaf_lifetime / 3),
            check_interval: Duration::from_secs(60).min(leaf_lifetime / 30),
        }
    }
}

/// The served certificate. Until there is one, handshakes fail and [`Certificates::is_ready`] returns false.
#[derive(Default)]
pub struct Certificates {
    current: ArcSwapOption<ServedCertificate>,
}

/// A certificate with its key, ready to be served.
pub struct ServedCertificate {
    key: Arc<CertifiedKey>,
    not_after: SystemTime,
}

impl Certificates {
    /// True if a handshake can succeed.
    pub fn is_ready(&self) -> bool {
        self.current.load().is_some()
    }

    /// Returns the expiry time of the served certificate, for a metric.
    pub fn expires_at(&self) -> Option<SystemTime> {
        self.current.load().as_ref().map(|served| served.not_after)
    }

    /// Serves another certificate from the next handshake on. Returns true if it differs from the current one.
    pub fn store(&self, served: ServedCertificate) -> bool {
        let same = self.current.load().as_ref().is_some_and(|current| current.key.cert == served.key.cert);
        if !same {
            self.current.store(Some(Arc::new(served)));
        }
        !same
    }
}

impl ResolvesServerCert for Certificates {
    /// Returns the one certificate, whatever name the client requests: an API server outside of the cluster may use an
    /// address.
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current.load().as_ref().map(|served| Arc::clone(&served.key))
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("ready", &self.is_ready()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_lifetimes_are_ten_years_and_ninety_days() {
        let policy = Policy::default();
        assert_eq!((policy.ca_lifetime, policy.leaf_lifetime), (3650 * DAY, 90 * DAY));
        assert_eq!((policy.settle, policy.overlap), (Duration::from_secs(60), DAY));
    }

    #[test]
    fn short_lifetime_leaves_time_for_every_step() {
        let policy = Policy::of(Duration::from_secs(30));
        let left = policy.leaf_lifetime / 3;
        assert!(policy.settle + 2 * policy.check_interval < left, "{policy:?}");
    }

    #[test]
    fn certificate_covers_every_service_name() {
        let settings = Settings {
            namespace: "mr-system".to_owned(),
            secret: "s".to_owned(),
            service: "hook".to_owned(),
            configuration: "c".to_owned(),
        };
        let names = ["hook.mr-system.svc", "hook.mr-system.svc.cluster.local", "hook.mr-system", "hook"];
        assert_eq!(settings.names(), names);
    }
}
