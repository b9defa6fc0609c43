//! The operator's webhook: any review gets a response, the patch makes exactly the Pod that was decided, and a second
//! review of that Pod changes nothing.

#![no_main]

use std::sync::LazyLock;

use arbitrary::{Arbitrary, Unstructured};
use k8s_openapi::ByteString;
use libfuzzer_sys::fuzz_target;
use modelrelay_operator::crd::WorkerPool;
use modelrelay_operator::manifests::sidecar;
use modelrelay_operator::settings::defaults::WorkerDefaults;
use modelrelay_operator::webhook::inject::decide::{Lookup, Question, decide, decide_selected, question};
use modelrelay_operator::webhook::inject::review::{AdmissionDecision, Review};
use serde_json::{Value, json};

const TOKEN: &str = "0123456789abcdef";

static DEFAULTS: LazyLock<WorkerDefaults> = LazyLock::new(WorkerDefaults::default);

// Text is a review, or a Pod, and after a line `---` the spec of a pool. Any other input describes changes to them.
fuzz_target!(|data: &[u8]| {
    let text = std::str::from_utf8(data).ok().filter(|text| text.starts_with('{'));
    let (review, lookup) = match text {
        Some(text) => {
            let (pod, pool) = text.split_once("\n---\n").unwrap_or((text, ""));
            let review = if Review::parse(pod.as_bytes()).is_ok() { pod.to_owned() } else { review_of(pod) };
            (review, serde_json::from_str(pool).map_or(Lookup::Missing, |spec| lookup(&spec)))
        }
        None => match Scene::arbitrary(&mut Unstructured::new(data)) {
            Ok(scene) => (review_of(&scene.pod().to_string()), scene.lookup()),
            Err(_) => return,
        },
    };
    if let Ok(review) = Review::parse(review.as_bytes()) {
        judge(&review, &lookup);
    }
});

fn judge(review: &Review, lookup: &Lookup) {
    let decision = decided(review, lookup);
    let answer = review.answer(&decision);
    let response = &answer["response"];
    assert!(response["uid"].as_str().is_some_and(|uid| !uid.is_empty()));
    assert_eq!(response["allowed"], json!(!matches!(decision, AdmissionDecision::Refused(_))));
    let wanted = match &decision {
        AdmissionDecision::Unchanged(_) | AdmissionDecision::Refused(_) => {
            assert_eq!(response.get("patch"), None);
            return;
        }
        AdmissionDecision::Injected { pod, .. } | AdmissionDecision::Gated { pod, .. } => pod,
    };
    let original = review.created_pod().expect("only a Pod is changed");
    let mut patched = original.clone();
    let ByteString(patch) = serde_json::from_value(response["patch"].clone()).expect("a patch");
    let patch: json_patch::Patch = serde_json::from_slice(&patch).expect("a JSON patch");
    json_patch::patch(&mut patched, &patch).expect("the patch applies");
    assert_eq!(without_fractions(&patched), without_fractions(wanted));
    keeps(original, &patched);

    let again = Review::parse(review_of(&patched.to_string()).as_bytes()).expect("a review");
    match (&decision, decided(&again, lookup)) {
        (AdmissionDecision::Injected { .. }, AdmissionDecision::Unchanged(why)) => {
            assert_eq!(why, "already has a worker")
        }
        (AdmissionDecision::Gated { .. }, AdmissionDecision::Gated { pod, .. }) => {
            assert_eq!(without_fractions(&pod), without_fractions(&patched));
        }
        (first, second) => panic!("{first:?}, and reviewed again {second:?}"),
    }
    assert_eq!(sidecar::has_worker(&patched), matches!(decision, AdmissionDecision::Injected { .. }));
}

fn decided(review: &Review, lookup: &Lookup) -> AdmissionDecision {
    match question(review) {
        Question::Settled(decision) => decision,
        Question::Pool(pool) => decide(review, pool, lookup, &DEFAULTS, TOKEN),
        Question::Selection(labels) => {
            let pools = match lookup {
                Lookup::Found(pool) => vec![WorkerPool::clone(pool)],
                Lookup::Missing => Vec::new(),
            };
            decide_selected(review, &labels, &pools, &DEFAULTS, TOKEN)
        }
    }
}

/// Checks that nothing of the original is lost: containers and volumes keep their positions, other keys exist.
fn keeps(before: &Value, after: &Value) {
    let empty = serde_json::Map::new();
    for object in ["/metadata", "/spec"] {
        let keys = before.pointer(object).and_then(Value::as_object).unwrap_or(&empty).keys();
        let now = after.pointer(object).and_then(Value::as_object).expect("an object");
        keys.for_each(|key| assert!(now.contains_key(key), "{object}/{key} is gone"));
    }
    for list in ["/spec/containers", "/spec/initContainers", "/spec/volumes"] {
        let items = before.pointer(list).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (index, item) in items.iter().enumerate() {
            let name = |item: &Value| item.get("name").cloned();
            assert_eq!(after.pointer(&format!("{list}/{index}")).map(name), Some(name(item)), "{list}/{index}");
        }
    }
}

/// Removes fractions. Parsing one can lose its last bit, which does not matter: no patch contains one.
fn without_fractions(value: &Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => Value::Null,
        Value::Array(items) => items.iter().map(without_fractions).collect(),
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), without_fractions(value))).collect(),
        other => other.clone(),
    }
}

fn review_of(pod: &str) -> String {
    format!(
        r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"u-1","operation":"CREATE",
        "namespace":"llm","resource":{{"group":"","version":"v1","resource":"pods"}},"object":{pod}}}}}"#
    )
}

/// Deeper than the operator can see of a pool: it parses a hundred levels of a response of the API server.
const TOO_DEEP: usize = 100;

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

fn lookup(spec: &Value) -> Lookup {
    if depth(spec) >= TOO_DEEP {
        return Lookup::Missing;
    }
    let pool = json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool",
        "metadata": {"name": "llama", "namespace": "llm"}, "spec": spec,
    });
    // Nor an object that is not a pool.
    serde_json::from_value::<WorkerPool>(pool).map_or(Lookup::Missing, |pool| Lookup::Found(Box::new(pool)))
}

/// A Pod and a pool with some values put at positions that matter.
#[derive(Arbitrary, Debug)]
struct Scene<'a> {
    has_controller: bool,
    has_pool: bool,
    pod: Vec<(u8, Json<'a>)>,
    pool: Vec<(u8, Json<'a>)>,
}

#[derive(Arbitrary, Debug)]
enum Json<'a> {
    Null,
    Bool(bool),
    Number(i64),
    Fraction(f32),
    Text(&'a str),
    Known(u8),
    List(Vec<Json<'a>>),
    Object(Vec<(Key<'a>, Json<'a>)>),
}

#[derive(Arbitrary, Debug)]
enum Key<'a> {
    Known(u8),
    Any(&'a str),
}

/// All parts of a Pod that the operator reads.
const POD_PLACES: [&str; 30] = [
    "/metadata",
    "/metadata/annotations",
    "/metadata/labels",
    "/metadata/ownerReferences",
    "/metadata/name",
    "/spec",
    "/spec/containers",
    "/spec/containers/0",
    "/spec/containers/0/name",
    "/spec/containers/0/ports",
    "/spec/containers/0/lifecycle",
    "/spec/containers/0/lifecycle/preStop",
    "/spec/containers/0/resources",
    "/spec/containers/0/env",
    "/spec/containers/0/volumeMounts",
    "/spec/containers/0/command",
    "/spec/containers/0/args",
    "/spec/initContainers",
    "/spec/initContainers/0/restartPolicy",
    "/spec/volumes",
    "/spec/imagePullSecrets",
    "/spec/schedulingGates",
    "/spec/nodeName",
    "/spec/hostNetwork",
    "/spec/resources",
    "/spec/terminationGracePeriodSeconds",
    "/spec/restartPolicy",
    "/spec/os",
    "/spec/nodeSelector",
    "/metadata/annotations/kubernetes.io~1config.mirror",
];

const POOL_PLACES: [&str; 14] = [
    "/backend",
    "/backend/url",
    "/backend/port",
    "/backend/container",
    "/backend/engine",
    "/models",
    "/maxConcurrency",
    "/shutdownTimeout",
    "/injectMode",
    "/sidecar",
    "/sidecar/port",
    "/sidecar/env",
    "/multiplexer",
    "/sidecar/resources",
];

const WORDS: [&str; 32] = [
    "name",
    "vllm",
    "modelrelay-worker",
    "image",
    "ports",
    "containerPort",
    "env",
    "value",
    "lifecycle",
    "preStop",
    "exec",
    "command",
    "sleep",
    "seconds",
    "httpGet",
    "path",
    "port",
    "resources",
    "limits",
    "requests",
    "cpu",
    "memory",
    "1",
    "100Mi",
    "restartPolicy",
    "Always",
    "NativeSidecar",
    "Container",
    "modelrelay.io/no-such-pool",
    "30s",
    "slots",
    "windows",
];

fn word(index: u8) -> &'static str {
    WORDS[usize::from(index) % WORDS.len()]
}

impl Scene<'_> {
    fn pod(&self) -> Value {
        let mut pod = json!({
            "metadata": {"generateName": "vllm-", "labels": {"modelrelay.io/pool": "llama"}, "annotations": {}},
            "spec": {
                "initContainers": [{"name": "download", "image": "curl"}],
                "containers": [{"name": "vllm", "image": "vllm", "ports": [{"containerPort": 8000}], "lifecycle": {}}],
            },
        });
        if self.has_controller {
            pod["metadata"]["ownerReferences"] = json!([{"kind": "ReplicaSet", "name": "vllm-1", "controller": true}]);
        }
        put(&mut pod, &POD_PLACES, &self.pod);
        pod
    }

    fn lookup(&self) -> Lookup {
        if !self.has_pool {
            return Lookup::Missing;
        }
        let mut spec = json!({"provider": "local", "backend": {}, "sidecar": {}});
        put(&mut spec, &POOL_PLACES, &self.pool);
        lookup(&spec)
    }
}

/// Puts each value at its place, if its parent exists.
fn put(object: &mut Value, places: &[&str], changes: &[(u8, Json<'_>)]) {
    for (place, value) in changes {
        let place = places[usize::from(*place) % places.len()];
        let (above, key) = place.rsplit_once('/').expect("a pointer");
        let key = key.replace("~1", "/");
        match object.pointer_mut(above) {
            Some(Value::Object(fields)) => {
                fields.insert(key, value.value());
            }
            Some(Value::Array(items)) => items.push(value.value()),
            Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) | None => {}
        }
    }
}

impl Json<'_> {
    fn value(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(value) => (*value).into(),
            Self::Number(number) => (*number).into(),
            Self::Fraction(fraction) => f64::from(*fraction).into(),
            Self::Text(text) => (*text).into(),
            Self::Known(index) => word(*index).into(),
            Self::List(items) => items.iter().map(Self::value).collect(),
            Self::Object(fields) => fields.iter().map(|(key, value)| (key.text(), value.value())).collect(),
        }
    }
}

impl Key<'_> {
    fn text(&self) -> String {
        match self {
            Self::Known(index) => word(*index).to_owned(),
            Self::Any(text) => (*text).to_owned(),
        }
    }
}
