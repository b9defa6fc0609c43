//! Leader election: the leader's controllers write, the others wait. All replicas serve the webhook.

use std::future::Future;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A leader that was killed is replaced after at most this time.
const LEASE_SECONDS: u64 = 15;
/// The lease is renewed this long before it ends: every 5 s.
const GRACE_SECONDS: u64 = 10;
/// The pause before the lease is requested again, while the API server rejects the request.
const RETRY: Duration = Duration::from_secs(2);
/// The interval at which a leader checks that it still holds the lease.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The timeout for one such check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3);
/// A replica that has not seen for this long that it holds the lease stops leading. The lease it saw was renewed 5 s
/// before at most, so no other replica acquires it within the next 10 s.
const TRUST: Duration = Duration::from_secs(8);

/// The election.
pub struct Election {
    /// True while this replica leads.
    pub leading: watch::Receiver<bool>,
    guard: JoinHandle<()>,
}

/// Takes part in the election, from now until [`Election::resign`].
///
/// The library renews the lease, but reports a loss only once it has seen another holder. Leadership therefore depends
/// on a recent, separate read from the API server: a leader that is cut off stops before another replica starts.
pub async fn stand(client: &Client, namespace: &str, lease: &str, instance: &str) -> Election {
    let (manager, candidate) = candidate(client, namespace, lease, instance).await;
    let (sender, leading) = watch::channel(false);
    let guard = Guard {
        leases: Api::namespaced(client.clone(), namespace),
        client: client.clone(),
        namespace: namespace.to_owned(),
        lease: lease.to_owned(),
        instance: instance.to_owned(),
    };
    Election { leading, guard: tokio::spawn(guard.run(sender, manager, candidate)) }
}

type Candidate = JoinHandle<kube_lease_manager::Result<LeaseManager>>;

async fn candidate(
    client: &Client,
    namespace: &str,
    lease: &str,
    instance: &str,
) -> (watch::Receiver<bool>, Candidate) {
    loop {
        let manager = LeaseManagerBuilder::new(client.clone(), lease)
            .with_namespace(namespace)
            .with_identity(instance)
            .with_duration(LEASE_SECONDS)
            .with_grace(GRACE_SECONDS)
            .with_field_manager(format!("modelrelay-operator-lease-{instance}"))
            .build()
            .await;
        match manager {
            Ok(manager) => return manager.watch().await,
            Err(error) => {
                tracing::warn!(lease, %error, "failed to acquire the lease; retrying");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Compares the library's state with the API server's.
struct Guard {
    leases: Api<Lease>,
    client: Client,
    namespace: String,
    lease: String,
    instance: String,
}

/// The holder of the lease according to one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Me,
    Other,
    /// There is no lease: the library never creates it again by itself.
    Gone,
    Unknown,
}

impl Guard {
    async fn run(self, leading: watch::Sender<bool>, mut held: watch::Receiver<bool>, mut manager: Candidate) {
        let mut trust = Trust::default();
        loop {
            let holder = self.read_holder().await;
            if holder == Holder::Gone || manager.is_finished() {
                tracing::warn!(lease = self.lease, "lease was deleted; recreating it");
                drop(held);
                manager.abort();
                (held, manager) = candidate(&self.client, &self.namespace, &self.lease, &self.instance).await;
            }
            let leads = trust.leads(holder, Instant::now());
            leading.send_if_modified(|now| std::mem::replace(now, leads) != leads);
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                // The lease was won or lost: no reason to wait.
                _ = held.changed() => {}
                () = leading.closed() => break,
            }
        }
        // The library releases the lease when its receiver is dropped.
        drop(held);
        match tokio::time::timeout(Duration::from_secs(GRACE_SECONDS), manager).await {
            Ok(Ok(Ok(_))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(%error, "failed to release the lease; it will expire"),
            Ok(Err(_)) | Err(_) => tracing::warn!("timed out releasing the lease; it will expire"),
        }
    }

    async fn read_holder(&self) -> Holder {
        match tokio::time::timeout(CHECK_TIMEOUT, self.leases.get_opt(&self.lease)).await {
            Ok(Ok(Some(lease))) => {
                let holder = lease.spec.and_then(|spec| spec.holder_identity);
                if holder.as_deref() == Some(&self.instance) { Holder::Me } else { Holder::Other }
            }
            Ok(Ok(None)) => Holder::Gone,
            Ok(Err(_)) | Err(_) => Holder::Unknown,
        }
    }
}

/// The trust in the last successful read, and when it ends.
#[derive(Default)]
struct Trust {
    seen: Option<Instant>,
}

impl Trust {
    fn leads(&mut self, holder: Holder, now: Instant) -> bool {
        match holder {
            Holder::Me => self.seen = Some(now),
            Holder::Other | Holder::Gone => self.seen = None,
            Holder::Unknown => {}
        }
        self.seen.is_some_and(|seen| now.duration_since(seen) < TRUST)
    }
}

impl Election {
    /// Releases the lease, so that another replica leads at once. All other users of `leading` must have stopped
    /// before.
    pub async fn resign(self) {
        drop(self.leading);
        if tokio::time::timeout(Duration::from_secs(LEASE_SECONDS), self.guard).await.is_err() {
            tracing::warn!("timed out releasing the lease; it will expire");
        }
    }
}

/// Runs `work` whenever this replica leads, and drops it when the replica stops leading. Ends with the channel.
pub async fn while_leading<F>(mut leading: watch::Receiver<bool>, mut work: impl FnMut() -> F)
where
    F: Future<Output = ()>,
{
    loop {
        if leading.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        tracing::info!("leading");
        tokio::select! {
            () = work() => {
                // Watches never end by themselves; if they do, they are restarted, with a pause.
                tracing::warn!("controllers ended; restarting them");
                tokio::time::sleep(RETRY).await;
            }
            over = async { leading.wait_for(|leading| !*leading).await.is_err() } => {
                if over {
                    return;
                }
                tracing::warn!("another replica is the leader now");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn leader_steps_down_before_unrenewed_lease_expires() {
        let (start, mut trust) = (Instant::now(), Trust::default());
        assert!(!trust.leads(Holder::Unknown, start));
        assert!(trust.leads(Holder::Me, start));
        assert!(trust.leads(Holder::Unknown, start + TRUST / 2));
        assert!(!trust.leads(Holder::Unknown, start + TRUST));
        assert!(trust.leads(Holder::Me, start + TRUST));
        assert!(!trust.leads(Holder::Other, start + TRUST));
        assert!(!trust.leads(Holder::Unknown, start + TRUST), "another holder was seen last");
        assert!(trust.leads(Holder::Me, start + TRUST));
        assert!(!trust.leads(Holder::Gone, start + TRUST));
    }

    #[tokio::test]
    async fn work_starts_with_lease_and_stops_without_it() {
        struct Running(Arc<AtomicUsize>);
        impl Drop for Running {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        let running = Arc::new(AtomicUsize::new(0));
        let (sender, receiver) = watch::channel(false);
        let counter = running.clone();
        let task = tokio::spawn(while_leading(receiver, move || {
            let counter = counter.clone();
            async move {
                counter.fetch_add(1, Ordering::SeqCst);
                let _running = Running(counter);
                std::future::pending::<()>().await;
            }
        }));
        let until = async |count: usize| {
            while running.load(Ordering::SeqCst) != count {
                tokio::task::yield_now().await;
            }
        };
        sender.send_replace(true);
        until(1).await;
        sender.send_replace(false);
        until(0).await;
        sender.send_replace(true);
        until(1).await;
        drop(sender);
        task.await.unwrap();
        assert_eq!(running.load(Ordering::SeqCst), 0);
    }
}
