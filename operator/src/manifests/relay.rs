//! The relay's Deployment, its ServiceAccount and rights, and its disruption budget.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::core::ApiResource;
use serde_json::{Map, Value, json};

use super::quantity;
use super::secrets::{ADMIN_TOKEN, API_KEYS};
use super::{Manifest, object};
use crate::crd::LogFormat;
use crate::crd::common::RawObject;
use crate::crd::provider::Relay;
use crate::relays::tls::{CERTIFICATE, PRIVATE_KEY};
use crate::resources::names::{self, Component};
use crate::settings::defaults::RelayDefaults;
use crate::spec::provider::ValidatedProvider;

/// The time for which a relay still accepts new connections after SIGTERM, while the Service's endpoints change on all
/// nodes.
const SHUTDOWN_GRACE_SECS: u64 = 5;
/// The time that the kubelet allows on top of grace and drain. The relay uses up to 8 s: for idle connections, last
/// bytes, links of workers and stored keys.
const EXIT_SECS: u64 = 10;
const USER: i64 = 65532;

const CONFIG_PATH: &str = "/etc/modelrelay/config";
const ADMIN_PATH: &str = "/etc/modelrelay/admin";
const KEYS_PATH: &str = "/etc/modelrelay/keys";
const TLS_PATH: &str = "/etc/modelrelay/tls";
const TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The number of bytes of bodies that a relay may hold. A user may set another value.
const BODY_BUDGET_ENV: &str = "MAX_BUFFERED_BYTES";

/// The name of the volume with the token for the API server.
pub const API_ACCESS: &str = "api-access";

/// The volumes that not every relay has.
#[derive(Clone, Copy, Debug)]
pub struct Mounts {
    /// The clients' keys.
    pub api_keys: bool,
    /// The token for the API server: to write keys, or to have tokens reviewed.
    pub api_access: bool,
}

/// Returns the relay's Deployment. It always contains the number of replicas: omitted once, it would drop to one.
pub fn deployment(provider: &ValidatedProvider, defaults: &RelayDefaults, mounts: Mounts) -> Manifest {
    let mut metadata = provider.metadata(&names::relay(&provider.name));
    if let Some(labels) = metadata.get_mut("labels").and_then(Value::as_object_mut) {
        labels.insert("app.kubernetes.io/version".to_owned(), json!(env!("CARGO_PKG_VERSION")));
    }
    let spec = json!({
        "replicas": provider.spec.relay.replicas,
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": names::relay_selector(&provider.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": pod_metadata(provider), "spec": pod_spec(provider, defaults, mounts)},
    });
    object(ApiResource::erase::<Deployment>(&()), metadata, "spec", spec)
}

/// Returns the relay's ServiceAccount.
pub fn service_account(provider: &ValidatedProvider) -> Manifest {
    let metadata = provider.metadata(&names::relay(&provider.name));
    object(ApiResource::erase::<ServiceAccount>(&()), metadata, "automountServiceAccountToken", json!(false))
}

/// Returns the Role that allows the relay to write its clients' keys.
pub fn role(provider: &ValidatedProvider) -> Manifest {
    let rules = json!([{
        "apiGroups": [""], "resources": ["secrets"], "resourceNames": [names::api_keys_secret(&provider.name)],
        "verbs": ["get", "update", "patch"],
    }]);
    object(ApiResource::erase::<Role>(&()), provider.metadata(&names::relay(&provider.name)), "rules", rules)
}

/// Returns the RoleBinding of that Role to the relay's ServiceAccount.
pub fn role_binding(provider: &ValidatedProvider) -> Manifest {
    let name = names::relay(&provider.name);
    let resource = ApiResource::erase::<RoleBinding>(&());
    let value = json!({
        "apiVersion": resource.api_version, "kind": resource.kind, "metadata": provider.metadata(&name),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": provider.namespace}],
    });
    Manifest::of_json(resource, value)
}

/// Returns a budget that allows one relay at a time to be disrupted, for every number of replicas: with `minAvailable`,
/// a single relay, or an unready one, would block a node's drain indefinitely.
pub fn disruption_budget(provider: &ValidatedProvider) -> Manifest {
    let spec = json!({
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names::relay_selector(&provider.name)},
    });
    let metadata = provider.metadata(&names::relay(&provider.name));
    object(ApiResource::erase::<PodDisruptionBudget>(&()), metadata, "spec", spec)
}

fn pod_metadata(provider: &ValidatedProvider) -> Value {
    let template = &provider.spec.relay.pod_template;
    let mut labels = template.labels.clone();
    labels.extend(names::provider_labels(Component::Relay, &provider.name));
    // Users may override the scrape annotations, but not the ones that the operator itself reads.
    let defaults = [
        ("prometheus.io/scrape", "true".to_owned()),
        ("prometheus.io/port", names::ADMIN_PORT.to_string()),
        ("prometheus.io/path", "/metrics".to_owned()),
    ];
    let mut annotations: BTreeMap<String, String> =
        defaults.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    if provider.spec.relay.tls.is_some() {
        annotations.insert("prometheus.io/scheme".to_owned(), "https".to_owned());
    }
    let users = template.annotations.iter().filter(|(key, _)| !key.starts_with("modelrelay.io/"));
    annotations.extend(users.map(|(key, value)| (key.clone(), value.clone())));
    json!({"labels": labels, "annotations": annotations})
}

fn pod_spec(provider: &ValidatedProvider, defaults: &RelayDefaults, mounts: Mounts) -> Value {
    let relay = &provider.spec.relay;
    let template = &relay.pod_template;
    let mut spec = Map::new();
    let mut set = |key: &str, value: Value| spec.insert(key.to_owned(), value);
    set("serviceAccountName", json!(names::relay(&provider.name)));
    set("automountServiceAccountToken", json!(false));
    set("enableServiceLinks", json!(false));
    set("terminationGracePeriodSeconds", json!(SHUTDOWN_GRACE_SECS + provider.drain_secs + EXIT_SECS));
    set("securityContext", pod_security(&template.security_context, defaults.omit_ids));
    set("containers", json!([container(provider, defaults, mounts)]));
    set("volumes", volumes(provider, mounts));
    set("topologySpreadConstraints", spread(provider, defaults));
    let node_selector =
        if template.node_selector.is_empty() { &defaults.node_selector } else { &template.node_selector };
    if !node_selector.is_empty() {
        set("nodeSelector", json!(node_selector));
    }
    if let Some(tolerations) = first_list(&template.tolerations, &defaults.tolerations) {
        set("tolerations", json!(tolerations));
    }
    if let Some(affinity) = first_object(&template.affinity, &defaults.affinity) {
        set("affinity", affinity.clone());
    }
    let default_pull_secrets: Vec<Value> =
        defaults.image_pull_secrets.iter().map(|secret| json!({"name": secret.name})).collect();
    if let Some(secrets) = first_list(&template.image_pull_secrets, &default_pull_secrets) {
        set("imagePullSecrets", json!(secrets));
    }
    let priority = Some(template.priority_class_name.as_str()).filter(|name| !name.is_empty());
    if let Some(priority) = priority.or(defaults.priority_class_name.as_deref()) {
        set("priorityClassName", json!(priority));
    }
    if !template.runtime_class_name.is_empty() {
        set("runtimeClassName", json!(template.runtime_class_name));
    }
    Value::Object(spec)
}

fn container(provider: &ValidatedProvider, defaults: &RelayDefaults, mounts: Mounts) -> Value {
    let relay = &provider.spec.relay;
    let image = if relay.image.is_empty() { &defaults.image } else { &relay.image };
    let mut container = Map::new();
    let mut set = |key: &str, value: Value| container.insert(key.to_owned(), value);
    set("name", json!(names::RELAY_CONTAINER));
    set("image", json!(image));
    if let Some(policy) = &defaults.image_pull_policy {
        set("imagePullPolicy", json!(policy));
    }
    set("env", env(provider, defaults, mounts));
    set(
        "ports",
        json!([
            {"name": "client", "containerPort": names::CLIENT_PORT, "protocol": "TCP"},
            {"name": "workers", "containerPort": names::WORKER_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names::ADMIN_PORT, "protocol": "TCP"},
        ]),
    );
    for (key, path, period, failures) in
        [("startupProbe", "/livez", 1, 60), ("livenessProbe", "/livez", 10, 6), ("readinessProbe", "/readyz", 2, 2)]
    {
        set(key, probe(relay, path, period, failures));
    }
    set(
        "securityContext",
        json!({
            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
        }),
    );
    set("volumeMounts", volume_mounts(provider, mounts));
    if let Some(resources) = resources(relay, defaults) {
        set("resources", resources.clone());
    }
    Value::Object(container)
}

fn env(provider: &ValidatedProvider, defaults: &RelayDefaults, mounts: Mounts) -> Value {
    let relay = &provider.spec.relay;
    // Includes IPv4, and a kernel without IPv6.
    let listen = |port: i32| format!("[::]:{port}");
    let log_level = relay.log_level.as_deref().or(defaults.log_level.as_deref()).unwrap_or("info");
    let log_format = relay.log_format.or(defaults.log_format).unwrap_or(LogFormat::Json);
    let mut pairs = vec![
        ("LISTEN_ADDR", listen(names::CLIENT_PORT)),
        ("WORKER_LISTEN_ADDR", listen(names::WORKER_PORT)),
        ("WORKERS_ON_CLIENT_PORT", "false".to_owned()),
        ("ADMIN_LISTEN_ADDR", listen(names::ADMIN_PORT)),
        ("MODELRELAY_CONFIG", format!("{CONFIG_PATH}/relay.yaml")),
        ("MODELRELAY_ADMIN_TOKEN_FILE", format!("{ADMIN_PATH}/{ADMIN_TOKEN}")),
        ("SHUTDOWN_GRACE_SECS", SHUTDOWN_GRACE_SECS.to_string()),
        ("DRAIN_TIMEOUT_SECS", provider.drain_secs.to_string()),
        ("LOG_LEVEL", log_level.to_owned()),
        ("LOG_FORMAT", log_format.as_str().to_owned()),
    ];
    if mounts.api_keys {
        pairs.push(("API_KEYS_SECRET", names::api_keys_secret(&provider.name)));
        pairs.push(("API_KEYS_FILE", format!("{KEYS_PATH}/{API_KEYS}")));
    }
    if relay.tls.is_some() {
        pairs.push((names::TLS_ENV, format!("{TLS_PATH}/{CERTIFICATE}")));
        pairs.push(("TLS_KEY_FILE", format!("{TLS_PATH}/{PRIVATE_KEY}")));
    }
    let mut env: Vec<Value> = pairs.into_iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
    let has = |name: &str| relay.pod_template.env.iter().any(|entry| entry["name"] == name);
    if !has("POD_NAMESPACE") {
        env.push(json!({"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}));
    }
    if let Some(bytes) = body_budget(relay, defaults).filter(|_| !has(BODY_BUDGET_ENV)) {
        env.push(json!({"name": BODY_BUDGET_ENV, "value": bytes.to_string()}));
    }
    env.extend(relay.pod_template.env.iter().cloned());
    Value::Array(env)
}

fn resources<'a>(relay: &'a Relay, defaults: &'a RelayDefaults) -> Option<&'a Value> {
    first_object(&relay.resources, &defaults.resources)
}

/// Returns half of the container's memory limit. If bodies could use all of it, the kernel would kill the relay, and
/// every stream with it, where it should have rejected one more request.
fn body_budget(relay: &Relay, defaults: &RelayDefaults) -> Option<u64> {
    let limit = quantity::bytes(resources(relay, defaults)?.pointer("/limits/memory")?)?;
    Some(limit / 2).filter(|bytes| *bytes > 0)
}

fn volumes(provider: &ValidatedProvider, mounts: Mounts) -> Value {
    let relay = &provider.spec.relay;
    let (admin_secret, admin_key) = match &relay.admin_token_secret_ref {
        Some(own) => (own.name.clone(), own.key.clone()),
        None => (names::admin_secret(&provider.name), ADMIN_TOKEN.to_owned()),
    };
    let mut volumes = vec![
        json!({"name": "config", "secret": {"secretName": names::relay(&provider.name), "defaultMode": 0o440}}),
        json!({"name": "admin", "secret": {
            "secretName": admin_secret, "defaultMode": 0o440, "items": [{"key": admin_key, "path": ADMIN_TOKEN}],
        }}),
    ];
    if mounts.api_keys {
        let keys = names::api_keys_secret(&provider.name);
        volumes
            .push(json!({"name": "api-keys", "secret": {"secretName": keys, "optional": true, "defaultMode": 0o440}}));
    }
    if mounts.api_access {
        volumes.push(api_access());
    }
    if let Some(tls) = &relay.tls {
        volumes.push(json!({"name": "tls", "secret": {"secretName": tls.secret_name, "defaultMode": 0o440}}));
    }
    volumes.extend(relay.pod_template.volumes.iter().cloned());
    Value::Array(volumes)
}

/// Returns the volume that `automountServiceAccountToken` would mount; it is mounted only if the API is used.
fn api_access() -> Value {
    json!({"name": API_ACCESS, "projected": {"defaultMode": 0o440, "sources": [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]}})
}

/// Mounts whole folders: a `subPath` never sees a change.
fn volume_mounts(provider: &ValidatedProvider, mounts: Mounts) -> Value {
    let relay = &provider.spec.relay;
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path, "readOnly": true});
    let mut all = vec![mount("config", CONFIG_PATH), mount("admin", ADMIN_PATH)];
    if mounts.api_keys {
        all.push(mount("api-keys", KEYS_PATH));
    }
    if mounts.api_access {
        all.push(mount(API_ACCESS, TOKEN_PATH));
    }
    if relay.tls.is_some() {
        all.push(mount("tls", TLS_PATH));
    }
    all.extend(relay.pod_template.volume_mounts.iter().cloned());
    Value::Array(all)
}

/// Returns a probe. Kubelets accept any certificate.
fn probe(relay: &Relay, path: &str, period: i32, failures: i32) -> Value {
    let mut probe = json!({
        "httpGet": {"path": path, "port": "admin"},
        "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures,
    });
    if relay.tls.is_some() {
        probe["httpGet"]["scheme"] = json!("HTTPS");
    }
    probe
}

/// Returns the restricted security context, overridden by the user's fields.
fn pod_security(users: &RawObject, omit_ids: bool) -> Value {
    let mut context = json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    if !omit_ids {
        for id in ["runAsUser", "runAsGroup", "fsGroup"] {
            context[id] = json!(USER);
        }
    }
    if let (Some(context), Some(users)) = (context.as_object_mut(), users.0.as_object()) {
        context.extend(users.clone());
    }
    context
}

/// Spreads relays over hosts where possible: two relays on one node fail together.
fn spread(provider: &ValidatedProvider, defaults: &RelayDefaults) -> Value {
    let template = &provider.spec.relay.pod_template;
    if let Some(constraints) = first_list(&template.topology_spread_constraints, &defaults.topology_spread_constraints)
    {
        return json!(constraints);
    }
    json!([{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names::relay_selector(&provider.name)},
    }])
}

fn first_list<'a>(users: &'a [Value], default: &'a [Value]) -> Option<&'a [Value]> {
    [users, default].into_iter().find(|list| !list.is_empty())
}

fn first_object<'a>(users: &'a RawObject, default: &'a RawObject) -> Option<&'a Value> {
    [users, default].into_iter().find(|object| !object.is_empty()).map(|object| &object.0)
}
