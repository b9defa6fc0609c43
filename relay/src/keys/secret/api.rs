//! One Secret through the Kubernetes API: reads it, and writes its keys if there was no other write meanwhile.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::DATA_KEY;
use crate::kubernetes::api::{Body, CallError, ClusterApi};
use crate::settings::error::ConfigError;

/// The kubelet may be replacing the token at this moment.
const AFTER_UNAUTHORIZED: Duration = Duration::from_millis(500);

/// The Secret, and the account for requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterAccess {
    api: ClusterApi,
    namespace: String,
    secret: String,
}

pub(super) struct SecretApi {
    access: ClusterAccess,
}

/// The Secret as it was read.
pub(super) struct StoredSecret {
    pub(super) version: String,
    /// The value of [`DATA_KEY`].
    pub(super) keys: Option<Vec<u8>>,
    /// The size of all other values, in bytes.
    pub(super) other_bytes: usize,
}

/// Why the Secret was not read or written.
#[derive(Debug)]
pub(super) enum ApiError {
    /// Another writer changed it since it was read.
    Conflict,
    /// The next attempt may succeed.
    Passing { why: String, retry_after: Option<Duration> },
    /// An operator has to change something first.
    Refused(String),
}

impl ClusterAccess {
    /// The Secret with this name, with the ServiceAccount of this Pod. Each error names the setting.
    pub fn of_this_pod(secret: &str, namespace: Option<&str>, account: &Path) -> Result<Self, ConfigError> {
        let api =
            ClusterApi::of_this_pod("API_KEYS_SECRET (--api-keys-secret)", "use API_KEYS_FILE without it", account)?;
        let namespace = match namespace {
            Some(namespace) => namespace.to_owned(),
            None => api
                .namespace()
                .map_err(|why| ConfigError::new(format!("POD_NAMESPACE (--pod-namespace) is not set, and {why}")))?,
        };
        Ok(Self { api, namespace, secret: secret.to_owned() })
    }
}

impl SecretApi {
    pub(super) fn new(access: ClusterAccess) -> Self {
        Self { access }
    }

    /// The human-readable name.
    pub(super) fn name(&self) -> String {
        format!("Secret {}/{}", self.access.namespace, self.access.secret)
    }

    pub(super) async fn read(&self, deadline: Instant) -> Result<StoredSecret, ApiError> {
        let answer = self.send(Method::GET, None, deadline).await?;
        parse(&answer)
    }

    /// Writes the keys if the Secret still has this version. Its other values are kept.
    pub(super) async fn write(&self, version: &str, keys: &[u8], deadline: Instant) -> Result<(), ApiError> {
        let patch = json!({
            "metadata": { "resourceVersion": version },
            "data": { DATA_KEY: STANDARD.encode(keys) },
        });
        let patch = Body { media_type: "application/merge-patch+json", text: patch.to_string() };
        self.send(Method::PATCH, Some(patch), deadline).await.map(|_| ())
    }

    async fn send(&self, method: Method, body: Option<Body>, deadline: Instant) -> Result<Bytes, ApiError> {
        let ClusterAccess { api, namespace, secret } = &self.access;
        let path = format!("/api/v1/namespaces/{namespace}/secrets/{secret}");
        api.call(method.clone(), &path, body, deadline).await.map_err(|error| match error {
            CallError::Unreached(why) => ApiError::Passing { why, retry_after: None },
            CallError::Answered { status, message, retry_after } => {
                self.refusal(&method, status, retry_after, &message)
            }
        })
    }

    fn refusal(&self, method: &Method, status: StatusCode, retry_after: Option<Duration>, message: &str) -> ApiError {
        let passing = |why: String, retry_after| ApiError::Passing { why, retry_after };
        match status {
            StatusCode::CONFLICT => ApiError::Conflict,
            StatusCode::UNAUTHORIZED => passing(
                "the API server rejected the token of the ServiceAccount (401)".to_owned(),
                Some(AFTER_UNAUTHORIZED),
            ),
            StatusCode::FORBIDDEN => ApiError::Refused(format!(
                "the ServiceAccount may not {} it: grant get and patch on this one Secret in a Role (403: {message})",
                if *method == Method::GET { "get" } else { "patch" },
            )),
            StatusCode::NOT_FOUND => ApiError::Refused(format!(
                "it does not exist, and a relay does not create it: create it empty (kubectl create secret generic {} -n {})",
                self.access.secret, self.access.namespace,
            )),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                passing(format!("the API server returned {status}: {message}"), retry_after)
            }
            _ if status.is_server_error() => {
                passing(format!("the API server returned {status}: {message}"), retry_after)
            }
            _ => ApiError::Refused(format!("the API server returned {status}: {message}")),
        }
    }
}

impl ApiError {
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Passing { retry_after, .. } => *retry_after,
            Self::Conflict | Self::Refused(_) => None,
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conflict => f.write_str("too many concurrent changes (409)"),
            Self::Passing { why, .. } | Self::Refused(why) => f.write_str(why),
        }
    }
}

fn parse(answer: &[u8]) -> Result<StoredSecret, ApiError> {
    #[derive(Deserialize)]
    struct Object {
        metadata: Metadata,
        #[serde(default)]
        data: Option<std::collections::BTreeMap<String, String>>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        resource_version: String,
    }
    let unreadable =
        |why: &dyn fmt::Display| ApiError::Refused(format!("the API server's response is not a Secret: {why}"));
    let object: Object = serde_json::from_slice(answer).map_err(|error| unreadable(&error))?;
    let mut keys = None;
    let mut other_bytes = 0;
    for (name, value) in object.data.unwrap_or_default() {
        let value = STANDARD.decode(value).map_err(|error| unreadable(&error))?;
        if name == DATA_KEY {
            keys = Some(value);
        } else {
            other_bytes += value.len();
        }
    }
    Ok(StoredSecret { version: object.metadata.resource_version, keys, other_bytes })
}
