//! Invariants of placement that hold whatever its costs are. The reference knows the costs.

use std::collections::{BTreeMap, BTreeSet};

use super::reference::{Reference, process};
use crate::dispatch::{Conversation, Decision, Dispatch, Effect, Event, Model, Placement, RequestKey, WorkerKey};

#[derive(Clone, Default)]
pub(super) struct Placements {
    pub(super) seen: BTreeSet<&'static str>,
    models: BTreeMap<RequestKey, Model>,
    /// The conversation of each request without a pin.
    conversations: BTreeMap<RequestKey, Conversation>,
    workers: BTreeMap<WorkerKey, Process>,
    /// The process that each conversation was sent to last and those that have reported it since, without those whose
    /// backend has restarted since.
    last: BTreeMap<Conversation, BTreeSet<String>>,
    overtaken: BTreeMap<RequestKey, u32>,
    /// The requests that waited before this event, and the workers that could serve each.
    waiting: BTreeSet<(RequestKey, WorkerKey)>,
}

#[derive(Clone)]
struct Process {
    name: String,
    models: BTreeSet<Model>,
}

/// A conversation about one model.
pub(super) fn conversation(model: usize, number: u8) -> Conversation {
    Conversation(model as u64 * 100 + u64::from(number))
}

impl Placements {
    pub(super) fn before(&mut self, reference: &Reference) {
        self.waiting = match reference.settings.placement {
            Placement::LeastLoad if self.conversations.is_empty() => BTreeSet::new(),
            Placement::LeastLoad | Placement::Cache => pairs(reference).collect(),
        };
    }

    /// Applies an event, after the effects that were due before it.
    pub(super) fn apply(&mut self, event: &Event) {
        match event {
            Event::Submit(new) => {
                self.models.insert(new.key, new.model.clone());
                self.conversations.extend(new.conversation.filter(|_| new.pin.is_none()).map(|it| (new.key, it)));
            }
            Event::WorkerJoined(new) => {
                let process = Process { name: process(new), models: new.models.iter().cloned().collect() };
                if new.multiplexer.is_some() {
                    forget(&mut self.last, &process.name);
                }
                self.workers.insert(new.key, process);
            }
            Event::ModelsUpdated { worker, models, .. } => {
                let process = self.workers.get_mut(worker).expect("a connected worker");
                let before = std::mem::replace(&mut process.models, models.iter().cloned().collect());
                if !before.is_subset(&process.models) {
                    forget(&mut self.last, &process.name);
                }
            }
            Event::HomesReported { worker, homes, .. } => {
                for (conversation, _) in homes {
                    self.last.entry(*conversation).or_default().insert(self.workers[worker].name.clone());
                }
            }
            Event::Cancel { .. }
            | Event::WorkerLost { .. }
            | Event::LoadReported { .. }
            | Event::Granted { .. }
            | Event::GatesSet { .. }
            | Event::SlotsReported { .. }
            | Event::Completed { .. }
            | Event::Begun { .. }
            | Event::Used { .. }
            | Event::AttemptFailed { .. }
            | Event::Silent { .. }
            | Event::WorkerDraining { .. }
            | Event::WorkerSucceeded { .. }
            | Event::SettingsChanged(_)
            | Event::Deleted
            | Event::DrainBegun
            | Event::DrainDeadline
            | Event::Tick => {}
        }
    }

    pub(super) fn record(&mut self, effect: &Effect) {
        let Effect::Send { worker, request, decision, .. } = effect else { return };
        let Some(conversation) = self.conversations.get(request) else {
            assert_eq!(*decision, Decision::LeastLoad, "a request without a conversation");
            return;
        };
        let process = &self.workers[worker].name;
        let last = self.last.insert(*conversation, BTreeSet::from([process.clone()]));
        self.seen.insert(name(*decision));
        if *decision == Decision::Home {
            assert!(last.is_some_and(|last| last.contains(process)), "the home of {conversation:?}");
        }
    }

    /// Checks the state after an event, and which requests others have overtaken in it.
    pub(super) fn check(&mut self, reference: &Reference, core: &Dispatch, effects: &[Effect]) {
        let max_homes = reference.settings.max_homes;
        assert!(core.homes_len() <= max_homes, "{} of {max_homes} homes", core.homes_len());
        assert_eq!(core.homes_len(), reference.homes_len());
        self.seen.extend((max_homes > 1 && core.homes_len() == max_homes).then_some("homes at their limit"));
        for (key, worker) in &reference.workers {
            let snapshot = core.worker(*key).expect("a connected worker");
            assert_eq!(snapshot.backlog, reference.backlog(*key), "the backlog of {key:?}");
            assert_eq!(u64::from(snapshot.trust), worker.trust, "the trust in {key:?}");
        }
        if self.conversations.is_empty() {
            return;
        }
        for (request, worker) in pairs(reference) {
            let model = &reference.requests[&request].new.model;
            assert!(!reference.has_room(worker, model), "{request:?} waits although {worker:?} has room");
        }
        for effect in effects {
            if let Effect::Send { worker, request, decision, .. } = effect {
                self.check_order(reference, (*request, *worker), *decision);
            }
        }
    }

    fn check_order(&mut self, reference: &Reference, (sent, worker): (RequestKey, WorkerKey), decision: Decision) {
        // A multiplexer has separate room for each model.
        let takes_its_room = |key: &RequestKey| {
            let model = |key| self.models.get(key);
            !reference.has_multiplexer(worker) || model(key) == model(&sent)
        };
        let has_waited =
            |key: &RequestKey| *key < sent && self.waiting.contains(&(*key, worker)) && takes_its_room(key);
        let is_like = |key: &RequestKey| reference.is_like(sent, *key);
        let still = pairs(reference).filter(|(_, able)| *able == worker).map(|(key, _)| key);
        for overtaken in still.filter(has_waited).filter(is_like).collect::<Vec<_>>() {
            self.seen.insert("overtaken");
            assert_eq!(decision, Decision::Home, "{sent:?} has overtaken {overtaken:?}");
            let times = self.overtaken.entry(overtaken).or_default();
            *times += 1;
            assert!(*times <= 8, "{overtaken:?} was overtaken {times} times");
        }
        let was_overtaken = reference.requests.get(&sent).filter(|request| request.overtaken == 8);
        if let Some(Some(model)) = was_overtaken.map(|_| self.conversations.get(&sent).map(|it| it.0 / 100)) {
            let mut queued = reference.queued().filter_map(|key| self.conversations.get(&key));
            let process = &self.workers[&worker].name;
            let is_home = |it| self.last.get(it).is_some_and(|last| last.contains(process));
            let waits_at_home = queued.any(|it| it.0 / 100 == model && is_home(it));
            self.seen.extend(waits_at_home.then_some("sent before others at home"));
        }
    }
}

/// Removes a process whose cache is lost.
fn forget(last: &mut BTreeMap<Conversation, BTreeSet<String>>, process: &str) {
    last.values_mut().for_each(|last| {
        last.remove(process);
    });
}

/// Returns each waiting request with each worker that could serve it.
pub(super) fn pairs(reference: &Reference) -> impl Iterator<Item = (RequestKey, WorkerKey)> {
    let able = |request: RequestKey, worker: WorkerKey| {
        reference.could_serve(worker, request) && !reference.passes_over(worker, request)
    };
    let workers = move |request| reference.workers.keys().map(move |worker| (request, *worker));
    reference.queued().flat_map(workers).filter(move |(request, worker)| able(*request, *worker))
}

fn name(decision: Decision) -> &'static str {
    match (decision.as_str(), decision.reason()) {
        (_, "backlog") => "moved: backlog",
        (_, "busy") => "moved: busy",
        (_, "distrust") => "moved: distrust",
        (_, "gone") => "moved: gone",
        (_, "load") => "moved: load",
        (_, "nearer") => "moved: nearer",
        (name, _) => name,
    }
}
