//! Leader election: the leader's controllers write, the others wait. All replicas serve the webhook.

use std::future::Future;
use std::pin::pin;
use std::time::{Duration, Instant};

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client, Resource};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::resources::names;

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

/// A missing lease is left to its leader for this long: it looks every [`CHECK_INTERVAL`], and recreates the lease.
const FIRST_CHANCE: Duration = Duration::from_millis(2500);

/// The election.
pub struct Election {
    /// True while this replica leads.
    pub leading: watch::Receiver<bool>,
    guard: JoinHandle<()>,
}

/// The lease, and the replica that wants it.
#[derive(Clone, Debug)]
pub struct Candidacy {
    /// The namespace of the lease.
    pub namespace: String,
    /// The name of the lease.
    pub lease: String,
    /// The replica's name.
    pub instance: String,
    /// The webhook configuration that owns the lease, so that the lease is deleted with the release; empty for none.
    pub owner: String,
}

/// Takes part in the election, from now until [`Election::resign`].
///
/// The library renews the lease, but reports a loss only once it has seen another holder. Leadership therefore depends
/// on a recent, separate read from the API server: a leader that is cut off stops before another replica starts.
pub async fn stand(client: &Client, candidacy: Candidacy) -> Election {
    let guard =
        Guard { leases: Api::namespaced(client.clone(), &candidacy.namespace), client: client.clone(), candidacy };
    // The first installation, or an upgrade from a release whose chart contained the lease: Helm deletes it while a
    // leader runs.
    if guard.read_holder().await == Holder::Gone {
        tokio::time::sleep(FIRST_CHANCE).await;
    }
    let (held, manager) = guard.register().await;
    let (sender, leading) = watch::channel(false);
    Election { leading, guard: tokio::spawn(guard.run(sender, held, manager)) }
}

type Candidate = JoinHandle<kube_lease_manager::Result<LeaseManager>>;

/// Compares the library's state with the API server's.
struct Guard {
    leases: Api<Lease>,
    client: Client,
    candidacy: Candidacy,
}

/// The holder of the lease according to one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Me,
    Other,
    /// It has no holder, or none yet after it was recreated.
    Vacant,
    /// There is no lease: the library never creates it again by itself.
    Gone,
    Unknown,
}

impl Guard {
    /// Starts the library, which acquires the lease and renews it. Repeats this until the API server accepts it.
    async fn register(&self) -> (watch::Receiver<bool>, Candidate) {
        let Candidacy { namespace, lease, instance, .. } = &self.candidacy;
        loop {
            let manager = async {
                self.create().await?;
                let manager = LeaseManagerBuilder::new(self.client.clone(), lease)
                    .with_namespace(namespace)
                    .with_identity(instance)
                    .with_duration(LEASE_SECONDS)
                    .with_grace(GRACE_SECONDS)
                    .with_field_manager(format!("modelrelay-operator-lease-{instance}"));
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(manager.build().await?)
            };
            match manager.await {
                Ok(manager) => return manager.watch().await,
                Err(error) => {
                    tracing::warn!(lease, %error, "failed to acquire the lease; retrying");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// Creates the lease if there is none.
    async fn create(&self) -> Result<(), kube::Error> {
        let Candidacy { lease, owner, .. } = &self.candidacy;
        if self.leases.get_opt(lease).await?.is_some() {
            return Ok(());
        }
        let owner = if owner.is_empty() {
            None
        } else {
            let configurations: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
            configurations.get_opt(owner).await?.and_then(|configuration| configuration.owner_ref(&()))
        };
        let labels = [
            ("app.kubernetes.io/name", "modelrelay"),
            ("app.kubernetes.io/part-of", "modelrelay"),
            ("app.kubernetes.io/component", "operator"),
            ("app.kubernetes.io/managed-by", names::MANAGED_BY),
        ];
        let metadata = ObjectMeta {
            name: Some(lease.clone()),
            labels: Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
            owner_references: owner.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        };
        let created = self.leases.create(&PostParams::default(), &Lease { metadata, spec: None }).await;
        match created {
            // Another replica was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            created => created.map(|_| ()),
        }
    }

    async fn run(self, leading: watch::Sender<bool>, mut held: watch::Receiver<bool>, mut manager: Candidate) {
        let mut trust = Trust::default();
        loop {
            let mut holder = self.read_holder().await;
            if holder == Holder::Gone && !*leading.borrow() {
                // Longer than the former leader may go on without a lease.
                tokio::select! {
                    () = tokio::time::sleep(TRUST) => {}
                    () = leading.closed() => {}
                }
                holder = self.read_holder().await;
            }
            if holder == Holder::Gone || manager.is_finished() {
                tracing::warn!(lease = self.candidacy.lease, "lease was deleted; recreating it");
                manager.abort();
                drop(held);
                (held, manager) = self.register_again(&leading, &trust).await;
                holder = self.read_holder().await;
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

    /// Registers, and stops leading if that takes longer than the last read is trusted.
    async fn register_again(&self, leading: &watch::Sender<bool>, trust: &Trust) -> (watch::Receiver<bool>, Candidate) {
        let mut registered = pin!(self.register());
        let in_time = tokio::time::timeout(trust.left(Instant::now()), &mut registered).await;
        if let Ok(registered) = in_time {
            return registered;
        }
        leading.send_if_modified(|now| std::mem::replace(now, false));
        registered.await
    }

    async fn read_holder(&self) -> Holder {
        match tokio::time::timeout(CHECK_TIMEOUT, self.leases.get_opt(&self.candidacy.lease)).await {
            Ok(Ok(Some(lease))) => match lease.spec.and_then(|spec| spec.holder_identity) {
                Some(holder) if holder == self.candidacy.instance => Holder::Me,
                Some(holder) if !holder.is_empty() => Holder::Other,
                Some(_) | None => Holder::Vacant,
            },
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
            Holder::Other => self.seen = None,
            Holder::Vacant | Holder::Gone | Holder::Unknown => {}
        }
        !self.left(now).is_zero()
    }

    /// Returns the time for which the last read is trusted.
    fn left(&self, now: Instant) -> Duration {
        self.seen.map_or(Duration::ZERO, |seen| TRUST.saturating_sub(now.duration_since(seen)))
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
mod tests;
