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
use crate::crd::WorkerPool;
use crate::manifests::backend::RENDERED_ANNOTATION;
use crate::manifests::worker_config::RelayTransport;
use crate::relays::tls;
use crate::resources::conditions::READY;
use crate::resources::names;
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

/// Returns the transport between the pool's workers and their relays. While the Provider does not exist, or no relay
/// can serve with its Secret, relays and workers keep their transport.
pub async fn relay_transport(
    client: &Client,
    caches: &Caches,
    pool: &WorkerPool,
) -> Result<RelayTransport, PoolFetchError> {
    let namespace = pool.namespace().unwrap_or_default();
    let provider = caches.providers.get(&ObjectRef::new(&pool.spec.provider).within(&namespace));
    if let Some(provider) = provider {
        let Some(tls) = &provider.spec.relay.tls else { return Ok(RelayTransport::Plain) };
        let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
        let host = names::worker_host(&pool.spec.provider, &namespace);
        let secret = read(&secrets, "Secret", &tls.secret_name).await?;
        if let Some(Ok(tls)) = secret.map(|secret| tls::judge(&secret, &host)) {
            return Ok(RelayTransport::Tls { authority: tls.authority });
        }
    }
    let config_maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let there = read(&config_maps, "ConfigMap", &names::worker(&pool.name_any())).await?;
    Ok(there.as_ref().map(RelayTransport::of).unwrap_or_default())
}

/// Returns the name of the Secret with the relays' certificate, if they should have one.
pub fn tls_secret(caches: &Caches, pool: &WorkerPool) -> Option<String> {
    let name = ObjectRef::new(&pool.spec.provider).within(&pool.namespace().unwrap_or_default());
    caches.providers.get(&name)?.spec.relay.tls.as_ref().map(|tls| tls.secret_name.clone())
}

/// Returns the state of the Provider.
pub fn provider(caches: &Caches, pool: &WorkerPool) -> ProviderState {
    let name = ObjectRef::new(&pool.spec.provider).within(&pool.namespace().unwrap_or_default());
    match caches.providers.get(&name) {
        Some(provider) if provider.spec.enabled => ProviderState::Present,
        Some(_) => ProviderState::Disabled,
        None => ProviderState::Missing,
    }
}

/// Returns why the Provider is not ready, shortened: it may be the reason that there are no relays.
pub fn provider_problem(caches: &Caches, pool: &WorkerPool) -> Option<String> {
    const SHOWN_CHARS: usize = 300;
    let name = ObjectRef::new(&pool.spec.provider).within(&pool.namespace().unwrap_or_default());
    let provider = caches.providers.get(&name)?;
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
