//! The watches, their in-memory stores, and the reconciliations that a change triggers.
//!
//! Each kind is watched once per span and shared by both controllers. Objects are trimmed before they are stored, so
//! that a thousand Pods cost little more than their names. A broken watch is restarted with a back-off, and the store
//! keeps its contents.

use std::fmt::Debug;
use std::sync::Arc;

use futures_util::{Stream, StreamExt, future};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, ContainerStatus, EnvVar, Pod, PodStatus, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{Config, Event};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::context::Span;
use crate::crd::{Provider, WorkerPool};
use crate::resources::names::{self, TLS_ENV};
use crate::spec::sharing::{self, SharingError};

mod changes;
mod secrets;
mod triggers;
mod unreadable;

use changes::{pool_changes, provider_changes, relay_pod_changes};
pub use triggers::{Changes, ObjectChange, Requests, Triggers};
pub use unreadable::UnreadableObjects;

/// The stores that both controllers read.
#[derive(Clone)]
pub struct Caches {
    /// All Providers of the span.
    pub providers: Store<Provider>,
    /// Providers that exist and cannot be parsed.
    pub unreadable_providers: UnreadableObjects,
    /// All WorkerPools of the span.
    pub pools: Store<WorkerPool>,
    /// Relay Pods.
    pub relay_pods: Store<Pod>,
    /// Pods that carry the label of a pool, injected or not.
    pub pool_pods: Store<Pod>,
    /// Deployments that the operator created.
    pub deployments: Store<Deployment>,
    /// DaemonSets that the operator created.
    pub daemon_sets: Store<DaemonSet>,
    /// Requests reconciliations.
    pub triggers: Triggers,
}

/// Starts every watch of a span. The watches end when the returned future is dropped.
pub fn start(client: &Client, span: &Span) -> (Caches, Requests, impl Future<Output = ()> + Send + use<>) {
    let (triggers, requests) = Triggers::channels();
    let (providers, providers_writer) = reflector::store();
    let (pools, pools_writer) = reflector::store();
    let (relay_pods, relay_pods_writer) = reflector::store();
    let (pool_pods, pool_pods_writer) = reflector::store();
    let (deployments, deployments_writer) = reflector::store();
    let (daemon_sets, daemon_sets_writer) = reflector::store();
    let unreadable_providers = UnreadableObjects::default();
    let caches = Caches {
        providers,
        unreadable_providers: unreadable_providers.clone(),
        pools,
        relay_pods,
        pool_pods,
        deployments,
        daemon_sets,
        triggers: triggers.clone(),
    };

    let ours = format!("app.kubernetes.io/managed-by={}", names::MANAGED_BY);
    let relays = format!("{ours},app.kubernetes.io/component=relay");
    let watches: Vec<future::BoxFuture<'static, ()>> = vec![
        Box::pin(keep_readable(
            span.api(client),
            providers_writer,
            unreadable_providers,
            provider_changes(&triggers, caches.providers.clone()),
        )),
        Box::pin(keep_readable(
            span.api(client),
            pools_writer,
            UnreadableObjects::default(),
            pool_changes(&triggers, &caches),
        )),
        Box::pin(keep(span.api(client), relays, relay_pods_writer, trim_pod, relay_pod_changes(&triggers, &caches))),
        Box::pin(keep(span.api(client), names::POOL_LABEL.into(), pool_pods_writer, trim_pod, pods(&triggers))),
        Box::pin(keep(span.api(client), ours.clone(), deployments_writer, |_| {}, objects(&triggers))),
        Box::pin(keep(span.api(client), ours.clone(), daemon_sets_writer, |_| {}, objects(&triggers))),
        Box::pin(count_changes(span.api(client), triggers.clone())),
        Box::pin(secrets::follow(span.api(client), caches.clone())),
        Box::pin(notice::<Service>(span.api(client), ours.clone(), &triggers)),
        Box::pin(notice::<ServiceAccount>(span.api(client), ours.clone(), &triggers)),
        Box::pin(notice::<Secret>(span.api(client), ours.clone(), &triggers)),
        Box::pin(notice::<ConfigMap>(span.api(client), ours.clone(), &triggers)),
        Box::pin(notice::<Role>(span.api(client), ours.clone(), &triggers)),
        Box::pin(notice::<RoleBinding>(span.api(client), ours.clone(), &triggers)),
        Box::pin(notice::<PodDisruptionBudget>(span.api(client), ours.clone(), &triggers)),
        Box::pin(notice::<NetworkPolicy>(span.api(client), ours, &triggers)),
    ];
    (caches, requests, async move {
        future::join_all(watches).await;
    })
}

impl Caches {
    /// Waits until every store was filled once. Before that, the absence of an object means nothing.
    pub async fn ready(&self) {
        // This fails only when the watches have ended, and then the process ends too.
        let _ = self.providers.wait_until_ready().await;
        let _ = self.pools.wait_until_ready().await;
        let _ = self.relay_pods.wait_until_ready().await;
        let _ = self.pool_pods.wait_until_ready().await;
        let _ = self.deployments.wait_until_ready().await;
        let _ = self.daemon_sets.wait_until_ready().await;
    }

    /// Returns caches that no watch fills.
    #[cfg(test)]
    pub(crate) fn empty(triggers: Triggers) -> Self {
        Self {
            providers: reflector::store().0,
            unreadable_providers: UnreadableObjects::default(),
            pools: reflector::store().0,
            relay_pods: reflector::store().0,
            pool_pods: reflector::store().0,
            deployments: reflector::store().0,
            daemon_sets: reflector::store().0,
            triggers,
        }
    }

    /// Returns the Provider whose relay serves this one, if it is another one, or the reason that none does.
    pub fn relay_of(&self, provider: &Provider) -> Result<Option<Arc<Provider>>, SharingError> {
        if provider.spec.relay_ref.is_none() {
            return Ok(None);
        }
        let (namespace, name) = sharing::relay_key(provider);
        let owner = self.providers.get(&ObjectRef::new(&name).within(&namespace));
        sharing::check(provider, owner.as_deref())?;
        let sharers = owner.as_deref().map(|owner| self.sharers(owner)).unwrap_or_default();
        let is_served = sharers.iter().any(|other| sharing::key(other) == sharing::key(provider));
        if is_served { Ok(owner) } else { Err(SharingError::Full(namespace, name)) }
    }

    /// Returns the Deployment of a Provider's own relays.
    pub fn relay_deployment(&self, provider: &Provider) -> Option<Arc<Deployment>> {
        let (namespace, name) = sharing::key(provider);
        self.deployments.get(&ObjectRef::new(&names::relay(&name)).within(&namespace))
    }

    /// True if a Provider that refers to another one is still served by relays of its own.
    pub fn is_at_own_relay(&self, provider: &Provider) -> bool {
        sharing::is_at_own_relay(provider, self.relay_deployment(provider).as_deref())
    }

    /// Returns the other Providers that a Provider's relay serves.
    pub fn sharers(&self, owner: &Provider) -> Vec<Arc<Provider>> {
        sharing::sharers(owner, &self.providers.state())
    }

    /// Returns the pools of a Provider.
    pub fn pools_of(&self, namespace: &str, provider: &str) -> Vec<Arc<WorkerPool>> {
        let of = |pool: &Arc<WorkerPool>| {
            pool.spec.provider == provider && pool.metadata.namespace.as_deref() == Some(namespace)
        };
        self.pools.state().into_iter().filter(of).collect()
    }
}

/// The state of a changed object. An object without finalizers disappears without ever being marked as deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Now {
    There,
    Gone,
}

fn objects<K: Resource<DynamicType = ()>>(triggers: &Triggers) -> impl FnMut(&K, Now) + Send + use<K> {
    let triggers = triggers.clone();
    move |object, now| triggers.object(object, now)
}

fn pods(triggers: &Triggers) -> impl FnMut(&Pod, Now) + Send + use<> {
    let triggers = triggers.clone();
    move |pod, _| triggers.pod(pod)
}

/// Watches a kind, stores its objects, and reports every change.
async fn keep<K>(
    api: Api<K>,
    selector: String,
    writer: reflector::store::Writer<K>,
    trim: impl Fn(&mut K) + Send + 'static,
    changed: impl FnMut(&K, Now) + Send + 'static,
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + Sync
        + 'static,
{
    let store = writer.as_reader();
    let stream = watcher(api, Config::default().labels(&selector))
        .default_backoff()
        .modify(move |object| {
            object.managed_fields_mut().clear();
            trim(object);
        })
        .reflect(writer);
    notify(stream, &store, changed).await;
}

/// Watches a kind that users write, and stores the objects that can be parsed. An object that cannot be parsed must not
/// block all others.
async fn keep_readable<K>(
    api: Api<DeserializeGuard<K>>,
    writer: reflector::store::Writer<K>,
    unreadable: UnreadableObjects,
    changed: impl FnMut(&K, Now) + Send + 'static,
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + Sync
        + 'static,
{
    let (store, known) = (writer.as_reader(), writer.as_reader());
    let stream = watcher(api, Config::default())
        .default_backoff()
        .filter_map(move |event| future::ready(event.map(|event| readable(event, &known, &unreadable)).transpose()))
        .modify(|object| object.managed_fields_mut().clear())
        .reflect(writer);
    notify(stream, &store, changed).await;
}

/// Returns the event without its guard, or `None` if the object cannot be parsed. An object that could be parsed before
/// keeps its previous state, and can still be deleted.
fn readable<K>(event: Event<DeserializeGuard<K>>, known: &Store<K>, unreadable: &UnreadableObjects) -> Option<Event<K>>
where
    K: Resource<DynamicType = ()> + Clone,
{
    let before = |object: &DeserializeGuard<K>| {
        let mut reference = ObjectRef::new(&object.name_any());
        reference.namespace = object.namespace();
        known.get(&reference).map(|object| K::clone(&object))
    };
    let read = |object: DeserializeGuard<K>| {
        let before = before(&object);
        unreadable.note(&object, object.0.is_ok());
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        object.0.map_or_else(
            |error| {
                let kind = K::kind(&());
                tracing::warn!(%kind, namespace, name, %error, "failed to parse an object; ignoring it until it is corrected");
                before
            },
            Some,
        )
    };
    Some(match event {
        Event::Apply(object) => Event::Apply(read(object)?),
        Event::InitApply(object) => Event::InitApply(read(object)?),
        Event::Delete(object) => {
            let before = before(&object);
            unreadable.note(&object, true);
            Event::Delete(object.0.ok().or(before)?)
        }
        Event::Init => {
            unreadable.begin_list();
            Event::Init
        }
        Event::InitDone => {
            unreadable.end_list();
            Event::InitDone
        }
    })
}

/// Reports every change that a watch delivers, and the objects that were deleted while it was broken, which the new
/// list does not contain.
async fn notify<K>(
    stream: impl Stream<Item = Result<Event<K>, watcher::Error>>,
    store: &Store<K>,
    mut changed: impl FnMut(&K, Now),
) where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    let mut before = Vec::new();
    let mut stream = std::pin::pin!(stream);
    while let Some(event) = stream.next().await {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => changed(&object, Now::There),
            Ok(Event::Delete(object)) => changed(&object, Now::Gone),
            // The store changes only at the end of the new list.
            Ok(Event::Init) => before = store.state(),
            Ok(Event::InitDone) => {
                for object in triggers::vanished(&std::mem::take(&mut before), &store.state()) {
                    changed(&object, Now::Gone);
                }
            }
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch failed; retrying"),
        }
    }
}

/// Watches only the metadata of a kind whose content is never read. Any external change is reverted.
fn notice<K>(
    api: Api<PartialObjectMeta<K>>,
    selector: String,
    triggers: &Triggers,
) -> impl Future<Output = ()> + Send + use<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + Sync
        + 'static,
{
    let (_, writer) = reflector::store();
    keep(api, selector, writer, |object| object.annotations_mut().clear(), objects(triggers))
}

/// Counts the changes of all Deployments, without storing any: those of other owners are read only after a change.
async fn count_changes(api: Api<PartialObjectMeta<Deployment>>, triggers: Triggers) {
    let mut stream = std::pin::pin!(watcher(api, Config::default()).default_backoff());
    while let Some(event) = stream.next().await {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object) | Event::Delete(object)) => {
                triggers.deployment_changed(object.namespace().unwrap_or_default());
            }
            Ok(Event::Init | Event::InitDone) => {}
            Err(error) => tracing::warn!(kind = "Deployment", %error, "watch failed; retrying"),
        }
    }
}

/// Keeps the parts of a Pod that the controllers read: names, labels, annotations, owners, container names, and the
/// state of the Pod and its relay.
fn trim_pod(pod: &mut Pod) {
    if let Some(spec) = &mut pod.spec {
        spec.volumes = None;
        spec.affinity = None;
        spec.tolerations = None;
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            let is_worker = container.name == names::WORKER_CONTAINER;
            container.env_from = None;
            container.args = None;
            container.command = None;
            container.volume_mounts = None;
            container.liveness_probe = None;
            container.readiness_probe = None;
            container.startup_probe = None;
            container.security_context = None;
            if !is_worker {
                // Of a relay, only whether it uses TLS is read.
                let tls = |env: Vec<EnvVar>| env.into_iter().find(|variable| variable.name == TLS_ENV);
                let is_relay = container.name == names::RELAY_CONTAINER;
                container.env = container.env.take().filter(|_| is_relay).and_then(tls).map(|tls| vec![tls]);
                container.resources = None;
                container.ports = None;
                container.image = None;
                container.lifecycle = None;
            }
        }
    }
    if let Some(status) = &mut pod.status {
        status.init_container_statuses = None;
        status.container_statuses = relay_state(status);
    }
}

/// Returns the relay container's state: whether it runs, and if not, why. Nothing else of the container statuses is
/// read.
fn relay_state(status: &PodStatus) -> Option<Vec<ContainerStatus>> {
    let relay = status.container_statuses.iter().flatten().find(|one| one.name == names::RELAY_CONTAINER)?;
    let mut state = relay.state.clone();
    if let Some(waiting) = state.as_mut().and_then(|state| state.waiting.as_mut()) {
        waiting.message = None;
    }
    Some(vec![ContainerStatus { name: relay.name.clone(), state, ..ContainerStatus::default() }])
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(name: &str) -> Service {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "llm"}})).unwrap()
    }

    #[tokio::test]
    async fn deletion_during_broken_watch_is_reported_after_relist() {
        let (store, writer) = reflector::store();
        let list = |names: &[&str]| {
            let objects = names.iter().map(|name| Event::InitApply(service(name)));
            std::iter::once(Event::Init).chain(objects).chain([Event::InitDone]).map(Ok).collect::<Vec<_>>()
        };
        let events = [list(&["a", "b", "c"]), vec![Ok(Event::Delete(service("a")))], list(&["c", "d"])];
        let mut told = Vec::new();
        let stream = futures_util::stream::iter(events.into_iter().flatten()).reflect(writer);
        notify(stream, &store, |object: &Service, now| told.push((object.name_any(), now))).await;
        let expected = [
            ("a", Now::There),
            ("b", Now::There),
            ("c", Now::There),
            ("a", Now::Gone),
            ("c", Now::There),
            ("d", Now::There),
            ("b", Now::Gone),
        ];
        assert_eq!(told, expected.map(|(name, now)| (name.to_owned(), now)));
    }

    fn guarded(name: &str, spec: &Value) -> DeserializeGuard<Provider> {
        let object = json!({
            "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
            "metadata": {"name": name, "namespace": "llm"}, "spec": spec,
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn unreadable_object_does_not_block_others() {
        let (store, mut writer) = reflector::store::<Provider>();
        let unreadable = UnreadableObjects::default();
        let names_of = |unreadable: &UnreadableObjects| {
            unreadable.all().into_iter().map(|(_, name)| name).collect::<Vec<String>>().join(" ")
        };
        let mut see = |event| {
            let event = readable(event, &store, &unreadable);
            event.iter().for_each(|event| writer.apply_watcher_event(event));
            let mut names: Vec<String> = store.state().iter().map(|provider| provider.name_any()).collect();
            names.sort();
            names.join(" ")
        };
        let odd = json!({"queue": 7});
        see(Event::Init);
        see(Event::InitApply(guarded("never", &odd)));
        see(Event::InitApply(guarded("good", &json!({}))));
        assert_eq!(see(Event::InitDone), "good");
        assert_eq!(names_of(&unreadable), "never");
        assert_eq!(see(Event::Apply(guarded("other", &json!({})))), "good other");
        // The object keeps the state that was last parsed, also across a new list, until it is deleted.
        assert_eq!(see(Event::Apply(guarded("good", &odd))), "good other");
        see(Event::Init);
        see(Event::InitApply(guarded("good", &odd)));
        assert_eq!(see(Event::InitDone), "good");
        assert_eq!(names_of(&unreadable), "good", "the list no longer contains the other");
        assert_eq!(see(Event::Delete(guarded("never", &odd))), "good");
        assert_eq!(see(Event::Delete(guarded("good", &odd))), "");
        assert_eq!(names_of(&unreadable), "");
    }

    #[test]
    fn pod_trimming_keeps_only_relay_container_state() {
        let status = |name: &str, state: &Value| json!({"name": name, "state": state, "ready": true, "restartCount": 3, "image": "i", "imageID": "d"});
        let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image i"}});
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "status": {"containerStatuses": [status("proxy", &json!({"running": {}})), status("relay", &waiting)]},
        }))
        .unwrap();
        trim_pod(&mut pod);
        let kept = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
        assert_eq!(kept.len(), 1);
        assert_eq!((kept[0].name.as_str(), kept[0].image.as_str(), kept[0].restart_count), ("relay", "", 0));
        assert_eq!(serde_json::to_value(&kept[0].state).unwrap(), json!({"waiting": {"reason": "ImagePullBackOff"}}));
    }

    #[test]
    fn pod_trimming_keeps_only_relay_tls_environment() {
        let env = json!([{"name": "A", "value": "b"}, {"name": "TLS_CERT_FILE", "value": "/f"}]);
        let containers = json!([{"name": "proxy", "env": env}, {"name": "relay", "env": env}]);
        let mut pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": containers}})).unwrap();
        trim_pod(&mut pod);
        let kept = serde_json::to_value(pod.spec.unwrap().containers).unwrap();
        assert_eq!(
            kept,
            json!([{"name": "proxy"}, {"name": "relay", "env": [{"name": "TLS_CERT_FILE", "value": "/f"}]}])
        );
    }
}
