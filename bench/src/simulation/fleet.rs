//! Relays and workers together: the relay's dispatch core and the worker's slot machine, with simulated drivers. Each
//! worker has one slot, and a link to each relay.
//!
//! Messages take no time, or a random one in which those of a link stay in order. Links break, and are dialled again at
//! once.
//!
//! The client of a job determines its relay. The model of a job also names its key: the key is its tens, the model its
//! units.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::effect::LeaseEnd;
use modelrelay_multiplexer::event::{Arrival, Demand, Event as SlotEvent, LinkKind, RelayKey, RequestKey as LeaseKey};
use modelrelay_protocol::grants::GrantValues;
use modelrelay_relay::dispatch::{
    AttemptFailure, CancelReason, Class, Dispatch, Distance, Effect, Event, Failure, Gate, Grant, LossCause,
    NewMultiplexer, NewRequest, NewWorker, Owner, RequestKey, RequeueReason, TokenUsage, Weight, WorkerKey,
};

use super::report::DRAIN;
use super::rng::Rng;
use super::slot::{Setup, Slot, SlotEffect, name};
use super::{Job, JobId, ModelId, Scheduler, Time};
use crate::dispatch_core::unlimited;

/// The tokens of a response for each second that it takes.
const TOKENS_PER_SECOND: f64 = 50.0;

/// The bytes of each request.
const BYTES: u64 = 4_000;

/// The part of a job's model that names its key.
pub const KEY: ModelId = 10;

/// The slowest of the messages that take time, in milliseconds.
const SLOWEST: f64 = 12.0;

/// A request that loses its worker more often than this fails, as it should.
const MOST_LOSSES: u32 = 3;

/// What disturbs a fleet.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The client of one of the relay's requests disconnects, whichever request has this index.
    Cancel {
        /// The relay.
        relay: usize,
        /// Counts the relay's requests, again from the first after the last.
        index: usize,
    },
    /// A link breaks.
    Break {
        /// The link.
        link: usize,
    },
}

#[derive(Debug)]
enum Message {
    ToRelay(usize, Box<Event>),
    ToSlot(usize, Box<SlotEvent>),
    /// To the worker of this link: the relay no longer wants this attempt's response.
    CancelSent(WorkerKey, RequestKey, u32),
}

/// A worker's connection to a relay. Both ends know it by the same number.
#[derive(Debug)]
struct Link {
    key: WorkerKey,
    gates: BTreeMap<Model, GrantValues>,
    /// The arrival of the last message to the relay and to the worker.
    last: [Time; 2],
}

/// An attempt that was sent to a worker.
#[derive(Debug)]
struct Sent {
    link: WorkerKey,
    request: RequestKey,
    attempt: u32,
    at: Time,
}

/// The relays and the workers.
#[derive(Debug)]
pub struct Fleet {
    start: Instant,
    relays: Vec<Dispatch>,
    slots: Vec<Slot>,
    models: Vec<Model>,
    /// The concurrent requests of each model.
    capacity: u32,
    /// Link `worker * relays + relay`.
    links: Vec<Link>,
    last_link: u64,
    /// The class of each key; `None` for requests without keys.
    classes: Option<Vec<Class>>,
    seed: Option<u64>,
    /// The source of the messages' times; `None` if they take none.
    delays: Option<Rng>,
    faults: VecDeque<(Time, Fault)>,
    /// In order of arrival. Each names its link, if it is lost with one.
    messages: BTreeMap<(Time, u64), (Option<WorkerKey>, Message)>,
    last_message: u64,
    /// The requests of each relay that have not ended, with their models.
    pending: Vec<BTreeMap<JobId, Model>>,
    /// The number of times that each request was on a link that broke.
    losses: BTreeMap<JobId, u32>,
    sent: BTreeMap<LeaseKey, Sent>,
    last_lease: u64,
    running: BTreeMap<JobId, LeaseKey>,
}

impl Fleet {
    /// Starts a worker with one slot for these models, and a relay whose keys have these classes, or that has no keys.
    pub fn with_keys(models: usize, load: Duration, classes: Option<Vec<Class>>) -> Self {
        let setup = Setup::new(models, load).drain_timeout(DRAIN);
        Self { classes, ..Self::start(1, &[setup], None) }
    }

    /// Starts these workers, all with the same models, and relays without keys. Messages take time if there is a seed.
    pub fn start(relays: usize, workers: &[Setup], seed: Option<u64>) -> Self {
        let start = Instant::now();
        let models = &workers[0].config.models;
        let link = |_| Link { key: WorkerKey(0), gates: BTreeMap::new(), last: [Time::ZERO; 2] };
        let mut fleet = Self {
            start,
            relays: (0..relays).map(|_| Dispatch::new(unlimited())).collect(),
            slots: workers.iter().map(|setup| Slot::new(setup, start)).collect(),
            models: models.iter().map(|model| Model::clone(&model.id)).collect(),
            capacity: models[0].capacity,
            links: (0..relays * workers.len()).map(link).collect(),
            last_link: 0,
            classes: None,
            seed,
            delays: seed.map(Rng::new),
            faults: VecDeque::new(),
            messages: BTreeMap::new(),
            last_message: 0,
            pending: vec![BTreeMap::new(); relays],
            losses: BTreeMap::new(),
            sent: BTreeMap::new(),
            last_lease: 0,
            running: BTreeMap::new(),
        };
        (0..fleet.links.len()).for_each(|link| fleet.join(link, Time::ZERO));
        (0..workers.len()).for_each(|worker| fleet.send_to_slot(worker, SlotEvent::Started, Time::ZERO));
        fleet.settle(Time::ZERO, &mut Vec::new());
        fleet
    }

    /// Plans faults, in the order of their times.
    pub fn plan(&mut self, faults: impl IntoIterator<Item = (Time, Fault)>) {
        self.faults.extend(faults);
    }

    /// The number of requests that have not ended.
    pub fn pending(&self) -> usize {
        self.pending.iter().map(BTreeMap::len).sum()
    }

    /// Returns the worker and the relay of a link.
    fn ends(&self, link: usize) -> (usize, usize) {
        (link / self.relays.len(), link % self.relays.len())
    }

    fn link(&self, key: WorkerKey) -> Option<usize> {
        self.links.iter().position(|link| link.key == key)
    }

    fn links_of(&self, worker: usize) -> std::ops::Range<usize> {
        worker * self.relays.len()..(worker + 1) * self.relays.len()
    }

    fn join(&mut self, link: usize, now: Time) {
        let (worker, relay) = self.ends(link);
        self.last_link += 1;
        let key = WorkerKey(self.last_link);
        self.links[link] = Link { key, gates: BTreeMap::new(), last: [now; 2] };
        let instance = format!("worker {worker} of {:?}", self.seed).into();
        let multiplexer = NewMultiplexer { instance, slots: vec![self.slots[worker].report(now)] };
        let new = NewWorker {
            key,
            models: self.models.clone(),
            failing: Vec::new(),
            max_concurrent: self.capacity,
            load: 0,
            core1: true,
            multiplexer: Some(multiplexer),
            instance: None,
            distance: Distance::default(),
        };
        self.send_to_slot(worker, SlotEvent::RelayJoined { relay: RelayKey(key.0), kind: LinkKind::Granted }, now);
        self.send_to_relay(relay, Event::WorkerJoined(new), now);
    }

    fn disturb(&mut self, fault: Fault, now: Time, begin: &mut Vec<JobId>) {
        // Whatever has arrived by now comes first.
        self.settle(now, begin);
        match fault {
            Fault::Cancel { relay, index } => {
                let pending = &self.pending[relay];
                let Some(id) = pending.keys().nth(index % pending.len().max(1)) else { return };
                let (request, reason) = (RequestKey(*id as u64), CancelReason::ClientDisconnect);
                self.send_to_relay(relay, Event::Cancel { request, reason }, now);
            }
            Fault::Break { link } => {
                let ((worker, relay), key) = (self.ends(link), self.links[link].key);
                self.messages.retain(|_, (on, _)| *on != Some(key));
                self.sent.retain(|_, sent| sent.link != key);
                self.running.retain(|_, lease| self.sent.contains_key(lease));
                self.send_to_slot(worker, SlotEvent::RelayLost { relay: RelayKey(key.0) }, now);
                let (started, cause) = (HashSet::new(), LossCause::Disconnected);
                self.send_to_relay(relay, Event::WorkerLost { worker: key, started, cause }, now);
                self.settle(now, begin);
                self.join(link, now);
            }
        }
    }

    fn send_to_relay(&mut self, relay: usize, event: Event, now: Time) {
        self.deliver(now, None, Message::ToRelay(relay, Box::new(event)));
    }

    fn send_to_slot(&mut self, worker: usize, event: SlotEvent, now: Time) {
        self.deliver(now, None, Message::ToSlot(worker, Box::new(event)));
    }

    fn deliver(&mut self, at: Time, on: Option<WorkerKey>, message: Message) {
        self.last_message += 1;
        self.messages.insert((at, self.last_message), (on, message));
    }

    /// Sends a message over a link, behind those before it in the same direction.
    fn send(&mut self, link: usize, message: Message, now: Time) {
        let millis = self.delays.as_mut().map_or(0.0, |delays| 1.0 + (delays.unit() * SLOWEST).floor());
        let link = &mut self.links[link];
        let last = &mut link.last[usize::from(!matches!(message, Message::ToRelay(..)))];
        let (at, key) = ((now + Duration::from_secs_f64(millis / 1e3)).max(*last), link.key);
        *last = at;
        self.deliver(at, Some(key), message);
    }

    fn send_up(&mut self, link: usize, event: Event, now: Time) {
        let (_, relay) = self.ends(link);
        self.send(link, Message::ToRelay(relay, Box::new(event)), now);
    }

    fn send_down(&mut self, link: usize, event: SlotEvent, now: Time) {
        let (worker, _) = self.ends(link);
        self.send(link, Message::ToSlot(worker, Box::new(event)), now);
    }

    /// Passes messages until nothing happens any more at this time.
    fn settle(&mut self, now: Time, begin: &mut Vec<JobId>) {
        while let Some(first) = self.messages.first_entry().filter(|first| first.key().0 <= now) {
            match first.remove().1 {
                Message::ToRelay(relay, event) => {
                    let mut effects = Vec::new();
                    self.relays[relay].handle(*event, self.start + now, &mut effects);
                    effects.into_iter().for_each(|effect| self.apply(relay, effect, now));
                }
                Message::ToSlot(worker, event) => self.handle_at_slot(worker, *event, now, begin),
                Message::CancelSent(link, request, attempt) => self.cancel(link, request, attempt, now, begin),
            }
        }
    }

    fn handle_at_slot(&mut self, worker: usize, event: SlotEvent, now: Time, begin: &mut Vec<JobId>) {
        let effects = self.slots[worker].handle(event, now).into_iter();
        let (rejected, others): (Vec<_>, Vec<_>) =
            effects.partition(|effect| matches!(effect, SlotEffect::Fail { .. }));
        // As the worker does it: the state first, then its consequence for requests.
        for effect in others.into_iter().chain(rejected) {
            self.carry_out(worker, effect, now, begin);
        }
    }

    fn apply(&mut self, relay: usize, effect: Effect, now: Time) {
        match effect {
            Effect::Send { worker: key, request, attempt, class, .. } => {
                let model = Model::clone(&self.pending[relay][&id(request)]);
                self.last_lease += 1;
                let lease = LeaseKey(self.last_lease);
                self.sent.insert(lease, Sent { link: key, request, attempt, at: now });
                let (relay, at, class) = (RelayKey(key.0), self.start + now, class.into());
                let arrival = Arrival { relay, request: lease, model, at, class };
                let link = self.link(key).expect("a worker that has joined");
                self.send_down(link, SlotEvent::Arrived(arrival), now);
            }
            Effect::CancelSent { worker, request, attempt, .. } => {
                let link = self.link(worker).expect("a worker that has joined");
                self.send(link, Message::CancelSent(worker, request, attempt), now);
            }
            Effect::Demand { worker, demand } => {
                let models = demand.into_iter().map(|entry| Demand {
                    model: entry.model,
                    waiting: entry.waiting,
                    oldest: entry.oldest,
                    sum: entry.sum,
                    class: entry.class.into(),
                    rank: entry.rank,
                });
                let models = models.collect();
                let link = self.link(worker).expect("a worker that has joined");
                self.send_down(link, SlotEvent::Demand { relay: RelayKey(worker.0), models }, now);
            }
            Effect::Finished { request, .. } | Effect::Cancelled { request, .. } => {
                self.pending[relay].remove(&id(request));
            }
            Effect::Requeued { request, reason: RequeueReason::WorkerLost, .. } => {
                *self.losses.entry(id(request)).or_default() += 1;
            }
            Effect::Requeued { .. } => {}
            Effect::Fail { request, failure: Failure::RequeueExhausted, .. }
                if self.losses.get(&id(request)) == Some(&MOST_LOSSES) =>
            {
                self.pending[relay].remove(&id(request));
            }
            Effect::Fail { .. } | Effect::Severed { .. } | Effect::DrainedIdle { .. } => {
                panic!("every request is served: {effect:?}")
            }
        }
    }

    fn carry_out(&mut self, worker: usize, effect: SlotEffect, now: Time, begin: &mut Vec<JobId>) {
        match effect {
            SlotEffect::Lease { request: lease, .. } => {
                let id = id(self.sent[&lease].request);
                assert!(self.running.insert(id, lease).is_none(), "request {id} runs already");
                begin.push(id);
            }
            SlotEffect::Grant { relay, model, values } => {
                if let Some(link) = self.link(WorkerKey(relay.0)) {
                    self.links[link].gates.insert(model, values);
                    self.report_gates(link, now);
                }
            }
            SlotEffect::CloseGate { model } => {
                for link in self.links_of(worker) {
                    self.links[link].gates.remove(&model);
                    self.report_gates(link, now);
                }
            }
            SlotEffect::Fail { request: lease } => {
                let Sent { link: worker, request, attempt, .. } = self.sent.remove(&lease).expect("it was sent");
                let link = self.link(worker).expect("its link");
                let failure = AttemptFailure::AtCapacity;
                self.send_up(link, Event::AttemptFailed { worker, request, attempt, failure }, now);
            }
            SlotEffect::Changed => {
                let slots = vec![self.slots[worker].report(now)];
                for link in self.links_of(worker) {
                    let (worker, slots) = (self.links[link].key, slots.clone());
                    self.send_up(link, Event::SlotsReported { worker, slots }, now);
                }
            }
            SlotEffect::CancelLease { request, why: LeaseEnd::RelayLost } => {
                self.send_to_slot(worker, SlotEvent::Released { request, answered: false }, now);
            }
            SlotEffect::CancelLease { .. } => panic!("no response is cut off"),
            SlotEffect::Done(done) => self.send_to_slot(worker, *done, now),
        }
    }

    fn report_gates(&mut self, link: usize, now: Time) {
        let gate =
            |values: &GrantValues| Gate { slots: values.slots, others: values.others, capacity: values.capacity };
        let Link { key: worker, gates, .. } = &self.links[link];
        let (worker, links) = (*worker, self.relays.len() as u32);
        let gates = gates.iter().map(|(model, values)| (Model::clone(model), gate(values))).collect();
        let sums = Grant { slots: self.capacity, others: 0, capacity: self.capacity, links };
        self.send_up(link, Event::GatesSet { worker, sums, gates }, now);
    }

    /// Ends an attempt at its worker, unless it has ended there.
    fn cancel(&mut self, link: WorkerKey, request: RequestKey, attempt: u32, now: Time, begin: &mut Vec<JobId>) {
        let is_it = |sent: &Sent| (sent.link, sent.request, sent.attempt) == (link, request, attempt);
        let Some(lease) = self.sent.iter().find(|(_, sent)| is_it(sent)).map(|(lease, _)| *lease) else { return };
        self.sent.remove(&lease);
        self.running.remove(&id(request));
        let (worker, _) = self.ends(self.link(link).expect("its link"));
        // Before the next message, which may be a request for the place that has become free.
        self.handle_at_slot(worker, SlotEvent::Cancelled { request: lease }, now, begin);
        self.handle_at_slot(worker, SlotEvent::Released { request: lease, answered: false }, now, begin);
    }
}

impl Scheduler for Fleet {
    fn arrive(&mut self, id: JobId, job: &Job, now: Time, begin: &mut Vec<JobId>) {
        let relay = job.client % self.relays.len();
        let mut new = NewRequest::new(RequestKey(id as u64), name(job.model % KEY), BYTES);
        self.pending[relay].insert(id, Model::clone(&new.model));
        new.owner = self.classes.as_ref().map(|classes| {
            let key = job.model / KEY;
            Owner { key: Some(format!("key {key}").into()), weight: Weight::default(), class: classes[key] }
        });
        self.send_to_relay(relay, Event::Submit(new), now);
        self.settle(now, begin);
    }

    fn finish(&mut self, id: JobId, now: Time, begin: &mut Vec<JobId>) -> bool {
        let Some(lease) = self.running.remove(&id) else { return false };
        let Sent { link: worker, request, attempt, at } = self.sent.remove(&lease).expect("it was sent");
        let output = ((now - at).as_secs_f64() * TOKENS_PER_SECOND) as u64;
        let usage = Some(TokenUsage { input: BYTES / 4, output });
        let link = self.link(worker).expect("its link");
        self.send_to_slot(self.ends(link).0, SlotEvent::Released { request: lease, answered: true }, now);
        self.send_up(link, Event::Completed { worker, request, attempt, cached: None, usage }, now);
        self.settle(now, begin);
        true
    }

    fn tick(&mut self, now: Time, begin: &mut Vec<JobId>) {
        while self.faults.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, fault)) = self.faults.pop_front()
        {
            self.disturb(fault, now, begin);
        }
        let mut is_loaded = false;
        for worker in 0..self.slots.len() {
            if let Some(loaded) = self.slots[worker].take_loaded(now) {
                is_loaded = true;
                self.send_to_slot(worker, loaded, now);
            }
        }
        if !is_loaded {
            // Without effect on those that have nothing due.
            (0..self.slots.len()).for_each(|worker| self.send_to_slot(worker, SlotEvent::Tick, now));
            (0..self.relays.len()).for_each(|relay| self.send_to_relay(relay, Event::Tick, now));
        }
        self.settle(now, begin);
    }

    fn next_timeout(&self) -> Option<Time> {
        let slots = self.slots.iter().filter_map(Slot::next_timeout);
        let relays = self.relays.iter().filter_map(Dispatch::next_timeout);
        let relays = relays.map(|due| due.saturating_duration_since(self.start));
        let messages = self.messages.first_key_value().map(|((at, _), _)| *at);
        slots.chain(relays).chain(messages).chain(self.faults.front().map(|(at, _)| *at)).min()
    }

    fn loads(&self) -> u32 {
        self.slots.iter().map(|slot| slot.loads).sum()
    }

    fn loses_responses(&self) -> bool {
        self.delays.is_some()
    }
}

fn id(request: RequestKey) -> JobId {
    request.0 as usize
}
