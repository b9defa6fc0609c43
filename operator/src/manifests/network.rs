//! The network objects of a relay: the Services for clients and workers, and the NetworkPolicy.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::core::ApiResource;
use serde_json::{Map, Value, json};

use super::{Manifest, object};
use crate::context::OperatorLocation;
use crate::crd::provider::ServiceType;
use crate::resources::names;
use crate::settings::defaults::RelayDefaults;
use crate::spec::provider::ValidatedProvider;

/// Returns the Service for clients. With `workers`, workers outside the cluster dial it too.
pub fn client_service(provider: &ValidatedProvider) -> Manifest {
    let service = &provider.spec.relay.service;
    let scheme = provider.spec.relay.scheme();
    let mut ports = vec![json!({
        "name": scheme, "protocol": "TCP", "port": provider.spec.relay.client_port(), "targetPort": "client",
        "appProtocol": scheme,
    })];
    if service.workers {
        ports.push(workers_port(provider));
    }
    let kind = match service.type_ {
        ServiceType::ClusterIP => "ClusterIP",
        ServiceType::NodePort => "NodePort",
        ServiceType::LoadBalancer => "LoadBalancer",
    };
    let mut spec = Map::from_iter([
        ("type".to_owned(), json!(kind)),
        ("selector".to_owned(), json!(names::relay_selector(&provider.name))),
        ("ports".to_owned(), Value::Array(ports)),
    ]);
    if !service.load_balancer_class.is_empty() {
        spec.insert("loadBalancerClass".to_owned(), json!(service.load_balancer_class));
    }
    // Not for the headless Service: with both, workers would dial each relay twice.
    if let Some(policy) = service.ip_family_policy {
        spec.insert("ipFamilyPolicy".to_owned(), json!(policy));
    }
    if !service.ip_families.is_empty() {
        spec.insert("ipFamilies".to_owned(), json!(service.ip_families));
    }
    let mut metadata = provider.metadata(&provider.name);
    if !service.annotations.is_empty() {
        metadata.insert("annotations".to_owned(), json!(service.annotations));
    }
    object(ApiResource::erase::<Service>(&()), metadata, "spec", Value::Object(spec))
}

/// Returns the headless Service through which workers find every relay Pod, including unready ones: a relay may become
/// ready only once it has workers.
pub fn workers_service(provider: &ValidatedProvider) -> Manifest {
    let spec = json!({
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": true,
        "selector": names::relay_selector(&provider.name),
        "ports": [workers_port(provider)],
    });
    let metadata = provider.metadata(&names::workers_service(&provider.name));
    object(ApiResource::erase::<Service>(&()), metadata, "spec", spec)
}

/// Returns the NetworkPolicy of the relay's Pods. Clients are never restricted: they come from anywhere, through
/// Ingresses and load balancers, and authenticate with API keys if those are required.
pub fn network_policy(provider: &ValidatedProvider, defaults: &RelayDefaults, operator: &OperatorLocation) -> Manifest {
    let spec = json!({
        "podSelector": {"matchLabels": names::relay_selector(&provider.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [port(names::CLIENT_PORT)]},
            workers_rule(provider),
            admin_rule(provider, defaults, operator),
        ],
    });
    let metadata = provider.metadata(&names::relay(&provider.name));
    object(ApiResource::erase::<NetworkPolicy>(&()), metadata, "spec", spec)
}

/// Allows this namespace, those of other Providers that the relay serves, and `from`. Workers that use the clients'
/// Service arrive with addresses that are not known beforehand (a node's, the load balancer's, their own), so with
/// `service.workers` all addresses are allowed unless `from` restricts them. The workers still need the worker secret.
fn workers_rule(provider: &ValidatedProvider) -> Value {
    let relay = &provider.spec.relay;
    if relay.service.workers && relay.network_policy.from.is_empty() {
        return json!({"ports": [port(names::WORKER_PORT)]});
    }
    let mut peers = vec![json!({"podSelector": {}})];
    // Every namespace has this label, which only the API server writes.
    let guest = |namespace| json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}});
    peers.extend(provider.guests.iter().map(guest));
    peers.extend(relay.network_policy.from.iter().cloned());
    json!({"ports": [port(names::WORKER_PORT)], "from": peers})
}

/// Allows the operator, which reads the relay's state, and the peers of `metricsFrom`. Kubelets need no rule. On its
/// node's network, the operator has an address that no selector matches. An empty `metricsFrom` then allows every
/// address, because the Provider would otherwise never become ready.
fn admin_rule(provider: &ValidatedProvider, defaults: &RelayDefaults, operator: &OperatorLocation) -> Value {
    let own = &provider.spec.relay.network_policy.metrics_from;
    let metrics_from = if own.is_empty() { &defaults.metrics_from } else { own };
    if operator.host_network && metrics_from.is_empty() {
        return json!({"ports": [port(names::ADMIN_PORT)]});
    }
    let mut peers = vec![json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator.namespace}},
        "podSelector": {"matchLabels": BTreeMap::from(names::OPERATOR_LABELS)},
    })];
    peers.extend(metrics_from.iter().cloned());
    json!({"ports": [port(names::ADMIN_PORT)], "from": peers})
}

fn workers_port(provider: &ValidatedProvider) -> Value {
    json!({
        "name": "workers", "protocol": "TCP", "port": names::WORKER_PORT, "targetPort": "workers",
        "appProtocol": provider.spec.relay.scheme(),
    })
}

fn port(number: i32) -> Value {
    json!({"protocol": "TCP", "port": number})
}
