//! `modelrelay-worker check`: all settings, checked as in a run, but without running.

use std::path::Path;
use std::process::Output;

use modelrelay_harness::process::path_of;
use tokio::process::Command;

const SECRET: &str = "planted-check-secret-77";

fn check(folder: &Path, yaml: &str) -> Command {
    let file = folder.join("worker.yaml");
    std::fs::write(&file, yaml).expect("a writable directory");
    let mut command = Command::new(path_of("modelrelay-worker"));
    command.env_clear().env("WORKER_SECRET", SECRET).args(["check", "--config"]).arg(file);
    command
}

async fn run(command: &mut Command) -> Output {
    let output = command.output().await.expect("it starts");
    for stream in [&output.stdout, &output.stderr] {
        assert!(!String::from_utf8_lossy(stream).contains(SECRET), "the output contains a secret");
    }
    output
}

/// Returns the output of a check that finds no mistakes.
async fn plan(command: &mut Command) -> String {
    let output = run(command).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

/// Returns the lines of a check that finds mistakes, one each.
async fn mistakes(command: &mut Command) -> Vec<String> {
    let output = run(command).await;
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    let printed = String::from_utf8(output.stderr).expect("the output is UTF-8");
    printed
        .lines()
        .map(|line| {
            line.strip_prefix("modelrelay-worker: ").expect("each line starts with the program's name").to_owned()
        })
        .collect()
}

#[tokio::test]
async fn valid_settings_are_reported_with_run_plan() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = "relay: https://relay.example\nname: box-9\nbackend: {url: 'http://127.0.0.1:9000/v1', engine: vllm}\n";
    let plan_text = plan(check(folder.path(), yaml).env("MAX_CONCURRENCY", "3")).await;
    let expected = "configuration OK\n\
        relay: https://relay.example:443\n\
        provider: local, as box-9, with a worker secret\n\
        backend: http://127.0.0.1:9000 (vllm)\n\
        models: all that it lists\n\
        concurrent requests: 3\n\
        probes: http://127.0.0.1:17990\n";
    assert_eq!(plan_text, expected);
}

#[tokio::test]
async fn every_mistake_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = "relay: ftp://x\nbackend: {url: nonsense, engine: vlm}\nmodels: ['*', a]\nprobeListen: 17990\n";
    let errors = mistakes(check(folder.path(), yaml).env("MAX_CONCURRENCY", "0").env("WORKER_SECRET", "")).await;
    let places = ["probeListen: ", "relay: ", "WORKER_SECRET: ", "backend.url: ", "models: ", "MAX_CONCURRENCY: "];
    let found: Vec<_> = errors.iter().map(|line| places.iter().find(|place| line.starts_with(**place))).collect();
    assert_eq!(found, places.iter().map(Some).collect::<Vec<_>>(), "{errors:#?}");
}

#[tokio::test]
async fn trace_settings_are_checked_as_for_run() {
    let folder = tempfile::tempdir().unwrap();
    let unreadable = folder.path().join("no-ca.pem");
    let to_collector = || {
        let mut command = check(folder.path(), "");
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4318");
        command
    };
    let errors = mistakes(to_collector().env("OTEL_EXPORTER_OTLP_CERTIFICATE", unreadable)).await;
    assert!(errors.len() == 1 && errors[0].starts_with("OTEL_EXPORTER_OTLP_CERTIFICATE: "), "{errors:#?}");
    plan(&mut to_collector()).await;
}

#[tokio::test]
async fn multiplexer_settings_are_checked_as_for_run() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = "maxConcurrency: 3\nmultiplexer:\n  maxWait: soon\n  slots:\n\
        \x20 - {id: a, driver: static, models: [{id: m, url: nonsense}, {id: n}]}\n\
        \x20 - {id: b, driver: ollama, url: 'http://127.0.0.1:11434', default: q, models: [{id: o, level: 2}]}\n";
    let errors = mistakes(&mut check(folder.path(), yaml)).await;
    let places = [
        "maxConcurrency: conflicts with `multiplexer`",
        "multiplexer.maxWait: ",
        "multiplexer.slots.a.models.m.url: ",
        "multiplexer.slots.a.models.n.url: missing",
        "multiplexer.slots.b.models.o.level: ",
        "multiplexer.slots.b.default: ",
    ];
    let found: Vec<_> = errors.iter().map(|line| places.iter().find(|place| line.starts_with(**place))).collect();
    assert_eq!(found, places.iter().map(Some).collect::<Vec<_>>(), "{errors:#?}");
    let yaml = "multiplexer:\n  slots:\n  - {id: a, driver: ollama, url: 'http://127.0.0.1:11434', models: [{id: m}, {id: n}]}\n";
    let plan_text = plan(&mut check(folder.path(), yaml)).await;
    assert!(plan_text.contains("\nslot a: m, n, one at a time\n") && !plan_text.contains("backend"), "{plan_text}");
}

#[tokio::test]
async fn flags_work_anywhere_and_override_variables() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = check(folder.path(), "name: from-file\nmaxConcurrency: 2\n");
    let plan_text = plan(command.env("WORKER_NAME", "from-environment").args(["--worker-name", "from-flag"])).await;
    assert!(plan_text.contains("as from-flag, ") && plan_text.contains("concurrent requests: 2\n"), "{plan_text}");
    let mut command = Command::new(path_of("modelrelay-worker"));
    command.env_clear().env("WORKER_SECRET", SECRET).env("WORKER_NAME", "from-environment");
    let plan_text = plan(command.args(["--worker-name", "before", "check"])).await;
    assert!(plan_text.contains("as before, "), "{plan_text}");
}

#[tokio::test]
async fn invalid_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let errors = mistakes(&mut check(folder.path(), "relay: http://x\nmaxConcurency: 3\n")).await;
    assert!(
        errors.len() == 1 && errors[0].contains("worker.yaml") && errors[0].contains("maxConcurency"),
        "{errors:?}"
    );
    let errors = mistakes(check(folder.path(), "").env("RELAY_CA_FILE", "/nowhere/ca.pem")).await;
    assert!(errors.len() == 1 && errors[0].starts_with("RELAY_CA_FILE: \"/nowhere/ca.pem\""), "{errors:?}");
    let later = folder.path().join("later");
    let mut command = check(folder.path(), "");
    let output = run(command.env_remove("WORKER_SECRET").env("WORKER_SECRET_FILE", &later)).await;
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && warned.starts_with("modelrelay-worker: warning: "), "{warned}");
    assert!(warned.contains("WORKER_SECRET_FILE") && warned.contains(later.to_str().unwrap()), "{warned}");
}
