//! What the driver knows of one model and its Deployment between two calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use url::Url;

use super::super::sequence::Sequence;
use super::super::served::Served;
use super::super::{DriverError, Probed};
use super::ScaledModel;
use super::api::Api;
use super::pods::Pod;

/// What whoever scales a model beside the multiplexer should do.
pub(super) const LEAVE_ALONE: &str =
    "its replicas are the multiplexer's; remove the HorizontalPodAutoscaler, and let GitOps ignore spec.replicas";

/// A model and its Deployment, and what was seen of them.
#[derive(Debug)]
pub(super) struct Known {
    /// How it shows that it is ready.
    pub(super) served: Served,
    /// The Deployment's name.
    pub(super) deployment: String,
    given: Option<Url>,
    /// Never held over an await.
    life: Mutex<Life>,
    /// What was last told about replicas that are not ours. Never held over an await.
    told: Mutex<Option<u32>>,
    /// Whether it was told that the API server refuses to say how it is.
    is_refused: AtomicBool,
    /// What must not be left half done.
    pub(super) orders: Sequence,
}

/// What is known of a model between two calls.
#[derive(Debug, Default)]
pub(super) struct Life {
    /// Where its Pod was seen to be ready.
    pub(super) found: Option<Url>,
    /// It is being loaded, or is: nobody else's replicas are taken back.
    pub(super) is_wanted: bool,
    /// Loads and removals that have begun or ended. A look that began before the last of them has seen another life.
    pub(super) turns: u64,
}

impl Known {
    /// Nothing was seen yet.
    pub(super) fn new(ScaledModel { served, deployment, url }: ScaledModel) -> Self {
        Self {
            served,
            deployment,
            given: url,
            life: Mutex::default(),
            told: Mutex::default(),
            is_refused: AtomicBool::new(false),
            orders: Sequence::default(),
        }
    }

    /// Where requests go, as far as that is known.
    pub(super) fn url(&self) -> Option<Url> {
        self.given.clone().or_else(|| self.found())
    }

    /// Where requests go, if this Pod is the one.
    pub(super) fn address(&self, pod: &Pod) -> Result<Url, DriverError> {
        self.given.clone().map_or_else(|| pod.address(), Ok)
    }

    pub(super) fn found(&self) -> Option<Url> {
        self.life().found.clone()
    }

    /// A look at its Pod. One that nobody answers for is there all the same, and with it its GPU.
    pub(super) async fn look_at(&self, url: Url) -> Result<Probed, DriverError> {
        match self.served.look(&self.served.client(url)).await {
            Err(DriverError::Unreachable { .. }) => Ok(Probed::default()),
            looked => looked,
        }
    }

    pub(super) fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says once that somebody else scales.
    pub(super) fn tell(&self, api: &Api, replicas: u32) {
        if self.told().replace(replicas) == Some(replicas) {
            return;
        }
        let (model, deployment) = (&*self.served.id, api.name(&self.deployment));
        match replicas {
            0 => tracing::warn!(model, deployment, "somebody else scaled a loaded model to 0: {LEAVE_ALONE}"),
            1 if self.found().is_none() => tracing::warn!(
                model,
                deployment,
                "somebody else scaled a model up beside the loaded one; it was scaled to 0 again: {LEAVE_ALONE}"
            ),
            _ => tracing::warn!(
                model,
                deployment,
                replicas,
                "somebody else gave a loaded model further replicas, which get no requests: {LEAVE_ALONE}"
            ),
        }
    }

    /// Says once that the API server does not let this worker see how the model is.
    pub(super) fn tell_refusal(&self, error: &DriverError) {
        if !matches!(error, DriverError::Silent { .. }) && !self.is_refused.swap(true, Ordering::Relaxed) {
            tracing::warn!(deployment = self.deployment, %error, "only the model's Pod tells how it is");
        }
    }

    /// The API server has said how the model is.
    pub(super) fn note_answer(&self) {
        self.is_refused.store(false, Ordering::Relaxed);
    }

    pub(super) fn told(&self) -> MutexGuard<'_, Option<u32>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// A look that began in this turn has seen its Pod serve there.
    pub(super) fn see(&mut self, turn: u64, url: Url) {
        if self.turns == turn {
            (self.found, self.is_wanted) = (Some(url), true);
        }
    }

    /// A look that began in this turn has seen that nothing of it is left. Whether something was: then somebody else took it
    /// away, and it is nobody's any more.
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
    fn what_a_look_finds_counts_in_the_life_in_which_it_began() {
        let mut life = Life::default();
        life.see(life.turns, url());
        assert_eq!((life.found.as_ref(), life.is_wanted), (Some(&url()), true));
        assert!(life.is_lost(life.turns), "somebody took it away");
        assert_eq!((life.found.as_ref(), life.is_wanted), (None, false));
        assert!(!life.is_lost(life.turns), "nothing was there");
    }

    #[test]
    fn what_a_look_finds_counts_nothing_in_a_later_life() {
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
