//! Who else writes the number of a pool's Deployment, and whether it is left to them: pure, with the time handed in.
//!
//! The Deployment's replicas come from the pool. An autoscaler or a person that writes them there is found in the Deployment's
//! `managedFields`: whoever changes the number takes it over from the operator, until the operator applies its own again. Nothing
//! else tells a new leader, which remembers nothing. Two programs that correct each other restart backends for ever, so:
//! - A number by somebody else is put right once. When that is undone within [`PEACE`], theirs stays until so long has gone by
//!   without another.
//! - An autoscaler's stays from the first: it would undo any correction within seconds. It stays until the pool asks for another
//!   number, as it does when the autoscaler was pointed at the pool, where it belongs.
//!
//! A number that is left to somebody is not applied while it is theirs, so that it stays theirs alone, and so that one that they
//! write between the operator's reading and its writing stays too.

use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};

use crate::names;

/// How long nobody else may have written before a number is put right again; and how long a correction is worth a word.
const PEACE: Duration = Duration::from_secs(600);

/// Somebody whose number the Deployment has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rival {
    /// As `managedFields` names them.
    pub manager: String,
    /// Whether it is a program that scales.
    pub autoscaler: bool,
    /// When they wrote, as the API server noted it.
    at: Option<String>,
}

/// A number that two write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dispute {
    /// Theirs was put right.
    Settled(Rival),
    /// Theirs stays.
    Left(Rival),
}

/// What is known of such numbers.
#[derive(Clone, Debug, Default)]
pub struct Rivals {
    /// What somebody else wrote.
    theirs: Option<Theirs>,
    /// What was put right last, and when.
    settled: Option<(Instant, Rival)>,
    /// When a correction was undone, or somebody wrote again after one had been.
    undone: Option<Instant>,
    /// The number in which pool and Deployment agreed last, and who else had written it: where it differs later and nobody has
    /// written since, it is the pool that asks for another.
    agreed: Option<(i32, Option<Rival>)>,
}

#[derive(Clone, Debug)]
struct Theirs {
    rival: Rival,
    number: i32,
    /// The pool's number when it began.
    ours: i32,
    /// When the two were last different.
    differed: Instant,
}

impl Rival {
    /// Whoever else wrote the Deployment's replicas last, as they are: the operator may have applied that number too.
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

    /// For people.
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
    /// Looks at a Deployment that has `has` Pods, of which the pool asks for `ours`. What is left to somebody else is to stay.
    pub fn observe(&mut self, now: Instant, rival: Option<Rival>, has: i32, ours: i32) -> Option<Dispute> {
        if has == ours {
            return self.agree(now, rival, ours);
        }
        let was_agreed = self.agreed.as_ref().is_some_and(|agreed| *agreed == (has, rival.clone()));
        if self.theirs.is_some() || !was_agreed {
            self.note(now, rival, has, ours);
        }
        // A number that nobody else wrote is one that the pool asked for before.
        let Some(theirs) = self.theirs.as_mut().filter(|theirs| theirs.number == has) else { return self.recent(now) };
        theirs.differed = now;
        let asked_for_another = theirs.ours != ours;
        let rival = theirs.rival.clone();
        if self.undone.is_some_and(|at| within(at, now)) || (rival.autoscaler && !asked_for_another) {
            return Some(Dispute::Left(rival));
        }
        self.theirs = None;
        self.settled = Some((now, rival));
        self.recent(now)
    }

    /// An autoscaler may come by the pool's number on its way, and has not gone for that.
    fn agree(&mut self, now: Instant, rival: Option<Rival>, ours: i32) -> Option<Dispute> {
        let other = rival.as_ref().is_some_and(|rival| !rival.autoscaler);
        self.agreed = Some((ours, rival));
        let passes = |theirs: &Theirs| theirs.rival.autoscaler && theirs.ours == ours && within(theirs.differed, now);
        self.theirs = self.theirs.take().filter(|theirs| passes(theirs) && !other);
        let passing = self.theirs.as_ref().map(|theirs| Dispute::Left(theirs.rival.clone()));
        passing.or_else(|| self.recent(now))
    }

    fn note(&mut self, now: Instant, rival: Option<Rival>, has: i32, ours: i32) {
        let Some(rival) = rival else { return };
        // What was to be put right and could not be yet is nothing new.
        if self.settled.as_ref().is_some_and(|(_, known)| *known == rival) {
            return;
        }
        if self.theirs.as_ref().is_some_and(|known| known.number == has && known.rival == rival) {
            return;
        }
        let corrected = self.settled.as_ref().map(|(at, _)| *at);
        if [corrected, self.undone].into_iter().flatten().any(|at| within(at, now)) {
            self.undone = Some(now);
        }
        let began = self.theirs.as_ref().map_or(ours, |known| known.ours);
        self.theirs = Some(Theirs { rival, number: has, ours: began, differed: now });
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

/// The controller manager runs the HorizontalPodAutoscaler, under its own name or that of the part.
fn is_autoscaler(manager: &str) -> bool {
    matches!(manager, "kube-controller-manager" | "horizontal-pod-autoscaler") || manager.starts_with("keda")
}

#[cfg(test)]
mod tests;
