//! The usual setup: a real worker between a relay and a backend played by hand.

use serde_json::json;

use super::{WorkerBuilder, WorkerProcess};
use crate::fake_backend::{Answer, FakeBackend};
use crate::fake_relay::{Ack, FakeRelay, RelayLink, RequestSpec};

/// A registered worker that serves model `m`, and its two peers.
pub struct Rig {
    /// The relay, for further dials.
    pub relay: FakeRelay,
    /// The worker's first link.
    pub link: RelayLink,
    /// The backend.
    pub backend: FakeBackend,
    /// The worker.
    pub worker: WorkerProcess,
}

impl Rig {
    /// Starts a worker of four slots on a `core1` link, ready to serve.
    pub async fn core1() -> Self {
        Self::with(&Ack::core1(), 4, |worker| worker).await
    }

    /// Starts a worker of four slots on the link of an old relay without capabilities.
    pub async fn old() -> Self {
        Self::with(&Ack::old(), 4, |worker| worker).await
    }

    /// Starts a worker of `slots` slots, with its link acknowledged by `ack` and further `settings`; ready to serve.
    pub async fn with(ack: &Ack, slots: u32, settings: impl FnOnce(WorkerBuilder) -> WorkerBuilder) -> Self {
        let mut relay = FakeRelay::start().await;
        let backend = FakeBackend::start().await;
        let builder = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).concurrency(slots);
        let worker = settings(builder).start().await;
        let mut link = relay.accept_with(ack).await;
        link.ready(&["m"], u64::from(slots)).await;
        Self { relay, link, backend, worker }
    }

    /// Shows with one whole exchange that the link and the backend work.
    ///
    /// # Panics
    /// If they do not.
    pub async fn still_serves(&mut self) {
        let request = self.link.send_request(&RequestSpec::chat("m"));
        self.backend.call().await.answer_json(200, &json!({"still": "here"})).await;
        let reply = self.link.reply(&request).await;
        assert_eq!((reply.status, reply.json()), (200, json!({"still": "here"})));
    }

    /// The same as [`Rig::still_serves`], if an earlier request may or may not have reached the backend.
    ///
    /// # Panics
    /// If link or backend do not work.
    pub async fn still_serves_with_leftovers(&mut self) {
        let request = self.link.send_request(&RequestSpec::chat("m").path("/v1/completions"));
        loop {
            let call = self.backend.call().await;
            if call.head.path() == "/v1/completions" {
                call.answer_json(200, &json!({"still": "here"})).await;
                break;
            }
        }
        assert_eq!(self.link.reply(&request).await.status, 200);
    }

    /// Sends a request and lets the backend send this response.
    pub async fn answered(&mut self, spec: &RequestSpec, answer: &Answer) -> crate::fake_relay::Reply {
        let request = self.link.send_request(spec);
        self.backend.call().await.answer(answer).await;
        self.link.reply(&request).await
    }
}
