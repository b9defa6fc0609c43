use std::path::Path;
use std::time::SystemTime;

use super::*;
use crate::dispatch::DEFAULT_COLD_TIMEOUT;
use crate::settings::worker_credential::{Credential, CredentialStatus};

fn args(arguments: &[&str]) -> Args {
    let program = std::iter::once("modelrelay-relay");
    Args::load_from(program.chain(arguments.iter().copied())).expect("valid arguments")
}

/// A folder with `relay.yaml` and any other files of a test.
fn folder(yaml: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "relay.yaml", yaml);
    folder
}

fn write(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    std::fs::write(path, text).expect("a file");
}

fn load_from(folder: &Path, more: &[&str]) -> Result<Config, ConfigError> {
    let path = folder.join("relay.yaml");
    let mut arguments = vec!["--config", path.to_str().expect("utf-8")];
    arguments.extend(more);
    Config::from_args(&args(&arguments))
}

fn load(yaml: &str) -> Result<Config, ConfigError> {
    load_from(folder(yaml).path(), &[])
}

fn refusal(yaml: &str) -> String {
    let line = load(yaml).expect_err(yaml).to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

const LATER: Duration = Duration::from_secs(10 * 365 * 86_400);

#[test]
fn environment_alone_defines_one_provider() {
    let config =
        Config::from_args(&args(&["--worker-secret", "0123456789abcdef", "--queue-timeout-secs", "5"])).expect("valid");
    let [provider] = &config.providers[..] else { panic!("{:?}", config.providers) };
    assert_eq!((provider.name.as_str(), provider.enabled, provider.max_queue_len), ("local", true, MAX_QUEUE_LEN));
    assert_eq!((provider.queue_timeout, provider.request_timeout), (Some(Duration::from_secs(5)), None));
    assert_eq!(provider.stream_idle_timeout, Duration::from_secs(300));
    assert!(provider.models.is_none() && config.warnings.is_empty() && config.ignored_variables.is_empty());
    assert!(provider.admits("0123456789abcdef", SystemTime::now()) && !provider.admits("", SystemTime::now()));
}

#[test]
fn missing_or_empty_worker_secret_is_reported_clearly() {
    for arguments in [&[][..], &["--worker-secret", ""][..]] {
        let line = Config::from_args(&args(arguments)).expect_err("no secret").to_string();
        assert!(
            line.starts_with("WORKER_SECRET (--worker-secret) is missing or empty") && !line.contains('\n'),
            "{line}"
        );
    }
}

#[test]
fn empty_admin_token_is_ignored_and_workers_accepted() {
    let config =
        Config::from_args(&args(&["--worker-secret", "s", "--admin-token", "", "--workers-on-client-port", "0"]))
            .expect("valid");
    assert!(config.admin_token == AdminTokenSource::None && config.workers_on_client_port);
}

#[test]
fn file_with_every_field_is_read() {
    let folder = folder(
        r#"
requireApiKeys: true
relayCount: 3
providers:
- name: local
  enabled: false
  coldModels: [big]
  workerSecrets: [{file: secrets/local}, {value: dev-only, notAfter: "2026-12-01T00:00:00Z"}]
  models:
  - id: meta-llama/Llama-3.1-8B-Instruct
    aliases: [llama3, claude-sonnet-4-5]
  modelDetails:
    llama3: {context_length: 8192, capabilities: [tools]}
  queue: {maxLength: 7, maxBytes: 1Mi, timeout: 1m30s, coldTimeout: 10m}
  requestTimeout: 1h
  maxModelsPerWorker: 5
  requireProtocolVersion: true
- name: other
"#,
    );
    write(folder.path(), "secrets/local", "from-a-file\r\n");
    let config = load_from(folder.path(), &["--relay-count", "2"]).expect("valid");
    assert!(config.require_api_keys && config.relay_count == 3);
    let provider = config.provider("local").expect("the provider");
    assert!(!provider.enabled && provider.require_protocol_version);
    assert_eq!((provider.max_queue_len, provider.max_queue_bytes, provider.max_models_per_worker), (7, 1 << 20, 5));
    assert_eq!(
        (provider.queue_timeout, provider.cold_timeout),
        (Some(Duration::from_secs(90)), Some(Duration::from_secs(600)))
    );
    assert_eq!(provider.request_timeout, Some(Duration::from_secs(3600)));
    assert_eq!(provider.cold_models, ["big"]);
    assert_eq!(provider.model_details["llama3"].context_length(), Some(8192));
    let catalogue = provider.models.as_deref().expect("a catalogue");
    assert_eq!(catalogue[0].id, "meta-llama/Llama-3.1-8B-Instruct");
    assert_eq!(catalogue[0].aliases, ["llama3", "claude-sonnet-4-5"]);
    let before = humantime::parse_rfc3339("2026-11-30T23:59:59Z").expect("a time");
    let after = before + Duration::from_secs(1);
    assert!(
        provider.admits("from-a-file", after)
            && provider.admits("dev-only", before)
            && !provider.admits("dev-only", after)
    );
    assert_eq!(config.provider("other"), Some(&ProviderConfig::new("other")));
}

#[test]
fn provider_name_may_end_with_namespace() {
    for name in ["a", "a-1", "chat.research", "chat.1-research"] {
        assert_eq!(load(&format!("providers: [{{name: {name}}}]")).expect("valid").providers[0].name, name);
    }
}

#[test]
fn config_error_names_path_value_and_allowed_values() {
    let cases = [
        (
            "providers: [{name: a, aliases: {x: x}}]",
            "providers[0].aliases.x: \"x\" is not allowed: an alias must refer",
        ),
        (
            "providers: [{name: a, aliases: {x: y, y: z}}]",
            "providers[0].aliases.x: \"y\" is not allowed: an alias must refer",
        ),
        (
            "providers: [{name: a, aliases: {x: y, x: z}}]",
            "providers[0].aliases: \"x\" is not allowed: each id and alias",
        ),
        ("providers: [{name: a, aliases: {' x': y}}]", "providers[0].aliases: \" x\" is not allowed: 1 to 256"),
        (
            "providers: [{name: a, models: [{id: m}], aliases: {x: y}}]",
            "aliases.x: \"y\" is not allowed: the model is not in",
        ),
        (
            "providers: [{name: a, models: [{id: m}], aliases: {m: m}}]",
            "aliases: \"m\" is not allowed: each id and alias",
        ),
        (
            "providers: [{name: a, models: [{id: m}], defaultModel: y}]",
            "providers[0].defaultModel: \"y\" is not allowed",
        ),
        ("providers: [{name: a, fallbackModel: ''}]", "providers[0].fallbackModel: \"\" is not allowed: 1 to 256"),
        (
            "providers: [{name: a}, {name: b, queue: {timeout: 30x}}]",
            "providers[1].queue.timeout: \"30x\" is not allowed: a duration",
        ),
        (
            "providers: [{name: a, queue: {timeout: 30}}]",
            "providers[0].queue.timeout: \"30\" is not allowed: a duration",
        ),
        (
            "providers: [{name: a, queue: {maxBytes: 1MB}}]",
            "providers[0].queue.maxBytes: \"1MB\" is not allowed: a size",
        ),
        (
            "providers: [{name: a, queue: {maxLength: 1000001}}]",
            "providers[0].queue.maxLength: \"1000001\" is not allowed: an integer",
        ),
        ("providers: [{name: A b}]", "providers[0].name: \"A b\" is not allowed: at most 52"),
        ("providers: [{name: a.B}]", "providers[0].name: \"a.B\" is not allowed: at most 52"),
        ("providers: [{name: a.b.c}]", "providers[0].name: \"a.b.c\" is not allowed"),
        ("providers: [{name: a.}]", "providers[0].name: \"a.\" is not allowed"),
        ("providers: [{name: x-workers.b}]", "providers[0].name: \"x-workers.b\" is not allowed"),
        ("providers: [{name: x-workers}]", "providers[0].name: \"x-workers\" is not allowed"),
        ("providers: [{name: a}, {name: a}]", "providers[1].name: \"a\" is not allowed: provider names must"),
        (
            "providers: [{name: a, models: [{id: m, aliases: [n]}, {id: n}]}]",
            "providers[0].models[1].id: \"n\" is not allowed: each id",
        ),
        (
            "providers: [{name: a, models: [{id: m, aliases: [m]}]}]",
            "providers[0].models[0].aliases[0]: \"m\" is not allowed",
        ),
        ("providers: [{name: a, coldModels: [m, m]}]", "providers[0].coldModels[1]: \"m\" is not allowed"),
        ("providers: [{name: a, models: [{id: ''}]}]", "providers[0].models[0].id: \"\" is not allowed: 1 to 256"),
        (
            "providers: [{name: a, modelDetails: {m: {context_length: many}}}]",
            "providers[0].modelDetails.m: context_length is unknown or has a value of the wrong type",
        ),
        ("providers: [{name: a, modelDetails: {'': {}}}]", "providers[0].modelDetails: \"\" is not allowed: 1 to 256"),
        ("providers: [{name: a, maxModelsPerWorker: 0}]", "providers[0].maxModelsPerWorker: \"0\" is not allowed"),
        ("relayCount: 0\nproviders: []", "relayCount: \"0\" is not allowed"),
        (
            "providers: [{name: a, workerSecrets: [{file: nowhere}]}]",
            "providers[0].workerSecrets[0].file: \"nowhere\" is not allowed: cannot read the file",
        ),
        ("providers: [{name: a, workerSecrets: [{}]}]", "providers[0].workerSecrets[0]: exactly one of file and value"),
        (
            "providers: [{name: a, workerSecrets: [{value: s, notAfter: tomorrow}]}]",
            "providers[0].workerSecrets[0].notAfter: \"tomorrow\" is not allowed",
        ),
        ("providers: [{name: a, typo: 1}]", "providers[0]: unknown field `typo`"),
        ("provider: []", "unknown field `provider`"),
        ("", "relay.yaml: "),
        ("providers: [", "relay.yaml: "),
        ("requireApiKeys: true", "missing field `providers`"),
    ];
    for (yaml, expected) in cases {
        let line = refusal(yaml);
        assert!(line.contains(expected), "{yaml}\n  {line}\n  {expected}");
    }
}

#[test]
fn unknown_field_error_lists_known_fields_and_line() {
    let line = refusal("providers: [{name: a, typo: 1}]");
    assert!(line.contains("`workerSecrets`") && line.ends_with("at line 1 column 23"), "{line}");
}

#[test]
fn secrets_outside_providers_are_rejected_as_unknown() {
    let line = refusal("workerSecrets: [{value: planted}]");
    assert!(line.contains("unknown field `workerSecrets`") && line.contains("`providers`"), "{line}");
    assert!(!line.contains("planted") && !line.contains("{file: NAME}"), "{line}");
}

#[test]
fn config_errors_never_repeat_secrets() {
    for secrets in [
        "[planted]",
        "planted",
        "[{value: [planted]}]",
        "[{value: planted, file: x}]",
        "[{value: planted, more: 1}]",
        "{planted: 1}",
    ] {
        let line = refusal(&format!("providers: [{{name: a, workerSecrets: {secrets}}}]"));
        assert!(!line.contains("planted") && line.contains("workerSecrets"), "{line}");
    }
    let config = load("providers: [{name: a, workerSecrets: [{value: planted}]}]").expect("valid");
    assert!(!format!("{config:?}").contains("planted"));
}

#[test]
fn empty_secret_admits_no_worker_but_is_valid() {
    let config = load("providers: [{name: a, workerSecrets: [{value: ''}]}]").expect("valid");
    assert!(!config.providers[0].admits("", SystemTime::now()));
    assert_eq!(
        config.warnings,
        ["provider a has neither a worker secret nor worker service accounts: no worker can connect to it"]
    );
}

#[test]
fn queue_of_length_zero_causes_warning() {
    let config = load("providers: [{name: a, workerSecrets: [{value: 0123456789abcdef}], queue: {maxLength: 0}}]")
        .expect("valid");
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].starts_with("provider a has queue length 0: "), "{:?}", config.warnings);
}

#[test]
fn worker_stays_while_its_secret_is_valid() {
    let config =
        load("providers: [{name: a, workerSecrets: [{value: old, notAfter: '2026-12-01T00:00:00Z'}, {value: new}]}]")
            .expect("valid");
    let provider = &config.providers[0];
    let end = humantime::parse_rfc3339("2026-12-01T00:00:00Z").expect("a time");
    let before = end - Duration::from_secs(1);
    let digest = *provider.admitting_secret("old", before).expect("admitted").secret.digest();
    let credential = Credential::Secret(digest);
    assert_eq!(provider.credential_status(&credential, before), CredentialStatus::Good);
    assert_eq!(provider.credential_status(&credential, end), CredentialStatus::Over);
    assert_eq!(ProviderConfig::new("a").credential_status(&credential, before), CredentialStatus::Removed);
}

#[test]
fn repeated_secret_is_valid_until_later_expiry() {
    let config =
        load("providers: [{name: a, workerSecrets: [{value: old, notAfter: '2020-01-01T00:00:00Z'}, {value: old}]}]")
            .expect("valid");
    let credential = Credential::Secret(*config.providers[0].worker_secrets[0].secret.digest());
    assert_eq!(config.providers[0].credential_status(&credential, SystemTime::now()), CredentialStatus::Good);
}

#[test]
fn service_accounts_require_cluster_and_full_names() {
    let accounts = |list: &str| refusal(&format!("providers: [{{name: a, workerServiceAccounts: {list}}}]"));
    let line = accounts("[llm]");
    assert!(
        line.starts_with("providers[0].workerServiceAccounts[0]: \"llm\" is not allowed: NAMESPACE/NAME"),
        "{line}"
    );
    assert!(accounts(&format!("[{}]", "a/b,".repeat(65))).contains("exceed the limit of 64"));
    let line = accounts("[llm/gpu]");
    assert!(line.starts_with("providers[0].workerServiceAccounts requires a Pod"), "{line}");
    let line = Config::from_args(&args(&["--worker-service-accounts", "llm/gpu"])).expect_err("no cluster").to_string();
    assert!(line.starts_with("WORKER_SERVICE_ACCOUNTS (--worker-service-accounts) requires a Pod"), "{line}");
}

#[test]
fn empty_catalogue_is_open() {
    assert_eq!(load("providers: [{name: a, models: []}]").expect("valid").providers[0].models, None);
}

#[test]
fn provider_variables_are_ignored_with_config_file() {
    let folder = folder("providers: [{name: a}]");
    let config = load_from(folder.path(), &["--max-queue-len", "3", "--provider-name", "b"]).expect("valid");
    assert_eq!(config.ignored_variables, ["PROVIDER_NAME", "MAX_QUEUE_LEN"]);
    assert_eq!((config.providers.len(), config.providers[0].max_queue_len), (1, MAX_QUEUE_LEN));
}

#[test]
fn cold_timeout_is_longer_only_for_declared_models() {
    let mut provider = ProviderConfig::new("a");
    assert_eq!(provider.cold_timeout_for(false), Duration::from_secs(30));
    assert_eq!(provider.cold_timeout_for(true), DEFAULT_COLD_TIMEOUT);
    provider.queue_timeout = Some(LATER);
    assert_eq!(provider.cold_timeout_for(true), LATER);
    provider.cold_timeout = Some(Duration::from_secs(1));
    assert_eq!(provider.cold_timeout_for(true), Duration::from_secs(1));
}

#[test]
fn unset_timeouts_default_to_one_day() {
    let (mut provider, day) = (ProviderConfig::new("a"), Duration::from_secs(86_400));
    assert_eq!((provider.queue_timeout(), provider.request_timeout()), (day, day));
    provider.request_timeout = Some(Duration::from_secs(60));
    assert_eq!(
        (provider.queue_timeout(), provider.request_timeout()),
        (Duration::from_secs(60), Duration::from_secs(60))
    );
    assert_eq!(provider.absent_timeout(), Duration::from_secs(30));
    provider.queue_timeout = Some(Duration::from_secs(5));
    assert_eq!((provider.queue_timeout(), provider.absent_timeout()), (Duration::from_secs(5), Duration::from_secs(5)));
}

#[test]
fn hash_depends_only_on_file_and_secrets() {
    let folder = folder("providers: [{name: a, workerSecrets: [{file: s}]}]");
    write(folder.path(), "s", "one");
    let hash = |more: &[&str]| load_from(folder.path(), more).expect("valid").hash;
    let first = hash(&[]);
    assert_eq!(first.len(), 64);
    assert_eq!(hash(&["--api-keys-file", "elsewhere.json"]), first);
    write(folder.path(), "s", "two");
    let second = hash(&[]);
    assert_ne!(second, first);
    write(folder.path(), "relay.yaml", "providers: [{name: a, workerSecrets: [{file: s}]}] # more");
    assert_ne!(hash(&[]), second);
}

#[test]
fn missing_file_is_named_in_one_line() {
    let line = Config::from_args(&args(&["--config", "/nonexistent/relay.yaml"])).expect_err("missing").to_string();
    assert!(line.starts_with("--config: /nonexistent/relay.yaml: cannot read the file"), "{line}");
}

fn placed(placement: &str) -> PlacementConfig {
    let yaml =
        format!("providers: [{{name: a, workerSecrets: [{{value: {}}}], placement: {placement}}}]", "s".repeat(20));
    load(&yaml).expect(placement).providers[0].placement
}

#[test]
fn omitted_parts_of_placement_have_defaults() {
    assert_eq!(placed("{}"), PlacementConfig::default());
    let cache = PlacementConfig { mode: Placement::Cache, ..PlacementConfig::default() };
    assert_eq!(placed("{mode: cache}"), cache);
    let all = PlacementConfig { cache_isolation: CacheIsolation::Key, max_homes: 7, ..cache };
    assert_eq!(placed("{mode: cache, cacheIsolation: key, maxHomes: 7}"), all);
    let spill = Spill { requests: 0, ..Spill::default() };
    assert_eq!(placed("{spillRequests: 0}"), PlacementConfig { spill, ..PlacementConfig::default() });
}

#[test]
fn bad_placement_names_field_and_allowed_values() {
    let cases = [
        ("{mode: least}", "placement.mode", "least-load or cache"),
        ("{cacheIsolation: keys}", "placement.cacheIsolation", "none or key"),
        ("{maxHomes: 0}", "placement.maxHomes", "an integer from 1 to 10000000"),
        ("{modes: cache}", "placement", "mode"),
    ];
    for (placement, field, allowed) in cases {
        let line = refusal(&format!("providers: [{{name: a, placement: {placement}}}]"));
        assert!(line.contains(field) && line.contains(allowed), "{line}");
    }
}

#[test]
fn placement_variables_apply_to_sole_provider() {
    let secret = ["--worker-secret", "0123456789abcdef"];
    let given = ["--placement", "cache", "--cache-isolation", "key", "--max-homes", "9"];
    let spill = ["--spill-requests", "0", "--spill-bytes", "1Ki"];
    let config = Config::from_args(&args(&[&secret[..], &given[..], &spill[..]].concat())).expect("valid");
    let spill = Spill { requests: 0, bytes: 1024 };
    let expected =
        PlacementConfig { mode: Placement::Cache, cache_isolation: CacheIsolation::Key, max_homes: 9, spill };
    assert_eq!(config.providers[0].placement, expected);
}

#[test]
fn omitted_parts_of_fairness_have_defaults() {
    let fairness = |text: &str| {
        let secret = "s".repeat(20);
        let yaml = format!("providers: [{{name: a, workerSecrets: [{{value: {secret}}}], fairness: {text}}}]");
        load(&yaml).expect(text).providers[0].fairness
    };
    let default = FairnessConfig { mode: FairnessMode::Shared, promote_after: Duration::from_secs(15) };
    assert_eq!(fairness("{}"), default);
    assert_eq!(fairness("{promoteAfter: 500ms}").promote_after, Duration::from_millis(500));
    assert_eq!(fairness("{mode: fifo}"), FairnessConfig { mode: FairnessMode::Fifo, ..default });
}

#[test]
fn bad_fairness_names_field_and_allowed_values() {
    for (fairness, field, allowed) in [
        ("{mode: lifo}", "fairness.mode", "shared or fifo"),
        ("{promoteAfter: soon}", "promoteAfter", "duration"),
        ("{after: 3s}", "fairness", "promoteAfter"),
    ] {
        let line = refusal(&format!("providers: [{{name: a, fairness: {fairness}}}]"));
        assert!(line.contains(field) && line.contains(allowed), "{line}");
    }
}
