//! A pass over a Provider that another one's relay serves.

use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::jiff::Timestamp;

use super::advance::{self, apply_one};
use super::cluster_view::{ClusterView, OwnRelays};
use super::fetch;
use super::memory::ProviderMemory;
use super::moving;
use super::outcome::{ProviderFailure, ProviderOutcome, WorkerSecret};
use super::prepare::{PreparedSharer, prepare};
use super::reviewers;
use crate::cluster::apply::Owner;
use crate::cluster::cache::Caches;
use crate::context::Context;
use crate::crd::Provider;
use crate::manifests::{config, secrets};
use crate::resources::names;
use crate::spec::provider::ValidatedProvider;
use crate::spec::rotation::Plan;
use crate::spec::sharing;

/// Requests a pass of the Providers whose objects depend on this one's: the relay's owner, or those that it serves.
pub(super) fn notify(caches: &Caches, provider: &Provider, view: &ClusterView) {
    if provider.spec.relay_ref.is_some() {
        let (namespace, name) = sharing::relay_key(provider);
        return caches.triggers.provider(&namespace, &name);
    }
    for (sharer, _) in &view.sharers {
        let (namespace, name) = sharing::key(sharer);
        caches.triggers.provider(&namespace, &name);
    }
}

/// Applies the Secrets of a Provider that another one's relay serves, and checks whether that relay's configuration
/// contains the Provider. The relay's owner writes the configuration.
pub(super) async fn advance(
    ctx: &Context,
    provider: &Provider,
    view: &ClusterView,
    memory: &mut ProviderMemory,
) -> ProviderOutcome {
    let kept = advance::kept(provider, memory);
    let generation = kept.generation;
    if let Some(own) = &view.own
        && is_moving(ctx, provider, own).await
    {
        return moving::advance(ctx, provider, view, own, memory).await;
    }
    if let Err(error) = &view.relay {
        let failure = Some(ProviderFailure::from(error));
        return ProviderOutcome { failure, config_hash: None, may_serve: false, moving: None, ..kept };
    }
    let step = match prepare(ctx, provider, view).await {
        Ok(step) => step,
        Err(failure) => return ProviderOutcome { failure: Some(failure), ..kept },
    };
    let config_hash = step.config_hash();
    let PreparedSharer { valid, plan, .. } = step;
    let published = match write_secrets(ctx, &valid, &plan, memory).await {
        Ok(published) => published,
        Err(failure) => return ProviderOutcome { failure: Some(failure), ..kept },
    };
    if let (Some(_), Ok(Some(owner))) = (&config_hash, &view.relay)
        && let Err(failure) = moving::keep_service(ctx, provider, owner).await
    {
        return ProviderOutcome { failure: Some(failure), moving: None, ..kept };
    }
    // The owner's pass requests another one of this Provider; this is only a precaution.
    let polls = config_hash.is_none();
    // The relay serves all the same, but admits no worker by a token.
    let binding = ctx.defaults.relay.token_review_binding.as_deref();
    let failure = reviewers::missing(provider, binding).map(|error| ProviderFailure::from(&error));
    let version = memory.versions.get(&names::worker_secret(&valid.name)).cloned();
    ProviderOutcome {
        generation,
        config_generation: if config_hash.is_some() { generation } else { kept.config_generation },
        may_serve: kept.may_serve || config_hash.is_some(),
        config_hash,
        worker_secret: Some(WorkerSecret::of(&valid.name, &plan, version)),
        api_keys_version: None,
        tls_version: None,
        cold_models: valid.cold_models,
        ignores_expect_workers: false,
        moving: None,
        published: Some(published),
        wake_at: advance::next_pass(plan.wake_at, polls, Timestamp::now()),
        // The missing right concerns no Secret: the step was completed.
        events: plan.events,
        failure,
    }
}

/// True if relays of its own still use the Secret of the Provider, so that a move has not ended. If it cannot be read,
/// nothing is written either.
async fn is_moving(ctx: &Context, provider: &Provider, own: &OwnRelays) -> bool {
    own.deployment.is_some()
        || !matches!(fetch::applied_config_of(&ctx.client, &sharing::key(provider)).await, Ok(None))
}

/// Writes the Secret that the relay's owner reads and the one that workers mount. Returns a value that changes with the
/// former.
async fn write_secrets(
    ctx: &Context,
    valid: &ValidatedProvider,
    plan: &Plan,
    memory: &mut ProviderMemory,
) -> Result<String, ProviderFailure> {
    let owner = Owner { kind: "Provider", label: names::PROVIDER_LABEL, name: &valid.name };
    let published = config::sharer_secrets(valid, plan);
    let mut hasher = DefaultHasher::new();
    published.value.to_string().hash(&mut hasher);
    let mut manifests = [published, secrets::worker_secret(valid, plan)];
    if plan.updates_workers_first() {
        manifests.reverse();
    }
    for manifest in &manifests {
        apply_one(ctx, owner, manifest, memory).await.map_err(|error| ProviderFailure::from(&error))?;
    }
    Ok(hasher.finish().to_string())
}
