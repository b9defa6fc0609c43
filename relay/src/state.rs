//! The state that every handler of a request gets.

pub(crate) mod gauges;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::{Extensions, HeaderMap};

use crate::keys::{KeyStore, Tenants};
use crate::kubernetes::identity::Identities;
use crate::net::connections::AfterGrace;
use crate::net::lockout::{Lockout, client_address};
use crate::net::peer::Peer;
use crate::net::tls::Tls;
use crate::provider::Provider;
use crate::provider::routing::Providers;
use crate::provider::shared::{ProcessPhase, Shared};
use crate::settings::admin_token::AdminToken;
use crate::settings::watch::ConfigWatch;
use crate::telemetry::audit::AuditLog;

/// One relay process.
pub struct Relay {
    /// The state that all parts share.
    pub shared: Arc<Shared>,
    /// The providers and the routing.
    pub providers: Providers,
    /// The token of `/admin`.
    pub admin_token: AdminToken,
    /// The certificate of the listeners, if they use TLS.
    pub tls: Option<Arc<Tls>>,
    /// The audit log.
    pub audit: AuditLog,
    /// API keys.
    pub keys: Arc<dyn KeyStore>,
    /// Failed logins of workers.
    pub lockout: Lockout,
    /// The identities of workers' tokens.
    pub identities: Arc<Identities>,
    /// The clients that present a token.
    pub client_tokens: ClientTokens,
    /// The active configuration.
    pub config_watch: ConfigWatch,
}

/// Clients that present a token of their ServiceAccount.
pub struct ClientTokens {
    /// The identities of their tokens.
    pub identities: Arc<Identities>,
    /// The tenants.
    pub tenants: ArcSwap<Tenants>,
    /// Addresses with failed logins.
    pub failures: Lockout,
}

impl Relay {
    /// All providers, including removed ones with unfinished requests.
    pub fn all_providers(&self) -> Vec<Arc<Provider>> {
        self.providers.all_with_leaving()
    }

    /// True if the relay is shutting down and accepts no more requests of this connection.
    pub fn refuses_new(&self, extensions: &Extensions) -> bool {
        extensions.get::<AfterGrace>().is_some() || self.shared.phase() >= ProcessPhase::Leaving
    }

    /// The address of the client that sent a request, behind the trusted proxies.
    pub fn client_address(&self, headers: &HeaderMap, extensions: &Extensions) -> IpAddr {
        let peer = extensions.get::<Peer>().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.0.ip());
        client_address(peer, headers, &self.shared.config.load().trusted_proxies)
    }
}
