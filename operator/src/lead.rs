//! One replica leads: its controllers write, the others wait. All of them serve the webhook.

use std::future::Future;
use std::time::Duration;

use kube::Client;
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A leader that was killed is replaced after so long at most.
const LEASE_SECONDS: u64 = 15;
/// Renewed so long before it ends.
const GRACE_SECONDS: u64 = 5;
/// How long to wait before the lease is asked for again, while the API server refuses.
const RETRY: Duration = Duration::from_secs(2);

/// The election.
pub struct Election {
    /// Whether this replica leads.
    pub leading: watch::Receiver<bool>,
    manager: JoinHandle<kube_lease_manager::Result<LeaseManager>>,
}

/// Takes part in the election, from now until [`Election::resign`].
pub async fn stand(client: &Client, namespace: &str, lease: &str, instance: &str) -> Election {
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
            Ok(manager) => {
                let (leading, manager) = manager.watch().await;
                return Election { leading, manager };
            }
            Err(error) => {
                tracing::warn!(lease, %error, "the lease cannot be had; it is tried again");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

impl Election {
    /// Gives the lease up, so that another replica leads at once.
    pub async fn resign(self) {
        drop(self.leading);
        match tokio::time::timeout(Duration::from_secs(LEASE_SECONDS), self.manager).await {
            Ok(Ok(Ok(_))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(%error, "the lease could not be given up; it ends by itself"),
            Ok(Err(_)) | Err(_) => tracing::warn!("the lease could not be given up in time; it ends by itself"),
        }
    }
}

/// Runs `work` whenever this replica leads, and drops it when it does no longer. Ends with the channel.
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
                // Watches never end by themselves; if they do, they are begun anew, not in a hot loop.
                tracing::warn!("the controllers ended; they start again");
                tokio::time::sleep(RETRY).await;
            }
            over = async { leading.wait_for(|leading| !*leading).await.is_err() } => {
                if over {
                    return;
                }
                tracing::warn!("another replica leads now");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn work_begins_with_the_lease_and_is_dropped_with_it() {
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
