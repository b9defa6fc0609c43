//! Pods without the label that pools select by other labels.

use super::*;

fn selecting(name: &str, second: i64, change: &Value) -> WorkerPool {
    let mut pool = pool(&json!({"selector": {"matchLabels": {"app": "vllm"}}}));
    json_patch::merge(&mut pool["spec"], change);
    pool["metadata"]["name"] = json!(name);
    pool["metadata"]["creationTimestamp"] = json!(format!("2026-01-01T00:00:{second:02}Z"));
    serde_json::from_value(pool).unwrap()
}

fn unlabelled() -> Value {
    let mut pod = controlled("any");
    pod["metadata"]["labels"] = json!({"app": "vllm", "pod-template-hash": "1"});
    pod
}

fn selected(pod: &Value, pools: &[WorkerPool]) -> AdmissionDecision {
    let review = review(pod);
    match question(&review) {
        Question::Selection(labels) => decide_selected(&review, &labels, pools, &WorkerDefaults::default(), "token"),
        Question::Settled(decision) => decision,
        Question::Pool(pool) => panic!("pool {pool}"),
    }
}

#[test]
fn selected_pod_receives_worker_and_label() {
    let AdmissionDecision::Injected { pod, warnings } = selected(&unlabelled(), &[selecting("a", 0, &json!({}))])
    else {
        panic!("not injected")
    };
    assert_eq!(pod["metadata"]["labels"], json!({"app": "vllm", "pod-template-hash": "1", POOL_LABEL: "a"}));
    assert!(sidecar::has_worker(&pod));
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn unselected_pod_is_unchanged() {
    let other = json!({"selector": {"matchLabels": {"app": "other"}}});
    for pools in [vec![], vec![selecting("a", 0, &other)], vec![selecting("a", 0, &json!({"selector": null}))]] {
        assert_eq!(selected(&unlabelled(), &pools), AdmissionDecision::Unchanged("no pool selects it"));
    }
}

#[test]
fn pod_of_two_pools_belongs_to_older() {
    let pools = [selecting("b", 2, &json!({})), selecting("c", 1, &json!({}))];
    let AdmissionDecision::Injected { pod, warnings } = selected(&unlabelled(), &pools) else { panic!("not injected") };
    assert_eq!(pod["metadata"]["labels"][POOL_LABEL], "c");
    assert_eq!(warnings, ["WorkerPools c and b both select this Pod, which belongs to the older one, c"]);
}

#[test]
fn selected_pod_of_unusable_pool_is_gated_with_label() {
    let unusable = selecting("a", 0, &json!({"shutdownTimeout": "soon"}));
    let AdmissionDecision::Gated { pod, .. } = selected(&unlabelled(), &[unusable]) else { panic!("not gated") };
    assert_eq!(pod["metadata"]["labels"][POOL_LABEL], "a");
    assert_eq!(pod["spec"]["schedulingGates"][0]["name"], NO_SUCH_POOL_GATE);
    assert_eq!(pod["metadata"]["annotations"][SELECTED_ANNOTATION], "true");
}

#[test]
fn exempt_pod_is_not_selected() {
    let mut pod = unlabelled();
    pod["metadata"]["labels"]["ray.io/node-type"] = json!("worker");
    assert_eq!(selected(&pod, &[selecting("a", 0, &json!({}))]), AdmissionDecision::Unchanged("a Ray worker"));
}

#[test]
fn selected_pod_without_backend_container_is_unchanged() {
    let pool = selecting("a", 0, &json!({"backend": {"container": "vllm"}}));
    let mut router = unlabelled();
    router["spec"]["containers"][0]["name"] = json!("router");
    let why = "the pool that selects it cannot give it a worker";
    assert_eq!(selected(&router, &[pool]), AdmissionDecision::Unchanged(why));
}
