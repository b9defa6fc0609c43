//! One worker with several relays.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use modelrelay_harness::balancer::Balancer;
use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::json;

use crate::support::{Load, eventually};

const CHAT: &str = "/v1/chat/completions";

async fn relay_of_two() -> Relay {
    Relay::builder().env("RELAY_COUNT", "2").start().await
}

/// Two relays behind a balancer, and a worker of `slots` slots that knows only the balancer.
async fn two_relays(slots: u32) -> (Relay, Relay, WorkerProcess, FakeBackend) {
    let (one, two) = tokio::join!(relay_of_two(), relay_of_two());
    let backend = FakeBackend::start().await;
    let front = Balancer::start(&[&one, &two]).await;
    let worker = WorkerProcess::builder().relay(front.url()).backend(backend.url());
    let worker = worker.env("WORKER_SECRET", WORKER_SECRET).concurrency(slots).start().await;
    wait_for_model(&one, "m").await;
    wait_for_model(&two, "m").await;
    (one, two, worker, backend)
}

#[tokio::test]
async fn worker_behind_balancer_reaches_every_added_relay() {
    let yaml = |count: u32| {
        format!("relayCount: {count}\nproviders:\n- name: local\n  workerSecrets: [{{value: {WORKER_SECRET}}}]\n")
    };
    let relay = || Relay::builder().config(yaml(1)).start();
    let (one, two, three) = tokio::join!(relay(), relay(), relay());
    let relays = [one, two, three];
    let backend = FakeBackend::start().await;
    let front = Balancer::start(&[&relays[0], &relays[1], &relays[2]]).await;
    let worker = WorkerProcess::builder().relay(front.url()).backend(backend.url());
    let _worker = worker.env("WORKER_SECRET", WORKER_SECRET).concurrency(4).start().await;
    // It is configured with one relay; that one then reports three.
    wait_for_model(&relays[0], "m").await;
    for relay in &relays {
        relay.replace_file("relay.yaml", &yaml(3));
    }
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    for (number, relay) in relays.iter().enumerate() {
        wait_for_model(relay, "m").await;
        assert_eq!(relay.workers().await.len(), 1);
        assert_eq!(relay.fetch(chat(number)).await.with_status(200).json()["number"], number);
    }
}

#[tokio::test]
async fn late_relay_receives_worker_soon() {
    let relay = || Relay::builder().env("RELAY_COUNT", "3").start();
    let (one, two, late) = tokio::join!(relay(), relay(), relay());
    let backend = FakeBackend::start().await;
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    // A Service of Kubernetes: a relay without a worker becomes ready after 15 s, and has clients from then on.
    let front = Balancer::start(&[&one, &two]).await;
    let worker = WorkerProcess::builder().relay(front.url()).backend(backend.url());
    let _worker = worker.env("WORKER_SECRET", WORKER_SECRET).concurrency(40).start().await;
    wait_for_model(&one, "m").await;
    wait_for_model(&two, "m").await;
    // By then the worker has reached its two relays many times. If its pause doubled each time, this alone would take
    // 90 s.
    let linked = front.connections();
    eventually("eight failed dials", &one, || async { front.connections() >= linked + 8 }).await;
    front.add(&late);
    let waiting = late.begin(chat(3));
    let served = tokio::time::timeout(Duration::from_secs(30), waiting.reply()).await;
    assert_eq!(served.expect("a worker within thirty seconds").with_status(200).json()["number"], 3);
}

#[tokio::test]
async fn relay_joining_busy_ones_causes_no_starvation() {
    // First more requests than slots, then fewer.
    for slots in [1, 2, 7, 40] {
        joined_under_load(slots).await;
    }
}

async fn joined_under_load(slots: u32) {
    const CLIENTS: usize = 8;
    let relay = || Relay::builder().env("RELAY_COUNT", "3").start();
    let (one, two, third) = tokio::join!(relay(), relay(), relay());
    let backend = FakeBackend::start().await;
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    let front = Balancer::start(&[&one, &two]).await;
    let worker = WorkerProcess::builder().relay(front.url()).backend(backend.url());
    let _worker = worker.env("WORKER_SECRET", WORKER_SECRET).concurrency(slots).start().await;
    wait_for_model(&one, "m").await;
    wait_for_model(&two, "m").await;
    let mut load = Load::start(&one, CLIENTS);
    load.add(&two, CLIENTS);
    load.serves_everyone(3).await;
    front.add(&third);
    eventually("a link to the third relay", &third, || async { third.workers().await.len() == 1 }).await;
    load.add(&third, CLIENTS);
    load.serves_everyone(10).await;
    load.end().await;
}

fn chat(number: usize) -> Request {
    Request::post(CHAT, &json!({"model": "m", "number": number}))
}

#[tokio::test]
async fn worker_behind_balancer_finds_both_relays() {
    let (one, two, _worker, backend) = two_relays(4).await;
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    assert_eq!(one.fetch(chat(1)).await.with_status(200).json()["number"], 1);
    assert_eq!(two.fetch(chat(2)).await.with_status(200).json()["number"], 2);
}

#[tokio::test]
async fn balancer_returning_same_relay_is_dialled_again() {
    let (one, two) = tokio::join!(relay_of_two(), relay_of_two());
    let backend = FakeBackend::start().await;
    let front = Balancer::start(&[&one, &one, &two]).await;
    let worker = WorkerProcess::builder().relay(front.url()).backend(backend.url());
    let _worker = worker.env("WORKER_SECRET", WORKER_SECRET).start().await;
    wait_for_model(&one, "m").await;
    wait_for_model(&two, "m").await;
    assert_eq!(one.workers().await.len(), 1, "a second link replaced or doubled the first");
}

#[tokio::test]
async fn one_slot_serves_queues_of_both_relays_alternately() {
    const EACH: usize = 6;
    let (one, two, worker, mut backend) = two_relays(1).await;
    let ones: Vec<_> = (0..EACH).map(|_| one.begin(chat(1))).collect();
    let twos: Vec<_> = (0..EACH).map(|_| two.begin(chat(2))).collect();
    let mut call = backend.call().await;
    // A demand is sent 50 ms after the previous one; before that the worker cannot know of a queue.
    let knows_both = || async { waiting(&worker).await == [EACH as u64 - 1, EACH as u64] };
    one.eventually("a worker that knows both queues", knows_both).await;
    let first = number(&mut call).await;
    call.answer_json(200, &json!({})).await;
    let mut order = vec![first];
    for _ in 1..2 * EACH {
        let mut call = backend.call().await;
        order.push(number(&mut call).await);
        call.answer_json(200, &json!({})).await;
    }
    for client in ones.into_iter().chain(twos) {
        client.reply().await.with_status(200);
    }
    let turns = order.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(turns >= EACH, "one relay starved: {order:?}");
}

/// Returns the number of waiting requests at each link, as far as the worker knows, in ascending order.
async fn waiting(worker: &WorkerProcess) -> Vec<u64> {
    let health = worker.probe("/healthz").await.json();
    let links = health["links"].as_array().expect("a list of links").iter();
    let mut waiting: Vec<u64> = links.map(|link| link["waiting"].as_u64().expect("a number for each link")).collect();
    waiting.sort_unstable();
    waiting
}

async fn number(call: &mut modelrelay_harness::fake_backend::Call) -> u64 {
    call.read_json().await["number"].as_u64().expect("a number in each request")
}

#[tokio::test]
async fn two_busy_relays_never_exceed_capacity() {
    let (one, two, worker, backend) = two_relays(3).await;
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (running_there, most_there) = (Arc::clone(&running), Arc::clone(&most));
    backend.answer_with(move |_, body| {
        let now = running_there.fetch_add(1, Ordering::SeqCst) + 1;
        most_there.fetch_max(now, Ordering::SeqCst);
        running_there.fetch_sub(1, Ordering::SeqCst);
        Answer::new(200, &[], body)
    });
    let clients: Vec<_> =
        (0..60).map(|at| if at % 2 == 0 { one.begin(chat(at)) } else { two.begin(chat(at)) }).collect();
    for (at, client) in clients.into_iter().enumerate() {
        assert_eq!(client.reply().await.with_status(200).json()["number"], at);
    }
    assert!(most.load(Ordering::SeqCst) <= 3);
    assert_eq!(worker.metric("modelrelay_worker_requests_in_flight").await, 0.0);
}

#[tokio::test]
async fn killed_relay_leaves_other_one_serving() {
    let (one, two, _worker, backend) = two_relays(1).await;
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    drop(one);
    for number in 0..5 {
        assert_eq!(two.fetch(chat(number)).await.with_status(200).json()["number"], number);
    }
}

#[tokio::test]
async fn request_waits_for_slot_held_by_other_relay() {
    let (one, two, _worker, mut backend) = two_relays(1).await;
    let first = one.begin(chat(1));
    let held = backend.call().await;
    let second = two.begin(chat(2));
    two.wait_for_queue_depth("local", 1).await;
    held.answer_json(200, &json!({})).await;
    first.reply().await.with_status(200);
    backend.call().await.answer_json(200, &json!({})).await;
    second.reply().await.with_status(200);
}
