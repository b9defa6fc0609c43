//! Clients that keep a relay busy, and long timeouts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use modelrelay_harness::client::Request;
use modelrelay_harness::process::Log;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::{poll_for, poll_until};
use serde_json::json;

/// The timeout for a pause of the worker, a rotation, or dozens of requests on a slow machine.
const LONG: Duration = Duration::from_secs(30);

/// Clients that send requests continuously until they are stopped.
#[derive(Default)]
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<Client>,
}

struct Client {
    answered: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Load {
    pub(crate) fn start(relay: &Relay, clients: usize) -> Self {
        let mut load = Self::default();
        load.add(relay, clients);
        load
    }

    /// Adds this number of clients of this relay.
    pub(crate) fn add(&mut self, relay: &Relay, clients: usize) {
        for _ in 0..clients {
            let answered = Arc::new(AtomicUsize::new(0));
            let (stop, count, to) = (Arc::clone(&self.stop), Arc::clone(&answered), relay.addr());
            let task = tokio::spawn(async move {
                let log = Log::new("a client");
                while !stop.load(Ordering::SeqCst) {
                    let request = Request::post("/v1/chat/completions", &json!({"model": "m"}));
                    let _ = request.fetch(to, &log).await.with_status(200);
                    count.fetch_add(1, Ordering::SeqCst);
                    #[expect(clippy::disallowed_methods, reason = "the pace of a client")]
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            });
            self.clients.push(Client { answered, task });
        }
    }

    /// Waits until each client has received this number of further responses.
    pub(crate) async fn serves_everyone(&self, answers: usize) {
        let answered = |client: &Client| client.answered.load(Ordering::SeqCst);
        let before: Vec<usize> = self.clients.iter().map(answered).collect();
        let gained = || self.clients.iter().zip(&before).map(|(client, before)| answered(client) - before);
        // A failed client is detected when it is joined.
        let is_done = || gained().all(|gained| gained >= answers) || self.has_failed();
        let done = poll_for(LONG, async || is_done().then_some(())).await;
        assert!(done.is_some(), "a client starves: {:?} of {answers} responses within {LONG:?}", gained().min());
    }

    fn has_failed(&self) -> bool {
        self.clients.iter().any(|client| client.task.is_finished())
    }

    pub(crate) async fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        for client in self.clients {
            client.task.await.expect("every request was answered with 200");
        }
    }
}

/// Waits for a condition that may take longer than usual.
pub(crate) async fn eventually(what: &str, relay: &Relay, condition: impl AsyncFnMut() -> bool) {
    poll_until(LONG, what, relay.log(), condition).await;
}
