//! Estimates how long it takes until a model serves: for clients that wait, and for those that set a limit.

use std::time::{Duration, Instant};

use super::Machine;
use super::state::{Resident, State};
use crate::Model;
use crate::policy::{self, Candidate};

impl Machine {
    /// Returns about how long from `now` it takes until the model serves; `None` if it will not.
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
            State::Ready(resident) if self.is_next(resident, model) => Some(self.eta_from(resident, model, now)),
            State::Ready(_) => Some(self.turns_before(model)),
            State::Empty | State::Backoff { .. } => Some(cost),
            State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_) => Some(self.turns_before(model)),
            State::Quarantined { .. } | State::Stopping { .. } => None,
        }
    }

    /// The longest wait that the policy allows, less the time that it has waited already. A model without waiting
    /// requests, or whose own turn just ends, waits from now on.
    fn turns_before(&self, model: &Model) -> Duration {
        let (models, mut candidates) = self.candidates();
        let index = models.iter().position(|candidate| candidate == model).unwrap_or_else(|| {
            candidates.push(Candidate { waiting: 1, cost: self.swap_cost(model), ..Candidate::default() });
            candidates.len() - 1
        });
        let others_turn = self.state.resident().is_none_or(|resident| resident.model != *model);
        policy::longest_wait(&self.config.knobs, others_turn, &candidates, index).saturating_sub(candidates[index].age)
    }

    /// True if no other model would be loaded before this one.
    fn is_next(&self, resident: &Resident, model: &Model) -> bool {
        let (models, candidates) = self.candidates();
        let busy = resident.idle_since.is_none();
        policy::pick(&self.config.knobs, busy, &candidates).is_none_or(|next| models[next] == *model)
    }

    fn eta_from(&self, resident: &Resident, model: &Model, now: Instant) -> Duration {
        let cost = self.swap_cost(model);
        let stays = match resident.idle_since {
            Some(_) => Duration::ZERO,
            None => self.turn_left(model, now),
        };
        stays + cost
    }

    /// Returns how long a resident with work stays before a swap to this model.
    fn turn_left(&self, model: &Model, now: Instant) -> Duration {
        let knobs = &self.config.knobs;
        let (models, candidates) = self.candidates();
        let index = models.iter().position(|candidate| candidate == model);
        match (index, self.resident_view()) {
            (Some(index), Some(resident)) => {
                policy::turn_end(knobs, &resident, &candidates, index).saturating_duration_since(now)
            }
            (None, Some(resident)) => {
                let quantum = policy::quantum(knobs, self.swap_cost(model));
                quantum.saturating_sub(now.saturating_duration_since(resident.since))
            }
            (_, None) => Duration::ZERO,
        }
    }
}
