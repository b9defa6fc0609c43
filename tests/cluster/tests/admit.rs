//! Objects of the two kinds that the API server accepts or rejects, and the messages, which are the first help that a
//! user gets.

use modelrelay_cluster::{Cluster, Namespace};
use serde_json::{Value, json};

fn provider(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "metadata": {"name": name}, "spec": spec})
}

fn with_tenants(tenants: &Value) -> Value {
    provider("p", &json!({"relay": {"requireApiKeys": true, "tenants": tenants}}))
}

fn pool(name: &str, spec: &Value) -> Value {
    // A Provider that does not exist: nothing is created for these.
    let mut spec = spec.clone();
    if spec.get("provider").is_none() {
        spec["provider"] = json!("nobody");
    }
    json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool", "metadata": {"name": name}, "spec": spec})
}

/// A minimal valid template.
fn template() -> Value {
    json!({"spec": {"containers": [{"name": "vllm", "image": "example/vllm"}]}})
}

/// A workload of another owner.
fn target(kind: &str) -> Value {
    json!({"kind": kind, "name": "vllm"})
}

async fn assert_refused(namespace: &Namespace, resource: Value, words: &str) {
    let error =
        namespace.kubectl("apply --dry-run=server --filename -").input(resource.to_string()).expect_failure().await;
    assert!(error.contains(words), "{resource}\nis rejected, but without the words {words:?}:\n{error}");
}

async fn assert_taken(namespace: &Namespace, resource: Value) {
    namespace.kubectl("apply --dry-run=server --filename -").input(resource.to_string()).await;
}

#[tokio::test]
async fn empty_provider_receives_every_default() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    let given = namespace
        .kubectl("create --dry-run=server --output json --filename -")
        .input(provider("local", &json!({})).to_string())
        .await;
    let given: Value = serde_json::from_str(&given).unwrap();
    assert_eq!(
        given["spec"],
        json!({
            "enabled": true,
            "maxModelsPerWorker": 256,
            "queue": {"maxBytes": "256Mi", "maxLength": 1000},
            "relay": {
                "drainTimeout": "30s", "expectWorkers": false, "networkPolicy": {"enabled": true}, "podTemplate": {},
                "replicas": 1, "requireApiKeys": false, "unreadyWhenSaturated": false,
                "service": {"type": "ClusterIP", "workers": false},
            },
            "requireProtocolVersion": false,
            "secretsPolicy": "Retain",
        })
    );
}

#[tokio::test]
async fn provider_errors_are_rejected_with_their_field() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    let long = "a".repeat(53);
    let cases = [
        (provider("local-workers", &json!({})), "names that end in -workers"),
        (provider("9local", &json!({})), "starting with a letter"),
        (provider("a.b", &json!({})), "at most 52 characters of a-z"),
        (provider(&long, &json!({})), "at most 52"),
        (provider("p", &json!({"requestTimeout": "1d"})), "spec.requestTimeout"),
        (provider("p", &json!({"requestTimeout": "0s"})), "from 1ms to 87600h"),
        (provider("p", &json!({"requestTimeout": "1.5h"})), "spec.requestTimeout"),
        (provider("p", &json!({"queue": {"maxBytes": "256m"}})), "spec.queue.maxBytes"),
        (provider("p", &json!({"queue": {"maxBytes": 0}})), "spec.queue.maxBytes"),
        (provider("p", &json!({"queue": {"maxLength": -1}})), "spec.queue.maxLength"),
        (provider("p", &json!({"queue": {"maxlength": 1}})), "unknown field \"spec.queue.maxlength\""),
        (provider("p", &json!({"models": [{"id": "a"}, {"id": "a"}]})), "Duplicate value"),
        (provider("p", &json!({"secretsPolicy": "Keep"})), "supported values: \"Retain\", \"Delete\""),
        (provider("p", &json!({"relay": {"service": {"type": "ExternalName"}}})), "spec.relay.service.type"),
        (provider("p", &json!({"workerSecretRef": {"name": "s"}})), "spec.workerSecretRef.key: Required value"),
        (with_tenants(&json!([{"serviceAccount": "a"}])), "spec.relay.tenants[0].namespace: Required value"),
        (with_tenants(&json!([{"namespace": "a/b"}])), "spec.relay.tenants[0].namespace"),
        (with_tenants(&json!([{"namespace": "a", "weight": 101}])), "spec.relay.tenants[0].weight"),
        (with_tenants(&json!([{"namespace": "a", "class": "urgent"}])), "supported values: \"interactive\""),
        (with_tenants(&json!([{"namespace": "a", "maxQueuePercent": 101}])), "spec.relay.tenants[0].maxQueuePercent"),
        (with_tenants(&json!([{"namespace": "a"}, {"namespace": "a"}])), "Duplicate value"),
        (
            with_tenants(
                &json!([{"namespace": "a", "serviceAccount": "x"}, {"namespace": "a", "serviceAccount": "x"}]),
            ),
            "Duplicate value",
        ),
        (
            with_tenants(&json!([{"namespace": "a", "name": "n"}, {"namespace": "b", "name": "n"}])),
            "the names of tenants must be unique",
        ),
        (provider("p", &json!({"relay": {"tenants": [{"namespace": "a"}]}})), "tenants need requireApiKeys: true"),
        (provider("p", &json!({"relayRef": {"namespace": "a"}})), "spec.relayRef.name: Required value"),
        (provider("p", &json!({"relayRef": {"name": "Q"}})), "spec.relayRef.name"),
        (provider("p", &json!({"relay": {"sharedWith": [{"namespace": "a"}, {"namespace": "a"}]}})), "Duplicate value"),
    ];
    for (resource, words) in cases {
        assert_refused(&namespace, resource, words).await;
    }
}

#[tokio::test]
async fn provider_has_own_relay_or_refers_to_one() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    let referring = |relay: &Value| provider("p", &json!({"relayRef": {"name": "front"}, "relay": relay}));
    assert_taken(&namespace, referring(&json!({}))).await;
    let settings = [
        json!({"replicas": 2}),
        json!({"requireApiKeys": true}),
        json!({"tls": {"secretName": "s"}}),
        json!({"sharedWith": [{"namespace": "a"}]}),
        json!({"service": {"type": "LoadBalancer"}}),
        json!({"networkPolicy": {"enabled": false}}),
        json!({"resources": {"limits": {"cpu": "1"}}}),
        json!({"podTemplate": {"labels": {"a": "b"}}}),
    ];
    for relay in settings {
        assert_refused(&namespace, referring(&relay), "spec.relay must be omitted with spec.relayRef").await;
    }
    namespace.apply(&[provider("own", &json!({})), provider("p", &json!({"relayRef": {"name": "front"}}))]).await;
    assert_taken(&namespace, provider("own", &json!({"relayRef": {"name": "front"}}))).await;
    let elsewhere = json!({"relayRef": {"name": "front", "namespace": "elsewhere"}});
    assert_refused(&namespace, provider("own", &elsewhere), "only to a relay of its namespace").await;
    // null: kubectl removes a field only if it set it before.
    for spec in [json!({"relayRef": {"name": "own"}}), json!({"relayRef": null})] {
        assert_refused(&namespace, provider("p", &spec), "spec.relayRef cannot be changed or removed").await;
    }
}

#[tokio::test]
async fn namespace_and_its_account_may_both_be_tenants() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    let tenants = json!([
        {"namespace": "apps", "weight": 2.5, "class": "batch", "tokensPerDay": 1_000_000_000_000_i64},
        {"namespace": "apps", "serviceAccount": "chat.v2", "name": "Chat", "maxInFlight": 4, "models": ["m"]},
        {"namespace": "apps", "serviceAccount": "other", "weight": 0.01},
    ]);
    assert_taken(&namespace, with_tenants(&tenants)).await;
}

#[tokio::test]
async fn human_readable_sizes_and_durations_are_accepted() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    for queue in [
        json!({"maxBytes": 1_048_576, "timeout": "500ms", "coldTimeout": "1h30m"}),
        json!({"maxBytes": "512Ki", "timeout": "1ms", "coldTimeout": "87600h"}),
        json!({"maxBytes": "2Gi", "maxLength": 0}),
    ] {
        assert_taken(&namespace, provider("p", &json!({"queue": queue}))).await;
    }
}

#[tokio::test]
async fn pool_errors_are_rejected_with_their_field() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    let cases = [
        (pool("none", &json!({})), "the name none is reserved"),
        (pool("a.b", &json!({})), "at most 52 characters of a-z"),
        (
            json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "p"}, "spec": {}}),
            "spec.provider: Required value",
        ),
        (pool("p", &json!({"template": template(), "standalone": {}})), "template and standalone exclude each other"),
        (pool("p", &json!({"standalone": {}})), "a standalone pool needs backend.url"),
        (pool("p", &json!({"backend": {"url": "http://a"}})), "backend.url is only for standalone pools"),
        (pool("p", &json!({"backend": {"url": "ftp://a"}, "standalone": {}})), "spec.backend.url"),
        (pool("p", &json!({"replicas": 2})), "replicas needs standalone, or a template of kind Deployment"),
        (
            pool("p", &json!({"replicas": 2, "template": {"kind": "DaemonSet", "spec": {"containers": []}}})),
            "replicas needs standalone, or a template of kind Deployment",
        ),
        (pool("p", &json!({"selector": {}})), "a selector needs matchLabels"),
        (
            pool("p", &json!({"template": template(), "selector": {"matchLabels": {"app": "a"}}})),
            "selector excludes template and standalone",
        ),
        (
            pool("p", &json!({"selector": {"matchExpressions": [{"key": "app", "operator": "In"}]}})),
            "In and NotIn need values",
        ),
        (
            pool("p", &json!({"scaling": {"maxReplicas": 2}})),
            "scaling needs a template of kind Deployment, or scaling.targetRef",
        ),
        (
            pool(
                "p",
                &json!({"template": template(), "scaling": {"maxReplicas": 2, "targetRef": target("Deployment")}}),
            ),
            "scaling.targetRef excludes template and standalone",
        ),
        (
            pool("p", &json!({"scaling": {"maxReplicas": 2, "targetRef": target("DaemonSet")}})),
            "supported values: \"Deployment\", \"StatefulSet\"",
        ),
        (
            pool("p", &json!({"replicas": 1, "scaling": {"maxReplicas": 2, "targetRef": target("Deployment")}})),
            "replicas needs standalone, or a template of kind Deployment",
        ),
        (
            pool("p", &json!({"template": template(), "scaling": {"minReplicas": 3, "maxReplicas": 2}})),
            "minReplicas is greater than maxReplicas",
        ),
        (
            pool(
                "p",
                &json!({"backend": {}, "multiplexer": {"slots": [{"id": "g", "driver": "ollama", "url": "http://o", "models": [{"id": "m"}]}]}}),
            ),
            "backend and multiplexer.slots exclude each other",
        ),
        (
            pool(
                "p",
                &json!({"multiplexer": {"slots": [{"id": "g", "driver": "kubernetes", "models": [{"id": "m", "deployment": "d"}]}]}}),
            ),
            "the driver kubernetes needs standalone",
        ),
        (pool("p", &json!({"backend": {"engine": "tgi"}})), "spec.backend.engine"),
        (pool("p", &json!({"backend": {"port": 0}})), "spec.backend.port"),
        (pool("p", &json!({"maxConcurency": 4})), "unknown field \"spec.maxConcurency\""),
        (pool("p", &json!({"models": []})), "spec.models"),
    ];
    for (resource, words) in cases {
        assert_refused(&namespace, resource, words).await;
    }
}

#[tokio::test]
async fn pool_mode_is_immutable() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    namespace.apply(&[pool("injecting", &json!({})), pool("templated", &json!({"template": template()}))]).await;
    let elsewhere = pool("injecting", &json!({"provider": "somebody"}));
    assert_refused(&namespace, elsewhere, "provider is immutable").await;
    let templated = pool("injecting", &json!({"template": template()}));
    assert_refused(&namespace, templated, "the mode of a pool").await;
    let daemon_set = pool("templated", &json!({"template": {"kind": "DaemonSet", "spec": {"containers": []}}}));
    assert_refused(&namespace, daemon_set, "template.kind is immutable").await;
}

#[tokio::test]
async fn template_keeps_unknown_fields() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    let spec = json!({
        "containers": [{"name": "vllm", "image": "example/vllm", "newField": {"a": [1, 2]}}],
        "tomorrow": {"is": "another day"},
    });
    let given = namespace
        .kubectl("create --dry-run=server --output json --filename -")
        .input(pool("p", &json!({"template": {"spec": spec}})).to_string())
        .await;
    let given: Value = serde_json::from_str(&given).unwrap();
    assert_eq!(given["spec"]["template"]["spec"], spec);
}

#[tokio::test]
async fn two_writers_share_template() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    namespace.apply(&[pool("shared", &json!({"template": template()}))]).await;
    let more =
        pool("shared", &json!({"template": {"spec": {"containers": [{"name": "logs", "image": "example/logs"}]}}}));
    namespace.kubectl("apply --server-side --field-manager=another --filename -").input(more.to_string()).await;
    let names = namespace.kubectl("get wp shared --output jsonpath={.spec.template.spec.containers[*].name}").await;
    assert_eq!(names, "vllm logs");
}

#[tokio::test]
async fn pools_are_selectable_by_provider_and_category() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("admit").await;
    namespace.apply(&[pool("one", &json!({"provider": "a"})), pool("two", &json!({"provider": "b"}))]).await;
    let found = namespace.kubectl("get workerpools --field-selector spec.provider=b --output name").await;
    assert_eq!(found.trim(), "workerpool.modelrelay.io/two");
    let found = namespace.kubectl("get modelrelay --output name").await;
    assert_eq!(found.lines().count(), 2, "{found}");
}
