//! Two models that alternate in one slot.

use modelrelay_harness::fake_relay::Ack;
use serde_json::json;

use crate::rig::{LONG, Rig, Slot, chat, demand, gate, granted, request_once_loaded, slots1, stream, text};

#[tokio::test]
async fn demand_loads_model_and_other_demand_swaps_it() {
    let mut rig = Rig::start(&slots1(), &Slot::default()).await;
    for model in ["a", "b", "a"] {
        let request = request_once_loaded(&mut rig.link, &chat(model), model).await;
        let reply = rig.link.reply(&request).await;
        assert_eq!(reply.status, 200, "{model}: {}", reply.end);
        let resident =
            |slots: &serde_json::Value| slots["slots"][0]["resident"] == model && slots["slots"][0]["state"] == "ready";
        rig.link.expect_where("slots", resident).await;
    }
    let swaps = "modelrelay_worker_swaps_total{";
    assert!(rig.worker.metric(swaps).await >= 2.0, "{}", rig.worker.probe("/metrics").await.body);
}

#[tokio::test]
async fn stream_ends_whole_before_its_model_is_unloaded() {
    let slot = Slot { delay: "300ms", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    demand(&rig.link, "b", 1);
    let reply = rig.link.reply(&request).await;
    assert!(reply.is_complete() && text(&reply).ends_with("data: [DONE]\n\n"), "{} {}", reply.end, text(&reply));
    gate(&mut rig.link, "b").await;
    let request = rig.link.send_request(&chat("b"));
    assert_eq!(rig.link.reply(&request).await.status, 200);
}

#[tokio::test]
async fn gate_closes_before_last_response_lets_swap_begin() {
    let slot = Slot { delay: "100ms", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    demand(&rig.link, "b", 1);
    let reply = rig.link.reply(&request).await;
    let shut = rig.link.message_within(LONG, "grant", |grant| granted(grant, "a").is_none()).await;
    let shut = shut.expect("the gate of a is closed for b");
    let opened = rig.link.message_within(LONG, "grant", |grant| granted(grant, "b").is_some()).await;
    assert!(reply.is_complete() && opened.is_some_and(|open| open.seq > shut.seq && open.seq > reply.end_seq));
}

#[tokio::test]
async fn stream_outlasting_drain_is_severed_with_reason() {
    let slot = Slot { knobs: "minResidency: 1ms\n  drainTimeout: 200ms", delay: "2s", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    demand(&rig.link, "b", 1);
    let reply = rig.link.reply_within(LONG, &request).await.expect("the stream is ended");
    assert_eq!((reply.status, reply.error_code()), (200, Some("severed_by_swap")));
    gate(&mut rig.link, "b").await;
    assert_eq!(rig.worker.metric("modelrelay_worker_severed_total").await, 1.0);
}

#[tokio::test]
async fn cancelled_request_releases_its_lease_immediately() {
    let slot = Slot { delay: "1s", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    demand(&rig.link, "b", 1);
    rig.link.cancel(&request.id, "client_disconnect");
    gate(&mut rig.link, "b").await;
}

#[tokio::test]
async fn link_broken_during_swap_receives_current_slot_state() {
    let slot = Slot { delay: "1s", ..Slot::default() };
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    let order = json!({"type": "command", "op_id": "1", "command": "unload", "model": "a"});
    rig.link.send(&order);
    rig.link.expect_where("slots", |slots| slots["slots"][0]["state"] == "draining").await;
    drop(rig.link);
    // Its request ended with the link, so nothing retains the model any more.
    rig.link = rig.relay.accept_with(&slots1()).await;
    rig.link.message_within(LONG, "slots", |slots| slots["slots"][0]["state"] == "empty").await.expect("unloaded");
    assert_eq!(rig.worker.metric("modelrelay_worker_requests_in_flight").await, 0.0);
    let request = request_once_loaded(&mut rig.link, &stream("b"), "b").await;
    rig.link.part(&request).await;
}

#[tokio::test]
async fn two_relays_share_resident_and_either_can_swap() {
    let mut rig = Rig::start(&Ack { relay_count: 2, ..slots1() }, &Slot::default()).await;
    let second = Ack { relay_id: "relay-b".to_owned(), relay_count: 2, ..slots1() };
    let mut second = rig.relay.accept_with(&second).await;
    demand(&rig.link, "a", 1);
    assert!(gate(&mut rig.link, "a").await > 0);
    gate(&mut second, "a").await;
    for link in [&mut rig.link, &mut second] {
        let request = link.send_request(&chat("a"));
        assert_eq!(link.reply(&request).await.status, 200);
    }
    demand(&rig.link, "a", 0);
    let request = request_once_loaded(&mut second, &chat("b"), "b").await;
    assert_eq!(second.reply(&request).await.status, 200);
    let shut = rig.link.message_within(LONG, "grant", |grant| granted(grant, "a").is_none()).await;
    assert!(shut.is_some(), "the first relay must be notified that its model was unloaded");
    let other = rig.link.message_within(LONG, "grant", |grant| granted(grant, "b").is_some()).await;
    assert_eq!(other.expect("b is open for both")["links"], json!(2));
}

#[tokio::test]
async fn admin_order_loads_and_unloads() {
    let mut rig = Rig::start(&slots1(), &Slot::default()).await;
    for (command, model, is_ok) in [("load", "b", true), ("unload", "b", true), ("load", "c", false)] {
        let order = json!({"type": "command", "op_id": command, "command": command, "model": model});
        rig.link.send(&order);
        let result = rig.link.message_within(LONG, "command_result", |_| true).await.expect("a response");
        assert_eq!((&result["op_id"], &result["ok"]), (&json!(command), &json!(is_ok)), "{}", result.body);
    }
}
