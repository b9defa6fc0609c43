//! The orderly shutdown: not ready, no new requests, all accepted requests completed, workers notified, sockets closed.

use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::GracefulShutdown;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::provider::Provider;
use crate::provider::shared::ProcessPhase;
use crate::provider::worker::close::RELAY_STOPPING;
use crate::state::Relay;
use crate::system::shutdown::StopSignal;

/// How long connections may take for their last bytes after every request has ended.
const LAST_BYTES: Duration = Duration::from_secs(2);

/// The timeout of the last flush: a disk or an API server may be away. Only times of last use are lost.
const LAST_FLUSH: Duration = Duration::from_secs(2);

impl Relay {
    pub(super) async fn drain(self: &Arc<Self>, signal: StopSignal, connections: TaskTracker) {
        let config = self.shared.config.load_full();
        info!(signal = signal.as_str(), "graceful shutdown");
        // Without a grace period, not even for a moment: a client that has seen the relay as unready must not be accepted.
        if !config.shutdown_grace.is_zero() {
            self.shared.enter(ProcessPhase::Grace);
            tokio::time::sleep(config.shutdown_grace).await;
        }
        self.shared.enter(ProcessPhase::Draining);
        let deadline = Instant::now() + config.drain_timeout;
        for provider in self.all_providers() {
            provider.begin_drain();
        }
        // Workers get requests from the queue until none is left that could still be sent to one of them.
        let settled = self.wait_until(Provider::is_settled, deadline).await;
        self.shared.enter(ProcessPhase::Leaving);
        if settled {
            let left = deadline.saturating_duration_since(Instant::now()).as_secs();
            for link in self.all_providers().iter().flat_map(|provider| provider.links()) {
                link.begin_drain(GracefulShutdown::RELAY_SHUTDOWN, Some(left), None);
            }
        }
        if !(settled && self.wait_until(Provider::is_idle, deadline).await) {
            let left: usize = self.all_providers().iter().map(|provider| provider.live_requests().len()).sum();
            warn!(requests = left, "drain timeout reached");
            for provider in self.all_providers() {
                provider.end_drain();
            }
        }
        for link in self.all_providers().iter().flat_map(|provider| provider.links()) {
            link.close(RELAY_STOPPING);
        }
        self.shared.enter(ProcessPhase::Stopping);
        connections.close();
        if timeout(LAST_BYTES, connections.wait()).await.is_err() {
            warn!("some connections were still open");
        }
        if timeout(LAST_BYTES, self.wait_for_workers()).await.is_err() {
            warn!("some workers were still connected");
        }
        match timeout(LAST_FLUSH, self.keys.flush()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "cannot update the stored API keys"),
            Err(_) => warn!("timed out storing times of last use"),
        }
        info!("stopped");
    }

    /// Waits until `condition` holds for every provider; checks it whenever a response begins or a request ends.
    async fn wait_until(&self, condition: fn(&Provider) -> bool, deadline: Instant) -> bool {
        loop {
            let progress = self.shared.progress.notified();
            if self.all_providers().iter().all(|provider| condition(provider)) {
                return true;
            }
            if timeout_at(deadline, progress).await.is_err() {
                return false;
            }
        }
    }

    async fn wait_for_workers(&self) {
        loop {
            let progress = self.shared.progress.notified();
            if self.all_providers().iter().all(|provider| provider.worker_count() == 0) {
                return;
            }
            progress.await;
        }
    }
}
