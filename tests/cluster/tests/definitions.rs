//! Resources of other projects against these projects' real definitions, on a control plane of its own: Gateway API,
//! KEDA, Kueue and Istio. Their controllers do not run. Dynamic Resource Allocation is a part of Kubernetes, which
//! makes claims for Pods of a pool.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use modelrelay_cluster::{Cluster, Command, Namespace, RELEASE, SYSTEM_NAMESPACE, TEST_TIMEOUT, wait_until};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::scale::control_plane::ControlPlane;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Kinds among the examples whose definitions are still missing: no Go module has those of NGINX Gateway Fabric.
const UNDEFINED: [&str; 2] = ["ClientSettingsPolicy", "ProxySettingsPolicy"];

/// Values of a chart's route with every field.
const ROUTE: &str = "--set httpRoute.enabled=true,httpRoute.provider=local,httpRoute.port=443 \
    --set httpRoute.parentRefs[0].name=public,httpRoute.parentRefs[0].namespace=gateways \
    --set httpRoute.parentRefs[0].sectionName=https --set httpRoute.hostnames[0]=llm.example.com \
    --set httpRoute.additionalLabels.team=a --set httpRoute.annotations.note=yes";

/// What a cluster's administrator creates for the pool of `kueue.yaml`.
fn queues() -> [Value; 3] {
    let quota = json!({"name": "nvidia.com/gpu", "nominalQuota": 2});
    let flavors = json!([{"name": "gpu", "resources": [quota]}]);
    [
        json!({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "gpu"}}),
        json!({
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ClusterQueue", "metadata": {"name": "gpus"},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [{"coveredResources": ["nvidia.com/gpu"], "flavors": flavors}],
            },
        }),
        json!({
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gpus"},
            "spec": {"clusterQueue": "gpus"},
        }),
    ]
}

#[tokio::test]
async fn foreign_definitions_accept_examples_and_route() {
    let plane = ControlPlane::start().await;
    define(&plane.cluster).await;
    let namespace = plane.cluster.namespace_with("definitions", "privileged").await;
    examples_are_accepted(&namespace).await;
    route_is_installed(&plane.cluster).await;
    namespace.apply(&queues()).await;
    let operator = plane.operator().await;
    pools_keep_labels_and_claims(&namespace).await;
    drop(operator);
}

/// Adds the definitions.
async fn define(cluster: &Cluster) {
    let folder = Command::new(format!("{ROOT}/scripts/cluster/definitions")).await;
    cluster.kubectl("apply --server-side --recursive --filename").arg(folder.trim()).await;
    cluster.kubectl("wait --for condition=Established --timeout 60s crd --all").await;
}

/// Every document of every example, strictly: unknown fields are errors.
async fn examples_are_accepted(namespace: &Namespace) {
    let (mut undefined, mut accepted) = (BTreeSet::new(), BTreeSet::new());
    for entry in fs::read_dir(format!("{ROOT}/deploy/examples")).expect("the examples exist") {
        let path = entry.expect("a file").path();
        for object in documents(&path) {
            let kind = object["kind"].as_str().expect("a kind").to_owned();
            let dry = dry_run(namespace, &object).output().await;
            if dry.success {
                accepted.insert(kind);
            } else {
                assert!(dry.stderr.contains("no matches for kind"), "{}: {kind}: {}", path.display(), dry.stderr);
                undefined.insert(kind);
            }
        }
    }
    assert_eq!(undefined.iter().map(String::as_str).collect::<Vec<_>>(), UNDEFINED);
    for kind in ["HTTPRoute", "PeerAuthentication", "ReferenceGrant", "ResourceClaimTemplate", "ScaledObject"] {
        assert!(accepted.contains(kind), "no {kind} among the examples: {accepted:?}");
    }
}

/// The chart's route is accepted and stored with its timeouts, and a wrong one is rejected by the definition.
async fn route_is_installed(cluster: &Cluster) {
    let upgrade = format!("upgrade {RELEASE} {ROOT}/charts/modelrelay --namespace {SYSTEM_NAMESPACE} --reuse-values");
    let refused = cluster.helm(4, &format!("{upgrade} {ROUTE} --set httpRoute.hostnames[0]=not_a_name"));
    let refused = refused.expect_failure().await;
    assert!(refused.contains("spec.hostnames[0]"), "{refused}");
    cluster.helm(4, &format!("{upgrade} {ROUTE}")).await;
    let get = format!("get httproute modelrelay-local --namespace {SYSTEM_NAMESPACE} --output json");
    let route: Value = serde_json::from_str(&cluster.kubectl(&get).await).expect("kubectl writes JSON");
    let rule = &route["spec"]["rules"][0];
    assert_eq!(rule["timeouts"], json!({"request": "0s", "backendRequest": "0s"}));
    assert_eq!((&rule["backendRefs"][0]["name"], &rule["backendRefs"][0]["port"]), (&json!("local"), &json!(443)));
    assert_eq!(rule["backendRefs"][0]["kind"], "Service", "the definition's default");
}

/// The Pods that pools make have the label by which Kueue queues them, and get a claim each.
async fn pools_keep_labels_and_claims(namespace: &Namespace) {
    for example in ["provider", "kueue", "dra"] {
        let path = format!("{ROOT}/deploy/examples/{example}.yaml");
        let mut objects = documents(Path::new(&path));
        // At least one Pod, so that there is something to see.
        for pool in objects.iter_mut().filter(|object| object["spec"]["scaling"].is_object()) {
            pool["spec"]["scaling"]["minReplicas"] = json!(1);
        }
        namespace.apply(&objects).await;
    }
    wait_until("a Pod that Kueue would queue", TEST_TIMEOUT, async || {
        let pods = namespace.pods("modelrelay.io/pool=qwen-queued").await;
        pods.iter().any(|pod| pod.labels().get("kueue.x-k8s.io/queue-name").is_some_and(|queue| queue == "gpus"))
    })
    .await;
    wait_until("a Pod with a claim of its own", TEST_TIMEOUT, async || {
        let pods = namespace.pods("modelrelay.io/pool=qwen-dra").await;
        pods.iter().any(has_claim)
    })
    .await;
    let claim = "get resourceclaims --output jsonpath={.items[*].spec.devices.requests[*].exactly.deviceClassName}";
    assert_eq!(namespace.kubectl(claim).await, "gpu.nvidia.com");
}

/// True if the Pod's claim exists, and only its engine's container uses it.
fn has_claim(pod: &Pod) -> bool {
    let status = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    let made = status.into_iter().flatten().any(|claim| claim.name == "gpu" && claim.resource_claim_name.is_some());
    let spec = pod.spec.as_ref().expect("a Pod has a spec");
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let claims = |container: &k8s_openapi::api::core::v1::Container| {
        container.resources.as_ref().is_some_and(|resources| resources.claims.is_some())
    };
    let users: Vec<&str> = containers.filter(|it| claims(it)).map(|container| container.name.as_str()).collect();
    made && users == ["vllm"]
}

fn dry_run(namespace: &Namespace, object: &Value) -> Command {
    let dry = namespace.kubectl("apply --server-side --validate=strict --dry-run=server --filename -");
    dry.input(object.to_string())
}

fn documents(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let documents = serde_yaml::Deserializer::from_str(&text).map(Value::deserialize);
    documents.map(|document| document.expect("YAML")).filter(|document| !document.is_null()).collect()
}
