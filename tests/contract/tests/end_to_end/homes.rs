//! Conversations of relays that share workers.

use std::collections::{BTreeMap, BTreeSet};

use modelrelay_harness::balancer::Balancer;
use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::WorkerProcess;
use serde_json::json;

/// Enough that chance cannot send each of them to the same worker again.
const CONVERSATIONS: usize = 16;

/// Two relays, and two workers that are linked to both.
struct Site {
    relays: [Relay; 2],
    _workers: Vec<(WorkerProcess, FakeBackend)>,
    /// One for each worker: two workers that dial in turn may each be led to the relay that they already have.
    fronts: Vec<Balancer>,
}

impl Site {
    async fn start() -> Self {
        let relay = || Relay::builder().env("RELAY_COUNT", "2").env("PLACEMENT", "cache").start();
        let (one, two) = tokio::join!(relay(), relay());
        let (mut workers, mut fronts) = (Vec::new(), Vec::new());
        for number in 0..2 {
            let backend = FakeBackend::start().await;
            backend.answer_with(move |_, _| Answer::json(200, &json!({"backend": number})));
            let front = Balancer::start(&[&one, &two]).await;
            let worker = WorkerProcess::builder().relay(front.url()).backend(backend.url()).concurrency(4);
            workers.push((worker.env("WORKER_SECRET", WORKER_SECRET).start().await, backend));
            fronts.push(front);
        }
        let site = Self { relays: [one, two], _workers: workers, fronts };
        site.wait_for_workers().await;
        site
    }

    async fn wait_for_workers(&self) {
        for relay in &self.relays {
            relay.wait_for_serving(2).await;
        }
    }

    /// Sends a turn of each conversation through a relay, and returns the backend that answered each.
    async fn take_turns(&self, relay: usize, turn: usize) -> BTreeMap<usize, u64> {
        // Each turn in another order: workers that only take turns would get other conversations.
        let order = (0..=turn).flat_map(|first| (first..CONVERSATIONS).step_by(turn + 1));
        let mut backends = BTreeMap::new();
        for conversation in order {
            let prompt = format!("conversation {conversation}: {}", "x".repeat(2000));
            let later = (0..turn).map(|_| json!({"role": "user", "content": "more"}));
            let messages: Vec<_> = std::iter::once(json!({"role": "user", "content": prompt})).chain(later).collect();
            let request = Request::post("/v1/chat/completions", &json!({"model": "m", "messages": messages}));
            let reply = self.relays[relay].fetch(request).await.with_status(200);
            backends.insert(conversation, reply.json()["backend"].as_u64().expect("the backend's number"));
        }
        backends
    }

    /// Waits until a relay knows all homes, and that no prompt is left to compute there.
    async fn wait_for_homes(&self, relay: usize) {
        let relay = &self.relays[relay];
        let knows = || async {
            let homes = relay.metric("modelrelay_homes{provider=\"local\"}").await;
            homes == CONVERSATIONS as f64 && relay.workers().await.iter().all(|worker| worker["backlog_bytes"] == 0)
        };
        relay.eventually("a relay that knows all homes", knows).await;
    }
}

#[tokio::test]
async fn turn_at_other_relay_goes_home() {
    let site = Site::start().await;
    let first = site.take_turns(0, 0).await;
    assert_eq!(first.values().collect::<BTreeSet<_>>().len(), 2, "{first:?}");
    site.wait_for_homes(1).await;
    assert_eq!(site.take_turns(1, 1).await, first);
    assert_eq!(site.take_turns(0, 2).await, first);
}

#[tokio::test]
async fn restarted_relay_learns_homes() {
    let mut site = Site::start().await;
    let first = site.take_turns(1, 0).await;
    let [one, two] = site.relays;
    site.relays = [one, two.restart().await];
    site.fronts.iter().for_each(|front| front.add(&site.relays[1]));
    site.wait_for_workers().await;
    site.wait_for_homes(1).await;
    assert_eq!(site.take_turns(1, 1).await, first);
}
