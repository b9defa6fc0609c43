//! Relays are replaced one by one under clients that keep their connections and retry nothing.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use modelrelay_harness::balancer::Balancer;
use modelrelay_harness::client::{KeptClient, Reply, Request};
use modelrelay_harness::poll_until;
use modelrelay_harness::process::{Process, Spawn};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The clients: half of them send one request after the other, half pause in between.
const CLIENTS: usize = 40;

/// The difference between two pauses. The longest is half a second: a relay that drains closes a connection that was
/// idle for three seconds, and a request that a client sends at that moment is lost.
const PAUSE_STEP: Duration = Duration::from_millis(13);

/// The longest time until a relay of this test has finished its requests, or a client its pause.
const LONG: Duration = Duration::from_secs(60);

/// The requests of all clients.
#[derive(Debug, Default)]
struct Tally {
    answered: usize,
    /// Responses that ended their connection.
    moved: usize,
    failed: Vec<String>,
}

impl Tally {
    fn add(&mut self, outcome: Result<Reply, String>) {
        match outcome {
            Ok(reply) => {
                self.answered += 1;
                self.moved += usize::from(reply.header("connection").is_some_and(|value| value == "close"));
            }
            Err(failure) => self.failed.push(failure),
        }
    }
}

struct Crowd {
    tally: Arc<Mutex<Tally>>,
    stop: watch::Sender<bool>,
    clients: JoinSet<()>,
}

impl Crowd {
    fn of(to: SocketAddr) -> Self {
        let (tally, stop) = (Arc::new(Mutex::new(Tally::default())), watch::Sender::new(false));
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            clients.spawn(ask_until(stop.subscribe(), number, KeptClient::new(to), Arc::clone(&tally)));
        }
        Self { tally, stop, clients }
    }

    fn answered(&self) -> usize {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).answered
    }

    async fn wait_for_more(&self, relay: &Relay, answers: usize) {
        let goal = self.answered() + answers;
        poll_until(LONG, "further responses", relay.log(), async || self.answered() >= goal).await;
    }

    async fn end(mut self) -> Tally {
        self.stop.send_replace(true);
        while let Some(ended) = self.clients.join_next().await {
            ended.expect("a client does not panic");
        }
        std::mem::take(&mut *self.tally.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Sends streams of 0.4 to 3 seconds, each after the end of the one before and perhaps a pause.
async fn ask_until(mut stop: watch::Receiver<bool>, number: usize, mut client: KeptClient, tally: Arc<Mutex<Tally>>) {
    let pause = if number.is_multiple_of(2) { Duration::ZERO } else { PAUSE_STEP * number as u32 };
    for round in number.. {
        let words = "word ".repeat(round * 13 % 130);
        let body = json!({"model": "demo", "stream": true, "messages": [{"role": "user", "content": words}]});
        let reply = client.fetch(Request::post("/v1/chat/completions", &body)).await;
        let outcome = match reply {
            Ok(reply) if reply.status == 200 && reply.text().ends_with("data: [DONE]\n\n") => Ok(reply),
            Ok(reply) => Err(format!("{} {}", reply.status, reply.text())),
            Err(error) => Err(error),
        };
        tally.lock().unwrap_or_else(PoisonError::into_inner).add(outcome);
        let is_stopped = tokio::time::timeout(pause, stop.wait_for(|stop| *stop)).await.is_ok();
        if is_stopped || *stop.borrow() {
            return;
        }
    }
}

/// Waits until the balancer's probe fails, and for a moment in which it still sends new connections.
async fn roll(old: &mut Relay, crowd: &Crowd, front: &Balancer) {
    old.process().terminate().await;
    old.eventually("it is unready", async || old.get("/readyz").await.status == 503).await;
    crowd.wait_for_more(old, 5).await;
    front.remove(old);
    let status = old.process().wait_exit_within(LONG).await;
    assert_eq!(status.code(), Some(0));
}

async fn relay() -> Relay {
    // The worker looks for one more relay than there are, so that it finds the next one at once.
    Relay::builder().env("SHUTDOWN_GRACE_SECS", "1").env("RELAY_COUNT", "3").start().await
}

async fn demo() -> (Process, String) {
    let demo = Spawn::program("modelrelay-worker").arg("demo").arg("--listen").arg("127.0.0.1:0");
    let demo = demo.arg("--delay").arg("20ms").start();
    let line = demo.wait_for_line("address=").await;
    let address = line.split("address=").nth(1).and_then(|rest| rest.split_whitespace().next());
    let url = format!("http://{}", address.unwrap_or_else(|| panic!("no address: {line}")));
    (demo, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_rollout_fails_no_request_of_kept_connections() {
    let (mut one, mut two) = tokio::join!(relay(), relay());
    let (_demo, backend) = demo().await;
    let front = Balancer::start(&[&one, &two]).await;
    let worker = WorkerProcess::builder().relay(front.url()).backend(backend).models("demo");
    let _worker = worker.env("WORKER_SECRET", WORKER_SECRET).concurrency(64).start().await;
    wait_for_model(&one, "demo").await;
    wait_for_model(&two, "demo").await;
    let crowd = Crowd::of(front.addr());
    crowd.wait_for_more(&one, CLIENTS).await;
    let mut replacements = Vec::new();
    for old in [&mut one, &mut two] {
        let new = relay().await;
        front.add(&new);
        wait_for_model(&new, "demo").await;
        roll(old, &crowd, &front).await;
        replacements.push(new);
    }
    crowd.wait_for_more(&replacements[0], CLIENTS).await;
    let tally = crowd.end().await;
    eprintln!("{} requests answered, {} failed, {} moved", tally.answered, tally.failed.len(), tally.moved);
    assert_eq!(tally.failed, Vec::<String>::new(), "of {}", tally.answered);
    assert!(tally.moved > 0, "no response ended its connection");
}
