//! Both real programs: relay and worker, in front of a backend played by hand.

use serde_json::Value;

use super::{WorkerBuilder, WorkerProcess};
use crate::fake_backend::FakeBackend;
use crate::relay::{Relay, RelayBuilder, WORKER_SECRET};

/// A relay and a worker that serves model `m` through it.
pub struct Stack {
    /// The relay.
    pub relay: Relay,
    /// The worker.
    pub worker: WorkerProcess,
    /// The backend.
    pub backend: FakeBackend,
}

impl Stack {
    /// Starts both with every setting at its default, except for four slots.
    pub async fn start() -> Self {
        Self::with(|relay| relay, |worker| worker).await
    }

    /// Starts both with further settings.
    pub async fn with(
        relay: impl FnOnce(RelayBuilder) -> RelayBuilder,
        worker: impl FnOnce(WorkerBuilder) -> WorkerBuilder,
    ) -> Self {
        let relay = relay(Relay::builder().env("LOG_LEVEL", "debug")).start().await;
        let backend = FakeBackend::start().await;
        let worker = worker(Self::worker_of(&relay, &backend)).start().await;
        let stack = Self { relay, worker, backend };
        stack.wait_for_model("m").await;
        stack
    }

    /// Builds a further worker of this relay in front of this backend.
    #[must_use]
    pub fn worker_of(relay: &Relay, backend: &FakeBackend) -> WorkerBuilder {
        WorkerProcess::builder()
            .relay(relay.url())
            .backend(backend.url())
            .env("WORKER_SECRET", WORKER_SECRET)
            .concurrency(4)
    }

    /// Waits until a worker serves the model.
    pub async fn wait_for_model(&self, model: &str) {
        wait_for_model(&self.relay, model).await;
    }
}

/// Waits until a worker of the relay serves the model. Uses the admin API: `/v1/models` may require an API key.
pub async fn wait_for_model(relay: &Relay, model: &str) {
    let serves = |worker: &Value| worker["models"].as_array().is_some_and(|models| models.iter().any(|it| it == model));
    let served = || async { relay.workers().await.iter().any(serves) };
    relay.eventually(&format!("a worker with model {model}"), served).await;
}
