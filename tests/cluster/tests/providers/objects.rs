//! The objects of a Provider: their contents, that they are recreated, and that foreign objects are left alone.

use std::fmt::Debug;

use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        core::v1::{Secret, Service, ServiceAccount},
        networking::v1::NetworkPolicy,
        policy::v1::PodDisruptionBudget,
    },
};
use kube::{Api, Resource, ResourceExt, api::DeleteParams};
use modelrelay_cluster::manifests;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::setup::{LOCAL, Setup, message_of};

/// Creates all objects and no Pod.
async fn at_zero(relay: &Value) -> Setup {
    let mut relay = relay.clone();
    relay["replicas"] = json!(0);
    let setup = Setup::empty().await;
    setup.provide(&json!({"relay": relay})).await;
    setup.reason("Ready", "False", "ScaledToZero").await;
    setup
}

#[tokio::test]
async fn taken_name_stalls_provider_until_it_is_free() {
    let setup = Setup::empty().await;
    setup.namespace.apply(&[manifests::service(LOCAL, "somebody", 80, 8080)]).await;
    let services = setup.namespace.api::<Service>();
    let foreign = services.get(LOCAL).await.expect("the object exists");
    setup.provide(&json!({})).await;
    let stalled = setup.reason("Stalled", "True", "NameTaken").await;
    let message = message_of(&stalled, "Stalled");
    assert!(message.contains("Service local exists and does not belong to this Provider"), "{message}");
    setup.reason("Ready", "False", "NameTaken").await;
    assert_eq!(services.get(LOCAL).await.expect("the Service still exists"), foreign);
    setup.namespace.kubectl("delete service local").await;
    setup.condition("Ready", "True").await;
    setup.condition("Stalled", "False").await;
    setup.namespace.service_address(LOCAL).await;
}

#[tokio::test]
async fn foreign_secret_with_needed_name_is_not_adopted() {
    let setup = Setup::empty().await;
    let foreign = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "local-admin"}, "stringData": {"token": "theirs"},
    });
    setup.namespace.apply(&[foreign]).await;
    let version =
        setup.namespace.api::<Secret>().get("local-admin").await.expect("the object exists").resource_version();
    setup.provide(&json!({"relay": {"replicas": 0}})).await;
    let stalled = setup.reason("Stalled", "True", "NameTaken").await;
    assert!(message_of(&stalled, "Stalled").contains("Secret local-admin"), "{stalled:?}");
    let now = setup.namespace.api::<Secret>().get("local-admin").await.expect("the Secret exists");
    assert_eq!((now.resource_version(), now.owner_references().len()), (version, 0));
}

/// Deletes an object, and waits for another of its name.
async fn expect_recreation<K>(setup: &Setup, name: &str)
where
    K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + Serialize + DeserializeOwned + Send + 'static,
    K::DynamicType: Default,
{
    let api: Api<K> = setup.namespace.api();
    let before = api.get(name).await.expect("the object exists").uid();
    api.delete(name, &DeleteParams::default()).await.expect("the object can be deleted");
    let another = |it: &K| it.uid().is_some() && it.uid() != before;
    setup.namespace.wait_for(&api, name, "another one in its place", another).await;
}

#[tokio::test]
async fn deleted_objects_are_recreated() {
    let setup = at_zero(&json!({})).await;
    expect_recreation::<Service>(&setup, "local").await;
    expect_recreation::<Service>(&setup, "local-workers").await;
    expect_recreation::<PodDisruptionBudget>(&setup, "local-relay").await;
    expect_recreation::<NetworkPolicy>(&setup, "local-relay").await;
    expect_recreation::<ServiceAccount>(&setup, "local-relay").await;
    expect_recreation::<Secret>(&setup, "local-relay").await;
}

#[tokio::test]
async fn changed_objects_are_restored() {
    let setup = at_zero(&json!({})).await;
    let patch = r#"{"spec": {"publishNotReadyAddresses": false}}"#;
    setup.namespace.kubectl("patch service local-workers --type merge --patch").arg(patch).await;
    let right = |it: &Service| it.spec.as_ref().and_then(|spec| spec.publish_not_ready_addresses) == Some(true);
    setup
        .namespace
        .wait_for(&setup.namespace.api::<Service>(), "local-workers", "unready relays are in DNS", right)
        .await;
    let patch = r#"{"spec": {"ingress": []}}"#;
    setup.namespace.kubectl("patch networkpolicy local-relay --type merge --patch").arg(patch).await;
    let right = |it: &NetworkPolicy| {
        it.spec.as_ref().and_then(|spec| spec.ingress.as_ref()).is_some_and(|rules| rules.len() == 3)
    };
    setup.namespace.wait_for(&setup.namespace.api::<NetworkPolicy>(), "local-relay", "its three rules", right).await;
}

fn selector() -> Value {
    json!({
        "app.kubernetes.io/name": "modelrelay", "app.kubernetes.io/component": "relay", "modelrelay.io/provider": "local",
    })
}

/// An object as JSON.
async fn object_json(setup: &Setup, what: &str) -> Value {
    let text = setup.namespace.kubectl(&format!("get {what} --output json")).await;
    serde_json::from_str(&text).expect("kubectl prints JSON")
}

/// Checks every field that `wanted` has.
fn assert_has(object: &Value, wanted: &Value) {
    let mut merged = object.clone();
    for (key, value) in wanted.as_object().expect("an object") {
        merged[key] = value.clone();
    }
    assert_eq!(object, &merged);
}

/// The operator's Pods, as a peer of a NetworkPolicy.
fn operator() -> Value {
    let labels = json!({"app.kubernetes.io/name": "modelrelay", "app.kubernetes.io/component": "operator"});
    let namespace = json!({"kubernetes.io/metadata.name": modelrelay_cluster::SYSTEM_NAMESPACE});
    json!({"namespaceSelector": {"matchLabels": namespace}, "podSelector": {"matchLabels": labels}})
}

#[tokio::test]
async fn objects_have_shapes_enforced_by_cluster() {
    let setup = at_zero(&json!({})).await;
    let port = |number: u16| json!([{"port": number, "protocol": "TCP"}]);
    let policy = object_json(&setup, "networkpolicy local-relay").await;
    assert_eq!(
        policy["spec"],
        json!({
            "podSelector": {"matchLabels": selector()},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": port(8080)},
                {"ports": port(8081), "from": [{"podSelector": {}}]},
                {"ports": port(8082), "from": [operator()]},
            ],
        })
    );
    let budget = object_json(&setup, "pdb local-relay").await;
    assert_eq!(
        budget["spec"],
        json!({"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": {"matchLabels": selector()}})
    );
    let clients = &object_json(&setup, "service local").await["spec"];
    let http = json!([{"name": "http", "port": 80, "protocol": "TCP", "targetPort": "client", "appProtocol": "http"}]);
    assert_has(clients, &json!({"type": "ClusterIP", "selector": selector(), "ports": http}));
    let workers = &object_json(&setup, "service local-workers").await["spec"];
    let dialled =
        json!([{"name": "workers", "port": 8081, "protocol": "TCP", "targetPort": "workers", "appProtocol": "http"}]);
    let headless =
        json!({"clusterIP": "None", "publishNotReadyAddresses": true, "selector": selector(), "ports": dialled});
    assert_has(workers, &headless);
    assert_owned(&setup).await;
}

/// Checks that everything but the three Secrets is deleted with the Provider and carries its labels.
async fn assert_owned(setup: &Setup) {
    let uid = setup.providers.get(LOCAL).await.expect("the Provider exists").uid();
    let kinds = "service,serviceaccount,deployment,pdb,networkpolicy,secret";
    let found = object_json(setup, &format!("{kinds} --selector modelrelay.io/provider=local")).await;
    let items = found["items"].as_array().expect("a list");
    let mut names: Vec<String> = Vec::new();
    for item in items {
        let (name, labels) = (item["metadata"]["name"].as_str().expect("a name"), &item["metadata"]["labels"]);
        names.push(format!("{} {name}", item["kind"].as_str().expect("a kind")));
        assert_eq!(labels["app.kubernetes.io/managed-by"], "modelrelay-operator", "{name}");
        assert_eq!(
            (&labels["app.kubernetes.io/name"], &labels["app.kubernetes.io/part-of"]),
            (&json!("modelrelay"), &json!("modelrelay"))
        );
        let owner = item["metadata"]["ownerReferences"][0]["uid"].as_str().map(str::to_owned);
        let stays = ["local-worker", "local-admin"].contains(&name);
        // Argo CD would prune Secrets that stay if they had the name of an Application as their instance.
        let instance = if stays { Value::Null } else { json!(LOCAL) };
        assert_eq!(
            (&labels["app.kubernetes.io/instance"], &labels["app.kubernetes.io/component"]),
            (&instance, &json!("relay"))
        );
        assert_eq!(owner, uid.clone().filter(|_| !stays), "{name}");
    }
    names.sort();
    let wanted = [
        "Deployment local-relay",
        "NetworkPolicy local-relay",
        "PodDisruptionBudget local-relay",
        "Secret local-admin",
        "Secret local-relay",
        "Secret local-worker",
        "Service local",
        "Service local-workers",
        "ServiceAccount local-relay",
    ];
    assert_eq!(names, wanted);
}

#[tokio::test]
async fn network_settings_of_spec_reach_objects() {
    let setup = at_zero(&json!({
        "service": {"type": "NodePort", "port": 8000, "workers": true, "annotations": {"example.com/lb": "internal"}},
        "networkPolicy": {
            "from": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    }))
    .await;
    let service = object_json(&setup, "service local").await;
    assert_eq!(service["metadata"]["annotations"]["example.com/lb"], "internal");
    let ports = service["spec"]["ports"].as_array().expect("ports");
    let ports: Vec<_> = ports.iter().map(|port| (&port["name"], &port["port"], &port["targetPort"])).collect();
    let wanted = (json!("http"), json!("workers"), json!(8000), json!(8081), json!("client"));
    assert_eq!(ports, [(&wanted.0, &wanted.2, &wanted.4), (&wanted.1, &wanted.3, &wanted.1)]);
    assert_eq!(service["spec"]["type"], "NodePort");
    let policy = object_json(&setup, "networkpolicy local-relay").await;
    let ingress = &policy["spec"]["ingress"];
    assert_eq!(ingress[1]["from"], json!([{"podSelector": {}}, {"ipBlock": {"cidr": "192.0.2.0/24"}}]));
    let monitoring = json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}});
    assert_eq!(ingress[2]["from"], json!([operator(), monitoring]));
    let provider = setup.providers.get(LOCAL).await.expect("the Provider exists");
    let endpoint = format!("http://local.{}.svc:8000/v1", setup.namespace.name);
    assert_eq!(provider.data["status"]["endpoint"], endpoint);
    // Disabled, it is removed.
    setup.patch(&json!({"relay": {"networkPolicy": {"enabled": false}}})).await;
    setup.namespace.wait_gone(&setup.namespace.api::<NetworkPolicy>(), "local-relay").await;
}

#[tokio::test]
async fn relay_has_rights_only_with_api_keys() {
    let setup = at_zero(&json!({"requireApiKeys": true})).await;
    let role = object_json(&setup, "role local-relay").await;
    let rule = json!({
        "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["local-api-keys"], "verbs": ["get", "update", "patch"],
    });
    assert_eq!(role["rules"], json!([rule]));
    let account = format!("system:serviceaccount:{}:local-relay", setup.namespace.name);
    let can =
        async |what: &str| setup.namespace.kubectl(&format!("auth can-i {what} --as {account}")).output().await.success;
    assert!(can("update secret/local-api-keys").await);
    assert!(!can("get secret/local-admin").await && !can("list secrets").await && !can("get pods").await);
    setup.patch(&json!({"relay": {"requireApiKeys": false}})).await;
    setup.namespace.wait_gone(&setup.namespace.api::<k8s_openapi::api::rbac::v1::Role>(), "local-relay").await;
    setup.namespace.wait_gone(&setup.namespace.api::<k8s_openapi::api::rbac::v1::RoleBinding>(), "local-relay").await;
    // The keys belong to the clients.
    setup.namespace.api::<Secret>().get("local-api-keys").await.expect("the Secret stays");
}
