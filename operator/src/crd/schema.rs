//! The parts of the schemas that the derive macros cannot express.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// Conditions, merged by their type as the API conventions require.
pub fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array", "maxItems": 16,
        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"type": "string", "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
                "message": {"type": "string", "maxLength": 32768},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
            },
        },
    })
}

/// Labels, annotations, node selectors: maps of text, which `type: object` alone would prune.
pub fn text_map(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "maxProperties": 256, "additionalProperties": {"type": "string", "maxLength": 65536} })
}

/// A label selector, with at least one requirement.
pub fn label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {"type": "object", "maxProperties": 32, "additionalProperties": {"type": "string", "maxLength": 63}},
            "matchExpressions": {
                "type": "array", "maxItems": 32, "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object", "required": ["key", "operator"],
                    "properties": {
                        "key": {"type": "string", "minLength": 1, "maxLength": 317},
                        "operator": {"type": "string", "enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                        "values": {
                            "type": "array", "maxItems": 64, "x-kubernetes-list-type": "atomic",
                            "items": {"type": "string", "maxLength": 63},
                        },
                    },
                    "x-kubernetes-validations": [{
                        "rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
                        "message": "In and NotIn need values; Exists and DoesNotExist take none",
                    }],
                },
            },
        },
        "x-kubernetes-validations": [{
            "rule": "(has(self.matchLabels) && self.matchLabels.size() > 0) || (has(self.matchExpressions) && self.matchExpressions.exists(e, e.operator in ['In', 'Exists']))",
            "message": "a selector needs matchLabels, or an expression with In or Exists: otherwise it would select Pods of anything",
        }],
    })
}

/// A list whose items are merged by name and otherwise kept as written.
pub fn named_items(_: &mut SchemaGenerator) -> Schema {
    named(&json!({}))
}

/// A list without a key, kept as written.
pub fn raw_items(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array", "maxItems": 256,
        "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
    })
}

/// A PodSpec. Only the lists that several writers share are typed; the rest stays as written, so that fields newer than
/// this program survive.
pub fn pod_spec(_: &mut SchemaGenerator) -> Schema {
    let containers = named(&json!({"env": named(&json!({})).to_value()}));
    json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": {
            "containers": containers, "initContainers": containers, "volumes": named(&json!({})),
        },
    })
}

/// Returns the definition without its status, which a new definition must not contain.
///
/// Helm deletes a definition that a new revision of its release does not contain, and with it every object, unless the
/// definition in the cluster has the annotation. `kubectl replace` removes annotations that are not in its file.
pub fn finish(crd: &CustomResourceDefinition) -> Value {
    let mut value = serde_json::to_value(crd).unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        object.remove("status");
    }
    value["metadata"]["annotations"] = json!({"helm.sh/resource-policy": "keep"});
    value
}

fn named(more: &Value) -> Schema {
    let mut properties = json!({"name": {"type": "string", "maxLength": 253}});
    if let (Some(properties), Some(more)) = (properties.as_object_mut(), more.as_object()) {
        properties.extend(more.clone());
    }
    json_schema!({
        "type": "array", "maxItems": 256,
        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
        "items": {
            "type": "object", "required": ["name"], "x-kubernetes-preserve-unknown-fields": true,
            "properties": properties,
        },
    })
}
