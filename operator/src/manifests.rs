//! Builds the desired objects with pure functions: same input, same bytes, no client and no clock.
//!
//! Builders of typed objects and of raw ones (a template's PodSpec stays as its author wrote it) both produce a
//! [`Manifest`], which contains everything that applying needs.

use kube::Resource;
use kube::core::ApiResource;
use serde::Serialize;
use serde_json::{Map, Value, json};

pub mod backend;
pub mod config;
pub mod network;
mod quantity;
pub mod relay;
pub mod secrets;
pub mod sidecar;
#[cfg(test)]
pub(crate) mod snapshot;
#[cfg(test)]
pub(crate) mod testing;
pub mod worker_access;
pub mod worker_config;

/// A desired object.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Its kind.
    pub resource: ApiResource,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The whole object, with apiVersion and kind.
    pub value: Value,
}

impl Manifest {
    /// Creates the manifest of a typed, namespaced object with a name.
    pub fn of<K>(object: &K) -> Self
    where
        K: Resource<DynamicType = ()> + Serialize,
    {
        let resource = ApiResource::erase::<K>(&());
        let mut value = serde_json::to_value(object).unwrap_or_default();
        // Types of k8s-openapi serialize these two themselves; for custom resources, kube adds them. Either way they
        // are right.
        if let Some(map) = value.as_object_mut() {
            map.insert("apiVersion".into(), resource.api_version.clone().into());
            map.insert("kind".into(), resource.kind.clone().into());
        }
        let meta = object.meta();
        Self {
            resource,
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            value,
        }
    }

    /// Creates a manifest from JSON that contains apiVersion, kind, metadata.name and metadata.namespace; `resource`
    /// provides the plural.
    pub fn of_json(resource: ApiResource, value: Value) -> Self {
        let text = |pointer| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        Self { namespace: text("/metadata/namespace"), name: text("/metadata/name"), resource, value }
    }

    /// Returns kind and name: `Deployment local-relay`.
    pub fn display(&self) -> String {
        display(&self.resource.kind, &self.name)
    }

    /// Returns the object as YAML, for snapshots.
    pub fn to_yaml(&self) -> String {
        serde_yaml::to_string(&self.value).unwrap_or_default()
    }
}

/// Returns kind and name of an object for display.
pub fn display(kind: &str, name: &str) -> String {
    format!("{kind} {name}")
}

/// Builds a namespaced object with one content field, as JSON.
fn object(resource: ApiResource, metadata: Map<String, Value>, part: &str, content: Value) -> Manifest {
    let mut value = Map::new();
    value.insert("apiVersion".to_owned(), json!(resource.api_version));
    value.insert("kind".to_owned(), json!(resource.kind));
    value.insert("metadata".to_owned(), Value::Object(metadata));
    value.insert(part.to_owned(), content);
    Manifest::of_json(resource, Value::Object(value))
}
