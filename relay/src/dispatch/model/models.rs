//! The models that a worker serves or a request names. An unused model is removed, so clients cannot fill the table
//! with invented names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Index, IndexMut};

use super::assignment::LoadAssignment;
use super::clock::Moment;
use super::event::{Model, WorkerKey};
use super::order::QueueOrder;
use super::queue::ModelQueue;
use super::registry::Worker;
use super::residency::Multiplexer;
use super::select::Available;

/// A model's number, valid while a worker serves the model or a request names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct ModelId(usize);

impl ModelId {
    /// Before all other numbers.
    pub(crate) const FIRST: Self = Self(0);
}

/// The state of one model.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) name: Model,
    /// The workers that advertise it and accept requests.
    pub(crate) serving: Servers,
    /// The serving workers that could be sent requests for it now or after others: all but multiplexers that do not
    /// hold it. The model is warm while there is one.
    pub(crate) open: Servers,
    /// The open workers whose backend does not fail the model.
    pub(crate) sound: Servers,
    /// Workers that advertise the model and accept requests, and whose backend fails it.
    pub(crate) failing: BTreeSet<WorkerKey>,
    /// The serving workers that have a multiplexer.
    pub(crate) multiplexers: BTreeSet<WorkerKey>,
    /// Multiplexers that have demand for it from any relay, or are loading it; they may include draining ones.
    pub(crate) with_demand: BTreeSet<WorkerKey>,
    /// The multiplexer that was assigned to load it.
    pub(crate) assignment: Option<LoadAssignment>,
    /// A multiplexer that was assigned before and took too long.
    pub(crate) timed_out: Option<WorkerKey>,
    /// The workers that advertise it as an alias, with the id of its model there.
    alias_of: BTreeMap<WorkerKey, Model>,
    /// The workers that advertise it and drain.
    pub(crate) leaving: Servers,
    /// The open workers that have room.
    pub(crate) available: Available,
    pub(crate) queue: ModelQueue,
    /// The order of its queue, if it was computed.
    pub(crate) order: Option<QueueOrder>,
    /// The number of its unfinished requests, and of events that are being processed.
    held: usize,
    /// Workers to notify when the waiting requests change, without those whose report is already scheduled.
    pub(crate) listeners: BTreeSet<WorkerKey>,
}

/// Workers, separated by what they can carry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Servers {
    pub(crate) core1: BTreeSet<WorkerKey>,
    pub(crate) seeds: BTreeSet<WorkerKey>,
}

impl Servers {
    pub(crate) fn insert(&mut self, worker: &Worker) {
        self.side(worker.core1).insert(worker.key);
    }

    pub(crate) fn remove(&mut self, worker: &Worker) {
        self.side(worker.core1).remove(&worker.key);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.core1.is_empty() && self.seeds.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.core1.len() + self.seeds.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = WorkerKey> {
        self.core1.iter().chain(&self.seeds).copied()
    }

    /// Returns the workers that can carry a request with this need.
    pub(crate) fn able(&self, needs_core1: bool) -> impl Iterator<Item = WorkerKey> {
        self.core1.iter().chain(self.seeds.iter().filter(move |_| !needs_core1)).copied()
    }

    fn side(&mut self, core1: bool) -> &mut BTreeSet<WorkerKey> {
        if core1 { &mut self.core1 } else { &mut self.seeds }
    }
}

impl Group {
    fn new(name: Model) -> Self {
        Self {
            name,
            serving: Servers::default(),
            open: Servers::default(),
            sound: Servers::default(),
            failing: BTreeSet::new(),
            multiplexers: BTreeSet::new(),
            with_demand: BTreeSet::new(),
            assignment: None,
            timed_out: None,
            alias_of: BTreeMap::new(),
            leaving: Servers::default(),
            available: Available::default(),
            queue: ModelQueue::default(),
            order: None,
            held: 0,
            listeners: BTreeSet::new(),
        }
    }

    /// Adds or updates a worker that advertises the model.
    pub(crate) fn insert(&mut self, worker: &Worker, is_failing: bool) {
        self.remove(worker);
        let id = worker.id(&self.name);
        if *id != self.name {
            self.alias_of.insert(worker.key, Model::clone(id));
        }
        if worker.draining {
            self.leaving.insert(worker);
            return;
        }
        self.serving.insert(worker);
        let is_open = worker.is_open_for(&self.name);
        if is_open {
            self.open.insert(worker);
        }
        if is_failing {
            self.failing.insert(worker.key);
        } else if is_open {
            self.sound.insert(worker);
        }
        if let Some(multiplexer) = &worker.multiplexer {
            self.multiplexers.insert(worker.key);
            self.update_demand(worker.key, multiplexer);
        }
    }

    /// Updates the demand of a multiplexer after its slot report.
    pub(crate) fn update_demand(&mut self, key: WorkerKey, multiplexer: &Multiplexer) {
        if multiplexer.has_demand(&self.name) {
            self.with_demand.insert(key);
        } else {
            self.with_demand.remove(&key);
        }
    }

    /// Removes a worker that is gone or does not advertise the model any more.
    pub(crate) fn remove(&mut self, worker: &Worker) {
        self.serving.remove(worker);
        self.open.remove(worker);
        self.sound.remove(worker);
        self.failing.remove(&worker.key);
        self.leaving.remove(worker);
        self.multiplexers.remove(&worker.key);
        self.with_demand.remove(&worker.key);
        self.alias_of.remove(&worker.key);
    }

    /// True if the worker has a multiplexer that would have to load the model first.
    pub(crate) fn must_load(&self, worker: WorkerKey) -> bool {
        self.multiplexers.contains(&worker) && !self.open.core1.contains(&worker)
    }

    /// Returns a worker that cannot carry requests that need `core1`, if only such workers exist. Without any worker
    /// the model is not "too old".
    pub(crate) fn only_too_old(&self) -> Option<WorkerKey> {
        (self.serving.core1.is_empty() && self.leaving.core1.is_empty())
            .then(|| self.serving.seeds.first().copied())
            .flatten()
    }

    /// Returns the ids that the workers advertising it mean by it.
    pub(crate) fn ids(&self) -> BTreeSet<Model> {
        let others = self.serving.len() + self.leaving.len() > self.alias_of.len();
        self.alias_of.values().chain(others.then_some(&self.name)).cloned().collect()
    }

    fn is_unused(&self) -> bool {
        self.held == 0 && self.serving.is_empty() && self.leaving.is_empty()
    }
}

/// All models, by name and by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Models {
    ids: HashMap<Model, ModelId>,
    groups: Vec<Option<Group>>,
    free: Vec<ModelId>,
    /// Models whose assignment must be re-evaluated.
    pub(crate) touched: BTreeSet<ModelId>,
    /// The touched models whose assignment may move to another worker with demand, because such a worker has reported.
    pub(crate) moving: BTreeSet<ModelId>,
    /// The expiry of each assignment.
    pub(crate) assignment_dues: BTreeSet<(Moment, ModelId)>,
}

impl Models {
    pub(crate) fn id(&self, name: &str) -> Option<ModelId> {
        self.ids.get(name).copied()
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Group> {
        self.id(name).map(|id| &self[id])
    }

    /// Returns the model's number, a new one if it has none. The caller holds it, or has a worker serve it.
    pub(crate) fn intern(&mut self, name: &Model) -> ModelId {
        if let Some(id) = self.id(name) {
            return id;
        }
        let group = Some(Group::new(name.clone()));
        let id = match self.free.pop() {
            Some(id) => {
                self.groups[id.0] = group;
                id
            }
            None => {
                self.groups.push(group);
                ModelId(self.groups.len() - 1)
            }
        };
        self.ids.insert(name.clone(), id);
        id
    }

    /// Keeps a model in use: for a request until its end, or while an event is processed.
    pub(crate) fn retain(&mut self, id: ModelId) {
        self[id].held += 1;
    }

    /// The opposite of [`retain`](Self::retain): removes the model if it is no longer in use.
    pub(crate) fn release(&mut self, id: ModelId) {
        self[id].held -= 1;
        self.remove_if_unused(id);
    }

    fn remove_if_unused(&mut self, id: ModelId) {
        if self[id].is_unused()
            && let Some(group) = self.groups[id.0].take()
        {
            self.ids.remove(&group.name);
            self.touched.remove(&id);
            self.moving.remove(&id);
            if let Some(assignment) = group.assignment {
                self.assignment_dues.remove(&(assignment.until, id));
            }
            self.free.push(id);
        }
    }

    /// Marks a model after a change that may affect its assignment.
    pub(crate) fn touch(&mut self, id: ModelId) {
        let group = &self[id];
        if !group.multiplexers.is_empty() || group.assignment.is_some() {
            self.touched.insert(id);
        }
    }

    /// Marks a model after the slot report of a multiplexer that can hold it.
    pub(crate) fn mark_reported(&mut self, id: ModelId) {
        self.touch(id);
        if self[id].assignment.is_some() {
            self.moving.insert(id);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter().flatten()
    }
}

/// A number is held only while its model is in use, so its group always exists.
impl Index<ModelId> for Models {
    type Output = Group;

    fn index(&self, id: ModelId) -> &Group {
        self.groups[id.0].as_ref().expect("a model in use has a group")
    }
}

impl IndexMut<ModelId> for Models {
    fn index_mut(&mut self, id: ModelId) -> &mut Group {
        self.groups[id.0].as_mut().expect("a model in use has a group")
    }
}
