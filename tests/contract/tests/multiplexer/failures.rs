//! Failed loads in a relay's machine-readable state: programs poll it every few seconds, and a failure passes sooner.

use std::time::Instant;

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::poll_until;
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::wait_for_model;
use serde_json::{Value, json};

use crate::fleet::{id_at, load_once_it_has_started, outcome};
use crate::rig::{LONG, worker_with};

/// Returns the one slot in `/admin/state`.
async fn slot(relay: &Relay) -> Value {
    relay.admin_json("/admin/state").await["providers"][0]["workers"][0]["slots"][0].clone()
}

#[tokio::test]
async fn failed_load_is_reported_until_model_is_loaded() {
    let relay = Relay::start().await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let backend = FakeBackend::with_models(&["a"]).await;
    let at = folder.path().display();
    let once =
        format!("test -e {at}/tried || {{ touch {at}/tried; echo 'no kernel image is available' >&2; exit 3; }}");
    let model = json!({
        "id": "a", "url": backend.url(), "evict": ["/bin/rm", "-f", format!("{at}/a")],
        "load": ["/bin/sh", "-c", format!("{once}; touch {at}/a")], "alive": ["/usr/bin/test", "-e", format!("{at}/a")],
    });
    let slots = json!([{"id": "gpu0", "driver": "hooks", "models": [model]}]);
    let block = json!({"multiplexer": {"minResidency": "1ms", "linger": "off", "slots": slots}});
    let (_config, builder) = worker_with(&block.to_string());
    let builder = builder.relay(format!("http://{}", relay.addr()));
    let _worker = builder.env("WORKER_SECRET", WORKER_SECRET).env("WORKER_NAME", "one").start().await;
    wait_for_model(&relay, "a").await;
    assert_eq!(slot(&relay).await["last_failure"], json!(null), "no load has failed yet");

    let load = json!({"command": "load", "model": "a"});
    let id = id_at(&relay, "one").await;
    let tried = || async {
        outcome(&relay, &id, &load).await;
        folder.path().join("tried").exists()
    };
    relay.eventually("a load was tried", tried).await;
    relay.eventually("the failure is known", async || slot(&relay).await["last_failure"].is_object()).await;
    let known = Instant::now();
    // The model is no longer requested, so its back-off ends without another load.
    let is_unloaded = async || slot(&relay).await["models"][0]["status"] == "unloaded";
    poll_until(LONG, "the end of the back-off", relay.log(), is_unloaded).await;
    let at_least = known.elapsed().as_millis();
    let later = slot(&relay).await;
    let failure = &later["last_failure"];
    assert_eq!((&failure["model"], &failure["code"]), (&json!("a"), &json!("backend_unavailable")), "{later}");
    assert!(failure["message"].as_str().is_some_and(|words| !words.is_empty()), "{later}");
    assert!(failure["age_ms"].as_u64().is_some_and(|age| u128::from(age) >= at_least && age < 60_000), "{later}");

    load_once_it_has_started(&relay, &id, "a").await;
    let loaded = || async { slot(&relay).await["resident"] == "a" };
    relay.eventually("the relay reports the model as loaded", loaded).await;
    assert_eq!(slot(&relay).await["last_failure"], json!(null), "a load must clear the failure");
}
