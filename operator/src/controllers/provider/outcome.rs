//! The outcome of applying a Provider's objects, and how a failure is shown.

use k8s_openapi::jiff::Timestamp;

use super::fetch::SecretFetchError;
use super::reasons;
use super::reviewers;
use crate::cluster::apply::{ApplyError, is_forbidden};
use crate::crd::Provider;
use crate::crd::provider::{MovingStep, WorkerSecretStatus};
use crate::manifests::config::shared::MAX_ENTRY_BYTES;
use crate::resources::conditions::{self, READY};
use crate::resources::names;
use crate::spec::provider::InvalidSpec;
use crate::spec::rotation::{Plan, RotationEvent};
use crate::spec::sharing::SharingError;

/// The outcome of one pass.
#[derive(Clone, Debug, Default)]
pub(super) struct ProviderOutcome {
    /// The generation of the spec that was acted on.
    pub(super) generation: Option<i64>,
    /// The hash that relays report once they run the configuration; `None` before it was first applied.
    pub(super) config_hash: Option<String>,
    /// The generation of the spec that the applied configuration is based on.
    pub(super) config_generation: Option<i64>,
    /// True if the configuration and the clients' Service, which are all that a request needs, have been applied once
    /// and exist.
    pub(super) may_serve: bool,
    /// The worker secret.
    pub(super) worker_secret: Option<WorkerSecret>,
    /// resourceVersion of the Secret with the API keys, if relays mount it.
    pub(super) api_keys_version: Option<String>,
    /// resourceVersion of the Secret with the relays' certificate.
    pub(super) tls_version: Option<String>,
    /// Models of pools that may be at zero.
    pub(super) cold_models: Vec<String>,
    /// True if `expectWorkers` is set but ignored.
    pub(super) ignores_expect_workers: bool,
    /// The step of a move to another Provider's relay.
    pub(super) moving: Option<MoveState>,
    /// A value that changes when Providers that share the relay have to be reconciled.
    pub(super) published: Option<String>,
    /// The results of a rotation step.
    pub(super) events: Vec<RotationEvent>,
    /// The time of the next pass.
    pub(super) wake_at: Option<Timestamp>,
    /// The failure, if any.
    pub(super) failure: Option<ProviderFailure>,
}

impl ProviderOutcome {
    /// Returns what an operator that has just started knows: the status that its predecessor wrote.
    pub(super) fn before_the_first_pass(provider: &Provider) -> Self {
        let was_ready = provider.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, READY));
        let step = provider.status.as_ref().and_then(|status| status.moving);
        Self { may_serve: was_ready, moving: step.map(|step| MoveState::new(step, String::new())), ..Self::default() }
    }
}

/// A step of a move to another Provider's relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MoveState {
    /// The step.
    pub(super) step: MovingStep,
    /// What it waits for.
    pub(super) message: String,
}

impl MoveState {
    pub(super) fn new(step: MovingStep, message: impl Into<String>) -> Self {
        Self { step, message: message.into() }
    }
}

/// The state of the worker secret.
#[derive(Clone, Debug)]
pub(super) struct WorkerSecret {
    /// resourceVersion of the Secret that workers mount.
    pub(super) version: Option<String>,
    /// The time since which it has its value.
    pub(super) changed_at: Timestamp,
    /// True if the relays have yet to accept a new value.
    pub(super) awaits_relays: bool,
    /// Shown in the Provider's status.
    pub(super) status: WorkerSecretStatus,
}

impl WorkerSecret {
    pub(super) fn of(provider: &str, plan: &Plan, version: Option<String>) -> Self {
        let previous_until = plan.previous.first().and_then(|previous| previous.until);
        Self {
            version,
            changed_at: plan.worker_changed_at,
            awaits_relays: plan.awaits_relays(),
            status: WorkerSecretStatus {
                name: names::worker_secret(provider),
                previous_until: previous_until.map(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time),
                rotation: plan.acted_on.clone(),
            },
        }
    }
}

/// A failure, as conditions show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProviderFailure {
    /// One of [`reasons`].
    pub(super) reason: &'static str,
    /// The problem and the change that fixes it.
    pub(super) message: String,
    /// The next step.
    pub(super) kind: FailureKind,
    /// The label value for metrics.
    pub(super) word: &'static str,
}

/// The next step after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// No retry until a user changes the spec, or the Provider that it refers to.
    Final,
    /// A user has to change something that no watch reports: retried less and less often.
    Stalled,
    /// A user's Secret is missing or wrong. A watch reports its correction.
    Awaited,
    /// The operator was installed without a right. It cannot change while the operator runs, and the rest works.
    Lasting,
    /// Retried with a back-off.
    Transient,
}

impl ProviderFailure {
    /// True if only a user's action can resolve the failure.
    pub(super) fn stalls(&self) -> bool {
        match self.kind {
            FailureKind::Final | FailureKind::Stalled => true,
            FailureKind::Awaited | FailureKind::Lasting | FailureKind::Transient => false,
        }
    }

    /// True if a user's Secret is awaited.
    pub(super) fn is_awaited(&self) -> bool {
        self.kind == FailureKind::Awaited
    }

    /// The operating system returned no random bytes.
    pub(super) fn no_random(error: &getrandom::Error) -> Self {
        Self::new(
            reasons::API_ERROR,
            FailureKind::Transient,
            "random",
            &format!("system random number generator failed: {error}"),
        )
    }

    /// The entry of the Provider does not fit into the configuration of the relay that serves it.
    pub(super) fn too_large(bytes: usize) -> Self {
        let message = format!(
            "spec.relayRef: models, aliases and worker secrets have {bytes} bytes in the relay's configuration, and {MAX_ENTRY_BYTES} are \
             allowed: remove models, or give this Provider a relay of its own"
        );
        Self::new(reasons::RELAY_FULL, FailureKind::Final, "relay_full", &message)
    }

    /// The Provider cannot move to the relay that it refers to.
    pub(super) fn cannot_move(why: &dyn std::fmt::Display) -> Self {
        let message = format!("spec.relayRef: {why}");
        Self::new(reasons::INVALID_SPEC, FailureKind::Final, "invalid_spec", &message)
    }

    fn new(reason: &'static str, kind: FailureKind, word: &'static str, message: &dyn std::fmt::Display) -> Self {
        Self { reason, kind, word, message: message.to_string() }
    }
}

impl From<&InvalidSpec> for ProviderFailure {
    fn from(error: &InvalidSpec) -> Self {
        Self::new(reasons::INVALID_SPEC, FailureKind::Final, "invalid_spec", error)
    }
}

impl From<&SharingError> for ProviderFailure {
    fn from(error: &SharingError) -> Self {
        let (reason, word) = match error {
            SharingError::NotFound(..) => (reasons::RELAY_NOT_FOUND, "relay_not_found"),
            SharingError::Chained(..) => (reasons::RELAY_CHAINED, "relay_chained"),
            SharingError::NotGranted(..) => (reasons::RELAY_NOT_GRANTED, "relay_not_granted"),
            SharingError::Deleting(..) => (reasons::RELAY_DELETING, "relay_deleting"),
            SharingError::Full(..) => (reasons::RELAY_FULL, "relay_full"),
        };
        Self::new(reason, FailureKind::Final, word, error)
    }
}

impl From<&SecretFetchError> for ProviderFailure {
    fn from(error: &SecretFetchError) -> Self {
        match error {
            SecretFetchError::SecretNotFound { .. } => {
                Self::new(reasons::SECRET_NOT_FOUND, FailureKind::Awaited, "secret_not_found", error)
            }
            SecretFetchError::SecretInvalid { .. } => {
                Self::new(reasons::SECRET_INVALID, FailureKind::Awaited, "secret_invalid", error)
            }
            SecretFetchError::Api { source, .. } if is_forbidden(source) => {
                Self::new(reasons::FORBIDDEN, FailureKind::Transient, "forbidden", error)
            }
            SecretFetchError::Api { .. } => Self::new(reasons::API_ERROR, FailureKind::Transient, "api", error),
        }
    }
}

impl From<&ApplyError> for ProviderFailure {
    fn from(error: &ApplyError) -> Self {
        let (reason, kind) = match error {
            ApplyError::NameTaken { .. } => (reasons::NAME_TAKEN, FailureKind::Stalled),
            ApplyError::Terminating { .. } => (reasons::TERMINATING, FailureKind::Transient),
            refused @ ApplyError::Refused { .. } if refused.is_forbidden() => {
                (reasons::FORBIDDEN, FailureKind::Transient)
            }
            ApplyError::Refused { .. } => (reasons::OBJECT_REFUSED, FailureKind::Stalled),
            ApplyError::Api { .. } => (reasons::API_ERROR, FailureKind::Transient),
        };
        Self::new(reason, kind, error.kind(), error)
    }
}

impl From<&reviewers::ReviewerError> for ProviderFailure {
    fn from(error: &reviewers::ReviewerError) -> Self {
        match error {
            reviewers::ReviewerError::NoBinding => {
                Self::new(reasons::FORBIDDEN, FailureKind::Lasting, "forbidden", error)
            }
            reviewers::ReviewerError::Binding(cause) => Self { message: error.to_string(), ..Self::from(cause) },
        }
    }
}
