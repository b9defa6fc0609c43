//! The audit log: changes through `/admin` with their origin, and rejected logins.
//!
//! There is one event per requested change, whether it succeeded or not, and one per rejected login; reads have none.
//! An event is a line of the log (target `modelrelay::audit`), and of `AUDIT_LOG_FILE` if it is set. A subject is only
//! named if an object of that name exists: any other path segment could be anything, even a secret.

mod file;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;
use tracing::info;

use crate::settings::error::ConfigError;
use crate::telemetry::metrics::Metrics;
use file::AuditFile;

/// An action on `/admin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Action {
    /// A login.
    #[serde(rename = "login")]
    Login,
    /// A new API key.
    #[serde(rename = "key.create")]
    KeyCreate,
    /// A change to an API key.
    #[serde(rename = "key.update")]
    KeyUpdate,
    /// The revocation of an API key.
    #[serde(rename = "key.revoke")]
    KeyRevoke,
    /// The drain of a worker.
    #[serde(rename = "worker.drain")]
    WorkerDrain,
    /// A refresh of a worker's models.
    #[serde(rename = "worker.refresh")]
    WorkerRefresh,
    /// An order to a multiplexer.
    #[serde(rename = "worker.command")]
    WorkerCommand,
    /// The cancellation of a request.
    #[serde(rename = "request.cancel")]
    RequestCancel,
    /// The display of a provider's worker secret.
    #[serde(rename = "secret.show")]
    SecretShow,
}

/// The result of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The action was done, or ordered.
    Ok,
    /// The action was not allowed, or its request was invalid.
    Refused,
    /// The action failed.
    Failed,
}

/// One event, as written to the file.
#[derive(Debug, Clone, Serialize)]
pub struct AuditEvent {
    /// The time, in RFC 3339, UTC.
    pub time: String,
    /// The action.
    pub action: Action,
    /// The result.
    pub outcome: Outcome,
    /// The status of the response.
    pub status: u16,
    /// The id of the key, worker or request, if it exists.
    pub subject: Option<String>,
    /// Further details: the text of an order, or the changed fields of a key.
    pub detail: Option<String>,
    /// The client's address; behind a trusted proxy the address that the proxy names.
    pub client: IpAddr,
    /// The `x-request-id` of the response.
    pub request_id: String,
}

impl Action {
    /// The name in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Login => "login",
            Self::KeyCreate => "key.create",
            Self::KeyUpdate => "key.update",
            Self::KeyRevoke => "key.revoke",
            Self::WorkerDrain => "worker.drain",
            Self::WorkerRefresh => "worker.refresh",
            Self::WorkerCommand => "worker.command",
            Self::RequestCancel => "request.cancel",
            Self::SecretShow => "secret.show",
        }
    }
}

impl Outcome {
    /// The outcome that a status means.
    pub fn of(status: u16) -> Self {
        match status {
            ..400 => Self::Ok,
            400..500 => Self::Refused,
            500.. => Self::Failed,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// The log to which events are written.
#[derive(Debug, Default)]
pub struct AuditLog {
    file: Option<AuditFile>,
}

impl AuditLog {
    /// Opens `AUDIT_LOG_FILE`, if it is set.
    pub fn open(path: Option<&Path>, metrics: Arc<Metrics>) -> Result<Self, ConfigError> {
        let open = |path| {
            AuditFile::open(path, metrics).map_err(|error| {
                let setting = "AUDIT_LOG_FILE (--audit-log-file)";
                ConfigError::refused(
                    setting,
                    &path.display().to_string(),
                    &format!("cannot write to the file: {error}"),
                )
            })
        };
        Ok(Self { file: path.map(open).transpose()? })
    }

    /// Records an event now. It never waits, and never fails the action.
    pub fn record(&self, event: &AuditEvent) {
        info!(
            target: "modelrelay::audit",
            action = event.action.as_str(),
            outcome = event.outcome.as_str(),
            status = event.status,
            subject = event.subject,
            detail = event.detail,
            client = %event.client,
            request_id = event.request_id,
            "admin action"
        );
        if let Some(file) = &self.file {
            file.write(event);
        }
    }

    /// Waits, for at most a second, until the recorded events are in the file. No further event is written after that.
    pub fn close(&self) {
        if let Some(file) = &self.file {
            file.close();
        }
    }
}

/// The time of an event that happens now.
pub fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_and_file_use_same_terms() {
        use Action::{
            KeyCreate, KeyRevoke, Login, RequestCancel, SecretShow, WorkerCommand, WorkerDrain, WorkerRefresh,
        };
        let of_keys_and_workers = [Login, KeyCreate, KeyRevoke, WorkerDrain, WorkerRefresh, WorkerCommand];
        for action in of_keys_and_workers.into_iter().chain([RequestCancel, SecretShow]) {
            assert_eq!(serde_json::json!(action), action.as_str());
        }
        for (status, outcome, word) in
            [(202, Outcome::Ok, "ok"), (404, Outcome::Refused, "refused"), (503, Outcome::Failed, "failed")]
        {
            assert_eq!((Outcome::of(status), serde_json::json!(outcome)), (outcome, word.into()));
            assert_eq!(outcome.as_str(), word);
        }
    }
}
