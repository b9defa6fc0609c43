//! The settings of one provider, and the workers that it accepts.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use modelrelay_protocol::limits;
use modelrelay_protocol::model_details::ModelDetails;
use modelrelay_protocol::secret::{Secret, bare};

use super::fairness::FairnessConfig;
use super::model_names::ModelNames;
use super::placement::PlacementConfig;
use crate::dispatch::DEFAULT_COLD_TIMEOUT;
use crate::kubernetes::identity::ServiceAccount;
use crate::settings::worker_credential::{Credential, CredentialStatus};

/// The default queue length: hundreds of short requests, as sent by a client that embeds documents.
pub const MAX_QUEUE_LEN: usize = 1000;

/// The default idle timeout of a response.
const STREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// The default time that a request waits for a model that no worker has.
const ABSENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Without a request timeout, a request ends after a day, however busy it is: every wait has an end.
const LONGEST_REQUEST: Duration = Duration::from_secs(24 * 3600);

/// One named queue with its own secrets and limits.
#[derive(Debug, Clone, PartialEq)]
pub struct ProviderConfig {
    /// Unique in the relay.
    pub name: String,
    /// False if its requests fail at once and its workers are rejected.
    pub enabled: bool,
    /// Any of these admits a worker; empty ones are already left out.
    pub worker_secrets: Vec<WorkerSecret>,
    /// A token of any of these admits a worker too.
    pub worker_accounts: Vec<ServiceAccount>,
    /// The catalogue; `None` accepts all models that workers advertise. Never an empty list.
    pub models: Option<Vec<CatalogueModel>>,
    /// Names that mean one of its models.
    pub names: ModelNames,
    /// Limits and capabilities by model name, which replace those that workers report.
    pub model_details: BTreeMap<String, ModelDetails>,
    /// Models that no worker may serve yet but that a pool would be started for: known, with the cold timeout, and no
    /// catalogue.
    pub cold_models: Vec<String>,
    /// The most requests that may wait.
    pub max_queue_len: usize,
    /// The most bytes of their bodies.
    pub max_queue_bytes: u64,
    /// The value as written; see [`ProviderConfig::queue_timeout`] for the effective one.
    pub queue_timeout: Option<Duration>,
    /// The value as written; see [`ProviderConfig::cold_timeout_for`] for the effective one.
    pub cold_timeout: Option<Duration>,
    /// A request's whole time, cold waiting excepted; see [`ProviderConfig::request_timeout`] for the effective one.
    pub request_timeout: Option<Duration>,
    /// The idle timeout of a response.
    pub stream_idle_timeout: Duration,
    /// How long a worker may send nothing of a response while another one has room.
    pub first_byte_timeout: Option<Duration>,
    /// How a worker is chosen for a request.
    pub placement: PlacementConfig,
    /// How waiting requests share the workers.
    pub fairness: FairnessConfig,
    /// The most models that one worker may advertise.
    pub max_models_per_worker: usize,
    /// True if a worker without a protocol version is rejected.
    pub require_protocol_version: bool,
}

/// A model of a catalogue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogueModel {
    /// The name that workers advertise and backends receive.
    pub id: String,
    /// The names that clients may use instead.
    pub aliases: Vec<String>,
}

/// A secret that admits workers, for a limited time or indefinitely.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerSecret {
    /// Never empty.
    pub secret: Secret,
    /// The time from which on it is invalid.
    pub not_after: Option<SystemTime>,
}

impl ProviderConfig {
    /// A provider with all defaults, the same as `- name: …` alone in a file.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            enabled: true,
            worker_secrets: Vec::new(),
            worker_accounts: Vec::new(),
            models: None,
            names: ModelNames::default(),
            model_details: BTreeMap::new(),
            cold_models: Vec::new(),
            max_queue_len: MAX_QUEUE_LEN,
            max_queue_bytes: 256 << 20,
            queue_timeout: None,
            cold_timeout: None,
            request_timeout: None,
            stream_idle_timeout: STREAM_IDLE_TIMEOUT,
            first_byte_timeout: None,
            placement: PlacementConfig::default(),
            fairness: FairnessConfig::default(),
            max_models_per_worker: limits::MAX_MODELS_PER_WORKER,
            require_protocol_version: false,
        }
    }

    /// The secret that equals `presented` and admits a worker at `now`. All are compared, so that the duration reveals
    /// nothing. A connection keeps its digest for [`ProviderConfig::credential_status`].
    pub fn admitting_secret(&self, presented: &str, now: SystemTime) -> Option<&WorkerSecret> {
        let admitting = self.worker_secrets.iter().filter(|secret| secret.admits(presented, now));
        admitting.fold(None, |first, secret| first.or(Some(secret)))
    }

    /// True if `presented` admits a worker at `now`.
    pub fn admits(&self, presented: &str, now: SystemTime) -> bool {
        self.admitting_secret(presented, now).is_some()
    }

    /// Why a wrong secret is probably meant to be right: the characters around it, or around the relay's.
    pub fn near_miss(&self, presented: &str, now: SystemTime) -> Option<&'static str> {
        let mut current = self.worker_secrets.iter().filter(|secret| secret.is_current(now));
        current.any(|secret| secret.secret.is_nearly(presented)).then(|| {
            if bare(presented) == presented {
                "the relay's secret is enclosed in quotes, blanks or a line end, the worker's is not"
            } else {
                "the worker's secret is enclosed in quotes, blanks or a line end"
            }
        })
    }

    /// The status of a connected worker's credential. It is good while its secret exists and has not expired, or while
    /// its account is listed and its token has not been rejected.
    pub fn credential_status(&self, credential: &Credential, now: SystemTime) -> CredentialStatus {
        match credential {
            Credential::Secret(digest) => self.secret_status(digest, now),
            Credential::Token(identity) if !self.worker_accounts.contains(&identity.account) => {
                CredentialStatus::Removed
            }
            Credential::Token(identity) => match (identity.is_refused(), identity.has_expired(now)) {
                (false, _) => CredentialStatus::Good,
                (true, true) => CredentialStatus::Over,
                (true, false) => CredentialStatus::Removed,
            },
        }
    }

    fn secret_status(&self, digest: &[u8; 32], now: SystemTime) -> CredentialStatus {
        let named = self.worker_secrets.iter().filter(|secret| secret.secret.digest() == digest);
        let statuses =
            named.map(|secret| if secret.is_current(now) { CredentialStatus::Good } else { CredentialStatus::Over });
        statuses.max().unwrap_or(CredentialStatus::Removed)
    }

    /// How long a request waits while no worker serves its model. A model is `declared` if a slot or `coldModels` names
    /// it: then it is probably being loaded, which takes longer than a queue should.
    pub fn cold_timeout_for(&self, declared: bool) -> Duration {
        let absent = self.absent_timeout();
        let default = if declared { absent.max(DEFAULT_COLD_TIMEOUT) } else { absent };
        self.cold_timeout.unwrap_or(default)
    }

    /// How long a request waits while some worker serves its model. By default the whole request timeout.
    pub fn queue_timeout(&self) -> Duration {
        self.queue_timeout.unwrap_or_else(|| self.request_timeout())
    }

    /// A request's whole time, cold waiting excepted. Without it, only the idle timeout ends the request.
    pub fn request_timeout(&self) -> Duration {
        self.request_timeout.unwrap_or(LONGEST_REQUEST)
    }

    /// The time that a request waits while no worker serves its model, unless a declaration or the cold timeout
    /// applies.
    pub fn absent_timeout(&self) -> Duration {
        self.queue_timeout.unwrap_or(ABSENT_TIMEOUT)
    }
}

impl WorkerSecret {
    /// True if it is still valid at `now`.
    pub fn is_current(&self, now: SystemTime) -> bool {
        self.not_after.is_none_or(|end| now < end)
    }

    /// True if `presented` is this secret and it is still valid.
    pub fn admits(&self, presented: &str, now: SystemTime) -> bool {
        let same = self.secret.verify(presented);
        same && self.is_current(now)
    }
}
