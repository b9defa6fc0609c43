//! Errors of requests that a slot does not serve, and their form: for a client in HTTP, for a relay as a code. This is
//! the only such table.

use std::fmt;
use std::time::Duration;

use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::message::WorkerError;

use super::Model;
use super::memory::Shortage;

/// The most known models that an error lists.
const NAMED_MODELS: usize = 20;

/// The reason why a slot does not serve a request, or stopped serving it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotError {
    /// The slot has no such model.
    UnknownModel {
        /// The requested model.
        model: Model,
        /// The slots' models.
        known: Vec<Model>,
    },
    /// The model does not fit, whatever is unloaded for it.
    InsufficientMemory {
        /// The model.
        model: Model,
        /// The missing memory.
        shortage: Shortage,
        /// The time until it is tried again.
        retry_after: Duration,
    },
    /// The model could not be loaded.
    LoadFailed {
        /// The model.
        model: Model,
        /// The failure.
        failure: LoadFailure,
        /// The time until it is tried again.
        retry_after: Duration,
    },
    /// The worker held the request for its whole hold budget.
    HoldExpired {
        /// The model.
        model: Model,
        /// How long the request waited.
        waited: Duration,
        /// About how much longer it would have had to wait.
        eta: Duration,
    },
    /// The relay has sent more requests than the worker registered for.
    QueueFull {
        /// The most requests that it may have here.
        limit: usize,
    },
    /// The slot's memory could not be freed.
    Quarantined,
    /// The model's gate is closed, or its capacity is used up: the relay requeues the request and sends it when it may.
    AtCapacity,
    /// A swap ended the request.
    Severed,
    /// The backend died while serving the request.
    BackendLost,
    /// The worker is stopping.
    Draining,
}

/// The reason why a model could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadFailure {
    /// The backend's process ended. Holds its last output.
    Exited(String),
    /// The backend serves, but not this model.
    WrongModel {
        /// The expected model.
        expected: String,
        /// The models that it serves.
        found: Vec<String>,
    },
    /// It was not ready in time.
    TimedOut(Duration),
    /// It died before it had completed a request.
    DiedAtOnce,
    /// The driver failed.
    Driver(String),
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(last_words) if last_words.is_empty() => f.write_str("its backend exited while loading"),
            Self::Exited(last_words) => {
                write!(f, "its backend exited while loading (log tail {}): {last_words}", tail_id(last_words))
            }
            Self::WrongModel { expected, found } => {
                write!(f, "its backend serves {} instead of {expected}", found.join(", "))
            }
            Self::TimedOut(after) => write!(f, "it was not ready within {} s", after.as_secs()),
            Self::DiedAtOnce => f.write_str("its backend exited before it responded to any request"),
            Self::Driver(detail) => write!(f, "{detail} (log tail {})", tail_id(detail)),
        }
    }
}

/// Returns an identifier of a backend's last output, by which an operator finds it in the log.
fn tail_id(last_words: &str) -> String {
    // FNV-1a
    let hash =
        last_words.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

impl LoadFailure {
    /// Returns the message for clients. The output, responses and address of a backend may reveal paths and worse, and
    /// stay with its operator.
    fn for_clients(&self) -> String {
        let last_words = match self {
            Self::Exited(last_words) => last_words,
            Self::WrongModel { .. } => return "its backend serves another model".to_owned(),
            Self::Driver(detail) => {
                return format!("its driver failed; search the worker's log for {}", tail_id(detail));
            }
            Self::TimedOut(_) | Self::DiedAtOnce => return self.to_string(),
        };
        let how = last_words.split(':').next().filter(|how| how.starts_with("exit code ") || *how == "killed");
        let how = how.map(|how| format!(" ({how})")).unwrap_or_default();
        format!("its backend exited while loading{how}; search the worker's log for {}", tail_id(last_words))
    }
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownModel { model, known } => {
                let named: Vec<_> = known.iter().take(NAMED_MODELS).map(|model| &**model).collect();
                write!(f, "no slot has model {model}; available: {}", named.join(", "))
            }
            Self::InsufficientMemory { model, shortage, .. } => write!(f, "model {model} does not fit: {shortage}"),
            Self::LoadFailed { model, failure, .. } => write!(f, "model {model} could not be loaded: {failure}"),
            Self::HoldExpired { model, waited, .. } => {
                write!(f, "model {model} was not loaded within {} s", waited.as_secs())
            }
            Self::QueueFull { limit } => write!(f, "the limit of {limit} running and waiting requests is reached"),
            Self::Quarantined => f.write_str("the slot's memory could not be freed; an operator must intervene"),
            Self::AtCapacity => f.write_str("the model accepts no more requests"),
            Self::Severed => f.write_str("another model took over the slot"),
            Self::BackendLost => f.write_str("the backend exited"),
            Self::Draining => f.write_str("the worker is shutting down"),
        }
    }
}

impl std::error::Error for SlotError {}

impl SlotError {
    /// Returns the message for clients. The `Display` text, for logs and `/healthz`, has more detail.
    pub fn for_clients(&self) -> String {
        match self {
            Self::LoadFailed { model, failure, .. } => {
                format!("model {model} could not be loaded: {}", failure.for_clients())
            }
            Self::UnknownModel { .. }
            | Self::InsufficientMemory { .. }
            | Self::HoldExpired { .. }
            | Self::QueueFull { .. }
            | Self::Quarantined
            | Self::AtCapacity
            | Self::Severed
            | Self::BackendLost
            | Self::Draining => self.to_string(),
        }
    }

    /// Returns the error for a client, for responses that the worker itself writes.
    pub fn api_error(&self) -> ApiError {
        let kind = match self {
            Self::UnknownModel { .. } => ErrorKind::ModelNotFound,
            Self::InsufficientMemory { .. } => ErrorKind::InsufficientMemory,
            Self::LoadFailed { .. } => ErrorKind::BackendUnavailable,
            Self::HoldExpired { .. } => ErrorKind::ModelLoading,
            Self::QueueFull { .. } => ErrorKind::QueueFull,
            Self::Quarantined => ErrorKind::SlotQuarantined,
            Self::AtCapacity => ErrorKind::Overloaded,
            Self::Severed => ErrorKind::SeveredBySwap,
            Self::BackendLost => ErrorKind::BackendUnreachable,
            Self::Draining => ErrorKind::Draining,
        };
        let error = ApiError::new(kind, self.for_clients());
        match self.retry_after() {
            Some(after) => error.with_retry_after(after),
            None => error,
        }
    }

    /// Returns the wire code for a relay with `core1`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownModel { .. } => "model_not_found",
            Self::InsufficientMemory { .. } => WorkerError::INSUFFICIENT_MEMORY,
            Self::LoadFailed { .. } => WorkerError::BACKEND_UNAVAILABLE,
            Self::HoldExpired { .. } => "model_loading",
            Self::QueueFull { .. } => "queue_full",
            Self::Quarantined => WorkerError::SLOT_QUARANTINED,
            Self::AtCapacity => WorkerError::AT_CAPACITY,
            Self::Severed => WorkerError::SEVERED_BY_SWAP,
            Self::BackendLost => WorkerError::BACKEND_RESET,
            Self::Draining => WorkerError::DRAINING,
        }
    }

    /// Returns when the same request may succeed, if that is known better than by the table.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InsufficientMemory { retry_after, .. } | Self::LoadFailed { retry_after, .. } => Some(*retry_after),
            Self::HoldExpired { eta, .. } => Some(*eta),
            Self::UnknownModel { .. }
            | Self::QueueFull { .. }
            | Self::Quarantined
            | Self::AtCapacity
            | Self::Severed
            | Self::BackendLost
            | Self::Draining => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use modelrelay_protocol::dialect::Dialect;

    use super::*;

    #[test]
    fn every_error_has_documented_status_code_and_retry() {
        let model = Model::from("m");
        let (retry_after, eta) = (Duration::from_millis(3_100), Duration::from_secs(700));
        let shortage = Shortage { need: 2 << 30, have: 1 << 30, is_host: false };
        let failure = LoadFailure::Exited("no such file".into());
        let rows = [
            (
                SlotError::UnknownModel { model: model.clone(), known: vec![model.clone()] },
                404,
                "model_not_found",
                None,
            ),
            (
                SlotError::InsufficientMemory { model: model.clone(), shortage, retry_after },
                503,
                "insufficient_memory",
                Some(4),
            ),
            (SlotError::LoadFailed { model: model.clone(), failure, retry_after }, 503, "backend_unavailable", Some(4)),
            (SlotError::HoldExpired { model, waited: eta, eta }, 503, "model_loading", Some(60)),
            (SlotError::QueueFull { limit: 4 }, 429, "queue_full", Some(1)),
            (SlotError::Quarantined, 503, "slot_quarantined", None),
            (SlotError::Severed, 503, "severed_by_swap", Some(1)),
            (SlotError::Draining, 503, "draining", Some(1)),
            (SlotError::BackendLost, 502, "backend_unreachable", Some(1)),
        ];
        for (error, status, code, retry_after) in rows {
            let told = error.api_error();
            assert_eq!((told.status(), told.code(), told.retry_after()), (status, code, retry_after), "{error}");
        }
    }

    #[test]
    fn severed_stream_is_reported_in_both_dialects() {
        let error = SlotError::Severed.api_error();
        let openai = Dialect::OpenAi.error_frame(&error, "r", 0);
        assert!(openai.starts_with("data: {") && openai.contains(r#""code":"severed_by_swap""#), "{openai}");
        assert!(!openai.contains("[DONE]"));
        let anthropic = Dialect::Anthropic.error_frame(&error, "r", 0);
        assert!(anthropic.starts_with("event: error\n") && anthropic.contains("overloaded_error"), "{anthropic}");
    }

    #[test]
    fn clients_receive_only_id_of_backend_output() {
        let failure = LoadFailure::Exited("exit code 3: cannot open models/weights.gguf".into());
        let id = tail_id("exit code 3: cannot open models/weights.gguf");
        let error = SlotError::LoadFailed { model: "m".into(), failure, retry_after: Duration::ZERO };
        let logged = error.to_string();
        assert!(logged.contains("weights.gguf") && logged.contains(&id), "{logged}");
        let sent = Dialect::OpenAi.error_frame(&error.api_error(), "r", 0);
        assert!(!sent.contains("weights.gguf"), "{sent}");
        assert!(sent.contains("m could not be loaded") && sent.contains("exit code 3") && sent.contains(&id), "{sent}");
    }

    #[test]
    fn backend_address_and_response_are_hidden_from_clients() {
        let found = vec!["/srv/weights/secret.gguf".to_owned()];
        for failure in [
            LoadFailure::Driver("http://10.0.0.7:8000/ returned 500: secret".into()),
            LoadFailure::WrongModel { expected: "m".into(), found },
        ] {
            let error = SlotError::LoadFailed { model: "m".into(), failure, retry_after: Duration::ZERO };
            let told = error.for_clients();
            assert!(error.to_string().contains("secret"), "{error}");
            assert!(!told.contains("secret") && !told.contains("10.0.0.7"), "{told}");
        }
    }

    #[test]
    fn error_messages_name_model_and_cause() {
        let known = vec![Model::from("a"), Model::from("b")];
        let error = SlotError::UnknownModel { model: Model::from("c"), known };
        assert_eq!(error.to_string(), "no slot has model c; available: a, b");
        let shortage = Shortage { need: 3 << 30, have: 1 << 30, is_host: false };
        let error = SlotError::InsufficientMemory { model: Model::from("m"), shortage, retry_after: Duration::ZERO };
        assert_eq!(error.to_string(), "model m does not fit: it needs 3.0 GiB, but only 1.0 GiB can be freed");
    }
}
