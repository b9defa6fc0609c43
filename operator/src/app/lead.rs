//! Leader election: the leader's controllers write, the others wait. All replicas serve the webhook.
//!
//! The leader renews the lease with one request: an update of the version that it wrote last. The API server rejects it
//! if anybody else has written the lease since, so an accepted renewal also proves that the replica still leads. The
//! other replicas read the lease, and acquire it once they have seen no new version for its whole duration. Clocks of
//! different machines are never compared. A lease that a user deletes or shortens, or whose holder a user removes, does
//! not make a second leader: the others wait until the leader must have noticed or stopped. A user who clears the whole
//! lease, or makes another replica its holder, has two leaders until the first one's next renewal, at most 10 s later.
//!
//! As with every lease, a process that is suspended as a whole for longer than the deadline may send one more request
//! when it continues, before it notices that it leads no more. Both leaders would write the same objects.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client, Resource};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::cluster::apply::display_kube_error;
use crate::resources::names;

mod view;

use view::{LeaseView, Next};

/// A leader that was killed is replaced after at most this time, and one more [`RENEW_INTERVAL`].
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// The interval between two renewals, and between two reads of the other replicas.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// A leader that could not renew the lease for this long stops leading: 5 s before another replica can acquire it.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// The pause after a request that failed.
const RETRY: Duration = Duration::from_secs(2);
/// The timeout for one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// The election.
pub struct Election {
    /// True while this replica leads.
    pub leading: watch::Receiver<bool>,
    candidate: JoinHandle<()>,
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
pub fn stand(client: &Client, candidacy: Candidacy) -> Election {
    let leases = Api::namespaced(client.clone(), &candidacy.namespace);
    let candidate = Candidate { leases, client: client.clone(), candidacy };
    let (sender, leading) = watch::channel(false);
    Election { leading, candidate: tokio::spawn(candidate.run(sender)) }
}

/// Acquires and renews the lease.
struct Candidate {
    leases: Api<Lease>,
    client: Client,
    candidacy: Candidacy,
}

impl Candidate {
    async fn run(self, leading: watch::Sender<bool>) {
        let mut view = LeaseView::default();
        loop {
            let pause = self.step_in_time(&mut view, &leading).await;
            let left = view.until_deadline(Instant::now());
            publish(&leading, left.is_some());
            tokio::select! {
                () = tokio::time::sleep(pause.min(left.unwrap_or(pause))) => {}
                () = leading.closed() => break,
            }
        }
        self.release(view).await;
    }

    /// Takes one step, and stops leading at the deadline: a slow request does not prolong it.
    async fn step_in_time(&self, view: &mut LeaseView, leading: &watch::Sender<bool>) -> Duration {
        let left = view.until_deadline(Instant::now());
        let mut step = pin!(self.step(view));
        if let Some(left) = left
            && let Ok(pause) = tokio::time::timeout(left, &mut step).await
        {
            return pause;
        }
        publish(leading, false);
        step.await
    }

    /// Renews or reads the lease, and returns the pause until the next time.
    async fn step(&self, view: &mut LeaseView) -> Duration {
        let began = Instant::now();
        if let Some(held) = view.held() {
            match self.write(renewed(held)).await {
                Ok(lease) => {
                    view.acquired(lease, began);
                    return RENEW_INTERVAL;
                }
                // Another writer, or the lease was deleted.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                Err(error) => return self.failed("renew", &error),
            }
        }
        match timed(self.leases.get_opt(&self.candidacy.lease)).await {
            Ok(lease) => self.act(view, lease).await,
            Err(error) => {
                view.observe_nothing();
                self.failed("read", &error)
            }
        }
    }

    async fn act(&self, view: &mut LeaseView, lease: Option<Lease>) -> Duration {
        let began = Instant::now();
        let acquired = match view.observe(lease, &self.candidacy.instance, began) {
            Next::Wait(pause) => return pause,
            Next::Acquire(lease) => self.write(acquired(*lease, &self.candidacy.instance)).await,
            Next::Create => {
                tracing::info!(lease = self.candidacy.lease, "creating the lease");
                self.create().await
            }
        };
        match acquired {
            Ok(lease) => {
                view.acquired(lease, began);
                RENEW_INTERVAL
            }
            // Another replica was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => RETRY,
            Err(error) => self.failed("acquire", &error),
        }
    }

    fn failed(&self, what: &'static str, error: &kube::Error) -> Duration {
        let (lease, error) = (&self.candidacy.lease, display_kube_error(error));
        tracing::warn!(lease, error, "failed to {what} the lease; retrying");
        RETRY
    }

    async fn write(&self, lease: Lease) -> kube::Result<Lease> {
        timed(self.leases.replace(&self.candidacy.lease, &PostParams::default(), &lease)).await
    }

    /// Creates the lease, held by this replica.
    async fn create(&self) -> kube::Result<Lease> {
        let Candidacy { lease, owner, instance, .. } = &self.candidacy;
        let owner = if owner.is_empty() {
            None
        } else {
            let configurations: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
            timed(configurations.get_opt(owner)).await?.and_then(|configuration| configuration.owner_ref(&()))
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
        let held = acquired(Lease { metadata, spec: None }, instance);
        timed(self.leases.create(&PostParams::default(), &held)).await
    }

    /// Releases the lease's newest version, if this replica holds it.
    async fn release_newer(&self) -> kube::Result<()> {
        let lease = timed(self.leases.get(&self.candidacy.lease)).await?;
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_ref());
        if holder == Some(&self.candidacy.instance) { self.write(vacated(lease)).await.map(drop) } else { Ok(()) }
    }

    /// Removes the holder, so that another replica leads with its next read.
    async fn release(&self, view: LeaseView) {
        let Some(lease) = view.held() else { return };
        let released = match self.write(vacated(lease)).await {
            // The last renewal may have been stored without a response, or another writer annotated the lease.
            Err(kube::Error::Api(status)) if status.code == 409 => self.release_newer().await,
            other => other.map(drop),
        };
        match released {
            Ok(()) => {}
            Err(error) => {
                let error = display_kube_error(&error);
                tracing::warn!(error, "failed to release the lease; it will expire");
            }
        }
    }
}

/// Removes holder and duration.
fn vacated(mut lease: Lease) -> Lease {
    let transitions = lease.spec.take().and_then(|spec| spec.lease_transitions);
    lease.spec = Some(LeaseSpec { lease_transitions: transitions, ..LeaseSpec::default() });
    lease
}

fn publish(leading: &watch::Sender<bool>, leads: bool) {
    leading.send_if_modified(|now| std::mem::replace(now, leads) != leads);
}

/// Limits a request to [`REQUEST_TIMEOUT`].
async fn timed<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(result) => result,
        Err(elapsed) => Err(kube::Error::Service(elapsed.into())),
    }
}

fn acquired(mut lease: Lease, instance: &str) -> Lease {
    let now = Timestamp::now();
    let before = lease.spec.take().unwrap_or_default();
    let is_new = before.holder_identity.as_deref() != Some(instance);
    let acquire_time = before.acquire_time.filter(|_| !is_new).unwrap_or(MicroTime(now));
    lease.spec = Some(LeaseSpec {
        holder_identity: Some(instance.to_owned()),
        lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
        acquire_time: Some(acquire_time),
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(before.lease_transitions.unwrap_or_default().saturating_add(i32::from(is_new))),
        ..before
    });
    lease
}

fn renewed(mut lease: Lease) -> Lease {
    if let Some(spec) = &mut lease.spec {
        spec.renew_time = Some(MicroTime(Timestamp::now()));
    }
    lease
}

impl Election {
    /// Releases the lease, so that another replica leads soon. All other users of `leading` must have stopped before.
    pub async fn resign(self) {
        drop(self.leading);
        if tokio::time::timeout(LEASE_DURATION, self.candidate).await.is_err() {
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
