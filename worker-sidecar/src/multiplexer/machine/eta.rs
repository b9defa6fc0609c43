//! How long it may still take: for those who wait, and for those who set a limit to it.

use std::time::{Duration, Instant};

use super::Machine;
use super::state::{Resident, State};
use crate::multiplexer::Model;
use crate::multiplexer::policy::{self, Candidate};

impl Machine {
    /// About how long from `now` until the model serves; `None` if nothing leads there.
    pub fn eta(&self, model: &Model, now: Instant) -> Option<Duration> {
        let cost = self.load_cost(model);
        let evict = |of: &Model| self.models.get(of).and_then(|entry| entry.costs.evict.value()).unwrap_or_default();
        let past = |since: Instant| now.saturating_duration_since(since);
        let under_way = self.state.target() == Some(model);
        match &self.state {
            State::Ready(resident) if resident.model == *model => Some(Duration::ZERO),
            State::Loading(loading) | State::RollingBack(loading) if under_way => {
                Some(cost.saturating_sub(past(loading.since)))
            }
            State::Evicting(evicting) if under_way => {
                Some(evict(&evicting.model).saturating_sub(past(evicting.since)) + cost)
            }
            State::Severing(severing) if under_way => Some(evict(&severing.resident.model) + cost),
            State::Draining(draining) if under_way => {
                let drain = draining.deadline.saturating_duration_since(now);
                Some(drain + evict(&draining.resident.model) + cost)
            }
            State::Ready(resident) => Some(self.eta_from(resident, model, now)),
            State::Empty | State::Backoff { .. } => Some(cost),
            State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_) => Some(self.turns_before(model)),
            State::Quarantined { .. } | State::Stopping { .. } => None,
        }
    }

    /// The model's bound by the policy, less what it has waited already.
    fn turns_before(&self, model: &Model) -> Duration {
        let (models, candidates) = self.candidates();
        let Some(index) = models.iter().position(|candidate| candidate == model) else {
            return self.swap_cost(model) + self.config.knobs.drain_timeout;
        };
        policy::bound(&self.config.knobs, true, &candidates, index).saturating_sub(candidates[index].age)
    }

    fn eta_from(&self, resident: &Resident, model: &Model, now: Instant) -> Duration {
        let cost = self.swap_cost(model);
        let stays = match resident.idle_since {
            Some(_) => Duration::ZERO,
            None => {
                let quantum = policy::quantum(&self.config.knobs, cost);
                quantum.saturating_sub(now.saturating_duration_since(resident.since))
            }
        };
        stays + cost
    }

    /// How long a request for the model may wait by the policy, if everything else is busy all the time: more than that
    /// should nobody's patience be less than.
    pub fn longest_wait(&self, model: &Model) -> Duration {
        let entries = self.models.values().filter(|entry| !entry.removed);
        let candidate = |model: &Model| Candidate {
            waiting: 1,
            age: Duration::ZERO,
            total_wait: Duration::ZERO,
            cost: self.load_cost(model),
        };
        let candidates: Vec<_> = entries.clone().map(|entry| candidate(entry.model())).collect();
        let index = entries.map(|entry| entry.model()).position(|other| other == model);
        index.map_or(Duration::ZERO, |index| policy::bound(&self.config.knobs, false, &candidates, index))
    }
}
