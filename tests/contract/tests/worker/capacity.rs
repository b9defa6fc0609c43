//! Grants: one worker's slots, divided among its links.

use std::time::Duration;

use modelrelay_harness::fake_relay::{Ack, RelayLink, RequestSpec, SentRequest};
use modelrelay_harness::worker_process::Rig;
use serde_json::{Value, json};

/// A worker of `slots` slots with links to two relays.
async fn two_links(slots: u32) -> (Rig, RelayLink) {
    let mut rig = Rig::with(&Ack { relay_count: 2, ..Ack::core1() }, slots, |worker| worker).await;
    let second = Ack { relay_id: "relay-b".to_owned(), relay_count: 2, ..Ack::core1() };
    let mut second = rig.relay.accept_with(&second).await;
    second.models(&["m"]).await;
    rig.link.expect_where("grant", |grant| grant["links"] == 2).await;
    second.grant(u64::from(slots)).await;
    (rig, second)
}

fn demand(link: &RelayLink, waiting: u64) {
    let models = json!([{"id": "m", "waiting": waiting, "oldest_ms": 10, "sum_ms": 10 * waiting}]);
    link.send(&json!({"type": "demand", "models": models}));
}

async fn answer(rig: &mut Rig) {
    rig.backend.call().await.answer_json(200, &json!({})).await;
}

#[tokio::test]
async fn single_link_is_granted_everything() {
    let mut rig = Rig::with(&Ack::old(), 1, |worker| worker).await;
    drop(rig.link);
    rig.link = rig.relay.accept_registered(&["core1"]).await;
    let grant = rig.link.grant(1).await;
    let expected = json!({"type": "grant", "slots": 1, "others": 0, "capacity": 1, "links": 1});
    assert_eq!(grant.body, expected);
}

#[tokio::test]
async fn registration_acknowledgement_precedes_every_grant() {
    let rig = Rig::core1().await;
    let (mut relay, _worker) = (rig.relay, rig.worker);
    drop(rig.link);
    let mut link = relay.dial().await.upgrade().await;
    link.expect("register").await;
    assert!(link.expect_within(Duration::from_millis(500), "grant").await.is_none());
}

#[tokio::test]
async fn idle_slots_are_granted_to_every_link() {
    let (mut rig, mut second) = two_links(4).await;
    let third_of_four = rig.link.send_request(&RequestSpec::chat("m"));
    let _held = rig.backend.call().await;
    let grant = second.grant(3).await;
    assert_eq!((&grant["others"], &grant["capacity"], &grant["links"]), (&json!(1), &json!(4), &json!(2)));
    rig.link.cancel(&third_of_four.id, "timeout");
    assert_eq!(second.grant(4).await["others"], 0);
}

#[tokio::test]
async fn load_of_other_links_is_reported() {
    let (mut rig, mut second) = two_links(4).await;
    let request = second.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    let grant = rig.link.expect_where("grant", |grant| grant["others"] == 1).await;
    assert_eq!(grant["slots"], 3);
    call.answer_json(200, &json!({})).await;
    second.reply(&request).await;
    assert_eq!(rig.link.expect_where("grant", |grant| grant["others"] == 0).await["slots"], 4);
}

#[tokio::test]
async fn request_over_capacity_is_rejected_immediately() {
    let mut rig = Rig::with(&Ack::core1(), 1, |worker| worker).await;
    let running = rig.link.send_request(&RequestSpec::chat("m"));
    let held = rig.backend.call().await;
    let turned_away = rig.link.exchange(&RequestSpec::chat("m")).await;
    assert_eq!(turned_away.error_code(), Some("at_capacity"));
    held.answer_json(200, &json!("ran")).await;
    assert_eq!(rig.link.reply(&running).await.json(), json!("ran"));
    rig.still_serves().await;
}

#[tokio::test]
async fn grant_precedes_refusal_explained_by_it() {
    let (mut rig, mut second) = two_links(1).await;
    rig.link.send_request(&RequestSpec::chat("m"));
    let _held = rig.backend.call().await;
    let refused = second.exchange(&RequestSpec::chat("m")).await;
    assert_eq!(refused.error_code(), Some("at_capacity"));
    assert!(second.grant(0).await.seq < refused.end_seq);
}

#[tokio::test]
async fn grant_precedes_response_that_frees_slot() {
    let (mut rig, mut second) = two_links(1).await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    second.grant(0).await;
    demand(&second, 1);
    second.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    second.expect("pong").await;
    call.answer_json(200, &json!({})).await;
    let reply = rig.link.reply(&request).await;
    let lost = rig.link.grant(0).await;
    assert!(lost.seq < reply.end_seq, "the relay would have sent another request first");
    second.grant(1).await;
}

#[tokio::test]
async fn single_slot_alternates_between_waiting_links() {
    let (mut rig, mut second) = two_links(1).await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    second.grant(0).await;
    demand(&rig.link, 10);
    demand(&second, 10);
    for link in [&mut rig.link, &mut second] {
        link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
        link.expect("pong").await;
    }
    answer(&mut rig).await;
    rig.link.reply(&request).await;
    for round in 0..6 {
        let link = if round % 2 == 0 { &mut second } else { &mut rig.link };
        link.grant(1).await;
        let request = link.send_request(&RequestSpec::chat("m"));
        rig.backend.call().await.answer_json(200, &json!(round)).await;
        assert_eq!(link.reply(&request).await.json(), json!(round));
    }
}

#[tokio::test]
async fn busy_relay_does_not_starve_other_one() {
    let (mut rig, mut second) = two_links(2).await;
    demand(&rig.link, 50);
    let mut running: Vec<SentRequest> = (0..2).map(|_| rig.link.send_request(&RequestSpec::chat("m"))).collect();
    second.grant(0).await;
    demand(&second, 1);
    second.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    second.expect("pong").await;
    answer(&mut rig).await;
    second.grant(1).await;
    rig.link.cancel(&running.remove(0).id, "timeout");
}

#[tokio::test]
async fn unused_granted_slot_passes_to_next_link() {
    let (mut rig, mut second) = two_links(1).await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    second.grant(0).await;
    demand(&rig.link, 5);
    demand(&second, 5);
    for link in [&mut rig.link, &mut second] {
        link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
        link.expect("pong").await;
    }
    answer(&mut rig).await;
    rig.link.reply(&request).await;
    second.grant(1).await;
    rig.link.grant(1).await;
    assert_eq!(second.grant(0).await["slots"], 0);
}

#[tokio::test]
async fn closed_link_releases_its_slots_to_other() {
    let (mut rig, second) = two_links(2).await;
    let mut second = second;
    second.send_request(&RequestSpec::chat("m"));
    rig.link.grant(1).await;
    drop(second);
    let grant = rig.link.grant(2).await;
    assert_eq!((&grant["others"], &grant["links"]), (&json!(0), &json!(1)));
}

#[tokio::test]
async fn empty_demand_withdraws_previous_demand() {
    let (mut rig, mut second) = two_links(1).await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    second.grant(0).await;
    demand(&second, 3);
    second.send(&json!({"type": "demand", "models": []}));
    second.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    second.expect("pong").await;
    answer(&mut rig).await;
    let reply = rig.link.reply(&request).await;
    assert_eq!(reply.status, 200);
    second.grant(1).await;
    let withdrawn = rig.link.message_within(Duration::ZERO, "grant", |grant: &Value| grant["slots"] == 0).await;
    assert!(withdrawn.is_none(), "the slot was handed to a link that no longer waits");
}

#[tokio::test]
async fn finishing_link_receives_no_grant_despite_earlier_demand() {
    let (mut rig, mut second) = two_links(3).await;
    // The older link of a worker that moves: it holds a long response, and its relay last reported five waiting
    // requests.
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let held = rig.backend.call().await;
    demand(&rig.link, 5);
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "succeeded", "drain_timeout_secs": 300}));
    demand(&rig.link, 5);
    rig.link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    rig.link.expect("pong").await;
    demand(&second, 5);
    second.expect_where("grant", |grant| grant["slots"] == 2 && grant["others"] == 1).await;
    let _running = second.send_request(&RequestSpec::chat("m"));
    let _held_too = rig.backend.call().await;
    for round in 0..4 {
        let request = second.send_request(&RequestSpec::chat("m"));
        rig.backend.call().await.answer_json(200, &json!(round)).await;
        assert_eq!(second.reply(&request).await.json(), json!(round));
    }
    held.answer_json(200, &json!("finished")).await;
    assert_eq!(rig.link.reply(&request).await.json(), json!("finished"));
    rig.link.closed().await;
    second.expect_where("grant", |grant| grant["slots"] == 3).await;
}
