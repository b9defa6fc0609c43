//! Moves a Provider from a relay of its own to another Provider's, without a failed request.
//!
//! 1. The owner's relays get the Provider's entry, with its worker secrets.
//! 2. When all of them run it, the pools direct their workers to them. A worker keeps its links to addresses that are
//!    no longer listed, so it then serves both.
//! 3. When every worker is connected to every relay of the owner, the Service of the Provider selects their Pods. Name,
//!    address and ports stay.
//! 4. The former relay's Deployment is scaled to zero, and its Pods drain: they serve what arrives on open connections.
//!
//! Until the last Pod has ended, nothing that those Pods mount is changed: the Secret with their configuration stays,
//! and a rotation of the worker secret waits. All other objects stay until the Provider is deleted: without a Pod they
//! have no effect, and by default the operator may not delete them.
//!
//! Until the third step, `relayRef` can be removed again: the workers return to the Provider's own relay.
//!
//! A step follows from the cluster's state and the one before, which the status records: the owner's pass, the pools
//! and the API server's rules act on it.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, Patch};
use kube::{Client, ResourceExt};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::advance;
use super::cluster_view::{ClusterView, OwnRelays, is_ready};
use super::fetch;
use super::memory::ProviderMemory;
use super::outcome::{MoveState, ProviderFailure, ProviderOutcome, WorkerSecret};
use super::prepare::{PreparedSharer, prepare};
use super::propagate::annotate;
use crate::cluster::apply::{ApplyError, Owner, display_kube_error, patch_params};
use crate::context::Context;
use crate::crd::Provider;
use crate::crd::provider::MovingStep;
use crate::plural::counted;
use crate::resources::names;
use crate::spec::sharing;

/// The interval between two passes: the reports of the owner's relays do not trigger them.
const INTERVAL: SignedDuration = SignedDuration::from_secs(1);
/// The number of Pods that are annotated at once.
const AT_ONCE: usize = 8;
/// The number of Pods that a message names.
const SHOWN_PODS: usize = 3;

/// A move whose clients still use the Provider's own relays.
struct Move<'a> {
    ctx: &'a Context,
    provider: &'a Provider,
    /// The Provider whose relays take over.
    owner: &'a Provider,
    view: &'a ClusterView,
    own: &'a OwnRelays,
    /// The Deployment of its own relays.
    deployment: &'a Deployment,
    /// The Service for its clients.
    service: Option<Service>,
    /// The current step; `None` if the move has not begun.
    step: Option<MovingStep>,
}

/// Takes the next step of the move. `own` are the relays that the Provider leaves. A move that is refused has no step.
pub(super) async fn advance(
    ctx: &Context,
    provider: &Provider,
    view: &ClusterView,
    own: &OwnRelays,
    memory: &mut ProviderMemory,
) -> ProviderOutcome {
    let kept = advance::kept(provider, memory);
    let step = kept.moving.as_ref().map(|moving| moving.step);
    let stay = |failure| ProviderOutcome { failure: Some(failure), ..kept.clone() };
    // The cache may be behind the end of the relays, or someone scaled them up again.
    let has_left = step == Some(MovingStep::Draining) || sharing::has_moved(provider);
    let serving = own.deployment.as_deref().filter(|_| !has_left);
    let refused =
        |failure| ProviderOutcome { moving: kept.moving.clone().filter(|_| serving.is_none()), ..stay(failure) };
    let owner = match &view.relay {
        Ok(Some(owner)) => owner,
        Ok(None) => return kept,
        Err(error) => return ProviderOutcome { config_hash: None, ..refused(ProviderFailure::from(error)) },
    };
    let current = match serving {
        None => None,
        Some(deployment) => {
            let service = match client_service(&ctx.client, provider).await {
                Ok(service) => service,
                Err(failure) => return stay(failure),
            };
            let current = Move { ctx, provider, owner, view, own, deployment, service, step };
            match current.objection().await {
                Ok(None) => Some(current),
                Ok(Some(why)) => return refused(refusal(&why)),
                Err(failure) => return stay(failure),
            }
        }
    };
    let prepared = match prepare(ctx, provider, view).await {
        Ok(prepared) => prepared,
        Err(failure) => return stay(failure),
    };
    let config_hash = prepared.config_hash();
    let next = match (&current, &own.deployment) {
        (Some(current), _) => current.next(&prepared.valid.cold_models, config_hash.as_deref(), memory).await,
        (None, Some(deployment)) => end(&ctx.client, deployment).await.map(|()| draining(own)),
        (None, None) => Ok(draining(own)),
    };
    let (moving, failure) = match next {
        Ok(moving) => (Some(moving), None),
        Err(failure) => (kept.moving.clone(), Some(failure)),
    };
    outcome(ProviderOutcome { moving, failure, config_hash, ..kept }, prepared, memory)
}

/// Returns the outcome of a pass that got as far as a step.
fn outcome(step: ProviderOutcome, prepared: PreparedSharer, memory: &ProviderMemory) -> ProviderOutcome {
    let PreparedSharer { valid, plan, .. } = prepared;
    let version = memory.versions.get(&names::worker_secret(&valid.name)).cloned();
    ProviderOutcome {
        config_generation: if step.config_hash.is_some() { step.generation } else { step.config_generation },
        worker_secret: Some(WorkerSecret::of(&valid.name, &plan, version)),
        api_keys_version: None,
        tls_version: None,
        cold_models: valid.cold_models,
        ignores_expect_workers: false,
        wake_at: step.failure.is_none().then(|| Timestamp::now() + INTERVAL),
        ..step
    }
}

fn refusal(why: &str) -> ProviderFailure {
    ProviderFailure::cannot_move(&format!(
        "{why}. Until the move begins, its own relay serves with the settings from before; to change them, remove spec.relayRef and state spec.relay as it was"
    ))
}

fn draining(own: &OwnRelays) -> MoveState {
    let one = "Pod of its own relay finishes its requests";
    let message = counted(own.pods.len(), one, "Pods of its own relay finish their requests");
    MoveState::new(MovingStep::Draining, message)
}

impl Move<'_> {
    /// Returns why the relay of the owner cannot take over the clients of the Provider.
    async fn objection(&self) -> Result<Option<String>, ProviderFailure> {
        let (provider, owner) = (self.provider, self.owner);
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
        let applied = fetch::applied_config_of(&self.ctx.client, &sharing::key(provider)).await;
        if applied.map_err(|error| ProviderFailure::from(&error))?.is_some_and(|applied| applied.requires_api_keys) {
            return Ok(Some(format!(
                "this Provider's relay requires API keys, and Provider {name} does not: first set relay.requireApiKeys to false, or create another Provider"
            )));
        }
        if let Some(why) = self
            .service
            .as_ref()
            .and_then(|service| other_scheme(service, owner).or_else(|| lost_workers_port(service, owner)))
        {
            return Ok(Some(why));
        }
        if let Some(why) = lost_model(provider) {
            return Ok(Some(why));
        }
        Ok(self.own.referring.first().map(|referring| {
            format!("Provider {referring} refers to this one and would have no relay: create another Provider with relayRef {name} in its place, and delete it")
        }))
    }

    /// Takes the next step, and returns the current one.
    async fn next(
        &self,
        cold_models: &[String],
        config_hash: Option<&str>,
        memory: &mut ProviderMemory,
    ) -> Result<MoveState, ProviderFailure> {
        let name = self.owner.name_any();
        let is_connecting = self.step == Some(MovingStep::ConnectingWorkers);
        if !config_hash.is_some_and(|hash| self.is_known(hash)) {
            let message = format!("waiting until all relays of Provider {name} run its configuration");
            // Workers that may be connected already stay.
            let is_connecting = is_connecting && config_hash.is_some();
            let step = if is_connecting { MovingStep::ConnectingWorkers } else { MovingStep::WaitingForRelay };
            return Ok(MoveState::new(step, message));
        }
        let connecting = |message: String| Ok(MoveState::new(MovingStep::ConnectingWorkers, message));
        if !is_connecting {
            let waking = self.starting().or_else(|| self.awaited_model(cold_models));
            return match waking {
                Some(message) => Ok(MoveState::new(MovingStep::WaitingForRelay, message)),
                // Pools act on the status: the next pass follows when it is written.
                None => connecting(format!("directing workers to the relays of Provider {name}")),
            };
        }
        let relays: Vec<&Pod> = self.view.relay_pods.iter().map(AsRef::as_ref).filter(|pod| is_ready(pod)).collect();
        let all: Vec<&Pod> = self.view.relay_pods.iter().map(AsRef::as_ref).collect();
        let missing = unconnected(self.view, self.own, if relays.is_empty() { &all } else { &relays });
        nudge(&self.ctx.client, &self.own.workers, &missing, memory).await;
        if relays.is_empty() {
            return connecting(format!("waiting until a relay of Provider {name} is ready"));
        }
        if !missing.is_empty() {
            let shown: Vec<&str> = missing.iter().take(SHOWN_PODS).map(String::as_str).collect();
            let pods = shown.join(", ");
            let more = missing.len().saturating_sub(SHOWN_PODS);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            return connecting(format!(
                "waiting until the workers of {pods}{more} connect to the relays of Provider {name}"
            ));
        }
        if let Some(message) = self.starting() {
            return connecting(message);
        }
        if let Some(service) = &self.service {
            lead_to(&self.ctx.client, service, self.owner).await?;
        }
        end(&self.ctx.client, self.deployment).await?;
        Ok(draining(self.own))
    }

    /// True if the relays of the owner run the configuration. They may be ready only once they have workers.
    fn is_known(&self, hash: &str) -> bool {
        let reported = self.view.relay_reports();
        let runs = |pod: &Arc<Pod>| {
            let report = reported.and_then(|reported| reported.relays.get(&pod.name_any())?.as_ref().ok());
            report.is_some_and(|report| report.config_hash.as_deref() == Some(hash))
        };
        self.view.is_confirmed(hash, Timestamp::now()) && self.view.relay_pods.iter().any(runs)
    }

    /// Returns what a pool without a ready worker is waited for: requests for its models may wait at its own relay, and
    /// a worker that starts after the switch does not connect there.
    fn starting(&self) -> Option<String> {
        let pool = self.own.starting.first()?;
        Some(format!(
            "waiting until a worker of WorkerPool {pool} is ready; if it cannot become ready, scale the pool to zero"
        ))
    }

    /// Returns which model is waited for at its own relay: its pool is about to be woken.
    fn awaited_model(&self, cold_models: &[String]) -> Option<String> {
        let models = &self.view.reported.as_deref()?.models;
        let is_awaited =
            |name: &&String| models.get(*name).is_some_and(|model| model.waiting > 0 && model.workers == 0);
        let model = cold_models.iter().find(is_awaited)?;
        Some(format!("waiting until a worker serves model {model}, for which requests wait"))
    }
}

/// Returns why a model setting of the Provider would be lost: its relay applies it only to clients of its own.
fn lost_model(provider: &Provider) -> Option<String> {
    let settings = [("defaultModel", &provider.spec.default_model), ("fallbackModel", &provider.spec.fallback_model)];
    let (field, _) = settings.into_iter().find(|(_, model)| model.is_some())?;
    Some(format!(
        "spec.{field} does not apply at the relay of another Provider: remove it if clients always name a model, or create another Provider"
    ))
}

/// Returns why workers that use the Service could not use the relay of `owner`.
fn lost_workers_port(service: &Service, owner: &Provider) -> Option<String> {
    let has_workers = port_names(service).any(|name| name == "workers");
    let (service, owner_name) = (service.name_any(), owner.name_any());
    (has_workers && !owner.spec.relay.service.workers).then(|| {
        format!(
            "Service {service} has a port for workers, and Provider {owner_name} accepts none from outside: set its relay.service.workers to true, or create another Provider"
        )
    })
}

/// Returns the Pods whose worker is not connected to each of these relays.
fn unconnected(view: &ClusterView, own: &OwnRelays, relays: &[&Pod]) -> Vec<String> {
    let relays: Vec<String> = relays.iter().map(|pod| pod.name_any()).collect();
    let reported = view.reported.as_deref();
    // The last report may be that of its own relays.
    let is_complete =
        reported.is_some_and(|reported| relays.iter().all(|pod| matches!(reported.relays.get(pod), Some(Ok(_)))));
    let is_connected = |pod: &String| {
        let mut workers = reported.iter().flat_map(|reported| reported.workers.values());
        is_complete
            && workers.any(|worker| worker.name == *pod && relays.iter().all(|relay| worker.relays.contains(relay)))
    };
    let mut missing: Vec<String> =
        own.workers.iter().map(|pod| pod.name_any()).filter(|pod| !is_connected(pod)).collect();
    if !is_complete && missing.is_empty() {
        // Without workers, at least the report is awaited.
        missing.extend(relays);
    }
    missing.sort();
    missing
}

/// Makes kubelets refresh the mounted address of the relays in Pods whose workers have not connected. Again after a
/// while, because a kubelet may see the annotation before the ConfigMap. One that fails does not hold up the others.
async fn nudge(client: &Client, workers: &[Arc<Pod>], missing: &[String], memory: &mut ProviderMemory) {
    memory.move_nudges.retain(|pod, _| missing.contains(pod));
    let now = Instant::now();
    let mut due = Vec::new();
    for pod in workers.iter().filter(|pod| missing.contains(&pod.name_any())) {
        if memory.move_nudges.entry(pod.name_any()).or_default().is_due(now) {
            due.push(pod.clone());
        }
    }
    stream::iter(due)
        .for_each_concurrent(AT_ONCE, |pod| async move {
            let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
            let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
            let at = Timestamp::now().to_string();
            let annotations = Map::from_iter([(names::NUDGE_ANNOTATION.to_owned(), json!(at))]);
            if let Err(error) = annotate(&api, name.clone(), annotations).await {
                let error = display_kube_error(&error);
                tracing::warn!(namespace, pod = name, %error, "failed to annotate a Pod whose worker is to connect to another relay");
            }
        })
        .await;
}

/// Returns why clients of the Service could not use the relay of `owner`.
fn other_scheme(service: &Service, owner: &Provider) -> Option<String> {
    let scheme = owner.spec.relay.scheme();
    let other = port_names(service).find(|name| ["http", "https"].contains(name) && *name != scheme)?;
    let (service, owner) = (service.name_any(), owner.name_any());
    Some(format!(
        "clients of Service {service} use {other}, and Provider {owner} has {scheme}: create another Provider"
    ))
}

fn port_names(service: &Service) -> impl Iterator<Item = &str> {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    ports.filter_map(|port| port.name.as_deref())
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
    api.patch(&name, &patch_params(), &Patch::Merge(patch)).await.map_err(|error| failed("Service", &name, error))?;
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
    api.patch(&name, &patch_params(), &patch).await.map_err(|error| failed("Deployment", &name, error))?;
    tracing::info!(namespace, deployment = name, "relay ended: another Provider's relay serves its clients");
    Ok(())
}

fn failed(kind: &str, name: &str, error: kube::Error) -> ProviderFailure {
    ProviderFailure::from(&ApplyError::api(format!("{kind} {name}"), error))
}
