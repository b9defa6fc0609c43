//! SIGTERM in any state of a slot: the worker ends soon and cleanly, and leaves nothing running.

use std::path::Path;
use std::time::Duration;

use modelrelay_harness::fake_backend::FakeBackend;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::children::{descendants_of, gone};
use crate::rig::{Rig, Slot, demand, gate, request_once_loaded, slots1, stream, text};

/// Long enough for everything that has to end, and shorter than a driver's own timeouts.
const SOON: Duration = Duration::from_secs(20);

/// The commands of a slot's two models. A file per model marks it as loaded.
struct Hooks {
    load_a: &'static str,
    evict_a: &'static str,
    load_b: &'static str,
}

const LOAD: &str = "touch $FOLDER/$MODELRELAY_MODEL";
const EVICT: &str = "rm -f $FOLDER/$MODELRELAY_MODEL";

impl Default for Hooks {
    fn default() -> Self {
        Self { load_a: LOAD, evict_a: EVICT, load_b: LOAD }
    }
}

impl Hooks {
    async fn start(&self) -> (Rig, TempDir, [FakeBackend; 2]) {
        let folder = tempfile::tempdir().expect("a folder");
        let backends = [FakeBackend::with_models(&["a"]).await, FakeBackend::with_models(&["b"]).await];
        let command = |what: &str| json!(["sh", "-c", what.replace("$FOLDER", &folder.path().to_string_lossy())]);
        let model = |id: &str, backend: &FakeBackend, load: &str, evict: &str| {
            let alive = command("test -e $FOLDER/$MODELRELAY_MODEL");
            json!({"id": id, "url": backend.url(), "load": command(load), "evict": command(evict), "alive": alive})
        };
        let models =
            [model("a", &backends[0], self.load_a, self.evict_a), model("b", &backends[1], self.load_b, EVICT)];
        let slots = json!([{"id": "gpu0", "driver": "hooks", "models": models}]);
        let block = json!({"multiplexer": {"minResidency": "1ms", "linger": "off", "slots": slots}});
        (Rig::with(&slots1(), &block.to_string()).await, folder, backends)
    }
}

async fn reaches(rig: &mut Rig, state: &str) {
    let is_there = |slots: &Value| slots["slots"][0]["state"] == state;
    let reached = rig.link.message_within(SOON, "slots", is_there).await;
    assert!(reached.is_some(), "never {state}\n{}", rig.worker.log());
}

async fn ends_soon(rig: &mut Rig) {
    let started = descendants_of(rig.worker.process.pid().expect("it runs"));
    rig.worker.terminate().await;
    assert!(rig.worker.process.wait_exit_within(SOON).await.success(), "{}", rig.worker.log());
    gone(&started).await;
}

async fn load(rig: &mut Rig, model: &str) {
    demand(&rig.link, model, 1);
    gate(&mut rig.link, model).await;
    demand(&rig.link, model, 0);
}

#[tokio::test]
async fn sigterm_while_draining_ends_stream_and_prevents_loads() {
    let slot = Slot { delay: "100ms", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    rig.link.send(&json!({"type": "command", "op_id": "1", "command": "unload", "model": "a"}));
    reaches(&mut rig, "draining").await;
    let started = descendants_of(rig.worker.process.pid().expect("it runs"));
    rig.worker.terminate().await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "drain"}));
    let reply = rig.link.reply(&request).await;
    assert!(reply.is_complete() && text(&reply).ends_with("data: [DONE]\n\n"), "{}", reply.end);
    assert!(rig.worker.process.wait_exit_within(SOON).await.success());
    gone(&started).await;
}

#[tokio::test]
async fn sigterm_while_evicting_ends_hanging_command() {
    let (mut rig, _folder, _backends) = Hooks { evict_a: "exec sleep 1000", ..Hooks::default() }.start().await;
    load(&mut rig, "a").await;
    demand(&rig.link, "b", 1);
    reaches(&mut rig, "evicting").await;
    ends_soon(&mut rig).await;
}

#[tokio::test]
async fn sigterm_while_rolling_back_ends_former_model_load() {
    let first = "test -e $FOLDER/once && exec sleep 1000; touch $FOLDER/once $FOLDER/a";
    let (mut rig, folder, _backends) = Hooks { load_a: first, load_b: "exit 3", ..Hooks::default() }.start().await;
    load(&mut rig, "a").await;
    demand(&rig.link, "b", 1);
    reaches(&mut rig, "rolling_back").await;
    assert!(!Path::new(&folder.path().join("b")).exists());
    ends_soon(&mut rig).await;
}

#[tokio::test]
async fn sigterm_ends_worker_with_quarantined_slot() {
    let (mut rig, _folder, _backends) = Hooks { evict_a: "exit 1", ..Hooks::default() }.start().await;
    load(&mut rig, "a").await;
    demand(&rig.link, "b", 1);
    reaches(&mut rig, "quarantined").await;
    assert_eq!(rig.worker.probe("/readyz").await.status, 503);
    ends_soon(&mut rig).await;
}

#[tokio::test]
async fn sigterm_ends_worker_with_slot_in_backoff() {
    let (mut rig, _folder, _backends) = Hooks { load_b: "exit 3", ..Hooks::default() }.start().await;
    demand(&rig.link, "b", 1);
    reaches(&mut rig, "backoff").await;
    ends_soon(&mut rig).await;
}
