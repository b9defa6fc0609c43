//! Reads everything that a reconciliation of a pool depends on.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{Api, DynamicObject, ListParams};
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::PoolContext;
use super::render::Live;
use super::rollout;
use super::status::ProviderState;
use crate::cluster::apply;
use crate::cluster::cache::Caches;
use crate::crd::{Provider, WorkerPool};
use crate::manifests::backend::RENDERED_ANNOTATION;
use crate::manifests::worker_config::{RelayTarget, RelayTransport};
use crate::relays::tls;
use crate::resources::conditions::READY;
use crate::resources::names;
use crate::spec::sharing;
use crate::spec::workload::Workload;

/// The maximum number of Deployments of a namespace that are searched.
const DEPLOYMENTS: u32 = 500;

/// The reason that an object cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PoolFetchError {
    /// A required object could not be read.
    #[error("{object}: {source}")]
    Object {
        /// Kind and name.
        object: String,
        /// The underlying error.
        source: Box<kube::Error>,
    },
}

impl PoolFetchError {
    /// True if the API server denies access.
    pub fn is_forbidden(&self) -> bool {
        let Self::Object { source, .. } = self;
        apply::is_forbidden(source)
    }
}

/// Returns the Deployment or DaemonSet from the API server, not from a cache: a drain token or number of replicas that
/// a cache does not show yet would be replaced by a new one.
pub async fn workload(
    client: &Client,
    pool: &WorkerPool,
    workload: Workload,
) -> Result<Option<DynamicObject>, PoolFetchError> {
    let name = workload.name(&pool.name_any());
    let resource = workload.resource();
    let api: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), &pool.namespace().unwrap_or_default(), &resource);
    read(&api, &resource.kind, &name).await
}

async fn read<K>(api: &Api<K>, kind: &str, name: &str) -> Result<Option<K>, PoolFetchError>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let fail = |source| PoolFetchError::Object { object: format!("{kind} {name}"), source: Box::new(source) };
    api.get_opt(name).await.map_err(fail)
}

/// Returns the relays of the pool's workers. While the Provider does not exist, or no relay can serve with its Secret,
/// relays and workers keep their transport.
pub async fn relay_target(client: &Client, caches: &Caches, pool: &WorkerPool) -> Result<RelayTarget, PoolFetchError> {
    let RelayName { namespace, name, provider } = relay_name(caches, pool);
    let transport = relay_transport(client, caches, pool).await?;
    Ok(RelayTarget { address: names::worker_address(&name, &namespace), provider, transport })
}

/// The relay of a pool's Provider.
#[derive(Hash)]
pub struct RelayName {
    /// Namespace of the Provider that owns the relay.
    pub namespace: String,
    /// Name of that Provider.
    pub name: String,
    /// Name of the pool's Provider there.
    pub provider: String,
}

/// Returns the relay of the pool's Provider: its own, or the one that it refers to, whether that serves it or not.
pub fn relay_name(caches: &Caches, pool: &WorkerPool) -> RelayName {
    match provider_with_relay(caches, pool) {
        Some(provider) => {
            let (namespace, name) = sharing::relay_key(&provider);
            RelayName { namespace, name, provider: sharing::name_at_relay(&provider) }
        }
        None => {
            let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.spec.provider.clone());
            RelayName { namespace, provider: name.clone(), name }
        }
    }
}

pub(super) fn provider_of(caches: &Caches, pool: &WorkerPool) -> Option<Arc<Provider>> {
    caches.providers.get(&ObjectRef::new(&pool.spec.provider).within(&pool.namespace().unwrap_or_default()))
}

/// Returns the Provider whose spec names the relay of the pool; `None` also if that is still a relay of its own, from
/// before the Provider referred to another one: its name and transport stay.
fn provider_with_relay(caches: &Caches, pool: &WorkerPool) -> Option<Arc<Provider>> {
    provider_of(caches, pool).filter(|provider| !caches.is_at_own_relay(provider))
}

async fn relay_transport(
    client: &Client,
    caches: &Caches,
    pool: &WorkerPool,
) -> Result<RelayTransport, PoolFetchError> {
    let provider = provider_with_relay(caches, pool);
    // Without a grant, nothing of the other namespace is read. Workers keep what they had.
    let owner = provider.and_then(|provider| Some(caches.relay_of(&provider).ok()?.unwrap_or(provider)));
    if let Some(owner) = owner {
        let Some(tls) = &owner.spec.relay.tls else { return Ok(RelayTransport::Plain) };
        let (namespace, name) = sharing::key(&owner);
        let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
        let host = names::worker_host(&name, &namespace);
        let secret = read(&secrets, "Secret", &tls.secret_name).await?;
        if let Some(Ok(tls)) = secret.map(|secret| tls::judge(&secret, &host)) {
            return Ok(RelayTransport::Tls { authority: tls.authority });
        }
    }
    let config_maps: Api<ConfigMap> = Api::namespaced(client.clone(), &pool.namespace().unwrap_or_default());
    let there = read(&config_maps, "ConfigMap", &names::worker(&pool.name_any())).await?;
    match there.as_ref().map(RelayTransport::of).unwrap_or_default() {
        // A worker must not send its secret to a relay with a certificate unencrypted, even if that would not admit it.
        RelayTransport::Plain if refuses_and_has_tls(caches, pool) => Ok(RelayTransport::Tls { authority: None }),
        transport @ (RelayTransport::Plain | RelayTransport::Tls { .. }) => Ok(transport),
    }
}

/// True if the pool's Provider refers to another one that does not serve it and has a certificate.
fn refuses_and_has_tls(caches: &Caches, pool: &WorkerPool) -> bool {
    let Some(provider) = provider_with_relay(caches, pool) else { return false };
    let (namespace, name) = sharing::relay_key(&provider);
    let owner = caches.providers.get(&ObjectRef::new(&name).within(&namespace));
    caches.relay_of(&provider).is_err() && owner.is_some_and(|owner| owner.spec.relay.tls.is_some())
}

/// Returns the name of the Secret with the relays' certificate, if they should have one.
pub fn tls_secret(caches: &Caches, pool: &WorkerPool) -> Option<String> {
    let provider = provider_of(caches, pool)?;
    let owner = caches.relay_of(&provider).ok()?.unwrap_or(provider);
    owner.spec.relay.tls.as_ref().map(|tls| tls.secret_name.clone())
}

/// Returns the state of the Provider.
pub fn provider(caches: &Caches, pool: &WorkerPool) -> ProviderState {
    match provider_of(caches, pool) {
        Some(provider) if provider.spec.enabled => ProviderState::Present,
        Some(_) => ProviderState::Disabled,
        None => ProviderState::Missing,
    }
}

/// Returns why the Provider is not ready, shortened: it may be the reason that there are no relays.
pub fn provider_problem(caches: &Caches, pool: &WorkerPool) -> Option<String> {
    const SHOWN_CHARS: usize = 300;
    let provider = provider_of(caches, pool)?;
    let conditions = &provider.status.as_ref()?.conditions;
    let ready = conditions.iter().find(|condition| condition.type_ == READY && condition.status == "False")?;
    let shown: String = ready.message.chars().take(SHOWN_CHARS).collect();
    let more = if shown.len() < ready.message.len() { "…" } else { "" };
    Some(format!("{}: {shown}{more}", ready.reason))
}

/// Returns the reason that another owner's Deployment, whose Pods would carry the pool's label, cannot create them.
/// Such Deployments are read once for all pools of a namespace, and again after a change; other kinds do not report the
/// reason in their status. Returns `None` if they cannot be read.
pub async fn not_created(shared: &PoolContext, pool: &WorkerPool) -> Option<String> {
    let namespace = pool.namespace().unwrap_or_default();
    // Before the list, so that a change during it is not missed.
    let changes = shared.caches.triggers.deployment_changes(&namespace);
    let found = match shared.memory.failures(&namespace, changes) {
        Some(known) => known,
        None => {
            let found = Arc::new(pod_failures(&shared.ctx.client, &namespace).await?);
            shared.memory.store_failures(namespace, changes, found.clone());
            found
        }
    };
    found.get(&pool.name_any()).cloned()
}

async fn pod_failures(client: &Client, namespace: &str) -> Option<HashMap<String, String>> {
    let api: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let deployments = match api.list(&ListParams::default().limit(DEPLOYMENTS)).await {
        Ok(deployments) => deployments,
        Err(error) => {
            tracing::debug!(%error, "failed to list Deployments");
            return None;
        }
    };
    let failures = deployments.iter().filter_map(|deployment| {
        let template = deployment.spec.as_ref()?.template.metadata.as_ref()?;
        let pool = template.labels.as_ref()?.get(names::POOL_LABEL)?;
        let why = rollout::failure(&serde_json::to_value(deployment).ok()?)?;
        Some((pool.clone(), format!("Deployment {} cannot create its Pods: {why}", deployment.name_any())))
    });
    Some(failures.collect())
}

/// Returns the Pods that carry the pool's label.
pub fn pods(caches: &Caches, pool: &WorkerPool) -> Vec<Arc<Pod>> {
    let (namespace, name) = (pool.namespace(), pool.name_any());
    let of = |pod: &Arc<Pod>| {
        pod.metadata.namespace == namespace && pod.labels().get(names::POOL_LABEL).is_some_and(|label| *label == name)
    };
    caches.pool_pods.state().into_iter().filter(of).collect()
}

/// Returns the parts of the workload that the renderer needs.
pub fn live(workload: Option<&DynamicObject>) -> Live {
    let Some(object) = workload else { return Live::default() };
    Live {
        rendered: object.annotations().get(RENDERED_ANNOTATION).cloned(),
        template: object.data.pointer("/spec/template").cloned().unwrap_or_default(),
    }
}

/// Returns the workload's number of replicas.
pub fn replicas(workload: &DynamicObject) -> Option<i32> {
    workload.data.pointer("/spec/replicas").and_then(Value::as_i64).and_then(|number| i32::try_from(number).ok())
}
