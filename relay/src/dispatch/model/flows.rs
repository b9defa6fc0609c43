//! The service that each API key has attained, and the order of waiting requests that follows from it.
//!
//! A *flow* is what the requests of one key have in common; the requests without a key are one flow, too. The lanes of
//! all flows stand in four *lines*: one for each class, and one more for the lanes whose first request is promoted. A
//! line is in the order of the flows' service, then of arrival.
//!
//! A charge moves one flow within each line, whatever number of lanes it has, so it costs the logarithm of the number
//! of flows that wait.
//!
//! The *floor* is the least settled service of a flow with waiting requests, and never falls. A flow that begins to
//! wait is lifted to it, so time without requests gives no credit. Estimates of running requests are not settled: if
//! they are too high, a flow that is lifted to them would wait until others had really used as much. Hence a flow at or
//! below the floor need not be remembered once its last request has ended; of the others, [`MAX_IDLE`] are.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Debug;
use std::sync::Arc;

use super::event::RequestKey;
use super::owner::{Class, Owner, Service, Weight};
use super::small_set::SmallSet;

/// The largest number of flows that are remembered without requests.
const MAX_IDLE: usize = 1000;

/// The line of promoted lanes; those before it are the classes.
const PROMOTED: usize = Class::ALL.len();
const LINES: usize = PROMOTED + 1;

/// A flow's number, valid while a request holds it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FlowId(u32);

impl FlowId {
    /// The flow of requests without a key.
    pub(crate) const ANONYMOUS: Self = Self(0);
}

/// The place of a waiting request among those that the same slot can serve, unless one of them is promoted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FairRank {
    pub(crate) class: Class,
    pub(crate) service: Service,
    pub(crate) key: RequestKey,
}

/// Chooses one of the requests that a slot can serve: the first by rank, unless a promoted request's flow has attained
/// less service.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FairChoice {
    first: Option<FairRank>,
    promoted: Option<FairRank>,
}

impl FairChoice {
    pub(crate) fn add(&mut self, rank: FairRank, is_promoted: bool) {
        self.first = Some(self.first.map_or(rank, |first| first.min(rank)));
        if is_promoted {
            let sooner = |old: FairRank| if (rank.service, rank.key) < (old.service, old.key) { rank } else { old };
            self.promoted = Some(self.promoted.map_or(rank, sooner));
        }
    }

    /// The first by rank, whether it is chosen or not.
    pub(crate) fn first(&self) -> Option<RequestKey> {
        self.first.map(|first| first.key)
    }

    pub(crate) fn chosen(&self) -> Option<RequestKey> {
        let first = self.first?;
        Some(self.promoted.filter(|promoted| promoted.service < first.service).unwrap_or(first).key)
    }
}

/// What a flow was charged for an attempt of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Charge {
    pub(crate) service: Service,
    /// True until the usage is known, or the request has ended.
    is_estimate: bool,
}

impl Charge {
    fn unsettled(self) -> Service {
        if self.is_estimate { self.service } else { 0 }
    }
}

/// A search through a line has met too many lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TooFar;

#[derive(Clone, Debug)]
struct Flow<L> {
    /// `None`: the requests without a key.
    key: Option<Arc<str>>,
    weight: Weight,
    service: Service,
    /// The part of it that is estimated for running requests.
    unsettled: Service,
    /// The number of its unfinished requests.
    held: usize,
    /// The number of those that wait.
    waiting: usize,
    /// The first request of each of its lanes that are not pinned, by line, oldest first.
    lanes: [SmallSet<(RequestKey, L)>; LINES],
    /// The first request in each line.
    firsts: [Option<RequestKey>; LINES],
}

impl<L: Copy + Ord> Flow<L> {
    fn new(key: Option<Arc<str>>) -> Self {
        let lanes = std::array::from_fn(|_| SmallSet::default());
        Self {
            key,
            weight: Weight::default(),
            service: 0,
            unsettled: 0,
            held: 0,
            waiting: 0,
            lanes,
            firsts: [None; LINES],
        }
    }

    fn settled(&self) -> Service {
        self.service.saturating_sub(self.unsettled)
    }
}

/// All flows, by key and by number. `L` identifies a lane.
#[derive(Clone, Debug)]
pub(crate) struct Flows<L> {
    flows: Vec<Flow<L>>,
    /// Unused numbers.
    free: Vec<FlowId>,
    ids: HashMap<Arc<str>, FlowId>,
    /// The flows of each line, with the first request of their first lane there.
    lines: [SmallSet<(Service, RequestKey, FlowId)>; LINES],
    /// The flows with waiting requests, by their settled service.
    active: SmallSet<(Service, FlowId)>,
    /// The flows without requests.
    idle: BTreeSet<(Service, FlowId)>,
    floor: Service,
}

impl<L: Copy + Ord> Default for Flows<L> {
    fn default() -> Self {
        Self {
            flows: vec![Flow::new(None)],
            free: Vec::new(),
            ids: HashMap::new(),
            lines: std::array::from_fn(|_| SmallSet::default()),
            active: SmallSet::default(),
            idle: BTreeSet::new(),
            floor: 0,
        }
    }
}

impl<L: Copy + Ord + Debug> Flows<L> {
    /// Holds a key's flow for a request, with the weight that the request states.
    pub(crate) fn retain(&mut self, owner: Option<&Owner>) -> FlowId {
        let keyed = owner.and_then(|owner| Some((owner.key.as_ref()?, owner.weight)));
        let id = keyed.map_or(FlowId::ANONYMOUS, |(key, weight)| self.intern(key, weight));
        let flow = self.flow_mut(id);
        flow.held += 1;
        let was_idle = (flow.held == 1 && id != FlowId::ANONYMOUS).then_some(flow.service);
        if let Some(service) = was_idle {
            self.idle.remove(&(service, id));
        }
        id
    }

    /// The opposite of [`retain`](Self::retain). The request's charge is final.
    pub(crate) fn release(&mut self, id: FlowId, charge: Charge) {
        if charge.is_estimate {
            self.set_service(id, self.service(id), self.flow(id).unsettled.saturating_sub(charge.service));
        }
        let flow = self.flow_mut(id);
        flow.held -= 1;
        let became_idle = (flow.held == 0 && id != FlowId::ANONYMOUS).then_some(flow.service);
        if let Some(service) = became_idle {
            self.idle.insert((service, id));
            self.forget_idle();
        }
    }

    fn intern(&mut self, key: &Arc<str>, weight: Weight) -> FlowId {
        let known = self.ids.get(key).copied();
        let id = known.unwrap_or_else(|| {
            let id = self.free.pop().unwrap_or_else(|| {
                self.flows.push(Flow::new(None));
                FlowId(u32::try_from(self.flows.len() - 1).expect("fewer than four billion keys"))
            });
            *self.flow_mut(id) = Flow::new(Some(Arc::clone(key)));
            self.ids.insert(Arc::clone(key), id);
            id
        });
        self.flow_mut(id).weight = weight;
        id
    }

    /// Raises the floor to the least settled service of a waiting flow. Called before each event, so it does not depend
    /// on the order in which requests leave the queue during one.
    pub(crate) fn raise_floor(&mut self) {
        if let Some((least, _)) = self.active.first().filter(|(least, _)| *least > self.floor) {
            self.floor = *least;
            self.forget_idle();
        }
    }

    /// Forgets flows that the floor would lift anyway, and those of the least service beyond the limit.
    fn forget_idle(&mut self) {
        while let Some((service, id)) = self.idle.first().copied() {
            if service > self.floor && self.idle.len() <= MAX_IDLE {
                return;
            }
            self.idle.pop_first();
            if let Some(key) = self.flow_mut(id).key.take() {
                self.ids.remove(&key);
            }
            self.free.push(id);
        }
    }

    /// A new request will be sent or will wait: lifts its flow to the floor if none of its requests waits.
    pub(crate) fn handle_arrival(&mut self, id: FlowId) {
        self.flow_mut(id).service = self.arrival_service(id);
        if self.active.is_empty() {
            // It is the least active one for a moment, although it may not have to wait.
            self.floor = self.flow(id).settled();
        }
    }

    /// Returns the service of a flow whose next request arrives now.
    pub(crate) fn arrival_service(&self, id: FlowId) -> Service {
        let flow = self.flow(id);
        let lift = if flow.waiting == 0 { self.floor.saturating_sub(flow.settled()) } else { 0 };
        flow.service.saturating_add(lift)
    }

    /// A request begins to wait.
    pub(crate) fn handle_waiting(&mut self, id: FlowId) {
        let flow = self.flow_mut(id);
        flow.waiting += 1;
        if flow.waiting == 1 {
            let entry = (flow.settled(), id);
            self.active.insert(entry);
        }
    }

    /// A request waits no more.
    pub(crate) fn handle_gone(&mut self, id: FlowId) {
        let flow = self.flow_mut(id);
        flow.waiting -= 1;
        if flow.waiting == 0 {
            let entry = (flow.settled(), id);
            self.active.remove(&entry);
        }
    }

    /// Charges a flow an estimate for a request that is sent, in tokens.
    pub(crate) fn charge_estimate(&mut self, id: FlowId, tokens: u64) -> Charge {
        self.charge(id, Charge::default(), tokens, true)
    }

    /// Replaces what a flow was charged for a request by this number of tokens.
    pub(crate) fn settle(&mut self, id: FlowId, charge: Charge, tokens: u64) -> Charge {
        self.charge(id, charge, tokens, false)
    }

    fn charge(&mut self, id: FlowId, before: Charge, tokens: u64, is_estimate: bool) -> Charge {
        let flow = self.flow(id);
        let charge = Charge { service: flow.weight.service(tokens), is_estimate };
        let replace = |sum: Service, old: Service, new: Service| sum.saturating_sub(old).saturating_add(new);
        let service = replace(flow.service, before.service, charge.service);
        let unsettled = replace(flow.unsettled, before.unsettled(), charge.unsettled());
        self.set_service(id, service, unsettled);
        charge
    }

    pub(crate) fn service(&self, id: FlowId) -> Service {
        self.flow(id).service
    }

    pub(crate) fn weight(&self, id: FlowId) -> Weight {
        self.flow(id).weight
    }

    fn set_service(&mut self, id: FlowId, service: Service, unsettled: Service) {
        let flow = &mut self.flows[id.0 as usize];
        let settled = flow.settled();
        let old = std::mem::replace(&mut flow.service, service);
        flow.unsettled = unsettled;
        if flow.waiting > 0 && flow.settled() != settled {
            self.active.replace(Some(&(settled, id)), Some((flow.settled(), id)));
        }
        if old == service {
            return;
        }
        for (line, first) in self.lines.iter_mut().zip(&flow.firsts) {
            if let Some(first) = first {
                line.replace(Some(&(old, *first, id)), Some((service, *first, id)));
            }
        }
    }

    /// Replaces a lane's first request in the line of its class.
    pub(crate) fn replace(
        &mut self,
        (id, class): (FlowId, Class),
        lane: L,
        old: Option<RequestKey>,
        new: Option<RequestKey>,
    ) {
        self.replace_in(class as usize, id, lane, old, new);
    }

    /// Adds a lane to the line of promoted ones. It stays in the line of its class.
    pub(crate) fn promote(&mut self, id: FlowId, (first, lane): (RequestKey, L)) {
        self.replace_in(PROMOTED, id, lane, None, Some(first));
    }

    pub(crate) fn demote(&mut self, id: FlowId, (first, lane): (RequestKey, L)) {
        self.replace_in(PROMOTED, id, lane, Some(first), None);
    }

    fn replace_in(&mut self, line: usize, id: FlowId, lane: L, old: Option<RequestKey>, new: Option<RequestKey>) {
        let flow = &mut self.flows[id.0 as usize];
        flow.lanes[line].replace(old.map(|old| (old, lane)).as_ref(), new.map(|new| (new, lane)));
        let before = flow.firsts[line];
        let after = if old.is_some() && old == before {
            flow.lanes[line].first().map(|(key, _)| *key)
        } else {
            before.into_iter().chain(new).min()
        };
        if before != after {
            flow.firsts[line] = after;
            let entry = |first| (flow.service, first, id);
            self.lines[line].replace(before.map(entry).as_ref(), after.map(entry));
        }
    }

    /// Returns the choice among the first requests of all lanes that suit, searching at most this number of lanes.
    /// `has_rivals`: requests of higher classes may be added, so a promoted one matters even if it would not be chosen.
    pub(crate) fn choose(
        &self,
        mut steps: usize,
        has_rivals: bool,
        suits: impl Fn(RequestKey, L) -> bool,
    ) -> Result<FairChoice, TooFar> {
        let mut choice = FairChoice::default();
        for class in Class::ALL {
            if self.lines[class as usize].is_empty() {
                continue;
            }
            if let Some((service, key)) = self.first(class as usize, None, &mut steps, &suits)? {
                choice.add(FairRank { class, service, key }, false);
                if self.lines[PROMOTED].is_empty() {
                    break;
                }
                let below = (!has_rivals).then_some(service);
                if let Some((less, key)) = self.first(PROMOTED, below, &mut steps, &suits)? {
                    choice.add(FairRank { class: Class::Batch, service: less, key }, true);
                }
                break;
            }
        }
        Ok(choice)
    }

    /// Returns the first request of a line that suits, among the flows that have attained less than `below`.
    fn first(
        &self,
        line: usize,
        below: Option<Service>,
        steps: &mut usize,
        suits: impl Fn(RequestKey, L) -> bool,
    ) -> Result<Option<(Service, RequestKey)>, TooFar> {
        if let Some((service, _, id)) = self.lines[line].only() {
            // One key waits, so its first lane that suits is the first of all.
            if below.is_some_and(|below| *service >= below) {
                return Ok(None);
            }
            let lanes = &self.flow(*id).lanes[line];
            let first = lanes.first().filter(|(key, lane)| *steps > 0 && suits(*key, *lane));
            if let Some((key, _)) = first {
                return Ok(Some((*service, *key)));
            }
            for (key, lane) in lanes.iter() {
                *steps = steps.checked_sub(1).ok_or(TooFar)?;
                if suits(*key, *lane) {
                    return Ok(Some((*service, *key)));
                }
            }
            return Ok(None);
        }
        let mut best: Option<(Service, RequestKey)> = None;
        // Of flows with the same service, the first lane may not suit.
        let is_behind = |best: Option<(Service, RequestKey)>, at| best.is_some_and(|best| best < at);
        for (service, oldest, id) in self.lines[line].iter() {
            if below.is_some_and(|below| *service >= below) || is_behind(best, (*service, *oldest)) {
                break;
            }
            for (key, lane) in self.flow(*id).lanes[line].iter() {
                if is_behind(best, (*service, *key)) {
                    break;
                }
                *steps = steps.checked_sub(1).ok_or(TooFar)?;
                if suits(*key, *lane) {
                    best = Some((*service, *key));
                    break;
                }
            }
        }
        Ok(best)
    }

    /// Returns the first request of each lane of a flow in the line of a class, oldest first.
    pub(crate) fn lanes_of(&self, id: FlowId, class: Class) -> impl Iterator<Item = (RequestKey, L)> {
        self.flow(id).lanes[class as usize].iter().copied()
    }

    /// The oldest request that waits without a pin. Costs a step for each key.
    pub(crate) fn oldest(&self) -> Option<RequestKey> {
        self.lines[..PROMOTED].iter().flat_map(SmallSet::iter).map(|(_, key, _)| *key).min()
    }

    /// The floor and all flows, sorted: their keys, what they have attained, and their requests.
    #[cfg(test)]
    pub(crate) fn canonical(&self) -> String {
        let known = self.flows.iter().enumerate().filter(|(number, flow)| *number == 0 || flow.key.is_some());
        let text = known.map(|(_, flow)| {
            let Flow { key, weight, service, unsettled, held, waiting, lanes: _, firsts: _ } = flow;
            format!("{key:?} {weight:?} {service} {unsettled} {held} {waiting}")
        });
        let mut text: Vec<_> = text.collect();
        text.sort_unstable();
        format!("{} {text:?}", self.floor)
    }

    /// The number of keys that are remembered.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    fn flow(&self, id: FlowId) -> &Flow<L> {
        &self.flows[id.0 as usize]
    }

    fn flow_mut(&mut self, id: FlowId) -> &mut Flow<L> {
        &mut self.flows[id.0 as usize]
    }
}
