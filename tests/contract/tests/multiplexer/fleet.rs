//! Several relays and several workers with a slot each, all of them the real programs: the final distribution of
//! models, and the fate of requests despite lost links, swaps and older peers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use modelrelay_harness::balancer::Balancer;
use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::within_for;
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::rig::{LONG, worker_with};

pub(crate) const MODELS: [&str; 2] = ["a", "b"];

const CHAT: &str = "/v1/chat/completions";

const SWAPS: &str = "modelrelay_worker_swaps_total{";

/// A backend that responds with its worker's name and with the requested model.
pub(crate) async fn backend(worker: &'static str) -> FakeBackend {
    let backend = FakeBackend::with_models(&MODELS).await;
    backend.answer_with(move |_, body| {
        let request: Value = serde_json::from_slice(body).unwrap_or_default();
        Answer::json(200, &json!({"worker": worker, "model": request["model"]}))
    });
    backend
}

/// A worker whose one slot has both models, behind hooks that take as long as a real load.
pub(crate) struct Node {
    pub(crate) worker: WorkerProcess,
    pub(crate) backend: FakeBackend,
    _config: NamedTempFile,
    _loaded: TempDir,
}

impl Node {
    pub(crate) async fn start(name: &'static str, url: String, knobs: &Value) -> Self {
        Self::with(name, url, knobs, backend(name).await).await
    }

    /// Starts a worker in front of a backend that the test controls.
    pub(crate) async fn with(name: &'static str, url: String, knobs: &Value, backend: FakeBackend) -> Self {
        let loaded = tempfile::tempdir().expect("a temporary folder");
        let at = loaded.path().display();
        let model = |id: &str| {
            json!({
                "id": id, "url": backend.url(), "maxConcurrency": 2,
                "load": ["/bin/sh", "-c", format!("sleep 0.3; touch {at}/{id}")],
                "evict": ["/bin/rm", "-f", format!("{at}/{id}")],
                "alive": ["/usr/bin/test", "-e", format!("{at}/{id}")],
            })
        };
        let slots = json!([{"id": "gpu0", "driver": "hooks", "models": MODELS.map(model)}]);
        let mut multiplexer = json!({"minResidency": "1ms", "linger": "off", "slots": slots});
        for (knob, value) in knobs.as_object().into_iter().flatten() {
            multiplexer[knob] = value.clone();
        }
        let (config, builder) = worker_with(&json!({"multiplexer": multiplexer}).to_string());
        let builder = builder.relay(url).env("WORKER_SECRET", WORKER_SECRET).env("WORKER_NAME", name);
        Self { worker: builder.start().await, backend, _config: config, _loaded: loaded }
    }

    async fn swaps(&self) -> f64 {
        self.worker.metric(SWAPS).await
    }

    /// Returns the slot's resident if the slot is ready.
    async fn resident(&self) -> Option<String> {
        let slot = self.worker.probe("/healthz").await.json()["slots"][0].clone();
        (slot["state"] == "ready").then(|| slot["resident"].as_str().map(str::to_owned)).flatten()
    }
}

pub(crate) fn chat(model: &str) -> Request {
    Request::post(CHAT, &json!({"model": model, "messages": []}))
}

fn url(relay: &Relay) -> String {
    format!("http://{}", relay.addr())
}

/// Clients that alternate between both models until they are stopped. Every request must succeed.
struct Crowd {
    enough: Arc<AtomicBool>,
    clients: JoinSet<()>,
    answers: watch::Receiver<u32>,
}

impl Crowd {
    fn start(relays: &[&Relay], clients: usize) -> Self {
        let (enough, mut all) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        let (count, answers) = watch::channel(0);
        let count = Arc::new(count);
        for number in 0..clients {
            let relay = relays[number % relays.len()];
            let (addr, log) = (relay.addr(), relay.log().clone());
            let (enough, count) = (Arc::clone(&enough), Arc::clone(&count));
            all.spawn(async move {
                let mut answers = 0;
                while !enough.load(Ordering::SeqCst) {
                    // Neither in step with each other nor strictly alternating.
                    let model = MODELS[(number / 2 + answers / (1 + number % 3)) % 2];
                    let reply = chat(model).fetch(addr, &log).await.with_status(200);
                    assert_eq!(reply.json()["model"], model);
                    answers += 1;
                    count.send_modify(|count| *count += 1);
                    #[expect(clippy::disallowed_methods, reason = "the pace of a client")]
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            });
        }
        Self { enough, clients: all, answers }
    }

    /// Waits for this number of further responses.
    async fn answered(&mut self, more: u32) {
        let until = *self.answers.borrow() + more;
        self.answers.wait_for(|answers| *answers >= until).await.expect("clients that go on");
    }

    async fn finish(mut self) {
        self.enough.store(true, Ordering::SeqCst);
        while let Some(client) = self.clients.join_next().await {
            client.expect("every request was answered");
        }
    }
}

/// Returns each worker's number of swaps and its resident.
async fn states_of(nodes: &[Node]) -> Vec<(f64, Option<String>)> {
    let mut states = Vec::new();
    for node in nodes {
        states.push((node.swaps().await, node.resident().await));
    }
    states
}

fn is_a_model_each(states: &[(f64, Option<String>)]) -> bool {
    let residents: BTreeSet<_> = states.iter().filter_map(|(_, resident)| resident.as_deref()).collect();
    residents == BTreeSet::from(MODELS)
}

/// Checks that both workers settle on one model each under mixed load: hundreds of responses arrive without a swap.
/// They stay so while it lasts, and have loaded at most `most` times in total before.
async fn check_settles(relays: &[&Relay], nodes: &[Node], most: f64) {
    let mut crowd = Crowd::start(relays, 8);
    let rest = async {
        let mut states = states_of(nodes).await;
        loop {
            crowd.answered(300).await;
            let now = states_of(nodes).await;
            if now == states && is_a_model_each(&now) {
                return now;
            }
            states = now;
        }
    };
    let rest = within_for(LONG, "a model on each worker, and no more swaps", relays[0].log(), rest).await;
    within_for(LONG, "a thousand more answers", relays[0].log(), crowd.answered(1000)).await;
    assert_eq!(states_of(nodes).await, rest, "swaps after the fleet had settled");
    crowd.finish().await;
    let loads: f64 = rest.iter().map(|(swaps, _)| swaps).sum();
    assert!(loads <= most, "{loads} loads before the fleet settled");
}

#[tokio::test]
async fn two_workers_settle_on_one_model_each() {
    let relay = Relay::start().await;
    let mut nodes = Vec::new();
    for name in ["one", "two"] {
        nodes.push(Node::start(name, url(&relay), &json!({})).await);
    }
    relay.wait_for_workers(2).await;
    check_settles(&[&relay], &nodes, 2.0).await;
}

/// Each relay chooses by itself. The workers' reports, and the common order, make their choices consistent.
#[tokio::test]
async fn workers_of_two_relays_settle_on_models() {
    let relay = || Relay::builder().env("RELAY_COUNT", "2").start();
    let (one, two) = tokio::join!(relay(), relay());
    let front = Balancer::start(&[&one, &two]).await;
    let mut nodes = Vec::new();
    for name in ["one", "two"] {
        nodes.push(Node::start(name, front.url(), &json!({})).await);
        // One after the other: two workers that dial in turn may each be led to the relay that they already have,
        // repeatedly.
        for relay in [&one, &two] {
            relay.wait_for_workers(nodes.len()).await;
        }
    }
    // Before they learn of each other's choice, both relays may request different models from one worker. Both workers
    // may then begin with the same one, and one of them switches to the other. On a machine that delays their messages
    // for as long as a load takes, this may happen a few more times, but not indefinitely.
    check_settles(&[&one, &two], &nodes, 8.0).await;
}

/// The swap continues while the link is down, and requests that waited at the relay are served over the next one.
#[tokio::test]
async fn link_lost_during_swap_loses_no_response() {
    let relay = Relay::start().await;
    let front = Balancer::start(&[&relay]).await;
    let node = Node::start("one", front.url(), &json!({})).await;
    wait_for_model(&relay, "a").await;
    relay.fetch(chat("a")).await.with_status(200);
    node.backend.set_healthy(false);
    let pending = relay.begin(chat("b"));
    let state = || async { node.worker.probe("/healthz").await.json()["slots"][0]["state"].clone() };
    relay.eventually("the swap is under way", || async { state().await == "loading" }).await;
    front.cut();
    relay.wait_for_workers(0).await;
    relay.wait_for_workers(1).await;
    node.backend.set_healthy(true);
    assert_eq!(pending.reply().await.with_status(200).json()["model"], "b");
    assert_eq!(node.swaps().await, 2.0, "one load of each model");
}

/// Another worker has the model too, and could have served it.
#[tokio::test]
async fn begun_response_is_never_requested_again() {
    let relay = Relay::start().await;
    let mut one = Node::with("one", url(&relay), &json!({}), FakeBackend::with_models(&MODELS).await).await;
    wait_for_model(&relay, "a").await;
    let id = id_at(&relay, "one").await;
    let body = json!({"model": "a", "stream": true, "messages": []});
    let pending = relay.begin(Request::post(CHAT, &body));
    let mut call = one.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: {\"text\": \"first\"}\n\n").await;
    let mut response = pending.response().await;
    response.read_until("first").await;
    let two = Node::start("two", url(&relay), &json!({})).await;
    relay.wait_for_workers(2).await;
    load_once_it_has_started(&relay, &id_at(&relay, "two").await, "a").await;
    order(&relay, &id, &json!({"command": "unload", "model": "a", "mode": "now"})).await;
    let reply = response.read_to_end().await;
    assert!(reply.broken_stream().contains("severed_by_swap"), "{}", reply.text());
    call.closed().await;
    // The next one goes there; the first would have too.
    assert_eq!(relay.fetch(chat("a")).await.with_status(200).json()["worker"], "two");
    assert_eq!(
        (two.backend.request_count(CHAT), one.backend.request_count(CHAT)),
        (1, 1),
        "a request was sent again after its first byte"
    );
}

/// Sends a command, and waits until it has succeeded.
pub(crate) async fn order(relay: &Relay, worker_id: &str, body: &Value) {
    assert_eq!(outcome(relay, worker_id, body).await, json!({"done": true, "ok": true}), "{body}");
}

/// Sends a command, and waits for its result.
pub(crate) async fn outcome(relay: &Relay, worker_id: &str, body: &Value) -> Value {
    let reply = relay.admin_post(&format!("/admin/workers/{worker_id}/command"), body).await.with_status(202);
    let op = format!("/admin/ops/{}", reply.json()["op_id"].as_str().expect("an op_id"));
    relay.eventually("the operation is done", || async { relay.admin_json(&op).await["done"] == true }).await;
    relay.admin_json(&op).await
}

/// A slot accepts no commands before it has checked what it held before its worker started.
pub(crate) async fn load_once_it_has_started(relay: &Relay, worker_id: &str, model: &str) {
    let load = json!({"command": "load", "model": model});
    let loaded = || async { outcome(relay, worker_id, &load).await["ok"] == true };
    relay.eventually("the model is loaded", loaded).await;
}

/// Returns the relay's id of the worker of this name: each relay assigns its own.
pub(crate) async fn id_at(relay: &Relay, name: &str) -> String {
    let workers = relay.workers().await;
    let worker = workers.iter().find(|worker| worker["worker_name"] == name).expect("a worker of this name");
    worker["worker_id"].as_str().expect("an id").to_owned()
}

/// An older worker holds its model permanently: nothing is loaded for what it can serve, and nothing is sent twice.
#[tokio::test]
async fn model_served_by_older_worker_is_not_loaded() {
    let relay = Relay::start().await;
    let node = Node::start("one", url(&relay), &json!({})).await;
    wait_for_model(&relay, "b").await;
    let mut old = relay.worker(&["a"], 1).await;
    for _ in 0..3 {
        let pending = relay.begin(chat("a"));
        let job = old.expect_request().await;
        old.answer(&job, &json!({"worker": "old"})).await;
        assert_eq!(pending.reply().await.with_status(200).json()["worker"], "old");
    }
    assert_eq!(relay.fetch(chat("b")).await.with_status(200).json()["worker"], "one");
    assert_eq!((node.swaps().await, node.resident().await.as_deref()), (1.0, Some("b")));
    // Once the older one has gone, the model is loaded where possible.
    old.vanish();
    assert_eq!(relay.fetch(chat("a")).await.with_status(200).json()["worker"], "one");
}
