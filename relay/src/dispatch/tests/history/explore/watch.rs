//! The invariants of the core's documentation, by their names, in addition to those that the ledger checks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::Play;
use super::super::ledger::Account;
use super::super::placements::pairs;
use super::super::reference::Reference;
use crate::dispatch::{AttemptFailure, Decision, Dispatch, Effect, Event, RequestKey, WorkerKey};

/// The sends of a request that lost workers and broken backends may cost.
const MAX_SENDS: u32 = 4;

/// The swaps that cost none of them.
const MAX_SWAPS: u32 = 3;

/// The knowledge that the environment has of a relay.
#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    /// The requests whose response has begun.
    pub(super) started: BTreeSet<RequestKey>,
    /// The attempts of each request, without those that cost none; and its swaps.
    sends: BTreeMap<RequestKey, (u32, u32)>,
    /// Attempts that are over although their workers may not know it.
    pub(super) over: Vec<(WorkerKey, RequestKey, u32)>,
    /// Before the event: the requests that wait, with the workers that could serve them.
    waiting: BTreeSet<(RequestKey, WorkerKey)>,
    /// Before the event: the time of the next change.
    due: Option<Duration>,
}

impl Watch {
    /// Returns the state as a text.
    pub(super) fn text(&self) -> String {
        // The others are of the last event.
        let Self { started, sends, over, waiting: _, due: _ } = self;
        format!("{started:?} {sends:?} {over:?}")
    }

    /// Checks a core without requests whose deadlines are over.
    pub(super) fn check_idle(&self, core: &Dispatch) {
        let is_empty = core.queue_len() == 0 && core.queue_bytes() == 0 && core.keys_waiting() == 0;
        let nothing_due = core.next_timeout().is_none() && core.running.is_empty() && core.pinned.is_empty();
        assert!(is_empty && nothing_due, "D10: something is left of requests that have ended");
    }

    pub(super) fn before(&mut self, play: &Play) {
        self.waiting = pairs(&play.reference).collect();
        self.due = play.next_due();
    }

    /// Checks the effects of an event, and the state after it.
    pub(super) fn check(&mut self, play: &Play, event: &Event, effects: &[Effect]) {
        let now = play.reference.now;
        let has_none = effects.is_empty() || self.due.is_some_and(|due| due <= now);
        assert!(!matches!(event, Event::Tick) || has_none, "D9: a tick before its time: {effects:?}");
        if let Event::AttemptFailed { worker, request, attempt, failure } = event {
            self.note_failed(effects, (*worker, *request, *attempt), failure);
        }
        if let Event::Cancel { request, reason } = event {
            let ends = play.reference.requests.contains_key(request);
            assert!(!ends, "D1: {request:?} goes on after {reason:?}");
        }
        for effect in effects {
            self.check_effect(play, effect);
        }
        let due = play.next_due();
        assert!(due.is_none_or(|due| due > now), "D11: something is due at {due:?}, before {now:?}");
        self.check_waiting(&play.reference);
        self.check_demand(play);
        self.check_sizes(&play.core, &play.reference);
        let alive = |key: &RequestKey| play.reference.requests.contains_key(key);
        self.started.retain(alive);
        self.sends.retain(|key, _| alive(key));
    }

    /// A refusal, a failed load and a swap cost no attempt.
    fn note_failed(&mut self, effects: &[Effect], attempt: (WorkerKey, RequestKey, u32), failure: &AttemptFailure) {
        let requeued = |effect: &Effect| {
            matches!(effect, Effect::Requeued { request, attempt: number, .. }
                if (*request, *number) == (attempt.1, attempt.2))
        };
        let Some((sends, swaps)) = self.sends.get_mut(&attempt.1).filter(|_| effects.iter().any(requeued)) else {
            return;
        };
        match failure {
            AttemptFailure::AtCapacity | AttemptFailure::Draining | AttemptFailure::LoadFailed { .. } => *sends -= 1,
            AttemptFailure::SeveredBySwap => {
                *sends -= 1;
                *swaps += 1;
            }
            AttemptFailure::BackendUnreachable | AttemptFailure::BackendReset | AttemptFailure::Fatal(_) => {}
        }
    }

    fn check_effect(&mut self, play: &Play, effect: &Effect) {
        match effect {
            Effect::Send { worker, request, decision, .. } => {
                assert!(!self.started.contains(request), "D8: {request:?} is sent although its response has begun");
                let (sends, swaps) = self.sends.entry(*request).or_default();
                *sends += 1;
                assert!(*sends <= MAX_SENDS && *swaps <= MAX_SWAPS, "D8: {request:?} is sent too often: {sends}");
                self.check_order(&play.reference, (*request, *worker), *decision);
                if let Some(request) = play.reference.requests.get(request)
                    && let Some(known) = play.reference.workers.get(worker)
                {
                    let allowed = request.new.allowed.as_ref();
                    let is_allowed = allowed.is_none_or(|allowed| allowed.contains(&known.id(&request.new.model)));
                    assert!(is_allowed, "D6: {worker:?} means another model");
                }
            }
            Effect::CancelSent { worker, request, attempt, .. } => self.over.push((*worker, *request, *attempt)),
            Effect::Requeued { reason, request, .. } => {
                let is_unseen = !self.started.contains(request);
                assert!(is_unseen, "D8: {request:?} waits again ({reason:?}) although its response has begun");
            }
            Effect::Fail { .. }
            | Effect::Cancelled { .. }
            | Effect::Severed { .. }
            | Effect::Finished { .. }
            | Effect::Demand { .. }
            | Effect::DrainedIdle { .. } => {}
        }
    }

    /// D3: of one key and class, an older request that the worker could have served does not wait longer, unless it was
    /// overtaken by one at home.
    fn check_order(&self, reference: &Reference, (sent, worker): (RequestKey, WorkerKey), decision: Decision) {
        let model = |key: &RequestKey| reference.requests.get(key).map(|request| request.new.model.clone());
        let takes_its_room = |key: &RequestKey| !reference.has_multiplexer(worker) || model(key) == model(&sent);
        let still = pairs(reference).filter(|(key, able)| *able == worker && *key < sent);
        let passed = still.filter(|pair| self.waiting.contains(pair)).map(|(key, _)| key);
        let mut passed = passed.filter(|key| takes_its_room(key) && reference.is_like(sent, *key));
        let first = passed.next();
        assert!(first.is_none() || decision == Decision::Home, "D3: {sent:?} is sent before {first:?}");
    }

    fn check_waiting(&self, reference: &Reference) {
        for (request, worker) in pairs(reference) {
            let model = &reference.requests[&request].new.model;
            let idle = reference.has_room(worker, model);
            assert!(!idle, "D2: {request:?} waits although {worker:?} has room");
        }
    }

    /// Once all reports have been sent.
    fn check_demand(&self, play: &Play) {
        if !play.core.marked.is_empty() {
            return;
        }
        for key in play.reference.queued().filter(|key| play.reference.is_to_be_loaded(*key)) {
            let new = &play.reference.requests[&key].new;
            let receives = |(worker, account): &(&WorkerKey, &Account)| {
                let is_closed =
                    play.reference.has_multiplexer(**worker) && !play.reference.is_open(**worker, &new.model);
                is_closed && account.believed.contains_key(&new.model)
            };
            let holders = play.ledger.workers.iter().filter(receives).count();
            let is_shared = new.pin.is_some();
            assert!(holders == 1 || is_shared && holders > 0, "D7: {holders} multiplexers have demand for {key:?}");
        }
    }

    fn check_sizes(&self, core: &Dispatch, reference: &Reference) {
        let (live, workers) = (reference.requests.len(), reference.workers.len());
        assert_eq!((core.requests.len(), core.workers.len()), (live, workers), "D10");
        assert!(core.pinned.len() <= live && core.running.len() <= live && core.marked.len() <= workers, "D10");
        assert!(core.instances.len() <= workers && core.homes_len() <= core.settings.max_homes, "D10");
        let names: BTreeSet<_> = core.models.iter().map(|group| group.name.clone()).collect();
        assert_eq!(names, reference.models(), "D10: a model is kept or lost");
    }
}
