//! One pass over a Provider's objects: fetch, validate, build, apply.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{Api, DynamicObject};
use modelrelay_protocol::secret::Secret;

use super::build::{Desired, RelayInputs, build};
use super::cluster_view::ClusterView;
use super::fetch::{FetchedSecrets, fetch};
use super::memory::ProviderMemory;
use super::outcome::{ProviderFailure, ProviderOutcome, WorkerSecret};
use super::{entries, reviewers};
use crate::cluster::apply::{ApplyError, Owner, apply, delete};
use crate::context::Context;
use crate::crd::Provider;
use crate::manifests::{Manifest, network};
use crate::resources::names;
use crate::spec::provider::{ValidatedProvider, validate};
use crate::spec::rotation::{self, Known, Plan};

/// The interval for a pass that lacks something of another Provider: its secrets could not be read, or its relays do
/// not know this Provider yet.
const SHARED_INTERVAL: SignedDuration = SignedDuration::from_secs(10);

/// Applies the objects as far as possible. Failures are part of the outcome; the rest is done as completely as
/// possible.
pub(super) async fn advance(
    ctx: &Context,
    provider: &Provider,
    view: &ClusterView,
    memory: &mut ProviderMemory,
) -> ProviderOutcome {
    let kept = kept(provider, memory);
    let generation = kept.generation;
    let mut valid = match validate(provider, &view.pools) {
        Ok(valid) => valid,
        Err(error) => return ProviderOutcome { failure: Some(ProviderFailure::from(&error)), ..kept },
    };
    let fetched = match fetch(&ctx.client, provider).await {
        Ok(fetched) => fetched,
        Err(error) => return ProviderOutcome { failure: Some(ProviderFailure::from(&error)), ..kept },
    };
    for (sharer, pools) in &view.sharers {
        valid.serve_too(sharer, pools);
    }
    let shared = entries::entries(&ctx.client, view, fetched.applied.as_ref()).await;
    let now = Timestamp::now();
    let Planned { plan, salt, admin_token } = match plan_secrets(provider, &fetched, view, now) {
        Ok(planned) => planned,
        Err(failure) => return ProviderOutcome { failure: Some(failure), ..kept },
    };
    let defaults = ctx.relay_defaults(&valid.namespace).await;
    let desired = build(
        &valid,
        &RelayInputs {
            defaults: &defaults,
            operator: &ctx.place,
            plan: &plan,
            salt: &salt,
            admin_token: admin_token.as_ref(),
            sharers: &shared.entries,
            has_api_keys: fetched.has_api_keys,
            holds_api_keys: fetched.holds_api_keys,
            has_api_access: view.has_api_access(),
        },
    );
    let mut applied = apply_all(ctx, &valid, &desired, memory).await;
    // Without the right, the relay serves all the same, but admits no worker and no client by a token.
    let bound = bind_reviewers(ctx, &valid, view, memory).await;
    // A missing binding stays missing while this operator runs.
    let awaits_binding = matches!(bound, Err(reviewers::ReviewerError::Binding(_)));
    let events = if applied.failure.is_none() { plan.events.clone() } else { Vec::new() };
    if let Some(error) = bound.err().filter(|_| valid.spec.reviews_tokens()) {
        applied.failure.get_or_insert(ProviderFailure::from(&error));
    }
    let service = network::client_service(&valid);
    let has_service = memory.was_applied(&service);
    // A Service that was only modified still exists, even if applying it again failed; one that was deleted does not.
    let still_serves = kept.may_serve && (has_service || is_there(ctx, &service).await);
    let config_hash = applied.wrote_config.then_some(desired.config_hash).or(kept.config_hash);
    ProviderOutcome {
        generation,
        published: config_hash.clone(),
        config_hash,
        config_generation: if applied.wrote_config { generation } else { kept.config_generation },
        may_serve: still_serves || (applied.wrote_config && has_service),
        worker_secret: Some(WorkerSecret::of(
            &valid.name,
            &plan,
            memory.versions.get(&names::worker_secret(&valid.name)).cloned(),
        )),
        api_keys_version: desired
            .mounts_api_keys
            .then(|| memory.versions.get(&names::api_keys_secret(&valid.name)).cloned())
            .flatten(),
        tls_version: fetched.tls.and_then(|tls| tls.version),
        cold_models: valid.cold_models,
        ignores_expect_workers: valid.spec.relay.expect_workers && valid.scales_from_zero,
        moving: None,
        events,
        wake_at: next_pass(plan.wake_at, shared.is_incomplete || awaits_binding, now),
        failure: applied.failure,
    }
}

/// Returns the time of the next pass: that of the next step of a rotation, or [`SHARED_INTERVAL`] from now if this pass
/// depends on something that no watch reports.
pub(super) fn next_pass(step: Option<Timestamp>, polls: bool, now: Timestamp) -> Option<Timestamp> {
    let poll = polls.then(|| now + SHARED_INTERVAL);
    [step, poll].into_iter().flatten().min()
}

/// Returns the earlier results, which remain valid where a pass does not get as far.
pub(super) fn kept(provider: &Provider, memory: &ProviderMemory) -> ProviderOutcome {
    let generation = provider.metadata.generation;
    let before = memory.outcome.clone().unwrap_or_else(|| ProviderOutcome::before_the_first_pass(provider));
    ProviderOutcome { generation, events: Vec::new(), failure: None, wake_at: None, ..before }
}

async fn bind_reviewers(
    ctx: &Context,
    valid: &ValidatedProvider,
    view: &ClusterView,
    memory: &mut ProviderMemory,
) -> Result<(), reviewers::ReviewerError> {
    let mut relays = view.reviewers.clone();
    // The cache may be behind the Provider that is being reconciled.
    let relay = names::relay(&valid.name);
    if valid.reviews_tokens {
        relays.needed.insert(relay)
    } else {
        relays.needed.remove(&relay)
    };
    if memory.bound.as_ref() == Some(&relays) {
        return Ok(());
    }
    let binding = ctx.defaults.relay.token_review_binding.as_deref();
    match reviewers::bind(&ctx.client, binding, &valid.namespace, &relays).await {
        Ok(()) => {
            memory.bound = Some(relays);
            Ok(())
        }
        // Without a binding there is nothing to retry: those that need the right report it.
        Err(reviewers::ReviewerError::NoBinding) if !valid.spec.reviews_tokens() => Ok(()),
        // No relay of this Provider needs the right, so the failure does not concern it.
        Err(error) if !valid.reviews_tokens => {
            tracing::debug!(provider = valid.name, %error, "failed to update the token review binding; keeping it unchanged");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// The values that the Secrets should hold.
struct Planned {
    plan: Plan,
    salt: Secret,
    /// `None` if the user names a Secret.
    admin_token: Option<Secret>,
}

fn plan_secrets(
    provider: &Provider,
    fetched: &FetchedSecrets,
    view: &ClusterView,
    now: Timestamp,
) -> Result<Planned, ProviderFailure> {
    let applied = fetched.applied.as_ref();
    let confirmed = applied.is_some_and(|applied| view.is_confirmed(&applied.hash, now));
    let plan = plan_worker_secret(provider, fetched, confirmed, now)?;
    let admin_token = match (&provider.spec.relay.admin_token_secret_ref, &fetched.admin_token) {
        (Some(_), _) => None,
        (None, Some(token)) => Some(token.clone()),
        (None, None) => Some(fresh()?),
    };
    let salt = applied.and_then(|applied| applied.salt.clone()).map_or_else(fresh, Ok)?;
    Ok(Planned { plan, salt, admin_token })
}

/// Returns the next step of the worker secret. It is `confirmed` if every relay runs the applied configuration.
pub(super) fn plan_worker_secret(
    provider: &Provider,
    fetched: &FetchedSecrets,
    confirmed: bool,
    now: Timestamp,
) -> Result<Plan, ProviderFailure> {
    let known = Known {
        worker: fetched.worker.clone(),
        relay: fetched.relay.clone(),
        own: fetched.own.clone(),
        annotation: provider.annotations().get(names::ROTATE_ANNOTATION).cloned(),
        confirmed,
    };
    Ok(rotation::plan(now, &known, &fresh()?))
}

/// Returns 33 bytes from the operating system, as 44 characters that are safe in files, headers and URLs.
fn fresh() -> Result<Secret, ProviderFailure> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut bytes = [0; 33];
    getrandom::fill(&mut bytes).map_err(|error| ProviderFailure::no_random(&error))?;
    let text: String = bytes
        .chunks_exact(3)
        .flat_map(|three| {
            let bits = u32::from_be_bytes([0, three[0], three[1], three[2]]);
            [18, 12, 6, 0].map(|shift| char::from(ALPHABET[(bits >> shift & 63) as usize]))
        })
        .collect();
    Ok(Secret::new(text))
}

/// Returns true if the object exists, or if the API server cannot be reached.
async fn is_there(ctx: &Context, manifest: &Manifest) -> bool {
    let api: Api<DynamicObject> = Api::namespaced_with(ctx.client.clone(), &manifest.namespace, &manifest.resource);
    !matches!(api.get_metadata_opt(&manifest.name).await, Ok(None))
}

struct ApplyResult {
    /// True if the configuration is up to date.
    wrote_config: bool,
    failure: Option<ProviderFailure>,
}

/// Applies the Secrets first, and no object that mounts them before they exist and belong to this Provider. After that,
/// one object's failure does not hold up the others.
async fn apply_all(
    ctx: &Context,
    valid: &ValidatedProvider,
    desired: &Desired,
    memory: &mut ProviderMemory,
) -> ApplyResult {
    let owner = Owner { kind: "Provider", label: names::PROVIDER_LABEL, name: &valid.name };
    let mut wrote_config = false;
    for manifest in &desired.secrets {
        if let Err(error) = apply_one(ctx, owner, manifest, memory).await {
            return ApplyResult { wrote_config, failure: Some(ProviderFailure::from(&error)) };
        }
        wrote_config |= manifest.name == names::relay(&valid.name);
    }
    let mut failures = Vec::new();
    for manifest in &desired.objects {
        if let Err(error) = apply_one(ctx, owner, manifest, memory).await {
            failures.push(error);
        }
    }
    for manifest in &desired.unwanted {
        if memory.is_absent(manifest) {
            continue;
        }
        match delete(&ctx.client, owner, manifest).await {
            Ok(()) => memory.note_absent(manifest),
            Err(error) => failures.push(error),
        }
    }
    // Failures that need a user's action are reported before those that pass by themselves.
    let failures = failures.iter().map(ProviderFailure::from);
    ApplyResult { wrote_config, failure: failures.max_by_key(ProviderFailure::stalls) }
}

pub(super) async fn apply_one(
    ctx: &Context,
    owner: Owner<'_>,
    manifest: &Manifest,
    memory: &mut ProviderMemory,
) -> Result<(), ApplyError> {
    let fingerprint = fingerprint(manifest);
    if memory.is_applied(manifest, fingerprint) {
        return Ok(());
    }
    memory.note_absent_no_more(manifest);
    let object: DynamicObject = apply(&ctx.client, owner, manifest).await?;
    memory.note_applied(manifest, fingerprint, &object.metadata);
    Ok(())
}

fn fingerprint(manifest: &Manifest) -> u64 {
    let mut hasher = DefaultHasher::new();
    manifest.value.to_string().hash(&mut hasher);
    hasher.finish()
}
