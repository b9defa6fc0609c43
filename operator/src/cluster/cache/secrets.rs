//! Changes of the Secrets that users create and Providers name.
//!
//! One watch for all of them, of metadata only and without a store: the operator reads a Secret by its name when a
//! Provider needs it, and keeps none in memory. Helm stores each revision of each release in a Secret, which can be
//! most of a cluster's Secrets, so these are left out.

use std::sync::Arc;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::Store;
use kube::runtime::watcher::{Config, Event};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};

use super::{Caches, Triggers};
use crate::crd::{Provider, WorkerPool};

const FIELDS: &str = "type!=helm.sh/release.v1";

/// Triggers the Providers that name a changed Secret, and their pools.
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
        // Workers get the authority of the relays' certificate.
        let uses = |pool: &Arc<WorkerPool>| {
            provider.spec.relay.tls.is_some()
                && pool.spec.provider == name
                && pool.metadata.namespace.as_deref() == Some(&*namespace)
        };
        for pool in pools.state().iter().filter(|pool| uses(pool)) {
            triggers.pool(&namespace, &pool.name_any());
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

    fn provider(name: &str, spec: &Value) -> Provider {
        let metadata = json!({"name": name, "namespace": "llm"});
        let object =
            json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "metadata": metadata, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    fn pool(name: &str, provider: &str) -> WorkerPool {
        let (metadata, spec) = (json!({"name": name, "namespace": "llm"}), json!({"provider": provider}));
        let object =
            json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool", "metadata": metadata, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn changed_secret_triggers_providers_that_name_it() {
        let (providers, mut writer) = reflector::store();
        let (pools, mut pools_writer) = reflector::store();
        for provider in [
            provider("plain", &json!({})),
            provider("worker", &json!({"workerSecretRef": {"name": "own", "key": "a"}})),
            provider("admin", &json!({"relay": {"adminTokenSecretRef": {"name": "own", "key": "a"}}})),
            provider("tls", &json!({"relay": {"tls": {"secretName": "cert"}}})),
        ] {
            writer.apply_watcher_event(&Event::Apply(provider));
        }
        for pool in [pool("p1", "tls"), pool("p2", "worker")] {
            pools_writer.apply_watcher_event(&Event::Apply(pool));
        }
        let triggered = |concerned: &dyn Fn(&Provider) -> bool| {
            let (triggers, mut requests) = Triggers::channels();
            trigger(&triggers, &providers, &pools, concerned);
            let mut all: Vec<String> =
                std::iter::from_fn(|| requests.providers.try_recv().ok()).map(|it| it.name).collect();
            all.extend(std::iter::from_fn(|| requests.pools.try_recv().ok()).map(|it| it.name));
            all.sort();
            all.join(" ")
        };
        assert_eq!(triggered(&|provider| names(provider, "own")), "admin worker");
        assert_eq!(triggered(&|provider| names(provider, "cert")), "p1 tls");
        assert_eq!(triggered(&|provider| names(provider, "other")), "");
        assert_eq!(triggered(&names_any), "admin p1 tls worker");
    }
}
