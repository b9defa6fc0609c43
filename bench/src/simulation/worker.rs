//! The worker's multiplexer: a slot behind a plain relay.
//!
//! Requests wait where they do in practice: at a relay, which reports its demand and sends requests within its grant,
//! or in the worker, if the relay has no queue.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use modelrelay_multiplexer::event::{Arrival, Demand, Event, LinkKind, RelayKey, RequestClass, RequestKey};

use super::slot::{Setup, Slot, SlotEffect, name, number};
use super::{Job, JobId, ModelId, Scheduler, Time};

const RELAY: RelayKey = RelayKey(1);

/// The slot and its relay.
#[derive(Debug)]
pub struct WorkerSimulation {
    slot: Slot,
    start: Instant,
    relay: LinkKind,
    /// The requests that wait at the relay.
    queues: BTreeMap<ModelId, VecDeque<(JobId, Time)>>,
    granted: BTreeMap<ModelId, u32>,
    running: BTreeMap<JobId, ModelId>,
    severed: u32,
    refused: u32,
}

impl Setup {
    /// Starts the slot and a relay without keys.
    pub fn start(self) -> WorkerSimulation {
        let start = Instant::now();
        let mut ours = WorkerSimulation {
            slot: Slot::new(&self, start),
            start,
            relay: self.relay,
            queues: BTreeMap::new(),
            granted: BTreeMap::new(),
            running: BTreeMap::new(),
            severed: 0,
            refused: 0,
        };
        let mut begin = Vec::new();
        ours.handle(Event::RelayJoined { relay: RELAY, kind: self.relay }, Duration::ZERO, &mut begin);
        ours.handle(Event::Started, Duration::ZERO, &mut begin);
        ours
    }
}

impl WorkerSimulation {
    /// Models that were unloaded.
    pub fn evictions(&self) -> u32 {
        self.slot.evictions
    }

    /// Requests that a swap has ended.
    pub fn severed(&self) -> u32 {
        self.severed
    }

    /// Requests that were not served.
    pub fn refused(&self) -> u32 {
        self.refused
    }

    /// Disconnects a client whose request waits.
    pub fn cancel(&mut self, id: JobId, now: Time, begin: &mut Vec<JobId>) {
        match self.relay {
            LinkKind::Held => self.handle(Event::Cancelled { request: RequestKey(id as u64) }, now, begin),
            LinkKind::Granted => {
                for queue in self.queues.values_mut() {
                    queue.retain(|(queued, _)| *queued != id);
                }
                self.state_demand(now, begin);
            }
        }
    }

    fn handle(&mut self, event: Event, now: Time, begin: &mut Vec<JobId>) {
        for effect in self.slot.handle(event, now) {
            match effect {
                SlotEffect::Lease { request, model } => {
                    let id = usize::try_from(request.0).expect("a request of ours");
                    assert!(self.running.insert(id, number(&model)).is_none(), "request {id} runs already");
                    begin.push(id);
                }
                SlotEffect::Grant { model, values, .. } => drop(self.granted.insert(number(&model), values.slots)),
                SlotEffect::CloseGate { .. } => self.granted.clear(),
                SlotEffect::CancelLease { .. } => self.severed += 1,
                // A relay would try another worker, and then respond to its client.
                SlotEffect::Fail { .. } => self.refused += 1,
                SlotEffect::Changed => {}
                SlotEffect::Done(done) => self.handle(*done, now, begin),
            }
        }
    }

    /// Acts as the relay: sends what it may, oldest first, and then reports the remaining demand.
    fn send(&mut self, now: Time, begin: &mut Vec<JobId>) {
        let may = |ours: &Self, model: ModelId| {
            let own = ours.running.values().filter(|running| **running == model).count();
            own < ours.granted.get(&model).copied().unwrap_or(0) as usize
        };
        loop {
            let sendable = self.queues.iter().filter(|(model, queue)| !queue.is_empty() && may(self, **model));
            let Some(model) = sendable.map(|(model, _)| *model).next() else { return };
            let Some((id, at)) = self.queues.get_mut(&model).and_then(VecDeque::pop_front) else { return };
            self.arrived(id, model, at, now, begin);
        }
    }

    fn arrived(&mut self, id: JobId, model: ModelId, at: Time, now: Time, begin: &mut Vec<JobId>) {
        let (request, class) = (RequestKey(id as u64), RequestClass::Normal);
        let arrival = Arrival { relay: RELAY, request, model: name(model), at: self.start + at, class };
        self.handle(Event::Arrived(arrival), now, begin);
    }

    fn state_demand(&mut self, now: Time, begin: &mut Vec<JobId>) {
        let waiting = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        let models = waiting.map(|(model, queue)| {
            let ages = queue.iter().map(|(_, at)| now - *at);
            Demand {
                model: name(*model),
                waiting: u32::try_from(queue.len()).unwrap_or(u32::MAX),
                oldest: ages.clone().max().unwrap_or_default(),
                sum: ages.sum(),
                class: RequestClass::Normal,
                rank: 0,
            }
        });
        let models = models.collect();
        self.handle(Event::Demand { relay: RELAY, models }, now, begin);
        self.send(now, begin);
    }
}

impl Scheduler for WorkerSimulation {
    fn arrive(&mut self, id: JobId, &Job { model, .. }: &Job, now: Time, begin: &mut Vec<JobId>) {
        match self.relay {
            LinkKind::Held => self.arrived(id, model, now, now, begin),
            LinkKind::Granted => {
                self.queues.entry(model).or_default().push_back((id, now));
                self.send(now, begin);
                self.state_demand(now, begin);
            }
        }
    }

    fn finish(&mut self, id: JobId, now: Time, begin: &mut Vec<JobId>) -> bool {
        self.running.remove(&id);
        self.handle(Event::Released { request: RequestKey(id as u64), answered: true }, now, begin);
        self.send(now, begin);
        true
    }

    fn tick(&mut self, now: Time, begin: &mut Vec<JobId>) {
        let event = self.slot.take_loaded(now).unwrap_or(Event::Tick);
        self.handle(event, now, begin);
        self.send(now, begin);
    }

    fn next_timeout(&self) -> Option<Time> {
        self.slot.next_timeout()
    }

    fn loads(&self) -> u32 {
        self.slot.loads
    }
}
