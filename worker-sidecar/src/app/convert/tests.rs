//! The worker's own parser validates the results.

use crate::settings::{Args, Settings};

use super::llama_swap::convert;
use super::words;

fn variable(name: &str) -> Option<String> {
    (name == "MODELS_DIR").then(|| "/srv/models".to_owned())
}

/// Returns the result, and the settings that the worker reads from it.
fn converted(config: &str) -> (String, Settings) {
    let text = convert(config, &variable).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("worker.yaml");
    std::fs::write(&path, &text).unwrap();
    let settings = Settings::load(&Args { config: Some(path), ..Args::default() });
    (text.clone(), settings.unwrap_or_else(|error| panic!("{error}\n{text}")))
}

fn slots(settings: &Settings) -> Vec<(String, Vec<String>)> {
    let slots = settings.live.slots.as_ref().unwrap();
    let models =
        |slot: &crate::settings::SlotSettings| slot.config.models.iter().map(|model| model.id.to_string()).collect();
    slots.iter().map(|slot| (slot.config.id.to_string(), models(slot))).collect()
}

const EXAMPLE: &str = r#"
healthCheckTimeout: 500
globalTTL: 300
startPort: 10001
apiKeys: [sk-one]
macros:
  llama: >
    llama-server --port ${PORT}
    -ngl 99
  context: 8192
  args: "--ctx-size ${context}"
models:
  coder:
    macros: {context: 16384}
    cmd: |
      # a comment
      ${llama} ${args} -np 4 \
      -m "${env.MODELS_DIR}/my coder.gguf"
    aliases: [gpt-4o-mini, {id: small, unlisted: true}]
    env: ["CUDA_VISIBLE_DEVICES=0,1"]
    ttl: 60
    filters: {stripParams: temperature}
  "qwen":
    cmd: vllm serve Qwen/Qwen3-8B --port 8999 --max-num-seqs=16
    proxy: http://127.0.0.1:8999
    ttl: 0
    cmdStop: kill ${PID}
  embed:
    cmd: server --listen ${PORT}
    checkEndpoint: none
    useModelName: bge
    concurrencyLimit: 8
hooks: {on_startup: {preload: [qwen, coder]}}
groups:
  always: {swap: false, persistent: true, exclusive: false, members: [embed, gone]}
"#;

#[test]
fn converted_example_is_readable_by_worker() {
    let (text, settings) = converted(EXAMPLE);
    let expected = [("gpu0", vec!["coder", "qwen"]), ("always-embed", vec!["embed"])];
    let expected = expected.map(|(slot, models)| (slot.to_owned(), models.into_iter().map(str::to_owned).collect()));
    assert_eq!(slots(&settings), expected, "{text}");
    let gpu0 = &settings.live.slots.as_ref().unwrap()[0];
    assert_eq!(gpu0.config.default.as_deref(), Some("qwen"));
    assert_eq!(gpu0.config.knobs.load_timeout.as_secs(), 500);
    let (coder, qwen) = (&gpu0.config.models[0], &gpu0.config.models[1]);
    assert_eq!((coder.capacity, qwen.capacity), (4, 16));
    assert_eq!((coder.idle_ttl.map(|ttl| ttl.as_secs()), qwen.idle_ttl), (Some(60), None));
    assert_eq!(coder.aliases.iter().map(|alias| alias.to_string()).collect::<Vec<_>>(), ["gpt-4o-mini", "small"]);
    assert_eq!(gpu0.backend_names.get("qwen").map(String::as_str), Some("Qwen/Qwen3-8B"));
}

#[test]
fn macros_quotes_and_comments_in_commands_are_resolved() {
    let (text, _) = converted(EXAMPLE);
    let yaml: serde_yaml::Value = serde_yaml::from_str(&text).unwrap();
    let command = &yaml["multiplexer"]["slots"][0]["models"][0]["command"];
    let command: Vec<String> = serde_yaml::from_value(command.clone()).unwrap();
    let expected =
        "llama-server|--port|${PORT}|-ngl|99|--ctx-size|16384|-np|4|-m|/srv/models/my coder.gguf|--alias|coder";
    assert_eq!(command.join("|"), expected);
}

#[test]
fn settings_without_counterpart_become_notes() {
    let (text, _) = converted(EXAMPLE);
    for place in [
        "# - startPort: ",
        "# - apiKeys: ",
        "# - models.coder.filters: ",
        "# - models.qwen.cmdStop: ",
        "# - models.embed.checkEndpoint: ",
        "# - groups.always: gone is not a model",
        "# - hooks.on_startup.preload: coder is not loaded",
        "# - models.coder: added --alias",
    ] {
        assert!(text.contains(place), "{place} is not in\n{text}");
    }
    assert!(!text.contains("sk-one"), "a key of llama-swap's is no setting of a worker");
}

#[test]
fn models_that_evict_each_other_share_slot() {
    let config = "models: {a: {cmd: 'llama-server --port ${PORT}'}, b: {cmd: 'llama-server --port ${PORT}'}, c: {cmd: 'llama-server --port ${PORT}'}}\n";
    let ids = |groups: &str| {
        slots(&converted(&format!("{config}{groups}")).1)
            .into_iter()
            .map(|(id, models)| format!("{id}={}", models.join("+")))
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(ids(""), "gpu0=a+b+c");
    assert_eq!(ids("groups: {g: {members: [a, b]}}"), "gpu0=c+a+b");
    assert_eq!(ids("groups: {g: {swap: false, members: [a, b]}}"), "gpu0=c+a+b");
    assert_eq!(ids("groups: {g: {exclusive: false, members: [a, b]}}"), "gpu0=c g=a+b");
    assert_eq!(ids("groups: {g: {swap: false, exclusive: false, members: [a, b]}}"), "gpu0=c g-a=a g-b=b");
}

#[test]
fn conversion_error_names_model() {
    let refused = |config: &str| convert(config, &variable).unwrap_err();
    assert!(
        refused("models: {a: {cmd: 'x --port 1'}}").starts_with("models.a: the port is unknown: put ${PORT} into cmd")
    );
    assert!(refused("models: {a: {cmd: 'x ${nobody}'}}").contains("unknown macro ${nobody}"));
    assert!(refused("models: {a: {cmd: 'x ${env.GONE}'}}").contains("set GONE"));
    assert!(refused("{macros: {a: '${b}', b: '${a}'}, models: {a: {cmd: '${a}'}}}").contains("circle"));
    assert!(refused("models: {a: {cmd: 'x \"y ${PORT}'}}").contains("unclosed"));
    assert!(refused("models: {}").contains("no models"));
    assert!(refused("listen: 1").contains("not a llama-swap configuration"));
}

#[test]
fn unsupported_source_program_error_lists_supported_ones() {
    let error =
        crate::app::cli::parse(["modelrelay-worker", "convert", "other", "config.yaml"]).unwrap_err().to_string();
    assert!(error.contains("only llama-swap is") && !error.contains('\n'), "{error}");
}

#[test]
fn words_are_split_like_shell() {
    let split = |text: &str| words::split(text).unwrap().join("|");
    assert_eq!(split(r#"a  'b c' "d \"e\" \n" f\ g ''"#), r#"a|b c|d "e" \n|f g|"#);
    assert_eq!(split("a \\\n  b\n# c\n d#e"), "a|b|d#e");
    assert_eq!(split("a\\\n--b \\ \n--c\\\r\n--d \\\t\n"), "a|--b|--c|--d", "as SanitizeCommand has it");
    let words: Vec<String> = ["-np", "2", "--parallel=4"].map(str::to_owned).to_vec();
    assert_eq!(words::flag(&words, &["-np", "--parallel"]), Some("4"));
}

/// Returns the result for one model, and the model's settings in it.
fn converted_model(model: &str) -> (String, serde_yaml::Value) {
    let (text, _) = converted(&format!("models:\n  m: {model}\n"));
    let yaml: serde_yaml::Value = serde_yaml::from_str(&text).unwrap();
    (text, yaml["multiplexer"]["slots"][0]["models"][0].clone())
}

#[test]
fn macros_in_comments_need_not_exist() {
    let config = "models:\n  m:\n    cmd: |\n      server --port ${PORT}\n      # ${gone} ${env.GONE}\n";
    assert!(!converted(config).0.contains("gone"));
}

#[test]
fn merged_keys_apply_as_written() {
    let config =
        "x: &base {cmd: 'server --port ${PORT}', ttl: 60}\nmodels: {m: {<<: *base, ttl: 30}, n: {<<: *base}}\n";
    let settings = converted(config).1;
    let models = &settings.live.slots.as_ref().unwrap()[0].config.models;
    assert_eq!(models.iter().map(|m| m.idle_ttl.unwrap().as_secs()).collect::<Vec<_>>(), [30, 60]);
}

#[test]
fn no_two_slots_have_one_name() {
    let config = "models: {a: {cmd: 's ${PORT}'}, b: {cmd: 's ${PORT}'}, c: {cmd: 's ${PORT}'}, d: {cmd: 's ${PORT}'}}
groups:
  gpu0: {exclusive: false, members: [a]}
  g: {exclusive: false, swap: false, members: [c]}
  g-c: {exclusive: false, members: [d]}
";
    let ids: Vec<String> = slots(&converted(config).1).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["gpu0", "gpu0-2", "g-c", "g-c-2"]);
}

#[test]
fn groups_are_read_from_routing_section() {
    let models = "models: {a: {cmd: 's ${PORT}'}, b: {cmd: 's ${PORT}'}}\n";
    let settings = "settings: {groups: {g: {exclusive: false, members: [b]}}, matrix: {vars: {x: a}}}";
    let (text, settings_of) = converted(&format!("{models}routing: {{router: {{use: group, {settings}}}}}\n"));
    assert_eq!(slots(&settings_of).len(), 2, "{text}");
    assert!(!text.contains("# - routing"), "{text}");
    let other = "scheduler: {use: fifo, settings: {fifo: {priority: {a: 1}}}}";
    let (text, settings_of) =
        converted(&format!("{models}routing: {{router: {{use: matrix, {settings}}}, {other}}}\n"));
    assert_eq!(slots(&settings_of).len(), 1, "{text}");
    assert!(
        text.contains("# - routing.router.settings.matrix: ") && text.contains("# - routing.scheduler: "),
        "{text}"
    );
}

#[test]
fn foreign_proxy_address_becomes_note() {
    for usual in ["http://127.0.0.1:${PORT}", "http://localhost:${PORT}/"] {
        let (text, model) = converted_model(&format!("{{cmd: 's ${{PORT}}', proxy: '{usual}'}}"));
        assert!(model["url"].is_null() && !text.contains("m.proxy"), "{text}");
    }
    for other in ["http://10.0.0.5:${PORT}", "http://127.0.0.1:${PORT}/base", "https://127.0.0.1:${PORT}"] {
        let (text, model) = converted_model(&format!("{{cmd: 's ${{PORT}}', proxy: '{other}'}}"));
        assert!(model["url"].is_null() && text.contains("# - models.m.proxy: "), "{text}");
    }
}

#[test]
fn only_llama_server_has_its_flags() {
    let (_, shell) = converted_model(r#"{cmd: "sh -c 'llama-server --port ${PORT} -m x'"}"#);
    assert_eq!(shell["command"].as_sequence().unwrap().len(), 3, "{shell:?}");
    let (_, other) = converted_model("{cmd: 'server --port ${PORT} -a yes'}");
    assert!(other["expectModel"].is_null(), "{other:?}");
    let (_, llama) = converted_model("{cmd: '/opt/llama-server --port ${PORT} -a x'}");
    assert_eq!(llama["expectModel"], "x");
}

#[test]
fn expected_model_is_name_listed_by_server() {
    let (text, model) = converted_model("{cmd: 'llama-server --port ${PORT} --alias x', useModelName: y}");
    assert_eq!(model["expectModel"], "x");
    assert!(text.contains("# - models.m.useModelName: "), "{text}");
    let (text, model) = converted_model("{cmd: 'llama-server --port ${PORT} --alias y', useModelName: y}");
    assert!(model["expectModel"] == "y" && !text.contains("useModelName: "), "{text}");
}

#[test]
fn model_is_preloaded_by_any_alias() {
    let config = "models: {a: {cmd: 's ${PORT}'}, b: {cmd: 's ${PORT}', aliases: [c]}}\n\
        hooks: {on_startup: {preload: [' c ', '']}}\n";
    let (text, settings) = converted(config);
    assert_eq!(settings.live.slots.unwrap()[0].config.default.as_deref(), Some("b"), "{text}");
    assert!(!text.contains("preload"), "{text}");
}

#[test]
fn env_values_expand_only_environment_macros() {
    let (_, model) =
        converted_model("{macros: {x: 1}, cmd: 's ${PORT}', env: ['A=${foo}/${x}', 'B=${env.MODELS_DIR}']}");
    assert_eq!(model["env"]["A"], "${foo}/${x}");
    assert_eq!(model["env"]["B"], "/srv/models");
}
