use proptest::prelude::*;
use serde_json::Map;

use super::*;
use crate::webhook::inject::review::Review;

mod selection;

pub(in crate::webhook::inject) fn review_of(pod: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u-1", "operation": "CREATE", "namespace": "llm", "dryRun": false,
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": pod,
        },
    })
}

pub(in crate::webhook::inject) fn labelled(pool: &str) -> Value {
    json!({
        "metadata": {"generateName": "vllm-", "labels": {"modelrelay.io/pool": pool}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
    })
}

pub(in crate::webhook::inject) fn controlled(pool: &str) -> Value {
    let mut pod = labelled(pool);
    pod["metadata"]["ownerReferences"] = json!([{"kind": "ReplicaSet", "name": "vllm-1", "controller": true}]);
    pod
}

pub(in crate::webhook::inject) fn pool(spec: &Value) -> Value {
    let mut full = json!({"provider": "local"});
    full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool",
        "metadata": {"name": "llama", "namespace": "llm"}, "spec": full,
    })
}

fn review(pod: &Value) -> Review {
    Review::parse(review_of(pod).to_string().as_bytes()).unwrap()
}

fn found(spec: &Value) -> Lookup {
    Lookup::Found(Box::new(serde_json::from_value(pool(spec)).unwrap()))
}

fn decided(pod: &Value, lookup: &Lookup) -> AdmissionDecision {
    let review = review(pod);
    match question(&review) {
        Question::Settled(decision) => decision,
        Question::Pool(pool) => decide(&review, pool, lookup, &WorkerDefaults::default(), "token"),
        Question::Selection(_) => panic!("no label"),
    }
}

fn settled(pod: &Value) -> Option<&'static str> {
    match question(&review(pod)) {
        Question::Settled(AdmissionDecision::Unchanged(why)) => Some(why),
        Question::Settled(_) | Question::Pool(_) | Question::Selection(_) => None,
    }
}

#[test]
fn only_labelled_pod_without_worker_is_examined() {
    assert_eq!(settled(&labelled("llama")), None);
    assert_eq!(settled(&json!({"metadata": {}, "spec": {}})), Some("no labels"));
    assert_eq!(settled(&labelled("none")), Some("opted out"));
    let AdmissionDecision::Injected { pod, .. } = decided(&labelled("llama"), &found(&json!({}))) else {
        panic!("not injected")
    };
    assert_eq!(settled(&pod), Some("already has a worker"));
    let mut pod = labelled("llama");
    pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "hash"});
    assert_eq!(settled(&pod), Some("mirror of a static Pod"));
    let mut pod = labelled("llama");
    pod["metadata"]["labels"]["ray.io/node-type"] = json!("worker");
    assert_eq!(settled(&pod), Some("a Ray worker"));
}

#[test]
fn only_pod_creation_is_examined() {
    for (key, value) in [
        ("operation", json!("UPDATE")),
        ("subResource", json!("ephemeralcontainers")),
        ("resource", json!({"group": "apps", "resource": "deployments"})),
        ("object", Value::Null),
    ] {
        let mut review = review_of(&labelled("llama"));
        review["request"][key] = value;
        let review = Review::parse(review.to_string().as_bytes()).unwrap();
        assert_eq!(question(&review), Question::Settled(AdmissionDecision::Unchanged("not the creation of a Pod")));
    }
}

#[test]
fn labelled_pod_gets_worker_and_warnings() {
    let mut pod = labelled("llama");
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 5}}});
    let AdmissionDecision::Injected { pod, warnings } = decided(&pod, &found(&json!({}))) else {
        panic!("not injected")
    };
    assert!(sidecar::has_worker(&pod));
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].starts_with("container vllm has a preStop hook"), "{warnings:?}");
    // Clients truncate longer ones.
    assert!(warnings[0].len() < 256);
}

#[test]
fn host_network_with_node_names_is_warned_about() {
    let warnings = |policy: Option<&str>| {
        let mut pod = labelled("llama");
        pod["spec"]["hostNetwork"] = json!(true);
        policy.inspect(|policy| pod["spec"]["dnsPolicy"] = json!(policy));
        let pool = found(&json!({"sidecar": {"port": 18000}}));
        let AdmissionDecision::Injected { warnings, .. } = decided(&pod, &pool) else { panic!("not injected") };
        warnings
    };
    for policy in [None, Some("ClusterFirst")] {
        let warnings = warnings(policy);
        assert!(warnings[0].contains("ClusterFirstWithHostNet") && warnings[0].len() < 256, "{warnings:?}");
    }
    assert_eq!(warnings(Some("ClusterFirstWithHostNet")), [""; 0]);
}

#[test]
fn incompatible_pod_is_refused_with_pool_name() {
    let mut pod = labelled("llama");
    pod["spec"]["hostNetwork"] = json!(true);
    let AdmissionDecision::Refused(message) = decided(&pod, &found(&json!({}))) else { panic!("not refused") };
    assert!(message.starts_with("WorkerPool llama: the Pod uses hostNetwork"), "{message}");
}

#[test]
fn container_with_name_of_worker_is_refused() {
    for (list, field) in [("containers", "spec.containers"), ("initContainers", "spec.initContainers")] {
        let mut pod = labelled("llama");
        let other = json!({"name": "modelrelay-worker", "image": "other", "env": [{"name": "A", "value": "b"}]});
        pod["spec"][list] = json!([{"name": "vllm", "image": "vllm"}, other]);
        pod["spec"]["containers"][0] = json!({"name": pod["spec"]["containers"][0]["name"], "image": "vllm"});
        // The annotation is not what makes it a worker.
        pod["metadata"]["annotations"] = json!({"modelrelay.io/worker-hash": "f00d"});
        let AdmissionDecision::Refused(message) = decided(&pod, &found(&json!({}))) else { panic!("not refused") };
        let start = format!("WorkerPool llama: {field} has a container named modelrelay-worker");
        assert!(message.starts_with(&start) && message.contains("rename that container"), "{message}");
    }
}

#[test]
fn pools_with_own_pods_refuse_injection() {
    for (spec, word) in [
        (json!({"standalone": {}, "backend": {"url": "http://gpu:8000"}}), "without standalone"),
        (json!({"template": {"spec": {"containers": []}}}), "without template"),
    ] {
        let AdmissionDecision::Refused(message) = decided(&labelled("llama"), &found(&spec)) else {
            panic!("not refused")
        };
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn bare_pod_without_pool_is_refused_by_name() {
    let AdmissionDecision::Refused(message) = decided(&labelled("llama"), &Lookup::Missing) else {
        panic!("not refused")
    };
    assert_eq!(message, "namespace llm has no WorkerPool llama: create it, or set label modelrelay.io/pool to none");
    let AdmissionDecision::Refused(message) = decided(&labelled(""), &Lookup::Missing) else { panic!("not refused") };
    assert!(message.starts_with("label modelrelay.io/pool is empty"), "{message}");
}

#[test]
fn controlled_pod_without_pool_is_gated() {
    let mut pod = controlled("llama");
    pod["spec"]["schedulingGates"] = json!([{"name": "theirs"}]);
    let AdmissionDecision::Gated { pod: gated, .. } = decided(&pod, &Lookup::Missing) else { panic!("not gated") };
    assert_eq!(gated["spec"]["schedulingGates"], json!([{"name": "theirs"}, {"name": "modelrelay.io/no-such-pool"}]));
    assert!(!sidecar::has_worker(&gated));
    // Reviewed again after another webhook, it already has the gate.
    let AdmissionDecision::Gated { pod: again, .. } = decided(&gated, &Lookup::Missing) else { panic!("not gated") };
    assert_eq!(again, gated);
}

/// Returns the reason that a single Pod and a controller's Pod are kept out.
fn kept_out(pool: &Value) -> String {
    let lookup = Lookup::Found(Box::new(serde_json::from_value(pool.clone()).unwrap()));
    let AdmissionDecision::Refused(why) = decided(&labelled("llama"), &lookup) else { panic!("not refused: {pool}") };
    let AdmissionDecision::Gated { message, .. } = decided(&controlled("llama"), &lookup) else {
        panic!("not gated: {pool}")
    };
    assert_eq!(message, format!("{why}; until then this Pod is not scheduled"));
    why
}

#[test]
fn deleting_pool_is_treated_as_missing() {
    let mut going = pool(&json!({}));
    going["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert!(kept_out(&going).starts_with("namespace llm has no WorkerPool llama"));
}

#[test]
fn unusable_pool_gates_pod() {
    let why = kept_out(&pool(&json!({"multiplexer": {"loadTimeout": "5m"}})));
    assert!(why.starts_with("WorkerPool llama: spec.multiplexer.slots: must have 1 to 16 slots, not 0"), "{why}");
    let stalled = |status: &str, reason: &str| {
        let mut pool = pool(&json!({}));
        pool["status"] = json!({"conditions": [{
            "type": "Stalled", "status": status, "reason": reason, "message": "ConfigMap llama-worker exists",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]});
        pool
    };
    assert_eq!(kept_out(&stalled("True", "NameTaken")), "WorkerPool llama: ConfigMap llama-worker exists");
    for (status, reason) in [("False", "NameTaken"), ("True", "Forbidden")] {
        let lookup = Lookup::Found(Box::new(serde_json::from_value(stalled(status, reason)).unwrap()));
        assert!(
            matches!(decided(&controlled("llama"), &lookup), AdmissionDecision::Injected { .. }),
            "{status} {reason}"
        );
    }
}

#[test]
fn bound_pod_cannot_be_gated() {
    let mut pod = controlled("llama");
    pod["spec"]["nodeName"] = json!("gpu-1");
    assert!(matches!(decided(&pod, &Lookup::Missing), AdmissionDecision::Refused(_)));
}

#[test]
fn impossible_pool_names_are_not_looked_up() {
    for pool in ["", "../secrets/x", "a/b", "a.b", "A", "-a", "a-", "a?watch=1", "ä", &"a".repeat(53)] {
        assert!(!may_exist("llm", pool), "{pool}");
        assert!(!may_exist(pool, "llama") || pool.len() == 53, "{pool}");
    }
    assert!(may_exist("llm", "llama-3"));
}

/// Arbitrary JSON of limited depth.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_filter_map("finite", |number| serde_json::Number::from_f64(number).map(Value::Number)),
        "[a-z~/\u{e4}]{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-zA-Z~/]{0,6}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// A Pod with the right shape wherever it is read, and with foreign fields everywhere.
fn any_pod() -> impl Strategy<Value = Value> {
    let foreign = || prop::collection::btree_map("x[a-z~/]{0,5}", any_json(), 0..3);
    let container = (foreign(), "[a-z]{1,6}", any::<bool>(), any::<bool>());
    (
        foreign(),
        foreign(),
        prop::collection::vec(container, 1..4),
        prop::collection::vec(foreign(), 0..3),
        any::<bool>(),
    )
        .prop_map(|(metadata, spec, containers, volumes, controller)| {
            let object = |map: BTreeMap<String, Value>| map.into_iter().collect::<Map<_, _>>();
            let containers: Vec<Value> = containers
                .into_iter()
                .map(|(more, name, port, hook)| {
                    let mut one = object(more);
                    one.insert("name".to_owned(), name.into());
                    if port {
                        one.insert("ports".to_owned(), json!([{"containerPort": 8000}]));
                    }
                    if hook {
                        one.insert("lifecycle".to_owned(), json!({"preStop": {"exec": {"command": ["x"]}}}));
                    }
                    one.into()
                })
                .collect();
            let mut pod = if controller { controlled("llama") } else { labelled("llama") };
            pod["metadata"].as_object_mut().unwrap().extend(object(metadata));
            pod["spec"].as_object_mut().unwrap().extend(object(spec));
            pod["spec"]["containers"] = containers.into();
            pod["spec"]["volumes"] = volumes.into_iter().map(|one| Value::Object(object(one))).collect();
            pod
        })
}

/// Collects every leaf value with its pointer.
fn leaves(value: &Value, pointer: &str, into: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, inner) in map {
                let key = key.replace('~', "~0").replace('/', "~1");
                leaves(inner, &format!("{pointer}/{key}"), into);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, inner) in items.iter().enumerate() {
                leaves(inner, &format!("{pointer}/{index}"), into);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            into.push((pointer.to_owned(), value.clone()));
        }
    }
}

proptest! {
    #[test]
    fn malformed_pods_cause_no_panic(object in any_json(), spec in any_json(), lists in any_json(), gone: bool) {
        let lookup = if gone { Lookup::Missing } else { found(&json!({})) };
        decided(&object, &lookup);
        for mut pod in [labelled("llama"), controlled("llama")] {
            for list in ["containers", "initContainers", "volumes", "schedulingGates", "imagePullSecrets"] {
                pod["spec"][list] = lists.clone();
                decided(&pod, &lookup);
                pod["spec"][list] = json!([lists]);
                decided(&pod, &lookup);
            }
            pod["spec"] = spec.clone();
            decided(&pod, &lookup);
        }
    }

    #[test]
    fn patch_yields_decided_pod_without_losses(pod in any_pod(), gone: bool) {
        let lookup = if gone { Lookup::Missing } else { found(&json!({})) };
        let decision = decided(&pod, &lookup);
        let answer = review(&pod).answer(&decision);
        let mut patched = pod.clone();
        if let Some(patch) = answer.pointer("/response/patch") {
            let bytes: k8s_openapi::ByteString = serde_json::from_value(patch.clone()).unwrap();
            json_patch::patch(&mut patched, &serde_json::from_slice::<json_patch::Patch>(&bytes.0).unwrap()).unwrap();
        }
        match &decision {
            AdmissionDecision::Injected { pod: wanted, .. } | AdmissionDecision::Gated { pod: wanted, .. } => {
                // Parsing a float can lose its last bit, which does not matter: the patch does not contain it.
                let read: Value = serde_json::from_str(&patched.to_string()).unwrap();
                prop_assert_eq!(&read, wanted);
            }
            AdmissionDecision::Unchanged(_) | AdmissionDecision::Refused(_) => prop_assert_eq!(&patched, &pod),
        }
        let mut before = Vec::new();
        leaves(&pod, "", &mut before);
        for (pointer, value) in before {
            let same = patched.pointer(&pointer) == Some(&value);
            // Only empty lists may grow.
            let grown = pointer == "/spec/volumes" && value == json!([]);
            prop_assert!(same || grown, "{} was {}", pointer, value);
        }
    }
}
