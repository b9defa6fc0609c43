//! `core1`: the identity of a link's peer, and how links end.

use modelrelay_harness::{
    relay::Relay,
    worker::{core1_registration, new_instance_id, registration},
};
use serde_json::json;

use crate::support::{chat, chat_stream, one_provider};

#[tokio::test]
async fn acknowledgement_contains_identity_and_limits() {
    let relay = Relay::builder().env("RELAY_COUNT", "2").env("HEARTBEAT_INTERVAL", "7").start().await;
    let mut worker = relay.dial().open().await;
    let ack = worker.register_core1(&["m"], 1).await;
    assert_eq!(ack["protocol_version"], "1");
    assert_eq!(ack["models"], json!(["m"]));
    assert!(ack["worker_id"].as_str().is_some_and(|id| !id.is_empty()), "{ack}");
    assert!(ack["relay_id"].as_str().is_some_and(|id| id.len() >= 16), "{ack}");
    assert_eq!(ack["relay_count"], 2);
    assert_eq!(ack["capabilities"], json!(["core1"]));
    assert_eq!(ack["limits"]["max_request_bytes"], 33_554_432);
    assert_eq!(ack["limits"]["stream_window_bytes"], 65_536);
    assert_eq!(ack["limits"]["heartbeat_ms"], 7000);
    assert!(ack["limits"]["cold_timeout_ms"].is_u64(), "{ack}");
    assert_ne!(ack["duplicate"], true);
}

#[tokio::test]
async fn only_capabilities_of_both_sides_are_acknowledged() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut message = core1_registration(&["m"], 1, &new_instance_id());
    message["capabilities"] = json!(["core1", "future9"]);
    assert_eq!(worker.register_with(message).await["capabilities"], json!(["core1"]));
    let mut old = relay.dial().open().await;
    let ack = old.register(&["m"], 1).await;
    assert!(ack["capabilities"].as_array().is_none_or(Vec::is_empty), "{ack}");
}

#[tokio::test]
async fn second_link_of_worker_is_declined_as_duplicate() {
    let relay = Relay::start().await;
    let instance = new_instance_id();
    let mut first = relay.dial().open().await;
    let ack = first.register_with(core1_registration(&["m"], 1, &instance)).await;
    first.grant(1).await;
    let mut second = relay.dial().open().await;
    let mut message = core1_registration(&["m"], 1, &instance);
    message["have"] = json!([ack["relay_id"]]);
    let second_ack = second.register_with(message).await;
    assert_eq!(second_ack["duplicate"], true);
    assert_eq!(second_ack["relay_id"], ack["relay_id"]);
    assert_eq!(second.expect_close().await.0, 1000);
    let pending = relay.begin(chat("m"));
    let job = first.expect_request().await;
    first.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn redialing_worker_replaces_its_older_link() {
    let relay = Relay::start().await;
    let instance = new_instance_id();
    let mut ghost = relay.dial().open().await;
    ghost.register_with(core1_registration(&["m"], 1, &instance)).await;
    ghost.grant(1).await;
    let pending = relay.begin(chat("m"));
    ghost.expect_request().await;
    let mut newer = relay.dial().open().await;
    newer.register_with(core1_registration(&["m"], 1, &instance)).await;
    newer.grant(1).await;
    assert_eq!(ghost.expect_close().await, (1000, "replaced".to_owned()));
    let job = newer.expect_request().await;
    newer.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    relay.wait_for_workers(1).await;
}

#[tokio::test]
async fn succeeded_link_finishes_its_running_requests() {
    let relay = Relay::start().await;
    let instance = new_instance_id();
    let mut older = relay.dial().open().await;
    let ack = older.register_with(core1_registration(&["m"], 2, &instance)).await;
    older.grant(2).await;
    let streamed = relay.begin(chat_stream("m"));
    let begun = older.expect_request().await;
    older.start_stream(&begun, "data: 1\n\n").await;
    let request = relay.begin(chat("m"));
    let unbegun = older.expect_request().await;
    let mut newer = relay.dial().open().await;
    let mut message = core1_registration(&["m"], 2, &instance);
    message["succeeds"] = json!([ack["relay_id"]]);
    let second = newer.register_with(message).await;
    assert_ne!(second["duplicate"], true);
    // It still has slots, but is sent nothing.
    older.grant(4).await;
    let next = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    older.expect_quiet().await;
    newer.grant(1).await;
    let shutdown = older.expect("graceful_shutdown").await;
    assert_eq!(shutdown["reason"], "succeeded");
    assert!(
        shutdown["drain_timeout_secs"].as_u64() >= Some(300),
        "the drain timeout must be at least the request timeout: {shutdown}"
    );
    let job = newer.expect_request().await;
    newer.answer(&job, &json!({})).await;
    let _ = next.reply().await.with_status(200);
    older.answer(&unbegun, &json!({})).await;
    let _ = request.reply().await.with_status(200);
    older.stream_on(&begun, "data: 2\n\n").await;
    older.end_stream(&begun).await;
    assert_eq!(streamed.reply().await.with_status(200).text(), "data: 1\n\ndata: 2\n\n");
    assert_eq!(older.expect_close().await.0, 1000);
    relay.wait_for_workers(1).await;
}

/// Two sockets without a mutual order: if the older one were closed first, its worker would give up the connection that
/// it is about to get.
#[tokio::test]
async fn idle_link_stays_until_successor_sends_message() {
    let relay = Relay::start().await;
    let instance = new_instance_id();
    let mut older = relay.dial().open().await;
    let ack = older.register_with(core1_registration(&["m"], 2, &instance)).await;
    older.grant(2).await;
    for is_lost in [true, false] {
        let mut newer = relay.dial().open().await;
        let mut message = core1_registration(&["m"], 2, &instance);
        message["succeeds"] = json!([ack["relay_id"]]);
        newer.register_with(message).await;
        newer.expect_quiet().await;
        older.expect_quiet().await;
        if is_lost {
            newer.vanish();
        } else {
            newer.grant(2).await;
        }
        assert_eq!(older.expect("graceful_shutdown").await["reason"], "succeeded");
        assert_eq!(older.expect_close().await, (1000, "graceful shutdown complete".to_owned()));
        older = relay.dial().open().await;
        older.register_with(core1_registration(&["m"], 2, &instance)).await;
        older.grant(2).await;
    }
}

#[tokio::test]
async fn link_succeeding_another_relay_replaces_older_link() {
    let relay = Relay::start().await;
    let instance = new_instance_id();
    let mut ghost = relay.dial().open().await;
    ghost.register_with(core1_registration(&["m"], 1, &instance)).await;
    let mut newer = relay.dial().open().await;
    let mut message = core1_registration(&["m"], 1, &instance);
    message["succeeds"] = json!(["some-other-relay"]);
    newer.register_with(message).await;
    assert_eq!(ghost.expect_close().await, (1000, "replaced".to_owned()));
}

#[tokio::test]
async fn workers_with_same_name_are_distinct() {
    let relay = Relay::start().await;
    let _one = relay.worker(&["m"], 1).await;
    let _two = relay.worker(&["m"], 1).await;
    relay.wait_for_workers(2).await;
}

#[tokio::test]
async fn draining_worker_receives_nothing_after_barrier() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let running = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.send(&json!({"type": "drain", "reason": "restart", "timeout_secs": 30})).await;
    assert_eq!(worker.expect("graceful_shutdown").await["reason"], "drain");
    let waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
    worker.start_stream(&job, "data: x\n\n").await;
    worker.end_stream(&job).await;
    let _ = running.reply().await.with_status(200);
    worker.expect_quiet().await;
    worker.vanish();
    let mut next = relay.core1_worker(&["m"], 1).await;
    let job = next.expect_request().await;
    next.answer(&job, &json!({})).await;
    let _ = waiting.reply().await.with_status(200);
}

#[tokio::test]
async fn request_refused_by_draining_worker_spends_no_attempt() {
    let relay = Relay::start().await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    for _ in 0..5 {
        let mut worker = relay.core1_worker(&["m"], 1).await;
        let job = worker.expect_request().await;
        worker.send(&json!({"type": "drain", "reason": "restart", "timeout_secs": 30})).await;
        worker.fail(&job.id, "draining", "leaving").await;
        assert_eq!(worker.expect("graceful_shutdown").await["reason"], "drain");
        worker.vanish();
    }
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn admin_drain_is_sent_with_its_reason() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let reply = relay.admin("POST", &format!("/admin/workers/{}/drain", worker.worker_id)).await;
    assert_eq!(reply.status, 202, "{}", reply.text());
    assert_eq!(worker.expect("graceful_shutdown").await["reason"], "worker_drain");
}

#[tokio::test]
async fn changed_relay_count_is_sent_to_workers() {
    let relay = Relay::builder().config(format!("relayCount: 2\n{}", one_provider(""))).start().await;
    let mut worker = relay.dial().open().await;
    assert_eq!(worker.register_core1(&["m"], 1).await["relay_count"], 2);
    relay.replace_file("relay.yaml", &format!("relayCount: 3\n{}", one_provider("")));
    assert_eq!(worker.expect("relays").await["relay_count"], 3);
}

#[tokio::test]
async fn unknown_fields_and_message_types_are_ignored() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut message = registration(&["m"], 1);
    message["from_the_future"] = json!({"a": [1]});
    worker.register_with(message).await;
    worker.send(&json!({"type": "from_the_future", "x": 1})).await;
    worker.send(&json!({"type": "pong", "current_load": 0, "timestamp_unix_ms": 1, "new": true})).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn self_draining_worker_gets_its_requested_time() {
    let relay = Relay::builder().env("DRAIN_TIMEOUT_SECS", "1").env("QUEUE_TIMEOUT_SECS", "3").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: a\n\n").await;
    worker.send(&json!({"type": "drain", "reason": "SIGTERM", "timeout_secs": 600})).await;
    assert_eq!(worker.expect("graceful_shutdown").await["reason"], "drain");
    // It lists nothing yet, so every model may still appear.
    let _asking = relay.worker(&[], 1).await;
    // Waits for longer than the relay's own drains may take.
    let _ = relay.fetch(chat("unserved")).await.with_status(504);
    worker.stream_on(&job, "data: b\n\n").await;
    worker.end_stream(&job).await;
    let reply = pending.reply().await.with_status(200);
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: a\n\ndata: b\n\n", false));
}
