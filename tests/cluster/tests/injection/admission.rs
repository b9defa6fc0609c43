//! The webhook's decisions and messages when a Pod is created.

use serde_json::{Value, json};

use super::setup::{POOL_LABEL, Setup, pod, pool, worker};

#[tokio::test]
async fn pod_of_missing_pool_is_refused_by_name() {
    let setup = Setup::empty().await;
    let error = setup.refused(&pod("vllm", "nowhere")).await;
    let wanted = format!(
        "namespace {} has no WorkerPool nowhere: create it, or set label modelrelay.io/pool to none",
        setup.namespace.name
    );
    assert!(error.contains(&wanted), "{error}");
    let error = setup.refused(&pod("vllm", "")).await;
    assert!(error.contains("label modelrelay.io/pool is empty: set it to the name of a WorkerPool"), "{error}");
    assert_eq!(setup.namespace.pod_names("").await, Vec::<String>::new());
    // A pool of another namespace does not apply.
    setup.namespace.apply(&[pool("nowhere", &json!({}))]).await;
    let other = Setup::empty().await;
    assert!(other.refused(&pod("vllm", "nowhere")).await.contains("has no WorkerPool nowhere"));
    assert!(worker(&setup.admitted(&pod("vllm", "nowhere")).await).is_some());
}

#[tokio::test]
async fn pod_can_opt_out() {
    let setup = Setup::pool(&json!({})).await;
    let given = setup.admitted(&pod("vllm", "none")).await;
    assert_eq!((worker(&given), given["spec"].get("initContainers")), (None, None));
    assert_eq!(given["spec"]["terminationGracePeriodSeconds"], 30);
    assert_eq!(given["spec"]["containers"][0].get("lifecycle"), None);
    let mut unlabelled = pod("vllm", "none");
    unlabelled["metadata"]["labels"] = json!({"app": "vllm"});
    assert_eq!(worker(&setup.admitted(&unlabelled).await), None);
}

#[tokio::test]
async fn dry_run_shows_worker_without_side_effects() {
    let setup = Setup::provided(&json!({})).await;
    let everything = "get pods,secrets,configmaps,services,deployments,serviceaccounts,events.v1. --output name";
    let before = setup.namespace.kubectl(everything).await;
    assert!(worker(&setup.admitted(&pod("vllm", "llama")).await).is_some());
    let error = setup
        .namespace
        .kubectl("create --dry-run=server --filename -")
        .input(pod("vllm", "nowhere").to_string())
        .expect_failure()
        .await;
    assert!(error.contains("has no WorkerPool nowhere"), "{error}");
    let after = setup.namespace.kubectl(everything).await;
    // The Provider may still publish Events.
    let objects = |names: &str| -> Vec<String> {
        names.lines().filter(|name| !name.starts_with("event")).map(str::to_owned).collect()
    };
    assert_eq!(objects(&after), objects(&before));
    assert!(after.lines().all(|name| !name.contains("vllm")), "{after}");
    assert_eq!(setup.namespace.pod_names(POOL_LABEL).await, Vec::<String>::new());
}

#[tokio::test]
async fn pod_declaring_worker_port_is_refused() {
    let setup = Setup::pool(&json!({})).await;
    let mut clash = pod("vllm", "llama");
    clash["spec"]["containers"][0]["ports"] = json!([{"containerPort": 8000}, {"containerPort": 17990}]);
    let error = setup.refused(&clash).await;
    let wanted = "WorkerPool llama: container vllm declares port 17990, which the worker needs for probes: set \
                  spec.sidecar.port of the pool to another port";
    assert!(error.contains(wanted), "{error}");
    setup.namespace.apply(&[pool("llama", &json!({"sidecar": {"port": 18000}}))]).await;
    let given = setup.admitted(&clash).await;
    let (_, sidecar) = worker(&given).expect("the Pod has a worker");
    assert_eq!(sidecar["ports"][0]["containerPort"], 18000);
    assert_eq!(sidecar["startupProbe"]["httpGet"]["port"], 18000);
    assert_eq!(given["spec"]["containers"][0]["lifecycle"]["preStop"]["httpGet"]["port"], 18000);
}

#[tokio::test]
async fn pool_with_own_pods_refuses_injection() {
    let setup = Setup::empty().await;
    let template = json!({"spec": {"containers": [modelrelay_cluster::manifests::demo_container()]}});
    setup.namespace.apply(&[pool("llama", &json!({"template": template, "replicas": 0}))]).await;
    let error = setup.refused(&pod("vllm", "llama")).await;
    assert!(error.contains("WorkerPool llama: the pool runs Pods from its template"), "{error}");
}

#[tokio::test]
async fn worker_is_injected_only_once() {
    let setup = Setup::pool(&json!({})).await;
    let once = setup.admitted(&pod("vllm", "llama")).await;
    let mut again = once.clone();
    let metadata = again["metadata"].as_object_mut().expect("metadata");
    metadata.retain(|key, _| ["name", "labels", "annotations"].contains(&key.as_str()));
    again.as_object_mut().expect("a Pod").remove("status");
    let twice = setup.admitted(&again).await;
    assert_eq!(without_random(&twice), without_random(&once));
}

/// Returns the spec without the random volume name that the API server generates for each Pod.
fn without_random(pod: &Value) -> Value {
    let text = pod["spec"].to_string();
    let at = text.find("kube-api-access-").map(|at| &text[at..at + "kube-api-access-".len() + 5]);
    let text = at.map_or_else(|| text.clone(), |name| text.replace(name, "kube-api-access"));
    serde_json::from_str(&text).expect("it was JSON")
}
