use super::*;
use crate::crd::WorkerPool;
use crate::manifests::sidecar::{drain_token_of, has_worker};
use crate::manifests::{snapshot, testing};
use crate::settings::defaults::NamedRef;

/// Two engines, of which the worker runs one at a time.
fn pool(change: &Value) -> WorkerPool {
    let command = |model: &str| json!(["vllm", "serve", model, "--served-model-name", model, "--port", "${PORT}"]);
    let mut spec = json!({
        "provider": "local",
        "multiplexer": {"slots": [{"id": "gpu0", "driver": "process", "default": "qwen", "models": [
            {"id": "qwen", "command": command("qwen"), "maxConcurrency": 8}, {"id": "llama", "command": command("llama")},
        ]}]},
        "template": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {
                "containers": [
                    {
                        "name": "modelrelay-worker", "image": "vllm/vllm-openai:v0.11.0",
                        "env": [{"name": "HF_HOME", "value": "/models"}],
                        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                        "resources": {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
                        "fieldOfTomorrow": {"kept": true},
                    },
                    {"name": "logs", "image": "shipper", "ports": [{"containerPort": 9000}]},
                ],
                "initContainers": [{"name": "download", "image": "downloader"}],
                "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            },
        },
    });
    json_patch::merge(&mut spec, change);
    testing::pool(&spec)
}

fn rendered(pool: &WorkerPool) -> Result<(Value, Vec<Note>), Refusal> {
    let mut defaults = testing::defaults();
    defaults.image_pull_secrets = vec![NamedRef { name: "pull".to_owned() }];
    defaults.image_pull_policy = Some("Never".to_owned());
    let inputs = SidecarInputs { pool, defaults: &defaults, drain_token: "t0ken" };
    let mut pod = crate::manifests::backend::given(pool);
    let before = pod.clone();
    let notes = run_in_engine(&mut pod, &inputs).inspect_err(|_| assert_eq!(pod, before, "it stays as it was"))?;
    Ok((pod, notes))
}

#[test]
fn worker_runs_in_engine_image() {
    let (pod, notes) = rendered(&pool(&json!({}))).unwrap();
    assert_eq!(notes, []);
    assert!(has_worker(&pod) && drain_token_of(&pod) == Some("t0ken"));
    snapshot::check("sidecar-in-engine", &serde_yaml::to_string(&pod).unwrap());
}

#[test]
fn only_template_with_own_programs_runs_in_engine() {
    let is = |change: Value| runs_in_engine(&pool(&change).spec);
    assert!(is(json!({})));
    assert!(!is(json!({"sidecar": {"image": "mine"}})));
    assert!(!is(json!({"template": null})));
    assert!(!is(json!({"multiplexer": {"slots": []}})));
}

#[test]
fn user_probes_are_kept_and_worker_variables_win() {
    let probe = json!({"exec": {"command": ["true"]}});
    let mut spec = pool(&json!({"sidecar": {"env": [{"name": "HF_HOME", "value": "/elsewhere"}], "port": 18000}}));
    let template = spec.spec.template.as_mut().unwrap();
    template.spec["containers"][0]["readinessProbe"] = probe.clone();
    let (pod, _) = rendered(&spec).unwrap();
    let engine = &pod["spec"]["containers"][0];
    assert_eq!((&engine["readinessProbe"], &engine["startupProbe"]["httpGet"]["port"]), (&probe, &json!(18000)));
    let of = |name: &str| {
        let env = engine["env"].as_array().unwrap().iter().filter(|one| one["name"] == name);
        env.map(|one| one["value"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(of("HF_HOME"), [json!("/elsewhere")]);
    assert_eq!(of("PROBE_ADDR"), [json!("[::]:18000")]);
}

#[test]
fn zone_is_that_of_node_unless_named() {
    let zone = json!({"name": "ZONE", "value": "attic"});
    let of_node = "metadata.labels['topology.kubernetes.io/zone']";
    for (in_pool, in_template) in [(false, false), (true, false), (false, true)] {
        let env = |given: bool| if given { json!([zone.clone()]) } else { json!([]) };
        let mut spec = pool(&json!({"sidecar": {"env": env(in_pool)}}));
        spec.spec.template.as_mut().unwrap().spec["containers"][0]["env"] = env(in_template);
        let (pod, _) = rendered(&spec).unwrap();
        let all = pod["spec"]["containers"][0]["env"].as_array().unwrap();
        let zones: Vec<_> = all.iter().filter(|one| one["name"] == "ZONE").collect();
        assert_eq!(zones.len(), 1, "{all:?}");
        if in_pool || in_template {
            assert_eq!(*zones[0], zone);
        } else {
            assert_eq!(zones[0]["valueFrom"]["fieldRef"]["fieldPath"], of_node);
        }
    }
    let mut spec = pool(&json!({}));
    spec.spec.template.as_mut().unwrap().spec["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "site"}}]);
    let (pod, _) = rendered(&spec).unwrap();
    let env = pod["spec"]["containers"][0]["env"].as_array().unwrap();
    assert!(env.iter().all(|one| one["name"] != "ZONE"), "the ConfigMap may name it: {env:?}");
}

#[test]
fn conflicting_engine_settings_are_refused() {
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut pool = pool(&json!({}));
        change(&mut pool.spec.template.as_mut().unwrap().spec);
        rendered(&pool).unwrap_err().to_string()
    };
    let engine = |field: &'static str, value: Value| refused(&|spec| spec["containers"][0][field] = value.clone());
    assert!(
        refused(&|spec| spec["containers"][0]["name"] = json!("vllm"))
            .contains("name that container modelrelay-worker")
    );
    assert!(engine("command", json!(["vllm"])).starts_with("container modelrelay-worker sets command"));
    assert!(engine("args", json!(["--port"])).starts_with("container modelrelay-worker sets args"));
    let env = engine("env", json!([{"name": "BACKEND_URL", "value": "http://h"}]));
    assert_eq!(
        env,
        "env of container modelrelay-worker sets BACKEND_URL, which is derived from spec.backend: remove it"
    );
    let taken = refused(&|spec| spec["volumes"] = json!([{"name": "modelrelay-binary", "emptyDir": {}}]));
    assert!(taken.starts_with("the worker needs a volume named modelrelay-binary"), "{taken}");
}

#[test]
fn only_engine_sidecar_with_slot_port_waits() {
    let fixed = json!([{"id": "embed", "url": "http://127.0.0.1:9000"}]);
    let mut both = pool(&json!({}));
    let block = both.spec.multiplexer.as_mut().unwrap();
    block.slots.push(serde_json::from_value(json!({"id": "cpu", "driver": "static", "models": fixed})).unwrap());
    let own = json!([{"containerPort": 9000}]);
    both.spec.template.as_mut().unwrap().spec["containers"][0]["ports"] = own;
    let (pod, notes) = rendered(&both).unwrap();
    let hook = |index: usize| pod["spec"]["containers"][index].pointer("/lifecycle/preStop").is_some();
    assert_eq!((hook(0), hook(1), notes), (false, true, vec![]));
}
