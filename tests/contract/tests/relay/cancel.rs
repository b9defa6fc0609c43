//! A client disconnects: the work stops, the slot is free, no other request is affected.

use std::time::Instant;

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{chat, chat_stream, check_instant, tag_of, tagged};

#[tokio::test]
async fn client_disconnect_cancels_running_request() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let start = Instant::now();
    pending.abandon();
    let cancel = worker.expect_cancel(&job.id).await;
    check_instant(start, "the cancel");
    assert_eq!(cancel["reason"], "client_disconnect");
}

#[tokio::test]
async fn client_disconnect_mid_stream_cancels_request() {
    for core1 in [false, true] {
        let relay = Relay::start().await;
        let mut worker = if core1 { relay.core1_worker(&["m"], 1).await } else { relay.worker(&["m"], 1).await };
        let pending = relay.begin(chat_stream("m"));
        let job = worker.expect_request().await;
        worker.start_stream(&job, "data: 1\n\n").await;
        let mut response = pending.response().await;
        response.read_until("data: 1").await;
        drop(response);
        assert_eq!(worker.expect_cancel(&job.id).await["reason"], "client_disconnect");
    }
}

#[tokio::test]
async fn cancel_frees_slot_of_unresponsive_worker() {
    for core1 in [false, true] {
        let relay = Relay::start().await;
        let mut worker = if core1 { relay.core1_worker(&["m"], 1).await } else { relay.worker(&["m"], 1).await };
        let first = relay.begin(tagged("m", "first"));
        let job = worker.expect_request().await;
        let second = relay.begin(tagged("m", "second"));
        relay.wait_for_queue_depth("local", 1).await;
        let start = Instant::now();
        first.abandon();
        worker.expect_cancel(&job.id).await;
        let next = worker.expect_request().await;
        check_instant(start, "the next dispatch");
        assert_eq!(tag_of(&next), "second");
        worker.answer(&next, &json!({})).await;
        let _ = second.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn queued_request_of_vanished_client_is_not_dispatched() {
    let relay = Relay::start().await;
    let leaves = relay.begin(tagged("m", "leaves"));
    relay.wait_for_queue_depth("local", 1).await;
    let stays = relay.begin(tagged("m", "stays"));
    relay.wait_for_queue_depth("local", 2).await;
    leaves.abandon();
    relay.wait_for_queue_depth("local", 1).await;
    let mut worker = relay.worker(&["m"], 2).await;
    let job = worker.expect_request().await;
    assert_eq!(tag_of(&job), "stays");
    worker.answer(&job, &json!({})).await;
    let _ = stays.reply().await.with_status(200);
    worker.expect_quiet().await;
}

#[tokio::test]
async fn cancel_never_precedes_its_request() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 50).await;
    for round in 0..25 {
        let pending = relay.begin(chat("m"));
        // Disconnects after a varying number of turns: before, around and after the dispatch.
        for _ in 0..round * 4 {
            tokio::task::yield_now().await;
        }
        pending.abandon();
    }
    let last = relay.begin(tagged("m", "last"));
    let (mut open, mut last_came) = (std::collections::HashSet::new(), false);
    while !last_came || !open.is_empty() {
        let message = worker.recv_json().await;
        let id = message["request_id"].as_str().expect("an id").to_owned();
        match message["type"].as_str() {
            Some("request") if message["body"].as_str().is_some_and(|body| body.contains("last")) => {
                worker.complete(&id, 200, serde_json::Map::new(), "{}").await;
                last_came = true;
            }
            Some("request") => assert!(open.insert(id), "an id was used twice"),
            Some("cancel") => assert!(open.remove(&id), "a cancel arrived before its request"),
            other => panic!("unexpected {other:?}"),
        }
    }
    let _ = last.reply().await.with_status(200);
}

#[tokio::test]
async fn messages_for_cancelled_request_are_dropped() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    pending.abandon();
    worker.expect_cancel(&job.id).await;
    worker.chunk(&job.id, "data: late\n\n").await;
    worker.complete_stream(&job.id).await;
    worker.complete_stream(&job.id).await;
    let next = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: mine\n\n").await;
    worker.end_stream(&job).await;
    assert_eq!(next.reply().await.with_status(200).text(), "data: mine\n\n");
}

#[tokio::test]
async fn worker_cannot_complete_another_workers_request() {
    let relay = Relay::start().await;
    let mut holder = relay.worker(&["m"], 1).await;
    let mut stranger = relay.worker(&["other"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = holder.expect_request().await;
    stranger.chunk(&job.id, "data: forged\n\n").await;
    stranger.complete(&job.id, 200, serde_json::Map::new(), "forged").await;
    stranger.fail(&job.id, "backend_unreachable", "forged").await;
    stranger.expect_quiet().await;
    holder.start_stream(&job, "data: true\n\n").await;
    holder.end_stream(&job).await;
    assert_eq!(pending.reply().await.with_status(200).text(), "data: true\n\n");
    stranger.expect_quiet().await;
}

#[tokio::test]
async fn request_ids_cannot_be_guessed() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 2).await;
    let clients = [relay.begin(chat("m")), relay.begin(chat("m"))];
    let (one, two) = (worker.expect_request().await.id, worker.expect_request().await.id);
    assert!(one.len() >= 16 && one.len() <= 128, "{one}");
    let differing = one.bytes().zip(two.bytes()).filter(|(a, b)| a != b).count();
    assert!(differing >= 8, "{one} and {two} are too alike");
    drop(clients);
}
