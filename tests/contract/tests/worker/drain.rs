//! Leaving: SIGTERM, a relay's `graceful_shutdown`, an admin's command, the probe server's `/drain`.

use std::time::Duration;

use modelrelay_harness::fake_relay::{Ack, FakeRelay, RelayLink, RequestSpec};
use modelrelay_harness::worker_process::{Rig, WorkerProcess};
use serde_json::json;

use super::probe::silent_crowd;

/// Long enough to show that something does not happen, where there is no observable event.
const QUIET: Duration = Duration::from_millis(800);

fn barrier(link: &RelayLink) {
    link.send(&json!({"type": "graceful_shutdown", "reason": "drain", "drain_timeout_secs": 30}));
}

#[tokio::test]
async fn idle_worker_sends_drain_and_exits_after_barrier() {
    let mut rig = Rig::core1().await;
    rig.worker.terminate().await;
    let drain = rig.link.expect("drain").await;
    assert!(drain["reason"].is_string() && drain["timeout_secs"].is_u64(), "{}", drain.body);
    barrier(&rig.link);
    rig.link.closed().await;
    assert_eq!(rig.worker.process.wait_exit().await.code(), Some(0));
    rig.worker.process.wait_for_line("graceful shutdown").await;
}

#[tokio::test]
async fn missing_barrier_does_not_delay_exit() {
    let mut rig = Rig::core1().await;
    rig.worker.terminate().await;
    rig.link.expect("drain").await;
    assert_eq!(rig.worker.process.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn running_request_is_finished_before_exit() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    rig.worker.terminate().await;
    rig.link.expect("drain").await;
    barrier(&rig.link);
    assert!(!rig.link.closes_within(QUIET * 4).await, "the link was closed under a running request");
    call.chunk(b"data: late\n\n").await;
    call.end_stream().await;
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.body.as_slice(), reply.is_complete()), (&b"data: late\n\n"[..], true));
    rig.link.closed().await;
    assert_eq!(rig.worker.process.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn request_crossing_drain_is_answered() {
    let mut rig = Rig::core1().await;
    rig.backend.answer_with(|_, _| modelrelay_harness::fake_backend::Answer::new(200, &[], b"{}"));
    rig.worker.terminate().await;
    rig.link.expect("drain").await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    barrier(&rig.link);
    let reply = rig.link.reply(&request).await;
    assert!(reply.status == 200 || reply.error_code() == Some("draining"), "{}", reply.end);
    assert_eq!(rig.worker.process.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn second_signal_ends_worker_immediately() {
    let mut rig = Rig::core1().await;
    rig.link.send_request(&RequestSpec::chat("m"));
    let _never_answers = rig.backend.call().await;
    rig.worker.terminate().await;
    rig.link.expect("drain").await;
    assert!(rig.worker.process.is_running());
    rig.worker.terminate().await;
    rig.worker.process.wait_exit_within(Duration::from_secs(2)).await;
}

#[tokio::test]
async fn interrupt_drains_too() {
    let mut rig = Rig::core1().await;
    rig.worker.process.signal("INT").await;
    rig.link.expect("drain").await;
    barrier(&rig.link);
    assert_eq!(rig.worker.process.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn deadline_ends_worker_and_logs_severed_count() {
    let mut rig = Rig::with(&Ack::core1(), 4, |worker| worker.env("SHUTDOWN_TIMEOUT_SECS", "1")).await;
    let mut never_answered = Vec::new();
    for _ in 0..2 {
        rig.link.send_request(&RequestSpec::chat("m"));
        never_answered.push(rig.backend.call().await);
    }
    rig.worker.terminate().await;
    let drain = rig.link.expect("drain").await;
    assert_eq!(drain["timeout_secs"], 1);
    barrier(&rig.link);
    let line = rig.worker.process.wait_for_line("drain timeout reached").await;
    assert!(line.contains('2'), "{line}");
    rig.worker.process.wait_exit().await;
}

#[tokio::test]
async fn restarting_relay_receives_responses_and_is_redialled() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "relay_shutdown", "drain_timeout_secs": 30}));
    assert!(!rig.link.closes_within(QUIET).await, "the link was closed under a running request");
    call.answer_json(200, &json!("finished")).await;
    assert_eq!(rig.link.reply(&request).await.json(), json!("finished"));
    rig.link.closed().await;
    rig.link = rig.relay.accept_registered(&["core1"]).await;
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn graceful_shutdown_without_reason_leads_to_redial() {
    let mut rig = Rig::core1().await;
    rig.link.send(&json!({"type": "graceful_shutdown", "drain_timeout_secs": 30}));
    rig.link.closed().await;
    rig.link = rig.relay.accept_registered(&["core1"]).await;
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn graceful_shutdown_of_old_relay_is_followed() {
    let mut rig = Rig::old().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "maintenance", "drain_timeout_secs": 30}));
    call.answer_json(200, &json!("finished")).await;
    assert_eq!(rig.link.reply(&request).await.json(), json!("finished"));
    rig.link.closed().await;
    rig.relay.dial().await;
}

#[tokio::test]
async fn admin_drain_leaves_worker_unlinked_and_running() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "worker_drain", "drain_timeout_secs": 30}));
    rig.link.expect("drain").await;
    barrier(&rig.link);
    call.answer_json(200, &json!("finished")).await;
    assert_eq!(rig.link.reply(&request).await.json(), json!("finished"));
    rig.link.closed().await;
    assert!(rig.relay.dial_within(Duration::from_secs(3)).await.is_none(), "it dialled again");
    assert!(rig.worker.process.is_running());
    assert_eq!(rig.worker.probe("/livez").await.status, 200);
}

#[tokio::test]
async fn admin_drain_applies_to_every_link() {
    let mut rig = Rig::with(&Ack { relay_count: 2, ..Ack::core1() }, 4, |worker| worker).await;
    let second = Ack { relay_id: "relay-b".to_owned(), relay_count: 2, ..Ack::core1() };
    let mut second = rig.relay.accept_with(&second).await;
    second.ready(&["m"], 4).await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "worker_drain", "drain_timeout_secs": 30}));
    for link in [&mut rig.link, &mut second] {
        link.expect("drain").await;
        barrier(link);
    }
    rig.link.closed().await;
    second.closed().await;
    assert!(rig.relay.dial_within(Duration::from_secs(3)).await.is_none(), "it dialled again");
}

#[tokio::test]
async fn drain_probe_blocks_until_idle_and_notifies_relay() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    let worker = &rig.worker;
    let draining = worker.drain();
    let serving = async {
        rig.link.expect("drain").await;
        barrier(&rig.link);
        call.answer_json(200, &json!("finished")).await;
        rig.link.reply(&request).await
    };
    let (drained, reply) = tokio::join!(draining, serving);
    assert_eq!((drained.status, reply.json()), (200, json!("finished")));
    assert_eq!(rig.worker.metric("modelrelay_worker_requests_in_flight").await, 0.0);
    assert!(rig.worker.process.is_running());
}

#[tokio::test]
async fn drain_probe_waits_for_running_request() {
    let mut rig = Rig::core1().await;
    rig.link.send_request(&RequestSpec::chat("m"));
    let _never_answers = rig.backend.call().await;
    let early = tokio::time::timeout(QUIET * 4, rig.worker.drain()).await;
    assert!(early.is_err(), "/drain answered under a running request: {early:?}");
}

#[tokio::test]
async fn drain_is_reverted_after_backend_returns() {
    let mut rig = Rig::core1().await;
    let worker = &rig.worker;
    let relay = async {
        rig.link.expect("drain").await;
        barrier(&rig.link);
        rig.link.closed().await;
    };
    tokio::join!(worker.drain(), relay);
    rig.backend.refuse().await;
    let quiet = rig.relay.dial_within(QUIET * 4).await;
    assert!(quiet.is_none(), "the worker dialled while its backend was down");
    rig.backend.reopen();
    rig.link = rig.relay.accept_registered(&["core1"]).await;
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn drain_probe_requires_its_configured_token() {
    let mut rig = Rig::with(&Ack::core1(), 4, |worker| worker.env("DRAIN_TOKEN", "planted-drain-token")).await;
    assert_eq!(rig.worker.probe("/drain").await.status, 403);
    assert_eq!(rig.worker.probe_with("/drain", &[("x-modelrelay-drain-token", "wrong")]).await.status, 403);
    rig.still_serves().await;
    let worker = &rig.worker;
    let relay = async {
        rig.link.expect("drain").await;
        barrier(&rig.link);
    };
    let headers = [("x-modelrelay-drain-token", "planted-drain-token")];
    let (drained, ()) = tokio::join!(worker.probe_with("/drain", &headers), relay);
    assert_eq!(drained.status, 200);
    assert!(!rig.worker.log().contains("planted-drain-token"));
}

#[tokio::test]
async fn page_in_browser_cannot_drain() {
    let mut rig = Rig::core1().await;
    let drain_header = ("x-modelrelay-drain", "1");
    for header in [("sec-fetch-site", "cross-site"), ("origin", "null"), ("referer", "http://evil.example/")] {
        let refused = rig.worker.post("/drain", &[drain_header, header]).await;
        assert_eq!(refused.status, 403, "{header:?}");
        assert!(refused.body.contains("DRAIN_TOKEN"), "the error does not name the remedy: {}", refused.body);
    }
    // An image on a page, loaded over a plain connection, for which the browser sends no such header.
    assert_eq!(rig.worker.probe("/drain").await.status, 403);
    assert_eq!(rig.worker.probe_with("/drain", &[drain_header]).await.status, 403);
    assert_eq!(rig.worker.post("/drain", &[]).await.status, 403);
    // DNS rebinding: the page's own name resolves to this address.
    assert_eq!(rig.worker.post("/drain", &[drain_header, ("host", "evil.example:17990")]).await.status, 403);
    rig.still_serves().await;
    let relay = async {
        rig.link.expect("drain").await;
        barrier(&rig.link);
    };
    let (drained, ()) = tokio::join!(rig.worker.drain(), relay);
    assert_eq!(drained.status, 200);
}

#[tokio::test]
async fn many_connections_do_not_end_waiting_hook() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    let worker = &rig.worker;
    let relay = async {
        rig.link.expect("drain").await;
        barrier(&rig.link);
        let crowd = silent_crowd(worker).await;
        // It is accepted after all of them.
        assert_eq!(worker.probe("/livez").await.status, 200);
        call.answer_json(200, &json!("finished")).await;
        rig.link.reply(&request).await;
        crowd
    };
    let (drained, _crowd) = tokio::join!(worker.drain(), relay);
    assert_eq!((drained.status, &drained.json()["drained"]), (200, &json!(true)));
}

#[tokio::test]
async fn kubelet_hook_drains_every_relay() {
    let ack = Ack { relay_count: 2, ..Ack::core1() };
    let mut rig = Rig::with(&ack, 4, |worker| worker.env("DRAIN_TOKEN", "planted-drain-token")).await;
    let mut second = rig.relay.accept_with(&Ack { relay_id: "relay-b".to_owned(), ..ack }).await;
    second.ready(&["m"], 4).await;
    // Like a preStop hook's httpGet with its own header.
    let headers =
        [("user-agent", "kube-lifecycle/1.36"), ("accept", "*/*"), ("x-modelrelay-drain-token", "planted-drain-token")];
    let worker = &rig.worker;
    let relay = async {
        for link in [&mut rig.link, &mut second] {
            link.expect("drain").await;
            barrier(link);
            link.closed().await;
        }
    };
    let (drained, ()) = tokio::join!(worker.probe_with("/drain", &headers), relay);
    assert_eq!((drained.status, &drained.json()["drained"]), (200, &json!(true)));
    // The hook may be called twice.
    assert_eq!(worker.probe_with("/drain", &headers).await.status, 200);
}

#[tokio::test]
async fn relay_withholding_credit_is_notified_of_deadline() {
    let mut rig = Rig::with(&Ack::core1(), 4, |worker| worker.env("SHUTDOWN_TIMEOUT_SECS", "1")).await;
    rig.link.withhold_credit();
    rig.link.send_request(&RequestSpec::stream("m").window(10));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: more than ten bytes\n\n").await;
    rig.worker.terminate().await;
    rig.link.expect("drain").await;
    barrier(&rig.link);
    assert_eq!(rig.link.closed().await, (Some(1000), "graceful shutdown timed out".to_owned()));
}

#[tokio::test]
async fn admin_drain_without_deadline_is_accepted() {
    let mut rig = Rig::core1().await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "worker_drain", "drain_timeout_secs": u64::MAX}));
    rig.link.expect("drain").await;
    barrier(&rig.link);
    assert_eq!(rig.link.closed().await.0, Some(1000));
    assert_eq!(rig.worker.probe("/livez").await.status, 200);
}

/// Longer than an idle drain may take, shorter than a dial's own timeout of 10 s.
const SOON: Duration = Duration::from_secs(5);

#[tokio::test]
async fn unanswered_handshake_does_not_delay_exit() {
    let mut relay = FakeRelay::start().await;
    let mut worker = WorkerProcess::builder().relay(relay.url()).start().await;
    let _hanging = relay.dial().await;
    worker.terminate().await;
    assert_eq!(worker.process.wait_exit_within(SOON).await.code(), Some(0));
}

#[tokio::test]
async fn unacknowledged_registration_does_not_delay_exit() {
    let mut relay = FakeRelay::start().await;
    let mut worker = WorkerProcess::builder().relay(relay.url()).start().await;
    let mut hanging = relay.dial().await.upgrade().await;
    hanging.expect("register").await;
    worker.terminate().await;
    assert_eq!(worker.process.wait_exit_within(SOON).await.code(), Some(0));
}
