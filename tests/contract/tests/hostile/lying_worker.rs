//! A worker that lies about everything, at random from a printed seed, next to an honest one whose every byte is
//! checked.

mod lies;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use modelrelay_harness::{
    client::{Reply, Request},
    relay::{Relay, WORKER_SECRET},
    worker::{
        FakeWorker, Frame, Job, PIECE_MAX, core1_registration, new_instance_id, registration, slot, slots1_registration,
    },
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use lies::{Dice, Known, lie};

/// Sets the seed, to reproduce a failure.
const SEED: &str = "MODELRELAY_HOSTILE_SEED";

/// The number of the liar's consecutive links, and the maximum number of messages on each.
const LINKS: usize = 60;
const LIES: usize = 120;

const HONEST_CLIENTS: usize = 4;
const LIED_TO: usize = 4;

/// Every wait of the liar's clients ends by one of these timeouts.
const TIMEOUT_SECS: &str = "3";

/// The codes that a client of a lying worker may receive: the relay's own, and those that this worker sends in an
/// `error`.
const REASONS: &[&str] = &[
    "bad_answer",
    "worker_error",
    "worker_lost",
    "requeue_exhausted",
    "queue_timeout",
    "request_timeout",
    "queue_full",
    "backend_unreachable",
    "response_too_large",
    "model_loading",
    "backend_unavailable",
    "insufficient_memory",
    "slot_quarantined",
    "severed_by_swap",
    "overloaded",
    "internal_error",
    "worker_too_old",
    "model_not_found",
    "draining",
    "slow_client",
];

fn seed() -> u64 {
    let clock = || SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.subsec_nanos().into());
    std::env::var(SEED).map_or_else(|_| clock(), |seed| seed.parse().expect("a number in the seed"))
}

/// Echoes each body, in pieces of random size, and shares the ids of its requests.
async fn be_honest(mut worker: FakeWorker, known: Arc<Mutex<Known>>, seed: u64, served: Arc<AtomicUsize>) {
    let mut dice = Dice::of(seed);
    loop {
        let job = worker.expect_request().await;
        assert_eq!(job.json()["model"], "honest", "a request of another worker");
        known.lock().expect("no panic while the lock is held").learn_others(&job.id, job.stream);
        echo(&mut worker, &job, &mut dice).await;
        served.fetch_add(1, Ordering::Relaxed);
    }
}

async fn echo(worker: &mut FakeWorker, job: &Job, dice: &mut Dice) {
    worker.response_start(job, 200, &[("content-type", "application/octet-stream")]).await;
    let mut rest = job.body.as_slice();
    while !rest.is_empty() {
        let (part, others) = rest.split_at(rest.len().min(1 + dice.below(PIECE_MAX / 4)));
        worker.pieces(job, part).await;
        rest = others;
        tokio::task::yield_now().await;
    }
    worker.finish(job).await;
}

/// Sends requests to the honest worker until stopped. Every response must equal the request, byte for byte.
async fn check_honest(relay: Arc<Relay>, seed: u64, enough: Arc<AtomicBool>) -> usize {
    let mut dice = Dice::of(seed);
    let mut answered = 0;
    while !enough.load(Ordering::Relaxed) {
        // Fits into the window of a response, escapes included: the honest worker waits for no credit.
        let text = dice.text(8_000);
        let body = json!({"model": "honest", "stream": answered % 2 == 0, "text": text}).to_string();
        let reply = relay.fetch(Request::new("POST", "/v1/chat/completions").body(body.clone())).await.with_status(200);
        assert!(!reply.aborted && reply.body == body.as_bytes(), "request {answered} received a wrong response");
        answered += 1;
    }
    answered
}

/// Sends requests to the liar until stopped. A response may contain anything, but must end in time, and a failure must
/// have a reason.
async fn be_lied_to(relay: Arc<Relay>, seed: u64, enough: Arc<AtomicBool>) -> Vec<String> {
    let mut dice = Dice::of(seed);
    let mut ends = Vec::new();
    while !enough.load(Ordering::Relaxed) {
        let body = json!({"model": "lie", "stream": dice.below(2) == 0, "text": dice.text(5_000)});
        let reply = relay.fetch(Request::post("/v1/chat/completions", &body)).await;
        ends.push(end_of(&reply));
    }
    ends
}

/// Returns a keyword for how this response ended.
fn end_of(reply: &Reply) -> String {
    assert!(!reply.text().contains("\"model\":\"honest\""), "a response of another worker");
    if !reply.is_complete() {
        return "cut off".into();
    }
    // The backend's own statuses are the liar's choice; the relay's have a code.
    let error = serde_json::from_slice::<Value>(&reply.body)
        .ok()
        .and_then(|body| body["error"]["code"].as_str().map(str::to_owned));
    match error {
        Some(code) if reply.status >= 400 => {
            assert!(REASONS.contains(&code.as_str()) || code.starts_with("lie_"), "{}: {}", reply.status, reply.text());
            code
        }
        _ => "answered".into(),
    }
}

/// Returns the liar's registration: mostly valid, because otherwise the relay closes the link at once.
fn introduction(dice: &mut Dice) -> Value {
    let models = ["lie", "lie-2"];
    match dice.below(8) {
        0 => registration(&models, 4),
        1 | 2 => slots1_registration(&models, &[slot("gpu0", "empty", &models)], &new_instance_id()),
        3 => {
            let mut message = core1_registration(&models, 4, &new_instance_id());
            let fields = [
                "max_concurrent",
                "current_load",
                "limits",
                "capabilities",
                "have",
                "succeeds",
                "slots",
                "pool",
                "location",
                "version",
            ];
            message[fields[dice.below(fields.len())]] = dice.odd_value();
            message
        }
        _ => core1_registration(&models, 4, &new_instance_id()),
    }
}

/// Sends lies over one link, and stops early if the relay closes it. Returns the close code.
async fn lie_over(worker: &mut FakeWorker, dice: &mut Dice, known: &Mutex<Known>, outrageous: bool) -> u16 {
    let proper = || core1_registration(&["lie", "lie-2"], 4, &new_instance_id());
    let introduction = if outrageous { introduction(dice) } else { proper() };
    worker.send(&introduction).await;
    worker.send(&json!({"type": "grant", "slots": 4, "others": 0, "capacity": 4, "links": 1})).await;
    for _ in 0..LIES {
        // Reads the messages so far, so that some lies are about its own requests.
        while let Ok(frame) = tokio::time::timeout(Duration::from_micros(500), worker.recv()).await {
            match frame {
                Frame::Json(message) => known.lock().expect("no panic while the lock is held").learn(&message),
                Frame::Close(code, _) => return code,
                Frame::Binary(_) | Frame::Pong(_) => {}
            }
        }
        let lie = lie(dice, &known.lock().expect("no panic while the lock is held"), outrageous);
        worker.send_message(lie).await;
    }
    0
}

async fn check_alive(relay: &Relay) {
    assert_eq!(relay.get("/livez").await.status, 200);
    assert!(!relay.log().contains("panicked"), "{}", relay.log().dump());
}

fn tally<T: Ord + std::fmt::Debug>(mut all: Vec<T>) -> String {
    all.sort();
    let groups: Vec<_> =
        all.chunk_by(|one, other| one == other).map(|same| format!("{:?} × {}", same[0], same.len())).collect();
    groups.join(", ")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lying_worker_harms_only_its_own_clients() {
    let seed = seed();
    eprintln!("{SEED}={seed}");
    let builder = Relay::builder().env("REQUEST_TIMEOUT_SECS", TIMEOUT_SECS).env("QUEUE_TIMEOUT_SECS", TIMEOUT_SECS);
    let relay = Arc::new(builder.env("COLD_TIMEOUT_SECS", TIMEOUT_SECS).env("MAX_UNREAD_BYTES", "1Mi").start().await);
    let (known, served) = (Arc::<Mutex<Known>>::default(), Arc::<AtomicUsize>::default());
    let honest = relay.core1_worker(&["honest"], 8).await;
    let mut honest_worker = JoinSet::new();
    honest_worker.spawn(be_honest(honest, Arc::clone(&known), seed, Arc::clone(&served)));

    let enough = Arc::new(AtomicBool::new(false));
    let (mut checks, mut clients) = (JoinSet::new(), JoinSet::new());
    for number in 0..HONEST_CLIENTS as u64 {
        checks.spawn(check_honest(Arc::clone(&relay), seed ^ (number + 1), Arc::clone(&enough)));
    }
    for number in 0..LIED_TO as u64 {
        clients.spawn(be_lied_to(Arc::clone(&relay), seed ^ (number + 100), Arc::clone(&enough)));
    }
    let mut dice = Dice::of(seed);
    let mut codes = Vec::new();
    for number in 0..LINKS {
        let mut liar = relay.dial().secret(WORKER_SECRET).open().await;
        codes.push(lie_over(&mut liar, &mut dice, &known, number % 2 == 0).await);
        assert!(honest_worker.try_join_next().is_none(), "the honest worker was cut off");
    }
    enough.store(true, Ordering::Relaxed);
    let answered: usize = checks.join_all().await.into_iter().sum();
    let ends: Vec<_> = clients.join_all().await.concat();
    eprintln!(
        "{answered} honest responses; links of the liar closed: {}; its clients: {}",
        tally(codes),
        tally(ends.clone())
    );
    assert!(answered >= 100 && served.load(Ordering::Relaxed) >= answered, "only {answered} honest responses");
    assert!(!ends.is_empty(), "no client received a lie");
    check_alive(&relay).await;
    relay
        .eventually("no request is in flight", || async {
            relay.admin_json("/admin/requests").await["requests"] == json!([])
        })
        .await;
    relay.eventually("no byte is held", || async { relay.metric("modelrelay_buffered_bytes ").await == 0.0 }).await;
}
