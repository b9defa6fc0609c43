//! Moves a Provider from a relay of its own to another Provider's, without a failed request.
//!
//! 1. The owner's relays get the Provider's entry, with its worker secrets.
//! 2. When all of them run it, the pools direct their workers to them. A worker keeps its links to addresses that are no
//!    longer listed, so it then serves both.
//! 3. When every worker is connected to every relay of the owner, the Service of the Provider selects their Pods. Name,
//!    address and ports stay.
//! 4. The former relay's Deployment is scaled to zero, and its Pods drain: they serve what arrives on open connections.
//!
//! Until the last Pod has ended, nothing that those Pods mount is changed: the Secret with their configuration stays,
//! and a rotation of the worker secret waits. All other objects stay until the Provider is deleted: without a Pod they
//! have no effect, and by default the operator may not delete them.
//!
//! A step follows from the cluster's state. Only the second is recorded, in the status, because pools act on it.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::{Map, Value, json};

use super::advance;
use super::cluster_view::{ClusterView, OwnRelays, is_ready};
use super::fetch;
use super::memory::ProviderMemory;
use super::outcome::{MoveState, ProviderFailure, ProviderOutcome, WorkerSecret};
use super::prepare::{PreparedSharer, prepare};
use super::propagate::annotate;
use crate::cluster::apply::{ApplyError, Owner};
use crate::context::Context;
use crate::crd::Provider;
use crate::crd::provider::MovingStep;
use crate::plural::counted;
use crate::resources::names;
use crate::spec::sharing;

/// The interval between two passes: the reports of the owner's relays do not trigger them.
const INTERVAL: SignedDuration = SignedDuration::from_secs(1);
/// The time after which a Pod whose worker has not connected is annotated again.
const NUDGE_INTERVAL: SignedDuration = SignedDuration::from_secs(5);
/// The number of Pods that a message names.
const SHOWN_PODS: usize = 3;

/// Takes the next step of the move. `own` are the relays that the Provider leaves.
pub(super) async fn advance(
    ctx: &Context,
    provider: &Provider,
    view: &ClusterView,
    own: &OwnRelays,
    memory: &mut ProviderMemory,
) -> ProviderOutcome {
    let kept = advance::kept(provider, memory);
    let waiting = || Some(MoveState::new(MovingStep::WaitingForRelay, "the move has not begun"));
    let step = kept.moving.clone().filter(|moving| moving.step != MovingStep::Draining || own.deployment.is_none());
    let kept = ProviderOutcome { moving: step.or_else(waiting), ..kept };
    let owner = match &view.relay {
        Ok(Some(owner)) => owner,
        Ok(None) => return kept,
        Err(error) => {
            let failure = Some(ProviderFailure::from(error));
            return ProviderOutcome { failure, config_hash: None, moving: waiting(), ..kept };
        }
    };
    let stay = |failure| ProviderOutcome { failure: Some(failure), ..kept.clone() };
    match objection(ctx, provider, owner, own).await {
        Ok(None) => {}
        Ok(Some(why)) => return ProviderOutcome { moving: waiting(), ..stay(ProviderFailure::cannot_move(&why)) },
        Err(failure) => return stay(failure),
    }
    let prepared = match prepare(ctx, provider, view).await {
        Ok(prepared) => prepared,
        Err(failure) => return stay(failure),
    };
    let config_hash = prepared.config_hash();
    let (moving, failure) = match next(ctx, provider, owner, view, own, &kept, config_hash.as_deref()).await {
        Ok(moving) => (Some(moving), None),
        Err(failure) => (kept.moving.clone(), Some(failure)),
    };
    let PreparedSharer { valid, plan, .. } = prepared;
    let version = memory.versions.get(&names::worker_secret(&valid.name)).cloned();
    ProviderOutcome {
        config_generation: if config_hash.is_some() { kept.generation } else { kept.config_generation },
        config_hash,
        worker_secret: Some(WorkerSecret::of(&valid.name, &plan, version)),
        api_keys_version: None,
        tls_version: None,
        cold_models: valid.cold_models,
        ignores_expect_workers: false,
        moving,
        wake_at: failure.is_none().then(|| Timestamp::now() + INTERVAL),
        failure,
        ..kept
    }
}

/// Returns why the relay of `owner` cannot take over the clients of the Provider.
async fn objection(
    ctx: &Context,
    provider: &Provider,
    owner: &Provider,
    own: &OwnRelays,
) -> Result<Option<String>, ProviderFailure> {
    // Without a Deployment, its Service already leads to the other relay.
    if own.deployment.is_none() {
        return Ok(None);
    }
    let name = owner.name_any();
    if owner.namespace() != provider.namespace() {
        return Ok(Some(format!(
            "this Provider has a relay of its own, and its Service cannot lead to Provider {name} of another namespace: create another Provider"
        )));
    }
    if owner.spec.relay.require_api_keys {
        return Ok(Some(format!(
            "Provider {name} requires API keys, and does not know those of this Provider's clients: create another Provider"
        )));
    }
    let applied = fetch::applied_config_of(&ctx.client, &sharing::key(provider)).await;
    if applied.map_err(|error| ProviderFailure::from(&error))?.is_some_and(|applied| applied.requires_api_keys) {
        return Ok(Some(format!(
            "this Provider's relay requires API keys, and Provider {name} does not: first set relay.requireApiKeys to false, or create another Provider"
        )));
    }
    let referring = own.referring.first();
    Ok(referring
        .map(|referring| format!("Provider {referring} refers to this one and would have no relay: move it first")))
}

/// Takes the next step, and returns the current one.
async fn next(
    ctx: &Context,
    provider: &Provider,
    owner: &Provider,
    view: &ClusterView,
    own: &OwnRelays,
    kept: &ProviderOutcome,
    config_hash: Option<&str>,
) -> Result<MoveState, ProviderFailure> {
    let draining = || {
        let one = "Pod of its own relay finishes its requests";
        let message = counted(own.pods.len(), one, "Pods of its own relay finish their requests");
        MoveState::new(MovingStep::Draining, message)
    };
    let Some(deployment) = &own.deployment else { return Ok(draining()) };
    let service = client_service(&ctx.client, provider).await?;
    if let Some(service) = &service
        && let Some(why) = other_scheme(service, owner)
    {
        return Err(ProviderFailure::cannot_move(&why));
    }
    let name = owner.name_any();
    let relays: Vec<&Pod> = view.relay_pods.iter().map(AsRef::as_ref).filter(|pod| is_ready(pod)).collect();
    let is_known = config_hash.is_some_and(|hash| view.is_confirmed(hash, Timestamp::now())) && !relays.is_empty();
    let is_connecting = kept.moving.as_ref().is_some_and(|moving| moving.step == MovingStep::ConnectingWorkers);
    if !is_known {
        let message = format!("waiting until all relays of Provider {name} run its configuration");
        // Workers that may be connected already stay.
        let step = if is_connecting && config_hash.is_some() {
            MovingStep::ConnectingWorkers
        } else {
            MovingStep::WaitingForRelay
        };
        return Ok(MoveState::new(step, message));
    }
    let connecting = |message: String| Ok(MoveState::new(MovingStep::ConnectingWorkers, message));
    // Pools act on the status: the next pass follows when it is written.
    if !is_connecting {
        return connecting(format!("directing workers to the relays of Provider {name}"));
    }
    let missing = unconnected(view, own, &relays);
    if !missing.is_empty() {
        nudge(&ctx.client, &own.workers, &missing).await?;
        let shown: Vec<&str> = missing.iter().take(SHOWN_PODS).map(String::as_str).collect();
        let pods = shown.join(", ");
        let more = missing.len().saturating_sub(SHOWN_PODS);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return connecting(format!(
            "waiting until the workers of {pods}{more} connect to the relays of Provider {name}"
        ));
    }
    if let Some(service) = service {
        lead_to(&ctx.client, &service, owner).await?;
    }
    end(&ctx.client, deployment).await?;
    Ok(draining())
}

/// Returns the Pods whose worker is not connected to each of these relays.
fn unconnected(view: &ClusterView, own: &OwnRelays, relays: &[&Pod]) -> Vec<String> {
    let reported = view.reported.as_deref();
    // The last report may be that of its own relays.
    let is_complete = reported
        .is_some_and(|reported| relays.iter().all(|pod| matches!(reported.relays.get(&pod.name_any()), Some(Ok(_)))));
    let is_connected = |pod: &String| {
        let mut workers = reported.iter().flat_map(|reported| reported.workers.values());
        is_complete
            && workers.any(|worker| {
                worker.name == *pod && usize::try_from(worker.links).is_ok_and(|links| links >= relays.len())
            })
    };
    let mut missing: Vec<String> =
        own.workers.iter().map(|pod| pod.name_any()).filter(|pod| !is_connected(pod)).collect();
    if !is_complete && missing.is_empty() {
        // Without workers, at least the report is awaited.
        missing.extend(relays.iter().map(|pod| pod.name_any()));
    }
    missing.sort();
    missing
}

/// Makes kubelets refresh the mounted address of the relays in Pods whose workers have not connected. Again after a
/// while, because a kubelet may see the annotation before the ConfigMap.
async fn nudge(client: &Client, workers: &[Arc<Pod>], missing: &[String]) -> Result<(), ProviderFailure> {
    let now = Timestamp::now();
    for pod in workers.iter().filter(|pod| missing.contains(&pod.name_any())) {
        let last = pod.annotations().get(names::NUDGE_ANNOTATION).and_then(|at| at.parse::<Timestamp>().ok());
        if last.is_some_and(|last| now.duration_since(last) < NUDGE_INTERVAL) {
            continue;
        }
        let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
        let annotations = Map::from_iter([(names::NUDGE_ANNOTATION.to_owned(), json!(now.to_string()))]);
        let name = pod.name_any();
        annotate(&api, name.clone(), annotations).await.map_err(|error| failed("Pod", &name, error))?;
    }
    Ok(())
}

/// Returns why clients of the Service could not use the relay of `owner`.
fn other_scheme(service: &Service, owner: &Provider) -> Option<String> {
    let scheme = owner.spec.relay.scheme();
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let mut schemes = ports.filter_map(|port| port.name.as_deref()).filter(|name| ["http", "https"].contains(name));
    let other = schemes.find(|name| *name != scheme)?;
    let (service, owner) = (service.name_any(), owner.name_any());
    Some(format!(
        "clients of Service {service} use {other}, and Provider {owner} has {scheme}: create another Provider"
    ))
}

/// Returns the Service for clients, if it exists and belongs to the Provider.
async fn client_service(client: &Client, provider: &Provider) -> Result<Option<Service>, ProviderFailure> {
    let (namespace, name) = sharing::key(provider);
    let owner = Owner { kind: "Provider", label: names::PROVIDER_LABEL, name: &name };
    let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
    let found = api.get_opt(&name).await.map_err(|error| failed("Service", &name, error))?;
    Ok(found.filter(|service| owner.owns(&service.metadata)))
}

/// Makes the Service of a Provider whose relay has ended lead to the relays of `owner`.
pub(super) async fn keep_service(ctx: &Context, provider: &Provider, owner: &Provider) -> Result<(), ProviderFailure> {
    if owner.namespace() != provider.namespace() {
        return Ok(());
    }
    match client_service(&ctx.client, provider).await? {
        Some(service) if other_scheme(&service, owner).is_none() => lead_to(&ctx.client, &service, owner).await,
        Some(_) | None => Ok(()),
    }
}

async fn lead_to(client: &Client, service: &Service, owner: &Provider) -> Result<(), ProviderFailure> {
    let wanted = names::relay_selector(&owner.name_any());
    let current = service.spec.as_ref().and_then(|spec| spec.selector.clone()).unwrap_or_default();
    if current == wanted {
        return Ok(());
    }
    // A merge patch adds to a map.
    let mut selector: Map<String, Value> = current.into_keys().map(|key| (key, Value::Null)).collect();
    selector.extend(wanted.into_iter().map(|(key, value)| (key, json!(value))));
    let patch = json!({"spec": {"selector": selector}});
    let (namespace, name) = (service.namespace().unwrap_or_default(), service.name_any());
    let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
    api.patch(&name, &params(), &Patch::Merge(patch)).await.map_err(|error| failed("Service", &name, error))?;
    tracing::info!(
        namespace,
        service = name,
        provider = owner.name_any(),
        "Service leads to the relay of another Provider"
    );
    Ok(())
}

/// Scales the former relay to zero. Its Pods drain.
async fn end(client: &Client, deployment: &Deployment) -> Result<(), ProviderFailure> {
    let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
    let api: Api<Deployment> = Api::namespaced(client.clone(), &namespace);
    let patch = Patch::Merge(json!({"spec": {"replicas": 0}}));
    api.patch(&name, &params(), &patch).await.map_err(|error| failed("Deployment", &name, error))?;
    tracing::info!(namespace, deployment = name, "relay ended: another Provider's relay serves its clients");
    Ok(())
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(names::FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

fn failed(kind: &str, name: &str, error: kube::Error) -> ProviderFailure {
    ProviderFailure::from(&ApplyError::api(format!("{kind} {name}"), error))
}
