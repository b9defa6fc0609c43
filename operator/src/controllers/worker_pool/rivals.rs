//! Detects other writers of a Deployment's replicas, and decides whether to yield to them: pure, with the time passed
//! in.
//!
//! The Deployment's replicas come from the pool. An autoscaler or a user that writes them directly is found in the
//! Deployment's `managedFields`: a writer that changes the number takes the field over from the operator, until the
//! operator applies its own number again. A new leader, which has no memory, has no other source. Two programs that
//! correct each other would restart backends indefinitely, so:
//! - Another writer's number is corrected once. If the correction is undone within [`PEACE`], that number stays until
//!   that time has passed without another write.
//! - An autoscaler's number stays from the start: it would undo any correction within seconds. It stays until the pool
//!   requests another number, as it does when the autoscaler is pointed at the pool, as it should be.
//!
//! While the operator yields, it does not apply the number, so that the other writer remains its sole owner, and so
//! that a write between the operator's read and its own write survives too.

use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};

use crate::resources::names;

/// The time without other writes after which a number is corrected again, and for which a correction is reported.
const PEACE: Duration = Duration::from_secs(600);

/// Another writer of the Deployment's replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rival {
    /// Its name in `managedFields`.
    pub manager: String,
    /// True if it is an autoscaler.
    pub autoscaler: bool,
    /// The time of its write, as the API server recorded it.
    at: Option<String>,
}

/// A conflict over the number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dispute {
    /// Their number was corrected.
    Settled(Rival),
    /// Their number stays.
    Left(Rival),
    /// The API server stores another number than the one that the operator writes.
    Overruled {
        /// The number written.
        wanted: i32,
        /// The number stored.
        stored: i32,
    },
}

/// The history of such conflicts.
#[derive(Clone, Debug, Default)]
pub struct Rivals {
    /// The number that another writer set.
    foreign: Option<ForeignNumber>,
    /// The last correction, and when.
    settled: Option<(Instant, Rival)>,
    /// The time at which a correction was undone, or at which another write followed one.
    undone: Option<Instant>,
    /// The last number in which pool and Deployment agreed, and its other writer. If the numbers differ later without
    /// another write, the pool requests a new one.
    agreed: Option<(i32, Option<Rival>)>,
}

#[derive(Clone, Debug)]
struct ForeignNumber {
    rival: Rival,
    number: i32,
    /// The pool's number at the beginning of the conflict.
    wanted: i32,
    /// The time at which the two numbers last differed.
    differed: Instant,
}

impl Rival {
    /// Returns the last other writer of the Deployment's current replicas; the operator may have applied the same
    /// number too.
    pub fn of(meta: &ObjectMeta) -> Option<Self> {
        let owners = meta.managed_fields.iter().flatten().filter(|entry| owns_replicas(entry));
        let others = owners.filter(|entry| manager(entry) != names::FIELD_MANAGER);
        let last = others.max_by_key(|entry| entry.time.as_ref().map(|time| time.0))?;
        Some(Self {
            manager: manager(last).to_owned(),
            autoscaler: last.subresource.as_deref() == Some("scale") && is_autoscaler(manager(last)),
            at: last.time.as_ref().map(|time| time.0.to_string()),
        })
    }

    /// Returns a human-readable description.
    pub fn describe(&self) -> String {
        let manager = &self.manager;
        match self.autoscaler {
            true if manager.starts_with("keda") => format!("KEDA (field manager {manager})"),
            true => format!("a HorizontalPodAutoscaler (field manager {manager})"),
            false => format!("field manager {manager}"),
        }
    }
}

impl Rivals {
    /// Observes a Deployment that has `has` Pods while the pool requests `wanted`. On [`Dispute::Left`], the current
    /// number must stay.
    pub fn observe(&mut self, now: Instant, rival: Option<Rival>, has: i32, wanted: i32) -> Option<Dispute> {
        if has == wanted {
            return self.agree(now, rival, wanted);
        }
        let was_agreed = self.agreed.as_ref().is_some_and(|agreed| *agreed == (has, rival.clone()));
        if self.foreign.is_some() || !was_agreed {
            self.note(now, rival, has, wanted);
        }
        // A number without another writer is one that the pool requested before.
        let Some(foreign) = self.foreign.as_mut().filter(|foreign| foreign.number == has) else {
            return self.recent(now);
        };
        foreign.differed = now;
        let wants_another = foreign.wanted != wanted;
        let rival = foreign.rival.clone();
        if self.undone.is_some_and(|at| within(at, now)) || (rival.autoscaler && !wants_another) {
            return Some(Dispute::Left(rival));
        }
        self.foreign = None;
        self.settled = Some((now, rival));
        self.recent(now)
    }

    /// Handles equal numbers. An autoscaler may pass through the pool's number on its way without having stopped.
    fn agree(&mut self, now: Instant, rival: Option<Rival>, wanted: i32) -> Option<Dispute> {
        let other = rival.as_ref().is_some_and(|rival| !rival.autoscaler);
        self.agreed = Some((wanted, rival));
        let passes = |foreign: &ForeignNumber| {
            foreign.rival.autoscaler && foreign.wanted == wanted && within(foreign.differed, now)
        };
        self.foreign = self.foreign.take().filter(|foreign| passes(foreign) && !other);
        let passing = self.foreign.as_ref().map(|foreign| Dispute::Left(foreign.rival.clone()));
        passing.or_else(|| self.recent(now))
    }

    fn note(&mut self, now: Instant, rival: Option<Rival>, has: i32, wanted: i32) {
        let Some(rival) = rival else { return };
        // A conflict that was to be corrected and could not be yet is not new.
        if self.settled.as_ref().is_some_and(|(_, known)| *known == rival) {
            return;
        }
        if self.foreign.as_ref().is_some_and(|known| known.number == has && known.rival == rival) {
            return;
        }
        let corrected = self.settled.as_ref().map(|(at, _)| *at);
        if [corrected, self.undone].into_iter().flatten().any(|at| within(at, now)) {
            self.undone = Some(now);
        }
        let began = self.foreign.as_ref().map_or(wanted, |known| known.wanted);
        self.foreign = Some(ForeignNumber { rival, number: has, wanted: began, differed: now });
    }

    fn recent(&self, now: Instant) -> Option<Dispute> {
        let (at, rival) = self.settled.as_ref()?;
        within(*at, now).then(|| Dispute::Settled(rival.clone()))
    }
}

fn within(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) < PEACE
}

fn manager(entry: &ManagedFieldsEntry) -> &str {
    entry.manager.as_deref().unwrap_or_default()
}

fn owns_replicas(entry: &ManagedFieldsEntry) -> bool {
    entry.fields_v1.as_ref().is_some_and(|fields| fields.0.pointer("/f:spec/f:replicas").is_some())
}

/// True for autoscalers. The controller manager runs the HorizontalPodAutoscaler, under its own name or that of the
/// part.
fn is_autoscaler(manager: &str) -> bool {
    matches!(manager, "kube-controller-manager" | "horizontal-pod-autoscaler") || manager.starts_with("keda")
}

#[cfg(test)]
mod tests;
