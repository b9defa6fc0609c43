#![allow(clippy::needless_pass_by_value, reason = "values are written where they are used")]

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::context::OperatorLocation;
use crate::crd::{Provider, WorkerPool};
use crate::manifests::snapshot;
use crate::settings::defaults::{Defaults, RelayDefaults};
use crate::spec::provider::validate;
use crate::spec::rotation::Previous;

fn provider(spec: Value) -> Provider {
    let value = json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
        "metadata": {"name": "local", "namespace": "llm", "uid": "u-1", "generation": 1}, "spec": spec,
    });
    serde_json::from_value(value).unwrap()
}

fn pool(spec: Value) -> std::sync::Arc<WorkerPool> {
    let value = json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool",
        "metadata": {"name": "llama", "namespace": "llm"}, "spec": spec,
        "status": {"models": ["seen-before"]},
    });
    std::sync::Arc::new(serde_json::from_value(value).unwrap())
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn steady() -> Plan {
    Plan {
        current: Secret::new("worker-value"),
        previous: Vec::new(),
        worker: Secret::new("worker-value"),
        worker_changed_at: at("2026-11-01T00:00:00Z"),
        acted_on: None,
        events: Vec::new(),
        wake_at: None,
    }
}

fn built(spec: Value, pools: &[std::sync::Arc<WorkerPool>], plan: &Plan, defaults: &RelayDefaults) -> Desired {
    let valid = validate(&provider(spec), pools).unwrap();
    let (token, salt) = (Secret::new("admin-value"), Secret::new("salt-value"));
    let inputs = RelayInputs {
        defaults,
        operator: &OperatorLocation::in_namespace("mr-system"),
        plan,
        salt: &salt,
        admin_token: valid.spec.relay.admin_token_secret_ref.is_none().then_some(&token),
        sharers: &[],
        has_api_keys: false,
        holds_api_keys: false,
        has_api_access: false,
    };
    build(&valid, &inputs)
}

fn defaults() -> RelayDefaults {
    RelayDefaults { image: "registry.example/modelrelay-relay:1.2.3".into(), ..RelayDefaults::default() }
}

/// Shows Secrets decoded, so that differences are readable.
fn page(desired: &Desired) -> String {
    let mut page = String::new();
    for manifest in desired.secrets.iter().chain(&desired.objects) {
        let mut value = manifest.value.clone();
        if let Some(data) = value.get_mut("data").and_then(Value::as_object_mut) {
            for value in data.values_mut() {
                let bytes: k8s_openapi::ByteString = serde_json::from_value(value.clone()).unwrap();
                *value = json!(String::from_utf8(bytes.0).unwrap());
            }
        }
        page += &format!("---\n{}", serde_yaml::to_string(&value).unwrap());
    }
    for manifest in &desired.unwanted {
        page += &format!("--- # not wanted: {}\n", manifest.display());
    }
    page
}

#[test]
fn empty_spec_matches_snapshot() {
    let desired = built(json!({}), &[], &steady(), &defaults());
    snapshot::check("provider-empty", &page(&desired));
}

#[test]
fn certificate_matches_snapshot() {
    let spec = json!({"relay": {"tls": {"secretName": "local-tls"}, "service": {"workers": true}}});
    snapshot::check("provider-tls", &page(&built(spec, &[], &steady(), &defaults())));
}

#[test]
fn relay_keeps_token_that_sharer_no_longer_needs() {
    let deployment = |change: &dyn Fn(&mut ValidatedProvider), has_api_access: bool| {
        let mut valid = validate(&provider(json!({})), &[]).unwrap();
        change(&mut valid);
        let inputs = RelayInputs {
            defaults: &defaults(),
            operator: &OperatorLocation::in_namespace("mr-system"),
            plan: &steady(),
            salt: &Secret::new("salt-value"),
            admin_token: None,
            sharers: &[],
            has_api_keys: false,
            holds_api_keys: false,
            has_api_access,
        };
        let objects = build(&valid, &inputs).objects;
        objects.into_iter().find(|object| object.value["kind"] == "Deployment").unwrap().value
    };
    let needed = deployment(&|valid| valid.reviews_tokens = true, false);
    assert_eq!(deployment(&|_| {}, true), needed);
    assert_ne!(deployment(&|_| {}, false), needed);
}

#[test]
fn full_spec_matches_snapshot() {
    let mut spec = json!({
        "models": [{"id": "meta-llama/Llama-3.1-8B-Instruct", "aliases": ["llama3"]}],
        "aliases": {"gpt-4o": "llama3"}, "defaultModel": "llama3", "fallbackModel": "gpt-4o",
        "queue": {"maxLength": 7, "maxBytes": "1Mi", "timeout": "10s", "coldTimeout": "1m30s"},
        "placement": {"mode": "cache", "cacheIsolation": "key", "maxHomes": 500, "spillRequests": 2, "spillBytes": "1Mi"},
        "requestTimeout": "1m", "maxModelsPerWorker": 4, "requireProtocolVersion": true,
        "workerSecretRef": {"name": "mine", "key": "k"}, "secretsPolicy": "Delete",
        "relay": {
            "replicas": 3, "adminTokenSecretRef": {"name": "t", "key": "x"}, "drainTimeout": "1500ms",
            "expectWorkers": true, "unreadyWhenSaturated": true, "image": "other/relay:9",
            "logLevel": "info,modelrelay_relay=debug", "logFormat": "text",
            "resources": {"requests": {"cpu": "10m"}, "claims": [{"name": "newer-than-us"}]},
            "service": {"port": 8000, "annotations": {"a": "b"}},
            "networkPolicy": {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "metricsFrom": [{"podSelector": {}}]},
            "podTemplate": {
                "labels": {"team": "x", "modelrelay.io/provider": "not-yours"},
                "annotations": {"note": "y", "prometheus.io/scrape": "false"},
                "nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}],
                "affinity": {"nodeAffinity": {"newField": 1}},
                "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
                "priorityClassName": "high", "imagePullSecrets": [{"name": "pull"}],
                "securityContext": {"runAsUser": 1000, "supplementalGroups": [7]}, "runtimeClassName": "gvisor",
                "env": [{"name": "MAX_REQUEST_BYTES", "value": "1Mi"}],
                "volumes": [{"name": "extra", "emptyDir": {}}],
                "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
            },
        },
    });
    spec["fairness"] = json!({"mode": "fifo", "promoteAfter": "5s"});
    snapshot::check("provider-everything", &page(&built(spec, &[], &steady(), &defaults())));
}

/// Returns the relay's `MAX_BUFFERED_BYTES` from its Deployment.
fn body_budgets(relay: Value, defaults: Value) -> Vec<Value> {
    let defaults = RelayDefaults { resources: serde_json::from_value(defaults).unwrap(), ..self::defaults() };
    let desired = built(json!({"relay": relay}), &[], &steady(), &defaults);
    let deployment = desired.objects.iter().find(|object| object.value["kind"] == "Deployment").unwrap();
    let env = deployment.value["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap();
    env.iter().filter(|entry| entry["name"] == "MAX_BUFFERED_BYTES").map(|entry| entry["value"].clone()).collect()
}

#[test]
fn body_budget_is_half_of_relay_memory() {
    let limit = |memory: &str| json!({"limits": {"memory": memory}});
    assert_eq!(body_budgets(json!({}), limit("1Gi")), ["536870912"]);
    assert_eq!(body_budgets(json!({"resources": limit("3G")}), limit("1Gi")), ["1500000000"]);
    // The user's own value takes precedence, and nothing is guessed.
    let own = json!({"podTemplate": {"env": [{"name": "MAX_BUFFERED_BYTES", "value": "64Mi"}]}});
    assert_eq!(body_budgets(own, limit("1Gi")), ["64Mi"]);
    let unlimited = json!({"resources": {"requests": {"memory": "1Gi"}}});
    assert_eq!(body_budgets(unlimited, limit("1Gi")), Vec::<Value>::new());
    assert_eq!(body_budgets(json!({}), limit("plenty")), Vec::<Value>::new());
    assert_eq!(body_budgets(json!({}), json!({})), Vec::<Value>::new());
}

#[test]
fn disabled_provider_matches_snapshot() {
    snapshot::check("provider-disabled", &page(&built(json!({"enabled": false}), &[], &steady(), &defaults())));
}

#[test]
fn api_keys_with_chart_defaults_match_snapshot() {
    let text = "relay:\n  image: r:1\n  imagePullPolicy: Never\n  imagePullSecrets: [{name: p}]\n  nodeSelector: {a: b}\n  \
                tolerations: [{key: t}]\n  affinity: {x: {}}\n  resources: {limits: {memory: 64Mi}}\n  \
                priorityClassName: low\n  logLevel: warn\n  logFormat: text\nworker: {image: w:1}\n";
    let defaults: Defaults = serde_yaml::from_str(text).unwrap();
    let desired = built(json!({"relay": {"requireApiKeys": true}}), &[], &steady(), &defaults.relay);
    snapshot::check("provider-api-keys", &page(&desired));
}

#[test]
fn worker_accounts_match_snapshot() {
    let spec = json!({"workerServiceAccounts": ["gpu-workers", "research/gpu"]});
    snapshot::check("provider-worker-accounts", &page(&built(spec, &[], &steady(), &defaults())));
}

#[test]
fn tenants_match_snapshot() {
    let tenants = json!([
        {"namespace": "apps", "serviceAccount": "chat", "name": "Chat", "class": "interactive", "weight": 2.5},
        {"namespace": "jobs", "class": "batch", "models": ["m"], "maxInFlight": 40, "maxQueuePercent": 25,
            "tokensPerMinute": 100_000, "tokensPerDay": 2_000_000},
    ]);
    let spec = json!({"relay": {"requireApiKeys": true, "tenants": tenants}});
    snapshot::check("provider-tenants", &page(&built(spec, &[], &steady(), &defaults())));
}

#[test]
fn rotation_in_progress_matches_snapshot() {
    let previous = |value: &str, until: &str| Previous { value: Secret::new(value), until: Some(at(until)) };
    let plan = Plan {
        current: Secret::new("new-value"),
        previous: vec![previous("old-value", "2026-11-02T00:00:00Z"), previous("older-value", "2026-11-01T09:00:00Z")],
        worker: Secret::new("new-value"),
        acted_on: Some("monday".into()),
        ..steady()
    };
    snapshot::check("provider-rotating", &page(&built(json!({}), &[], &plan, &defaults())));
}

#[test]
fn load_balancer_for_workers_matches_snapshot() {
    let service = json!({"type": "LoadBalancer", "workers": true, "loadBalancerClass": "example.com/lb",
        "ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]});
    let spec = json!({"relay": {"replicas": 2, "service": service, "networkPolicy": {"metricsFrom": []}}});
    snapshot::check("provider-load-balancer", &page(&built(spec, &[], &steady(), &defaults())));
}

#[test]
fn only_owned_objects_carry_instance_label() {
    let spec = json!({"relay": {"requireApiKeys": true}});
    let desired = built(spec, &[], &steady(), &defaults());
    let mut unowned = Vec::new();
    for manifest in desired.secrets.iter().chain(&desired.objects) {
        let metadata = &manifest.value["metadata"];
        // Argo CD prunes no object with an owner.
        let is_owned = metadata["ownerReferences"].is_array();
        let label = metadata["labels"].get("app.kubernetes.io/instance");
        assert_eq!(label, is_owned.then_some(&json!("local")), "{}", manifest.display());
        assert_eq!(metadata["labels"]["modelrelay.io/provider"], "local", "{}", manifest.display());
        unowned.extend((!is_owned).then(|| manifest.name.clone()));
    }
    unowned.sort();
    assert_eq!(unowned, ["local-admin", "local-api-keys", "local-worker"]);
}

#[test]
fn relay_requests_no_ids_that_cluster_assigns() {
    let context = |relay: Value, omit_ids: bool| {
        let desired = built(json!({"relay": relay}), &[], &steady(), &RelayDefaults { omit_ids, ..defaults() });
        let deployment = desired.objects.iter().find(|object| object.value["kind"] == "Deployment").unwrap();
        deployment.value["spec"]["template"]["spec"]["securityContext"].clone()
    };
    let ids = json!({"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532});
    let mut restricted = json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    assert_eq!(context(json!({}), true), restricted);
    let own = json!({"podTemplate": {"securityContext": {"fsGroup": 7}}});
    assert_eq!(context(own, true)["fsGroup"], 7);
    restricted.as_object_mut().unwrap().extend(ids.as_object().unwrap().clone());
    assert_eq!(context(json!({}), false), restricted);
}

/// Returns the peers that may connect to the admin port, or `None` for every address.
fn admin_peers(metrics_from: &Value, defaults: &RelayDefaults, operator: &OperatorLocation) -> Option<Value> {
    let valid = validate(&provider(json!({"relay": {"networkPolicy": {"metricsFrom": metrics_from}}})), &[]).unwrap();
    network::network_policy(&valid, defaults, operator).value["spec"]["ingress"][2].get("from").cloned()
}

fn operator_peer() -> Value {
    json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mr-system"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "modelrelay", "app.kubernetes.io/component": "operator"}},
    })
}

#[test]
fn admin_port_admits_only_operator_by_default() {
    let place = OperatorLocation::in_namespace("mr-system");
    assert_eq!(admin_peers(&json!([]), &RelayDefaults::default(), &place), Some(json!([operator_peer()])));
}

#[test]
fn listed_metrics_peers_replace_chart_peers() {
    let place = OperatorLocation::in_namespace("mr-system");
    let (chart, own) = (json!({"podSelector": {}}), json!({"namespaceSelector": {}}));
    let defaults = RelayDefaults { metrics_from: vec![chart.clone()], ..RelayDefaults::default() };
    assert_eq!(admin_peers(&json!([]), &defaults, &place), Some(json!([operator_peer(), chart])));
    assert_eq!(admin_peers(&json!([own]), &defaults, &place), Some(json!([operator_peer(), own])));
}

#[test]
fn operator_on_host_network_reaches_admin_port() {
    let on_node = OperatorLocation { host_network: true, ..OperatorLocation::in_namespace("mr-system") };
    let none = RelayDefaults::default();
    assert_eq!(admin_peers(&json!([]), &none, &on_node), None);
    let nodes = json!({"ipBlock": {"cidr": "10.0.0.0/24"}});
    let closed = Some(json!([operator_peer(), nodes]));
    assert_eq!(admin_peers(&json!([nodes]), &none, &on_node), closed);
    let defaults = RelayDefaults { metrics_from: vec![nodes], ..none };
    assert_eq!(admin_peers(&json!([]), &defaults, &on_node), closed);
}

#[test]
fn pools_at_zero_add_cold_models() {
    let template = json!({"spec": {"containers": []}});
    let held = json!([{"id": "in-a-slot", "aliases": ["alias"], "url": "http://127.0.0.1:1"}]);
    let slots = json!({"slots": [{"id": "gpu0", "driver": "static", "models": held}]});
    let pools = [
        pool(json!({"provider": "local", "models": ["b", "a"], "replicas": 0, "template": template})),
        pool(json!({"provider": "local", "scaling": {"minReplicas": 0, "maxReplicas": 1}, "template": template})),
        pool(json!({"provider": "local", "multiplexer": slots, "replicas": 0, "template": template})),
        pool(json!({"provider": "local", "models": ["never-at-zero"], "replicas": 1, "template": template})),
    ];
    let page = page(&built(json!({"relay": {"expectWorkers": true}}), &pools, &steady(), &defaults()));
    assert!(
        page.contains("coldModels:\n      - a\n      - alias\n      - b\n      - in-a-slot\n      - seen-before\n"),
        "{page}"
    );
    assert!(page.contains("expectWorkers: false"), "{page}");
}

#[test]
fn configuration_hash_changes_only_with_input() {
    let build = |spec: Value| built(spec, &[], &steady(), &defaults());
    let (one, same) = (build(json!({})), build(json!({})));
    assert_eq!(page(&one), page(&same));
    assert_eq!(one.config_hash, same.config_hash);
    assert_ne!(one.config_hash, build(json!({"enabled": false})).config_hash);
}
