//! The leader's part: create, renew and publish certificates.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, Patch, PostParams, Preconditions};
use kube::{Api, Client, Resource};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::plan::{self, Action, Published, SecretState};
use super::{Policy, Settings, material};
use crate::cluster::apply::patch_params;
use crate::cluster::follow::follow;
use crate::resources::names::{FIELD_MANAGER, MANAGED_BY};
use crate::webhook::inject::api_message;

/// The Secret's type, which cannot be changed later.
const SECRET_TYPE: &str = "kubernetes.io/tls";
const MANAGED_BY_LABEL: &str = "app.kubernetes.io/managed-by";
/// The pause after a failed write; it doubles until the check interval is reached.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// While `leader` is true, keeps the Secret and the webhook configuration up to date. Ends when `leader`'s sender is
/// dropped.
pub async fn run_manager(client: Client, settings: Settings, policy: Policy, mut leader: watch::Receiver<bool>) {
    while leader.wait_for(|leads| *leads).await.is_ok() {
        let manager = Manager::new(&client, &settings, policy);
        tokio::select! {
            never = manager.run() => match never {},
            // A write that is cut off here has happened or not; the next leader checks.
            _ = leader.wait_for(|leads| !*leads) => {}
        }
    }
}

/// The known state of an object.
#[derive(Clone, Debug)]
enum KnownObject<K> {
    Unknown,
    Absent,
    Present(Box<K>),
}

impl<K> From<Option<K>> for KnownObject<K> {
    fn from(object: Option<K>) -> Self {
        object.map_or(Self::Absent, |object| Self::Present(Box::new(object)))
    }
}

/// The reason that a write failed.
#[derive(Debug, thiserror::Error)]
enum IssueError {
    #[error("{}", api_message(.0))]
    Api(#[from] kube::Error),
    #[error("failed to create a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
}

struct Manager<'a> {
    settings: &'a Settings,
    policy: Policy,
    secrets: Api<Secret>,
    configurations: Api<MutatingWebhookConfiguration>,
    secret: watch::Sender<KnownObject<Secret>>,
    configuration: watch::Sender<KnownObject<MutatingWebhookConfiguration>>,
}

/// The state that one leader keeps between two steps.
#[derive(Default)]
struct ManagerState {
    /// The bundle that the API server has, and the time at which this leader first observed it.
    published: Option<(Vec<u8>, Instant)>,
    /// The uid of the foreign Secret that was last reported.
    refused: Option<String>,
}

impl<'a> Manager<'a> {
    fn new(client: &Client, settings: &'a Settings, policy: Policy) -> Self {
        Self {
            settings,
            policy,
            secrets: Api::namespaced(client.clone(), &settings.namespace),
            configurations: Api::all(client.clone()),
            secret: watch::Sender::new(KnownObject::Unknown),
            configuration: watch::Sender::new(KnownObject::Unknown),
        }
    }

    async fn run(&self) -> std::convert::Infallible {
        let secret = |object: Option<Secret>| {
            self.secret.send_replace(object.into());
        };
        let configuration = |object: Option<MutatingWebhookConfiguration>| {
            self.configuration.send_replace(object.into());
        };
        tokio::select! {
            never = follow(&self.secrets, &self.settings.secret, secret) => never,
            never = follow(&self.configurations, &self.settings.configuration, configuration) => never,
            never = self.manage() => never,
        }
    }

    async fn manage(&self) -> std::convert::Infallible {
        let mut secret = self.secret.subscribe();
        let mut configuration = self.configuration.subscribe();
        let mut memory = ManagerState::default();
        let mut pause = FIRST_PAUSE;
        loop {
            secret.mark_unchanged();
            configuration.mark_unchanged();
            let wait = match self.step(&mut memory).await {
                Ok(true) => {
                    pause = FIRST_PAUSE;
                    continue;
                }
                Ok(false) => {
                    pause = FIRST_PAUSE;
                    self.policy.check_interval.min(self.policy.settle)
                }
                Err(failure) => {
                    warn!(error = %failure, "failed to update the webhook's certificates; retrying");
                    pause = (pause * 2).min(self.policy.check_interval);
                    // The changed object does not wake this sleep: it may be the one that the failure is about, and
                    // retrying at once would loop without a pause.
                    tokio::time::sleep(pause).await;
                    continue;
                }
            };
            tokio::select! {
                _ = secret.changed() => {}
                _ = configuration.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Performs the next action. Returns true if another one may follow.
    async fn step(&self, memory: &mut ManagerState) -> Result<bool, IssueError> {
        let secret = match &*self.secret.borrow() {
            KnownObject::Unknown => return Ok(false),
            KnownObject::Absent => None,
            KnownObject::Present(secret) => Some(secret.clone()),
        };
        let configuration = match &*self.configuration.borrow() {
            KnownObject::Unknown => return Ok(false),
            KnownObject::Absent => None,
            KnownObject::Present(configuration) => Some(configuration.clone()),
        };
        let now = SystemTime::now();
        let held = held(secret.as_deref(), &self.settings.names());
        let bundle = secret.as_ref().and_then(|secret| secret.data.as_ref()).map(material::bundle).unwrap_or_default();
        let published = published(configuration.as_deref(), &bundle, memory);
        let action = plan::plan(now, &held, published, &self.policy);
        match (action, secret) {
            (Action::Wait, _) => return Ok(false),
            (Action::Refuse, secret) => {
                self.refuse(secret.as_deref(), memory);
                return Ok(false);
            }
            (Action::Publish, _) => self.publish(configuration.as_deref(), &bundle).await?,
            (action, secret) => {
                // The owner is the configuration that exists now: with an owner of another uid, the Secret would be
                // garbage-collected.
                let owner = configuration.and_then(|configuration| configuration.owner_ref(&()));
                self.write(action, secret, owner, now).await?;
            }
        }
        Ok(true)
    }

    /// Writes the Secret that `action` requires.
    async fn write(
        &self,
        action: Action,
        old: Option<Box<Secret>>,
        owner: Option<OwnerReference>,
        now: SystemTime,
    ) -> Result<(), IssueError> {
        let exists = old.is_some();
        let mut secret = old.map_or_else(Secret::default, |secret| *secret);
        let what = change(secret.data.get_or_insert_default(), action, now, &self.policy, &self.settings.names())?;
        self.dress(&mut secret, owner);
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let written = if exists {
            self.secrets.replace(&self.settings.secret, &params, &secret).await
        } else {
            self.secrets.create(&params, &secret).await
        };
        match written {
            Ok(secret) => {
                info!(secret = self.settings.secret, "{what}");
                self.secret.send_replace(Some(secret).into());
                Ok(())
            }
            // Another leader or an administrator wrote first. Their Secret is evaluated like any other.
            Err(kube::Error::Api(status)) if status.code == 409 => self.read_again().await,
            // The Secret has another type or is immutable: it cannot be changed, only created again.
            Err(kube::Error::Api(status)) if status.code == 422 && exists => {
                warn!(secret = self.settings.secret, error = status.message, "recreating the certificate Secret");
                self.delete(&secret).await
            }
            Err(error) => Err(error.into()),
        }
    }

    fn dress(&self, secret: &mut Secret, owner: Option<OwnerReference>) {
        let metadata = &mut secret.metadata;
        metadata.name = Some(self.settings.secret.clone());
        metadata.namespace = Some(self.settings.namespace.clone());
        metadata.managed_fields = None;
        let labels = metadata.labels.get_or_insert_default();
        for (key, value) in labels_of(&self.settings.service) {
            labels.insert(key.to_owned(), value);
        }
        if let Some(owner) = owner {
            metadata.owner_references = Some(vec![owner]);
        }
        secret.type_.get_or_insert_with(|| SECRET_TYPE.to_owned());
    }

    async fn delete(&self, secret: &Secret) -> Result<(), IssueError> {
        let preconditions = Preconditions {
            uid: secret.metadata.uid.clone(),
            resource_version: secret.metadata.resource_version.clone(),
        };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match self.secrets.delete(&self.settings.secret, &params).await {
            Ok(_) => self.secret.send_replace(KnownObject::Absent),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return self.read_again().await,
            Err(error) => return Err(error.into()),
        };
        Ok(())
    }

    async fn read_again(&self) -> Result<(), IssueError> {
        let secret = self.secrets.get_opt(&self.settings.secret).await?;
        self.secret.send_replace(secret.into());
        Ok(())
    }

    /// Writes the bundle into each webhook of the configuration, and nothing else.
    async fn publish(
        &self,
        configuration: Option<&MutatingWebhookConfiguration>,
        bundle: &[u8],
    ) -> Result<(), IssueError> {
        let webhooks = configuration.map(hooks).unwrap_or_default();
        let operations: Vec<_> =
            webhooks.iter().enumerate().flat_map(|(index, hook)| patch(index, hook, bundle)).collect();
        let name = &self.settings.configuration;
        let patch =
            serde_json::from_value(json!(operations)).map(Patch::<()>::Json).map_err(kube::Error::SerdeError)?;
        match self.configurations.patch(name, &patch_params(), &patch).await {
            Ok(patched) => {
                info!(configuration = name, "caBundle of the webhook configuration updated");
                self.configuration.send_replace(Some(patched).into());
                Ok(())
            }
            // It was deleted, or its list changed meanwhile (a `test` of the patch failed).
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => {
                warn!(
                    configuration = name,
                    error = status.message,
                    "webhook configuration changed concurrently; retrying"
                );
                let now = self.configurations.get_opt(name).await?;
                self.configuration.send_replace(now.into());
                tokio::time::sleep(FIRST_PAUSE).await;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn refuse(&self, secret: Option<&Secret>, memory: &mut ManagerState) {
        let uid = secret.and_then(|secret| secret.metadata.uid.clone()).unwrap_or_default();
        if memory.refused.as_ref() != Some(&uid) {
            error!(
                secret = self.settings.secret,
                namespace = self.settings.namespace,
                "the Secret for the webhook's certificate exists without the label {MANAGED_BY_LABEL}={MANAGED_BY}: delete it, \
                 set --certificate-secret to another name, or set --external-certificates"
            );
            memory.refused = Some(uid);
        }
    }
}

fn labels_of(service: &str) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("app.kubernetes.io/name", "modelrelay".to_owned()),
        ("app.kubernetes.io/part-of", "modelrelay".to_owned()),
        ("app.kubernetes.io/component", "operator".to_owned()),
        ("app.kubernetes.io/instance", service.to_owned()),
        (MANAGED_BY_LABEL, MANAGED_BY.to_owned()),
    ])
}

fn held(secret: Option<&Secret>, names: &[String]) -> SecretState {
    let Some(secret) = secret else { return SecretState::Nothing };
    let label = secret.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY_LABEL));
    if label.is_none_or(|label| label != MANAGED_BY) {
        return SecretState::Foreign;
    }
    let empty = material::Data::new();
    SecretState::Ours(material::contents(secret.data.as_ref().unwrap_or(&empty), names))
}

fn hooks(configuration: &MutatingWebhookConfiguration) -> &[MutatingWebhook] {
    configuration.webhooks.as_deref().unwrap_or_default()
}

/// Returns whether the API server has the bundle, and the time since this leader first observed that.
fn published(
    configuration: Option<&MutatingWebhookConfiguration>,
    bundle: &[u8],
    memory: &mut ManagerState,
) -> Published {
    let webhooks = configuration.map(hooks).unwrap_or_default();
    if webhooks.is_empty() {
        memory.published = None;
        return Published::NoConfiguration;
    }
    let known = |hook: &MutatingWebhook| hook.client_config.ca_bundle.as_ref().is_some_and(|known| known.0 == bundle);
    if !webhooks.iter().all(known) {
        memory.published = None;
        return Published::Differs;
    }
    let since = match &memory.published {
        Some((same, since)) if same == bundle => *since,
        Some(_) | None => {
            let now = Instant::now();
            memory.published = Some((bundle.to_owned(), now));
            now
        }
    };
    Published::For(since.elapsed())
}

/// Returns one webhook's part of the patch; `test` makes it fail if another webhook has taken that index in the list.
fn patch(index: usize, hook: &MutatingWebhook, bundle: &[u8]) -> [serde_json::Value; 2] {
    [
        json!({"op": "test", "path": format!("/webhooks/{index}/name"), "value": hook.name}),
        json!({
            "op": "add", "path": format!("/webhooks/{index}/clientConfig/caBundle"),
            "value": ByteString(bundle.to_owned()),
        }),
    ]
}

/// Makes the changes of `action` and returns a description of them.
fn change(
    data: &mut material::Data,
    action: Action,
    now: SystemTime,
    policy: &Policy,
    names: &[String],
) -> Result<String, rcgen::Error> {
    Ok(match action {
        Action::Replace(reason) => {
            material::new_authority(data, now, policy.ca_lifetime, false)?;
            material::new_leaf(data, now, policy.leaf_lifetime, names)?;
            format!("created a new authority and certificate for the webhook: {reason}")
        }
        Action::NewAuthority(reason) => {
            material::new_authority(data, now, policy.ca_lifetime, true)?;
            format!("created a new authority for the webhook, in addition to the old one: {reason}")
        }
        Action::NewLeaf(reason) => {
            material::new_leaf(data, now, policy.leaf_lifetime, names)?;
            format!("created a new certificate for the webhook: {reason}")
        }
        Action::ForgetPrevious => {
            data.remove(super::keys::PREVIOUS_AUTHORITY);
            "removed the webhook's old authority".to_owned()
        }
        Action::Wait | Action::Refuse | Action::Publish => String::new(),
    })
}

#[cfg(test)]
mod tests;
