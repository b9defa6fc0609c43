//! The errors that ModelRelay itself creates, in one table: status, code, and whether the client should retry.
//!
//! A backend's own errors never pass through here; they reach the client unchanged.

use std::borrow::Cow;
use std::time::Duration;

use crate::message::WorkerError;
use crate::queue_position::QueuePosition;
use crate::rate_limit::RateLimit;

/// The kind of an error: one row of the table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The head is ambiguous about where the request ends or which host it is for.
    MalformedRequest,
    /// The body is not JSON, or a field has the wrong type.
    InvalidJson,
    /// The body names no model.
    MissingModel,
    /// The body is larger than the limit.
    RequestTooLarge,
    /// No API key, or one that is not valid.
    InvalidApiKey,
    /// The ServiceAccount of a valid token belongs to no tenant.
    UnknownTenant,
    /// The cluster cannot review the ServiceAccount token now.
    TokenUnverified,
    /// The key may not use this provider or model.
    ModelForbidden,
    /// The key has as many requests in flight as it may.
    KeyLimit,
    /// The key has used up its tokens of this minute or day.
    TokenLimit,
    /// No provider has the model. `Retry-After` is set after a relay's start, while workers may still register it.
    ModelNotFound,
    /// No worker is known to have the previous response.
    PreviousResponseNotFound,
    /// `x-modelrelay-provider` names no provider.
    ProviderNotFound,
    /// `x-modelrelay-class` states no class.
    InvalidClass,
    /// The queue is full.
    QueueFull,
    /// A request of a higher class took the place in the queue.
    Displaced,
    /// No worker accepted the request in time.
    QueueTimeout,
    /// The request exceeded its time limit.
    RequestTimeout,
    /// Too many attempts lost their workers.
    RequeueExhausted,
    /// The provider is disabled.
    ProviderDisabled,
    /// The provider was removed.
    ProviderDeleted,
    /// A slot is loading the model and was not ready in time.
    ModelLoading,
    /// The model does not fit.
    InsufficientMemory,
    /// The backend does not start.
    BackendUnavailable,
    /// A slot's memory could not be freed.
    SlotQuarantined,
    /// A model swap ended the request before anything was sent.
    SeveredBySwap,
    /// An admin cancelled the request.
    CancelledByAdmin,
    /// The memory budget is full.
    Overloaded,
    /// Only workers with an old protocol are connected, and they cannot handle the request.
    WorkerTooOld,
    /// The request's body is compressed in another way than gzip or zstd.
    UnsupportedEncoding,
    /// The relay is shutting down.
    Draining,
    /// The backend could not be reached.
    BackendUnreachable,
    /// The worker disconnected after its response had begun.
    WorkerLost,
    /// The response is larger than the limit.
    ResponseTooLarge,
    /// The client read too slowly.
    SlowClient,
    /// A browser sent the request for a page that may not use the relay.
    CrossOrigin,
    /// The request's `Host` is not a name of the relay.
    UnknownHost,
    /// A WebSocket was requested on a route that is plain HTTP.
    NoWebSocket,
    /// The path does not support this method.
    MethodNotAllowed,
    /// No route has this path.
    NotFound,
    /// Another error that a worker reported, by its own code.
    Worker(String),
    /// An internal error.
    Internal,
}

/// One row of the table.
struct Row {
    status: u16,
    openai_type: &'static str,
    code: &'static str,
    anthropic_type: &'static str,
    should_retry: Option<bool>,
    retry_after: Option<u8>,
}

impl ErrorKind {
    /// Returns the kind of an error that a worker reported by this code.
    pub fn of_worker(code: &str) -> Self {
        match code {
            WorkerError::SEVERED_BY_SWAP => Self::SeveredBySwap,
            WorkerError::BACKEND_UNREACHABLE => Self::BackendUnreachable,
            WorkerError::INSUFFICIENT_MEMORY => Self::InsufficientMemory,
            WorkerError::BACKEND_UNAVAILABLE => Self::BackendUnavailable,
            WorkerError::SLOT_QUARANTINED => Self::SlotQuarantined,
            WorkerError::RESPONSE_TOO_LARGE => Self::ResponseTooLarge,
            code => Self::Worker(code.to_owned()),
        }
    }

    #[rustfmt::skip]
    fn row(&self) -> Row {
        let row = |status, openai_type, code, anthropic_type| Row {
            status, openai_type, code, anthropic_type, should_retry: None, retry_after: None,
        };
        match self {
            Self::MalformedRequest => row(400, "invalid_request_error", "malformed_request", "invalid_request_error"),
            Self::InvalidJson => row(400, "invalid_request_error", "invalid_json", "invalid_request_error"),
            Self::MissingModel => row(400, "invalid_request_error", "missing_model", "invalid_request_error"),
            Self::RequestTooLarge => row(413, "invalid_request_error", "request_too_large", "request_too_large"),
            Self::InvalidApiKey => row(401, "authentication_error", "invalid_api_key", "authentication_error"),
            Self::UnknownTenant => row(403, "permission_error", "unknown_tenant", "permission_error"),
            Self::TokenUnverified => row(503, "service_unavailable_error", "token_unverified", "overloaded_error").after(1),
            Self::ModelForbidden => row(403, "permission_error", "model_forbidden", "permission_error"),
            Self::KeyLimit => row(429, "rate_limit_error", "key_limit", "rate_limit_error").after(1),
            Self::TokenLimit => row(429, "rate_limit_error", "token_limit", "rate_limit_error").after(1),
            Self::ModelNotFound => row(404, "invalid_request_error", "model_not_found", "not_found_error"),
            Self::PreviousResponseNotFound => row(404, "invalid_request_error", "previous_response_not_found", "not_found_error"),
            Self::ProviderNotFound => row(404, "invalid_request_error", "provider_not_found", "not_found_error"),
            Self::InvalidClass => row(400, "invalid_request_error", "invalid_class", "invalid_request_error"),
            Self::Displaced => row(429, "rate_limit_error", "displaced", "rate_limit_error").after(1),
            Self::QueueFull => row(429, "rate_limit_error", "queue_full", "rate_limit_error").after(1),
            Self::QueueTimeout => row(504, "timeout_error", "queue_timeout", "overloaded_error").after(1).retry(true),
            Self::RequestTimeout => row(504, "timeout_error", "request_timeout", "timeout_error").retry(false),
            Self::RequeueExhausted => row(503, "server_error", "requeue_exhausted", "api_error").retry(false),
            Self::ProviderDisabled => row(503, "service_unavailable_error", "provider_disabled", "overloaded_error").retry(false),
            Self::ProviderDeleted => row(503, "service_unavailable_error", "provider_deleted", "overloaded_error").retry(false),
            Self::ModelLoading => row(503, "service_unavailable_error", "model_loading", "overloaded_error").after(1),
            Self::InsufficientMemory => row(503, "service_unavailable_error", "insufficient_memory", "overloaded_error").after(1),
            Self::BackendUnavailable => row(503, "service_unavailable_error", "backend_unavailable", "overloaded_error").after(1),
            Self::SlotQuarantined => row(503, "server_error", "slot_quarantined", "api_error").retry(false),
            Self::SeveredBySwap => row(503, "service_unavailable_error", "severed_by_swap", "overloaded_error").after(1),
            Self::CancelledByAdmin => row(503, "service_unavailable_error", "cancelled_by_admin", "api_error").retry(false),
            Self::Overloaded => row(503, "service_unavailable_error", "overloaded", "overloaded_error").after(1),
            Self::WorkerTooOld => row(501, "invalid_request_error", "worker_too_old", "invalid_request_error"),
            Self::UnsupportedEncoding => row(415, "invalid_request_error", "unsupported_encoding", "invalid_request_error"),
            Self::Draining => row(503, "service_unavailable_error", "draining", "overloaded_error").after(1),
            Self::BackendUnreachable => row(502, "server_error", "backend_unreachable", "api_error").after(1).retry(true),
            Self::WorkerLost => row(502, "server_error", "worker_lost", "api_error"),
            Self::ResponseTooLarge => row(502, "server_error", "response_too_large", "api_error"),
            Self::SlowClient => row(502, "server_error", "slow_client", "api_error"),
            Self::CrossOrigin => row(403, "permission_error", "cross_origin", "permission_error"),
            Self::UnknownHost => row(421, "invalid_request_error", "unknown_host", "invalid_request_error"),
            Self::NoWebSocket => row(426, "invalid_request_error", "no_websocket", "invalid_request_error"),
            Self::MethodNotAllowed => row(405, "invalid_request_error", "method_not_allowed", "not_found_error"),
            Self::NotFound => row(404, "invalid_request_error", "not_found", "not_found_error"),
            Self::Worker(_) => row(502, "server_error", "worker_error", "api_error"),
            Self::Internal => row(500, "server_error", "internal_error", "api_error"),
        }
    }
}

impl Row {
    fn after(mut self, seconds: u8) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    fn retry(mut self, should: bool) -> Self {
        self.should_retry = Some(should);
        self
    }
}

/// An error for a client, before it is formatted in a dialect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    kind: ErrorKind,
    message: Cow<'static, str>,
    param: Option<&'static str>,
    retry_after: Option<u8>,
    should_retry: Option<bool>,
    rate_limit: Option<RateLimit>,
    queue_position: Option<QueuePosition>,
}

impl ApiError {
    /// Creates an error of this kind with this message.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        let param = matches!(kind, ErrorKind::ModelNotFound | ErrorKind::MissingModel).then_some("model");
        let Row { retry_after, should_retry, .. } = kind.row();
        Self { kind, message: message.into(), param, retry_after, should_retry, rate_limit: None, queue_position: None }
    }

    /// Sets another `Retry-After`, rounded up to whole seconds and kept within 1–60.
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after.as_millis().div_ceil(1000).clamp(1, 60) as u8);
        self
    }

    /// Sets the time after which a worker will try again, if clients are told to retry errors of this kind at all.
    pub fn with_worker_retry_after(self, after: Option<Duration>) -> Self {
        match after {
            Some(after) if self.retry_after.is_some() => self.with_retry_after(after),
            _ => self,
        }
    }

    /// Marks an error that lasts longer than `Retry-After` can say: clients report it instead of retrying.
    pub fn lasting(mut self) -> Self {
        self.should_retry = Some(false);
        self
    }

    /// States the limit that is reached.
    pub fn with_rate_limit(mut self, limit: RateLimit) -> Self {
        self.rate_limit = Some(limit);
        self
    }

    /// States the request's position in the queue.
    pub fn with_queue_position(mut self, position: Option<QueuePosition>) -> Self {
        self.queue_position = position;
        self
    }

    /// Appends text to the message.
    pub fn with_more(mut self, more: &str) -> Self {
        self.message = format!("{}{more}", self.message).into();
        self
    }

    /// Names the field at fault.
    pub fn with_param(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    /// Marks the error as one in a response that had begun. Agents decide by the message whether to retry, so it calls
    /// a lost connection by that name.
    pub fn in_begun_response(mut self) -> Self {
        let is_reset = matches!(&self.kind, ErrorKind::Worker(code) if code == WorkerError::BACKEND_RESET);
        if is_reset || matches!(self.kind, ErrorKind::WorkerLost | ErrorKind::BackendUnreachable) {
            self.message = format!("connection lost: {}", self.message).into();
        }
        self
    }

    /// The kind of the error.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        self.kind.row().status
    }

    /// OpenAI's `type`.
    pub fn openai_type(&self) -> &'static str {
        self.kind.row().openai_type
    }

    /// OpenAI's `code`; for a worker's own error, its code.
    pub fn code(&self) -> &str {
        if let ErrorKind::Worker(code) = &self.kind
            && !code.is_empty()
        {
            return code;
        }
        self.kind.row().code
    }

    /// Anthropic's `type`.
    pub fn anthropic_type(&self) -> &'static str {
        self.kind.row().anthropic_type
    }

    /// The human-readable message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The field at fault.
    pub fn param(&self) -> Option<&'static str> {
        self.param
    }

    /// `Retry-After`, in seconds, 1–60.
    pub fn retry_after(&self) -> Option<u64> {
        self.retry_after.map(u64::from)
    }

    /// `x-should-retry`, where the status alone would mislead a client.
    pub fn should_retry(&self) -> Option<bool> {
        // If `Retry-After` is set, the model may still be registered.
        let may_come = self.kind == ErrorKind::ModelNotFound && self.retry_after.is_some();
        if may_come { Some(true) } else { self.should_retry }
    }

    /// The headers that go with the status, besides those of the content.
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = Vec::new();
        if let Some(seconds) = self.retry_after {
            headers.push(("retry-after", seconds.to_string()));
        }
        if let Some(should) = self.should_retry() {
            headers.push(("x-should-retry", should.to_string()));
        }
        headers.extend(self.rate_limit.iter().flat_map(RateLimit::headers));
        headers.extend(self.queue_position.iter().flat_map(QueuePosition::headers));
        if self.kind == ErrorKind::InvalidApiKey {
            headers.push(("www-authenticate", "Bearer".to_owned()));
        }
        headers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_retry_after_applies_to_retried_kinds_only() {
        let after = |kind, secs: Option<u64>| {
            ApiError::new(kind, "x").with_worker_retry_after(secs.map(Duration::from_secs)).retry_after()
        };
        assert_eq!(after(ErrorKind::BackendUnavailable, Some(7)), Some(7));
        assert_eq!(after(ErrorKind::BackendUnavailable, None), Some(1));
        assert_eq!(after(ErrorKind::SlotQuarantined, Some(7)), None);
    }

    #[test]
    fn retry_after_is_1_to_60_whole_seconds() {
        let after =
            |ms| ApiError::new(ErrorKind::QueueFull, "x").with_retry_after(Duration::from_millis(ms)).retry_after();
        assert_eq!((after(0), after(1001), after(600_000)), (Some(1), Some(2), Some(60)));
    }

    #[test]
    fn only_timeout_before_dispatch_may_be_retried() {
        let header = |kind| ApiError::new(kind, "x").headers();
        assert_eq!(header(ErrorKind::RequestTimeout), [("x-should-retry", "false".to_owned())]);
        assert_eq!(
            header(ErrorKind::QueueTimeout),
            [("retry-after", "1".to_owned()), ("x-should-retry", "true".to_owned())]
        );
    }

    #[test]
    fn error_of_queue_states_position() {
        let position = QueuePosition { position: 13, waiting: 12 };
        let error = ApiError::new(ErrorKind::QueueFull, "x").with_queue_position(Some(position));
        let header = |name, value: &str| (name, value.to_owned());
        let expected = [
            header("retry-after", "1"),
            header("x-modelrelay-queue-position", "13"),
            header("x-modelrelay-queue-length", "12"),
        ];
        assert_eq!(error.headers(), expected);
    }

    #[test]
    fn status_separates_client_and_worker_faults() {
        let status = |kind| ApiError::new(kind, "x").status();
        assert_eq!((status(ErrorKind::ModelNotFound), status(ErrorKind::QueueFull)), (404, 429));
        assert_eq!((status(ErrorKind::Worker(String::new())), status(ErrorKind::RequestTimeout)), (502, 504));
    }

    #[test]
    fn error_code_of_worker_is_kept() {
        assert_eq!(ApiError::new(ErrorKind::Worker("bad_path".into()), "x").code(), "bad_path");
        assert_eq!(ApiError::new(ErrorKind::Worker(String::new()), "x").code(), "worker_error");
    }
}
