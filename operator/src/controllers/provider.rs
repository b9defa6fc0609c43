//! The controller of Providers: fetch, validate, build, apply, update the status, each in its own file.
//!
//! A pass over the objects happens when one of them changed. The relays' reports change far more often. They affect
//! only the status, and the rotation while it waits for the relays. No state that must survive is kept in memory:
//! another replica can take over between any two steps.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::{Action, Config, Error as ControllerError};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::{Controller, watcher};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

use crate::cluster::apply::{display_kube_error, write_status};
use crate::cluster::cache::Caches;
use crate::context::Context;
use crate::crd::Provider;
use crate::relays::state::Expectation;
use crate::resources::conditions::{self, READY};
use crate::resources::names::ObjectKey;
use crate::spec::provider::cold_models;
use crate::spec::rotation::RotationEvent;
use crate::telemetry::metrics::ControllerName;

mod advance;
mod build;
mod cluster_view;
mod entries;
mod fetch;
mod memory;
mod moving;
mod outcome;
mod pace;
mod prepare;
mod propagate;
pub mod reasons;
mod relay_pods;
mod reviewers;
mod sharing;
mod status;
mod status_events;
#[cfg(test)]
mod tests;

use cluster_view::{AWAITS_FIRST_WORKER, ClusterView, has_just_started, is_ready};
use memory::ProviderMemory;
use outcome::{FailureKind, ProviderOutcome};
use pace::Due;
use status::ProviderFacts;

/// The number of Providers that are reconciled at once.
const CONCURRENCY: u16 = 4;
/// The age after which the watch has surely delivered a written status.
const WATCH_LAG: Duration = Duration::from_secs(10);
/// The interval for changes that no watch reports.
const IDLE_INTERVAL: Duration = Duration::from_secs(3600);
/// The interval for a Provider whose relays have not confirmed their configuration.
const UNCONFIRMED_INTERVAL: Duration = Duration::from_secs(5);

/// The reason that a pass failed.
#[derive(Debug, thiserror::Error)]
enum ProviderError {
    /// The objects could not be applied.
    #[error("{reason}: {message}")]
    Objects {
        /// The reason in the conditions.
        reason: &'static str,
        /// The message in the conditions.
        message: String,
        /// The label value for metrics.
        word: &'static str,
    },
    /// The status could not be written.
    #[error("failed to update the status: {}", display_kube_error(.0))]
    Status(#[source] Box<kube::Error>),
    /// A Pod could not be annotated.
    #[error("failed to annotate a Pod: {}", display_kube_error(.0))]
    Pods(#[source] Box<kube::Error>),
}

impl ProviderError {
    fn word(&self) -> &'static str {
        match self {
            Self::Objects { word, .. } => word,
            Self::Status(_) => "status",
            Self::Pods(_) => "pods",
        }
    }
}

/// Reconciles Providers indefinitely; it ends when it is dropped.
pub async fn run(ctx: Arc<Context>, caches: Caches, requests: UnboundedReceiver<ObjectRef<Provider>>) {
    let requests = stream::unfold(requests, async |mut requests| Some((requests.recv().await?, requests)));
    let shared = Arc::new(ProviderContext { ctx, caches: caches.clone(), ledger: Mutex::default() });
    caches.ready().await;
    let never = stream::pending::<Result<Provider, watcher::Error>>();
    let controller = Controller::for_stream(never, caches.providers.clone())
        .reconcile_on(requests)
        .with_config(Config::default().concurrency(CONCURRENCY))
        .run(reconcile, retry, shared.clone())
        .for_each(|result| {
            // Failures were logged where they occurred. The state of a deleted Provider is dropped.
            if let Err(ControllerError::ObjectNotFound(gone)) = result {
                let key = (gone.namespace.unwrap_or_default(), gone.name);
                shared.forget(&key);
                let shared = shared.clone();
                // Spawned, because no other Provider is reconciled while this closure waits.
                tokio::spawn(async move { shared.forget_reviewer(&key.0).await });
            }
            futures_util::future::ready(())
        });
    let binding = shared.ctx.defaults.relay.token_review_binding.as_deref();
    tokio::select! {
        () = controller => {}
        never = reviewers::follow_binding(&shared.ctx.client, binding, &caches) => match never {},
    }
}

struct ProviderContext {
    ctx: Arc<Context>,
    caches: Caches,
    // Locked for a lookup or an insertion, never across an await.
    ledger: Mutex<Ledger>,
}

#[derive(Default)]
struct Ledger {
    memories: HashMap<ObjectKey, ProviderMemory>,
    ready: HashMap<ObjectKey, bool>,
}

impl ProviderContext {
    /// Returns the memory of this Provider; a successor of the same name starts with an empty one.
    fn take(&self, key: &ObjectKey, provider: &Provider) -> ProviderMemory {
        let uid = provider.uid().unwrap_or_default();
        let known = self.ledger().memories.remove(key).filter(|memory| memory.uid == uid);
        known.unwrap_or_else(|| ProviderMemory::new(uid))
    }

    fn put(&self, key: ObjectKey, memory: ProviderMemory) {
        let ready = memory.written.as_ref().is_some_and(|(status, _)| conditions::is_true(&status.conditions, READY));
        let mut ledger = self.ledger();
        let before = ledger.ready.insert(key.clone(), ready);
        ledger.memories.insert(key, memory);
        self.count(before, Some(ready));
    }

    fn forget(&self, key: &ObjectKey) {
        // Its objects are deleted one after the other, and each new list contains the retained ones. No other code
        // would take these changes.
        self.caches.triggers.take_changes(&ObjectRef::new(&key.1).within(&key.0));
        let mut ledger = self.ledger();
        ledger.memories.remove(key);
        let before = ledger.ready.remove(key);
        self.count(before, None);
    }

    /// Revokes the right to review tokens. If that fails, the leftover right belongs to a deleted account: it is
    /// logged, and the next change in that namespace corrects it.
    async fn forget_reviewer(&self, namespace: &str) {
        let Some(binding) = self.ctx.defaults.relay.token_review_binding.as_deref() else { return };
        let relays = reviewers::of(&self.caches, namespace);
        if let Err(error) = reviewers::bind(&self.ctx.client, Some(binding), namespace, &relays).await {
            tracing::warn!(namespace, %error, "failed to revoke a deleted Provider's right to review tokens");
        }
    }

    /// Updates the gauges by differences, because there may be a controller for each of several namespaces.
    fn count(&self, before: Option<bool>, after: Option<bool>) {
        let gauge = |ready: bool| self.ctx.metrics.resources.with_label_values(&["Provider", &ready.to_string()]);
        if let Some(ready) = before {
            gauge(ready).dec();
        }
        if let Some(ready) = after {
            gauge(ready).inc();
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ProviderContext {
    /// Removes this controller's share of the gauges: the next leader starts its own.
    fn drop(&mut self) {
        let ready = std::mem::take(&mut self.ledger().ready);
        ready.into_values().for_each(|ready| self.count(Some(ready), None));
    }
}

async fn reconcile(provider: Arc<Provider>, shared: Arc<ProviderContext>) -> Result<Action, ProviderError> {
    let started = Instant::now();
    let key = (provider.namespace().unwrap_or_default(), provider.name_any());
    // A Provider that is being deleted is not rebuilt; its relays drain by themselves.
    if provider.metadata.deletion_timestamp.is_some() {
        shared.forget(&key);
        return Ok(Action::await_change());
    }
    let mut memory = shared.take(&key, &provider);
    let result = Box::pin(pass(&shared, &provider, &key, &mut memory)).await;
    if result.is_ok() {
        memory.reset_retries();
    }
    shared.put(key, memory);
    let word = result.as_ref().err().map(ProviderError::word);
    shared.ctx.metrics.reconciled(ControllerName::Provider, started.elapsed(), word);
    result
}

/// Returns the next attempt after a failure. Whatever the API server's error, retries become less and less frequent.
#[allow(clippy::needless_pass_by_value, reason = "the signature that the controller wants")]
fn retry(provider: Arc<Provider>, error: &ProviderError, shared: Arc<ProviderContext>) -> Action {
    let key = (provider.namespace().unwrap_or_default(), provider.name_any());
    let mut ledger = shared.ledger();
    let Some(memory) = ledger.memories.get_mut(&key) else { return Action::requeue(UNCONFIRMED_INTERVAL) };
    let retry = memory.next_retry(Instant::now());
    if retry.is_new {
        let (namespace, provider) = key;
        tracing::warn!(namespace, provider, %error, retry_in = ?retry.after, "failed to reconcile Provider");
    }
    Action::requeue(retry.after)
}

async fn pass(
    shared: &ProviderContext,
    provider: &Provider,
    key: &ObjectKey,
    memory: &mut ProviderMemory,
) -> Result<Action, ProviderError> {
    let (ctx, caches) = (&shared.ctx, &shared.caches);
    let now = Instant::now();
    let changed = memory.note(caches.triggers.take_changes(&ObjectRef::from_obj(provider)), now);
    let view = ClusterView::now(ctx, caches, provider);
    let published = memory.outcome.as_ref().and_then(|outcome| outcome.published.clone());
    let stands = |outcome: &ProviderOutcome| !changed && !is_due(outcome, memory, provider, &view, now);
    let standing = memory.outcome.clone().filter(stands);
    let mut outcome = match standing {
        Some(standing) => standing,
        None if provider.spec.relay_ref.is_some() => Box::pin(sharing::advance(ctx, provider, &view, memory)).await,
        None => Box::pin(advance::advance(ctx, provider, &view, memory)).await,
    };
    let events = std::mem::take(&mut outcome.events);
    memory.outcome = Some(outcome.clone());
    if outcome.published != published {
        sharing::notify(caches, provider, &view);
    }

    // The relay's owner expects the reports of a shared relay.
    let own_hash = outcome.config_hash.clone().filter(|_| provider.spec.relay_ref.is_none());
    let expected = own_hash.map(|hash| Expectation { hash, pods: view.pod_names() });
    let propagated = propagate::propagate(ctx, caches, &key.0, &view, &outcome, memory).await;
    if let Some(expected) = expected {
        ctx.relays.expect(&key.0, &key.1, expected);
    }
    let status_due = update_status(shared, provider, &view, &outcome, &events, memory).await?;
    propagated.map_err(|error| ProviderError::Pods(Box::new(error)))?;
    // After its first seconds a relay no longer waits for its first worker, and no other event may announce that.
    let starts = view.relay_pods.iter().any(|pod| !is_ready(pod) && has_just_started(pod, Timestamp::now()));
    let started = starts.then_some(AWAITS_FIRST_WORKER);
    next(&outcome, memory, [status_due, started].into_iter().flatten().min())
}

/// True if the objects have to be applied again although none of them changed. A relay's report is no reason to retry
/// a failure before its time.
fn is_due(
    outcome: &ProviderOutcome,
    memory: &ProviderMemory,
    provider: &Provider,
    view: &ClusterView,
    now: Instant,
) -> bool {
    if outcome.generation != provider.metadata.generation || outcome.cold_models != cold_models(&view.pools) {
        return true;
    }
    if outcome.failure.as_ref().is_some_and(|failure| failure.kind != FailureKind::Lasting) {
        return !memory.awaits_retry(now);
    }
    let awaits_relays = outcome.worker_secret.as_ref().is_none_or(|secret| secret.awaits_relays);
    awaits_relays || outcome.wake_at.is_some_and(|at| Timestamp::now() >= at)
}

/// Writes the status if it differs. Returns the time until changed numbers may be written.
async fn update_status(
    shared: &ProviderContext,
    provider: &Provider,
    view: &ClusterView,
    outcome: &ProviderOutcome,
    events: &[RotationEvent],
    memory: &mut ProviderMemory,
) -> Result<Option<Duration>, ProviderError> {
    let there = provider.status.clone().unwrap_or_default();
    let before = match &memory.written {
        Some((written, at)) if at.elapsed() < WATCH_LAG => written.clone(),
        Some(_) | None => there,
    };
    let now = Time(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default());
    let after = status::status(&ProviderFacts { provider, view, outcome }, &before, &now);
    let since = memory.written.as_ref().map(|(_, at)| at.elapsed());
    match pace::due(&before, &after, since) {
        Due::Now => {}
        Due::In(left) => return Ok(Some(left)),
        Due::Never => {
            memory.written.get_or_insert_with(|| (after, Instant::now()));
            return Ok(None);
        }
    }
    write_status(&shared.ctx.client, provider, &after).await.map_err(|error| ProviderError::Status(Box::new(error)))?;
    status_events::publish(&shared.ctx, provider, &before, &after, events).await;
    memory.written = Some((after, Instant::now()));
    Ok(None)
}

/// Returns when to reconcile again, or the error to report.
fn next(
    outcome: &ProviderOutcome,
    memory: &ProviderMemory,
    status_due: Option<Duration>,
) -> Result<Action, ProviderError> {
    let until = |at: Timestamp| at.duration_since(Timestamp::now()).try_into().unwrap_or(Duration::ZERO);
    if let Some(failure) = &outcome.failure {
        return match failure.kind {
            // The watch of users' Secrets reports the correction of an awaited one.
            FailureKind::Final | FailureKind::Awaited | FailureKind::Lasting => {
                let status_due = [status_due, outcome.wake_at.map(until)].into_iter().flatten().min();
                Ok(Action::requeue(status_due.unwrap_or(IDLE_INTERVAL).min(IDLE_INTERVAL)))
            }
            FailureKind::Stalled | FailureKind::Transient => Err(ProviderError::Objects {
                reason: failure.reason,
                message: failure.message.clone(),
                word: failure.word,
            }),
        };
    }
    // A relay that cannot start delays a rotation only for a limited time, and no event marks its end.
    let awaits_relays = outcome.worker_secret.as_ref().is_some_and(|secret| secret.awaits_relays);
    let waits = [
        Some(IDLE_INTERVAL),
        outcome.wake_at.map(until),
        status_due,
        (awaits_relays || memory.unconfirmed_since.is_some()).then_some(UNCONFIRMED_INTERVAL),
    ];
    let soonest = waits.into_iter().flatten().min().unwrap_or(IDLE_INTERVAL);
    // Slightly later than the deadline itself, so that it has passed.
    Ok(Action::requeue(soonest + Duration::from_millis(50)))
}
