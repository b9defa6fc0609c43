//! `homes1`: reports to a relay on the conversations of the others.

use modelrelay_harness::fake_backend::{FakeBackend, sse};
use modelrelay_harness::fake_relay::{Ack, RelayLink, RequestSpec};
use modelrelay_harness::worker_process::Rig;
use serde_json::{Value, json};

const KEY: &str = "00ff00ff00ff00ff";
const OTHER_KEY: &str = "fedcba9876543210";

/// A worker with a `homes1` link to a first relay, and a link with `second` to another.
async fn two_links(second: Ack) -> (Rig, RelayLink) {
    let mut rig = Rig::with(&Ack { relay_count: 2, ..Ack::homes1() }, 4, |worker| worker).await;
    let second = Ack { relay_id: "relay-b".to_owned(), relay_count: 2, ..second };
    let mut second = rig.relay.accept_with(&second).await;
    second.models(&["m"]).await;
    (rig, second)
}

fn turn(key: &str) -> RequestSpec {
    RequestSpec::chat("m").conversation(key)
}

/// Sends a turn, and lets the backend answer it.
async fn take_turn(link: &mut RelayLink, backend: &mut FakeBackend, key: &str) {
    let request = link.send_request(&turn(key));
    backend.call().await.answer_json(200, &json!({})).await;
    assert_eq!(link.reply(&request).await.status, 200);
}

fn homes(keys: &[&str]) -> Value {
    keys.iter().map(|key| json!([key, turn(key).body_len()])).collect()
}

/// The reports that are unread after everything before a `pong`.
async fn unread_reports(link: &mut RelayLink) -> usize {
    link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    link.expect("pong").await;
    let mut reports = 0;
    while link.expect_within(std::time::Duration::ZERO, "homes").await.is_some() {
        reports += 1;
    }
    reports
}

#[tokio::test]
async fn worker_offers_homes1() {
    let rig = Rig::core1().await;
    let register = &rig.link.registration;
    assert!(register["capabilities"].as_array().is_some_and(|all| all.contains(&json!("homes1"))), "{register}");
}

#[tokio::test]
async fn request_of_one_relay_is_reported_to_other() {
    let (mut rig, mut second) = two_links(Ack::homes1()).await;
    let request = rig.link.send_request(&turn(KEY));
    let call = rig.backend.call().await;
    let report = second.expect("homes").await;
    assert_eq!((&report["homes"], &report["backlog"]), (&homes(&[KEY]), &json!(turn(KEY).body_len())));
    call.answer_json(200, &json!({})).await;
    rig.link.reply(&request).await;
    let report = second.expect("homes").await;
    assert_eq!((&report["homes"], &report["backlog"]), (&json!([]), &json!(0)));
    assert_eq!(unread_reports(&mut rig.link).await, 0, "its own conversation");
}

#[tokio::test]
async fn first_byte_of_stream_ends_backlog() {
    let (mut rig, mut second) = two_links(Ack::homes1()).await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    second.expect_where("homes", |report| report["backlog"] != json!(0)).await;
    call.chunk(&sse("1")).await;
    second.expect_where("homes", |report| report["backlog"] == json!(0)).await;
    call.end_stream().await;
    assert!(rig.link.reply(&request).await.is_complete());
}

#[tokio::test]
async fn cancelled_request_leaves_backlog() {
    let (mut rig, mut second) = two_links(Ack::homes1()).await;
    let request = rig.link.send_request(&turn(KEY));
    second.expect_where("homes", |report| report["backlog"] != json!(0)).await;
    rig.link.cancel(&request.id, "client_disconnect");
    second.expect_where("homes", |report| report["backlog"] == json!(0)).await;
}

#[tokio::test]
async fn relay_without_homes1_gets_no_reports() {
    let (mut rig, mut second) = two_links(Ack::core1()).await;
    take_turn(&mut rig.link, &mut rig.backend, KEY).await;
    // Its keys are ignored, its backlog is not.
    let request = second.send_request(&turn(OTHER_KEY));
    let report = rig.link.expect("homes").await;
    assert_eq!((&report["homes"], &report["backlog"]), (&json!([]), &json!(turn(OTHER_KEY).body_len())));
    rig.backend.call().await.answer_json(200, &json!({})).await;
    assert_eq!(second.reply(&request).await.status, 200);
    assert_eq!(unread_reports(&mut second).await, 0);
}

#[tokio::test]
async fn restarted_relay_learns_conversations() {
    let mut rig = Rig::with(&Ack::homes1(), 4, |worker| worker).await;
    take_turn(&mut rig.link, &mut rig.backend, KEY).await;
    take_turn(&mut rig.link, &mut rig.backend, OTHER_KEY).await;
    rig.link.close(1001, "relay shutting down");
    let mut again = rig.relay.accept_with(&Ack { relay_id: "restarted".to_owned(), ..Ack::homes1() }).await;
    let report = again.expect("homes").await;
    assert_eq!((&report["homes"], &report["backlog"]), (&homes(&[KEY, OTHER_KEY]), &json!(0)));
}

#[tokio::test]
async fn restart_of_backend_removes_conversations() {
    let mut rig = Rig::with(&Ack::homes1(), 4, |worker| worker).await;
    take_turn(&mut rig.link, &mut rig.backend, KEY).await;
    rig.backend.refuse().await;
    rig.link.exchange(&RequestSpec::chat("m")).await;
    rig.link.expect_where("models_update", |update| update["models"] == json!([])).await;
    rig.backend.reopen();
    rig.link.expect_where("models_update", |update| update["models"] == json!(["m"])).await;
    take_turn(&mut rig.link, &mut rig.backend, OTHER_KEY).await;
    rig.link.close(1001, "relay shutting down");
    let mut again = rig.relay.accept_with(&Ack { relay_id: "restarted".to_owned(), ..Ack::homes1() }).await;
    assert_eq!(again.expect("homes").await["homes"], homes(&[OTHER_KEY]));
}
