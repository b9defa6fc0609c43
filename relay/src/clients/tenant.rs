//! Clients that present the token of their Pod's ServiceAccount instead of an API key.
//!
//! A token becomes the key of its tenant, and everything behind it treats the request as one with a key. Only a token
//! that the cluster has not reviewed lately makes its request wait; no other client waits for it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use modelrelay_protocol::error::{ApiError, ErrorKind};

use crate::keys::Key;
use crate::kubernetes::identity::claims::is_for_audience;
use crate::kubernetes::identity::{Denial, ServiceAccount};
use crate::state::Relay;
use crate::telemetry::metrics::Realm;

/// Returns the tenant of this token. `address` is that of the client.
pub(super) async fn authenticate(relay: &Relay, token: &str, address: IpAddr) -> Result<Arc<Key>, ApiError> {
    let tokens = &relay.client_tokens;
    let suspect = tokens.failures.locked_for(address, Instant::now()).is_some();
    // No client is locked out, but reviews for addresses that failed often have a lane of their own.
    let rejected = || _ = tokens.failures.judge(address, false, Instant::now());
    match tokens.identities.account_of_client(token, suspect, rejected).await {
        Ok(account) => tenant_of(relay, &account),
        Err(denial) => Err(refusal(relay, denial)),
    }
}

/// True if a value is a token for this relay's clients, whether or not it is valid.
pub(super) fn is_client_token(relay: &Relay, value: &str) -> bool {
    is_for_audience(value, relay.client_tokens.identities.audience())
}

fn tenant_of(relay: &Relay, account: &ServiceAccount) -> Result<Arc<Key>, ApiError> {
    let (namespace, name) = (account.namespace(), account.name());
    relay.client_tokens.tenants.load().of_account(namespace, name, SystemTime::now()).ok_or_else(|| {
        relay.shared.metrics.login_failed(Realm::Client);
        let message = format!(
            "ServiceAccount {name} of namespace {namespace} belongs to no tenant of this relay: add {{namespace: {namespace}, \
             serviceAccount: {name}}} to tenants, which are in spec.relay of the Provider or in relay.yaml"
        );
        ApiError::new(ErrorKind::UnknownTenant, message)
    })
}

fn refusal(relay: &Relay, denial: Denial) -> ApiError {
    match denial {
        Denial::Refused(why) => {
            relay.shared.metrics.login_failed(Realm::Client);
            ApiError::new(ErrorKind::InvalidApiKey, why)
        }
        // Not the client's fault, so it is not counted as a failed login.
        Denial::Unknown(why) => ApiError::new(ErrorKind::TokenUnverified, why),
    }
}
