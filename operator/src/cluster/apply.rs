//! Applies the objects that the builders produce, server-side, and leaves objects of other owners alone.

use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::{Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::manifests::Manifest;
use crate::resources::names;

/// The reason that an object could not be applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// An object of that name exists and belongs to another owner.
    #[error("{object} exists and does not belong to this {owner}: rename or delete it")]
    NameTaken {
        /// Kind and name.
        object: String,
        /// `Provider` or `WorkerPool`.
        owner: &'static str,
    },
    /// The object is being deleted; it is created again once it is gone.
    #[error("{object} is being deleted")]
    Terminating {
        /// Kind and name.
        object: String,
    },
    /// The API server rejected the object. A retry fails until something else changes.
    #[error("{object} was refused: {message}")]
    Refused {
        /// Kind and name.
        object: String,
        /// HTTP status.
        code: u16,
        /// The API server's message.
        message: String,
    },
    /// The API server could not be reached, or cannot handle the request now.
    #[error("{object}: {}", display_kube_error(source))]
    Api {
        /// Kind and name.
        object: String,
        /// The underlying error.
        source: Box<kube::Error>,
    },
}

impl ApplyError {
    pub(crate) fn api(object: String, source: kube::Error) -> Self {
        // 409 is a race and 429 a request to wait. The others mean that the object itself is invalid.
        if let kube::Error::Api(status) = &source
            && (matches!(status.code, 400 | 403 | 422) || is_untypeable(status))
        {
            return Self::Refused { object, code: status.code, message: shorten(&status.message) };
        }
        Self::Api { object, source: Box::new(source) }
    }

    /// True if RBAC, a quota or a policy forbids the object, which can change without a change of the object. A
    /// policy's denial has the same code as an invalid object, so only the message distinguishes the two.
    pub fn is_forbidden(&self) -> bool {
        // The messages of ValidatingAdmissionPolicies (422 by default) and of webhooks (400 by default).
        const DENIALS: [&str; 2] = ["denied request", "denied the request"];
        let Self::Refused { code, message, .. } = self else { return false };
        *code == 403 || DENIALS.iter().any(|words| message.contains(words))
    }

    /// The label value for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NameTaken { .. } => "name_taken",
            Self::Terminating { .. } => "terminating",
            Self::Refused { .. } if self.is_forbidden() => "forbidden",
            Self::Refused { .. } => "refused",
            Self::Api { .. } => "api",
        }
    }
}

/// The owner of an object. Ownership is recorded in a label, because some objects outlive their owner on purpose.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// `Provider` or `WorkerPool`.
    pub kind: &'static str,
    /// [`names::PROVIDER_LABEL`] or [`names::POOL_LABEL`].
    pub label: &'static str,
    /// The owner's name.
    pub name: &'a str,
}

impl Owner<'_> {
    /// True if the object's labels name this owner.
    pub fn owns(&self, meta: &ObjectMeta) -> bool {
        let label = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
        label("app.kubernetes.io/managed-by") == Some(names::MANAGED_BY) && label(self.label) == Some(self.name)
    }
}

/// Applies one object and returns it as the API server stored it.
pub async fn apply(client: &Client, owner: Owner<'_>, manifest: &Manifest) -> Result<DynamicObject, ApplyError> {
    let fail = |error| ApplyError::api(manifest.display(), error);
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &manifest.namespace, &manifest.resource);
    if let Some(there) = api.get_metadata_opt(&manifest.name).await.map_err(fail)? {
        check_ownership(owner, manifest, &there)?;
    }
    let params = PatchParams::apply(names::FIELD_MANAGER).force();
    api.patch(&manifest.name, &params, &Patch::Apply(&manifest.value)).await.map_err(fail)
}

/// Deletes an object that is no longer wanted, if it exists and belongs to `owner`.
pub async fn delete(client: &Client, owner: Owner<'_>, manifest: &Manifest) -> Result<(), ApplyError> {
    let fail = |error| ApplyError::api(manifest.display(), error);
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &manifest.namespace, &manifest.resource);
    let Some(there) = api.get_metadata_opt(&manifest.name).await.map_err(fail)? else { return Ok(()) };
    if !owner.owns(&there.metadata) || there.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid: there.uid(), resource_version: None }),
        ..DeleteParams::background()
    };
    match api.delete(&manifest.name, &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(fail(error)),
    }
}

/// The parameters of a patch of single fields, which belong to the operator from then on.
pub fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(names::FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// Returns a version that changes with everything that is applied, but not with an object's status. Kinds without a
/// generation have no status that matters, and each new resource version means that their content changed.
pub fn content_version(meta: &ObjectMeta) -> String {
    let Some(generation) = meta.generation else { return meta.resource_version.clone().unwrap_or_default() };
    let owners: Vec<&str> = meta.owner_references.iter().flatten().map(|owner| owner.uid.as_str()).collect();
    let mut hasher = DefaultHasher::new();
    (generation, &meta.uid, &meta.labels, owners, meta.deletion_timestamp.is_some()).hash(&mut hasher);
    format!("{:x}", hasher.finish())
}

/// Writes a complete status: fields that it does not contain are removed. The caller has compared it with the current
/// one.
pub async fn write_status<K, S>(client: &Client, object: &K, status: &S) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
    S: Serialize,
{
    let name = object.name_any();
    let api: Api<K> = Api::namespaced(client.clone(), &object.namespace().unwrap_or_default());
    // The uid prevents a status from being written to a successor of the same name.
    let body = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()),
        "metadata": {"name": name, "uid": object.uid()}, "status": status,
    });
    let params = PatchParams::apply(names::STATUS_MANAGER).force();
    match api.patch_status(&name, &params, &Patch::Apply(&body)).await {
        Ok(_) => Ok(()),
        // The object was deleted or replaced meanwhile.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

fn check_ownership(
    owner: Owner<'_>,
    manifest: &Manifest,
    there: &PartialObjectMeta<DynamicObject>,
) -> Result<(), ApplyError> {
    if !owner.owns(&there.metadata) {
        return Err(ApplyError::NameTaken { object: manifest.display(), owner: owner.kind });
    }
    if there.metadata.deletion_timestamp.is_some() {
        return Err(ApplyError::Terminating { object: manifest.display() });
    }
    Ok(())
}

/// Returns a human-readable error: the API server's message without the structure around it.
pub fn display_kube_error(error: &kube::Error) -> String {
    let kube::Error::Api(status) = error else { return error.to_string() };
    format!("HTTP {}: {}", status.code, shorten(&status.message))
}

/// True if the API server denies access.
pub fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}

/// True for an object that the API server cannot type: a field of the wrong type, or an invalid quantity. The API
/// server returns 500, as for its own failures, so only the message distinguishes the two.
fn is_untypeable(status: &kube::core::Status) -> bool {
    let words = ["failed to create typed patch object", "failed to convert new object"];
    status.code == 500 && words.iter().any(|words| status.message.starts_with(words))
}

/// Truncates a message: rejections of a Pod template repeat half of the template.
fn shorten(message: &str) -> String {
    const SHOWN_CHARS: usize = 1024;
    message.chars().take(SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u16, message: &str) -> ApplyError {
        let status = kube::core::Status { code, message: message.to_owned(), ..kube::core::Status::default() };
        ApplyError::api("Deployment d".to_owned(), kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn untypable_object_is_distinguished_from_server_failure() {
        let refused = [
            (422, "spec.ports: Required value"),
            (403, "exceeded quota"),
            (500, "failed to create typed patch object (llm/d; apps/v1): .spec.x: field not declared in schema"),
            (500, "failed to convert new object (llm/d; apps/v1) to proper version: quantities must match"),
        ];
        for (code, message) in refused {
            assert!(matches!(error(code, message), ApplyError::Refused { .. }), "{code} {message}");
        }
        let passing = [(500, "etcdserver: request timed out"), (409, "conflict"), (429, "slow down"), (503, "later")];
        for (code, message) in passing {
            assert!(matches!(error(code, message), ApplyError::Api { .. }), "{code} {message}");
        }
    }

    #[test]
    fn policy_denial_is_distinguished_from_invalid_object() {
        let denials = [
            (403, "deployments.apps \"d\" is forbidden: exceeded quota"),
            (
                422,
                "deployments.apps \"d\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
            ),
            (400, "admission webhook \"validate.example.com\" denied the request: no"),
        ];
        for (code, message) in denials {
            let error = error(code, message);
            assert!(error.is_forbidden() && error.kind() == "forbidden", "{message}");
        }
        assert!(!error(422, "spec.ports: Required value").is_forbidden());
        assert!(!error(409, "the object has been modified").is_forbidden());
    }

    #[test]
    fn errors_show_server_message_without_structure() {
        assert_eq!(
            error(409, "the object has been modified").to_string(),
            "Deployment d: HTTP 409: the object has been modified"
        );
    }
}
