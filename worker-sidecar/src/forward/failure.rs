//! The reason why a request has no response, or an incomplete one.

use modelrelay_multiplexer::error::SlotError;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::message::{WorkerError, WorkerToRelay};

use crate::backend::BackendError;

/// A request's failure.
#[derive(Debug)]
pub enum Failure {
    /// There was no response.
    Backend(BackendError),
    /// The response was this server error, and the health check failed after it. None of it was forwarded.
    Lost(u16),
    /// The response ended prematurely.
    Broken(String),
    /// The path is not in the allow-list.
    BadPath,
    /// The response does not fit into a message for an old relay.
    TooLarge,
    /// The response is not text, and the relay accepts nothing else.
    NotText,
    /// The model's slot ended it.
    Slot(SlotError),
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Self {
        Self::Backend(error)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Backend(error) => write!(f, "{error}"),
            Self::Lost(status) => write!(f, "the backend returned {status} and fails its health check"),
            Self::Broken(detail) => write!(f, "the backend response ended prematurely: {detail}"),
            Self::BadPath => f.write_str("the path is not allowed"),
            Self::TooLarge => f.write_str("the response is too large for this relay"),
            Self::NotText => f.write_str("the response is not UTF-8, and this relay accepts only text"),
            Self::Slot(error) => write!(f, "{error}"),
        }
    }
}

impl Failure {
    /// Returns the wire code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Backend(BackendError::Unreachable(_)) | Self::Lost(_) => WorkerError::BACKEND_UNREACHABLE,
            Self::Backend(BackendError::Reset(_)) | Self::Broken(_) => WorkerError::BACKEND_RESET,
            Self::Backend(BackendError::BadAnswer(_)) => "bad_answer",
            Self::BadPath => WorkerError::BAD_PATH,
            Self::TooLarge => WorkerError::RESPONSE_TOO_LARGE,
            Self::NotText => "response_not_text",
            Self::Slot(error) => error.code(),
        }
    }

    /// Returns the metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Backend(BackendError::Unreachable(_)) => "connect",
            Self::Lost(_) => "lost",
            Self::Backend(BackendError::Reset(_)) => "reset",
            Self::Backend(BackendError::BadAnswer(_)) | Self::Broken(_) | Self::TooLarge | Self::NotText => "body",
            Self::BadPath => "bad_path",
            Self::Slot(SlotError::BackendLost) => "reset",
            Self::Slot(_) => "severed",
        }
    }

    /// Returns the message for clients: it does not reveal the backend's address or a library's error.
    pub fn public_message(&self) -> String {
        match self {
            Self::Backend(BackendError::Unreachable(error))
                if error.kind() == std::io::ErrorKind::ConnectionRefused =>
            {
                "the backend refused the connection".to_owned()
            }
            Self::Backend(BackendError::Unreachable(_)) => "the backend cannot be reached".to_owned(),
            Self::Backend(BackendError::Reset(_)) => "the backend closed the connection before it responded".to_owned(),
            Self::Backend(BackendError::BadAnswer(_)) => "the backend sent an invalid response".to_owned(),
            Self::Broken(_) => "the backend response ended prematurely".to_owned(),
            Self::Lost(_) | Self::BadPath | Self::TooLarge | Self::NotText | Self::Slot(_) => self.to_string(),
        }
    }

    /// Returns the error for a client, for responses that the worker itself writes.
    pub fn api_error(&self) -> ApiError {
        let kind = match self {
            Self::Slot(error) => return error.api_error(),
            Self::Backend(BackendError::Unreachable(_)) | Self::Lost(_) => ErrorKind::BackendUnreachable,
            Self::TooLarge => ErrorKind::ResponseTooLarge,
            Self::Backend(BackendError::Reset(_) | BackendError::BadAnswer(_))
            | Self::Broken(_)
            | Self::BadPath
            | Self::NotText => ErrorKind::Worker(self.code().to_owned()),
        };
        ApiError::new(kind, self.public_message())
    }
}

pub(super) fn error_message(request_id: &str, code: &str, message: &str) -> WorkerToRelay {
    WorkerToRelay::Error(WorkerError {
        request_id: Some(request_id.to_owned()),
        code: code.to_owned(),
        message: message.to_owned(),
        retry_after_ms: None,
    })
}
