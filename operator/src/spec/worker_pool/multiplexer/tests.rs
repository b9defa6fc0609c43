use std::io::Write;

use modelrelay_worker::settings::{Args, DriverSettings, Settings};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::manifests::{testing, worker_config};

/// A pool with these slots, in the mode that accepts every driver but one.
fn template(slots: &Value) -> Value {
    json!({
        "provider": "local", "multiplexer": {"slots": slots},
        "template": {"spec": {"containers": [{"name": "modelrelay-worker"}]}},
    })
}

fn standalone(slots: &Value) -> Value {
    json!({"provider": "local", "multiplexer": {"slots": slots}, "standalone": {}})
}

fn judged(spec: &Value) -> Judged {
    validate(&testing::pool(spec).spec)
}

/// Parses the file that a pool gets with the worker's own parser.
fn parsed_by_worker(spec: &Value) -> Result<Settings, String> {
    let config_map = worker_config::config_map(
        &testing::pool(spec),
        &testing::defaults(),
        &testing::relay(worker_config::RelayTransport::Plain),
    )
    .value;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(config_map["data"]["worker.yaml"].as_str().unwrap().as_bytes()).unwrap();
    let args = Args { config: Some(file.path().to_owned()), ..Args::default() };
    Settings::load(&args).map_err(|error| error.to_string())
}

fn every_driver() -> Vec<(&'static str, Value)> {
    let url = |port: u16| format!("http://127.0.0.1:{port}");
    vec![
        ("static", json!([{"id": "a", "url": url(1)}, {"id": "b", "url": url(2), "expectModel": "B"}])),
        (
            "process",
            json!([
                {"id": "a", "command": ["vllm", "serve", "a", "--port", "${PORT}"], "env": {"HF_HOME": "/models"}},
                {"id": "b", "command": ["llama-server"], "url": url(2), "healthPath": "/ready", "pin": true},
                {"id": "c", "command": ["serve"], "env": {"LISTEN": "127.0.0.1:${PORT}"}},
            ]),
        ),
        (
            "vllm-sleep",
            json!([{"id": "a", "url": url(1), "level": 2}, {"id": "b", "url": url(2), "level": 2, "command": ["vllm"]}]),
        ),
        ("sglang", json!([{"id": "a", "url": url(1), "command": ["python"], "env": {"A": "b"}}])),
        ("hooks", json!([{"id": "a", "url": url(1), "load": ["up", "a"], "evict": ["down"], "alive": ["true"]}])),
    ]
}

#[test]
fn accepted_spec_is_parsed_by_worker() {
    for (driver, models) in every_driver() {
        let spec = template(&json!([{"id": "gpu0", "driver": driver, "models": models}]));
        assert_eq!(judged(&spec), Ok(()), "{driver}");
        let slots = parsed_by_worker(&spec).unwrap().live.slots.unwrap();
        assert_eq!(slots[0].config.models.len(), models.as_array().unwrap().len(), "{driver}");
    }
    for driver in ["llama-server", "ollama"] {
        let slot =
            json!([{"id": "gpu0", "driver": driver, "url": "http://127.0.0.1:11434/v1", "models": [{"id": "a:7b"}]}]);
        let spec = json!({"provider": "local", "multiplexer": {"slots": slot}});
        assert_eq!(judged(&spec), Ok(()), "{driver}");
        assert_eq!(parsed_by_worker(&spec).unwrap().live.slots.unwrap().len(), 1, "{driver}");
    }
}

#[test]
fn every_setting_reaches_worker() {
    let models = json!([
        {"id": "qwen", "aliases": ["q", "qwen3"], "command": ["vllm", "--port", "${PORT}"], "memory": "18Gi", "maxConcurrency": 8, "idleTtl": "30m"},
        {"id": "llama", "command": ["llama-server", "${PORT}"], "memory": 9_663_676_416_u64, "pin": true},
    ]);
    let slot = json!({
        "id": "gpu0", "driver": "process", "memory": "24Gi", "devices": ["0", "GPU-5"], "default": "qwen",
        "returnToDefaultAfter": "1h", "models": models,
    });
    let mut spec = template(&json!([slot]));
    let block = json!({
        "drainTimeout": "0s", "loadTimeout": "20m", "holdBudget": "1m", "maxWait": "90s", "minResidency": "10s",
        "linger": "off", "rollback": false,
    });
    spec["multiplexer"].as_object_mut().unwrap().extend(block.as_object().unwrap().clone());
    assert_eq!(judged(&spec), Ok(()));
    let slots = parsed_by_worker(&spec).unwrap().live.slots.unwrap();
    let (slot, config) = (&slots[0], &slots[0].config);
    assert_eq!((slot.devices.join(","), config.memory), ("0,GPU-5".to_owned(), Some(24 << 30)));
    assert_eq!((config.default.as_deref(), config.return_to_default_after.unwrap().as_secs()), (Some("qwen"), 3600));
    assert_eq!(config.models[0].aliases.join(","), "q,qwen3");
    let knobs = &config.knobs;
    let seconds =
        [knobs.drain_timeout, knobs.load_timeout, knobs.hold_budget, knobs.min_residency].map(|one| one.as_secs());
    assert_eq!((seconds, knobs.max_wait.unwrap().as_secs(), knobs.rollback), ([0, 1200, 60, 10], 90, false));
    let of = |index: usize| (config.models[index].capacity, config.models[index].memory, config.models[index].pin);
    assert_eq!((of(0), of(1)), ((8, Some(18 << 30), false), (1, Some(9 << 30), true)));
    assert!(matches!(&slot.driver, DriverSettings::Process(models) if models[0].launch.command[0] == "vllm"));
}

#[test]
fn refusal_names_field_and_required_change() {
    let one = |driver: &str, model: &Value| {
        let mut full = json!({"id": "m"});
        json_patch::merge(&mut full, model);
        json!([{"id": "gpu0", "driver": driver, "models": [full]}])
    };
    let slot = |rest: &Value| {
        let mut full = json!({"id": "gpu0", "driver": "ollama", "url": "http://h:1", "models": [{"id": "m"}]});
        json_patch::merge(&mut full, rest);
        json!([full])
    };
    let url = "http://h:1";
    for (slots, field, problem) in [
        (
            json!([{"id": "a b ", "driver": "ollama", "models": [{"id": "m"}]}]),
            "slots.id",
            "without leading or trailing spaces",
        ),
        (slot(&json!({"models": []})), "slots.gpu0.models", "1 to 64"),
        (slot(&json!({"models": [{"id": "*"}]})), "slots.gpu0.models.id", "not *"),
        (slot(&json!({"models": [{"id": "m"}, {"id": "m"}]})), "slots.gpu0.models", "remove one"),
        (slot(&json!({"url": null})), "slots.gpu0.url", "missing"),
        (slot(&json!({"url": "gpu:1"})), "slots.gpu0.url", "http://HOST:PORT"),
        (slot(&json!({"url": "http://me:secret@h:1"})), "slots.gpu0.url", "credentials"),
        (slot(&json!({"default": "n"})), "slots.gpu0.default", "not a model of the slot"),
        (slot(&json!({"returnToDefaultAfter": "1h"})), "slots.gpu0.returnToDefaultAfter", "requires default"),
        (slot(&json!({"memory": "24GB"})), "slots.gpu0.memory", ""),
        (slot(&json!({"models": [{"id": "m", "url": url}]})), "slots.gpu0.models.m.url", "not supported by driver"),
        (slot(&json!({"models": [{"id": "m", "idleTtl": "soon"}]})), "slots.gpu0.models.m.idleTtl", "0s"),
        (slot(&json!({"models": [{"id": "m", "aliases": ["m"]}]})), "slots.gpu0.models.m.aliases", "id of a model"),
        (
            slot(&json!({"models": [{"id": "m", "aliases": ["n", "n"]}]})),
            "slots.gpu0.models.m.aliases",
            "duplicate alias n",
        ),
        (
            slot(&json!({"models": [{"id": "m", "aliases": ["x"]}, {"id": "n", "aliases": ["x"]}]})),
            "slots.gpu0.models.n.aliases",
            "already an alias of m",
        ),
        (one("static", &json!({})), "slots.gpu0.models.m.url", "missing"),
        (one("static", &json!({"url": url, "command": ["a"]})), "slots.gpu0.models.m.command", "driver static"),
        (one("static", &json!({"url": url, "healthPath": "health"})), "slots.gpu0.models.m.healthPath", "path such as"),
        (one("static", &json!({"url": url, "maxConcurrency": 0})), "slots.gpu0.models.m.maxConcurrency", "1 to 65535"),
        (one("process", &json!({"url": url})), "slots.gpu0.models.m.command", "missing"),
        (one("process", &json!({"command": ["a"]})), "slots.gpu0.models.m.command", "${PORT}"),
        (one("vllm-sleep", &json!({"url": url, "level": 3})), "slots.gpu0.models.level", "1 or 2"),
        (one("sglang", &json!({"url": url, "env": {"A": "b"}})), "slots.gpu0.models.m.env", "requires command"),
        (one("hooks", &json!({"url": url, "load": ["a"]})), "slots.gpu0.models.m.evict", "missing"),
        (one("kubernetes", &json!({"deployment": "d"})), "slots.gpu0.driver", "spec.standalone"),
        (json!([slot(&json!({}))[0], slot(&json!({}))[0]]), "slots", "rename"),
    ] {
        let error = judged(&template(&slots)).expect_err(field).to_string();
        let (found, why) = error.split_once(": ").unwrap();
        assert_eq!(found, format!("spec.multiplexer.{field}"), "{error}");
        assert!(why.contains(problem), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn settings_next_to_slots_are_validated() {
    let (_, models) = every_driver().swap_remove(1);
    let slots = json!([{"id": "gpu0", "driver": "process", "models": models}]);
    let block = |key: &str, value: &str| json!({"multiplexer": {key: value}});
    for (change, field) in [
        (json!({"backend": {}}), "spec.backend"),
        (json!({"models": ["a"]}), "spec.models"),
        (json!({"maxConcurrency": 4}), "spec.maxConcurrency"),
        (json!({"template": null}), "spec.multiplexer.slots.gpu0.driver"),
        (json!({"template": null, "standalone": {}}), "spec.multiplexer.slots.gpu0.driver"),
        (json!({"multiplexer": {"slots": null}, "template": null}), ""),
        (json!({"multiplexer": {"slots": null, "rollback": true}}), "spec.multiplexer.slots"),
        (block("loadTimeout", "0s"), "spec.multiplexer.loadTimeout"),
        (block("drainTimeout", "soon"), "spec.multiplexer.drainTimeout"),
        (block("holdBudget", "0s"), "spec.multiplexer.holdBudget"),
        (block("minResidency", "soon"), "spec.multiplexer.minResidency"),
        (block("maxWait", "off"), "spec.multiplexer.maxWait"),
        (block("linger", "long"), "spec.multiplexer.linger"),
    ] {
        let mut spec = template(&slots);
        json_patch::merge(&mut spec, &change);
        let found = judged(&spec).err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(found.split_once(": ").map_or("", |(field, _)| field), field, "{change}");
    }
    let mut own_image = template(&slots);
    json_patch::merge(&mut own_image, &json!({"template": null, "sidecar": {"image": "mine"}}));
    assert_eq!(judged(&own_image), Ok(()));
}

#[test]
fn only_one_standalone_worker_may_scale_deployments() {
    let slots = |deployments: [&str; 2]| {
        let models = deployments.map(|name| json!({"id": format!("model {name}"), "deployment": name}));
        json!([
            {"id": "gpu0", "driver": "kubernetes", "models": [models[0]]},
            {"id": "gpu1", "driver": "kubernetes", "models": [models[1]]},
        ])
    };
    let error = |spec: &Value| judged(spec).unwrap_err().to_string();
    let good = standalone(&slots(["a", "b.c"]));
    assert_eq!(judged(&good), Ok(()));
    let read = parsed_by_worker(&good).unwrap().live.slots.unwrap();
    assert!(matches!(&read[1].driver, DriverSettings::Kubernetes(models) if models[0].deployment == "b.c"));
    assert!(
        error(&standalone(&slots(["A", "b"])))
            .contains("slots.gpu0.models.model A.deployment: must be a valid name of a Deployment")
    );
    let mut two = standalone(&slots(["a", "b"]));
    two["standalone"]["replicas"] = json!(2);
    assert!(error(&two).starts_with("spec.multiplexer.slots.gpu0.driver: only one worker"));
    two["replicas"] = json!(1);
    assert_eq!(judged(&two), Ok(()), "spec.replicas wins");
    let mut same = slots(["a", "b"]);
    same[1]["models"][0]["deployment"] = json!("a");
    assert!(error(&standalone(&same)).contains("a already serves another model"));
}

/// A few values are invalid, so that about half of the pools have an invalid one somewhere.
fn text(good: &'static str, odd: &'static [&'static str]) -> impl Strategy<Value = Value> {
    prop_oneof![12 => Just(json!(good)), 1 => proptest::sample::select(odd).prop_map(|text| json!(text))]
}

fn maybe(value: impl Strategy<Value = Value> + 'static, weight: u32) -> BoxedStrategy<Value> {
    prop_oneof![weight => value, 4 => Just(Value::Null)].boxed()
}

prop_compose! {
    fn any_model(index: usize)(
        id in text(["a", "b"][index], &["a", "", " a", "*", "7", "null"]),
        url in maybe(text("http://127.0.0.1:8001", &["", "h:1", "http://", "http://a@h", "http://h?q", " http://h:1 ", "ftp://h"]), 12),
        command in maybe(prop_oneof![8 => Just(json!(["p", "${PORT}"])), 1 => Just(json!([""])), 1 => Just(json!(["p"]))], 8),
        env in maybe(Just(json!({"A": "${PORT}"})), 1),
        deployment in maybe(text(["d", "e"][index], &["d", "", "-d", "a.b", "A"]), 12),
        aliases in maybe(proptest::collection::vec(text("x", &["y", "a", "*", ""]), 1..3).prop_map(Value::from), 1),
        level in maybe(prop_oneof![Just(json!(1)), Just(json!(2))], 1),
        load in maybe(Just(json!(["up"])), 30),
        memory in maybe(text("1Gi", &["0", "1G", "-1", "08"]), 2),
        at_once in maybe(prop_oneof![9 => Just(json!(4)), 1 => Just(json!(0))], 4),
        path in maybe(text("/h", &["h", ""]), 1),
        idle in maybe(text("30m", &["0s", "1d", ""]), 1),
    ) -> Value {
        let mut model = json!({
            "id": id, "aliases": aliases, "url": url, "deployment": deployment, "command": command, "env": env, "level": level, "load": load, "evict": load,
            "memory": memory, "maxConcurrency": at_once, "healthPath": path, "idleTtl": idle,
        });
        model.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        model
    }
}

const DRIVERS: [&str; 8] =
    ["static", "process", "llama-server", "ollama", "vllm-sleep", "sglang", "hooks", "kubernetes"];

prop_compose! {
    fn any_slot()(
        driver in proptest::sample::select(&DRIVERS),
        url in maybe(text("http://127.0.0.1:11434", &["x"]), 2),
        default in maybe(text("a", &["b", "", "z"]), 3),
        back in maybe(text("1h", &["0s"]), 1),
        devices in maybe(Just(json!(["0", "1"])), 1),
        models in (any_model(0), any_model(1)),
    ) -> Value {
        let mut slot = json!({
            "id": "gpu0", "driver": driver, "url": url, "default": default, "returnToDefaultAfter": back,
            "devices": devices, "models": [models.0, models.1],
        });
        slot.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        // Half of them have exactly the settings that their driver reads.
        for model in slot["models"].as_array_mut().unwrap() {
            if model["maxConcurrency"].is_null() {
                fit(driver, model);
            }
        }
        if matches!(driver, "llama-server" | "ollama") != slot.get("url").is_some() && slot["devices"].is_null() {
            slot["url"] = if matches!(driver, "llama-server" | "ollama") { json!("http://h:1") } else { Value::Null };
            slot.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        }
        slot
    }
}

/// Removes from a model the settings that its driver does not read.
fn fit(driver: &str, model: &mut Value) {
    let read: &[&str] = match driver {
        "llama-server" | "ollama" => &[],
        "static" => &["url", "healthPath"],
        "hooks" => &["url", "healthPath", "load", "evict"],
        "vllm-sleep" => &["url", "healthPath", "command", "level"],
        "kubernetes" => &["url", "healthPath", "deployment"],
        _ => &["url", "healthPath", "command"],
    };
    let driven = ["url", "deployment", "command", "env", "level", "load", "evict", "healthPath"];
    model.as_object_mut().unwrap().retain(|key, _| read.contains(&key.as_str()) || !driven.contains(&key.as_str()));
}

/// Returns whether a pool passes here; if so, the worker must accept it.
fn passes(spec: &Value) -> Result<bool, TestCaseError> {
    if judged(spec).is_err() {
        return Ok(false);
    }
    let parsed = parsed_by_worker(spec).map_err(|error| TestCaseError::fail(format!("{error}\n{spec:#}")))?;
    prop_assert!(parsed.live.slots.is_some_and(|slots| slots.len() == 1));
    Ok(true)
}

#[test]
fn random_accepted_spec_is_parsed_by_worker() {
    let config = ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() };
    let mut passed: BTreeMap<String, u32> = BTreeMap::new();
    let wait = maybe(text("90s", &["auto", "off", "0s"]), 2);
    let counted = std::cell::RefCell::new(&mut passed);
    let result = proptest::test_runner::TestRunner::new(config).run(&(any_slot(), wait), |(slot, wait)| {
        let driver = slot["driver"].as_str().unwrap_or_default().to_owned();
        let mut spec = if driver == "kubernetes" { standalone(&json!([slot])) } else { template(&json!([slot])) };
        if !wait.is_null() {
            spec["multiplexer"]["maxWait"] = wait;
        }
        if passes(&spec)? {
            *counted.borrow_mut().entry(driver).or_default() += 1;
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    // Otherwise the test would prove nothing.
    assert!(DRIVERS.iter().all(|driver| passed.get(*driver).is_some_and(|number| *number > 0)), "{passed:?}");
}
