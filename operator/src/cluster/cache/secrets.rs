//! Changes of the Secrets that users create and Providers name.
//!
//! One watch for all of them, of metadata only and without a store: the operator reads a Secret by its name when a
//! Provider needs it, and keeps none in memory. Helm stores each revision of each release in a Secret, which can be
//! most of a cluster's Secrets, so these are left out.

use std::collections::HashSet;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::Store;
use kube::runtime::watcher::{Config, Event};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};

use super::{Caches, Triggers};
use crate::crd::{Provider, WorkerPool};
use crate::resources::names::ObjectKey;
use crate::spec::sharing;

const FIELDS: &str = "type!=helm.sh/release.v1";

/// Triggers the Providers that name a changed Secret, and the pools whose workers trust it. A Provider that another
/// one's relay serves passes its new worker secret on to that one with its own pass.
pub(super) async fn follow(api: Api<PartialObjectMeta<Secret>>, caches: Caches) {
    let Caches { providers, pools, triggers, .. } = caches;
    let mut stream = std::pin::pin!(watcher(api, Config::default().fields(FIELDS)).default_backoff());
    while let Some(event) = stream.next().await {
        match event {
            Ok(Event::Apply(secret) | Event::Delete(secret)) => {
                let (namespace, name) = (secret.namespace().unwrap_or_default(), secret.name_any());
                let concerned = |provider: &Provider| {
                    provider.namespace().as_deref() == Some(&*namespace) && names(provider, &name)
                };
                trigger(&triggers, &providers, &pools, concerned);
            }
            // Any of them may have changed, or may be gone, while the watch was broken. A Provider that appears later
            // reads its Secrets anyway.
            Ok(Event::InitDone) => trigger(&triggers, &providers, &pools, names_any),
            Ok(Event::Init | Event::InitApply(_)) => {}
            Err(error) => tracing::warn!(kind = "Secret", %error, "watch failed; retrying"),
        }
    }
}

fn trigger(
    triggers: &Triggers,
    providers: &Store<Provider>,
    pools: &Store<WorkerPool>,
    concerned: impl Fn(&Provider) -> bool,
) {
    let providers = providers.state();
    for provider in providers.iter().filter(|provider| concerned(provider)) {
        let (namespace, name) = (provider.namespace().unwrap_or_default(), provider.name_any());
        triggers.provider(&namespace, &name);
        if provider.spec.relay.tls.is_none() {
            continue;
        }
        // Workers get the authority of the relays' certificate, also those of other Providers that the relays serve.
        let served: HashSet<ObjectKey> = sharing::sharers(provider, &providers)
            .iter()
            .map(|sharer| sharing::key(sharer))
            .chain([(namespace, name)])
            .collect();
        for pool in pools.state() {
            let namespace = pool.namespace().unwrap_or_default();
            if served.contains(&(namespace.clone(), pool.spec.provider.clone())) {
                triggers.pool(&namespace, &pool.name_any());
            }
        }
    }
}

fn names(provider: &Provider, secret: &str) -> bool {
    named(provider).any(|name| name == secret)
}

fn names_any(provider: &Provider) -> bool {
    named(provider).next().is_some()
}

/// Returns the names of the user's Secrets that the Provider depends on.
fn named(provider: &Provider) -> impl Iterator<Item = &str> {
    let relay = &provider.spec.relay;
    let references = [&provider.spec.worker_secret_ref, &relay.admin_token_secret_ref];
    let certificate = relay.tls.as_ref().map(|tls| tls.secret_name.as_str());
    references.into_iter().flatten().map(|reference| reference.name.as_str()).chain(certificate)
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector;
    use serde_json::{Value, json};

    use super::*;
    use crate::manifests::testing;

    fn provider(name: &str, spec: &Value) -> Provider {
        testing::provider("llm", name, spec)
    }

    fn pool(name: &str, provider: &str) -> WorkerPool {
        pool_in("llm", name, provider)
    }

    fn pool_in(namespace: &str, name: &str, provider: &str) -> WorkerPool {
        let (metadata, spec) = (json!({"name": name, "namespace": namespace}), json!({"provider": provider}));
        let object =
            json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool", "metadata": metadata, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    /// Returns the names of the Providers and pools that are triggered.
    fn triggered(all: &[Provider], of_pools: &[WorkerPool], concerned: impl Fn(&Provider) -> bool) -> String {
        let (providers, mut writer) = reflector::store();
        let (pools, mut pools_writer) = reflector::store();
        all.iter().for_each(|provider| writer.apply_watcher_event(&Event::Apply(provider.clone())));
        of_pools.iter().for_each(|pool| pools_writer.apply_watcher_event(&Event::Apply(pool.clone())));
        let (triggers, mut requests) = Triggers::channels();
        trigger(&triggers, &providers, &pools, concerned);
        let mut all: Vec<String> =
            std::iter::from_fn(|| requests.providers.try_recv().ok()).map(|it| it.name).collect();
        all.extend(std::iter::from_fn(|| requests.pools.try_recv().ok()).map(|it| it.name));
        all.sort();
        all.join(" ")
    }

    #[test]
    fn changed_secret_triggers_providers_that_name_it() {
        let providers = [
            provider("plain", &json!({})),
            provider("worker", &json!({"workerSecretRef": {"name": "own", "key": "a"}})),
            provider("admin", &json!({"relay": {"adminTokenSecretRef": {"name": "own", "key": "a"}}})),
            provider("tls", &json!({"relay": {"tls": {"secretName": "cert"}}})),
        ];
        let pools = [pool("p1", "tls"), pool("p2", "worker")];
        let of = |secret: &str| triggered(&providers, &pools, |provider| names(provider, secret));
        assert_eq!(of("own"), "admin worker");
        assert_eq!(of("cert"), "p1 tls");
        assert_eq!(of("other"), "");
        assert_eq!(triggered(&providers, &pools, names_any), "admin p1 tls worker");
    }

    #[test]
    fn changed_certificate_triggers_pools_of_shared_relay() {
        let guest = json!({"relayRef": {"name": "front", "namespace": "llm"}});
        let shared_with = json!([{"namespace": "research"}]);
        let providers = [
            provider("front", &json!({"relay": {"tls": {"secretName": "cert"}, "sharedWith": shared_with}})),
            provider("near", &guest),
            testing::provider("research", "far", &guest),
            testing::provider("elsewhere", "refused", &guest),
        ];
        let pools = [
            pool("p1", "front"),
            pool("p2", "near"),
            pool_in("research", "p3", "far"),
            pool_in("research", "p4", "front"),
            pool_in("elsewhere", "p5", "refused"),
        ];
        assert_eq!(triggered(&providers, &pools, |provider| names(provider, "cert")), "front p1 p2 p3");
    }
}
