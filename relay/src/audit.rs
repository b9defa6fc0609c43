//! The audit log: who changed what through `/admin`, and who was not let in.
//!
//! One event per change that was asked for, whether it happened or not, and one per refused login; reading is none. It is a
//! line of the log (target `modelrelay::audit`), and of `AUDIT_LOG_FILE` where one is set. A subject is only named if
//! something of that name exists: what else somebody writes into a path could be anything, a secret too.

mod file;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;
use tracing::info;

use crate::config::ConfigError;
use crate::metrics::Metrics;
use file::AuditFile;

/// What somebody wanted of `/admin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Action {
    /// To be let in.
    #[serde(rename = "login")]
    Login,
    /// A new API key.
    #[serde(rename = "key.create")]
    KeyCreate,
    /// An API key made useless.
    #[serde(rename = "key.revoke")]
    KeyRevoke,
    /// A worker sent away.
    #[serde(rename = "worker.drain")]
    WorkerDrain,
    /// A worker's models listed anew.
    #[serde(rename = "worker.refresh")]
    WorkerRefresh,
    /// An order to a multiplexer.
    #[serde(rename = "worker.command")]
    WorkerCommand,
    /// A request ended.
    #[serde(rename = "request.cancel")]
    RequestCancel,
    /// What a provider's workers have to show.
    #[serde(rename = "secret.show")]
    SecretShow,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It was done, or ordered.
    Ok,
    /// It may not be done, or not like this.
    Refused,
    /// It could not be done.
    Failed,
}

/// One event, as the file has it.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    /// RFC 3339, UTC.
    pub time: String,
    /// What was wanted.
    pub action: Action,
    /// What came of it.
    pub outcome: Outcome,
    /// The answer's status.
    pub status: u16,
    /// The id of the key, worker or request, if there is one of that id.
    pub subject: Option<String>,
    /// What else tells what was done: an order's words.
    pub detail: Option<String>,
    /// Where it came from; behind a trusted proxy the address that the proxy names.
    pub client: IpAddr,
    /// `x-request-id` of the answer.
    pub request_id: String,
}

impl Action {
    /// As the file writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Login => "login",
            Self::KeyCreate => "key.create",
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
    /// What a status means.
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

/// Where events go.
#[derive(Debug, Default)]
pub struct AuditLog {
    file: Option<AuditFile>,
}

impl AuditLog {
    /// Opens `AUDIT_LOG_FILE`, if there is to be one.
    pub fn open(path: Option<&Path>, metrics: Arc<Metrics>) -> Result<Self, ConfigError> {
        let open = |path| {
            AuditFile::open(path, metrics).map_err(|error| {
                let setting = "AUDIT_LOG_FILE (--audit-log-file)";
                ConfigError::refused(setting, &path.display().to_string(), &format!("it cannot be written: {error}"))
            })
        };
        Ok(Self { file: path.map(open).transpose()? })
    }

    /// Takes note of an event, now. Never waits, and never fails what it tells of.
    pub fn record(&self, event: &Event) {
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

    /// Waits, not for long, until what was recorded is in the file. Nothing is written any more after that.
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
    fn the_log_and_the_file_use_the_same_words() {
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
