//! A pass over a Provider that another one's relay serves.

use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::jiff::Timestamp;

use super::advance::{self, apply_one};
use super::cluster_view::ClusterView;
use super::fetch::{self, FetchedSecrets, fetch};
use super::memory::ProviderMemory;
use super::outcome::{ProviderFailure, ProviderOutcome, WorkerSecret};
use super::reviewers;
use crate::cluster::apply::Owner;
use crate::cluster::cache::Caches;
use crate::context::Context;
use crate::crd::Provider;
use crate::manifests::config::shared::{AppliedConfig, MAX_ENTRY_BYTES, SharedEntry};
use crate::manifests::{config, secrets};
use crate::resources::names;
use crate::spec::provider::{ValidatedProvider, validate};
use crate::spec::rotation::{Plan, RelaySide};
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
    if let Err(error) = &view.relay {
        let failure = Some(ProviderFailure::from(error));
        return ProviderOutcome { failure, config_hash: None, may_serve: false, ..kept };
    }
    let step = match prepare(ctx, provider, view).await {
        Ok(step) => step,
        Err(failure) => return ProviderOutcome { failure: Some(failure), ..kept },
    };
    let PreparedSharer { valid, plan, entry, applied } = step;
    let published = match write_secrets(ctx, &valid, &plan, memory).await {
        Ok(published) => published,
        Err(failure) => return ProviderOutcome { failure: Some(failure), ..kept },
    };
    let config_hash = applied.filter(|applied| applied.entry(&entry.name) == Some(&entry)).map(|applied| applied.hash);
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
        published: Some(published),
        wake_at: advance::next_pass(plan.wake_at, polls, Timestamp::now()),
        events: if failure.is_none() { plan.events } else { Vec::new() },
        failure,
    }
}

/// The values to write, and the configuration that relays mount.
struct PreparedSharer {
    valid: ValidatedProvider,
    plan: Plan,
    entry: SharedEntry,
    applied: Option<AppliedConfig>,
}

async fn prepare(ctx: &Context, provider: &Provider, view: &ClusterView) -> Result<PreparedSharer, ProviderFailure> {
    let valid = validate(provider, &view.pools).map_err(|error| ProviderFailure::from(&error))?;
    let fetched = fetch(&ctx.client, provider).await.map_err(|error| ProviderFailure::from(&error))?;
    let applied = fetch::applied_config_of(&ctx.client, &sharing::relay_key(provider)).await;
    let applied = applied.map_err(|error| ProviderFailure::from(&error))?;
    let name = sharing::name_at_relay(provider);
    let now = Timestamp::now();
    let confirmed = is_confirmed(&fetched, applied.as_ref(), &name, view, now);
    let plan = advance::plan_worker_secret(provider, &fetched, confirmed, now)?;
    let secrets =
        RelaySide { current: plan.current.clone(), previous: plan.previous.clone(), acted_on: plan.acted_on.clone() };
    let entry = SharedEntry::of(&valid, &name, &secrets);
    match entry.bytes() {
        bytes if bytes > MAX_ENTRY_BYTES => Err(ProviderFailure::too_large(bytes)),
        _ => Ok(PreparedSharer { valid, plan, entry, applied }),
    }
}

/// True if every relay admits workers by exactly the secrets that this Provider has published.
fn is_confirmed(
    fetched: &FetchedSecrets,
    applied: Option<&AppliedConfig>,
    name: &str,
    view: &ClusterView,
    now: Timestamp,
) -> bool {
    let (Some(applied), Some(secrets)) = (applied, &fetched.relay) else { return false };
    applied.has_secrets(name, secrets) && view.is_confirmed(&applied.hash, now)
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
