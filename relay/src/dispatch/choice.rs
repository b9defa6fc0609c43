//! Whom to ask for a model that nobody serves who could: one multiplexer, so that one request makes one load.
//!
//! The relay only tells one worker that something waits; the worker decides. A choice stays until the model opens, the
//! worker says that it cannot load it, drains or leaves, or a time has passed in which it should have been there: were it
//! made anew with each word of each slot, one request would make a load on every worker in turn.
//!
//! Until then it moves only to a worker that is nearer and was asked for the model already, by another relay or by anything
//! else: that makes no load. Relays that chose differently, before they could hear of each other, come together so; did they
//! not, each would make a load of its own, with every swap anew.
//!
//! A slot that was asked for one model counts as taken for the next, until its worker says more: models that are asked for in
//! the same moment go to as many slots as are free.
//!
//! A model needs a choice while something waits for it that nobody who serves it can be sent: usually because nobody
//! serves it, but a worker that speaks only the seeds, or one that failed the very request, helps no more than none.
//! Where every multiplexer that has the model said that it cannot load it now, such requests end at once.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::Dispatch;
use super::clock::{Moment, Span, duration};
use super::effect::{Effect, Failure};
use super::event::{Model, RequestKey, WorkerKey};
use super::models::{Group, ModelId};
use super::queue::LaneKey;
use super::registry::Worker;
use super::residency::{Failed, Multiplexer, Nearness, Standing};

/// The least time that a choice stays if nothing comes of it.
const LEAST_PATIENCE: Span = 60_000_000_000;

/// How often the time that it first said a chosen worker is waited for.
const ETA_PATIENCE: Span = 2;

/// The worker that was asked for a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    pub(super) worker: WorkerKey,
    since: Moment,
    pub(super) until: Moment,
    /// Whether the worker has said how long it will take, which it may do once.
    has_eta: bool,
}

impl Choice {
    fn new(worker: WorkerKey, now: Moment) -> Self {
        Self { worker, since: now, until: now.plus(LEAST_PATIENCE), has_eta: false }
    }

    fn handle_eta(mut self, eta: Option<Span>) -> Self {
        if let Some(eta) = eta.filter(|_| !self.has_eta) {
            self.has_eta = true;
            self.until = self.since.plus(eta.saturating_mul(ETA_PATIENCE).max(LEAST_PATIENCE));
        }
        self
    }
}

impl Dispatch {
    /// Brings the choices of all models up to date that something has happened to. Last in every event, before what
    /// waits is told.
    pub(super) fn settle_choices(&mut self, now: Moment, out: &mut Vec<Effect>) {
        while let Some((_, model)) = self.models.choice_dues.first().copied().filter(|(due, _)| *due <= now) {
            self.models.choice_dues.pop_first();
            self.models.touch(model);
        }
        if self.models.touched.is_empty() {
            return;
        }
        // One choice bears upon the next. By name, their order is one that relays share.
        let moving = std::mem::take(&mut self.models.moving);
        let mut touched: Vec<_> = std::mem::take(&mut self.models.touched).into_iter().collect();
        touched.sort_by(|a, b| self.models[*a].name.cmp(&self.models[*b].name));
        touched.iter().for_each(|model| self.models.hold(*model));
        for model in touched {
            self.fail_unloadable(model, now, out);
            let choice = self.next_choice(model, moving.contains(&model), now);
            self.set_choice(model, choice, now);
            self.models.touched.remove(&model);
            self.models.let_go(model);
        }
    }

    /// What to say to a request that would have to wait for a load, where nobody can load its model now.
    pub(super) fn refuses_to_load(&self, model: ModelId, lane: &LaneKey, now: Moment) -> Option<Failure> {
        let group = &self.models[model];
        if group.multiplexers.is_empty() || self.is_open_to(group, lane) {
            return None;
        }
        let mut first: Option<(WorkerKey, &Failed)> = None;
        for worker in self.multiplexers_for(group, lane) {
            match worker.standing(&group.name, now)? {
                Standing::Able(_) => return None,
                Standing::Leaving => {}
                Standing::Failed(failed) => {
                    if first.is_none_or(|(_, sooner)| failed.sooner(sooner).is_lt()) {
                        first = Some((worker.key, failed));
                    }
                }
            }
        }
        first.map(|(worker, failed)| failure(worker, failed, now))
    }

    /// The same for a request that only this worker may serve.
    pub(super) fn refuses_to_load_pinned(&self, model: ModelId, pin: WorkerKey, now: Moment) -> Option<Failure> {
        let (group, worker) = (&self.models[model], self.workers.get(&pin)?);
        if !group.multiplexers.contains(&pin) || group.open.core1.contains(&pin) {
            return None;
        }
        match worker.standing(&group.name, now)? {
            Standing::Failed(failed) => Some(failure(pin, failed, now)),
            Standing::Able(_) | Standing::Leaving => None,
        }
    }

    /// Whether nobody serves the model who could be sent what is in this lane, and a multiplexer could once it has loaded
    /// it.
    pub(super) fn waits_for_load(&self, group: &Group, pin: Option<WorkerKey>, lane: &LaneKey) -> bool {
        match pin {
            Some(pin) => group.multiplexers.contains(&pin) && !group.open.core1.contains(&pin),
            None => !self.is_open_to(group, lane) && self.multiplexers_for(group, lane).next().is_some(),
        }
    }

    /// Whether time counts as cold for what waits in this lane: nobody serves the model, or nobody who could be sent it
    /// until a multiplexer has loaded it.
    pub(super) fn is_cold(&self, group: &Group, pin: Option<WorkerKey>, lane: &LaneKey) -> bool {
        group.open.is_empty() || !group.multiplexers.is_empty() && self.waits_for_load(group, pin, lane)
    }

    /// How long until the worker that a request is pinned to, or the chosen one, has the model, if it said.
    pub(super) fn eta(&self, model: ModelId, pin: Option<WorkerKey>, now: Moment) -> Option<Span> {
        let group = &self.models[model];
        let worker = pin.or(group.choice.map(|choice| choice.worker))?;
        self.workers.get(&worker)?.multiplexer.as_ref()?.eta(&group.name, now)
    }

    /// Whether some worker that serves the model now could be sent what is in this lane.
    fn is_open_to(&self, group: &Group, lane: &LaneKey) -> bool {
        let mut open = group.open.able(lane.needs_core1);
        open.any(|key| self.workers.get(&key).is_some_and(|worker| lane.admits(worker)))
    }

    /// The multiplexers that could be sent what is in this lane if they loaded the model.
    fn multiplexers_for<'a>(&'a self, group: &'a Group, lane: &'a LaneKey) -> impl Iterator<Item = &'a Worker> {
        group.multiplexers.iter().filter_map(|key| self.workers.get(key)).filter(|worker| lane.admits(worker))
    }

    /// Ends what waits for a load where nobody can load it now.
    fn fail_unloadable(&mut self, model: ModelId, now: Moment, out: &mut Vec<Effect>) {
        let group = &self.models[model];
        if group.multiplexers.is_empty() {
            return;
        }
        let mut failures: Vec<(RequestKey, Failure)> = Vec::new();
        for (lane, waiting) in group.queue.open_lanes() {
            if let Some(failure) = self.refuses_to_load(model, lane, now) {
                failures.extend(waiting.keys().map(|key| (key, failure)));
            }
        }
        for pin in group.queue.pins() {
            if let Some(failure) = self.refuses_to_load_pinned(model, pin, now) {
                failures.extend(group.queue.pinned_to(pin).into_iter().map(|key| (key, failure)));
            }
        }
        failures.sort_unstable_by_key(|(key, _)| *key);
        for (key, failure) in failures {
            self.dequeue(key, now);
            self.fail(key, failure, now, out);
        }
    }

    /// `moving`: whether the choice of before may move to one that was asked already.
    fn next_choice(&self, model: ModelId, moving: bool, now: Moment) -> Option<Choice> {
        let group = &self.models[model];
        if group.multiplexers.is_empty() {
            return None;
        }
        let lanes = group.queue.open_lanes().map(|(lane, _)| lane);
        let stranded: Vec<_> = lanes.filter(|lane| !self.is_open_to(group, lane)).collect();
        if stranded.is_empty() {
            return None;
        }
        let near = |key: WorkerKey| {
            let worker = self.workers.get(&key)?;
            let is_shut = group.multiplexers.contains(&key) && !group.open.core1.contains(&key);
            let could = is_shut && stranded.iter().any(|lane| lane.admits(worker));
            match worker.standing(&group.name, now).filter(|_| could)? {
                Standing::Able(nearness) => Some(nearness),
                Standing::Failed(_) | Standing::Leaving => None,
            }
        };
        let beside = |key: WorkerKey| {
            let nearness = self.nearness_beside(key, model, near(key)?, now);
            Some((!self.is_asked_by_another_name(key, model), nearness))
        };
        let kept = group.choice.filter(|choice| now < choice.until && near(choice.worker).is_some());
        let choice = match kept {
            Some(kept) if !moving => kept,
            Some(kept) => {
                let asked = group.asked.iter().copied().chain([kept.worker]);
                let nearest = self.nearest(asked, group, beside, group.passed_over)?;
                if nearest == kept.worker { kept } else { Choice::new(nearest, now) }
            }
            None => {
                let overdue = group.choice.filter(|choice| now >= choice.until).map(|choice| choice.worker);
                let all = group.multiplexers.iter().copied();
                Choice::new(self.nearest(all, group, beside, overdue.or(group.passed_over))?, now)
            }
        };
        let eta =
            self.workers.get(&choice.worker).and_then(|worker| worker.multiplexer.as_ref()?.eta(&group.name, now));
        Some(choice.handle_eta(eta))
    }

    /// How near a worker is that this relay has asked for other models too: their slots will not be free for long, though
    /// it has not said so yet. Were they taken for free, one worker would be asked for all that is asked for in its
    /// silence, however many have nothing to do.
    fn nearness_beside(&self, key: WorkerKey, model: ModelId, nearness: Nearness, now: Moment) -> Nearness {
        let Some((worker, multiplexer)) = self.workers.get(&key).and_then(|w| Some((w, w.multiplexer.as_ref()?)))
        else {
            return nearness;
        };
        let groups = worker.models.iter().filter(|other| **other != model).map(|other| &self.models[*other]);
        let asked = groups.filter(|group| group.choice.is_some_and(|choice| choice.worker == key));
        // By what the worker means: another name of the same model is not another model.
        let model = multiplexer.id(&self.models[model].name);
        let others = asked.map(|group| multiplexer.id(&group.name));
        let others: BTreeSet<_> = others.filter(|other| *other != model && !multiplexer.is_coming(other)).collect();
        if others.is_empty() {
            return nearness;
        }
        multiplexer.nearness_beside(&others, model, now)
    }

    /// Whether this relay has asked a worker for the same model by another name, and so for its load: whatever is nearer now,
    /// a second load is farther than none.
    fn is_asked_by_another_name(&self, key: WorkerKey, model: ModelId) -> bool {
        let has_names = |worker: &&Worker| worker.multiplexer.as_ref().is_some_and(Multiplexer::has_aliases);
        let Some(worker) = self.workers.get(&key).filter(has_names) else {
            return false;
        };
        let id = worker.id(&self.models[model].name);
        let groups = worker.models.iter().filter(|other| **other != model).map(|other| &self.models[*other]);
        let mut asked = groups.filter(|group| group.choice.is_some_and(|choice| choice.worker == key));
        asked.any(|group| worker.id(&group.name) == id)
    }

    /// The nearest of these workers, `overdue` last: it had its time. Ties are broken as every other relay does.
    fn nearest(
        &self,
        workers: impl Iterator<Item = WorkerKey>,
        group: &Group,
        near: impl Fn(WorkerKey) -> Option<(bool, Nearness)>,
        overdue: Option<WorkerKey>,
    ) -> Option<WorkerKey> {
        let place = |key: WorkerKey| Some((Some(key) == overdue, near(key)?));
        let places: Vec<_> = workers.filter_map(|key| Some((place(key)?, key))).collect();
        let best = places.iter().map(|(place, _)| *place).min()?;
        let tied = places.into_iter().filter(|(place, _)| *place == best).map(|(_, key)| key);
        tied.min_by_key(|key| (Reverse(self.affinity(*key, &group.name)), *key))
    }

    fn affinity(&self, key: WorkerKey, model: &Model) -> u64 {
        let multiplexer = self.workers.get(&key).and_then(|worker| worker.multiplexer.as_ref());
        // By its id: whoever asks for it by another name shall ask the same worker.
        multiplexer.map_or(0, |multiplexer| affinity(&multiplexer.instance, multiplexer.id(model)))
    }

    fn set_choice(&mut self, model: ModelId, choice: Option<Choice>, now: Moment) {
        let group = &mut self.models[model];
        let old = std::mem::replace(&mut group.choice, choice);
        group.passed_over = match (old, choice) {
            (_, None) => None,
            (Some(old), Some(new)) if old.worker != new.worker && now >= old.until => Some(old.worker),
            (_, Some(_)) => group.passed_over,
        };
        if let Some(old) = old {
            self.models.choice_dues.remove(&(old.until, model));
        }
        self.models.choice_dues.extend(choice.map(|choice| (choice.until, model)));
        let (before, after) = (old.map(|choice| choice.worker), choice.map(|choice| choice.worker));
        if before != after {
            for worker in before.into_iter().chain(after) {
                self.mark(worker, now);
            }
        }
    }
}

/// The rendezvous hash: relays agree, each worker gets few models, and one that comes or goes moves few.
pub(super) fn affinity(instance: &str, model: &str) -> u64 {
    let hash = Sha256::new().chain_update(instance).chain_update([0]).chain_update(model).finalize();
    hash.first_chunk().map_or(0, |first| u64::from_be_bytes(*first))
}

fn failure(worker: WorkerKey, failed: &Failed, now: Moment) -> Failure {
    let retry_after = failed.until.map(|until| duration(until.since(now)));
    Failure::ModelFailed { worker, code: failed.code, retry_after }
}
