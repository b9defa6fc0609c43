//! `worker.yaml` is watched: a change applies without dropping a link, and an invalid file changes nothing.

use std::path::Path;
use std::time::Duration;

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::{Certificates, FakeRelay, RelayLink, RequestSpec};
use modelrelay_harness::worker_process::WorkerProcess;
use serde_json::json;
use tempfile::TempDir;

struct Watched {
    directory: TempDir,
    relay: FakeRelay,
    backend: FakeBackend,
    worker: WorkerProcess,
    link: RelayLink,
}

impl Watched {
    async fn start(settings: &str) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut relay = FakeRelay::start().await;
        let backend = FakeBackend::start().await;
        replace(directory.path(), &text(&relay, &backend, settings));
        let worker = WorkerProcess::builder().without("MODELS").arg("--config");
        let worker = worker.arg(&directory.path().join("worker.yaml").to_string_lossy()).start().await;
        let link = relay.accept_registered(&["core1"]).await;
        Self { directory, relay, backend, worker, link }
    }

    fn change(&self, settings: &str) {
        replace(self.directory.path(), &text(&self.relay, &self.backend, settings));
    }
}

fn text(relay: &FakeRelay, backend: &FakeBackend, settings: &str) -> String {
    format!("relay: {}\nbackend: {{url: \"{}\"}}\n{settings}\n", relay.url(), backend.url())
}

/// Replaces the file in one step, as an editor or a Secret mount does.
fn replace(directory: &Path, text: &str) {
    std::fs::write(directory.join("new"), text).expect("a writable directory");
    std::fs::rename(directory.join("new"), directory.join("worker.yaml")).expect("a file can be renamed");
}

#[tokio::test]
async fn changed_models_are_advertised_on_same_link() {
    let mut watched = Watched::start("models: [m]").await;
    watched.link.models(&["m"]).await;
    watched.change("models: [m, other]");
    watched.link.expect_where("models_update", |update| update["models"] == json!(["m", "other"])).await;
}

#[tokio::test]
async fn declared_details_are_advertised_on_same_link() {
    let mut watched = Watched::start("modelDetails: {m: {context_length: 4096}}").await;
    watched.backend.set_details(&json!({"context_length": 8192, "max_tokens": 512}));
    watched.link.models(&["m"]).await;
    watched.change("modelDetails: {m: {context_length: 2048}}");
    let expected = json!({"m": {"context_length": 2048, "max_tokens": 512}});
    let update = watched.link.expect_where("models_update", |update| update["model_details"] == expected).await;
    assert_eq!(update["models"], json!(["m"]));
    watched.change("modelDetails: {m: {contextLength: 2048}}");
    watched.worker.process.wait_for_line("modelDetails.m: contextLength is unknown").await;
}

#[tokio::test]
async fn changed_capacity_is_granted_on_same_link() {
    let mut watched = Watched::start("models: [m]\nmaxConcurrency: 2").await;
    watched.link.ready(&["m"], 2).await;
    watched.change("models: [m]\nmaxConcurrency: 5");
    assert_eq!(watched.link.grant(5).await["capacity"], 5);
}

#[tokio::test]
async fn reduced_capacity_severs_no_running_request() {
    let mut watched = Watched::start("models: [m]\nmaxConcurrency: 2").await;
    watched.link.ready(&["m"], 2).await;
    let requests =
        [watched.link.send_request(&RequestSpec::chat("m")), watched.link.send_request(&RequestSpec::chat("m"))];
    let calls = [watched.backend.call().await, watched.backend.call().await];
    watched.change("models: [m]\nmaxConcurrency: 1");
    watched.link.expect_where("grant", |grant| grant["capacity"] == 1).await;
    for call in calls {
        call.answer_json(200, &json!({})).await;
    }
    for request in &requests {
        assert_eq!(watched.link.reply(request).await.status, 200);
    }
}

#[tokio::test]
async fn broken_file_keeps_previous_settings_and_is_logged() {
    let mut watched = Watched::start("models: [m]").await;
    watched.link.models(&["m"]).await;
    watched.change("maxConcurency: 3");
    watched.worker.process.wait_for_line("maxConcurency").await;
    watched.change("models: [m, other]");
    watched.link.expect_where("models_update", |update| update["models"] == json!(["m", "other"])).await;
    assert!(watched.worker.process.is_running());
}

#[tokio::test]
async fn unchanged_model_is_never_withdrawn_during_reload() {
    let mut watched = Watched::start("models: [m]").await;
    watched.link.models(&["m"]).await;
    watched.change("models: [m, other]");
    let update = watched.link.expect("models_update").await;
    assert_eq!(update["models"], json!(["m", "other"]), "requests for m reached a relay without it");
}

#[tokio::test]
async fn changed_backend_is_used_without_restart() {
    let mut watched = Watched::start("models: [m]").await;
    watched.link.ready(&["m"], 1).await;
    let mut other = FakeBackend::start().await;
    replace(watched.directory.path(), &text(&watched.relay, &other, "models: [m]"));
    watched.worker.process.wait_for_line("worker.yaml applied").await;
    // The models of the previous backend are withdrawn until the new one is known to be healthy.
    watched.link.expect_where("models_update", |update| update["models"] == json!(["m"])).await;
    let request = watched.link.send_request(&RequestSpec::chat("m"));
    other.call().await.answer_json(200, &json!({"from": "the other"})).await;
    assert_eq!(watched.link.reply(&request).await.json(), json!({"from": "the other"}));
}

/// The operator configures Pods with a backend like this: their backends move with the next Pod, and the file changes
/// at once.
#[tokio::test]
async fn backend_from_environment_overrides_changed_file() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (mut relay, other) = (FakeRelay::start().await, FakeBackend::start().await);
    let mut backend = FakeBackend::start().await;
    replace(directory.path(), &text(&relay, &backend, "models: [m]"));
    let worker = WorkerProcess::builder().backend(backend.url()).env("BACKEND_ENGINE", "openai").without("MODELS");
    let config = directory.path().join("worker.yaml");
    let _worker = worker.arg("--config").arg(&config.to_string_lossy()).start().await;
    let mut link = relay.accept_registered(&["core1"]).await;
    link.models(&["m"]).await;
    replace(directory.path(), &text(&relay, &other, "models: [m, n]"));
    let update = link.expect("models_update").await;
    assert_eq!(update["models"], json!(["m", "n"]), "the models were withdrawn on the way");
    let request = link.send_request(&RequestSpec::chat("n"));
    backend.call().await.answer_json(200, &json!({"from": "the first"})).await;
    assert_eq!(link.reply(&request).await.json(), json!({"from": "the first"}));
    assert_eq!(other.received_heads().len(), 0);
}

#[tokio::test]
async fn restart_only_change_is_logged_and_not_applied() {
    let mut watched = Watched::start("models: [m]\npool: before").await;
    watched.link.models(&["m"]).await;
    watched.change("models: [m, other]\npool: after");
    watched.link.expect_where("models_update", |update| update["models"] == json!(["m", "other"])).await;
    watched.worker.process.wait_for_line("settings that require a restart").await;
}

/// As on Kubernetes, when a Provider gets a certificate while its workers serve: backends take minutes to load.
#[tokio::test]
async fn relay_enabling_tls_is_followed_without_restart() {
    let certificates = Certificates::make();
    let mut watched = Watched::start("models: [m]").await;
    watched.link.models(&["m"]).await;
    watched.relay = FakeRelay::start_tls(&certificates).await;
    watched.change(&format!("models: [m]\nrelayCaFile: {}", certificates.ca_file().display()));
    watched.worker.process.wait_for_line("worker.yaml applied").await;
    assert!(watched.relay.dial_within(Duration::from_millis(500)).await.is_none(), "a link that serves was given up");
    watched.link.close(1012, "restarting");
    watched.link = watched.relay.accept_registered(&["core1"]).await;
    watched.link.models(&["m"]).await;
}

/// As on Kubernetes, when a Provider gets another relay, which knows it by another name.
#[tokio::test]
async fn changed_provider_name_applies_from_next_dial() {
    let mut watched = Watched::start("models: [m]").await;
    watched.link.models(&["m"]).await;
    watched.relay = FakeRelay::start().await;
    watched.change("models: [m]\nprovider: chat.research");
    watched.worker.process.wait_for_line("worker.yaml applied").await;
    watched.link.close(1012, "restarting");
    assert_eq!(watched.relay.dial().await.query, "provider=chat.research");
}

#[tokio::test]
async fn renewed_authority_applies_from_next_dial() {
    let (old, new) = (Certificates::make(), Certificates::make());
    let mut watched = Watched::start("models: [m]").await;
    let authority = watched.directory.path().join("ca.crt");
    std::fs::copy(old.ca_file(), &authority).expect("a writable directory");
    let settings = format!("models: [m]\nrelayCaFile: {}", authority.display());
    for certificates in [&old, &new] {
        std::fs::copy(certificates.ca_file(), &authority).expect("a writable directory");
        watched.relay = FakeRelay::start_tls(certificates).await;
        watched.change(&settings);
        watched.link.close(1012, "restarting");
        watched.link = watched.relay.accept_registered(&["core1"]).await;
    }
    watched.link.models(&["m"]).await;
}

#[tokio::test]
async fn unreadable_authority_keeps_previous_settings() {
    let mut watched = Watched::start("models: [m]").await;
    watched.link.models(&["m"]).await;
    watched.change("models: [m, other]\nrelayCaFile: /nowhere/ca.crt");
    watched.worker.process.wait_for_line("RELAY_CA_FILE").await;
    watched.link.close(1012, "restarting");
    let mut link = watched.relay.accept_registered(&["core1"]).await;
    link.models(&["m"]).await;
}
