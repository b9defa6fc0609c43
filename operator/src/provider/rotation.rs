//! The life of the worker secret, as a pure function of what the cluster holds.
//!
//! 1. The relays accept the new value beside the old one; workers still present the old one.
//! 2. Once every relay Pod has said so, the Secret that workers mount changes. The old value stays good for a day, for
//!    workers outside the cluster and for whoever is slow.
//! 3. Then it goes, and the relays drain and close what was connected with it.
//!
//! Nothing is remembered between two looks but what is in Secrets, so that an operator may stop anywhere.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use modelrelay_protocol::secret::Secret;

#[cfg(test)]
mod tests;

/// How long the value before the last rotation stays good.
pub const PREVIOUS_LIVES: SignedDuration = SignedDuration::from_hours(24);
/// A rotation follows another after this time only: by then every kubelet has refreshed the mounted Secret (69 s were
/// measured where nothing hurries it), and nobody needs the value before.
const SETTLING: SignedDuration = SignedDuration::from_secs(90);

/// What the cluster holds.
#[derive(Debug, Default)]
pub struct Known {
    /// In the Secret that workers mount.
    pub worker: Option<WorkerSide>,
    /// In the configuration that relays mount.
    pub relay: Option<RelaySide>,
    /// In the user's own Secret, where the Provider names one.
    pub own: Option<Secret>,
    /// The Provider's annotation.
    pub annotation: Option<String>,
    /// Whether every relay Pod runs the configuration that is applied.
    pub confirmed: bool,
}

/// The Secret that workers mount.
#[derive(Clone, Debug)]
pub struct WorkerSide {
    /// What they present.
    pub value: Secret,
    /// Since when.
    pub changed_at: Option<Timestamp>,
}

/// The configuration that relays mount.
#[derive(Clone, Debug)]
pub struct RelaySide {
    /// The newest value.
    pub current: Secret,
    /// The one before.
    pub previous: Option<Previous>,
    /// The value of the annotation that was acted on last.
    pub acted_on: Option<String>,
}

/// The value before the last rotation.
#[derive(Clone, Debug)]
pub struct Previous {
    /// It.
    pub value: Secret,
    /// Until when it is good. Absent while workers still present it.
    pub until: Option<Timestamp>,
}

/// What the cluster should hold.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The newest value, for relays.
    pub current: Secret,
    /// The one before, for relays.
    pub previous: Option<Previous>,
    /// What workers present.
    pub worker: Secret,
    /// Since when.
    pub worker_changed_at: Timestamp,
    /// The value of the annotation that has been acted on.
    pub acted_on: Option<String>,
    /// What this step does, for an Event.
    pub news: Option<News>,
    /// When to look again.
    pub wake_at: Option<Timestamp>,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// The relays are told of a new value.
    Started,
    /// Workers get it.
    Published,
    /// The old one ended, because its time had come or because somebody said so.
    Ended,
    /// There is a new value and the old one ended at once.
    Revoked,
}

impl Plan {
    /// Whether the relays have yet to accept the new value.
    pub fn awaits_relays(&self) -> bool {
        self.previous.as_ref().is_some_and(|previous| previous.until.is_none())
    }
}

/// The next step. `fresh` is a new random value, used only where one is needed.
pub fn plan(now: Timestamp, known: &Known, fresh: &Secret) -> Plan {
    // Whole seconds: that is how they are written, and what is read must be what was meant.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let Some(relay) = &known.relay else { return first(now, known, fresh) };
    let state = State { now, known, relay };
    state.requested(fresh).unwrap_or_else(|| state.progressed())
}

/// There is no configuration yet. A value that workers already mount (the Provider was deleted and made again) stays.
fn first(now: Timestamp, known: &Known, fresh: &Secret) -> Plan {
    let kept = known.worker.as_ref().map(|worker| worker.value.clone());
    let current = known.own.clone().or_else(|| kept.clone()).unwrap_or_else(|| fresh.clone());
    let previous = kept.filter(|kept| *kept != current).map(|value| Previous { value, until: None });
    let worker = previous.as_ref().map_or_else(|| current.clone(), |previous| previous.value.clone());
    let started = previous.is_some().then_some(News::Started);
    finish(now, known, Step { current, previous, worker, acted_on: known.annotation.clone(), news: started })
}

struct State<'a> {
    now: Timestamp,
    known: &'a Known,
    relay: &'a RelaySide,
}

struct Step {
    current: Secret,
    previous: Option<Previous>,
    worker: Secret,
    acted_on: Option<String>,
    news: Option<News>,
}

impl State<'_> {
    /// A step that a person asked for: by the annotation, or by another value in their own Secret.
    fn requested(&self, fresh: &Secret) -> Option<Plan> {
        let annotation = self.known.annotation.as_deref();
        let asked = annotation.is_some() && annotation != self.relay.acted_on.as_deref();
        let replaced = self.known.own.as_ref().filter(|own| **own != self.relay.current);
        if asked && annotation.is_some_and(is_revocation) {
            return Some(self.revoke(replaced, fresh));
        }
        let new = match (&self.known.own, asked) {
            (Some(_), _) => replaced?,
            (None, true) => fresh,
            (None, false) => return None,
        };
        self.rotate(new)
    }

    /// Ends the old value at once. Where a rotation is under way its new value is the one to keep: giving out yet another
    /// would turn away whoever has just been given it.
    fn revoke(&self, replaced: Option<&Secret>, fresh: &Secret) -> Plan {
        let current = match (replaced, &self.relay.previous, &self.known.own) {
            (Some(own), _, _) => own.clone(),
            (None, Some(_), _) | (None, None, Some(_)) => self.relay.current.clone(),
            (None, None, None) => fresh.clone(),
        };
        let news = if current == self.relay.current {
            self.relay.previous.is_some().then_some(News::Ended)
        } else {
            Some(News::Revoked)
        };
        let worker = current.clone();
        self.finish(Step { current, previous: None, worker, acted_on: self.known.annotation.clone(), news })
    }

    /// Starts a rotation to `new`, if now is the time.
    fn rotate(&self, new: &Secret) -> Option<Plan> {
        let acted_on = self.known.annotation.clone();
        match &self.relay.previous {
            // Workers were not given the newest value yet, so another request needs no other value than that one.
            Some(Previous { until: None, .. }) if self.known.own.is_none() => {
                Some(Plan { acted_on, ..self.progressed() })
            }
            // The user went back to what workers present.
            Some(previous) if previous.until.is_none() && previous.value == *new => {
                Some(self.publish(new, &self.relay.current, acted_on))
            }
            // The user was faster than the relays: the value that nobody presents yet is replaced.
            Some(previous) if previous.until.is_none() => Some(self.begin(new, &previous.value, acted_on)),
            Some(Previous { until: Some(until), .. }) if self.now < *until - PREVIOUS_LIVES + SETTLING => {
                Some(Plan { wake_at: Some(*until - PREVIOUS_LIVES + SETTLING), ..self.progressed() })
            }
            Some(_) | None => Some(self.begin(new, &self.relay.current, acted_on)),
        }
    }

    fn begin(&self, new: &Secret, presented: &Secret, acted_on: Option<String>) -> Plan {
        self.finish(Step {
            current: new.clone(),
            previous: Some(Previous { value: presented.clone(), until: None }),
            worker: presented.clone(),
            acted_on,
            news: Some(News::Started),
        })
    }

    fn publish(&self, new: &Secret, old: &Secret, acted_on: Option<String>) -> Plan {
        self.finish(Step {
            current: new.clone(),
            previous: Some(Previous { value: old.clone(), until: Some(self.now + PREVIOUS_LIVES) }),
            worker: new.clone(),
            acted_on,
            news: Some(News::Published),
        })
    }

    /// The step that time and the relays allow.
    fn progressed(&self) -> Plan {
        let RelaySide { current, previous, acted_on } = self.relay.clone();
        let acted_on = match &self.known.own {
            // A new value is the user's to write, so the annotation alone asks for nothing.
            Some(_) => self.known.annotation.clone(),
            // Without the annotation, setting it to the same value later is a new wish.
            None => acted_on.filter(|_| self.known.annotation.is_some()),
        };
        let (worker, news) = match &previous {
            Some(Previous { value, until: None }) if self.known.confirmed => {
                return self.publish(&current, value, acted_on);
            }
            Some(Previous { value, until: None }) => (value.clone(), None),
            Some(Previous { until: Some(until), .. }) if *until <= self.now => (current.clone(), Some(News::Ended)),
            Some(Previous { until: Some(_), .. }) | None => (current.clone(), None),
        };
        let previous = previous.filter(|_| news != Some(News::Ended));
        self.finish(Step { current, previous, worker, acted_on, news })
    }

    fn finish(&self, step: Step) -> Plan {
        finish(self.now, self.known, step)
    }
}

fn finish(now: Timestamp, known: &Known, step: Step) -> Plan {
    let unchanged = known.worker.as_ref().filter(|worker| worker.value == step.worker);
    Plan {
        worker_changed_at: unchanged.and_then(|worker| worker.changed_at).unwrap_or(now),
        wake_at: step.previous.as_ref().and_then(|previous| previous.until),
        current: step.current,
        previous: step.previous,
        worker: step.worker,
        acted_on: step.acted_on,
        news: step.news,
    }
}

/// `revoke`, or `revoke-` and anything, so that it can be said twice.
fn is_revocation(annotation: &str) -> bool {
    annotation == "revoke" || annotation.starts_with("revoke-")
}
