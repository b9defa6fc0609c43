//! The right of relays to have workers' tokens reviewed, and who has it.
//!
//! TokenReviews belong to no namespace, so the right to create them is a ClusterRole's, and no object of a namespace can own a
//! binding to it. The chart makes both, the binding with nobody in it; the operator may change that one binding, and keeps the
//! relays in it of Providers that list ServiceAccounts. So it can neither make nor delete a binding of the cluster's, and who
//! takes the operator over can give away nothing but this. Several operators may share a cluster, each with a binding of its own.

use std::collections::BTreeSet;

use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, Subject};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;

use crate::apply::ApplyError;
use crate::crd::Provider;
use crate::names;

/// Races that are lost before the next pass is left to win one.
const ATTEMPTS: usize = 4;

/// Why relays cannot review tokens.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The chart gave the operator no binding.
    #[error(
        "spec.workerServiceAccounts: this operator cannot let relays review tokens, so no worker comes in by one: install the \
         chart with rbac.workerTokens=true, which needs somebody who may create ClusterRoles, or leave the field out"
    )]
    NoBinding,
    /// It was not possible to change it.
    #[error("spec.workerServiceAccounts: {0}")]
    Binding(#[source] ApplyError),
}

/// Relays in a namespace whose Providers list ServiceAccounts.
pub(super) fn relays<'a>(providers: impl Iterator<Item = &'a Provider>, namespace: &str) -> BTreeSet<String> {
    let reviews = |provider: &&Provider| {
        provider.metadata.namespace.as_deref() == Some(namespace)
            && provider.metadata.deletion_timestamp.is_none()
            && !provider.spec.worker_service_accounts.is_empty()
    };
    providers.filter(reviews).map(|provider| names::relay(&provider.name_any())).collect()
}

/// Lets these relays of the namespace, and no others of it, create TokenReviews.
pub(super) async fn bind(
    client: &Client,
    binding: Option<&str>,
    namespace: &str,
    relays: &BTreeSet<String>,
) -> Result<(), Error> {
    let Some(name) = binding.filter(|name| !name.is_empty()) else {
        return if relays.is_empty() { Ok(()) } else { Err(Error::NoBinding) };
    };
    let fail = |error| Error::Binding(ApplyError::api(format!("ClusterRoleBinding {name}"), error));
    let api: Api<ClusterRoleBinding> = Api::all(client.clone());
    for attempt in 1.. {
        let live = api.get(name).await.map_err(fail)?;
        let there = live.subjects.clone().unwrap_or_default();
        let wanted = with(&there, namespace, relays);
        if wanted == there {
            return Ok(());
        }
        // Of that very version: two Providers may change it at once.
        let patch = json!({"metadata": {"resourceVersion": live.resource_version()}, "subjects": wanted});
        let params = PatchParams { field_manager: Some(names::FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match api.patch(name, &params, &Patch::Merge(&patch)).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 && attempt < ATTEMPTS => {}
            Err(error) => return Err(fail(error)),
        }
    }
    Ok(())
}

/// The subjects of other namespaces as they are, and of this one these.
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
    fn a_namespaces_relays_take_the_place_of_those_before_and_of_no_others() {
        let there = [subject("a", "gone-relay"), subject("a", "local-relay"), subject("b", "local-relay")];
        let wanted = with(&there, "a", &["local-relay".to_owned(), "other-relay".to_owned()].into());
        assert_eq!(wanted, [subject("a", "local-relay"), subject("a", "other-relay"), subject("b", "local-relay")]);
        assert_eq!(with(&wanted, "a", &BTreeSet::new()), [subject("b", "local-relay")]);
        assert_eq!(with(&wanted, "a", &["local-relay".to_owned(), "other-relay".to_owned()].into()), wanted);
    }

    #[test]
    fn only_providers_that_list_accounts_and_stay_have_relays_that_review() {
        let provider = |name: &str, namespace: &str, accounts: &[&str], is_deleted: bool| -> Provider {
            serde_json::from_value(json!({
                "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
                "metadata": {
                    "name": name, "namespace": namespace,
                    "deletionTimestamp": is_deleted.then_some("2026-11-01T00:00:00Z"),
                },
                "spec": {"workerServiceAccounts": accounts},
            }))
            .unwrap()
        };
        let all = [
            provider("local", "llm", &["gpu"], false),
            provider("plain", "llm", &[], false),
            provider("gone", "llm", &["gpu"], true),
            provider("other", "research", &["gpu"], false),
        ];
        assert_eq!(relays(all.iter(), "llm"), BTreeSet::from(["local-relay".to_owned()]));
    }
}
