//! Manages which relays have the right to have tokens of workers and tenants reviewed.
//!
//! TokenReviews belong to no namespace, so the right to create them is a ClusterRole's, and no object of a namespace
//! can own a binding to it. The chart creates both, the binding without subjects. The operator may change that one
//! binding, and keeps the relays of Providers that list ServiceAccounts or tenants in it. So it can neither create nor
//! delete cluster-wide bindings, and an attacker who takes over the operator can grant nothing but this right. Several
//! operators may share a cluster, each with its own binding.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, Subject};
use kube::api::{Api, Patch};
use kube::{Client, ResourceExt};
use serde_json::json;

use super::relay_pods::relay_pods;
use crate::cluster::apply::{ApplyError, patch_params};
use crate::cluster::cache::Caches;
use crate::cluster::follow::follow;
use crate::crd::Provider;
use crate::resources::names;
use crate::spec::sharing;

/// The number of lost races after which the change is left to the next pass.
const ATTEMPTS: usize = 4;

/// The reason that relays cannot review tokens.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReviewerError {
    /// The chart gave the operator no binding.
    #[error(
        "spec.workerServiceAccounts, spec.relay.tenants: this operator cannot grant relays the right to review tokens: install the \
         chart with rbac.workerTokens=true, which requires permission to create ClusterRoles, or remove the fields"
    )]
    NoBinding,
    /// The binding could not be changed.
    #[error("spec.workerServiceAccounts, spec.relay.tenants: {0}")]
    Binding(#[source] ApplyError),
}

/// The relays of a namespace that may have tokens reviewed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reviewers {
    /// Those that need the right.
    pub(super) needed: BTreeSet<String>,
    /// Those that keep it if they have it: their Provider refers to another one, and they still serve.
    pub(super) kept: BTreeSet<String>,
}

impl Reviewers {
    /// Returns the relays that should have the right, of which these have it.
    fn wanted(&self, namespace: &str, there: &[Subject]) -> BTreeSet<String> {
        let has_it =
            |relay: &&String| there.iter().any(|it| it.namespace.as_deref() == Some(namespace) && it.name == **relay);
        self.needed.iter().chain(self.kept.iter().filter(has_it)).cloned().collect()
    }
}

/// Returns the relays of a namespace that may have tokens reviewed. The relay of a Provider that is moving, or whose
/// move is refused, runs with the settings from before: those of its spec, such as tenants, may be gone.
pub(super) fn of(caches: &Caches, namespace: &str) -> Reviewers {
    let providers = caches.providers.state();
    let still_serves = |provider: &&Arc<Provider>| {
        let name = provider.name_any();
        let runs = |deployment: Arc<Deployment>| sharing::runs_relays(provider, &deployment);
        provider.metadata.namespace.as_deref() == Some(namespace)
            && provider.spec.relay_ref.is_some()
            && (caches.relay_deployment(provider).is_some_and(runs) || !relay_pods(caches, namespace, &name).is_empty())
    };
    Reviewers {
        needed: relays(&providers, namespace),
        kept: providers.iter().filter(still_serves).map(|provider| names::relay(&provider.name_any())).collect(),
    }
}

/// Returns the relays of a namespace that have tokens reviewed.
fn relays<P: AsRef<Provider> + Clone>(all: &[P], namespace: &str) -> BTreeSet<String> {
    let reviews = |provider: &&Provider| {
        provider.metadata.namespace.as_deref() == Some(namespace) && reviews_tokens(provider, all)
    };
    all.iter().map(AsRef::as_ref).filter(reviews).map(|provider| names::relay(&provider.name_any())).collect()
}

/// True if a Provider has a relay for workers or clients with tokens: it lists ServiceAccounts or tenants, or another
/// Provider that its relay serves lists ServiceAccounts.
fn reviews_tokens<P: AsRef<Provider> + Clone>(provider: &Provider, all: &[P]) -> bool {
    let lists =
        |sharer: &P| !sharer.as_ref().spec.worker_service_accounts.is_empty() && !sharing::awaits_move(sharer.as_ref());
    provider.metadata.deletion_timestamp.is_none()
        && provider.spec.relay_ref.is_none()
        && (provider.spec.reviews_tokens() || sharing::sharers(provider, all).iter().any(lists))
}

/// Watches the binding, and requests a pass of each Provider whose relay is not in it: someone else changed the
/// binding. Without a binding, there is nothing to watch. This never ends.
pub(super) async fn follow_binding(client: &Client, binding: Option<&str>, caches: &Caches) -> Infallible {
    let Some(name) = binding.filter(|name| !name.is_empty()) else { return std::future::pending().await };
    follow(&Api::<ClusterRoleBinding>::all(client.clone()), name, |binding| {
        let subjects = binding.and_then(|binding| binding.subjects).unwrap_or_default();
        for provider in without_right(&caches.providers.state(), &subjects) {
            caches.triggers.provider_reviewers(&provider.namespace().unwrap_or_default(), &provider.name_any());
        }
    })
    .await
}

/// Returns the Providers whose relay reviews tokens and is not among the subjects.
fn without_right<P: AsRef<Provider> + Clone>(all: &[P], subjects: &[Subject]) -> Vec<P> {
    let lacks = |provider: &&P| {
        let provider = provider.as_ref();
        let relay = names::relay(&provider.name_any());
        let is_bound = subjects.iter().any(|it| it.namespace == provider.metadata.namespace && it.name == relay);
        !is_bound && reviews_tokens(provider, all)
    };
    all.iter().filter(lacks).cloned().collect()
}

/// Returns the error of a Provider that another one's relay serves, if the relay cannot review its workers' tokens.
pub(super) fn missing(provider: &Provider, binding: Option<&str>) -> Option<ReviewerError> {
    let is_missing = binding.is_none_or(str::is_empty) && !provider.spec.worker_service_accounts.is_empty();
    is_missing.then_some(ReviewerError::NoBinding)
}

/// Allows exactly these relays of the namespace to create TokenReviews.
pub(super) async fn bind(
    client: &Client,
    binding: Option<&str>,
    namespace: &str,
    relays: &Reviewers,
) -> Result<(), ReviewerError> {
    let Some(name) = binding.filter(|name| !name.is_empty()) else {
        return if relays.needed.is_empty() { Ok(()) } else { Err(ReviewerError::NoBinding) };
    };
    let fail = |error| ReviewerError::Binding(ApplyError::api(format!("ClusterRoleBinding {name}"), error));
    let api: Api<ClusterRoleBinding> = Api::all(client.clone());
    for attempt in 1.. {
        let live = api.get(name).await.map_err(fail)?;
        let there = live.subjects.clone().unwrap_or_default();
        let wanted = with(&there, namespace, &relays.wanted(namespace, &there));
        if wanted == there {
            return Ok(());
        }
        // Patches exactly this version: two Providers may change the binding at once.
        let patch = json!({"metadata": {"resourceVersion": live.resource_version()}, "subjects": wanted});
        match api.patch(name, &patch_params(), &Patch::Merge(&patch)).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 && attempt < ATTEMPTS => {}
            Err(error) => return Err(fail(error)),
        }
    }
    Ok(())
}

/// Returns the subjects of other namespaces unchanged, and these relays for this namespace.
fn with(there: &[Subject], namespace: &str, relays: &BTreeSet<String>) -> Vec<Subject> {
    let elsewhere = there.iter().filter(|subject| subject.namespace.as_deref() != Some(namespace)).cloned();
    let here = relays.iter().map(|name| Subject {
        kind: "ServiceAccount".to_owned(),
        name: name.clone(),
        namespace: Some(namespace.to_owned()),
        api_group: None,
    });
    let mut all: Vec<Subject> = elsewhere.chain(here).collect();
    all.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(namespace: &str, name: &str) -> Subject {
        with(&[], namespace, &[name.to_owned()].into()).remove(0)
    }

    #[test]
    fn relays_of_namespace_replace_only_their_subjects() {
        let there = [subject("a", "gone-relay"), subject("a", "local-relay"), subject("b", "local-relay")];
        let wanted = with(&there, "a", &["local-relay".to_owned(), "other-relay".to_owned()].into());
        assert_eq!(wanted, [subject("a", "local-relay"), subject("a", "other-relay"), subject("b", "local-relay")]);
        assert_eq!(with(&wanted, "a", &BTreeSet::new()), [subject("b", "local-relay")]);
        assert_eq!(with(&wanted, "a", &["local-relay".to_owned(), "other-relay".to_owned()].into()), wanted);
    }

    #[test]
    fn only_active_providers_with_accounts_have_reviewers() {
        let provider = |name: &str, namespace: &str, spec: serde_json::Value, is_deleted: bool| -> Arc<Provider> {
            let provider: Provider = serde_json::from_value(json!({
                "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
                "metadata": {
                    "name": name, "namespace": namespace,
                    "deletionTimestamp": is_deleted.then_some("2026-11-01T00:00:00Z"),
                },
                "spec": spec,
            }))
            .unwrap();
            Arc::new(provider)
        };
        let workers = json!({"workerServiceAccounts": ["gpu"]});
        let all = [
            provider("local", "llm", workers.clone(), false),
            provider("shared", "llm", json!({"relay": {"tenants": [{"namespace": "apps"}]}}), false),
            provider("plain", "llm", json!({}), false),
            provider("gone", "llm", workers.clone(), true),
            provider("other", "research", workers, false),
        ];
        assert_eq!(relays(&all, "llm"), BTreeSet::from(["local-relay".to_owned(), "shared-relay".to_owned()]));
        let lacking = |subjects: &[Subject]| -> Vec<String> {
            without_right(&all, subjects).iter().map(|provider| provider.name_any()).collect()
        };
        assert_eq!(lacking(&[]), ["local", "shared", "other"]);
        assert_eq!(
            lacking(&[subject("research", "other-relay"), subject("research", "local-relay")]),
            ["local", "shared"]
        );
        let all_bound = [("llm", "local-relay"), ("llm", "shared-relay"), ("research", "other-relay")];
        assert!(lacking(&all_bound.map(|(namespace, relay)| subject(namespace, relay))).is_empty());
    }
}
