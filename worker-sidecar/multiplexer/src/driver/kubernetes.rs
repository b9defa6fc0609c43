//! A Deployment per model, in the worker's own namespace: loaded at one replica, unloaded at none.
//!
//! Rules:
//! - A model is unloaded when its Pods are *gone*. A terminating Pod holds its GPU until its last container has ended,
//!   so it is not gone; and an API server that does not respond is no evidence about Pods.
//! - Pods are never deleted, not even by force: that removes the object while its containers may still run on a node
//!   that does not respond, and the next model would be loaded next to them. A Pod that does not end quarantines the
//!   slot.
//! - The multiplexer owns `replicas`. A model that a third party scaled up next to the resident is scaled down again at
//!   the next probe, and the log names what should leave it alone. More than one replica of the resident is only
//!   logged, because its requests run there.
//! - The driver checks that it may scale a Deployment and list its Pods before another model is unloaded for it.
//!
//! Permissions: `get` and `patch` on `deployments/scale`, `list` and `watch` on `pods`; nothing else.

mod access;
mod api;
mod known;
mod pods;
mod watch;

pub use access::Access;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use url::Url;

use super::served::Served;
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;
use api::{Api, Scale, is_absent};
use known::{Known, LEAVE_ALONE};
use pods::{Pod, PodsState, StuckPod};
use watch::Followed;

/// A Deployment that was scaled up and down again before it had a Pod may still get one from a controller that lags
/// behind.
const QUIET: Duration = Duration::from_secs(2);

/// Between two attempts while the API server does not respond.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The driver ends a load itself, this much earlier than the machine would, because it knows why nothing is ready.
const HEADROOM: Duration = Duration::from_secs(2);

/// The reason why a model is not ready is logged once it has lasted this long.
const TELLING_AFTER: Duration = Duration::from_secs(3);

/// The number of Deployments that each probe checks in addition to the resident's; if there are more, they take turns.
const OTHERS_PER_LOOK: usize = 8;

/// A model and its Deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScaledModel {
    /// How its readiness is checked.
    pub served: Served,
    /// The Deployment's name.
    pub deployment: String,
    /// Its URL, for example of a Service. `None`: requests go directly to its ready Pod.
    pub url: Option<Url>,
}

/// The `kubernetes` driver.
#[derive(Debug)]
pub struct KubernetesScale {
    api: Arc<Api>,
    models: Vec<Arc<Known>>,
    /// The time after which the machine abandons a load. Never held over an await.
    load_timeout: Mutex<Duration>,
    /// The index of the next Deployment to check in addition to the resident's.
    turn: AtomicUsize,
    /// Held while these are checked: if it is held, a probe skips the check.
    taking_back: Arc<Semaphore>,
}

impl KubernetesScale {
    /// `load_timeout`: the time after which the machine abandons a load.
    pub fn new(access: Access, models: impl IntoIterator<Item = ScaledModel>, load_timeout: Duration) -> Self {
        Self {
            api: Arc::new(Api::new(access)),
            models: models.into_iter().map(|model| Arc::new(Known::new(model))).collect(),
            load_timeout: Mutex::new(load_timeout),
            turn: AtomicUsize::new(0),
            taking_back: Arc::new(Semaphore::new(1)),
        }
    }

    fn find(&self, model: &Model) -> Result<&Arc<Known>, DriverError> {
        let found = self.models.iter().find(|known| known.served.id == *model);
        found.ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    fn load_timeout(&self) -> MutexGuard<'_, Duration> {
        self.load_timeout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that it may scale the Deployment and list its Pods. Changes nothing.
    async fn rehearse(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.find(model)?;
        let scale = self.api.set_scale(&known.deployment, 1, true).await?;
        self.api.pods(&scale.selector).await.map(|_| ())
    }

    async fn make_ready(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.find(model)?;
        known.life().begin_load();
        let load_timeout = *self.load_timeout();
        let patience = load_timeout.saturating_sub(HEADROOM.min(load_timeout / 10));
        let (mut why, began) = (String::new(), Instant::now());
        match timeout(patience, self.serve(known, &mut why)).await {
            Ok(served) => served,
            Err(_) => Err(DriverError::CannotStart(format!(
                "{}, not ready after {} s: {why}",
                self.api.name(&known.deployment),
                began.elapsed().as_secs()
            ))),
        }
    }

    /// Scales up and waits until its Pod is ready and serves the right model. `why` receives the reason for waiting.
    async fn serve(&self, known: &Arc<Known>, why: &mut String) -> Result<(), DriverError> {
        known.orders.settled().await;
        let (scale, _) = self.scaled_to(known, 1, why).await?;
        let mut pods = Followed::new(&self.api, scale.selector);
        pods.change().await?;
        loop {
            let url = match pods.pods_state() {
                PodsState::Ready(pod) => known.address(pod)?,
                PodsState::StuckPod(stuck) => return Err(self.failure(known, &stuck)),
                PodsState::Waiting(reason) => {
                    *why = reason;
                    // Each load begins without a Pod; only a lasting reason is logged.
                    if let Ok(changed) = timeout(TELLING_AFTER, pods.change()).await {
                        changed?;
                    } else {
                        tracing::info!(model = &*known.served.id, deployment = known.deployment, why, "not ready yet");
                        pods.change().await?;
                    }
                    continue;
                }
            };
            *why = format!("its Pod is ready, but {url} does not respond as expected");
            let client = known.served.client(url.clone());
            tokio::select! {
                ready = known.served.become_ready(&client) => {
                    ready?;
                    known.life().found = Some(url);
                    return Ok(());
                }
                // Without a readiness probe, a Pod is ready long before its model, and may end before that.
                lost = until_lost(&mut pods, known, &url) => lost?,
            }
        }
    }

    /// Retries until the Deployment is scaled. Also returns whether anything had to be changed.
    async fn scaled_to(
        &self,
        known: &Arc<Known>,
        replicas: u32,
        why: &mut String,
    ) -> Result<(Scale, bool), DriverError> {
        loop {
            match self.order(known, replicas).await {
                Err(error @ DriverError::Silent { .. }) => {
                    tracing::info!(deployment = known.deployment, %error, "the Deployment is not scaled yet");
                    *why = error.to_string();
                    sleep(RETRY_PAUSE).await;
                }
                done => return done,
            }
        }
    }

    /// Makes one attempt, which runs to its end even if the caller no longer waits for it.
    async fn order(&self, known: &Arc<Known>, replicas: u32) -> Result<(Scale, bool), DriverError> {
        let (api, deployment) = (Arc::clone(&self.api), known.deployment.clone());
        known.orders.run(async move { set(&api, &deployment, replicas).await }).await
    }

    /// Scales down and waits until none of its Pods is left.
    async fn remove(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.find(model)?;
        known.orders.settled().await;
        known.life().begin_removal();
        match self.scaled_to(known, 0, &mut String::new()).await {
            Err(error) if is_absent(&error) => {}
            done => {
                let (scale, is_changed) = done?;
                // An earlier attempt to unload it may have been abandoned.
                let may_come = is_changed || known.life().is_wanted;
                self.until_gone(scale.selector, may_come).await?;
                self.confirm_down(known).await?;
            }
        }
        known.life().end_removal();
        Ok(())
    }

    /// Waits until no Pod is left. `may_come`: a Pod may still be created; once one was seen, no further one follows.
    async fn until_gone(&self, selector: String, mut may_come: bool) -> Result<(), DriverError> {
        let mut pods = Followed::new(&self.api, selector);
        let mut quiet_until = None;
        loop {
            match (pods.number(), quiet_until) {
                (Some(0), _) if !may_come => return Ok(()),
                (Some(0), None) => quiet_until = Some(Instant::now() + QUIET),
                (Some(0), Some(until)) if until <= Instant::now() => return Ok(()),
                (Some(0), Some(_)) | (None, _) => {}
                (Some(_), _) => may_come = false,
            }
            match quiet_until.filter(|_| may_come) {
                // The end of the quiet time is a change too.
                Some(until) => timeout_at(until, pods.change()).await.unwrap_or(Ok(()))?,
                None => pods.change().await?,
            }
        }
    }

    /// Checks that the Deployment is still scaled to 0: if it was scaled up again in the meantime, its missing Pods
    /// prove nothing.
    async fn confirm_down(&self, known: &Known) -> Result<(), DriverError> {
        let scale = loop {
            match self.api.scale(&known.deployment).await {
                // This is no evidence about the Pods, which are gone.
                Err(error @ DriverError::Silent { .. }) => {
                    tracing::info!(deployment = known.deployment, %error, "its scale is not known yet");
                    sleep(RETRY_PAUSE).await;
                }
                answered => break answered,
            }
        };
        match scale {
            Ok(Scale { replicas: 0, .. }) => Ok(()),
            Err(error) if is_absent(&error) => Ok(()),
            Err(error) => Err(error),
            Ok(Scale { replicas, .. }) => Err(DriverError::NotOurs(format!(
                "{} was scaled to 0 for another model, then to {replicas} externally: {LEAVE_ALONE}",
                self.api.name(&known.deployment)
            ))),
        }
    }

    async fn probe_model(&self, model: &Model) -> Result<Probed, DriverError> {
        let known = self.find(model)?;
        let turn = known.life().turns;
        let query = async {
            let scale = self.api.scale(&known.deployment).await?;
            let list = self.api.pods(&scale.selector).await?;
            Ok((scale, list))
        };
        let (scale, list) = match (query.await, known.found()) {
            (Err(error), _) if is_absent(&error) => return Ok(Probed::gone()),
            // Requests go to the Pod without the API server: while that is unavailable, or denies access, the model is
            // not gone.
            (Err(error), Some(url)) => {
                known.log_refusal(&error);
                return known.probe_at(url).await;
            }
            (queried, _) => queried?,
        };
        known.note_answer();
        if scale.replicas == 0 && !list.pods.iter().any(Pod::is_there) {
            if known.life().is_lost(turn) {
                known.log_external_scaling(&self.api, 0);
            }
            return Ok(Probed::gone());
        }
        let pod = match pods::pods_state(list.pods.iter()) {
            PodsState::Ready(pod) if scale.replicas != 0 => pod,
            PodsState::Ready(_) | PodsState::StuckPod(_) | PodsState::Waiting(_) => return Ok(Probed::default()),
        };
        let url = known.address(pod)?;
        let probed = known.probe_at(url.clone()).await?;
        if probed.ready {
            known.life().see(turn, url);
            if scale.replicas > 1 {
                known.log_external_scaling(&self.api, scale.replicas);
            } else {
                *known.logged_replicas() = None;
            }
            self.scale_down_others(known);
        }
        Ok(probed)
    }

    /// Scales down models that a third party has scaled up next to a serving model: its slot holds one. Probes do not
    /// wait for this: a slow API server would make the resident seem silent.
    fn scale_down_others(&self, resident: &Arc<Known>) {
        let Ok(taking_back) = Arc::clone(&self.taking_back).try_acquire_owned() else { return };
        let others: Vec<_> = self.models.iter().filter(|known| !Arc::ptr_eq(known, resident)).collect();
        let number = others.len().min(OTHERS_PER_LOOK);
        let first = self.turn.fetch_add(number, Ordering::Relaxed) % others.len().max(1);
        let others: Vec<_> = others
            .into_iter()
            .cycle()
            .skip(first)
            .take(number)
            .map(|other| (Arc::clone(&self.api), Arc::clone(other)))
            .collect();
        drop(tokio::spawn(async move {
            join_all(others.iter().map(|(api, other)| scale_down(api, other))).await;
            drop(taking_back);
        }));
    }

    /// A container that ran and ended is a different failure from one that was never started.
    fn failure(&self, known: &Known, StuckPod { why, exit_code }: &StuckPod) -> DriverError {
        let name = self.api.name(&known.deployment);
        match exit_code {
            Some(code) => DriverError::Ended { last_words: format!("exit code {code}: {name}: {why}") },
            None => DriverError::CannotStart(format!("{name}: {why}")),
        }
    }
}

/// Scales down a model that this slot should not serve now.
async fn scale_down(api: &Arc<Api>, known: &Arc<Known>) {
    // A probe may outlast its moment: then a load has begun.
    if known.life().is_wanted {
        return;
    }
    let Ok(Scale { replicas: 1.., .. }) = api.scale(&known.deployment).await else {
        *known.logged_replicas() = None;
        return;
    };
    let (client, other) = (Arc::clone(api), Arc::clone(known));
    let taken_back = known.orders.run(async move {
        if other.life().is_wanted {
            return Ok(None);
        }
        client.set_scale(&other.deployment, 0, false).await.map(Some)
    });
    match taken_back.await {
        Ok(Some(_)) => known.log_external_scaling(api, 1),
        Ok(None) => {}
        Err(error) => tracing::warn!(deployment = known.deployment, %error, "a second Deployment of a slot is running"),
    }
}

/// Writes only a changed number: an unchanged Deployment rolls nothing.
async fn set(api: &Api, deployment: &str, replicas: u32) -> Result<(Scale, bool), DriverError> {
    let scale = api.scale(deployment).await?;
    if scale.replicas == replicas {
        return Ok((scale, false));
    }
    api.set_scale(deployment, replicas, false).await.map(|scale| (scale, true))
}

/// Returns when the Pod that serves at `url` is no longer ready.
async fn until_lost(pods: &mut Followed<'_>, known: &Known, url: &Url) -> Result<(), DriverError> {
    loop {
        pods.change().await?;
        let is_there =
            matches!(pods.pods_state(), PodsState::Ready(pod) if known.address(pod).is_ok_and(|now| now == *url));
        if !is_there {
            return Ok(());
        }
    }
}

impl Driver for KubernetesScale {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: false, returns: Returns::ALL }
    }

    fn models(&self) -> Vec<Model> {
        self.models.iter().map(|known| Model::clone(&known.served.id)).collect()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.find(model).ok()?.url()
    }

    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.rehearse(model))
    }

    /// The check examines the API server, not the backend.
    fn detects_absence(&self) -> bool {
        false
    }

    fn set_load_timeout(&self, load_timeout: Duration) {
        *self.load_timeout() = load_timeout;
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(self.probe_model(model))
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async { Ok(self.make_ready(model).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async { self.remove(model).await.map(|()| Left::Nothing) })
    }

    /// From now on, another model or another driver may scale its Deployment, so this driver leaves it alone.
    fn forget(&self, model: &Model) {
        if let Ok(known) = self.find(model) {
            known.life().is_wanted = true;
        }
    }

    /// There is no stronger way, see the rules above.
    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.remove(model))
    }
}
