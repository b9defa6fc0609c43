//! The orderly shutdown: not ready, all requests of open connections completed, workers notified, sockets closed.
//!
//! Clients keep connections, and cannot know that a relay is shutting down. So the relay serves what arrives on
//! connections that were open before, ends each with its next response, and closes the idle ones after a while. Workers
//! are notified when no connection is left that may carry a request: from then on they accept none.

use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::GracefulShutdown;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

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
        // Without a grace period, not even for a moment: a client that has seen the relay as unready must not be
        // accepted.
        if !config.shutdown_grace.is_zero() {
            self.shared.enter(ProcessPhase::Grace);
            tokio::time::sleep(config.shutdown_grace).await;
        }
        self.shared.enter(ProcessPhase::Draining);
        let deadline = Instant::now() + config.drain_timeout;
        let finished = self.finish_requests(deadline).await;
        self.shared.enter(ProcessPhase::Leaving);
        for provider in self.all_providers() {
            provider.begin_drain();
        }
        // A connection that may carry a request does not keep workers from being notified.
        if finished || self.has_no_request() {
            let left = deadline.saturating_duration_since(Instant::now()).as_secs();
            for link in self.all_providers().iter().flat_map(|provider| provider.links()) {
                link.begin_drain(GracefulShutdown::RELAY_SHUTDOWN, Some(left), None);
            }
        } else {
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

    /// Waits until no request is left, and no connection that may carry another one. Returns false at the deadline.
    async fn finish_requests(&self, deadline: Instant) -> bool {
        while self.wait_until(Self::expects_no_request, deadline).await {
            // Responses that are complete here: the client may send another request when it has their last bytes, or
            // never read them.
            let has_changed = |relay: &Self| !relay.shared.connections.is_responding() || !relay.expects_no_request();
            let last_bytes = deadline.min(Instant::now() + LAST_BYTES);
            let has_ended = |relay: &Self| !relay.shared.connections.is_responding() && relay.expects_no_request();
            if !self.wait_until(has_changed, last_bytes).await || has_ended(self) {
                return true;
            }
        }
        false
    }

    fn expects_no_request(&self) -> bool {
        !self.shared.connections.expects_requests() && self.has_no_request()
    }

    fn has_no_request(&self) -> bool {
        self.all_providers().iter().all(|provider| provider.is_idle())
    }

    /// Waits until `condition` holds; checks it whenever a response begins, or a request or a connection ends.
    async fn wait_until(&self, condition: impl Fn(&Self) -> bool, deadline: Instant) -> bool {
        loop {
            let progress = self.shared.progress.notified();
            let connections = self.shared.connections.changed();
            if condition(self) {
                return true;
            }
            let changed = async {
                tokio::select! {
                    () = progress => {}
                    () = connections => {}
                }
            };
            if timeout_at(deadline, changed).await.is_err() {
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
