//! The driver's state of one model and its Deployment between two calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use url::Url;

use super::super::sequence::Sequence;
use super::super::served::Served;
use super::super::{DriverError, Probed};
use super::ScaledModel;
use super::api::Api;
use super::pods::Pod;

/// Advice for third parties that scale a model which the multiplexer owns.
pub(super) const LEAVE_ALONE: &str =
    "the multiplexer owns its replicas; remove the HorizontalPodAutoscaler, and make GitOps ignore spec.replicas";

/// A model and its Deployment, and what probes have found.
#[derive(Debug)]
pub(super) struct Known {
    /// How its readiness is checked.
    pub(super) served: Served,
    pub(super) deployment: String,
    given: Option<Url>,
    /// Never held over an await.
    life: Mutex<Life>,
    /// The number of foreign replicas that was last logged. Never held over an await.
    logged_replicas: Mutex<Option<u32>>,
    /// True if it was logged that the API server denies access to the model's state.
    is_refused: AtomicBool,
    /// Runs actions that must not be left half done.
    pub(super) orders: Sequence,
}

/// A model's state between two calls.
#[derive(Debug, Default)]
pub(super) struct Life {
    /// The URL at which its Pod was found ready.
    pub(super) found: Option<Url>,
    /// True if it is loaded or being loaded: its replicas are not scaled down.
    pub(super) is_wanted: bool,
    /// The number of loads and removals that have begun or ended. A probe that began before the last one has seen
    /// another life.
    pub(super) turns: u64,
}

impl Known {
    /// Creates the state of a model that was not probed yet.
    pub(super) fn new(ScaledModel { served, deployment, url }: ScaledModel) -> Self {
        Self {
            served,
            deployment,
            given: url,
            life: Mutex::default(),
            logged_replicas: Mutex::default(),
            is_refused: AtomicBool::new(false),
            orders: Sequence::default(),
        }
    }

    /// Returns the URL for requests, if it is known.
    pub(super) fn url(&self) -> Option<Url> {
        self.given.clone().or_else(|| self.found())
    }

    /// Returns the URL for requests if they go to this Pod.
    pub(super) fn address(&self, pod: &Pod) -> Result<Url, DriverError> {
        self.given.clone().map_or_else(|| pod.address(), Ok)
    }

    pub(super) fn found(&self) -> Option<Url> {
        self.life().found.clone()
    }

    /// Probes its Pod. A Pod where nothing listens still exists, and holds its GPU.
    pub(super) async fn probe_at(&self, url: Url) -> Result<Probed, DriverError> {
        match self.served.probe(&self.served.client(url)).await {
            Err(DriverError::Unreachable { .. }) => Ok(Probed::default()),
            looked => looked,
        }
    }

    pub(super) fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs once that a third party scales the Deployment.
    pub(super) fn log_external_scaling(&self, api: &Api, replicas: u32) {
        if self.logged_replicas().replace(replicas) == Some(replicas) {
            return;
        }
        let (model, deployment) = (&*self.served.id, api.name(&self.deployment));
        match replicas {
            0 => tracing::warn!(
                model,
                deployment,
                "Deployment of a loaded model was scaled to 0 externally: {LEAVE_ALONE}"
            ),
            1 if self.found().is_none() => tracing::warn!(
                model,
                deployment,
                "Deployment of a model was scaled up externally while another model is loaded; scaling it to 0: {LEAVE_ALONE}"
            ),
            _ => tracing::warn!(
                model,
                deployment,
                replicas,
                "Deployment of a loaded model was scaled up externally; further replicas receive no requests: {LEAVE_ALONE}"
            ),
        }
    }

    /// Logs once that the API server denies this worker access to the model's state.
    pub(super) fn log_refusal(&self, error: &DriverError) {
        if !matches!(error, DriverError::Silent { .. }) && !self.is_refused.swap(true, Ordering::Relaxed) {
            tracing::warn!(deployment = self.deployment, %error, "cannot read the model's state from the API server; relying on its Pod");
        }
    }

    /// The API server has reported the model's state.
    pub(super) fn note_answer(&self) {
        self.is_refused.store(false, Ordering::Relaxed);
    }

    pub(super) fn logged_replicas(&self) -> MutexGuard<'_, Option<u32>> {
        self.logged_replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Life {
    pub(super) fn begin_load(&mut self) {
        self.turns += 1;
        self.is_wanted = true;
    }

    pub(super) fn begin_removal(&mut self) {
        self.turns += 1;
        self.found = None;
    }

    pub(super) fn end_removal(&mut self) {
        *self = Self { turns: self.turns + 1, ..Self::default() };
    }

    /// A probe that began in this turn has found its Pod serving at `url`.
    pub(super) fn see(&mut self, turn: u64, url: Url) {
        if self.turns == turn {
            (self.found, self.is_wanted) = (Some(url), true);
        }
    }

    /// A probe that began in this turn has found nothing of it. Returns true if it was found before: then a third party
    /// removed it, and the model is no longer wanted.
    pub(super) fn is_lost(&mut self, turn: u64) -> bool {
        let is_lost = self.turns == turn && self.found.take().is_some();
        self.is_wanted &= !is_lost;
        is_lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url() -> Url {
        "http://10.0.0.7:8000".parse().unwrap()
    }

    #[test]
    fn probe_result_applies_within_its_own_life() {
        let mut life = Life::default();
        life.see(life.turns, url());
        assert_eq!((life.found.as_ref(), life.is_wanted), (Some(&url()), true));
        assert!(life.is_lost(life.turns), "it was taken away");
        assert_eq!((life.found.as_ref(), life.is_wanted), (None, false));
        assert!(!life.is_lost(life.turns), "nothing was there");
    }

    #[test]
    fn probe_result_is_ignored_in_later_life() {
        let mut life = Life::default();
        let mut looks = vec![life.turns];
        for change in [Life::begin_load, Life::begin_removal, Life::end_removal, Life::begin_load] {
            change(&mut life);
            for look in &looks {
                let wanted = life.is_wanted;
                life.see(*look, url());
                assert!(!life.is_lost(*look));
                assert_eq!((life.found.as_ref(), life.is_wanted), (None, wanted));
            }
            looks.push(life.turns);
        }
    }
}
