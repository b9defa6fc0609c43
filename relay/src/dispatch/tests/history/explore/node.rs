//! A worker process, as far as relays see it.

use std::sync::Arc;

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState};

use super::scenario::{Failing, Kind};
use crate::dispatch::tests::harness::report;
use crate::dispatch::{
    AttemptFailure, Distance, Gate, Grant, LoadFailure, Model, NewMultiplexer, NewWorker, WorkerKey,
};

/// The names that requests use.
pub(super) const MODELS: [&str; 3] = ["a", "b", "z"];

/// The models of a slot, each with all of its names there. Other workers mean a model of its own by each name.
pub(super) const IN_SLOT: [&[&str]; 2] = [&["a", "z"], &["b"]];

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) kind: Kind,
    pub(super) name: Arc<str>,
    /// Its connection to each relay.
    pub(super) links: Vec<Option<WorkerKey>>,
    pub(super) draining: bool,
    /// The requests that it grants to each relay.
    pub(super) grants: Vec<u32>,
    /// The first of its models is withdrawn.
    pub(super) withdrawn: bool,
    /// Its backend fails the first of its models.
    pub(super) failing: bool,
    pub(super) slot: SlotPhase,
}

/// The state of a multiplexer's slot, with the index of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotPhase {
    Empty,
    Loading(usize),
    Ready(usize),
    Failed(usize),
}

impl Node {
    pub(super) fn new(kind: Kind, number: usize, relays: usize) -> Self {
        let grants = match kind {
            Kind::Granting(slots) if relays == 1 => vec![slots],
            Kind::Granting(_) | Kind::Seed(_) | Kind::Swapping => vec![0; relays],
        };
        Self {
            kind,
            name: format!("worker {number}").into(),
            links: vec![None; relays],
            draining: false,
            grants,
            withdrawn: false,
            failing: false,
            slot: SlotPhase::Empty,
        }
    }

    pub(super) fn models(&self) -> Vec<Model> {
        MODELS.iter().skip(usize::from(self.withdrawn)).map(|name| Model::from(*name)).collect()
    }

    pub(super) fn failing_models(&self) -> Vec<Model> {
        self.failing.then(|| Model::from(MODELS[0])).into_iter().collect()
    }

    pub(super) fn registration(&self, key: WorkerKey) -> NewWorker {
        let max_concurrent = match self.kind {
            Kind::Seed(slots) | Kind::Granting(slots) => slots,
            Kind::Swapping => 1,
        };
        let slots = vec![self.slot_report(true)];
        let multiplexer = NewMultiplexer { instance: Arc::clone(&self.name), slots };
        NewWorker {
            key,
            models: self.models(),
            failing: self.failing_models(),
            max_concurrent,
            load: 0,
            core1: !matches!(self.kind, Kind::Seed(_)),
            multiplexer: (self.kind == Kind::Swapping).then_some(multiplexer),
            instance: Some(Arc::clone(&self.name)),
            distance: Distance::default(),
        }
    }

    pub(super) fn grant(&self, relay: usize) -> Grant {
        let links = u32::try_from(self.links.len()).unwrap();
        let capacity = if let Kind::Granting(slots) = self.kind { slots } else { 1 };
        Grant { slots: self.grants[relay], others: 0, capacity, links }
    }

    pub(super) fn gates(&self) -> (Grant, Vec<(Model, Gate)>) {
        let SlotPhase::Ready(model) = self.slot else {
            return (Grant { slots: 0, others: 0, capacity: 0, links: 1 }, vec![]);
        };
        let gate = Gate { slots: 1, others: 0, capacity: 1 };
        (Grant { slots: 1, others: 0, capacity: 1, links: 1 }, vec![(IN_SLOT[model][0].into(), gate)])
    }

    pub(super) fn slot_report(&self, is_idle: bool) -> Slot {
        let name = |model: usize| Some(IN_SLOT[model][0].to_owned());
        let (state, resident, target) = match self.slot {
            SlotPhase::Empty | SlotPhase::Failed(_) => (SlotState::Empty, None, None),
            SlotPhase::Loading(model) => (SlotState::Loading, None, name(model)),
            SlotPhase::Ready(model) => (SlotState::Ready, name(model), None),
        };
        let models = IN_SLOT.iter().enumerate().map(|(index, names)| {
            let status = match self.slot {
                SlotPhase::Ready(model) if model == index => SlotModelStatus::Resident,
                SlotPhase::Failed(model) if model == index => SlotModelStatus::Failed,
                SlotPhase::Empty | SlotPhase::Loading(_) | SlotPhase::Ready(_) | SlotPhase::Failed(_) => {
                    SlotModelStatus::Unloaded
                }
            };
            let aliases = names[1..].iter().map(|alias| (*alias).to_owned()).collect();
            SlotModel { id: names[0].into(), status, aliases, swap_cost_ms: 1_000, capacity: 1, ..SlotModel::default() }
        });
        let idle_ms = u64::from(is_idle && resident.is_some());
        Slot { id: "gpu".into(), state, resident, target, idle_ms, models: models.collect(), ..Slot::default() }
    }
}

impl Failing {
    pub(super) fn failure(self) -> AttemptFailure {
        match self {
            Self::AtCapacity => AttemptFailure::AtCapacity,
            Self::Draining => AttemptFailure::Draining,
            Self::SeveredBySwap => AttemptFailure::SeveredBySwap,
            Self::BackendUnreachable => AttemptFailure::BackendUnreachable,
            Self::BackendReset => AttemptFailure::BackendReset,
            Self::LoadFailed => AttemptFailure::LoadFailed {
                code: LoadFailure::InsufficientMemory,
                retry_after: None,
                report: report("the load failed"),
            },
            Self::Fatal => AttemptFailure::Fatal(report("the request failed")),
        }
    }
}
