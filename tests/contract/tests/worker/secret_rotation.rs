//! The worker's secret file changes: the worker moves to a new link by itself, and loses nothing.

use std::path::Path;
use std::time::Duration;

use modelrelay_harness::fake_relay::{Ack, Dial, RequestSpec};
use modelrelay_harness::worker_process::Rig;
use modelrelay_harness::{TEST_TIMEOUT, poll_until};
use serde_json::json;
use tempfile::NamedTempFile;

/// The file is read each second, and a fleet moves within ten.
const MOVE: Duration = Duration::from_secs(13);

fn write(path: &Path, secret: &str) {
    std::fs::write(path, secret).expect("a writable file");
}

/// A worker whose link was created with `first-secret`, the content of this file.
async fn rig(ack: &Ack) -> (Rig, NamedTempFile) {
    let file = NamedTempFile::new().expect("a temporary file");
    write(file.path(), "first-secret\n");
    let path = file.path().to_owned();
    let rig = Rig::with(ack, 4, |worker| worker.without("WORKER_SECRET").file("WORKER_SECRET_FILE", &path)).await;
    (rig, file)
}

async fn next_dial(rig: &mut Rig, secret: &str) -> Dial {
    let dial = rig.relay.dial_within(MOVE).await.expect("a dial with the new secret");
    assert_eq!(dial.header("x-worker-secret"), Some(secret));
    dial
}

#[tokio::test]
async fn new_link_replaces_old_one_which_finishes_requests() {
    let (mut rig, file) = rig(&Ack::core1()).await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: 1\n\n").await;
    write(file.path(), "second-secret\n");
    let mut newer = next_dial(&mut rig, "second-secret").await.upgrade().await;
    newer.register(&Ack::core1()).await;
    assert_eq!(newer.registration["succeeds"], json!(["relay-a"]));
    assert!(newer.registration["have"].is_null(), "{}", newer.registration);
    newer.models(&["m"]).await;
    // One request runs on the older link.
    newer.grant(3).await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "succeeded", "drain_timeout_secs": 300}));
    let other = newer.send_request(&RequestSpec::chat("m"));
    rig.backend.call().await.answer_json(200, &json!({"by": "newer"})).await;
    assert_eq!(newer.reply(&other).await.json(), json!({"by": "newer"}));
    call.chunk(b"data: 2\n\n").await;
    call.end_stream().await;
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.body.as_slice(), reply.is_complete()), (&b"data: 1\n\ndata: 2\n\n"[..], true));
    rig.link.closed().await;
    newer.grant(4).await;
    // The newer one is a normal link: when lost, it is dialled again.
    drop(newer);
    rig.link = rig.relay.accept_registered(&["core1"]).await;
    assert!(rig.link.registration["succeeds"].is_null(), "{}", rig.link.registration);
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn secret_not_yet_accepted_keeps_existing_link() {
    let (mut rig, file) = rig(&Ack::core1()).await;
    write(file.path(), "early-secret");
    next_dial(&mut rig, "early-secret").await.refuse(401).await;
    rig.still_serves().await;
    next_dial(&mut rig, "early-secret").await.refuse(429).await;
    rig.still_serves().await;
    let mut newer = next_dial(&mut rig, "early-secret").await.upgrade().await;
    newer.register(&Ack::core1()).await;
    newer.ready(&["m"], 4).await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "succeeded"}));
    rig.link.closed().await;
    rig.link = newer;
    rig.still_serves().await;
}

/// The relay may have accepted the newer one already, and nothing runs on the older.
#[tokio::test]
async fn ending_older_link_does_not_end_new_one() {
    let (mut rig, file) = rig(&Ack::core1()).await;
    write(file.path(), "second-secret");
    let newer = next_dial(&mut rig, "second-secret").await.upgrade().await;
    drop(std::mem::replace(&mut rig.link, newer));
    let worker = &rig.worker;
    let has_ended = async || worker.metric("modelrelay_worker_connected").await == 0.0;
    poll_until(TEST_TIMEOUT, "the end of the older link", worker.process.log(), has_ended).await;
    rig.link.register(&Ack::core1()).await;
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
    assert!(rig.relay.dial_within(Duration::from_secs(1)).await.is_none(), "the worker dialled again");
}

#[tokio::test]
async fn balancer_leading_to_other_relay_is_dialled_again() {
    let (mut rig, file) = rig(&Ack::core1()).await;
    write(file.path(), "second-secret");
    let mut stranger = next_dial(&mut rig, "second-secret").await.upgrade().await;
    stranger.register(&Ack { relay_id: "relay-b".to_owned(), ..Ack::core1() }).await;
    assert!(stranger.closes_within(Duration::from_secs(3)).await, "the wrong relay was kept");
    rig.still_serves().await;
    let mut newer = next_dial(&mut rig, "second-secret").await.upgrade().await;
    newer.register(&Ack::core1()).await;
    newer.ready(&["m"], 4).await;
}

#[tokio::test]
async fn old_link_of_seed_relay_receives_no_requests() {
    let (mut rig, file) = rig(&Ack::old()).await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    write(file.path(), "second-secret");
    let mut newer = next_dial(&mut rig, "second-secret").await.upgrade().await;
    newer.register(&Ack::old()).await;
    newer.models(&["m"]).await;
    rig.link.expect_where("models_update", |update| update["models"] == json!([])).await;
    call.answer_json(200, &json!({"kept": true})).await;
    assert_eq!(rig.link.reply(&request).await.json(), json!({"kept": true}));
    rig.link.closed().await;
    rig.link = newer;
    rig.still_serves().await;
}

#[tokio::test]
async fn draining_worker_does_not_move_links() {
    let (mut rig, file) = rig(&Ack::core1()).await;
    rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    rig.worker.terminate().await;
    rig.link.expect("drain").await;
    write(file.path(), "second-secret");
    assert!(rig.relay.dial_within(MOVE).await.is_none(), "the worker dialled while it drained");
    call.answer_json(200, &json!({})).await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "drain"}));
    assert_eq!(rig.worker.process.wait_exit().await.code(), Some(0));
}
