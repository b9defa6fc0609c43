//! One provider's settings, and whom they let in.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use modelrelay_protocol::limits;
use modelrelay_protocol::model_details::ModelDetails;
use modelrelay_protocol::secret::{Secret, bare};

use super::model_names::ModelNames;
use crate::dispatch::DEFAULT_COLD_TIMEOUT;
use crate::identity::ServiceAccount;
use crate::socket::Credential;

/// Requests that may wait: hundreds of short ones, as a client that embeds documents sends them.
pub const MAX_QUEUE_LEN: usize = 1000;

/// How long an answer may stand still.
const STREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// How long something is waited for that no worker has.
const ABSENT_TIMEOUT: Duration = Duration::from_secs(30);

/// A request without a request timeout ends after a day, however busy it is: every wait has an end.
const LONGEST_REQUEST: Duration = Duration::from_secs(24 * 3600);

/// One named queue with its own secrets and limits.
#[derive(Debug, Clone, PartialEq)]
pub struct ProviderConfig {
    /// Unique in the relay.
    pub name: String,
    /// False: its requests fail at once, its workers are turned away.
    pub enabled: bool,
    /// Any of them admits a worker; empty ones are already left out.
    pub worker_secrets: Vec<WorkerSecret>,
    /// A token of any of these admits a worker too.
    pub worker_accounts: Vec<ServiceAccount>,
    /// The catalogue; `None` takes whatever workers advertise. Never an empty list.
    pub models: Option<Vec<CatalogueModel>>,
    /// Names that mean one of its models.
    pub names: ModelNames,
    /// Limits and capabilities by model name, in the place of those that workers state.
    pub model_details: BTreeMap<String, ModelDetails>,
    /// Models that no worker may serve yet but that a pool would be started for: known, on the cold clock, no catalogue.
    pub cold_models: Vec<String>,
    /// Requests that may wait.
    pub max_queue_len: usize,
    /// Bytes of their bodies.
    pub max_queue_bytes: u64,
    /// As written; what counts is [`ProviderConfig::queue_timeout`].
    pub queue_timeout: Option<Duration>,
    /// As written; what counts is [`ProviderConfig::cold_timeout_for`].
    pub cold_timeout: Option<Duration>,
    /// A request's whole time, cold waiting excepted; what counts is [`ProviderConfig::request_timeout`].
    pub request_timeout: Option<Duration>,
    /// How long an answer may stand still.
    pub stream_idle_timeout: Duration,
    /// How long a worker may send nothing of a response while another one has room.
    pub first_byte_timeout: Option<Duration>,
    /// Models that one worker may advertise.
    pub max_models_per_worker: usize,
    /// Whether a worker without a protocol version is turned away.
    pub require_protocol_version: bool,
}

/// A model of a catalogue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogueModel {
    /// What workers advertise and backends see.
    pub id: String,
    /// What clients may write instead.
    pub aliases: Vec<String>,
}

/// How what admitted a worker stands now, the best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Somebody took it away.
    Removed,
    /// Its time is over; nobody took it away in a hurry.
    Over,
    /// It admits it still.
    Good,
}

/// A secret that admits workers, for a while or for ever.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerSecret {
    /// Never empty.
    pub secret: Secret,
    /// It admits nobody from then on.
    pub not_after: Option<SystemTime>,
}

impl ProviderConfig {
    /// Everything by default, as `- name: …` alone in a file.
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
            max_models_per_worker: limits::MAX_MODELS_PER_WORKER,
            require_protocol_version: false,
        }
    }

    /// The secret that `presented` is and that admits a worker at `now`. All are compared, so that the time tells nothing.
    /// Its digest is what a connection remembers for [`ProviderConfig::standing`].
    pub fn admitting_secret(&self, presented: &str, now: SystemTime) -> Option<&WorkerSecret> {
        let admitting = self.worker_secrets.iter().filter(|secret| secret.admits(presented, now));
        admitting.fold(None, |first, secret| first.or(Some(secret)))
    }

    /// Whether `presented` admits a worker at `now`.
    pub fn admits(&self, presented: &str, now: SystemTime) -> bool {
        self.admitting_secret(presented, now).is_some()
    }

    /// Why a secret that admits nobody is probably meant to: what is around it, or around the one that the relay has.
    pub fn near_miss(&self, presented: &str, now: SystemTime) -> Option<&'static str> {
        let mut current = self.worker_secrets.iter().filter(|secret| secret.is_current(now));
        current.any(|secret| secret.secret.is_nearly(presented)).then(|| {
            if bare(presented) == presented {
                "the relay's secret has quotes, blanks or a line end around it, the worker's has none"
            } else {
                "the worker's secret has quotes, blanks or a line end around it"
            }
        })
    }

    /// Whether a worker that came in with this may stay: its secret is still there, and its time is not over; its account is
    /// still listed, and its token was not refused since.
    pub fn standing(&self, credential: &Credential, now: SystemTime) -> Standing {
        match credential {
            Credential::Secret(digest) => self.standing_of_secret(digest, now),
            Credential::Token(identity) if !self.worker_accounts.contains(&identity.account) => Standing::Removed,
            Credential::Token(identity) => match (identity.is_refused(), identity.has_expired(now)) {
                (false, _) => Standing::Good,
                (true, true) => Standing::Over,
                (true, false) => Standing::Removed,
            },
        }
    }

    fn standing_of_secret(&self, digest: &[u8; 32], now: SystemTime) -> Standing {
        let named = self.worker_secrets.iter().filter(|secret| secret.secret.digest() == digest);
        let standings = named.map(|secret| if secret.is_current(now) { Standing::Good } else { Standing::Over });
        standings.max().unwrap_or(Standing::Removed)
    }

    /// How long a request waits while no worker serves its model. A model is `declared` when a slot or `coldModels` names
    /// it: then something is being done to load it, which takes longer than a queue should.
    pub fn cold_timeout_for(&self, declared: bool) -> Duration {
        let absent = self.absent_timeout();
        let default = if declared { absent.max(DEFAULT_COLD_TIMEOUT) } else { absent };
        self.cold_timeout.unwrap_or(default)
    }

    /// How long a request waits while some worker serves its model. Unset: as long as it may take altogether.
    pub fn queue_timeout(&self) -> Duration {
        self.queue_timeout.unwrap_or_else(|| self.request_timeout())
    }

    /// A request's whole time, cold waiting excepted. Unset: only silence ends it.
    pub fn request_timeout(&self) -> Duration {
        self.request_timeout.unwrap_or(LONGEST_REQUEST)
    }

    /// The time that a request waits while no worker serves its model, unless a declaration or the cold timeout applies.
    pub fn absent_timeout(&self) -> Duration {
        self.queue_timeout.unwrap_or(ABSENT_TIMEOUT)
    }
}

impl WorkerSecret {
    /// Whether it is still valid at `now`.
    pub fn is_current(&self, now: SystemTime) -> bool {
        self.not_after.is_none_or(|end| now < end)
    }

    /// Whether `presented` is this secret and it is still valid.
    pub fn admits(&self, presented: &str, now: SystemTime) -> bool {
        let same = self.secret.verify(presented);
        same && self.is_current(now)
    }
}
