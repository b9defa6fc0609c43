//! A worker with one slot, which divides each model that it holds as the real one does, and swaps by a plain rule.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use modelrelay_protocol::grants::{GrantValues, SlotAllocator};
use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState};

use crate::dispatch::{Gate, Model, RequestKey};

pub(super) const MODELS: [&str; 3] = ["a", "b", "c"];

pub(super) const CAPACITY: u32 = 2;
const LOAD: Duration = Duration::from_millis(300);
const WAKE: Duration = Duration::from_millis(60);
/// The least time that a model stays loaded while requests wait for it.
const QUANTUM: Duration = Duration::from_millis(900);
const BACK_OFF: Duration = Duration::from_millis(800);

/// A running request.
pub(super) struct Job {
    pub(super) relay: usize,
    pub(super) request: RequestKey,
    pub(super) attempt: u32,
    pub(super) until: Duration,
}

#[derive(Clone, Copy)]
enum State {
    Empty,
    Ready { model: usize, since: Duration },
    Draining { model: usize, to: usize },
    Loading { to: usize, until: Duration },
}

/// A worker with one slot.
pub(super) struct Node {
    state: State,
    pub(super) allocators: Vec<SlotAllocator<usize>>,
    pub(super) granted: Vec<BTreeMap<usize, GrantValues>>,
    /// The last reported demand of each relay for models that are not loaded.
    pub(super) wanted: Vec<BTreeMap<usize, u32>>,
    failed_until: Vec<Duration>,
    pub(super) jobs: Vec<Job>,
    /// The models that it has put to sleep instead of unloading them.
    asleep: [bool; MODELS.len()],
    /// The time since which its resident has been idle.
    idle_since: Option<Duration>,
    /// A model that it cannot load.
    pub(super) broken: Option<usize>,
    pub(super) loads: u32,
}

impl Node {
    pub(super) fn new() -> Self {
        Self {
            state: State::Empty,
            allocators: MODELS.iter().map(|_| SlotAllocator::new(0)).collect(),
            granted: vec![BTreeMap::new(); MODELS.len()],
            wanted: vec![BTreeMap::new(); MODELS.len()],
            failed_until: vec![Duration::ZERO; MODELS.len()],
            jobs: Vec::new(),
            asleep: [false; MODELS.len()],
            idle_since: None,
            broken: None,
            loads: 0,
        }
    }

    pub(super) fn serves(&self, model: usize) -> bool {
        matches!(self.state, State::Ready { model: resident, .. } if resident == model)
    }

    pub(super) fn finish(&mut self, r: usize, now: Instant) {
        if let State::Ready { model, .. } | State::Draining { model, .. } = self.state {
            self.allocators[model].on_finished(r, now);
        }
    }

    pub(super) fn forget(&mut self, r: usize, now: Instant) {
        self.jobs.retain(|job| job.relay != r);
        self.allocators.iter_mut().for_each(|allocator| allocator.remove_link(r, now));
        self.wanted.iter_mut().for_each(|wanted| {
            wanted.remove(&r);
        });
        self.granted.iter_mut().for_each(|granted| {
            granted.remove(&r);
        });
    }

    pub(super) fn gates(&self, r: usize) -> Vec<(Model, Gate)> {
        let State::Ready { model, .. } = self.state else {
            return Vec::new();
        };
        let values = self.granted[model].get(&r);
        let gate = values.map(|values| Gate { slots: values.slots, others: values.others, capacity: values.capacity });
        gate.into_iter().map(|gate| (MODELS[model].into(), gate)).collect()
    }

    pub(super) fn all_wanted(&self) -> [bool; MODELS.len()] {
        std::array::from_fn(|model| self.is_wanted(model))
    }

    fn is_wanted(&self, model: usize) -> bool {
        self.wanted[model].values().sum::<u32>() > 0
    }

    /// Returns the next model in rotation with waiting requests.
    fn next_wanted(&self, after: usize, now: Duration) -> Option<usize> {
        let turn = (1..=MODELS.len()).map(|step| (after + step) % MODELS.len());
        turn.filter(|model| *model != after).find(|model| self.is_wanted(*model) && self.failed_until[*model] <= now)
    }

    /// Records since when the worker has been idle; returns true if that has just begun or ended.
    pub(super) fn note_idle(&mut self, now: Duration) -> bool {
        let is_idle = self.jobs.is_empty() && matches!(self.state, State::Ready { .. });
        let changed = is_idle != self.idle_since.is_some();
        if changed {
            self.idle_since = is_idle.then_some(now);
        }
        changed
    }

    /// Advances the slot by one step; returns true if it did.
    pub(super) fn advance(&mut self, now: Duration, instant: Instant) -> bool {
        match self.state {
            State::Empty => {
                let any = (0..MODELS.len()).find(|model| self.is_wanted(*model) && self.failed_until[*model] <= now);
                let Some(to) = any else { return false };
                self.state = State::Loading { to, until: now + LOAD };
            }
            State::Ready { model, since } => {
                let Some(to) = self.next_wanted(model, now) else { return false };
                let is_idle = self.jobs.is_empty() && self.relays_wait_for(model) == 0;
                if !is_idle && now < since + QUANTUM {
                    return false;
                }
                for (r, waiting) in &mut self.wanted[model] {
                    *waiting = self.allocators[model].waiting(*r);
                }
                self.allocators[model].set_capacity(0, instant);
                self.state = State::Draining { model, to };
            }
            State::Draining { model, to } => {
                if !self.jobs.is_empty() {
                    return false;
                }
                // Every other model can sleep.
                self.asleep[model] = model % 2 == 0;
                let load = if self.asleep[to] { WAKE } else { LOAD };
                self.state = State::Loading { to, until: now + load };
            }
            State::Loading { to, until } => {
                if now < until {
                    return false;
                }
                self.end_load(to, now, instant);
            }
        }
        true
    }

    fn end_load(&mut self, model: usize, now: Duration, instant: Instant) {
        if self.broken == Some(model) {
            self.failed_until[model] = now + BACK_OFF;
            self.wanted[model].clear();
            self.state = State::Empty;
            return;
        }
        self.loads += 1;
        self.asleep[model] = false;
        self.state = State::Ready { model, since: now };
        self.allocators[model].set_capacity(CAPACITY, instant);
        for (r, waiting) in &self.wanted[model] {
            self.allocators[model].on_demand(*r, *waiting, instant);
        }
    }

    fn relays_wait_for(&self, model: usize) -> u32 {
        self.wanted[model].keys().map(|r| self.allocators[model].waiting(*r)).sum()
    }

    pub(super) fn slot(&self, now: Duration) -> Slot {
        let (state, resident, target) = match self.state {
            State::Empty => (SlotState::Empty, None, None),
            State::Ready { model, .. } => (SlotState::Ready, Some(model), None),
            State::Draining { model, to } => (SlotState::Draining, Some(model), Some(to)),
            State::Loading { to, .. } => (SlotState::Loading, None, Some(to)),
        };
        let name = |model: usize| MODELS[model].to_owned();
        let wanted = (0..MODELS.len()).filter(|model| resident != Some(*model) && self.is_wanted(*model)).count();
        let models = (0..MODELS.len()).map(|model| {
            let back_off = self.failed_until[model].saturating_sub(now);
            let failed = !back_off.is_zero();
            SlotModel {
                id: name(model),
                status: match (failed, resident == Some(model), self.asleep[model]) {
                    (true, ..) => SlotModelStatus::Failed,
                    (false, true, _) => SlotModelStatus::Resident,
                    (false, false, true) => SlotModelStatus::Sleeping,
                    (false, false, false) => SlotModelStatus::Unloaded,
                },
                wanted: resident != Some(model) && self.is_wanted(model),
                swap_cost_ms: if self.asleep[model] { WAKE } else { LOAD }.as_millis() as u64,
                retry_ms: failed.then_some(back_off.as_millis() as u64),
                ..SlotModel::default()
            }
        });
        Slot {
            id: "gpu0".to_owned(),
            state,
            resident: resident.map(name),
            target: target.map(name),
            wanted: wanted as u32,
            idle_ms: self.idle_since.map_or(0, |since| (now - since).as_millis().max(1) as u64),
            models: models.collect(),
            ..Slot::default()
        }
    }
}
