//! Links that break, are rejected, go silent, or should be more than one.

use std::time::{Duration, Instant};

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::{Ack, FakeRelay, RelayLink, RequestSpec};
use modelrelay_harness::worker_process::{Rig, WorkerProcess};
use serde_json::json;
use tokio_tungstenite::tungstenite::Message as Frame;

/// Long enough to show that something does not happen, where there is no observable event.
const QUIET: Duration = Duration::from_millis(1500);

fn relay_b() -> Ack {
    Ack { relay_id: "relay-b".to_owned(), relay_count: 2, ..Ack::core1() }
}

/// A worker with links to two relays behind one address.
async fn two_links(slots: u32) -> (Rig, RelayLink) {
    let mut rig = Rig::with(&Ack { relay_count: 2, ..Ack::core1() }, slots, |worker| worker).await;
    let mut second = rig.relay.accept_with(&relay_b()).await;
    second.models(&["m"]).await;
    (rig, second)
}

#[tokio::test]
async fn lost_link_is_redialled_after_pause() {
    let mut rig = Rig::core1().await;
    let lost = Instant::now();
    drop(rig.link);
    let again = rig.relay.dial().await;
    let pause = again.at - lost;
    assert!(pause >= Duration::from_millis(190), "dialled after {pause:?}, before 0.2 s");
    assert!(pause <= Duration::from_secs(4), "dialled only after {pause:?}");
}

#[tokio::test]
async fn worker_serves_again_after_link_loss() {
    let mut rig = Rig::core1().await;
    drop(rig.link);
    rig.link = rig.relay.accept_registered(&["core1"]).await;
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn worker_started_before_its_relay_connects() {
    let absent = FakeRelay::start().await.addr();
    let _worker = WorkerProcess::builder().relay(format!("http://{absent}")).start().await;
    let mut relay = FakeRelay::start_at(absent).await;
    assert_eq!(relay.dial().await.path, "/v1/worker/connect");
}

#[tokio::test]
async fn link_loss_aborts_its_requests_immediately() {
    let mut rig = Rig::core1().await;
    rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    let lost = Instant::now();
    drop(rig.link);
    assert!(call.closed().await - lost < Duration::from_secs(1));
}

#[tokio::test]
async fn refused_secret_is_logged_once_and_retried() {
    let mut relay = FakeRelay::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).start().await;
    for _ in 0..3 {
        relay.dial().await.refuse(401).await;
    }
    let _link = relay.accept_registered(&["core1"]).await;
    worker.process.wait_for_line("registered").await;
    let lines = worker.process.log().lines();
    let warnings: Vec<_> =
        lines.iter().filter(|line| line.contains("WARN") && line.to_lowercase().contains("auth")).collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
}

#[tokio::test]
async fn secret_file_is_read_at_each_dial() {
    let mut relay = FakeRelay::start().await;
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "first-secret\n").expect("a writable file");
    let worker = WorkerProcess::builder().relay(relay.url()).without("WORKER_SECRET");
    let _worker = worker.file("WORKER_SECRET_FILE", file.path()).start().await;
    let dial = relay.dial().await;
    assert_eq!(dial.header("x-worker-secret"), Some("first-secret"));
    std::fs::write(file.path(), "second-secret\n").expect("a writable file");
    dial.refuse(401).await;
    assert_eq!(relay.dial().await.header("x-worker-secret"), Some("second-secret"));
}

#[tokio::test]
async fn missing_secret_file_is_awaited() {
    let mut relay = FakeRelay::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("worker-secret");
    let worker = WorkerProcess::builder().relay(relay.url()).without("WORKER_SECRET");
    let mut worker = worker.file("WORKER_SECRET_FILE", &file).start().await;
    let line = worker.process.wait_for_line("there is no worker secret yet").await;
    assert!(line.contains("WARN") && line.contains("WORKER_SECRET_FILE") && line.contains("worker-secret"), "{line}");
    std::fs::write(&file, "\n").expect("a writable directory");
    assert!(relay.dial_within(QUIET * 2).await.is_none(), "the worker dialled without a secret");
    // The two messages differ, so each is logged once.
    assert_eq!(worker.process.log().count_of("there is no worker secret yet"), 2, "{}", worker.log());
    assert!(worker.process.is_running());
    assert_eq!((worker.probe("/livez").await.status, worker.probe("/readyz").await.status), (200, 200));
    assert!(worker.probe("/healthz").await.json()["secret_error"].is_string());
    std::fs::write(&file, "at-last\n").expect("a writable directory");
    let dial = relay.dial().await;
    assert_eq!(dial.header("x-worker-secret"), Some("at-last"));
    assert!(worker.probe("/healthz").await.json()["secret_error"].is_null());
}

#[tokio::test]
async fn worker_awaiting_secret_can_be_stopped() {
    let worker = WorkerProcess::builder().without("WORKER_SECRET").env("WORKER_SECRET_FILE", "/nowhere/secret");
    let mut worker = worker.start().await;
    worker.process.wait_for_line("there is no worker secret yet").await;
    worker.terminate().await;
    assert_eq!(worker.process.wait_exit_within(Duration::from_secs(3)).await.code(), Some(0));
}

#[tokio::test]
async fn changed_secret_after_refusal_is_tried_immediately() {
    let mut relay = FakeRelay::start().await;
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "old-secret").expect("a writable file");
    let worker = WorkerProcess::builder().relay(relay.url()).without("WORKER_SECRET");
    let _worker = worker.file("WORKER_SECRET_FILE", file.path()).start().await;
    for _ in 0..3 {
        relay.dial().await.refuse(401).await;
    }
    // The next dial with the same secret would be more than 4 s later.
    std::fs::write(file.path(), "new-secret").expect("a writable file");
    let dial = relay.dial_within(Duration::from_secs(3)).await.expect("a dial soon");
    assert_eq!(dial.header("x-worker-secret"), Some("new-secret"));
}

#[tokio::test]
async fn temporarily_refusing_relay_is_redialled() {
    let mut relay = FakeRelay::start().await;
    let _worker = WorkerProcess::builder().relay(relay.url()).start().await;
    for status in [503, 429] {
        relay.dial().await.refuse(status).await;
    }
    relay.accept_registered(&["core1"]).await;
}

#[tokio::test]
async fn half_open_relay_is_detected_within_three_heartbeats() {
    let ack = Ack { heartbeat_ms: 300, ..Ack::core1() };
    let mut rig = Rig::with(&ack, 1, |worker| worker).await;
    let frozen = Instant::now();
    rig.link.freeze();
    let found = rig.relay.dial().await.at - frozen;
    assert!(found >= Duration::from_millis(500), "given up after {found:?}");
    assert!(found < Duration::from_secs(9), "found only after {found:?}");
}

#[tokio::test]
async fn half_open_relay_frees_backend() {
    let ack = Ack { heartbeat_ms: 300, ..Ack::core1() };
    let mut rig = Rig::with(&ack, 1, |worker| worker).await;
    rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    rig.link.freeze();
    call.closed().await;
}

/// Its relay has given it up meanwhile, and other workers have served its requests.
#[tokio::test(flavor = "multi_thread")]
async fn resumed_worker_executes_no_stale_socket_data() {
    let ack = Ack { heartbeat_ms: 200, ..Ack::core1() };
    let mut rig = Rig::with(&ack, 4, |worker| worker).await;
    // An idle worker polls its clock before its socket; a busy one may poll either first.
    let chatter: Vec<_> = (0..200).map(|_| json!({"type": "credit", "stream": 1, "bytes": 1})).collect();
    for round in 0..8 {
        let sender = rig.link.sender();
        let talk = chatter.clone();
        let talking = tokio::spawn(async move {
            loop {
                talk.iter().for_each(|message| sender.send(message));
                tokio::task::yield_now().await;
            }
        });
        // The worker is busy with it.
        rig.worker.process.signal("CONT").await;
        rig.worker.process.signal("STOP").await;
        talking.abort();
        for _ in 0..4 {
            rig.link.send_request(&RequestSpec::chat("m"));
        }
        #[expect(clippy::disallowed_methods, reason = "the worker must sleep longer than three heartbeats")]
        tokio::time::sleep(Duration::from_millis(800)).await;
        rig.worker.process.signal("CONT").await;
        rig.link = rig.relay.accept_with(&ack).await;
        rig.link.ready(&["m"], 4).await;
        assert_eq!(rig.backend.request_count("/v1/chat/completions"), 0, "in round {round}");
    }
    rig.still_serves().await;
}

#[tokio::test]
async fn silent_link_is_pinged_and_kept() {
    let ack = Ack { heartbeat_ms: 200, ..Ack::core1() };
    let mut rig = Rig::with(&ack, 4, |worker| worker).await;
    rig.link.websocket_pings(8).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn ping_is_answered_with_current_load() {
    let mut rig = Rig::core1().await;
    let ping = json!({"type": "ping", "timestamp_unix_ms": 1_700_000_000_000_u64});
    rig.link.send(&ping);
    let idle = rig.link.expect("pong").await;
    assert_eq!(idle["current_load"], 0);
    assert!(idle["timestamp_unix_ms"].is_u64(), "{}", idle.body);
    rig.link.send_request(&RequestSpec::chat("m"));
    let _running = rig.backend.call().await;
    rig.link.send(&ping);
    assert_eq!(rig.link.expect("pong").await["current_load"], 1);
}

#[tokio::test]
async fn unknown_messages_and_fields_are_skipped() {
    let mut rig = Rig::core1().await;
    rig.link.send(&json!({"type": "invented_tomorrow", "request_id": "x", "depth": {"more": [1, 2]}}));
    rig.link.send(&json!({"type": "ping", "timestamp_unix_ms": 1, "invented": true}));
    rig.link.expect("pong").await;
    rig.still_serves().await;
}

#[tokio::test]
async fn reported_relay_count_determines_number_of_links() {
    let (mut rig, mut second) = two_links(4).await;
    rig.still_serves().await;
    second.grant(4).await;
    let request = second.send_request(&RequestSpec::chat("m"));
    rig.backend.call().await.answer_json(200, &json!({"by": "b"})).await;
    assert_eq!(second.reply(&request).await.json(), json!({"by": "b"}));
}

#[tokio::test]
async fn changed_relay_count_adds_but_never_closes_links() {
    let mut rig = Rig::core1().await;
    rig.link.send(&json!({"type": "relays", "relay_count": 2}));
    let mut second = rig.relay.accept_with(&relay_b()).await;
    second.models(&["m"]).await;
    rig.link.send(&json!({"type": "relays", "relay_count": 1}));
    second.send(&json!({"type": "relays", "relay_count": 1}));
    assert!(!rig.link.closes_within(QUIET).await);
    rig.still_serves().await;
    assert!(!second.closes_within(Duration::from_millis(10)).await);
}

/// All workers of a fleet learn of another relay at the same moment.
#[tokio::test]
async fn additional_links_are_dialled_spread_over_one_second() {
    const ADDED: usize = 8;
    let mut spreads = Vec::new();
    // If the machine stalls for a second, one worker's dials look simultaneous, but not those of each of three.
    for _ in 0..3 {
        let mut rig = Rig::core1().await;
        rig.link.send(&json!({"type": "relays", "relay_count": ADDED + 1}));
        let mut dials = Vec::new();
        for _ in 0..ADDED {
            dials.push(rig.relay.dial_within(Duration::from_secs(10)).await.expect("a dial for each relay"));
        }
        // Eight of them within the same 100 ms by chance: less than once in a million runs.
        let spread = dials[ADDED - 1].at.duration_since(dials[0].at);
        if spread > Duration::from_millis(100) {
            return;
        }
        spreads.push(spread);
    }
    panic!("{ADDED} dials within {spreads:?}");
}

#[tokio::test]
async fn duplicate_keeps_live_link_and_is_retried() {
    let mut rig = Rig::with(&Ack { relay_count: 2, ..Ack::core1() }, 4, |worker| worker).await;
    let twin = rig.relay.accept_with(&Ack { duplicate: true, relay_count: 2, ..Ack::core1() }).await;
    assert_eq!(twin.registration["have"], json!(["relay-a"]));
    twin.close(1000, "duplicate");
    rig.still_serves().await;
    let mut second = rig.relay.accept_with(&relay_b()).await;
    second.models(&["m"]).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn losing_one_link_keeps_requests_of_other() {
    let (mut rig, second) = two_links(4).await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    drop(second);
    rig.relay.accept_with(&relay_b()).await;
    call.answer_json(200, &json!({"kept": true})).await;
    assert_eq!(rig.link.reply(&request).await.json(), json!({"kept": true}));
}

#[tokio::test]
async fn every_address_behind_name_is_dialled() {
    let mut relay = FakeRelay::start().await;
    let url = format!("dns+http://localhost:{}", relay.addr().port());
    let backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(url).backend(backend.url()).concurrency(4).start().await;
    let link = relay.accept_registered(&["core1"]).await;
    let mut rig = Rig { relay, link, backend, worker };
    rig.link.ready(&["m"], 4).await;
    rig.still_serves().await;
}

#[tokio::test]
async fn broken_message_closes_link_despite_missing_credit() {
    let mut rig = Rig::core1().await;
    rig.link.withhold_credit();
    rig.link.send_request(&RequestSpec::stream("m").window(10));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: more than ten bytes\n\n").await;
    rig.link.send_frame(Frame::binary(b"\x09\0".to_vec()));
    assert_eq!(rig.link.closed().await.0, Some(1002));
}
