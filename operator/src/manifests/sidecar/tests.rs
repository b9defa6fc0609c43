use serde_json::{Value, json};

use super::*;
use crate::crd::common::RawObject;
use crate::manifests::snapshot;
use crate::settings::defaults::NamedRef;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn pool(spec: &Value) -> WorkerPool {
    let mut full = json!({"provider": "local"});
    full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool",
        "metadata": {"name": "llama", "namespace": "llm"}, "spec": full,
    }))
    .unwrap()
}

fn defaults() -> WorkerDefaults {
    WorkerDefaults { image: "registry.example/modelrelay-worker:1.0.0".to_owned(), ..WorkerDefaults::default() }
}

fn vllm_pod() -> Value {
    json!({
        "metadata": {"generateName": "vllm-", "labels": {"app": "vllm", "modelrelay.io/pool": "llama"}},
        "spec": {
            "initContainers": [{"name": "download", "image": "downloader"}],
            "containers": [
                {"name": "logs", "image": "shipper"},
                {"name": "vllm", "image": "vllm/vllm-openai", "ports": [{"containerPort": 8000}]},
            ],
            "terminationGracePeriodSeconds": 30,
        },
    })
}

fn add(pod: &mut Value, spec: &Value) -> Result<Vec<Note>, Refusal> {
    add_to_pod(pod, &SidecarInputs { pool: &pool(spec), defaults: &defaults(), drain_token: TOKEN })
}

fn added(mut pod: Value, spec: &Value) -> (Value, Vec<Note>) {
    let notes = add(&mut pod, spec).unwrap();
    (pod, notes)
}

fn refused(mut pod: Value, spec: &Value) -> Refusal {
    let before = pod.clone();
    let refusal = add(&mut pod, spec).unwrap_err();
    assert_eq!(pod, before, "a refused Pod stays as it was");
    refusal
}

/// Returns the names of the containers that wait in the worker's /drain.
fn hooked(pod: &Value) -> Vec<&str> {
    ["containers", "initContainers"]
        .iter()
        .filter_map(|list| pod["spec"][list].as_array())
        .flatten()
        .filter(|container| container.pointer("/lifecycle/preStop/httpGet/path") == Some(&json!("/drain")))
        .filter_map(|container| container["name"].as_str())
        .collect()
}

fn snapshot(name: &str, value: &Value) {
    snapshot::check(name, &serde_yaml::to_string(value).unwrap());
}

#[test]
fn sidecar_requests_no_ids_that_cluster_assigns() {
    let defaults = defaults();
    let context = |defaults: &WorkerDefaults| {
        let (pool, mut pod) = (pool(&json!({})), vllm_pod());
        add_to_pod(&mut pod, &SidecarInputs { pool: &pool, defaults, drain_token: TOKEN }).unwrap();
        pod["spec"]["initContainers"][1]["securityContext"].clone()
    };
    let own = context(&defaults);
    assert_eq!((&own["runAsUser"], &own["runAsGroup"]), (&json!(65532), &json!(65532)));
    let assigned = context(&defaults.for_namespace(true));
    assert_eq!((assigned.get("runAsUser"), assigned.get("runAsGroup")), (None, None), "{assigned}");
    assert_eq!(assigned["runAsNonRoot"], true);
    assert_eq!(context(&defaults.for_namespace(false)), own);
}

#[test]
fn native_sidecar_follows_init_containers() {
    let (pod, notes) = added(vllm_pod(), &json!({}));
    assert_eq!(hooked(&pod), ["vllm"]);
    snapshot("sidecar-native", &pod);
    assert_eq!(notes, []);
}

#[test]
fn plain_container_is_last_without_restart_policy() {
    let (pod, _) = added(vllm_pod(), &json!({"injectMode": "Container"}));
    let last = pod["spec"]["containers"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["name"], last.get("restartPolicy")), (&json!("modelrelay-worker"), None));
    assert_eq!(pod["spec"]["initContainers"].as_array().unwrap().len(), 1);
}

#[test]
fn pod_level_resources_are_shared_with_worker() {
    let defaults = WorkerDefaults { resources: RawObject(json!({"requests": {"cpu": "50m"}})), ..defaults() };
    let whole = |spec: &Value| {
        let mut pod = vllm_pod();
        pod["spec"]["resources"] = json!({"requests": {"cpu": "1"}});
        let pool = pool(spec);
        add_to_pod(&mut pod, &SidecarInputs { pool: &pool, defaults: &defaults, drain_token: TOKEN }).unwrap();
        worker(&pod).unwrap().get("resources").cloned()
    };
    assert_eq!(whole(&json!({})), None, "the API server would refuse more than the whole");
    let own = json!({"requests": {"cpu": "10m"}});
    assert_eq!(whole(&json!({"sidecar": {"resources": own}})), Some(own), "what the pool says is meant");
}

#[test]
fn every_pool_setting_reaches_container() {
    let pool = pool(&json!({
        "backend": {"engine": "sglang", "apiKeySecretRef": {"name": "engine", "key": "token"}},
        "shutdownTimeout": "5m",
        "sidecar": {
            "image": "mine/worker:2", "port": 18000, "resources": {"requests": {"cpu": "50m"}},
            "env": [{"name": "RUST_BACKTRACE", "value": "1"}],
        },
    }));
    let defaults = WorkerDefaults {
        image_pull_policy: Some("Never".to_owned()),
        image_pull_secrets: vec![NamedRef { name: "pull".to_owned() }],
        ..defaults()
    };
    let mut pod = json!({"spec": {"containers": [{"name": "engine"}], "imagePullSecrets": [{"name": "theirs"}]}});
    add_to_pod(&mut pod, &SidecarInputs { pool: &pool, defaults: &defaults, drain_token: TOKEN }).unwrap();
    snapshot("sidecar-every-setting", &pod);
}

#[test]
fn standalone_worker_is_no_sidecar() {
    let pool = pool(&json!({"standalone": {}, "backend": {"url": "http://gpu.example:8000"}}));
    let defaults = defaults();
    let inputs = SidecarInputs { pool: &pool, defaults: &defaults, drain_token: TOKEN };
    assert_eq!(container(&inputs, true).get("restartPolicy"), None);
    assert_eq!(container(&inputs, false)["restartPolicy"], "Always");
}

/// Returns the worker's environment variables about its backend.
fn backend_env(spec: &Value, alone: bool) -> Vec<(String, String)> {
    let (pool, defaults) = (pool(spec), defaults());
    let worker = container(&SidecarInputs { pool: &pool, defaults: &defaults, drain_token: TOKEN }, alone);
    let text = |variable: &Value, key: &str| variable[key].as_str().unwrap_or_default().to_owned();
    let env = worker["env"].as_array().unwrap().iter().map(|one| (text(one, "name"), text(one, "value")));
    env.filter(|(name, _)| name.starts_with("BACKEND_")).collect()
}

#[test]
fn backend_location_is_fixed_for_pod_lifetime() {
    let env = |url: &str, engine: &str| {
        [("BACKEND_URL", url), ("BACKEND_ENGINE", engine)].map(|(name, value)| (name.to_owned(), value.to_owned()))
    };
    assert_eq!(backend_env(&json!({}), false), env("http://127.0.0.1:8000", "openai"));
    let moved = json!({"backend": {"engine": "sglang", "port": 9000, "basePath": "/a/"}});
    assert_eq!(backend_env(&moved, false), env("http://127.0.0.1:9000/a", "sglang"));
}

#[test]
fn standalone_worker_follows_backend_without_new_pod() {
    let elsewhere = json!({"standalone": {}, "backend": {"url": "http://gpu.example:8000"}});
    assert_eq!(backend_env(&elsewhere, true), []);
}

#[test]
fn only_template_rollout_waits_for_backend_readiness() {
    let probes = |spec: &Value, alone: bool| {
        let (pool, defaults) = (pool(spec), defaults());
        let worker = container(&SidecarInputs { pool: &pool, defaults: &defaults, drain_token: TOKEN }, alone);
        let path = |probe: &str| worker[probe]["httpGet"]["path"].as_str().unwrap().to_owned();
        (path("startupProbe"), path("readinessProbe"))
    };
    let are = |startup: &str, readiness: &str| (startup.to_owned(), readiness.to_owned());
    let template = json!({"template": {"spec": {"containers": [{"name": "vllm"}]}}});
    // The containers after a native sidecar wait until it has started, so its startup probe never waits for a backend.
    assert_eq!(probes(&template, false), are("/livez", "/backendz"));
    assert_eq!(probes(&json!({}), false), are("/livez", "/readyz"));
    assert_eq!(probes(&json!({"standalone": {}}), true), are("/livez", "/readyz"));
}

#[test]
fn multiplexer_has_no_backend_environment() {
    let slots = json!([{"id": "a", "driver": "static", "models": [{"id": "m", "url": "http://127.0.0.1:8001"}]}]);
    assert_eq!(backend_env(&json!({"multiplexer": {"slots": slots}}), false), []);
}

#[test]
fn pod_with_worker_is_unchanged() {
    let (once, _) = added(vllm_pod(), &json!({}));
    let (twice, notes) = added(once.clone(), &json!({"sidecar": {"port": 18000}}));
    assert_eq!((&twice, notes), (&once, vec![]));
    assert_eq!(drain_token_of(&once), Some(TOKEN));
}

#[test]
fn injection_adds_only_worker_fields() {
    let mut pod = vllm_pod();
    pod["spec"]["unheardOf"] = json!({"a": [1, null, {"b": 1.5}]});
    pod["spec"]["containers"][1]["resizePolicy"] = json!([{"resourceName": "cpu"}]);
    pod["spec"]["containers"][1]["lifecycle"] = json!({"stopSignal": "SIGUSR1"});
    let (after, _) = added(pod.clone(), &json!({}));
    let operations = json_patch::diff(&pod, &after);
    let written: Vec<String> = operations.0.iter().map(|operation| operation.path().to_string()).collect();
    assert_eq!(
        written,
        [
            "/metadata/annotations",
            "/spec/containers/1/lifecycle/preStop",
            "/spec/initContainers/1",
            "/spec/terminationGracePeriodSeconds",
            "/spec/volumes",
        ]
    );
}

#[test]
fn backend_is_container_declaring_port() {
    assert_eq!(hooked(&added(vllm_pod(), &json!({})).0), ["vllm"]);
    // No container declares 11434 and there is no annotation: the first one is chosen.
    assert_eq!(hooked(&added(vllm_pod(), &json!({"backend": {"engine": "ollama"}})).0), ["logs"]);
}

#[test]
fn backend_defaults_to_default_container_annotation() {
    let mut pod = vllm_pod();
    pod["spec"]["containers"][1].as_object_mut().unwrap().remove("ports");
    pod["metadata"]["annotations"] = json!({"kubectl.kubernetes.io/default-container": "vllm"});
    assert_eq!(hooked(&added(pod.clone(), &json!({})).0), ["vllm"]);
    pod["metadata"]["annotations"] = json!({"kubectl.kubernetes.io/default-container": "gone"});
    assert_eq!(hooked(&added(pod, &json!({})).0), ["logs"]);
}

#[test]
fn pool_container_name_selects_backend() {
    assert_eq!(hooked(&added(vllm_pod(), &json!({"backend": {"container": "logs"}})).0), ["logs"]);
    let refusal = refused(vllm_pod(), &json!({"backend": {"container": "engine"}}));
    assert_eq!(refusal.to_string(), "spec.backend.container of the pool is engine, but the Pod has logs, vllm");
}

#[test]
fn backend_may_be_restartable_init_container() {
    let mut pod = vllm_pod();
    pod["spec"]["initContainers"] = json!([{"name": "engine", "restartPolicy": "Always"}]);
    assert_eq!(hooked(&added(pod, &json!({"backend": {"container": "engine"}})).0), ["engine"]);
}

#[test]
fn backend_hook_is_kept_and_reported() {
    let mut pod = vllm_pod();
    let own = json!({"exec": {"command": ["sleep", "5"]}});
    pod["spec"]["containers"][1]["lifecycle"] = json!({"preStop": own});
    let (after, notes) = added(pod, &json!({}));
    assert_eq!(after["spec"]["containers"][1]["lifecycle"]["preStop"], own);
    assert_eq!(hooked(&after), ["modelrelay-worker"], "it takes nothing new while the backend's own hook runs");
    assert_eq!(notes, [Note::HasPreStop { container: "vllm".to_owned() }]);
}

#[test]
fn every_container_with_slot_port_waits() {
    let model = |port: u16| json!([{"id": format!("m{port}"), "url": format!("http://127.0.0.1:{port}")}]);
    let slots = json!({"multiplexer": {"slots": [
        {"id": "a", "driver": "vllm-sleep", "models": model(8001)},
        {"id": "b", "driver": "llama-server", "url": "http://localhost:8002/", "models": [{"id": "x"}]},
        {"id": "c", "driver": "static", "models": [{"id": "y", "url": "http://elsewhere.example:9000"}]},
    ]}});
    let mut pod = vllm_pod();
    pod["spec"]["containers"] = json!([
        {"name": "one", "ports": [{"containerPort": 8001}]},
        {"name": "logs", "ports": [{"containerPort": 9000}]},
        {"name": "two", "ports": [{"containerPort": 8002}, {"containerPort": 1}]},
        {"name": "udp", "ports": [{"containerPort": 8001, "protocol": "UDP"}]},
    ]);
    let (after, notes) = added(pod, &slots);
    assert_eq!((hooked(&after), notes), (vec!["one", "two"], vec![]));
    let (_, notes) = added(vllm_pod(), &slots);
    assert_eq!(notes, [Note::NoSlotContainer]);
}

#[test]
fn grace_period_is_never_reduced() {
    let seconds = |given: Value, timeout: &str| {
        let mut pod = vllm_pod();
        pod["spec"]["terminationGracePeriodSeconds"] = given;
        added(pod, &json!({"shutdownTimeout": timeout})).0["spec"]["terminationGracePeriodSeconds"].clone()
    };
    assert_eq!(seconds(json!(30), "60s"), 90);
    assert_eq!(seconds(json!(600), "60s"), 600);
    assert_eq!(seconds(json!(30), "1500ms"), 32);
    // If absent, the API server sets 30.
    assert_eq!(seconds(Value::Null, "1ms"), 31);
    assert_eq!(seconds(Value::Null, "87600h"), 87600 * 3600 + 30);
}

#[test]
fn existing_scrape_annotations_are_kept() {
    let mut pod = vllm_pod();
    pod["metadata"]["annotations"] = json!({"prometheus.io/scrape": "false", "other": "x"});
    let (after, _) = added(pod.clone(), &json!({}));
    assert_eq!(after["metadata"], pod["metadata"]);
}

#[test]
fn pull_secret_is_not_duplicated() {
    let defaults = WorkerDefaults { image_pull_secrets: vec![NamedRef { name: "pull".to_owned() }], ..defaults() };
    let mut pod = vllm_pod();
    pod["spec"]["imagePullSecrets"] = json!([{"name": "pull"}]);
    let pool = pool(&json!({}));
    add_to_pod(&mut pod, &SidecarInputs { pool: &pool, defaults: &defaults, drain_token: TOKEN }).unwrap();
    assert_eq!(pod["spec"]["imagePullSecrets"], json!([{"name": "pull"}]));
}

#[test]
fn port_declared_by_other_container_is_refused() {
    let mut pod = vllm_pod();
    pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 17990}]);
    let refusal = refused(pod.clone(), &json!({}));
    assert!(refusal.to_string().contains("container logs declares port 17990"), "{refusal}");
    assert!(add(&mut pod, &json!({"sidecar": {"port": 17991}})).is_ok());
    // An init container that ends has released its port.
    let mut pod = vllm_pod();
    pod["spec"]["initContainers"][0]["ports"] = json!([{"containerPort": 17990}]);
    assert!(add(&mut pod.clone(), &json!({})).is_ok());
    pod["spec"]["initContainers"][0]["restartPolicy"] = json!("Always");
    assert_eq!(refused(pod, &json!({})), Refusal::PortTaken { port: 17990, container: "download".to_owned() });
}

#[test]
fn backend_on_worker_port_is_refused() {
    assert_eq!(refused(vllm_pod(), &json!({"sidecar": {"port": 8000}})), Refusal::BackendPort { port: 8000 });
}

#[test]
fn host_network_requires_explicit_port() {
    let mut pod = vllm_pod();
    pod["spec"]["hostNetwork"] = json!(true);
    assert_eq!(refused(pod.clone(), &json!({})), Refusal::HostNetwork);
    assert!(add(&mut pod, &json!({"sidecar": {"port": 17990}})).is_ok());
}

#[test]
fn environment_cannot_override_pool_field() {
    let refusal = refused(vllm_pod(), &json!({"sidecar": {"env": [{"name": "MODELS", "value": "x"}]}}));
    assert_eq!(
        refusal.to_string(),
        "spec.sidecar.env of the pool sets MODELS, which is derived from spec.models: remove it"
    );
}

#[test]
fn windows_pod_is_refused() {
    for spec in [json!({"os": {"name": "windows"}}), json!({"nodeSelector": {"kubernetes.io/os": "windows"}})] {
        let mut pod = vllm_pod();
        pod["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        assert_eq!(refused(pod, &json!({})), Refusal::Windows);
    }
}

#[test]
fn duplicate_volume_name_is_refused() {
    let mut pod = vllm_pod();
    pod["spec"]["volumes"] = json!([{"name": "modelrelay-secret", "emptyDir": {}}]);
    assert_eq!(refused(pod, &json!({})), Refusal::VolumeTaken { name: "modelrelay-secret".to_owned() });
}

#[test]
fn worker_with_token_mounts_no_secret() {
    let pod = added(vllm_pod(), &json!({"credential": "ServiceAccountToken"})).0;
    let worker = worker(&pod).unwrap();
    let variable = json!({"name": "WORKER_TOKEN_FILE", "value": "/etc/modelrelay/token/token"});
    assert!(worker["env"].as_array().unwrap().contains(&variable), "{worker}");
    let mount = json!({"name": "modelrelay-token", "mountPath": "/etc/modelrelay/token", "readOnly": true});
    assert!(worker["volumeMounts"].as_array().unwrap().contains(&mount), "{worker}");
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    assert!(volumes.iter().all(|volume| volume.get("secret").is_none()), "{volumes:?}");
    let source = json!({"path": "token", "audience": "modelrelay", "expirationSeconds": 3600});
    let token = volumes.iter().find(|volume| volume["name"] == "modelrelay-token").unwrap();
    assert_eq!(token["projected"]["sources"], json!([{"serviceAccountToken": source}]));
    // The API server's own token stays out of reach.
    assert!(worker["volumeMounts"].to_string().contains("modelrelay-no-token"), "{worker}");
    // Existing injected Pods become outdated, and a template is rendered again, only if the pool requests it.
    let hash = |spec: &Value| hash(&SidecarInputs { pool: &pool(spec), defaults: &defaults(), drain_token: "" });
    assert_eq!(hash(&json!({"provider": "local"})), hash(&json!({"provider": "local", "credential": "Secret"})));
    assert_ne!(
        hash(&json!({"provider": "local"})),
        hash(&json!({"provider": "local", "credential": "ServiceAccountToken"}))
    );
    let written = serde_json::to_value(pool(&json!({"provider": "local"})).spec).unwrap();
    assert!(written.get("credential").is_none(), "it would change what templates were rendered from");
}

#[test]
fn invalid_pod_is_refused() {
    for (pod, message) in [
        (json!([]), "the Pod must be an object"),
        (json!({"spec": []}), "spec must be an object"),
        (json!({"spec": {"containers": {}}}), "containers must be a list"),
        (json!({"spec": {"containers": [1]}}), "containers must be a list of objects"),
        (json!({"spec": {"containers": [{"lifecycle": 1}]}}), "lifecycle must be an object"),
        (json!({"spec": {"containers": [{}], "volumes": 1}}), "volumes must be a list"),
        (json!({"metadata": {"annotations": 1}, "spec": {"containers": [{}]}}), "annotations must be an object"),
        (json!({}), "the Pod has no container that could be the backend"),
    ] {
        assert_eq!(refused(pod, &json!({})).to_string(), message);
    }
}

#[test]
fn plain_container_in_completing_pod_is_reported() {
    let mut pod = vllm_pod();
    pod["spec"]["restartPolicy"] = json!("OnFailure");
    assert_eq!(added(pod.clone(), &json!({})).1, []);
    assert_eq!(added(pod, &json!({"injectMode": "Container"})).1, [Note::NeverCompletes]);
}

#[test]
fn loss_of_guaranteed_qos_is_reported() {
    let equal = json!({"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": 1}, "requests": {"cpu": "4"}});
    let mut pod = json!({"spec": {"containers": [{"name": "vllm", "resources": equal}]}});
    assert_eq!(added(pod.clone(), &json!({})).1, [Note::LosesGuaranteed]);
    let worker = json!({"sidecar": {"resources": {"limits": {"cpu": "100m", "memory": "64Mi"}}}});
    assert_eq!(added(pod.clone(), &worker).1, []);
    pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("1");
    assert_eq!(added(pod, &json!({})).1, []);
}

#[test]
fn group_members_without_requests_are_exempt() {
    let exempt = |labels: Value| exemption(Some(&labels)).is_some();
    assert!(exempt(json!({"leaderworkerset.sigs.k8s.io/worker-index": "1"})));
    assert!(!exempt(json!({"leaderworkerset.sigs.k8s.io/worker-index": "0"})));
    assert!(exempt(json!({"ray.io/node-type": "worker"})));
    assert!(!exempt(json!({"ray.io/node-type": "head"})));
    assert!(exemption(None).is_none());
}

#[test]
fn slot_and_model_order_restarts_no_worker() {
    let model = |id: &str| json!({"id": id, "url": format!("http://127.0.0.1:{}", 8000 + id.len())});
    let slot = |id: &str, models: Value| json!({"id": id, "driver": "static", "models": models});
    let hash = |slots: Value| {
        let pool = pool(&json!({"multiplexer": {"slots": slots}}));
        slots_hash(&pool.spec).unwrap()
    };
    let written = hash(json!([slot("0", json!([model("a"), model("bb")])), slot("1", json!([model("ccc")]))]));
    let sorted = hash(json!([slot("1", json!([model("ccc")])), slot("0", json!([model("bb"), model("a")]))]));
    assert_eq!(written, sorted);
    assert_ne!(written, hash(json!([slot("1", json!([model("a"), model("bb")])), slot("0", json!([model("ccc")]))])));
}
