//! Settings: wrong ones end the program with one helpful line; right ones come from flags, environment and file.

use std::path::Path;

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::FakeRelay;
use modelrelay_harness::worker_process::{WORKER_SECRET, WorkerBuilder, WorkerProcess};
use serde_json::json;

/// Returns the output of a program that exits with code 1; it must be one line.
async fn refused(worker: WorkerBuilder) -> String {
    let mut process = worker.spawn();
    assert_eq!(process.wait_exit().await.code(), Some(1), "{}", process.log().dump());
    let lines: Vec<_> = process.log().lines().into_iter().filter(|line| !line.trim().is_empty()).collect();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    lines.into_iter().next().unwrap_or_default()
}

/// Checks that the line contains each of these.
fn names(line: &str, parts: &[&str]) {
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}

#[tokio::test]
async fn missing_secret_is_reported_in_one_line() {
    let line = refused(WorkerProcess::builder().without("WORKER_SECRET")).await;
    names(&line, &["WORKER_SECRET", "WORKER_SECRET_FILE"]);
}

#[tokio::test]
async fn empty_secret_is_treated_as_missing() {
    for secret in ["", "  "] {
        let line = refused(WorkerProcess::builder().env("WORKER_SECRET", secret)).await;
        names(&line, &["WORKER_SECRET"]);
    }
}

#[tokio::test]
async fn zone_with_other_characters_is_refused() {
    for (name, odd) in [("ZONE", "west 1"), ("CLUSTER", "zürich"), ("ZONE", &"z".repeat(64))] {
        let line = refused(WorkerProcess::builder().env(name, odd)).await;
        names(&line, &[name, odd, "1 to 63 letters"]);
    }
}

#[tokio::test]
async fn secret_outside_ascii_is_refused() {
    for (name, odd) in [("WORKER_SECRET", "geheim-äöü"), ("BACKEND_API_KEY", "schlüssel"), ("DRAIN_TOKEN", "a\rb")]
    {
        let line = refused(WorkerProcess::builder().env(name, odd)).await;
        names(&line, &[name, "printable ASCII"]);
        assert!(!line.contains(odd), "{line}");
    }
}

#[tokio::test]
async fn quoted_secret_is_named_as_likely_cause() {
    let mut relay = FakeRelay::start().await;
    let worker =
        WorkerProcess::builder().relay(relay.url()).env("WORKER_SECRET", "'planted-quoted-secret'").start().await;
    relay.dial().await.refuse(401).await;
    worker.process.wait_for_line("the worker secret includes quotation marks").await;
}

#[tokio::test]
async fn invalid_secret_file_is_reported() {
    let worker = || WorkerProcess::builder().without("WORKER_SECRET");
    let directory = tempfile::tempdir().expect("a temporary directory");
    let line = refused(worker().file("WORKER_SECRET_FILE", directory.path())).await;
    names(&line, &["WORKER_SECRET_FILE", &directory.path().to_string_lossy()]);
    let garbage = directory.path().join("secret");
    std::fs::write(&garbage, "two\nlines").expect("a writable directory");
    names(&refused(worker().file("WORKER_SECRET_FILE", &garbage)).await, &["WORKER_SECRET_FILE"]);
}

#[tokio::test]
async fn invalid_value_is_reported_with_setting_and_range() {
    for (setting, value, allowed) in [
        ("MAX_CONCURRENCY", "many", "number"),
        ("MAX_CONCURRENCY", "0", "1"),
        ("MAX_CONCURRENCY", "-1", "number"),
        ("SHUTDOWN_TIMEOUT_SECS", "soon", "seconds"),
        ("PROXY_URL", "ftp://relay.example", "http"),
        ("PROXY_URL", "not a url", "http"),
        ("BACKEND_URL", "ws://127.0.0.1:1", "http"),
        ("BACKEND_URL", "127.0.0.1:8000", "http"),
        ("PROBE_ADDR", "nowhere", "127.0.0.1"),
        ("LOG_LEVEL", "loud", "debug"),
    ] {
        let line = refused(WorkerProcess::builder().env(setting, value)).await;
        names(&line.to_lowercase(), &[&setting.to_lowercase(), value, allowed]);
    }
}

#[tokio::test]
async fn missing_files_are_named_with_their_setting() {
    for setting in ["RELAY_CA_FILE", "BACKEND_API_KEY_FILE"] {
        let line = refused(WorkerProcess::builder().env(setting, "/nowhere/file")).await;
        names(&line, &[setting, "/nowhere/file"]);
    }
}

#[tokio::test]
async fn ca_file_without_certificates_is_reported() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "not a certificate").expect("a writable file");
    names(&refused(WorkerProcess::builder().file("RELAY_CA_FILE", file.path())).await, &["RELAY_CA_FILE"]);
}

#[tokio::test]
async fn unknown_flag_ends_program() {
    let mut process = WorkerProcess::builder().arg("--max-concurency").arg("3").spawn();
    assert!(process.wait_exit().await.code().is_some_and(|code| code != 0));
    process.wait_for_line("--max-concurency").await;
}

#[tokio::test]
async fn invalid_setting_never_prints_secret() {
    let line = refused(WorkerProcess::builder().env("MAX_CONCURRENCY", "many")).await;
    assert!(!line.contains(WORKER_SECRET));
}

fn config(directory: &Path, text: &str) -> WorkerBuilder {
    let path = directory.join("worker.yaml");
    std::fs::write(&path, text).expect("a writable temporary directory");
    let worker =
        ["WORKER_SECRET", "WORKER_NAME", "MODELS"].iter().fold(WorkerProcess::builder(), |it, name| it.without(name));
    worker.arg("--config").arg(&path.to_string_lossy())
}

#[tokio::test]
async fn configuration_file_sets_everything() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::with_models(&["qwen"]).await;
    std::fs::write(directory.path().join("secret"), "from-the-file\n").expect("a writable directory");
    let text = format!(
        "relay: {}\nprovider: lab\nworkerSecretFile: {}/secret\nname: box-9\nbackend: {{url: \"{}\", engine: vllm}}\n\
         models: [qwen]\nmaxConcurrency: 3\nshutdownTimeout: 1m30s\nprobeListen: 127.0.0.1:0\n",
        relay.url(),
        directory.path().display(),
        backend.url(),
    );
    let _worker = config(directory.path(), &text).start().await;
    let dial = relay.dial().await;
    assert_eq!((dial.query.as_str(), dial.header("x-worker-secret")), ("provider=lab", Some("from-the-file")));
    let mut link = dial.upgrade().await;
    let register = link.expect("register").await;
    assert_eq!((&register["worker_name"], &register["max_concurrent"]), (&json!("box-9"), &json!(3)));
}

#[tokio::test]
async fn environment_overrides_file_and_flags_override_both() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut relay = FakeRelay::start().await;
    let text = format!("relay: {}\nworkerSecret: s\nname: from-file\nmaxConcurrency: 3\n", relay.url());
    let worker = config(directory.path(), &text).env("WORKER_NAME", "from-environment").concurrency(5);
    let _worker = worker.arg("--max-concurrency").arg("7").start().await;
    let mut link = relay.dial().await.upgrade().await;
    let register = link.expect("register").await;
    assert_eq!((&register["worker_name"], &register["max_concurrent"]), (&json!("from-environment"), &json!(7)));
}

#[tokio::test]
async fn unknown_key_in_file_is_rejected() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let line = refused(config(directory.path(), "workerSecret: s\nmaxConcurency: 3\n")).await;
    names(&line, &["worker.yaml", "maxConcurency"]);
}

#[tokio::test]
async fn invalid_value_in_file_is_named_with_key() {
    for (key, value) in [("maxConcurrency", "many"), ("shutdownTimeout", "soon"), ("relay", "ftp://x"), ("models", "7")]
    {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let line = refused(config(directory.path(), &format!("workerSecret: s\n{key}: {value}\n"))).await;
        names(&line, &[key]);
    }
}

#[tokio::test]
async fn missing_or_malformed_file_is_reported() {
    let worker = WorkerProcess::builder().arg("--config").arg("/nowhere/worker.yaml");
    names(&refused(worker).await, &["/nowhere/worker.yaml"]);
    let directory = tempfile::tempdir().expect("a temporary directory");
    names(&refused(config(directory.path(), "relay: [unclosed\n")).await, &["worker.yaml"]);
}

#[tokio::test]
async fn password_in_invalid_url_is_never_printed() {
    for (setting, value) in [
        ("PROXY_URL", "ftp://worker:planted-88@relay.example"),
        ("PROXY_URL", "https://worker:planted-88@relay.example:port"),
        ("PROXY_URL", "relay.example:8080?worker_secret=planted-88"),
        ("BACKEND_URL", "ws://user:planted-88@127.0.0.1:1"),
        ("BACKEND_URL", "http://user:planted-88@127.0.0.1:99999"),
        ("BACKEND_URL", "http:/ /127.0.0.1?key=planted-88"),
    ] {
        let line = refused(WorkerProcess::builder().env(setting, value)).await;
        names(&line, &[setting]);
        assert!(!line.contains("planted-88"), "{line}");
    }
}

#[tokio::test]
async fn secret_of_wrong_type_is_never_printed() {
    for (key, text) in [
        ("workerSecret", "workerSecret: {key: 77778888}"),
        ("drainToken", "workerSecret: s\ndrainToken: [77778888]"),
        ("headers", "workerSecret: s\nbackend: {headers: 77778888}"),
        ("headers", "workerSecret: s\nbackend: {headers: [Bearer 77778888]}"),
    ] {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let line = refused(config(directory.path(), text)).await;
        names(&line, &["worker.yaml", key]);
        assert!(!line.contains("77778888"), "{line}");
    }
}
