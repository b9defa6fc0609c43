//! A client that sends requests continuously, and its waiting time: a measure of the disturbance by others.

use std::time::{Duration, Instant};

use modelrelay_harness::{
    client::{Connection, Request},
    relay::Relay,
    worker::FakeWorker,
};
use serde_json::json;
use tokio::task::JoinHandle;

/// The model that only the neighbour requests.
const MODEL: &str = "neighbour";

/// A client whose worker responds at once.
#[derive(Debug)]
pub(crate) struct Neighbour {
    connection: Connection,
    worker: JoinHandle<()>,
}

impl Neighbour {
    /// Creates a neighbour with its own worker.
    pub(crate) async fn of(relay: &Relay) -> Self {
        let worker = relay.core1_worker(&[MODEL], 4).await;
        let connection = Connection::open(relay.addr(), relay.log()).await;
        Self { connection, worker: tokio::spawn(answer_all(worker)) }
    }

    /// Returns the duration of one request.
    pub(crate) async fn send_request(&mut self) -> Duration {
        let start = Instant::now();
        let response = self.connection.send(Request::post("/v1/chat/completions", &json!({"model": MODEL}))).await;
        assert_eq!(response.read_to_end().await.with_status(200).json()["answer"], 42);
        start.elapsed()
    }

    /// Returns the 99th percentile and the maximum of this number of requests.
    pub(crate) async fn send_requests(&mut self, times: usize) -> (Duration, Duration) {
        let mut waits = Vec::new();
        for _ in 0..times {
            waits.push(self.send_request().await);
        }
        waits.sort();
        (waits[times * 99 / 100], waits[times - 1])
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

/// Responds to every request until the test ends.
pub(crate) async fn answer_all(mut worker: FakeWorker) {
    loop {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({"answer": 42})).await;
    }
}
