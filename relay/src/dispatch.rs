//! The dispatch core of the relay: the queue and worker registry of one provider.
//!
//! Pure: no sockets, tasks, clock reads, randomness, logs or metrics. [`Dispatch::handle`] takes one event with the
//! time at which it happened and returns the effects to execute, so every rule of the contract is a plain test, and
//! whole histories can be generated at random and replayed. The shell keeps one value per provider behind a lock and
//! executes the effects in order before it releases the lock.
//!
//! An event is applied, then settled, then reported. A handler [applies](rules) the event and records which workers and
//! models it has changed; [settling](rules::settle) dispatches queued requests to workers with room and ends the
//! requests that no worker can serve any more; reports assign loads and send demand. The core holds the time of the
//! event and its effects itself.
//!
//! Invariants between two events:
//!
//! - D1: a request ends exactly once, and at its deadline at the latest;
//! - D2: no request waits while a worker that could serve it has room, unless it is [passed over](rules::outliers);
//!   distance decides only among workers with room, so no request waits for a near worker;
//! - D3: among the requests of one key and class that a worker could serve, the oldest goes first, whichever way it
//!   entered the queue; among keys and classes, [fair shares](rules::fair) decide;
//! - D4: no worker has more requests than it acknowledged or granted, nor one for a model that it did not advertise
//!   when the request was sent; a multiplexer has none for a model whose gate was closed when the request was sent;
//! - D5: all names of a multiplexer's model are one model there, whatever other workers mean by them;
//! - D6: a request that only some models may serve goes only to a worker that means one of those models by its name;
//! - D7: where requests wait for a model that only a swap can load, exactly one multiplexer receives the demand;
//! - D8: a request whose response has begun is never sent again; a request whose response has not begun is sent four
//!   times at most, not counting refusals and three swaps;
//! - D9: [`Dispatch::next_timeout`] is the exact time of the next change without an event;
//! - D10: memory is bounded by connected workers, requests that have not ended, and a constant number of keys and
//!   homes.
//!
//! D11: time passes before an event happens: deadlines before it expire first, however late the event arrives.

#![warn(clippy::disallowed_types, clippy::iter_over_hash_type)]

mod model;
mod rules;
mod snapshot;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

pub use model::distance::{Distance, Spill};
pub use model::effect::{Decision, Effect, Failure, ModelDemand, MoveReason, RequeueReason, Stage};
pub use model::event::{
    Allowed, AttemptFailure, CancelReason, Conversation, DEFAULT_COLD_TIMEOUT, Event, FailureReport, Gate, Grant,
    LoadFailure, LossCause, Model, NewMultiplexer, NewRequest, NewWorker, Now, Placement, QueueShare, RequestKey,
    Settings, WorkerKey,
};
pub use model::fairness::{Fairness, TOKEN_BYTES, TokenUsage};
pub use model::owner::{Class, Owner, ShareError, Weight};
pub use snapshot::{ModelSnapshot, RequestPlace, WorkerSnapshot};

use model::clock::{Clock, Moment};
use model::demand::PendingDemand;
use model::drain_rate::DrainRate;
use model::homes::{Homes, InstanceKey};
use model::keys::{Requests, Workers};
use model::models::Models;
use model::queue::Queue;
use rules::settle::Unsettled;

/// The queue and worker registry of one provider.
#[derive(Clone, Debug)]
pub struct Dispatch {
    settings: Settings,
    phase: ProviderPhase,
    clock: Clock,
    /// The effects of the current event.
    out: Vec<Effect>,
    requests: Requests,
    /// Requests that only one worker may serve, by that worker.
    pinned: BTreeSet<(WorkerKey, RequestKey)>,
    workers: Workers,
    models: Models,
    queue: Queue,
    /// Running requests by the end of their request timeout.
    running: BTreeSet<(Moment, RequestKey)>,
    /// Workers whose demand report is due.
    marked: PendingDemand,
    drain_rate: DrainRate,
    /// The homes of conversations.
    homes: Homes,
    /// The newest connection of each worker process.
    instances: BTreeMap<InstanceKey, WorkerKey>,
    /// Homes recorded before this dispatch are void at processes that reconnect: the last loss of a cache at one that
    /// has disconnected since. One number for all of them, so that memory does not grow with workers that never come
    /// back.
    voided: u64,
    /// Counts dispatches and losses of caches, for the rotation among equals and the age of homes.
    turn: u64,
    unsettled: Unsettled,
}

/// The stage of the provider's shutdown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProviderPhase {
    Open,
    /// The relay is shutting down.
    Draining,
    /// The provider was removed.
    Deleted,
}

impl Dispatch {
    /// Creates a provider without workers or requests.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            phase: ProviderPhase::Open,
            clock: Clock::default(),
            out: Vec::new(),
            requests: Requests::default(),
            pinned: BTreeSet::new(),
            workers: Workers::default(),
            models: Models::default(),
            queue: Queue::default(),
            running: BTreeSet::new(),
            marked: PendingDemand::new(),
            drain_rate: DrainRate::default(),
            homes: Homes::default(),
            instances: BTreeMap::new(),
            voided: 0,
            turn: 0,
            unsettled: Unsettled::default(),
        }
    }

    /// Handles an event that happened at `now` and appends the resulting effects.
    pub fn handle(&mut self, event: Event, now: Now, out: &mut Vec<Effect>) {
        self.clock.advance(now);
        // The caller's list is filled in place, so that no event allocates one.
        std::mem::swap(&mut self.out, out);
        self.begin_event();
        self.expire();
        self.apply(event);
        self.settle();
        self.expire();
        self.report();
        std::mem::swap(&mut self.out, out);
    }

    /// Returns when [`Event::Tick`] is due, if no other event happens before.
    pub fn next_timeout(&self) -> Option<Now> {
        self.clock.instant(self.next_moment()?)
    }

    /// Returns the running requests that end at their time limit if the next event happens at `now`, with a time after
    /// the last event at which they still run: until then, [`Event::Used`] settles what their keys are charged for
    /// them.
    pub fn running_out(&self, now: Now) -> Option<(Now, Vec<RequestKey>)> {
        let now = self.clock.moment(now);
        let (first, _) = self.running.first().filter(|(due, _)| *due <= now)?;
        let ending = self.running.iter().take_while(|(due, _)| *due <= now).map(|(_, request)| *request);
        Some((self.clock.instant(first.before())?, ending.collect()))
    }

    /// Assigns the loads of unserved models and reports demand, which describes the state after all requests sent.
    fn report(&mut self) {
        self.update_assignments();
        self.report_demand();
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Submit(new) => self.handle_submit(new),
            Event::Cancel { request, reason } => self.handle_cancel(request, reason),
            Event::WorkerJoined(new) => self.handle_joined(&new),
            Event::WorkerLost { worker, started, cause } => {
                self.handle_lost(worker, &started, cause);
            }
            Event::ModelsUpdated { worker, models, failing, load } => {
                self.handle_models(worker, (&models, &failing), load);
            }
            Event::LoadReported { worker, load } => self.handle_load(worker, load),
            Event::Granted { worker, grant } => self.handle_grant(worker, grant),
            Event::GatesSet { worker, sums, gates } => self.handle_gates(worker, sums, &gates),
            Event::SlotsReported { worker, slots } => self.handle_slots(worker, &slots),
            Event::Begun { worker, request, attempt } => self.handle_begun(worker, request, attempt),
            Event::Completed { worker, request, attempt, cached, usage } => {
                self.handle_completed((worker, request, attempt), cached, usage);
            }
            Event::Used { request, usage } => self.handle_used(request, usage),
            Event::HomesReported { worker, homes, backlog } => self.handle_homes(worker, &homes, backlog),
            Event::AttemptFailed { worker, request, attempt, failure } => {
                self.handle_attempt_failed((worker, request, attempt), failure);
            }
            Event::Silent { request } => self.handle_silent(request),
            Event::WorkerSucceeded { older, newer } => self.handle_succeeded(older, newer),
            Event::WorkerDraining { worker } => self.begin_drain(worker),
            Event::SettingsChanged(settings) => self.handle_settings(settings),
            Event::Deleted => self.handle_deleted(),
            Event::DrainBegun => self.handle_drain_begun(),
            Event::DrainDeadline => self.handle_drain_deadline(),
            Event::Tick => {}
        }
    }

    /// New limits apply to later requests; no waiting request is evicted. Only a disabled provider ends its waiting
    /// requests.
    fn handle_settings(&mut self, settings: Settings) {
        let Settings { placement, fairness, .. } = std::mem::replace(&mut self.settings, settings);
        self.homes.limit(self.settings.max_homes);
        if placement != self.settings.placement {
            // Ranks contain the backlog only where workers are placed by it.
            for worker in self.worker_keys() {
                self.note_load(worker);
            }
        }
        if fairness != self.settings.fairness {
            self.refresh_promotions();
        }
        if !self.settings.enabled {
            self.fail_queued(&Failure::Disabled);
        }
    }

    fn handle_deleted(&mut self) {
        self.phase = ProviderPhase::Deleted;
        self.fail_queued(&Failure::Deleted);
        let workers = self.worker_keys();
        for worker in workers {
            self.begin_drain(worker);
        }
    }

    fn handle_drain_begun(&mut self) {
        if self.phase == ProviderPhase::Open {
            self.phase = ProviderPhase::Draining;
        }
    }

    fn handle_drain_deadline(&mut self) {
        self.handle_drain_begun();
        self.fail_queued(&Failure::Draining);
        while let Some((_, key)) = self.running.first().copied() {
            self.revoke(key, CancelReason::DrainDeadline);
            self.fail(key, Failure::Draining);
        }
    }

    /// Returns all workers, in the order in which they joined.
    fn worker_keys(&self) -> Vec<WorkerKey> {
        let mut keys: Vec<_> = self.workers.keys().copied().collect();
        keys.sort_unstable();
        keys
    }

    fn fail_queued(&mut self, failure: &Failure) {
        let queued: Vec<_> = self.queued().collect();
        for key in queued {
            self.dequeue(key);
            self.fail(key, failure.clone());
        }
    }
}
