//! The life cycle of the worker secret, as a pure function of the cluster's state.
//!
//! 1. The relays accept the new value alongside the old one; workers still present the old one.
//! 2. Once every relay Pod has confirmed this, the Secret that workers mount changes, and the old value gets its end:
//!    it stays valid for a day, for workers outside the cluster and for slow ones. That holds for each rotation,
//!    however soon others follow, so relays may accept several old values, each until its own time.
//! 3. Then the old value is removed, and the relays drain and close the links that used it.
//!
//! The only state between two steps is in Secrets, so an operator may stop at any point. Two Secrets cannot be written
//! at once, so their order matters: relays first learn the value that workers will present, and lose only values that
//! workers no longer use. A revocation is the exception, because it is urgent.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use modelrelay_protocol::secret::Secret;

#[cfg(test)]
mod tests;

/// The longest worker secret that a relay accepts.
const MAX_SECRET_CHARS: usize = 4096;
/// The time for which a value stays valid after a rotation.
const PREVIOUS_LIVES: SignedDuration = SignedDuration::from_hours(24);
/// The maximum number of old values that relays accept; one more ends the oldest early. A relay accepts 16 secrets in
/// all.
pub const MAX_PREVIOUS: usize = 8;
/// The minimum time between two rotations: by then every kubelet has refreshed the mounted Secret (69 s were measured
/// without an annotation to speed it up). A value that has to end early was therefore replaced at least 8 * 90 s
/// before, and no worker in the cluster presents it any more.
const SETTLING: SignedDuration = SignedDuration::from_secs(90);
/// An end that is more than a day and this tolerance from now was written by a wrong clock.
const CLOCK_TOLERANCE: SignedDuration = SignedDuration::from_hours(1);

/// The current state of the cluster.
#[derive(Debug, Default)]
pub struct Known {
    /// The Secret that workers mount.
    pub worker: Option<WorkerSide>,
    /// The configuration that relays mount.
    pub relay: Option<RelaySide>,
    /// The value of the user's own Secret, if the Provider names one.
    pub own: Option<Secret>,
    /// The Provider's annotation.
    pub annotation: Option<String>,
    /// True if every relay Pod runs the applied configuration.
    pub confirmed: bool,
}

/// The Secret that workers mount.
#[derive(Clone, Debug)]
pub struct WorkerSide {
    /// The value that workers present.
    pub value: Secret,
    /// The time since which it has this value.
    pub changed_at: Option<Timestamp>,
}

/// The configuration that relays mount.
#[derive(Clone, Debug)]
pub struct RelaySide {
    /// The newest value.
    pub current: Secret,
    /// The previous values, newest first.
    pub previous: Vec<Previous>,
    /// The value of the annotation that was last acted on.
    pub acted_on: Option<String>,
}

/// A value that a rotation replaced.
#[derive(Clone, Debug)]
pub struct Previous {
    /// The value.
    pub value: Secret,
    /// The end of its validity. Only the newest may have none, while workers still present it.
    pub until: Option<Timestamp>,
}

/// The desired state of the cluster.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The newest value, for relays.
    pub current: Secret,
    /// The previous values for relays, newest first; [`MAX_PREVIOUS`] at most.
    pub previous: Vec<Previous>,
    /// The value that workers present.
    pub worker: Secret,
    /// The time since which they present it.
    pub worker_changed_at: Timestamp,
    /// The value of the annotation that has been acted on.
    pub acted_on: Option<String>,
    /// The actions of this step, for Events.
    pub events: Vec<RotationEvent>,
    /// The time of the next step.
    pub wake_at: Option<Timestamp>,
}

/// An action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationEvent {
    /// The relays receive a new value.
    Started,
    /// Workers receive the new value.
    Published,
    /// An old value ended, because its time was over or a user revoked it.
    Ended,
    /// The oldest value ended early, because there were too many.
    Crowded,
    /// There is a new value, and the old ones ended at once.
    Revoked,
}

impl Plan {
    /// True if the relays have yet to accept the new value.
    pub fn awaits_relays(&self) -> bool {
        self.previous.first().is_some_and(Previous::is_presented)
    }

    /// True if workers must receive their new value before the relays' configuration changes. The change sets the old
    /// value's end, which must not pass while workers still mount it, however long an operator stops between the two
    /// writes.
    pub fn updates_workers_first(&self) -> bool {
        self.events.contains(&RotationEvent::Published)
    }
}

impl Previous {
    fn is_presented(&self) -> bool {
        self.until.is_none()
    }
}

/// Returns the next step. `fresh` is a new random value, used only if one is needed.
pub fn plan(now: Timestamp, known: &Known, fresh: &Secret) -> Plan {
    // Whole seconds, because that is the written format, and the value read back must be the same.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let Some(relay) = &known.relay else { return first(now, known, fresh) };
    let mut relay = relay.clone();
    let events = catch_up(now, known, &mut relay);
    let state = State { now, known, relay, events };
    state.requested(fresh).unwrap_or_else(|| state.progressed())
}

/// Handles the case without a configuration. A value that workers already mount (the Provider was deleted and created
/// again) is kept.
fn first(now: Timestamp, known: &Known, fresh: &Secret) -> Plan {
    let kept = known.worker.as_ref().map(|worker| worker.value.clone());
    let current = known.own.clone().or_else(|| kept.clone()).unwrap_or_else(|| fresh.clone());
    let previous: Vec<Previous> =
        kept.filter(|kept| *kept != current).map(|value| Previous { value, until: None }).into_iter().collect();
    let worker = previous.first().map_or_else(|| current.clone(), |previous| previous.value.clone());
    let started = previous.first().map(|_| RotationEvent::Started);
    let events = started.into_iter().collect();
    finish(now, known, Step { current, previous, worker, acted_on: known.annotation.clone(), events })
}

/// Completes the work that an operator left when it stopped, and ends values whose time is over.
fn catch_up(now: Timestamp, known: &Known, relay: &mut RelaySide) -> Vec<RotationEvent> {
    let mut events = Vec::new();
    let end = now + PREVIOUS_LIVES;
    let workers_have_it = known.worker.as_ref().is_some_and(|worker| worker.value == relay.current);
    for (age, previous) in relay.previous.iter_mut().enumerate() {
        match previous.until {
            // The operator stopped after it had updated the workers' Secret.
            None if age == 0 && workers_have_it => {
                events.push(RotationEvent::Published);
                previous.until = Some(end);
            }
            None if age == 0 => {}
            None => previous.until = Some(end),
            Some(until) if until > end + CLOCK_TOLERANCE => previous.until = Some(end),
            Some(_) => {}
        }
    }
    let is_over = |previous: &mut Previous| previous.until.is_some_and(|until| until <= now);
    let ended: Vec<Previous> = relay.previous.extract_if(.., is_over).collect();
    if ended.iter().any(|ended| !relay.accepts(&ended.value)) {
        events.push(RotationEvent::Ended);
    }
    events
}

impl RelaySide {
    /// True if a relay accepts each value: one line that is not too long. A relay rejects the whole configuration
    /// otherwise, and with it the changes of all Providers that share it.
    pub fn is_acceptable(&self) -> bool {
        let all = std::iter::once(&self.current).chain(self.previous.iter().map(|previous| &previous.value));
        all.into_iter().all(|value| {
            let text = value.expose();
            text.chars().count() <= MAX_SECRET_CHARS && !text.is_empty() && !text.chars().any(char::is_control)
        })
    }

    fn accepts(&self, value: &Secret) -> bool {
        self.current == *value || self.previous.iter().any(|previous| previous.value == *value)
    }
}

struct State<'a> {
    now: Timestamp,
    known: &'a Known,
    relay: RelaySide,
    /// The actions of catching up.
    events: Vec<RotationEvent>,
}

struct Step {
    current: Secret,
    previous: Vec<Previous>,
    worker: Secret,
    acted_on: Option<String>,
    events: Vec<RotationEvent>,
}

impl State<'_> {
    /// Returns the step that a user requested: by the annotation, or by another value in their own Secret.
    fn requested(&self, fresh: &Secret) -> Option<Plan> {
        let annotation = self.known.annotation.as_deref();
        let is_requested = annotation.is_some() && annotation != self.relay.acted_on.as_deref();
        let replaced = self.known.own.as_ref().filter(|own| **own != self.relay.current);
        if is_requested && annotation.is_some_and(is_revocation) {
            return Some(self.revoke(replaced, fresh));
        }
        let new = match (&self.known.own, is_requested) {
            (Some(_), _) => replaced?,
            (None, true) => fresh,
            (None, false) => return None,
        };
        Some(self.rotate(new))
    }

    /// Ends every old value at once. If there are old values, the newest one is kept: yet another value would reject
    /// workers that have just received the newest.
    fn revoke(&self, replaced: Option<&Secret>, fresh: &Secret) -> Plan {
        let has_old = !self.relay.previous.is_empty();
        let current = match (replaced, has_old, &self.known.own) {
            (Some(own), _, _) => own.clone(),
            (None, true, _) | (None, false, Some(_)) => self.relay.current.clone(),
            (None, false, None) => fresh.clone(),
        };
        let events = match (current == self.relay.current, has_old) {
            (true, true) => vec![RotationEvent::Ended],
            (true, false) => Vec::new(),
            (false, _) => vec![RotationEvent::Revoked],
        };
        let (worker, acted_on) = (current.clone(), self.known.annotation.clone());
        finish(self.now, self.known, Step { current, previous: Vec::new(), worker, acted_on, events })
    }

    /// Starts a rotation to `new`, if the previous one has settled.
    fn rotate(&self, new: &Secret) -> Plan {
        let acted_on = self.known.annotation.clone();
        match self.relay.previous.first() {
            // Workers do not have the newest value yet, so another request needs no other value.
            Some(Previous { until: None, .. }) if self.known.own.is_none() => Plan { acted_on, ..self.progressed() },
            // The user reverted to the value that workers present.
            Some(Previous { until: None, value }) if value == new => self.publish(new, &self.relay.current, acted_on),
            // The user changed the value before the relays confirmed: the value that no worker presents yet is
            // replaced.
            Some(Previous { until: None, value }) => self.begin(new, value, acted_on),
            Some(Previous { until: Some(until), .. }) => match settled_at(self.now, *until) {
                Some(at) => {
                    let plan = self.progressed();
                    Plan { wake_at: Some(plan.wake_at.map_or(at, |wake_at| wake_at.min(at))), ..plan }
                }
                None => self.begin(new, &self.relay.current, acted_on),
            },
            None => self.begin(new, &self.relay.current, acted_on),
        }
    }

    fn begin(&self, new: &Secret, presented: &Secret, acted_on: Option<String>) -> Plan {
        let newest = Previous { value: presented.clone(), until: None };
        self.turn(new, newest, presented, acted_on, RotationEvent::Started)
    }

    fn publish(&self, new: &Secret, old: &Secret, acted_on: Option<String>) -> Plan {
        let newest = Previous { value: old.clone(), until: Some(self.now + PREVIOUS_LIVES) };
        self.turn(new, newest, new, acted_on, RotationEvent::Published)
    }

    /// Puts `newest` before all values that already have an end.
    fn turn(
        &self,
        new: &Secret,
        newest: Previous,
        worker: &Secret,
        acted_on: Option<String>,
        event: RotationEvent,
    ) -> Plan {
        let promised = |previous: &&Previous| !previous.is_presented() && previous.value != newest.value;
        let older: Vec<Previous> = self.relay.previous.iter().filter(promised).cloned().collect();
        let mut previous = vec![newest];
        previous.extend(older);
        let mut events = self.events_and(event);
        if previous.len() > MAX_PREVIOUS {
            previous.truncate(MAX_PREVIOUS);
            events.push(RotationEvent::Crowded);
        }
        let (current, worker) = (new.clone(), worker.clone());
        finish(self.now, self.known, Step { current, previous, worker, acted_on, events })
    }

    /// Returns the step that the time and the relays allow.
    fn progressed(&self) -> Plan {
        let RelaySide { current, previous, acted_on } = self.relay.clone();
        let acted_on = match &self.known.own {
            // The user writes new values, so the annotation alone requests nothing.
            Some(_) => self.known.annotation.clone(),
            // After the annotation was removed, setting it to the same value again is a new request.
            None => acted_on.filter(|_| self.known.annotation.is_some()),
        };
        let worker = match previous.first() {
            Some(Previous { value, until: None }) if self.known.confirmed => {
                return self.publish(&current, value, acted_on);
            }
            Some(Previous { value, until: None }) => value.clone(),
            Some(Previous { until: Some(_), .. }) | None => current.clone(),
        };
        finish(self.now, self.known, Step { current, previous, worker, acted_on, events: self.events.clone() })
    }

    fn events_and(&self, event: RotationEvent) -> Vec<RotationEvent> {
        self.events.iter().copied().chain([event]).collect()
    }
}

/// Returns when another rotation may follow the one whose old value is valid until `until`, or `None` if it may now.
fn settled_at(now: Timestamp, until: Timestamp) -> Option<Timestamp> {
    let published = until - PREVIOUS_LIVES;
    // A time before publication comes from another clock and proves nothing.
    (published..published + SETTLING).contains(&now).then(|| published + SETTLING)
}

fn finish(now: Timestamp, known: &Known, step: Step) -> Plan {
    let unchanged = known.worker.as_ref().filter(|worker| worker.value == step.worker);
    Plan {
        worker_changed_at: unchanged.and_then(|worker| worker.changed_at).unwrap_or(now),
        wake_at: step.previous.iter().filter_map(|previous| previous.until).min(),
        current: step.current,
        previous: step.previous,
        worker: step.worker,
        acted_on: step.acted_on,
        events: step.events,
    }
}

/// True for `revoke`, or `revoke-` with any suffix, which allows another revocation.
fn is_revocation(annotation: &str) -> bool {
    annotation == "revoke" || annotation.starts_with("revoke-")
}
