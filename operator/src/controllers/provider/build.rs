//! Builds everything that a Provider's namespace should contain, and lists what it should no longer contain. Pure: no
//! client, no clock.

use modelrelay_protocol::secret::Secret;

use crate::context::OperatorLocation;
use crate::manifests::config::shared::SharedEntry;
use crate::manifests::relay::Mounts;
use crate::manifests::{Manifest, config, network, relay, secrets};
use crate::settings::defaults::RelayDefaults;
use crate::spec::provider::ValidatedProvider;
use crate::spec::rotation::Plan;

#[cfg(test)]
mod tests;

/// The desired objects.
pub(super) struct Desired {
    /// The Secrets that relay Pods mount: applied in this order, before anything else.
    pub(super) secrets: Vec<Manifest>,
    /// Applied after the Secrets.
    pub(super) objects: Vec<Manifest>,
    /// Deleted if they exist.
    pub(super) unwanted: Vec<Manifest>,
    /// True if relays mount the API keys.
    pub(super) mounts_api_keys: bool,
    /// The hash that relays report once they run this configuration.
    pub(super) config_hash: String,
}

/// The inputs besides the Provider.
pub(super) struct RelayInputs<'a> {
    /// Defaults for fields that the Provider omits.
    pub(super) defaults: &'a RelayDefaults,
    /// The operator's location.
    pub(super) operator: &'a OperatorLocation,
    /// The worker secrets.
    pub(super) plan: &'a Plan,
    /// The configuration's salt.
    pub(super) salt: &'a Secret,
    /// The admin token, if the user names no Secret.
    pub(super) admin_token: Option<&'a Secret>,
    /// The other Providers that the relay serves.
    pub(super) sharers: &'a [SharedEntry],
    /// True if the Secret of the API keys exists.
    pub(super) has_api_keys: bool,
    /// True if it contains keys.
    pub(super) holds_api_keys: bool,
    /// True if the relay's Pods have a token for the API server. They keep it: otherwise another Provider that the
    /// relay serves, and that no longer lists ServiceAccounts, would replace them.
    pub(super) has_api_access: bool,
}

/// Builds the desired objects.
pub(super) fn build(provider: &ValidatedProvider, inputs: &RelayInputs<'_>) -> Desired {
    let config = config::relay_config(provider, inputs.plan, inputs.salt, inputs.sharers);
    let mut secrets = vec![config.manifest, secrets::worker_secret(provider, inputs.plan)];
    if inputs.plan.updates_workers_first() {
        secrets.reverse();
    }
    secrets.extend(inputs.admin_token.map(|token| secrets::admin_secret(provider, token)));
    let relay = &provider.spec.relay;
    // Keys are kept while they are not required: they belong to the clients.
    if relay.require_api_keys || inputs.has_api_keys {
        secrets.push(secrets::api_keys_secret(provider));
    }
    let mut objects = vec![relay::service_account(provider)];
    let mut unwanted = Vec::new();
    let rights = [relay::role(provider), relay::role_binding(provider)];
    // Requiring keys again reaches running relays within a second, but a mount reaches only new Pods. Relays must
    // therefore mount existing keys in advance.
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
    let mounts = Mounts {
        api_keys: mounts_api_keys,
        api_access: mounts_api_keys || provider.reviews_tokens || inputs.has_api_access,
    };
    objects.push(relay::deployment(provider, inputs.defaults, mounts));
    Desired { secrets, objects, unwanted, mounts_api_keys, config_hash: config.hash }
}
