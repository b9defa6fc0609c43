//! The state that the controller keeps between two passes. All of it may be lost: it only saves requests and writes.

use std::collections::{HashMap, HashSet};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::time::Duration;
use tokio::time::Instant;

use super::IDLE_INTERVAL;
use super::outcome::ProviderOutcome;
use super::reviewers::Reviewers;
use crate::cluster::apply::content_version;
use crate::cluster::cache::{Changes, ObjectChange};
use crate::crd::ProviderStatus;
use crate::manifests::Manifest;

const FIRST_RETRY: Duration = Duration::from_secs(1);
/// No longer, because no event announces that a name is free again or that a right was granted.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// The first and the longest time after which a Pod whose worker has not connected to another relay is annotated again.
const NUDGE_INTERVALS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(320));

/// The memory of one Provider.
#[derive(Default)]
pub(super) struct ProviderMemory {
    /// The uid of the Provider that this state belongs to.
    pub(super) uid: String,
    /// The applied objects, by kind and name.
    applied: HashMap<String, AppliedObject>,
    /// The time at which everything was last applied unconditionally.
    whole_since: Option<Instant>,
    /// Unwanted objects that are known not to exist.
    absent: HashSet<String>,
    /// The relays of the namespace that were last granted the right to review tokens.
    pub(super) bound: Option<Reviewers>,
    /// The Pods whose kubelets were nudged because their workers have not connected to another relay.
    pub(super) move_nudges: HashMap<String, MoveNudges>,
    /// The resourceVersions of applied Secrets, by name.
    pub(super) versions: HashMap<String, String>,
    /// The outcome of the last pass over the objects.
    pub(super) outcome: Option<ProviderOutcome>,
    /// The status that was written last, and when; the watch may still deliver the previous one.
    pub(super) written: Option<(ProviderStatus, Instant)>,
    /// The time since which relays have not confirmed the configuration.
    pub(super) unconfirmed_since: Option<Instant>,
    /// The time at which a kubelet was last nudged.
    pub(super) nudged_at: Option<Instant>,
    retries: Option<ExponentialBackoff>,
    retry_at: Option<Instant>,
}

/// An object that was applied.
struct AppliedObject {
    /// The fingerprint of the desired object.
    fingerprint: u64,
    /// The content version of the applied object.
    version: String,
}

/// The annotations of one Pod whose worker is to connect to another relay.
pub(super) struct MoveNudges {
    intervals: ExponentialBackoff,
    next: Option<Instant>,
}

impl Default for MoveNudges {
    fn default() -> Self {
        Self { intervals: doubling(NUDGE_INTERVALS).build(), next: None }
    }
}

impl MoveNudges {
    /// True if the Pod is to be annotated now, which is recorded.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        if self.next.is_some_and(|next| now < next) {
            return false;
        }
        self.next = Some(now + self.intervals.next().unwrap_or(NUDGE_INTERVALS.1));
        true
    }
}

/// Delays that double from the first to the longest, without an end.
fn doubling((first, longest): (Duration, Duration)) -> ExponentialBuilder {
    ExponentialBuilder::default().with_min_delay(first).with_max_delay(longest).with_factor(2.0).without_max_times()
}

/// The next attempt.
pub(super) struct Retry {
    /// The delay from now.
    pub(super) after: Duration,
    /// False if it was already scheduled.
    pub(super) is_new: bool,
}

impl ProviderMemory {
    pub(super) fn new(uid: String) -> Self {
        Self { uid, whole_since: Some(Instant::now()), ..Self::default() }
    }

    /// Records changes that watches reported. Returns true if anything changed that the operator did not do itself; a
    /// changed object is applied again. Once an hour, everything is, in case a change was missed.
    pub(super) fn note(&mut self, changes: Changes, now: Instant) -> bool {
        if self.whole_since.is_some_and(|since| now - since >= IDLE_INTERVAL) {
            self.applied.clear();
            self.absent.clear();
            self.bound = None;
            self.whole_since = Some(now);
            return true;
        }
        let mut changed = changes.itself || changes.reviewers;
        if changes.reviewers {
            self.bound = None;
        }
        for (object, seen) in changes.objects {
            let as_left = match &seen {
                ObjectChange::At(version) => {
                    self.applied.get(&object).is_some_and(|applied| applied.version == *version)
                }
                ObjectChange::Gone => self.absent.contains(&object),
            };
            if !as_left {
                self.applied.remove(&object);
                self.absent.remove(&object);
                changed = true;
            }
        }
        changed
    }

    pub(super) fn is_applied(&self, manifest: &Manifest, fingerprint: u64) -> bool {
        self.applied.get(&manifest.display()).is_some_and(|applied| applied.fingerprint == fingerprint)
    }

    /// True if the object was applied and has not changed since, whatever its content was.
    pub(super) fn was_applied(&self, manifest: &Manifest) -> bool {
        self.applied.contains_key(&manifest.display())
    }

    pub(super) fn note_applied(&mut self, manifest: &Manifest, fingerprint: u64, meta: &ObjectMeta) {
        let applied = AppliedObject { fingerprint, version: content_version(meta) };
        self.applied.insert(manifest.display(), applied);
        if let (true, Some(version)) = (manifest.resource.kind == "Secret", meta.resource_version.clone()) {
            self.versions.insert(manifest.name.clone(), version);
        }
    }

    pub(super) fn is_absent(&self, manifest: &Manifest) -> bool {
        self.absent.contains(&manifest.display())
    }

    pub(super) fn note_absent(&mut self, manifest: &Manifest) {
        self.applied.remove(&manifest.display());
        self.absent.insert(manifest.display());
    }

    pub(super) fn note_absent_no_more(&mut self, manifest: &Manifest) {
        self.absent.remove(&manifest.display());
    }

    /// Returns the next attempt after a failure. The delay doubles each time, with jitter. A failure before that time,
    /// in a pass that a change caused, leaves the schedule as it is and is not logged.
    pub(super) fn next_retry(&mut self, now: Instant) -> Retry {
        if let Some(at) = self.retry_at.filter(|at| *at > now) {
            return Retry { after: at - now, is_new: false };
        }
        let fresh = || doubling((FIRST_RETRY, LAST_RETRY)).with_jitter().build();
        let after = self.retries.get_or_insert_with(fresh).next().unwrap_or(LAST_RETRY);
        self.retry_at = Some(now + after);
        Retry { after, is_new: true }
    }

    /// True if the next attempt is not due yet.
    pub(super) fn awaits_retry(&self, now: Instant) -> bool {
        self.retry_at.is_some_and(|at| at > now)
    }

    /// Resets the retries after a success.
    pub(super) fn reset_retries(&mut self) {
        self.retries = None;
        self.retry_at = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_delays_grow_and_reset_after_success() {
        let (mut memory, mut now) = (ProviderMemory::default(), Instant::now());
        let mut delays = Vec::new();
        for _ in 0..12 {
            let retry = memory.next_retry(now);
            assert!(retry.is_new);
            delays.push(retry.after);
            now += retry.after;
        }
        assert!(delays[0] >= FIRST_RETRY && delays[0] <= FIRST_RETRY * 2, "{delays:?}");
        assert!(delays[11] >= LAST_RETRY && delays[11] <= LAST_RETRY * 2, "{delays:?}");
        memory.reset_retries();
        assert!(memory.next_retry(now).after <= FIRST_RETRY * 2);
    }

    #[test]
    fn nudges_of_pod_become_less_frequent() {
        let (mut nudges, mut now) = (MoveNudges::default(), Instant::now());
        let mut seconds = Vec::new();
        for second in 0..400 {
            if nudges.is_due(now) {
                seconds.push(second);
            }
            now += Duration::from_secs(1);
        }
        assert_eq!(seconds, [0, 5, 15, 35, 75, 155, 315]);
    }

    #[test]
    fn early_failure_does_not_postpone_planned_retry() {
        let (mut memory, now) = (ProviderMemory::default(), Instant::now());
        let planned = memory.next_retry(now).after;
        let again = memory.next_retry(now + planned / 2);
        assert!(!again.is_new);
        assert_eq!(again.after, planned - planned / 2);
    }
}
