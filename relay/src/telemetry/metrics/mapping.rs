//! Maps the terms of the core and of the error table to metric labels. Each match is exhaustive, so that a new case
//! needs a label.

use modelrelay_protocol::error::ErrorKind;
use modelrelay_protocol::message::TokenCounts;

use super::labels::{Outcome, RequeueReason, Stage, TokenKind};
use crate::dispatch;

impl Outcome {
    /// The outcome of a request to which the relay itself responded with an error.
    pub fn of_error(kind: &ErrorKind) -> Self {
        match kind {
            ErrorKind::MalformedRequest
            | ErrorKind::InvalidJson
            | ErrorKind::MissingModel
            | ErrorKind::RequestTooLarge
            | ErrorKind::KeyLimit
            | ErrorKind::TokenLimit
            | ErrorKind::PreviousResponseNotFound
            | ErrorKind::ProviderNotFound
            | ErrorKind::InvalidClass
            | ErrorKind::UnsupportedEncoding
            | ErrorKind::CrossOrigin
            | ErrorKind::UnknownHost
            | ErrorKind::NoWebSocket
            | ErrorKind::MethodNotAllowed
            | ErrorKind::NotFound => Self::ClientError,
            ErrorKind::InvalidApiKey
            | ErrorKind::UnknownTenant
            | ErrorKind::TokenUnverified
            | ErrorKind::ModelForbidden => Self::Unauthorized,
            ErrorKind::ModelNotFound => Self::ModelNotFound,
            ErrorKind::QueueFull => Self::QueueFull,
            ErrorKind::Displaced => Self::Displaced,
            ErrorKind::QueueTimeout => Self::QueueTimeout,
            ErrorKind::RequestTimeout => Self::RequestTimeout,
            ErrorKind::RequeueExhausted => Self::RequeueExhausted,
            ErrorKind::ProviderDisabled => Self::ProviderDisabled,
            ErrorKind::ProviderDeleted => Self::ProviderDeleted,
            ErrorKind::ModelLoading => Self::ModelLoading,
            ErrorKind::InsufficientMemory | ErrorKind::BackendUnavailable | ErrorKind::SlotQuarantined => {
                Self::BackendUnavailable
            }
            ErrorKind::SeveredBySwap => Self::Severed,
            ErrorKind::CancelledByAdmin => Self::Cancelled,
            ErrorKind::Overloaded => Self::Overloaded,
            ErrorKind::WorkerTooOld => Self::NoWorker,
            ErrorKind::Draining => Self::Draining,
            ErrorKind::WorkerLost => Self::WorkerLost,
            ErrorKind::ResponseTooLarge => Self::StreamLimit,
            ErrorKind::SlowClient => Self::SlowClient,
            ErrorKind::BackendUnreachable | ErrorKind::Worker(_) | ErrorKind::Internal => Self::UpstreamError,
        }
    }

    /// The outcome of a request whose backend completed the response, with this status.
    pub fn of_backend_status(status: u16) -> Self {
        match status {
            0..=399 => Self::Ok,
            400..=499 => Self::ClientError,
            500.. => Self::UpstreamError,
        }
    }
}

impl TokenKind {
    /// The counts of each kind.
    pub fn counts(tokens: &TokenCounts) -> [(Self, u64); 3] {
        [
            (Self::Input, tokens.prompt_tokens),
            (Self::Output, tokens.completion_tokens),
            (Self::CachedInput, tokens.cached_tokens.unwrap_or(0)),
        ]
    }
}

impl From<dispatch::RequeueReason> for RequeueReason {
    fn from(reason: dispatch::RequeueReason) -> Self {
        match reason {
            dispatch::RequeueReason::WorkerLost => Self::WorkerLost,
            dispatch::RequeueReason::HeartbeatTimeout => Self::HeartbeatTimeout,
            dispatch::RequeueReason::Draining => Self::Draining,
            dispatch::RequeueReason::AtCapacity => Self::AtCapacity,
            dispatch::RequeueReason::SeveredBySwap => Self::SeveredBySwap,
            dispatch::RequeueReason::BackendUnreachable => Self::BackendUnreachable,
            dispatch::RequeueReason::BackendReset => Self::BackendReset,
            dispatch::RequeueReason::FirstByteTimeout => Self::FirstByteTimeout,
            dispatch::RequeueReason::LoadFailed => Self::LoadFailed,
        }
    }
}

impl From<dispatch::Stage> for Stage {
    fn from(stage: dispatch::Stage) -> Self {
        match stage {
            dispatch::Stage::Queued => Self::Queued,
            dispatch::Stage::InFlight => Self::InFlight,
        }
    }
}
