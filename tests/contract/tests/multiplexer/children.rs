//! Backends that the worker has started end with it.

use std::path::Path;
use std::time::{Duration, Instant};

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::{Ack, FakeRelay};
use modelrelay_harness::{cannot_run, poll_for};
use serde_json::json;

use crate::rig::{LONG, Rig, Slot, chat, demand, gate, slots1, worker_with};

/// Returns the children of a process; each of its threads has its own.
fn children_of(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    children.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

#[tokio::test]
async fn sigterm_ends_backend_too() {
    let mut rig = Rig::start(&Ack::old(), &Slot::default()).await;
    let request = rig.link.send_request(&chat("a"));
    assert_eq!(rig.link.reply_within(LONG, &request).await.expect("a response").status, 200);
    let supervisors = children_of(rig.worker.process.pid().expect("it runs"));
    let children: Vec<u32> = supervisors.iter().flat_map(|pid| children_of(*pid)).collect();
    assert_eq!((supervisors.len(), children.len()), (1, 1), "{supervisors:?} {children:?}");
    rig.worker.terminate().await;
    assert!(rig.worker.process.wait_exit_within(LONG).await.success());
    gone(&children).await;
}

/// A model whose backend is run by a shell with this SIGTERM trap; `NOTE` is a file of the folder.
async fn with_trap(trap: &str) -> (Rig, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let program = modelrelay_harness::process::path_of("modelrelay-worker");
    let (program, note) = (program.to_string_lossy(), folder.path().join("note"));
    let trap = trap.replace("NOTE", &note.to_string_lossy());
    let script =
        format!("trap '{trap}' TERM; {program} demo --listen 127.0.0.1:${{PORT}} --delay 1ms & wait; sleep 99");
    let model = json!({"id": "a", "expectModel": "demo", "command": ["sh", "-c", script]});
    let slots = json!([{"id": "gpu0", "driver": "process", "models": [model]}]);
    let mut rig = Rig::with(&Ack::old(), &json!({"multiplexer": {"slots": slots}}).to_string()).await;
    let request = rig.link.send_request(&chat("a"));
    assert_eq!(rig.link.reply_within(LONG, &request).await.expect("a response").status, 200);
    (rig, folder)
}

/// Terminates the worker and returns how long it took.
async fn end(rig: &mut Rig) -> Duration {
    let began = Instant::now();
    rig.worker.terminate().await;
    assert!(rig.worker.process.wait_exit_within(LONG).await.success());
    began.elapsed()
}

#[tokio::test]
async fn terminated_worker_lets_backend_finish() {
    let (mut rig, folder) = with_trap("sleep 1; echo stopped > NOTE; exit 0").await;
    end(&mut rig).await;
    assert_eq!(
        std::fs::read_to_string(folder.path().join("note")).expect("the process received the signal"),
        "stopped\n"
    );
    let ended = rig.worker.process.wait_for_line("process has exited").await;
    assert!(ended.ends_with("code=0"), "{ended}");
}

#[tokio::test]
async fn backend_ignoring_sigterm_is_killed_after_grace() {
    let (mut rig, _folder) = with_trap("").await;
    let started = descendants_of(rig.worker.process.pid().expect("it runs"));
    let took = end(&mut rig).await;
    assert!((Duration::from_secs(10)..Duration::from_secs(15)).contains(&took), "{took:?}");
    gone(&started).await;
}

/// Returns the names of the variables that a process was started with.
fn variables_of(pid: u32) -> Vec<String> {
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split('\0').filter_map(|variable| Some(variable.split_once('=')?.0.to_owned())).collect()
}

/// A container engine that receives systemd's notification socket would make systemd wait for the container's own
/// message.
#[tokio::test]
async fn child_processes_inherit_neither_secrets_nor_notify_socket() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("notify");
    let systemd = tokio::net::UnixDatagram::bind(&place).expect("a socket");
    let mut relay = FakeRelay::start().await;
    let (_config, builder) = worker_with(&Slot::default().yaml());
    let builder = builder.env("NOTIFY_SOCKET", place.to_string_lossy()).env("DRAIN_TOKEN", "planted-drain-token");
    let worker = builder.relay(relay.url()).start().await;
    let mut message = [0; 64];
    let length = systemd.recv(&mut message).await.expect("a word");
    assert_eq!(String::from_utf8_lossy(&message[..length]).trim(), "READY=1");

    let mut link = relay.accept_with(&Ack::old()).await;
    let request = link.send_request(&chat("a"));
    assert_eq!(link.reply_within(LONG, &request).await.expect("a response").status, 200);
    let worker = worker.process.pid().expect("it runs");
    let children = descendants_of(worker);
    assert!(!children.is_empty());
    for name in ["WORKER_SECRET", "DRAIN_TOKEN", "NOTIFY_SOCKET"] {
        let has = |pid: u32| variables_of(pid).iter().any(|variable| variable == name);
        assert!(has(worker), "the worker was not started with {name}");
        assert!(!children.iter().any(|pid| has(*pid)), "a child of the worker received {name}");
    }
}

/// The output of a command that runs every few seconds would fill the log.
#[tokio::test]
async fn log_contains_output_of_load_but_not_alive() {
    let folder = tempfile::tempdir().expect("a folder");
    let mark = folder.path().join("loaded");
    let command = |script: &str| json!(["sh", "-c", script.replace("MARK", &mark.to_string_lossy())]);
    let backend = FakeBackend::with_models(&["a"]).await;
    let model = json!({
        "id": "a", "url": backend.url(), "load": command("echo load runs; touch MARK"), "evict": command("rm MARK"),
        "alive": command("echo alive runs; test -e MARK"),
    });
    let block = json!({"multiplexer": {"slots": [{"id": "gpu0", "driver": "hooks", "models": [model]}]}});
    let mut rig = Rig::with(&slots1(), &block.to_string()).await;
    demand(&rig.link, "a", 1);
    gate(&mut rig.link, "a").await;
    rig.worker.process.wait_for_line("load runs").await;
    assert!(!rig.worker.log().contains("alive runs"), "{}", rig.worker.log());
}

/// The worker accepts being scheduled as a batch process; a model's server must not inherit that.
#[tokio::test]
async fn child_processes_have_normal_scheduling_policy() {
    let own = std::process::id();
    if (field(own, 41), field(own, 19)) != ("0".to_owned(), "0".to_owned()) {
        return cannot_run("the test runs with another scheduling policy or nice value");
    }
    let (rig, _folder) = with_trap("").await;
    let worker = rig.worker.process.pid().expect("it runs");
    assert_eq!(field(worker, 41), "3", "the worker's is not SCHED_BATCH");
    let started = descendants_of(worker);
    let shells: Vec<_> = started.into_iter().filter(|pid| stat(*pid).contains("(sh)")).collect();
    assert!(!shells.is_empty());
    assert!(shells.iter().all(|pid| field(*pid, 41) == "0"), "{shells:?}");
}

fn stat(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default()
}

/// Returns a field as numbered in proc(5): 19 is the nice value, 41 the policy, of which 0 is `SCHED_OTHER` and 3
/// `SCHED_BATCH`.
fn field(pid: u32, number: usize) -> String {
    let stat = stat(pid);
    // The second field ends with a bracket, and may contain anything before it.
    let third_on = stat.rsplit(')').next().unwrap_or_default();
    third_on.split_whitespace().nth(number - 3).unwrap_or_default().to_owned()
}

/// Returns all descendants of a process.
pub(crate) fn descendants_of(pid: u32) -> Vec<u32> {
    children_of(pid).into_iter().flat_map(|child| [vec![child], descendants_of(child)].concat()).collect()
}

pub(crate) async fn gone(children: &[u32]) {
    let runs = |pid: &u32| Path::new(&format!("/proc/{pid}")).exists();
    let gone = poll_for(LONG, async || (!children.iter().any(runs)).then_some(())).await;
    assert!(gone.is_some(), "{children:?} outlive their worker");
}

#[tokio::test]
async fn sigterm_lets_stream_end_before_its_backend() {
    let slot = Slot { delay: "100ms", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = crate::rig::request_once_loaded(&mut rig.link, &crate::rig::stream("a"), "a").await;
    rig.link.part(&request).await;
    rig.worker.terminate().await;
    rig.link.expect("drain").await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "drain"}));
    let reply = rig.link.reply(&request).await;
    assert!(reply.is_complete() && crate::rig::text(&reply).ends_with("data: [DONE]\n\n"), "{}", reply.end);
    assert!(rig.worker.process.wait_exit_within(LONG).await.success());
}

#[tokio::test]
async fn sigterm_during_load_leaves_no_process_behind() {
    // A backend that never becomes ready.
    let yaml = Slot::default().yaml().replace("\"demo\",\"--listen\"", "\"demo\",\"--delay\",\"1ms\",\"--listen\"");
    let yaml = yaml.replace("127.0.0.1:${PORT}", "127.0.0.1:0").replace("\"NAME\":", "\"NAME\":\"${PORT}\",\"N\":");
    let mut rig = Rig::with(&slots1(), &yaml).await;
    demand(&rig.link, "a", 1);
    rig.link.expect_where("slots", |slots| slots["slots"][0]["state"] == "loading").await;
    let worker = rig.worker.process.pid().expect("it runs");
    let grandchildren = || children_of(worker).iter().flat_map(|pid| children_of(*pid)).collect::<Vec<u32>>();
    let children = poll_for(LONG, async || Some(grandchildren()).filter(|pids| !pids.is_empty())).await;
    let children = children.expect("a backend that is started");
    assert_eq!(children.len(), 1, "{}", rig.worker.log());
    rig.worker.terminate().await;
    assert!(rig.worker.process.wait_exit_within(LONG).await.success());
    gone(&children).await;
}

#[tokio::test]
async fn slot_loads_its_default_and_becomes_ready() {
    let slot = Slot { slot: "default: b", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    gate(&mut rig.link, "b").await;
    let reply = rig.link.exchange(&chat("b")).await;
    assert_eq!((reply.status, rig.worker.probe("/backendz").await.status), (200, 200));
}
