use super::*;

pub(super) fn args() -> Args {
    Args { worker_secret: Some(Secret::new("s3cret")), ..Args::default() }
}

pub(super) fn load(args: &Args, yaml: &str) -> Result<Settings, SettingError> {
    Settings::resolve(args, &File::parse(Path::new("worker.yaml"), yaml)?)
}

pub(super) fn error(args: &Args, yaml: &str) -> String {
    let text = load(args, yaml).unwrap_err().to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn every_setting_but_secret_has_default() {
    let settings = load(&args(), "").unwrap();
    assert_eq!(settings.live.relay, RelayUrl::default());
    assert_eq!((settings.live.provider.as_str(), settings.live.max_concurrency), ("local", 1));
    assert_eq!(settings.live.models, Models::Listed);
    assert_eq!(settings.live.backend.url.as_str(), "http://127.0.0.1:8000/");
    assert_eq!(settings.shutdown_timeout, Duration::from_secs(30));
    assert!(!settings.probe.explicit && settings.probe.addr.port() == 17990);
}

#[test]
fn missing_or_empty_secret_error_is_clear() {
    for secret in [None, Some(Secret::new("")), Some(Secret::new("  "))] {
        let text = error(&Args { worker_secret: secret, ..Args::default() }, "");
        assert!(text.starts_with("WORKER_SECRET: missing or empty"), "{text}");
    }
}

#[test]
fn secret_file_may_appear_later_but_must_parse() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let args = Args { worker_secret_file: Some(file.path().into()), ..Args::default() };
    assert!(Settings::load(&args).unwrap().live.credential.read().is_err());
    std::fs::write(file.path(), "two\nlines").unwrap();
    assert!(error(&args, "").contains("WORKER_SECRET_FILE"));
    std::fs::write(file.path(), "good\n").unwrap();
    assert_eq!(Settings::load(&args).unwrap().live.credential.read().unwrap(), Credential::Secret(Secret::new("good")));
    std::fs::remove_file(file.path()).unwrap();
    assert!(Settings::load(&args).is_ok());
}

#[test]
fn token_replaces_secret_and_excludes_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "a.b.c\n").unwrap();
    let of_file = format!("workerTokenFile: {}\n", file.path().display());
    let token = Args { worker_token_file: Some(file.path().into()), ..Args::default() };
    let read = |args: &Args, yaml: &str| load(args, yaml).unwrap().live.credential.read().unwrap();
    assert_eq!(read(&token, ""), Credential::Token(Secret::new("a.b.c")));
    assert_eq!(read(&Args::default(), &of_file), Credential::Token(Secret::new("a.b.c")));
    // The environment takes precedence as a whole.
    assert_eq!(read(&args(), &of_file), Credential::Secret(Secret::new("s3cret")));
    assert_eq!(read(&token, "workerSecret: other\n"), Credential::Token(Secret::new("a.b.c")));
    let text = error(&Args { worker_token_file: Some(file.path().into()), ..args() }, "");
    assert!(text.contains("WORKER_TOKEN_FILE") && text.contains("WORKER_SECRET is set too"), "{text}");
    let text = error(&Args::default(), &format!("{of_file}workerSecretFile: /nowhere\n"));
    assert!(text.contains("workerTokenFile") && text.contains("workerSecretFile is set too"), "{text}");
}

#[test]
fn invalid_setting_error_names_value_and_allowed_values() {
    let with = |change: fn(&mut Args)| {
        let mut args = args();
        change(&mut args);
        error(&args, "")
    };
    for (text, parts) in [
        (with(|a| a.max_concurrency = Some("0".into())), ["MAX_CONCURRENCY", "\"0\"", "1 to 100000"]),
        (with(|a| a.proxy_url = Some("ftp://x".into())), ["PROXY_URL", "\"ftp://x\"", "https://"]),
        (with(|a| a.backend_url = Some("nonsense".into())), ["BACKEND_URL", "\"nonsense\"", "http://"]),
        (with(|a| a.probe_addr = Some("17990".into())), ["PROBE_ADDR", "\"17990\"", "127.0.0.1:17990"]),
        (with(|a| a.log_level = Some("loud".into())), ["LOG_LEVEL", "\"loud\"", "debug"]),
        (with(|a| a.shutdown_timeout_secs = Some("soon".into())), ["SHUTDOWN_TIMEOUT_SECS", "\"soon\"", "seconds"]),
        (with(|a| a.max_buffered_bytes = Some("much".into())), ["MAX_BUFFERED_BYTES", "\"much\"", "256Mi"]),
        (with(|a| a.models = Some("*,a".into())), ["MODELS", "\"*,a\"", "not both"]),
    ] {
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn variables_override_file_settings() {
    let yaml = "relay: dns+http://local-workers.llm.svc:8081\nprovider: p\nname: gpu-box-1\n\
        backend: {url: 'http://127.0.0.1:9000/v1', engine: vllm, apiKeyFile: '', headers: {x-a: b}}\n\
        models: [a, ' b ', a]\nmaxConcurrency: 4\nmaxBufferedBytes: 1Mi\nshutdownTimeout: 90s\nprobeListen: 0.0.0.0:17990\n\
        zone: attic\ncluster: home\n";
    let settings = load(&args(), yaml).unwrap();
    assert!(settings.live.relay.every_address && settings.live.relay.port == 8081);
    assert_eq!(settings.live.backend.url.as_str(), "http://127.0.0.1:9000/");
    assert_eq!(settings.live.backend.engine, Engine::Vllm);
    assert_eq!(settings.live.backend.headers["x-a"], "b");
    assert_eq!(settings.live.models, Models::Fixed(vec!["a".into(), "b".into()]));
    assert_eq!((settings.shutdown_timeout, settings.max_buffered_bytes), (Duration::from_secs(90), 1 << 20));
    assert!(settings.probe.explicit);
    let location = Location { zone: Some("attic".into()), cluster: Some("home".into()) };
    assert_eq!(settings.location, location);

    let over = Args { provider_name: Some("q".into()), max_concurrency: Some("7".into()), ..args() };
    let settings = load(&over, yaml).unwrap();
    assert_eq!((settings.live.provider.as_str(), settings.live.max_concurrency), ("q", 7));
}

#[test]
fn unknown_keys_are_refused() {
    let text = error(&args(), "maxConcurency: 4\n");
    assert!(text.contains("maxConcurency"), "{text}");
}

#[test]
fn secrets_are_never_repeated() {
    let args = Args { worker_secret: Some(Secret::new("hunter2\nhunter2")), ..Args::default() };
    assert!(!error(&args, "").contains("hunter2"));
    let args = Args { backend_url: Some("http://user:hunter2@host".into()), ..self::args() };
    assert!(!error(&args, "").contains("hunter2"));
    assert!(!format!("{:?} {:?}", self::args(), load(&self::args(), "").unwrap()).contains("s3cret"));
    let file =
        File::parse(Path::new("worker.yaml"), "workerSecret: hunter2\nbackend: {headers: {a: hunter2}}").unwrap();
    assert!(!format!("{file:?}").contains("hunter2"));
}

#[test]
fn value_of_wrong_type_is_not_printed() {
    let model =
        |rest: &str| format!("multiplexer: {{slots: [{{id: gpu0, driver: hooks, models: [{{id: m, {rest}}}]}}]}}");
    let slot = |rest: &str| format!("multiplexer: {{slots: [{{id: gpu0, {rest}}}]}}");
    for (yaml, parts) in [
        ("backend: {headers: 'x-key: hunter2'}".to_owned(), ["backend.headers: ", "string, expected a map at line 1"]),
        ("backend: 'http://user:hunter2@host'".to_owned(), ["backend: ", "string, expected a map at line 1"]),
        (model("env: HF_TOKEN=hunter2"), ["slots[0].models[0].env: ", "string, expected a map at line 1"]),
        (model("env: [HF_TOKEN=hunter2]"), ["slots[0].models[0].env: ", "sequence, expected a map at line 1"]),
        (model("env: {HF_TOKEN: [hunter2]}"), ["models[0].env.HF_TOKEN: ", "sequence, expected a string at line 1"]),
        (model("command: vllm --api-key hunter2"), ["models[0].command: ", "string, expected a list at line 1"]),
        (model("alive: [a, {b: hunter2}]"), ["models[0].alive[1]: ", "map, expected a string at line 1"]),
        (model("pin: hunter2"), ["models[0].pin: ", "string, expected a boolean at line 1"]),
        (model("pin: 'a, expected hunter2'"), ["models[0].pin: ", "string, expected a boolean at line 1"]),
        (model("HF_TOKEN=hunter2: x"), ["models[0]: ", "unknown field `HF_TOKEN`, expected one of"]),
        (
            slot("driver: static, models: ['vllm hunter2']"),
            ["slots[0].models[0]: ", "string, expected a map at line 1"],
        ),
        (slot("driver: 'vllm hunter2'"), ["slots[0].driver: ", "unknown variant `vllm`, expected one of"]),
        ("workerSecret:hunter2".to_owned(), ["invalid type: string, ", "expected a map"]),
        ("{workerSecret:hunter2, relay: x}".to_owned(), ["unknown field `workerSecret`", ", expected one of"]),
        ("workerSecret: !!null hunter2".to_owned(), ["invalid value: string", ", expected null"]),
    ] {
        let text = error(&args(), &yaml);
        assert!(parts.iter().all(|part| text.contains(part)) && !text.contains("hunter2"), "{text}");
    }
    let shown = format!("{:?}", File::parse(Path::new("worker.yaml"), &model("env: {HF_TOKEN: hunter2}")).unwrap());
    assert!(!shown.contains("hunter2"), "{shown}");
}

#[test]
fn empty_value_equals_absent_key() {
    for nothing in ["", "null", "~"] {
        let model = format!("{{id: m, url: 'http://127.0.0.1:1', env: {nothing}}}");
        let yaml = format!(
            "backend: {{headers: {nothing}}}\nmultiplexer: {{slots: [{{id: gpu0, driver: static, models: [{model}]}}]}}"
        );
        File::parse(Path::new("worker.yaml"), &yaml).unwrap();
    }
}

#[test]
fn invalid_yaml_error_names_location() {
    let text = error(&args(), "backend:\n  headers: {a: 'b}\n");
    assert!(text.contains("while scanning a quoted scalar") && text.contains("line 2"), "{text}");
}

#[test]
fn errors_contain_no_control_characters() {
    let text = error(&args(), "multiplexer:\n  slots:\n  - id: gpu0\n    driver: !%1bcstatic\n");
    assert!(text.contains("cstatic`, expected one of") && !text.contains(char::is_control), "{text:?}");
}

#[test]
fn relay_url_yields_websocket_url() {
    let url = |text| RelayUrl::parse("PROXY_URL", text).unwrap().connect_url("local");
    assert_eq!(url("https://relay.example"), "wss://relay.example:443/v1/worker/connect?provider=local");
    assert_eq!(url("ws://[::1]:9/base/"), "ws://[::1]:9/base/v1/worker/connect?provider=local");
    for text in ["dns+ws://x", "relay.example:8080", "http://", "http://a?b=c", "http://u:p@h"] {
        assert!(RelayUrl::parse("PROXY_URL", text).is_err(), "{text}");
    }
}

#[test]
fn byte_order_mark_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let (config, secret) = (folder.path().join("worker.yaml"), folder.path().join("secret"));
    std::fs::write(&secret, "\u{feff}s3cret\r\n").unwrap();
    std::fs::write(&config, format!("\u{feff}provider: q\r\nworkerSecretFile: {}\r\n", secret.display())).unwrap();
    let settings = Settings::load(&Args { config: Some(config), ..Args::default() }).unwrap();
    assert_eq!(settings.live.provider, "q");
    assert_eq!(settings.live.credential.read().unwrap(), Credential::Secret(Secret::new("s3cret")));
}
