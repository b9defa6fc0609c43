//! Everything that a Provider's namespace should hold, and what it should no longer hold. Pure: no client, no clock.

use modelrelay_protocol::secret::Secret;

use super::ValidatedProvider;
use super::rotation::Plan;
use crate::context::Place;
use crate::defaults::RelayDefaults;
use crate::manifests::{Manifest, config, network, relay, secrets};

#[cfg(test)]
mod tests;

/// The outcome.
pub(super) struct Desired {
    /// To be applied in this order, before anything else: what the relay's Pods mount.
    pub(super) secrets: Vec<Manifest>,
    /// To be applied then.
    pub(super) objects: Vec<Manifest>,
    /// To be deleted, where they are.
    pub(super) unwanted: Vec<Manifest>,
    /// Whether relays mount the clients' keys.
    pub(super) mounts_api_keys: bool,
    /// What the relays report once they run this configuration.
    pub(super) config_hash: String,
}

/// What building needs besides the Provider.
pub(super) struct Inputs<'a> {
    /// What the Provider leaves out.
    pub(super) defaults: &'a RelayDefaults,
    /// Where the operator lives.
    pub(super) operator: &'a Place,
    /// The worker secrets.
    pub(super) plan: &'a Plan,
    /// The configuration's salt.
    pub(super) salt: &'a Secret,
    /// The admin token, where the user names none.
    pub(super) admin_token: Option<&'a Secret>,
    /// Whether there were keys before.
    pub(super) has_api_keys: bool,
    /// Whether clients have some.
    pub(super) holds_api_keys: bool,
}

/// Builds it.
pub(super) fn build(provider: &ValidatedProvider, inputs: &Inputs<'_>) -> Desired {
    let config = config::relay_config(provider, inputs.plan, inputs.salt);
    let mut secrets = vec![config.manifest, secrets::worker_secret(provider, inputs.plan)];
    if inputs.plan.tells_workers_first() {
        secrets.reverse();
    }
    secrets.extend(inputs.admin_token.map(|token| secrets::admin_secret(provider, token)));
    let relay = &provider.spec.relay;
    // Keys stay when they are not asked for: they are the clients'.
    if relay.require_api_keys || inputs.has_api_keys {
        secrets.push(secrets::api_keys_secret(provider));
    }
    let mut objects = vec![relay::service_account(provider)];
    let mut unwanted = Vec::new();
    let rights = [relay::role(provider), relay::role_binding(provider)];
    // Asking for keys again reaches running relays within a second, a mount only new ones: those must know the keys already.
    let mounts_api_keys = relay.require_api_keys || inputs.holds_api_keys;
    if mounts_api_keys {
        objects.extend(rights);
    } else {
        unwanted.extend(rights);
    }
    objects.extend([
        network::client_service(provider),
        network::workers_service(provider),
        relay::disruption_budget(provider),
    ]);
    let policy = network::network_policy(provider, inputs.defaults, inputs.operator);
    if relay.network_policy.enabled {
        objects.push(policy);
    } else {
        unwanted.push(policy);
    }
    objects.push(relay::deployment(provider, inputs.defaults, mounts_api_keys));
    Desired { secrets, objects, unwanted, mounts_api_keys, config_hash: config.hash }
}
