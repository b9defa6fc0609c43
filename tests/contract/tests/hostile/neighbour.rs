//! A client that asks again and again, and what it waits: whom the others may disturb.

use std::time::{Duration, Instant};

use modelrelay_harness::{
    client::{Connection, Request},
    relay::Relay,
    worker::FakeWorker,
};
use serde_json::json;
use tokio::task::JoinHandle;

/// The model that only the neighbour asks for.
const MODEL: &str = "neighbour";

/// Answers at once.
#[derive(Debug)]
pub(crate) struct Neighbour {
    connection: Connection,
    worker: JoinHandle<()>,
}

impl Neighbour {
    /// With a worker of its own.
    pub(crate) async fn of(relay: &Relay) -> Self {
        let worker = relay.core1_worker(&[MODEL], 4).await;
        let connection = Connection::open(relay.addr(), relay.log()).await;
        Self { connection, worker: tokio::spawn(answer_all(worker)) }
    }

    /// One question's time.
    pub(crate) async fn ask(&mut self) -> Duration {
        let asked = Instant::now();
        let response = self.connection.send(Request::post("/v1/chat/completions", &json!({"model": MODEL}))).await;
        assert_eq!(response.read_to_end().await.with_status(200).json()["answer"], 42);
        asked.elapsed()
    }

    /// The 99th percentile of so many questions, and the slowest.
    pub(crate) async fn ask_often(&mut self, times: usize) -> (Duration, Duration) {
        let mut waits = Vec::new();
        for _ in 0..times {
            waits.push(self.ask().await);
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

/// Answers every request until the test ends.
pub(crate) async fn answer_all(mut worker: FakeWorker) {
    loop {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({"answer": 42})).await;
    }
}
