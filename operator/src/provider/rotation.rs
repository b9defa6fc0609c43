//! The life of the worker secret, as a pure function of what the cluster holds.
//!
//! 1. The relays accept the new value beside the old one; workers still present the old one.
//! 2. Once every relay Pod has said so, the Secret that workers mount changes, and then the old value gets its end: it stays
//!    good for a day, for workers outside the cluster and for whoever is slow. That holds for each rotation, however soon
//!    others follow, so relays may accept several old values, each until its own time.
//! 3. Then it goes, and the relays drain and close what was connected with it.
//!
//! Nothing is remembered between two looks but what is in Secrets, so that an operator may stop anywhere. Two Secrets cannot
//! be written at once, so their order matters: relays first learn what they will be shown, and lose only what nobody was
//! given any more. A revocation is the exception, because it is in a hurry.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use modelrelay_protocol::secret::Secret;

#[cfg(test)]
mod tests;

/// How long a value stays good after a rotation.
pub const PREVIOUS_LIVES: SignedDuration = SignedDuration::from_hours(24);
/// Old values that relays accept at most; one more ends the oldest before its time. A relay takes 16 secrets in all.
pub const MAX_PREVIOUS: usize = 8;
/// A rotation follows another after this time only: by then every kubelet has refreshed the mounted Secret (69 s were
/// measured where nothing hurries it). So a value that has to end early was replaced 8 * 90 s before at least, and no worker
/// in the cluster presents it any more.
const SETTLING: SignedDuration = SignedDuration::from_secs(90);
/// An end that is later than a day and this from now was written by a clock that was wrong.
const CLOCK_TOLERANCE: SignedDuration = SignedDuration::from_hours(1);

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
    /// Those before, newest first.
    pub previous: Vec<Previous>,
    /// The value of the annotation that was acted on last.
    pub acted_on: Option<String>,
}

/// A value from before a rotation.
#[derive(Clone, Debug)]
pub struct Previous {
    /// It.
    pub value: Secret,
    /// Until when it is good. Only the newest may be without an end: while workers still present it.
    pub until: Option<Timestamp>,
}

/// What the cluster should hold.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The newest value, for relays.
    pub current: Secret,
    /// Those before, for relays, newest first; [`MAX_PREVIOUS`] at most.
    pub previous: Vec<Previous>,
    /// What workers present.
    pub worker: Secret,
    /// Since when.
    pub worker_changed_at: Timestamp,
    /// The value of the annotation that has been acted on.
    pub acted_on: Option<String>,
    /// What this step does, for Events.
    pub news: Vec<News>,
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
    /// An old one ended, because its time had come or because somebody said so.
    Ended,
    /// The oldest one ended before its time: there were too many.
    Crowded,
    /// There is a new value and the old ones ended at once.
    Revoked,
}

impl Plan {
    /// Whether the relays have yet to accept the new value.
    pub fn awaits_relays(&self) -> bool {
        self.previous.first().is_some_and(Previous::is_presented)
    }

    /// Whether workers must have their new value before the relays' configuration changes: with it the old value gets its
    /// end, which must not come while workers still mount it, however long an operator stops between the two writes.
    pub fn tells_workers_first(&self) -> bool {
        self.news.contains(&News::Published)
    }
}

impl Previous {
    fn is_presented(&self) -> bool {
        self.until.is_none()
    }
}

/// The next step. `fresh` is a new random value, used only where one is needed.
pub fn plan(now: Timestamp, known: &Known, fresh: &Secret) -> Plan {
    // Whole seconds: that is how they are written, and what is read must be what was meant.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let Some(relay) = &known.relay else { return first(now, known, fresh) };
    let mut relay = relay.clone();
    let news = catch_up(now, known, &mut relay);
    let state = State { now, known, relay, news };
    state.requested(fresh).unwrap_or_else(|| state.progressed())
}

/// There is no configuration yet. A value that workers already mount (the Provider was deleted and made again) stays.
fn first(now: Timestamp, known: &Known, fresh: &Secret) -> Plan {
    let kept = known.worker.as_ref().map(|worker| worker.value.clone());
    let current = known.own.clone().or_else(|| kept.clone()).unwrap_or_else(|| fresh.clone());
    let previous: Vec<Previous> =
        kept.filter(|kept| *kept != current).map(|value| Previous { value, until: None }).into_iter().collect();
    let worker = previous.first().map_or_else(|| current.clone(), |previous| previous.value.clone());
    let started = previous.first().map(|_| News::Started);
    let news = started.into_iter().collect();
    finish(now, known, Step { current, previous, worker, acted_on: known.annotation.clone(), news })
}

/// What an operator that stopped left to be done, and what time alone does.
fn catch_up(now: Timestamp, known: &Known, relay: &mut RelaySide) -> Vec<News> {
    let mut news = Vec::new();
    let end = now + PREVIOUS_LIVES;
    let workers_have_it = known.worker.as_ref().is_some_and(|worker| worker.value == relay.current);
    for (age, previous) in relay.previous.iter_mut().enumerate() {
        match previous.until {
            // The operator stopped after it told the workers.
            None if age == 0 && workers_have_it => {
                news.push(News::Published);
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
        news.push(News::Ended);
    }
    news
}

impl RelaySide {
    fn accepts(&self, value: &Secret) -> bool {
        self.current == *value || self.previous.iter().any(|previous| previous.value == *value)
    }
}

struct State<'a> {
    now: Timestamp,
    known: &'a Known,
    relay: RelaySide,
    /// What catching up did.
    news: Vec<News>,
}

struct Step {
    current: Secret,
    previous: Vec<Previous>,
    worker: Secret,
    acted_on: Option<String>,
    news: Vec<News>,
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
        Some(self.rotate(new))
    }

    /// Ends every old value at once. Where there is one, the new value is the one to keep: giving out yet another would turn
    /// away whoever has just been given it.
    fn revoke(&self, replaced: Option<&Secret>, fresh: &Secret) -> Plan {
        let has_old = !self.relay.previous.is_empty();
        let current = match (replaced, has_old, &self.known.own) {
            (Some(own), _, _) => own.clone(),
            (None, true, _) | (None, false, Some(_)) => self.relay.current.clone(),
            (None, false, None) => fresh.clone(),
        };
        let news = match (current == self.relay.current, has_old) {
            (true, true) => vec![News::Ended],
            (true, false) => Vec::new(),
            (false, _) => vec![News::Revoked],
        };
        let (worker, acted_on) = (current.clone(), self.known.annotation.clone());
        finish(self.now, self.known, Step { current, previous: Vec::new(), worker, acted_on, news })
    }

    /// Starts a rotation to `new`, if now is the time.
    fn rotate(&self, new: &Secret) -> Plan {
        let acted_on = self.known.annotation.clone();
        match self.relay.previous.first() {
            // Workers were not given the newest value yet, so another request needs no other value than that one.
            Some(Previous { until: None, .. }) if self.known.own.is_none() => Plan { acted_on, ..self.progressed() },
            // The user went back to what workers present.
            Some(Previous { until: None, value }) if value == new => self.publish(new, &self.relay.current, acted_on),
            // The user was faster than the relays: the value that nobody presents yet is replaced.
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
        self.turn(new, newest, presented, acted_on, News::Started)
    }

    fn publish(&self, new: &Secret, old: &Secret, acted_on: Option<String>) -> Plan {
        let newest = Previous { value: old.clone(), until: Some(self.now + PREVIOUS_LIVES) };
        self.turn(new, newest, new, acted_on, News::Published)
    }

    /// `newest` comes before all that were promised a time already.
    fn turn(&self, new: &Secret, newest: Previous, worker: &Secret, acted_on: Option<String>, news: News) -> Plan {
        let promised = |previous: &&Previous| !previous.is_presented() && previous.value != newest.value;
        let older: Vec<Previous> = self.relay.previous.iter().filter(promised).cloned().collect();
        let mut previous = vec![newest];
        previous.extend(older);
        let mut news = self.news_and(news);
        if previous.len() > MAX_PREVIOUS {
            previous.truncate(MAX_PREVIOUS);
            news.push(News::Crowded);
        }
        let (current, worker) = (new.clone(), worker.clone());
        finish(self.now, self.known, Step { current, previous, worker, acted_on, news })
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
        let worker = match previous.first() {
            Some(Previous { value, until: None }) if self.known.confirmed => {
                return self.publish(&current, value, acted_on);
            }
            Some(Previous { value, until: None }) => value.clone(),
            Some(Previous { until: Some(_), .. }) | None => current.clone(),
        };
        finish(self.now, self.known, Step { current, previous, worker, acted_on, news: self.news.clone() })
    }

    fn news_and(&self, news: News) -> Vec<News> {
        self.news.iter().copied().chain([news]).collect()
    }
}

/// When another rotation may follow the one whose old value is good until then; none if now.
fn settled_at(now: Timestamp, until: Timestamp) -> Option<Timestamp> {
    let published = until - PREVIOUS_LIVES;
    // Before it was published is another clock's time, which tells nothing.
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
        news: step.news,
    }
}

/// `revoke`, or `revoke-` and anything, so that it can be said twice.
fn is_revocation(annotation: &str) -> bool {
    annotation == "revoke" || annotation.starts_with("revoke-")
}
