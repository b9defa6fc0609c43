//! Builds a Provider's status as a pure function of the known state. A status that differs from the previous one is
//! written.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::cluster_view::{ClusterView, has_just_started, is_ready};
use super::outcome::{ProviderFailure, ProviderOutcome};
use super::reasons;
use crate::crd::provider::{MovingStep, UsageStatus};
use crate::crd::{Provider, ProviderStatus};
use crate::plural::one_or;
use crate::relays::state::{RelaySnapshot, UsageReport};
use crate::resources::conditions::{self, PROGRAMMED, READY, RECONCILING, STALLED, Status, Wanted};
use crate::resources::names;
use crate::spec::sharing;

#[cfg(test)]
mod tests;

/// The maximum number of models in a status.
const SHOWN_MODELS: usize = 32;
/// The longest model name in a status.
const MAX_MODEL_CHARS: usize = 256;

/// The inputs of the status.
pub(super) struct ProviderFacts<'a> {
    pub(super) provider: &'a Provider,
    pub(super) view: &'a ClusterView,
    pub(super) outcome: &'a ProviderOutcome,
}

/// Returns the status; `before` is the current one.
pub(super) fn status(facts: &ProviderFacts<'_>, before: &ProviderStatus, now: &Time) -> ProviderStatus {
    let generation = facts.outcome.generation;
    let was_ready = conditions::is_true(&before.conditions, READY);
    let wanted = [facts.ready(now.0, was_ready), facts.programmed(), facts.reconciling(), facts.stalled()];
    let numbers = Numbers::of(facts.view);
    // Its own relay still has the address.
    let stays = facts.own_relay_serves();
    ProviderStatus {
        observed_generation: generation,
        conditions: conditions::merge(&before.conditions, &wanted, generation, now),
        endpoint: if stays { before.endpoint.clone() } else { facts.relay_owner().map(endpoint) },
        worker_endpoint: if stays { before.worker_endpoint.clone() } else { facts.relay_owner().map(worker_endpoint) },
        relay: Some(if stays { facts.provider.name_any() } else { sharing::relay_shown(facts.provider) }),
        moving: facts.outcome.moving.as_ref().map(|moving| moving.step),
        name_at_relay: Some(sharing::name_at_relay(facts.provider)),
        // The predecessor's value is kept until this operator has a result of its own.
        worker_secret: facts
            .outcome
            .worker_secret
            .as_ref()
            .map_or_else(|| before.worker_secret.clone(), |secret| Some(secret.status.clone())),
        workers: Some(numbers.workers),
        models: numbers.models,
        model_count: Some(numbers.model_count),
        queue_depth: Some(numbers.queue_depth),
        in_flight: Some(numbers.in_flight),
        // The predecessor's value is kept until all relays have reported.
        usage: numbers.usage.or_else(|| before.usage.clone()),
    }
}

/// Returns the status without the values that change with every request.
pub(super) fn without_numbers(status: &ProviderStatus) -> ProviderStatus {
    ProviderStatus {
        workers: None,
        models: Vec::new(),
        model_count: None,
        queue_depth: None,
        in_flight: None,
        usage: None,
        ..status.clone()
    }
}

fn endpoint(provider: &Provider) -> String {
    let host = format!("{}.{}.svc", provider.name_any(), provider.namespace().unwrap_or_default());
    let relay = &provider.spec.relay;
    match (relay.scheme(), relay.client_port()) {
        (scheme @ "http", 80) | (scheme @ "https", 443) => format!("{scheme}://{host}/v1"),
        (scheme, port) => format!("{scheme}://{host}:{port}/v1"),
    }
}

fn worker_endpoint(provider: &Provider) -> String {
    let namespace = provider.namespace().unwrap_or_default();
    let scheme = provider.spec.relay.scheme();
    format!("{scheme}://{}", names::worker_address(&provider.name_any(), &namespace))
}

struct Numbers {
    workers: i32,
    models: Vec<String>,
    model_count: i32,
    queue_depth: i32,
    in_flight: i32,
    usage: Option<UsageStatus>,
}

impl Numbers {
    fn of(view: &ClusterView) -> Self {
        let none = RelaySnapshot::default();
        let reported = view.reported.as_deref().unwrap_or(&none);
        let served = || reported.models.iter().filter(|(_, model)| model.workers > 0).map(|(name, _)| name);
        let fitting = served().filter(|name| name.chars().count() <= MAX_MODEL_CHARS);
        let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
        let sum = |number: u64| i32::try_from(number).unwrap_or(i32::MAX);
        Self {
            workers: count(reported.workers.len()),
            models: fitting.take(SHOWN_MODELS).cloned().collect(),
            model_count: count(served().count()),
            queue_depth: sum(reported.queue_depth),
            in_flight: sum(reported.in_flight),
            usage: reported.usage.map(usage),
        }
    }
}

fn usage(report: UsageReport) -> UsageStatus {
    let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    UsageStatus {
        since: Time(report.since),
        requests: count(report.requests),
        input_tokens: count(report.input_tokens),
        output_tokens: count(report.output_tokens),
    }
}

impl<'a> ProviderFacts<'a> {
    /// Returns the Provider whose relay serves this one; `None` if none does.
    fn relay_owner(&self) -> Option<&'a Provider> {
        self.view.relay.as_ref().ok().map(|relay| relay.as_deref().unwrap_or(self.provider))
    }

    /// True if another Provider owns the relay and reports its rollouts.
    fn is_shared(&self) -> bool {
        self.provider.spec.relay_ref.is_some()
    }

    /// True if the Provider refers to another one, and clients are still served by a relay of its own.
    fn own_relay_serves(&self) -> bool {
        match self.outcome.moving.as_ref().map(|moving| moving.step) {
            Some(MovingStep::WaitingForRelay | MovingStep::ConnectingWorkers) => true,
            Some(MovingStep::Draining) => false,
            None => self.view.own.as_ref().is_some_and(|own| own.deployment.is_some()),
        }
    }

    /// Returns the condition of a Provider that a ready relay of its own still serves. Changes of its spec wait.
    fn ready_at_own_relay(&self) -> Option<Wanted> {
        let mut own = self.view.own.iter().flat_map(|own| &own.pods);
        if !self.own_relay_serves() || !own.any(|pod| is_ready(pod)) {
            return None;
        }
        let until = format!("until the move to that of {}", sharing::relay_shown(self.provider));
        let message = if self.provider.spec.enabled {
            format!("its own relay serves {until}")
        } else {
            format!(
                "its own relay accepts requests {until}, although spec.enabled is false; to apply it now, remove spec.relayRef and state spec.relay as it was"
            )
        };
        Some(Wanted::new(READY, true, reasons::SERVING, message))
    }

    fn ready(&self, now: Timestamp, was_ready: bool) -> Wanted {
        let spec = &self.provider.spec;
        let no = |reason, message: String| Wanted::new(READY, false, reason, message);
        if let Some(ready) = self.ready_at_own_relay() {
            return ready;
        }
        if let Some(failure) = self.failure_that_matters() {
            return no(failure.reason, self.with_consequence(failure));
        }
        if !spec.enabled && !self.own_relay_serves() {
            return no(reasons::DISABLED, "spec.enabled is false: requests are rejected with provider_disabled".into());
        }
        let owner = self.relay_owner().unwrap_or(self.provider);
        let (ready, wanted) = (self.ready_relays(), owner.spec.relay.replicas);
        if wanted == 0 {
            return no(reasons::SCALED_TO_ZERO, self.no_replicas());
        }
        let programmed = self.programmed();
        if self.is_shared() && !was_ready && programmed.status != Status::True {
            // The relays of another Provider accept requests before they know this one.
            return no(programmed.reason, programmed.message);
        }
        if ready == 0 {
            return no(reasons::NO_RELAY_READY, self.why_none_is_ready(now));
        }
        let relays = format!("{wanted} {}", one_or(wanted, "relay", "relays"));
        let take = one_or(ready, "takes", "take");
        let message = format!("{ready} of {relays} {take} requests at {}", endpoint(owner));
        if self.outcome.ignores_expect_workers {
            let message = format!("{message}; expectWorkers is ignored, because a pool may be scaled to zero");
            return Wanted::new(READY, true, reasons::SCALES_FROM_ZERO, message);
        }
        Wanted::new(READY, true, reasons::SERVING, message)
    }

    fn no_replicas(&self) -> String {
        let of = if self.is_shared() {
            format!(" of Provider {}", sharing::relay_shown(self.provider))
        } else {
            String::new()
        };
        format!("spec.relay.replicas{of} is 0")
    }

    /// Returns the failure, if it affects readiness. A passing error of the API server does not, because the relays
    /// keep running, unless they have never served.
    fn failure_that_matters(&self) -> Option<&ProviderFailure> {
        let failure = self.outcome.failure.as_ref()?;
        (failure.stalls() || failure.is_awaited() || !self.outcome.may_serve).then_some(failure)
    }

    fn with_consequence(&self, failure: &ProviderFailure) -> String {
        if self.ready_relays() == 0 {
            return failure.message.clone();
        }
        format!("{}. Relays keep serving with the previous configuration", failure.message)
    }

    fn why_none_is_ready(&self, now: Timestamp) -> String {
        let Some(pod) = self.view.relay_pods.first() else {
            return self.stuck().unwrap_or_else(|| "no relay Pod exists yet".to_owned());
        };
        let name = pod.name_any();
        let of_type = |wanted: &str| {
            let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            let mut failing = conditions.filter(|condition| condition.type_ == wanted && condition.status == "False");
            failing.find_map(|condition| condition.message.clone())
        };
        let why = match of_type("PodScheduled").or_else(|| of_type("Ready")) {
            Some(why) => format!("Pod {name}: {why}"),
            None => format!("Pod {name} is starting"),
        };
        format!("{why}{}", self.awaited_step(pod, now))
    }

    /// Explains why a relay that responds is still unready, as far as its state shows: the probe's result reaches only
    /// the kubelet.
    fn awaited_step(&self, pod: &Pod, now: Timestamp) -> String {
        let answers = |reported: &&RelaySnapshot| matches!(reported.relays.get(&pod.name_any()), Some(Ok(_)));
        let Some(reported) = self.view.reported.as_deref().filter(answers) else { return String::new() };
        let relay = &self.relay_owner().unwrap_or(self.provider).spec.relay;
        let worker = match reported.workers.is_empty() {
            false => "",
            true if relay.expect_workers && !self.outcome.ignores_expect_workers => {
                "; no worker is connected, and expectWorkers is true"
            }
            true if has_just_started(pod, now) => {
                "; no worker is connected, and after its start the relay waits 15 s for the first"
            }
            true => "; no worker is connected",
        };
        let queue = match relay.unready_when_saturated && reported.queue_depth > 0 {
            true => "; requests are queued, and unreadyWhenSaturated is true",
            false => "",
        };
        format!("{worker}{queue}")
    }

    fn ready_relays(&self) -> usize {
        self.view.relay_pods.iter().filter(|pod| is_ready(pod)).count()
    }

    fn programmed(&self) -> Wanted {
        let no = |reason, message: String| Wanted::new(PROGRAMMED, false, reason, message);
        let failure = self.outcome.failure.as_ref();
        let Some(hash) = &self.outcome.config_hash else {
            return failure.map_or_else(
                || no(reasons::WAITING_FOR_RELAYS, self.unwritten()),
                |failure| no(failure.reason, failure.message.clone()),
            );
        };
        // The relays may run the configuration that was written last, but it is not that of this generation.
        let is_older = self.outcome.config_generation != self.outcome.generation;
        if let Some(failure) = failure.filter(|failure| is_older || failure.reason == reasons::INVALID_SPEC) {
            return no(failure.reason, failure.message.clone());
        }
        let owner = self.relay_owner().unwrap_or(self.provider);
        if self.view.relay_pods.is_empty() && owner.spec.relay.replicas == 0 {
            let message = format!("{}; new relays start with the newest configuration", self.no_replicas());
            return Wanted::new(PROGRAMMED, true, reasons::SCALED_TO_ZERO, message);
        }
        match self.first_that_lags(hash) {
            Some((reason, message)) => no(reason, message),
            None => {
                let count = self.view.relay_pods.len();
                let pods_run = one_or(count, "Pod runs", "Pods run");
                let message = format!("{count} of {count} relay {pods_run} the newest configuration");
                Wanted::new(PROGRAMMED, true, reasons::CONFIGURATION_APPLIED, message)
            }
        }
    }

    fn unwritten(&self) -> String {
        if self.is_shared() {
            return format!(
                "the configuration of Provider {}'s relay does not contain this Provider's newest settings yet",
                sharing::relay_shown(self.provider)
            );
        }
        "no configuration has been written yet".to_owned()
    }

    /// Returns the first relay without the newest configuration. One that rejects it is more informative than one that
    /// has not reported yet.
    fn first_that_lags(&self, hash: &str) -> Option<(&'static str, String)> {
        let mut waiting = None;
        for pod in &self.view.relay_pods {
            let name = pod.name_any();
            let report = self.view.relay_reports().and_then(|reported| reported.relays.get(&name));
            let why = match report {
                Some(Ok(report)) if report.config_hash.as_deref() == Some(hash) => continue,
                Some(Ok(report)) => match &report.config_error {
                    Some(error) => {
                        let message =
                            format!("Pod {name} rejected the newest configuration and keeps the previous one: {error}");
                        return Some((reasons::CONFIGURATION_REFUSED, message));
                    }
                    None => "runs an older configuration".to_owned(),
                },
                Some(Err(why)) => format!("has not confirmed the newest configuration: {why}"),
                None => "has not been polled yet".to_owned(),
            };
            waiting.get_or_insert((reasons::WAITING_FOR_RELAYS, format!("Pod {name} {why}")));
        }
        let none = || (reasons::WAITING_FOR_RELAYS, "no relay Pod exists yet".to_owned());
        waiting.or_else(|| self.view.relay_pods.is_empty().then(none))
    }

    fn reconciling(&self) -> Wanted {
        let yes = |reason, message: String| Wanted::new(RECONCILING, true, reason, message);
        if let Some(failure) = &self.outcome.failure {
            if failure.stalls() {
                return Wanted::new(RECONCILING, false, failure.reason, "");
            }
            return yes(failure.reason, failure.message.clone());
        }
        if let Some(moving) = &self.outcome.moving {
            return yes(reasons::MOVING_RELAY, moving.message.clone());
        }
        if let Some(message) = self.rolling_out().filter(|_| self.stuck().is_none()) {
            return yes(reasons::ROLLING_OUT, message);
        }
        let programmed = self.programmed();
        if programmed.status != Status::True {
            return yes(programmed.reason, programmed.message);
        }
        if self.outcome.worker_secret.as_ref().is_some_and(|secret| secret.awaits_relays) {
            return yes(reasons::ROTATING_SECRET, "distributing a new worker secret to the relays".into());
        }
        Wanted::new(RECONCILING, false, reasons::AS_EXPECTED, "")
    }

    fn stalled(&self) -> Wanted {
        match (&self.outcome.failure, self.stuck()) {
            (Some(failure), _) if failure.stalls() => {
                Wanted::new(STALLED, true, failure.reason, failure.message.clone())
            }
            (_, Some(message)) => Wanted::new(STALLED, true, reasons::ROLLOUT_STUCK, message),
            (_, None) => Wanted::new(STALLED, false, reasons::AS_EXPECTED, ""),
        }
    }

    fn rolling_out(&self) -> Option<String> {
        if self.is_shared() {
            return None;
        }
        let wanted = self.provider.spec.relay.replicas;
        let Some(deployment) = self.view.deployment.as_deref() else {
            return Some("the relay's Deployment does not exist yet".to_owned());
        };
        let status = deployment.status.clone().unwrap_or_default();
        let specified = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or_default();
        let updated = status.updated_replicas.unwrap_or_default();
        let observed = status.observed_generation >= deployment.metadata.generation && specified == wanted;
        let available = status.available_replicas.unwrap_or_default();
        let complete = updated == wanted && status.replicas.unwrap_or_default() == wanted && available >= wanted;
        let are = |number| one_or(number, "is", "are");
        let relays_are = format!("{} {}", one_or(wanted, "relay", "relays"), are(updated));
        let available_are = format!("{available} {}", are(available));
        (!observed || !complete)
            .then(|| format!("{updated} of {wanted} {relays_are} up to date, {available_are} available"))
    }

    fn stuck(&self) -> Option<String> {
        stuck(self.view.deployment.as_deref()?)
    }
}

/// Returns the message of the Deployment's own controller about a stuck rollout.
fn stuck(deployment: &Deployment) -> Option<String> {
    let status = deployment.status.as_ref()?;
    if status.observed_generation < deployment.metadata.generation {
        return None;
    }
    let mut conditions = status.conditions.iter().flatten();
    let failed = conditions.find(|condition| {
        (condition.type_ == "Progressing" && condition.status == "False")
            || (condition.type_ == "ReplicaFailure" && condition.status == "True")
    })?;
    let message = failed.message.as_deref().unwrap_or_default();
    Some(format!("Deployment {}: {message}", deployment.name_any()))
}
