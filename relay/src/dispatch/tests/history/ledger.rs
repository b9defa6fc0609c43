//! An account of every request and worker from outside: the messages exchanged, without the rules behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::reference::Reference;
use modelrelay_protocol::message::{Slot, SlotModelStatus};

use crate::dispatch::{Class, Effect, Event, Gate, Grant, Model, ModelDemand, NewWorker, RequestKey, WorkerKey};

pub(super) const PACE: Duration = Duration::from_millis(50);

#[derive(Clone, Default)]
pub(super) struct Ledger {
    requests: BTreeMap<RequestKey, Model>,
    running: BTreeMap<RequestKey, (WorkerKey, u32)>,
    /// Attempts that were revoked from their workers.
    taken_back: BTreeMap<RequestKey, (WorkerKey, u32)>,
    ended: BTreeSet<RequestKey>,
    pub(super) workers: BTreeMap<WorkerKey, Account>,
}

#[derive(Clone)]
pub(super) struct Account {
    new: NewWorker,
    models: Vec<Model>,
    grant: Option<Grant>,
    gates: BTreeMap<Model, Gate>,
    slots: Vec<Slot>,
    draining: bool,
    /// The worker's own count of waiting requests with their highest class, and the time of the last report.
    pub(super) believed: BTreeMap<Model, (u32, Class)>,
    pub(super) reported_at: Option<Duration>,
    /// A multiplexer whose count of a model has since reached zero may receive the next report at once.
    pub(super) counted_down: bool,
}

impl Account {
    /// True if it receives demand reports.
    fn receives_demand(&self) -> bool {
        self.new.multiplexer.is_some() || self.new.core1 && self.grant.is_some_and(|grant| grant.links > 1)
    }
}

impl Ledger {
    /// Applies an event before the core's effects.
    pub(super) fn before(&mut self, event: &Event) {
        match event {
            Event::Submit(new) => {
                self.requests.insert(new.key, new.model.clone());
            }
            Event::WorkerJoined(new) => {
                let account = Account {
                    new: new.clone(),
                    models: new.models.clone(),
                    grant: None,
                    gates: BTreeMap::new(),
                    slots: new.multiplexer.as_ref().map(|new| new.slots.clone()).unwrap_or_default(),
                    draining: false,
                    believed: BTreeMap::new(),
                    reported_at: None,
                    counted_down: false,
                };
                self.workers.insert(new.key, account);
            }
            Event::ModelsUpdated { worker, models, .. } => {
                self.worker(*worker).models = models.clone();
            }
            Event::Granted { worker, grant } => self.worker(*worker).grant = Some(*grant),
            Event::GatesSet { worker, sums, gates } => {
                let account = self.worker(*worker);
                account.grant = Some(*sums);
                account.gates = gates.iter().cloned().collect();
            }
            Event::SlotsReported { worker, slots } => {
                let account = self.worker(*worker);
                account.slots.clone_from(slots);
                for model in slots.iter().flat_map(|slot| &slot.models) {
                    // A failed load implies that the worker has discarded the model's demand, by all names.
                    let failed = model.status == SlotModelStatus::Failed;
                    if failed && !account.gates.contains_key(&*model.id) {
                        account.believed.retain(|name, _| *meant(slots, name) != *model.id);
                    }
                }
            }
            Event::WorkerDraining { worker } => self.worker(*worker).draining = true,
            Event::WorkerLost { worker, .. } => {
                self.workers.remove(worker);
            }
            Event::Cancel { .. }
            | Event::LoadReported { .. }
            | Event::Completed { .. }
            | Event::Begun { .. }
            | Event::Used { .. }
            | Event::HomesReported { .. }
            | Event::AttemptFailed { .. }
            | Event::Silent { .. }
            | Event::WorkerSucceeded { .. }
            | Event::SettingsChanged(_)
            | Event::Deleted
            | Event::DrainBegun
            | Event::DrainDeadline
            | Event::Tick => {}
        }
    }

    pub(super) fn record(&mut self, effect: &Effect, now: Duration) {
        match effect {
            Effect::Send { worker, request, attempt, .. } => {
                self.record_send(*worker, *request, *attempt);
            }
            Effect::CancelSent { worker, request, attempt, .. } => {
                assert_eq!(self.running.remove(request), Some((*worker, *attempt)));
                self.taken_back.insert(*request, (*worker, *attempt));
            }
            Effect::Requeued { request, attempt, .. } => {
                let ran = self.running.remove(request).or_else(|| self.taken_back.remove(request));
                let (_, sending) = ran.expect("it ran");
                assert_eq!(sending, *attempt);
            }
            Effect::Finished { request, worker, attempt } => {
                assert_eq!(self.running.remove(request), Some((*worker, *attempt)));
                self.end(*request);
            }
            Effect::Severed { request, .. } | Effect::Fail { request, .. } | Effect::Cancelled { request, .. } => {
                self.running.remove(request);
                self.end(*request);
            }
            Effect::DrainedIdle { worker } => {
                assert!(!self.running.values().any(|(on, _)| on == worker));
            }
            Effect::Demand { worker, demand } => {
                let account = self.worker(*worker);
                assert!(account.receives_demand() && !account.draining, "no other worker receives demand");
                let hurries = std::mem::take(&mut account.counted_down) && account.new.multiplexer.is_some();
                assert!(hurries || account.reported_at.is_none_or(|at| now >= at + PACE), "too often");
                account.reported_at = Some(now);
                for entry in demand {
                    let most = entry.oldest * entry.waiting;
                    assert!(entry.oldest <= entry.sum && entry.sum <= most, "impossible ages: {entry:?}");
                }
                let count = |entry: &ModelDemand| (entry.model.clone(), (entry.waiting, entry.class));
                account.believed = demand.iter().map(count).collect();
            }
        }
    }

    fn record_send(&mut self, to: WorkerKey, request: RequestKey, attempt: u32) {
        assert!(!self.ended.contains(&request), "D1: sent after its end");
        let before = self.running.insert(request, (to, attempt));
        assert_eq!(before, None, "D1: sent while it runs");
        let own = self.running.values().filter(|(on, _)| *on == to).count();
        let model = &self.requests[&request];
        let account = self.workers.get_mut(&to).expect("sent to a connected worker");
        assert!(account.models.contains(model), "D4: sent to a worker without the model");
        assert!(!account.draining, "D4: sent to a draining worker");
        let may_have = match account.grant {
            _ if account.new.multiplexer.is_some() => u32::MAX,
            Some(grant) if account.new.core1 => grant.slots,
            None if account.new.core1 => 0,
            Some(_) | None => account.new.max_concurrent,
        };
        assert!(own <= may_have as usize, "D4: worker {to:?} has {own} of {may_have}");
        if account.new.multiplexer.is_some() {
            let id = meant(&account.slots, model);
            let of_model = |key: &RequestKey| meant(&account.slots, &self.requests[key]) == id;
            let own = self.running.iter().filter(|(key, (on, _))| *on == to && of_model(key)).count();
            let gate = account.gates.get(&id).expect("D4: sent through a shut gate");
            assert!(own <= gate.slots as usize, "D5: worker {to:?} has {own} of {gate:?}");
        }
        if let Some((count, _)) = account.believed.get_mut(model) {
            *count -= 1;
            account.counted_down |= *count == 0;
        }
        account.believed.retain(|_, (count, _)| *count > 0);
    }

    /// Checks that a worker that serves several relays knows the demand, or will within the pace.
    pub(super) fn check_demand(&self, reference: &Reference, now: Duration, next_timeout: Option<Duration>) {
        let mut next = reference.next_timeout();
        for (key, account) in &self.workers {
            if !account.receives_demand() || reference.workers[key].draining {
                continue;
            }
            let may_report_at = account.reported_at.map_or(now, |at| at + PACE);
            let waiting = reference.waiting_for(*key);
            if account.believed != waiting {
                let believed = &account.believed;
                assert!(may_report_at > now, "D7: worker {key:?} has {believed:?} and no report of {waiting:?}");
                next = next.into_iter().chain([may_report_at]).min();
            } else if next_timeout == Some(may_report_at) && may_report_at > now {
                // A report is scheduled, but nothing has changed.
                next = next.into_iter().chain([may_report_at]).min();
            }
        }
        assert_eq!(next_timeout, next, "D9: the next timeout at {now:?}");
    }

    /// Checks that the unfinished requests are those of the reference: no request is lost, and none lingers.
    pub(super) fn check_alive(&self, alive: impl Iterator<Item = RequestKey>) {
        let mine = self.requests.keys().copied().filter(|key| !self.ended.contains(key));
        assert!(mine.eq(alive), "D1: a request was lost");
    }

    fn end(&mut self, request: RequestKey) {
        assert!(self.requests.contains_key(&request), "D1: ended before it came");
        assert!(self.ended.insert(request), "D1: ended twice");
    }

    fn worker(&mut self, key: WorkerKey) -> &mut Account {
        self.workers.get_mut(&key).expect("a connected worker")
    }
}

/// Returns the id that a worker with these slots means by a name.
fn meant(slots: &[Slot], name: &Model) -> Model {
    let models = || slots.iter().flat_map(|slot| &slot.models);
    if models().any(|model| *model.id == **name) {
        return name.clone();
    }
    let named = models().find(|model| model.aliases.iter().any(|alias| **alias == **name));
    named.map_or_else(|| name.clone(), |model| model.id.as_str().into())
}
