use std::collections::BTreeMap;

use super::*;
use crate::settings::tests::{args, error, load};

const TWO: &str = "multiplexer:
  drainTimeout: 0s
  loadTimeout: 1m
  maxWait: 90s
  linger: off
  slots:
  - id: gpu0
    driver: process
    memory: 24Gi
    devices: ['0']
    default: qwen
    returnToDefaultAfter: 1h
    models:
    - {id: qwen, command: [vllm, serve, q, --port, '${PORT}'], memory: 18Gi, maxConcurrency: 8, idleTtl: 30m}
    - {id: llama, command: [llama-server], url: 'http://127.0.0.1:8002', healthPath: /ready, expectModel: l, pin: true}
  - id: gpu1
    driver: ollama
    url: http://127.0.0.1:11434
    models: [{id: 'gemma:2b', maxConcurrency: 3}]
";

fn slots_of(yaml: &str) -> Vec<SlotSettings> {
    load(&args(), yaml).unwrap().live.slots.unwrap()
}

/// A slot with driver `driver` with these further keys.
fn slot(driver: &str, rest: &str) -> String {
    format!("multiplexer: {{slots: [{{id: gpu0, driver: {driver}, {rest}}}]}}\n")
}

#[test]
fn multiplexer_block_is_read_with_defaults() {
    let slots = slots_of(TWO);
    let config = &slots[0].config;
    assert_eq!((config.knobs.drain_timeout.as_secs(), config.knobs.load_timeout.as_secs()), (0, 60));
    assert_eq!((config.knobs.max_wait.unwrap().as_secs(), config.knobs.linger), (90, Linger::Off));
    assert!(config.knobs.rollback && config.knobs.hold_budget.as_secs() == 300);
    assert_eq!((config.memory, config.default.as_deref()), (Some(24 << 30), Some("qwen")));
    assert_eq!((config.models[0].capacity, config.models[1].capacity), (8, 1));
    assert!(config.models[1].pin && config.models[0].idle_ttl.unwrap().as_secs() == 1800);
    // The number that the worker registers: 8 of the one slot and 3 of the other.
    assert!(slots.iter().all(|slot| slot.config.max_held_per_relay == 11));
    let DriverSettings::Process(models) = &slots[0].driver else { panic!("{:?}", slots[0].driver) };
    assert_eq!((models[1].served.expect.as_str(), models[1].served.health_path.as_str()), ("l", "/ready"));
    assert_eq!(
        slots[1].driver,
        DriverSettings::Ollama("http://127.0.0.1:11434".parse().unwrap(), vec!["gemma:2b".into()])
    );
}

#[test]
fn zero_disables_duration() {
    let rest = "url: 'http://h:1', default: m, returnToDefaultAfter: 0s, models: [{id: m, idleTtl: 0s}]";
    let block =
        format!("multiplexer: {{minResidency: 0s, linger: 0s, slots: [{{id: gpu0, driver: ollama, {rest}}}]}}\n");
    let config = &slots_of(&block)[0].config;
    assert_eq!((config.knobs.min_residency, config.knobs.linger), (Duration::ZERO, Linger::Off));
    assert_eq!((config.return_to_default_after, config.models[0].idle_ttl), (None, None));
}

#[test]
fn every_driver_has_its_fields() {
    let url = "url: 'http://127.0.0.1:1'";
    for (driver, rest) in [
        ("static", format!("models: [{{id: m, {url}}}]")),
        ("process", "models: [{id: m, command: [a], env: {P: '${PORT}'}}]".to_owned()),
        ("llama-server", format!("{url}, models: [{{id: m}}]")),
        ("ollama", format!("{url}, models: [{{id: m}}]")),
        ("vllm-sleep", format!("models: [{{id: m, {url}, level: 2, command: [vllm]}}]")),
        ("sglang", format!("models: [{{id: m, {url}}}]")),
        ("kubernetes", format!("models: [{{id: m, deployment: d}}, {{id: n, deployment: e.v2, {url}}}]")),
        ("hooks", format!("models: [{{id: m, {url}, load: [a], evict: [b], alive: [c]}}]")),
    ] {
        assert_eq!(slots_of(&slot(driver, &rest)).len(), 1, "{driver}");
    }
}

#[test]
fn missing_or_misplaced_settings_are_named() {
    let models = |driver: &str, model: &str| slot(driver, &format!("models: [{{id: m, {model}}}]"));
    for (yaml, parts) in [
        ("multiplexer: {slots: []}\n".to_owned(), ["multiplexer.slots", "1 to 16 slots"]),
        (slot("process", "models: []"), ["multiplexer.slots.gpu0.models", "1 to 64"]),
        (models("process", "pin: true"), ["slots.gpu0.models.m.command", "missing"]),
        (models("process", "command: [a]"), ["slots.gpu0.models.m.command", "${PORT}"]),
        (models("static", "pin: true"), ["slots.gpu0.models.m.url", "missing"]),
        (models("static", "command: [a]"), ["slots.gpu0.models.m.command", "not supported by driver static"]),
        (models("ollama", "pin: true"), ["slots.gpu0.url", "missing"]),
        (models("vllm-sleep", "url: 'http://h:1', level: 3"), ["slots.gpu0.models.level", "1 or 2"]),
        (models("sglang", "url: 'http://h:1', env: {A: b}"), ["slots.gpu0.models.m.env", "needs a `command`"]),
        (models("hooks", "url: 'http://h:1', load: [a]"), ["slots.gpu0.models.m.evict", "missing"]),
        (models("kubernetes", "pin: true"), ["slots.gpu0.models.m.deployment", "missing"]),
        (models("kubernetes", "deployment: a/b"), ["slots.gpu0.models.m.deployment", "name of the Deployment"]),
        (
            models("kubernetes", "deployment: d, command: [a]"),
            ["models.m.command", "not supported by driver kubernetes"],
        ),
        (
            slot("kubernetes", "models: [{id: m, deployment: d}, {id: n, deployment: d}]"),
            ["slots.gpu0.models.n.deployment", "its own Deployment"],
        ),
        (models("magic", "pin: true"), ["magic", "vllm-sleep"]),
        (models("process", "command: ['${PORT}'], aliases: [m]"), ["slots.gpu0.models.m.aliases", "not be the id"]),
        (
            models("process", "command: ['${PORT}'], aliases: [n, n]"),
            ["slots.gpu0.models.m.aliases", "each alias must be listed once"],
        ),
        (models("process", "command: ['${PORT}'], aliases: ['*']"), ["slots.gpu0.models.m.aliases", "not *"]),
        (models("process", "command: ['${PORT}'], expectModel: ''"), ["slots.gpu0.models.m.expectModel", "1 to 256"]),
        (models("ollama", "expectModel: n"), ["slots.gpu0.models.m.expectModel", "not supported by driver ollama"]),
        (
            slot("ollama", "url: 'http://h:1', models: [{id: m}, {id: n, aliases: [m]}]"),
            ["slots.gpu0.models.n.aliases", "not be the id"],
        ),
        (
            slot("ollama", "url: 'http://h:1', models: [{id: m, aliases: [x]}, {id: n, aliases: [x]}]"),
            ["slots.gpu0.models.n.aliases", "m has it too"],
        ),
        (models("process", "command: ['${PORT}'], maxConcurrency: 0"), ["models.m.maxConcurrency", "1 to 100000"]),
        (models("process", "command: ['${PORT}'], idleTTL: 1m"), ["idleTTL", "idleTtl"]),
        (slot("static", "url: 'http://h:1', models: [{id: m}]"), ["slots.gpu0.url", "per model"]),
        (slot("ollama", "url: 'http://h:1', models: [{id: m}, {id: m}]"), ["slots.gpu0.models", "once"]),
        (
            slot("ollama", "url: 'http://h:1', default: n, models: [{id: m}]"),
            ["slots.gpu0.default", "the id of a model of the slot"],
        ),
        (
            slot("ollama", "url: 'http://h:1', returnToDefaultAfter: 1h, models: [{id: m}]"),
            ["slots.gpu0.returnToDefaultAfter", "no `default`"],
        ),
        ("multiplexer: {linger: long, slots: []}\n".to_owned(), ["multiplexer.linger", "auto, off"]),
        ("multiplexer: {loadTimeout: 0s, slots: []}\n".to_owned(), ["loadTimeout", "1ms"]),
    ] {
        let text = error(&args(), &yaml);
        assert!(parts.iter().all(|part| text.contains(part)), "{yaml}{text}");
    }
    let twice = TWO.replace("id: gpu1", "id: gpu0");
    assert!(error(&args(), &twice).contains("gpu0"));
}

#[test]
fn single_backend_settings_conflict_with_multiplexer() {
    for beside in ["backend: {engine: vllm}\n", "models: [m]\n", "maxConcurrency: 4\n"] {
        let text = error(&args(), &format!("{beside}{TWO}"));
        assert!(text.contains("conflicts with `multiplexer`"), "{text}");
    }
    let args = Args { max_concurrency: Some("4".into()), ..args() };
    assert!(error(&args, TWO).starts_with("MAX_CONCURRENCY"), "{}", error(&args, TWO));
}

#[test]
fn running_slot_cannot_change_driver_url_or_devices() {
    let [before, ..] = <[_; 2]>::try_from(slots_of(TWO)).unwrap();
    let after = |from: &str, to: &str| slots_of(&TWO.replace(from, to)).swap_remove(0);
    let fixed = |now: &SlotSettings| now.fixed_difference(&before);
    assert_eq!(fixed(&after("maxConcurrency: 8", "maxConcurrency: 4")), None);
    let fewer = slots_of(&TWO.lines().filter(|line| !line.contains("id: llama")).collect::<Vec<_>>().join("\n"));
    assert_eq!((fixed(&fewer[0]), before.fixed_difference(&fewer[0])), (None, None));
    assert_eq!(fixed(&after("serve, q", "serve, p")), None);
    assert_eq!(fixed(&after("['0']", "['1']")), Some("devices"));
    let of = |driver: &str, more: &str| slots_of(&slot(driver, more)).remove(0);
    let sleeper = |level: u8| of("vllm-sleep", &format!("models: [{{id: m, url: 'http://h:1', level: {level}}}]"));
    assert_eq!(sleeper(1).fixed_difference(&sleeper(2)), Some("models.level"));
    let ollama = |port: u16| of("ollama", &format!("url: 'http://h:{port}', models: [{{id: m}}]"));
    assert_eq!(ollama(1).fixed_difference(&ollama(2)), Some("url"));
    assert_eq!(ollama(1).fixed_difference(&sleeper(1)), Some("driver"));
}

#[test]
fn drain_flag_overrides_file_and_accepts_bare_seconds() {
    let with = |text: &str| Args { drain_timeout: Some(text.into()), ..args() };
    for (text, millis) in [("0", 0), ("45", 45_000), ("1m30s", 90_000), ("0s", 0)] {
        let slots = load(&with(text), TWO).unwrap().live.slots.unwrap();
        assert_eq!(slots[0].config.knobs.drain_timeout, Duration::from_millis(millis), "{text}");
    }
    assert!(error(&with("soon"), TWO).starts_with("DRAIN_TIMEOUT: \"soon\" is not allowed: seconds"));
    assert!(error(&with("30"), "").contains("no `multiplexer`"));
}

#[test]
fn model_has_aliases_and_separate_backend_name() {
    let slots = slots_of(
        "multiplexer:
  slots:
  - {id: gpu0, driver: static, models: [{id: qwen, aliases: [qwen3, q], url: 'http://h:1', expectModel: Qwen/Qwen3-8B}]}
  - {id: gpu1, driver: ollama, url: 'http://h:2', models: [{id: qwen, aliases: [qwen3]}, {id: 'gemma:2b', aliases: [gemma]}]}
",
    );
    let aliases = |slot: usize, model: usize| slots[slot].config.models[model].aliases.join(" ");
    assert_eq!((aliases(0, 0), aliases(1, 0), aliases(1, 1)), ("qwen3 q".into(), "qwen3".into(), "gemma".into()));
    assert_eq!(slots[0].backend_names, BTreeMap::from([("qwen".into(), "Qwen/Qwen3-8B".to_owned())]));
    assert_eq!(slots[1].backend_names, BTreeMap::new());
}

#[test]
fn aliases_are_not_driver_settings() {
    let with =
        |more: &str| slots_of(&slot("static", &format!("models: [{{id: m, url: 'http://h:1'{more}}}]"))).remove(0);
    assert_eq!(with(", aliases: [n]").driver, with("").driver);
    assert_ne!(with(", expectModel: n").driver, with("").driver);
}

#[test]
fn documented_example_is_valid() {
    let page = include_str!("../../../../docs/multiplexer/worker.md");
    let (_, yaml) = page.split_once("```yaml\n").unwrap();
    let slots = slots_of(yaml.split_once("```").unwrap().0);
    assert_eq!(slots[0].backend_names[&slots[0].config.models[0].id], "Qwen/Qwen3-8B");
}
