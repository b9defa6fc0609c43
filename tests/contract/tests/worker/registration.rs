//! A worker's introduction: the dial, and `register`.

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::{Ack, FakeRelay};
use modelrelay_harness::worker_process::{Rig, WORKER_SECRET, WorkerProcess};
use serde_json::{Value, json};

const VERSION_ERROR: &str = "worker registration protocol error";

#[tokio::test]
async fn dial_names_provider_and_sends_secret_in_header() {
    let mut relay = FakeRelay::start().await;
    let _worker = WorkerProcess::builder().relay(relay.url()).env("PROVIDER_NAME", "lab").start().await;
    let dial = relay.dial().await;
    assert_eq!(dial.path, "/v1/worker/connect");
    assert_eq!(dial.query, "provider=lab");
    assert_eq!(dial.header("x-worker-secret"), Some(WORKER_SECRET));
}

#[tokio::test]
async fn provider_is_local_by_default() {
    let mut relay = FakeRelay::start().await;
    let _worker = WorkerProcess::builder().relay(relay.url()).start().await;
    assert_eq!(relay.dial().await.query, "provider=local");
}

#[tokio::test]
async fn websocket_relay_addresses_are_accepted() {
    let mut relay = FakeRelay::start().await;
    let url = relay.url().replace("http://", "ws://");
    let _worker = WorkerProcess::builder().relay(url).start().await;
    assert_eq!(relay.dial().await.path, "/v1/worker/connect");
}

#[tokio::test]
async fn register_is_first_message_with_seed_fields() {
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).concurrency(4);
    let _worker = worker.env("WORKER_NAME", "gpu-box-7").start().await;
    let mut link = relay.dial().await.upgrade().await;
    let register = link.expect("register").await;
    assert_eq!(register.seq, 0);
    assert_eq!(register["worker_name"], "gpu-box-7");
    assert_eq!(register["max_concurrent"], 4);
    assert_eq!(register["protocol_version"], "1");
    assert_eq!(register["current_load"], 0);
    assert!(register["models"].is_array(), "{}", register.body);
}

#[tokio::test]
async fn register_names_zone_and_cluster_if_set() {
    for (zone, cluster, expected) in [
        ("attic", "home", json!({"zone": "attic", "cluster": "home"})),
        ("", "home", json!({"cluster": "home"})),
        ("", "", Value::Null),
    ] {
        let mut relay = FakeRelay::start().await;
        let worker = WorkerProcess::builder().relay(relay.url()).env("ZONE", zone).env("CLUSTER", cluster);
        let _worker = worker.start().await;
        let mut link = relay.dial().await.upgrade().await;
        assert_eq!(link.expect("register").await["location"], expected);
    }
}

#[tokio::test]
async fn register_offers_core1_its_limits_and_version() {
    let rig = Rig::core1().await;
    let register = &rig.link.registration;
    assert!(register["capabilities"].as_array().is_some_and(|all| all.contains(&json!("core1"))), "{register}");
    assert!(!register["capabilities"].as_array().is_some_and(|all| all.contains(&json!("slots1"))), "{register}");
    assert!(register["limits"]["stream_window_bytes"].as_u64() >= Some(65_536), "{register}");
    assert!(register["version"].as_str().is_some_and(|version| version.contains('.')), "{register}");
    assert!(register["have"].as_array().is_none_or(Vec::is_empty), "{register}");
}

#[tokio::test]
async fn instance_id_is_random_and_stable_across_links() {
    let mut one = Rig::core1().await;
    let two = Rig::core1().await;
    let id = |register: &Value| register["instance_id"].as_str().map(str::to_owned).expect("an instance_id");
    let first = id(&one.link.registration);
    assert!(first.len() >= 22, "{first:?} is too short for 128 bits");
    assert_ne!(first, id(&two.link.registration));
    one.link.close(1000, "bye");
    let again = one.relay.accept_registered(&["core1"]).await;
    assert_eq!(id(&again.registration), first);
}

#[tokio::test]
async fn register_lists_already_linked_relays() {
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::start().await;
    let _worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).start().await;
    let _first = relay.accept_with(&Ack { relay_count: 2, ..Ack::core1() }).await;
    let second = Ack { relay_count: 2, relay_id: "relay-b".to_owned(), ..Ack::core1() };
    let second = relay.accept_with(&second).await;
    assert_eq!(second.registration["have"], json!(["relay-a"]));
}

#[tokio::test]
async fn dial_after_1002_uses_published_version() {
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::start().await;
    let _worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).start().await;
    let mut link = relay.dial().await.upgrade().await;
    assert_eq!(link.expect("register").await["protocol_version"], "1");
    link.close(1002, VERSION_ERROR);
    let mut link = relay.dial().await.upgrade().await;
    assert_eq!(link.expect("register").await["protocol_version"], "2026-04-bridge-v1");
}

#[tokio::test]
async fn relay_of_published_version_is_served() {
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).start().await;
    let mut refused = relay.dial().await.upgrade().await;
    refused.expect("register").await;
    refused.close(1002, VERSION_ERROR);
    let link = relay.accept_with(&Ack::old()).await;
    let mut rig = Rig { relay, link, backend, worker };
    rig.link.ready(&["m"], 1).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn worker_name_defaults_to_host_name() {
    let mut relay = FakeRelay::start().await;
    let _worker = WorkerProcess::builder().relay(relay.url()).without("WORKER_NAME").start().await;
    let link = relay.accept_registered(&["core1"]).await;
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("Linux exposes its host name");
    assert_eq!(link.registration["worker_name"], host.trim());
}

#[tokio::test]
async fn configured_models_are_comma_separated() {
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::with_models(&["qwen", "llama"]).await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url());
    let _worker = worker.models("qwen, llama").start().await;
    relay.accept_registered(&["core1"]).await.models(&["qwen", "llama"]).await;
}

#[tokio::test]
async fn models_flag_overrides_environment() {
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::with_models(&["qwen", "m"]).await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url());
    let _worker = worker.arg("--models").arg("qwen").start().await;
    relay.accept_registered(&["core1"]).await.models(&["qwen"]).await;
}

#[tokio::test]
async fn connection_and_registration_are_logged() {
    let rig = Rig::core1().await;
    rig.worker.process.wait_for_line("connected to proxy").await;
    rig.worker.process.wait_for_line("registered").await;
}
