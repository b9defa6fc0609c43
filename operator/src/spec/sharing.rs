//! Decides which relay serves a Provider, and under which name.
//!
//! A Provider with `relayRef` has no relay of its own: it is one more provider in the configuration of the named
//! Provider's relay. That Provider's namespace owns the address, so it decides which other namespaces may be served
//! there (`relay.sharedWith`).

use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;

use crate::crd::provider::MovingStep;
use crate::crd::{Provider, ProviderStatus};
use crate::resources::names::{self, ObjectKey};

/// The maximum number of Providers that refer to one relay. Their entries share one Secret of 1 MiB.
pub const MAX_SHARERS: usize = 32;

/// The reason that the named Provider's relay does not serve a Provider.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharingError {
    /// There is no such Provider.
    #[error(
        "spec.relayRef: Provider {1} does not exist in namespace {0}, or this operator manages the two namespaces separately (watchNamespaces)"
    )]
    NotFound(String, String),
    /// It refers to another one itself.
    #[error(
        "spec.relayRef: Provider {1} of namespace {0} has no relay of its own: name the Provider that owns the relay"
    )]
    Chained(String, String),
    /// Its namespace has not allowed it.
    #[error("spec.relayRef: Provider {1} of namespace {0} does not list this Provider in spec.relay.sharedWith")]
    NotGranted(String, String),
    /// It is being deleted.
    #[error("spec.relayRef: Provider {1} of namespace {0} is being deleted")]
    Deleting(String, String),
    /// It serves as many as it can.
    #[error("spec.relayRef: {MAX_SHARERS} older Providers refer to Provider {1} of namespace {0}, which is the limit")]
    Full(String, String),
}

/// Returns namespace and name of a Provider.
pub fn key(provider: &Provider) -> ObjectKey {
    (provider.namespace().unwrap_or_default(), provider.name_any())
}

/// Returns namespace and name of the Provider whose relay serves this one: its own, unless it refers to another.
pub fn relay_key(provider: &Provider) -> ObjectKey {
    let (namespace, name) = key(provider);
    match &provider.spec.relay_ref {
        Some(relay) => (relay.namespace.clone().unwrap_or(namespace), relay.name.clone()),
        None => (namespace, name),
    }
}

/// True if a Provider names the one with this key in `relayRef`, whether it may or not.
pub fn refers_to(provider: &Provider, relay: &ObjectKey) -> bool {
    provider.spec.relay_ref.is_some() && relay_key(provider) == *relay
}

/// Returns the name by which a relay knows a Provider: its own, with its namespace if that is not the relay's. Names of
/// Providers contain no periods, so no two Providers have the same name at a relay.
pub fn name_at_relay(provider: &Provider) -> String {
    name_in(&relay_key(provider).0, &key(provider))
}

/// Returns the name by which relays of a namespace know the Provider with this key.
pub fn name_in(relay_namespace: &str, (namespace, name): &ObjectKey) -> String {
    if relay_namespace == namespace { name.clone() } else { format!("{name}.{namespace}") }
}

/// True if `deployment` runs relays of this Provider, and not of a predecessor of its name.
pub fn runs_relays(provider: &Provider, deployment: &Deployment) -> bool {
    let is_owned = provider.uid().is_some_and(|uid| deployment.owner_references().iter().any(|owner| owner.uid == uid));
    let replicas = deployment.spec.as_ref().and_then(|spec| spec.replicas);
    is_owned && deployment.metadata.deletion_timestamp.is_none() && replicas != Some(0)
}

/// True if a Provider that refers to another one is still served by relays of its own: it has such relays, and its
/// workers have not been directed to the others. `deployment` is that of its name.
pub fn is_at_own_relay(provider: &Provider, deployment: Option<&Deployment>) -> bool {
    let has_left = match provider.status.as_ref().and_then(|status| status.moving) {
        None => has_moved(provider),
        Some(MovingStep::WaitingForRelay) => false,
        Some(MovingStep::ConnectingWorkers | MovingStep::Draining) => true,
    };
    provider.spec.relay_ref.is_some()
        && !has_left
        && deployment.is_some_and(|deployment| runs_relays(provider, deployment))
}

/// Returns the Provider whose relay serves this one, as `status.relay` shows it: its name, with its namespace if that
/// differs.
pub fn relay_shown(provider: &Provider) -> String {
    let (namespace, name) = relay_key(provider);
    if key(provider).0 == namespace { name } else { format!("{namespace}/{name}") }
}

/// True if the relay of the Provider that this one refers to has taken over its clients.
pub fn has_moved(provider: &Provider) -> bool {
    let relay = provider.status.as_ref().and_then(|status| status.relay.as_ref());
    provider.spec.relay_ref.is_some() && relay == Some(&relay_shown(provider))
}

/// True if a Provider that refers to another one keeps its own relay, because its move has not begun or is refused.
pub fn awaits_move(provider: &Provider) -> bool {
    let is_unmoved =
        |status: &ProviderStatus| status.moving.is_none() && status.relay.as_ref() == Some(&provider.name_any());
    provider.spec.relay_ref.is_some() && provider.status.as_ref().is_some_and(is_unmoved)
}

/// Checks that the relay of `owner`, the Provider that this one names, may serve it.
pub fn check(provider: &Provider, owner: Option<&Provider>) -> Result<(), SharingError> {
    let (namespace, name) = relay_key(provider);
    let Some(owner) = owner else { return Err(SharingError::NotFound(namespace, name)) };
    // Its own relay still serves those that refer to it: it cannot move while there are any.
    let keeps_its_relay = awaits_move(owner) && key(owner) != key(provider);
    if owner.spec.relay_ref.is_some() && !keeps_its_relay {
        return Err(SharingError::Chained(namespace, name));
    }
    if !is_granted(provider, owner) {
        return Err(SharingError::NotGranted(namespace, name));
    }
    if owner.metadata.deletion_timestamp.is_some() {
        return Err(SharingError::Deleting(namespace, name));
    }
    Ok(())
}

fn is_granted(provider: &Provider, owner: &Provider) -> bool {
    grants(owner, &key(provider))
}

/// True if the relay of `owner` may serve the Provider with this key.
pub fn grants(owner: &Provider, (namespace, name): &ObjectKey) -> bool {
    let lists = |grant: &crate::crd::provider::SharedWith| {
        grant.namespace == *namespace && (grant.provider.is_empty() || grant.provider == *name)
    };
    owner.namespace().unwrap_or_default() == *namespace || owner.spec.relay.shared_with.iter().any(lists)
}

/// Returns the Providers that refer to `owner` and may, in the order of its relay's configuration: those of its own
/// namespace first. If there are too many, those that are served already stay, and the oldest of the others follow.
pub fn sharers<P: AsRef<Provider> + Clone>(owner: &Provider, all: &[P]) -> Vec<P> {
    let relay = key(owner);
    let refers = |provider: &&P| {
        let provider = provider.as_ref();
        refers_to(provider, &relay)
            && provider.metadata.deletion_timestamp.is_none()
            && check(provider, Some(owner)).is_ok()
    };
    let mut sharers: Vec<P> = all.iter().filter(refers).cloned().collect();
    sharers.sort_by_cached_key(|provider| (arrival(provider.as_ref()), names::age(provider.as_ref())));
    sharers.truncate(MAX_SHARERS);
    sharers.sort_by_cached_key(|provider| {
        let key = key(provider.as_ref());
        (key.0 != relay.0, key)
    });
    sharers
}

/// Returns the order in which Providers get a place at a relay: one that moves there does not displace another.
fn arrival(provider: &Provider) -> u8 {
    match provider.status.as_ref().and_then(|status| status.moving) {
        Some(MovingStep::WaitingForRelay) => 1,
        None if awaits_move(provider) => 2,
        None | Some(MovingStep::ConnectingWorkers | MovingStep::Draining) => 0,
    }
}

#[cfg(test)]
mod tests;
