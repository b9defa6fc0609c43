//! llama-swap's `config.yaml`, as its `config.example.yaml` and `config-schema.json` describe it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_yaml::{Mapping, Value};

use super::slots::{self, Group};
use super::words::{self, Macros};
use super::{ConvertedModel, ConvertedMultiplexer, ConvertedWorker, Notes};

/// llama-swap's own default.
const HEALTH_CHECK_SECS: u64 = 120;
const SHORTEST_HEALTH_CHECK_SECS: u64 = 15;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LlamaSwapFile {
    models: Mapping,
    #[serde(default)]
    macros: Mapping,
    #[serde(default)]
    groups: Mapping,
    #[serde(default)]
    routing: Routing,
    #[serde(default)]
    hooks: LlamaSwapHooks,
    health_check_timeout: Option<u64>,
    log_level: Option<String>,
    #[serde(rename = "globalTTL", default)]
    global_ttl: i64,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// The current place of groups; those at the top level are the former one.
#[derive(Debug, Default, Deserialize)]
struct Routing {
    #[serde(default)]
    router: Router,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
struct Router {
    #[serde(rename = "use", default)]
    wanted: String,
    #[serde(default)]
    settings: RouterSettings,
}

#[derive(Debug, Default, Deserialize)]
struct RouterSettings {
    #[serde(default)]
    groups: Mapping,
}

#[derive(Debug, Default, Deserialize)]
struct LlamaSwapHooks {
    #[serde(default)]
    on_startup: OnStartup,
}

#[derive(Debug, Default, Deserialize)]
struct OnStartup {
    #[serde(default)]
    preload: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LlamaSwapModel {
    cmd: String,
    #[serde(default)]
    macros: Mapping,
    #[serde(default)]
    env: Vec<String>,
    #[serde(default)]
    aliases: Vec<Value>,
    proxy: Option<String>,
    check_endpoint: Option<String>,
    ttl: Option<i64>,
    use_model_name: Option<String>,
    #[serde(default)]
    concurrency_limit: u64,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// Returns the `worker.yaml` for this configuration; `variable` reads `${env.NAME}`.
pub(super) fn convert(text: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let file = parse(text).map_err(|error| format!("not a llama-swap configuration: {error}"))?;
    let mut notes = Notes::default();
    for key in file.rest.keys() {
        notes.add(key, global_note(key));
    }
    for key in file.routing.rest.keys() {
        notes.add(&format!("routing.{key}"), "no counterpart");
    }
    let mut models = Vec::new();
    for (id, model) in &file.models {
        let id = scalar(id).ok_or("models: a name is not a string")?;
        let at = format!("models.{id}");
        let of_model: LlamaSwapModel =
            serde_yaml::from_value(model.clone()).map_err(|error| format!("{at}: {error}"))?;
        let mut named: BTreeMap<_, _> = scalars(&file.macros).chain(scalars(&of_model.macros)).collect();
        named.insert("MODEL_ID".to_owned(), id.clone());
        let macros = Macros { named, variable };
        models.push(
            convert_model(id, of_model, &macros, file.global_ttl, &mut notes).map_err(|why| format!("{at}: {why}"))?,
        );
    }
    if models.is_empty() {
        return Err("no models".to_owned());
    }
    let mut slots = slots::divide(models, &groups(&file, &mut notes)?, &mut notes);
    slots::preload(&mut slots, &file.hooks.on_startup.preload, &mut notes);
    let load = file.health_check_timeout.unwrap_or(HEALTH_CHECK_SECS).max(SHORTEST_HEALTH_CHECK_SECS);
    let worker = ConvertedWorker {
        relay: "http://127.0.0.1:8080".to_owned(),
        worker_secret: "replace-me-with-a-long-secret".to_owned(),
        log_level: file.log_level,
        multiplexer: ConvertedMultiplexer { load_timeout: format!("{load}s"), slots },
    };
    worker.text(&notes)
}

fn parse(text: &str) -> serde_yaml::Result<LlamaSwapFile> {
    let mut file: Value = serde_yaml::from_str(text)?;
    file.apply_merge()?;
    serde_yaml::from_value(file)
}

fn groups(file: &LlamaSwapFile, notes: &mut Notes) -> Result<Vec<(String, Group)>, String> {
    let Router { wanted, settings } = &file.routing.router;
    let groups = if wanted == "matrix" {
        notes.add("routing.router.settings.matrix", global_note("matrix"));
        &file.groups
    } else if file.groups.is_empty() {
        &settings.groups
    } else {
        &file.groups
    };
    let group = |(name, group): (&Value, &Value)| {
        let name = scalar(name).unwrap_or_default();
        let group = serde_yaml::from_value(group.clone()).map_err(|error| format!("groups.{name}: {error}"))?;
        Ok((name, group))
    };
    groups.iter().map(group).collect()
}

fn convert_model(
    id: String,
    of: LlamaSwapModel,
    macros: &Macros<'_>,
    global_ttl: i64,
    notes: &mut Notes,
) -> Result<ConvertedModel, String> {
    let at = format!("models.{id}");
    for key in of.rest.keys() {
        notes.add(&format!("{at}.{key}"), model_note(key));
    }
    let mut command = words::split(&macros.expand(&words::without_comments(&of.cmd))?)?;
    if command.is_empty() {
        return Err("cmd is empty".to_owned());
    }
    let expect_model = name_of_backend(&at, &id, of.use_model_name, &mut command, notes);
    let url = own_url(&at, of.proxy, macros, notes)?;
    let env = of.env.iter().map(|pair| macros.expand_variables(pair)).collect::<Result<Vec<_>, _>>()?;
    let env: BTreeMap<_, _> = env
        .iter()
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let says_port = command.iter().chain(env.values()).any(|word| word.contains("${PORT}"));
    if url.is_none() && !says_port {
        return Err("the port is unknown: put ${PORT} into cmd, or set proxy".to_owned());
    }
    let ttl = of.ttl.filter(|ttl| *ttl >= 0).unwrap_or(global_ttl);
    Ok(ConvertedModel {
        aliases: of.aliases.iter().filter_map(|alias| scalar(alias.get("id").unwrap_or(alias))).collect(),
        env,
        url,
        max_concurrency: concurrency(&at, of.concurrency_limit, &command, notes),
        health_path: health_path(&at, of.check_endpoint, macros, notes)?,
        expect_model,
        idle_ttl: (ttl > 0).then(|| format!("{ttl}s")),
        command,
        id,
    })
}

/// Returns the server's address, if that is not the port that it is given.
fn own_url(at: &str, proxy: Option<String>, macros: &Macros<'_>, notes: &mut Notes) -> Result<Option<String>, String> {
    let Some(proxy) = proxy.map(|proxy| macros.expand(&proxy)).transpose()? else { return Ok(None) };
    if !proxy.contains("${PORT}") {
        return Ok(Some(proxy));
    }
    let usual = ["http://127.0.0.1:${PORT}", "http://localhost:${PORT}"];
    if !usual.contains(&proxy.trim_end_matches('/')) {
        notes.add(
            &format!("{at}.proxy"),
            "the worker connects to http://127.0.0.1:${PORT}; for another address, set url and a fixed port in both",
        );
    }
    Ok(None)
}

/// Returns the model name that the backend lists. llama-swap never checks it; the worker treats a backend that lists
/// another model as not loaded.
fn name_of_backend(
    at: &str,
    id: &str,
    wanted: Option<String>,
    command: &mut Vec<String>,
    notes: &mut Notes,
) -> Option<String> {
    let wanted = wanted.filter(|name| !name.is_empty());
    // A word with blanks is a shell script, which does not accept llama-server's flags.
    let is_llama = command.iter().filter(|word| !word.contains(char::is_whitespace)).any(|word| {
        word.rsplit('/')
            .next()
            .is_some_and(|name| name.starts_with("llama-server") || name.starts_with("llama.cpp:server"))
    });
    let names: &[&str] = if is_llama { &["--alias", "-a"] } else { &["--alias", "--served-model-name"] };
    let listed = words::flag(command, names);
    let listed = listed.map(|names| names.split(',').next().unwrap_or(names).trim().to_owned());
    let served = command.iter().position(|word| word == "serve").and_then(|index| command.get(index + 1));
    let model = served.map(String::as_str).or_else(|| words::flag(command, &["--model", "--model-path"]));
    let is_vllm = command.iter().any(|word| word.contains("vllm") || word.contains("sglang"));
    let name = match (wanted, listed) {
        (wanted, Some(listed)) => {
            if wanted.is_some_and(|name| name != listed) {
                notes.add(
                    &format!("{at}.useModelName"),
                    &format!("ignored: the server lists the model as {listed}, and requests use that name"),
                );
            }
            listed
        }
        (wanted, None) if is_llama => {
            let name = wanted.unwrap_or_else(|| id.to_owned());
            command.extend(["--alias".to_owned(), name.clone()]);
            notes.add(at, "added --alias, so that llama-server lists the model by this name");
            name
        }
        (Some(name), None) => name,
        (None, None) if is_vllm && model.is_some() => model.unwrap_or_default().to_owned(),
        (None, None) => {
            notes.add(at, "if /v1/models of the server lists another name, set expectModel to it");
            id.to_owned()
        }
    };
    (name != id).then_some(name)
}

fn concurrency(at: &str, limit: u64, command: &[String], notes: &mut Notes) -> u64 {
    let told = words::flag(command, &["-np", "--parallel", "--max-num-seqs"]).and_then(|number| number.parse().ok());
    let number = Some(limit).filter(|limit| *limit > 0).or(told.filter(|told| *told > 0));
    number.unwrap_or_else(|| {
        notes.add(
            at,
            "maxConcurrency is 1, because the server's limit is unknown; raise it to the number of requests that the server runs at once",
        );
        1
    })
}

fn health_path(
    at: &str,
    given: Option<String>,
    macros: &Macros<'_>,
    notes: &mut Notes,
) -> Result<Option<String>, String> {
    let Some(path) = given.map(|path| macros.expand(&path)).transpose()? else { return Ok(None) };
    if path == "none" {
        notes.add(
            &format!("{at}.checkEndpoint"),
            "replaced by /v1/models, because the worker needs to detect when the model is loaded",
        );
        return Ok(Some("/v1/models".to_owned()));
    }
    Ok(Some(format!("/{}", path.trim_start_matches('/'))))
}

fn global_note(key: &str) -> &'static str {
    match key {
        "startPort" => "not needed: ${PORT} is replaced by a free port",
        "apiKeys" => "API keys belong to the relay: create them there, and set MODELRELAY_REQUIRE_API_KEYS=true",
        "peers" => {
            "no counterpart in a worker: run a separate worker for each peer, with BACKEND_URL and BACKEND_API_KEY_FILE"
        }
        "matrix" => {
            "no counterpart: all models share one slot. Models that fit into memory together can have separate slots"
        }
        "includeAliasesInList" => "aliases are always listed by /v1/models",
        "sendLoadingState" => "no counterpart: a stream sends nothing while its model loads",
        "logToStdout" | "logTimeFormat" => {
            "no counterpart: the worker writes its own log and that of its servers to standard output"
        }
        "metricsMaxInMemory" | "captureBuffer" => {
            "no counterpart: metrics are exported to Prometheus, and no prompts are stored"
        }
        _ => "no counterpart",
    }
}

fn model_note(key: &str) -> &'static str {
    match key {
        "cmdStop" => {
            "no counterpart: the command receives SIGTERM, and SIGKILL after 10 s. If that does not stop it, use driver hooks"
        }
        "filters" => {
            "no counterpart: requests reach the server unchanged, and names defined by setParamsByID do not exist"
        }
        "name" | "description" | "metadata" => "no counterpart: /v1/models lists ids and aliases only",
        "unlisted" => "no counterpart: the model is listed. An API key can limit the models that a client sees",
        "timeouts" => "no counterpart: the relay's REQUEST_TIMEOUT_SECS and COLD_TIMEOUT_SECS apply",
        "sendLoadingState" => "no counterpart: a stream sends nothing while its model loads",
        _ => "no counterpart",
    }
}

fn scalars(of: &Mapping) -> impl Iterator<Item = (String, String)> {
    of.iter().filter_map(|(name, value)| Some((scalar(name)?, scalar(value)?)))
}

/// Returns a string, a number or a boolean, as it is written.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(truth) => Some(truth.to_string()),
        Value::Null | Value::Sequence(_) | Value::Mapping(_) | Value::Tagged(_) => None,
    }
}
