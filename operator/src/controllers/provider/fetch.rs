//! Reads the Secrets that a Provider's next step depends on. They are read by name and not cached, because the operator
//! keeps no Secret in memory that it does not need.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client, ResourceExt};
use modelrelay_protocol::config_hash::secret_of_file;
use modelrelay_protocol::secret::Secret as SecretText;

use crate::cluster::apply::{Owner, display_kube_error};
use crate::crd::{Provider, SecretKeyRef};
use crate::manifests::config::PREVIOUS_WORKER_SECRETS;
use crate::manifests::config::shared::AppliedConfig;
use crate::manifests::secrets::{ADMIN_TOKEN, API_KEYS, WORKER_SECRET};
use crate::relays::tls::{self, RelayTls, UnusableSecret};
use crate::resources::names::{self, ObjectKey};
use crate::spec::rotation::{Previous, RelaySide, WorkerSide};

/// The contents of the Secrets.
#[derive(Debug, Default)]
pub(super) struct FetchedSecrets {
    /// The Secret that workers mount.
    pub(super) worker: Option<WorkerSide>,
    /// The Secret that relays mount.
    pub(super) relay: Option<RelaySide>,
    /// The configuration that relays mount.
    pub(super) applied: Option<AppliedConfig>,
    /// The user's own worker secret.
    pub(super) own: Option<SecretText>,
    /// The relays' certificate.
    pub(super) tls: Option<RelayTls>,
    /// The generated admin token.
    pub(super) admin_token: Option<SecretText>,
    /// True if the Secret of the API keys exists.
    pub(super) has_api_keys: bool,
    /// True if it contains keys.
    pub(super) holds_api_keys: bool,
}

/// The reason that a Secret could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum SecretFetchError {
    /// The user names a Secret or a key that does not exist.
    #[error("{place}: Secret {secret} {problem}")]
    SecretNotFound {
        /// The field of the spec.
        place: &'static str,
        /// The Secret.
        secret: String,
        /// The missing part.
        problem: String,
    },
    /// The content of the user's Secret cannot be used.
    #[error("{place}: Secret {secret} {problem}")]
    SecretInvalid {
        /// The field of the spec.
        place: &'static str,
        /// The Secret.
        secret: String,
        /// The problem.
        problem: String,
    },
    /// The API server did not respond.
    #[error("Secret {secret}: {}", display_kube_error(source))]
    Api {
        /// The Secret.
        secret: String,
        /// The underlying error.
        source: Box<kube::Error>,
    },
}

/// A worker secret is one line, and the relay accepts none that is longer.
const MAX_SECRET_CHARS: usize = 4096;

/// Reads all Secrets.
pub(super) async fn fetch(client: &Client, provider: &Provider) -> Result<FetchedSecrets, SecretFetchError> {
    let name = provider.name_any();
    let reader =
        Reader { api: Api::namespaced(client.clone(), &provider.namespace().unwrap_or_default()), name: &name };
    let mut fetched = FetchedSecrets::default();
    if let Some(reference) = &provider.spec.worker_secret_ref {
        fetched.own = Some(reader.users("spec.workerSecretRef", reference).await?);
    }
    if let Some(reference) = &provider.spec.relay.admin_token_secret_ref {
        reader.users("spec.relay.adminTokenSecretRef", reference).await?;
    }
    if let Some(tls) = &provider.spec.relay.tls {
        let host = names::worker_host(&name, &provider.namespace().unwrap_or_default());
        fetched.tls = Some(reader.tls(&tls.secret_name, &host).await?);
    }
    if let Some(secret) = reader.own_secret(&names::relay(&name)).await? {
        fetched.relay = relay_side(&secret);
        fetched.applied = applied_config(&secret);
    }
    if let Some(secret) = reader.own_secret(&names::worker_secret(&name)).await? {
        fetched.worker = worker_side(&secret);
    }
    if provider.spec.relay_ref.is_some() {
        return Ok(fetched);
    }
    if let Some(secret) = reader.own_secret(&names::admin_secret(&name)).await? {
        fetched.admin_token = text(&secret, ADMIN_TOKEN).map(SecretText::new);
    }
    if let Some(secret) = reader.own_secret(&names::api_keys_secret(&name)).await? {
        fetched.has_api_keys = true;
        fetched.holds_api_keys = text(&secret, API_KEYS).is_some();
    }
    Ok(fetched)
}

struct Reader<'a> {
    api: Api<Secret>,
    name: &'a str,
}

impl Reader<'_> {
    async fn get(&self, name: &str) -> Result<Option<Secret>, SecretFetchError> {
        let fail = |source| SecretFetchError::Api { secret: name.to_owned(), source: Box::new(source) };
        self.api.get_opt(name).await.map_err(fail)
    }

    /// Returns a Secret of the operator; another owner's Secret is treated as absent.
    async fn own_secret(&self, name: &str) -> Result<Option<Secret>, SecretFetchError> {
        let owner = Owner { kind: "Provider", label: names::PROVIDER_LABEL, name: self.name };
        Ok(self.get(name).await?.filter(|secret| owner.owns(&secret.metadata)))
    }

    async fn users(&self, place: &'static str, reference: &SecretKeyRef) -> Result<SecretText, SecretFetchError> {
        let missing =
            |problem: String| SecretFetchError::SecretNotFound { place, secret: reference.name.clone(), problem };
        let Some(secret) = self.get(&reference.name).await? else { return Err(missing("does not exist".to_owned())) };
        let key = &reference.key;
        match text(&secret, key) {
            Some(value) if value.chars().count() <= MAX_SECRET_CHARS => Ok(SecretText::new(value)),
            Some(_) => Err(missing(format!("has more than {MAX_SECRET_CHARS} characters in the key {key}"))),
            None => Err(missing(format!("has no text in the key {key}"))),
        }
    }

    async fn tls(&self, name: &str, host: &str) -> Result<RelayTls, SecretFetchError> {
        let (place, secret) = ("spec.relay.tls.secretName", name.to_owned());
        let found = self.get(name).await?.ok_or(UnusableSecret::Missing("does not exist".to_owned()));
        found.and_then(|secret| tls::judge(&secret, host)).map_err(|unusable| match unusable {
            UnusableSecret::Missing(problem) => SecretFetchError::SecretNotFound { place, secret, problem },
            UnusableSecret::Wrong(problem) => SecretFetchError::SecretInvalid { place, secret, problem },
        })
    }
}

/// Returns a value without the newline that editors and `echo` append, or `None` if it is no text or empty.
fn text(secret: &Secret, key: &str) -> Option<String> {
    let bytes = secret.data.as_ref()?.get(key)?;
    let text = secret_of_file(std::str::from_utf8(&bytes.0).ok()?);
    (!text.is_empty()).then(|| text.to_owned())
}

fn worker_side(secret: &Secret) -> Option<WorkerSide> {
    let changed_at = time(secret, names::SECRET_CHANGED_ANNOTATION);
    Some(WorkerSide { value: SecretText::new(text(secret, WORKER_SECRET)?), changed_at })
}

fn relay_side(secret: &Secret) -> Option<RelaySide> {
    let previous = PREVIOUS_WORKER_SECRETS.iter().enumerate().filter_map(|(age, key)| {
        let value = SecretText::new(text(secret, key)?);
        Some(Previous { value, until: time(secret, &names::previous_until_annotation(age)) })
    });
    let previous = previous.collect();
    let acted_on = secret.annotations().get(names::ROTATE_ANNOTATION).cloned();
    Some(RelaySide { current: SecretText::new(text(secret, WORKER_SECRET)?), previous, acted_on })
}

fn applied_config(secret: &Secret) -> Option<AppliedConfig> {
    let text = |(key, bytes): (&String, &ByteString)| Some((key.clone(), String::from_utf8(bytes.0.clone()).ok()?));
    AppliedConfig::read(&secret.data.as_ref()?.iter().filter_map(text).collect())
}

/// Returns the configuration of the relay that belongs to the Provider with this key.
pub(super) async fn applied_config_of(
    client: &Client,
    key: &ObjectKey,
) -> Result<Option<AppliedConfig>, SecretFetchError> {
    Ok(relay_secret(client, key).await?.as_ref().and_then(applied_config))
}

/// Returns the worker secrets of a Provider that another one's relay serves.
pub(super) async fn sharer_secrets(client: &Client, key: &ObjectKey) -> Result<Option<RelaySide>, SecretFetchError> {
    Ok(relay_secret(client, key).await?.as_ref().and_then(relay_side))
}

async fn relay_secret(client: &Client, (namespace, name): &ObjectKey) -> Result<Option<Secret>, SecretFetchError> {
    Reader { api: Api::namespaced(client.clone(), namespace), name }.own_secret(&names::relay(name)).await
}

/// Returns a time that a user may have edited. A relay reads none before 1970.
fn time(secret: &Secret, annotation: &str) -> Option<Timestamp> {
    let time = secret.annotations().get(annotation)?.parse::<Timestamp>().ok()?;
    Some(time.max(Timestamp::UNIX_EPOCH))
}
