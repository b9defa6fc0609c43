//! Decides how many Pods a pool should have, from the reports of its relays: pure, with the time passed in.
//!
//! - Scales up at once: to as many Pods as give each its target of queued and running requests.
//! - Scales down only when fewer were enough for the whole of `scaleDownDelay`: to the greatest number that was needed
//!   within it. A short lull therefore unloads no model, which could take minutes to load again.
//! - Scales to zero only when nothing waits and nothing runs, and only when it is known which models may wake the pool
//!   again.
//! - Never scales down on incomplete information. While a relay does not respond, while the operator has observed for
//!   less than one whole delay (this restarts with each leader), and after a gap in the observation, the number can
//!   only rise.

pub mod share;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::spec::worker_pool::ScalingConfig;

/// The gap after which earlier observations prove nothing. Observations are a second apart.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The load of the pool, from the relays' reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Waiting requests that this pool should serve.
    pub waiting: u64,
    /// Requests that its workers run.
    pub running: u64,
    /// Requests that draining workers still run: no reason for another Pod, but a reason not to be at zero.
    pub ending: u64,
    /// True if every relay responded. Otherwise, the load may be higher.
    pub complete: bool,
}

/// The inputs of one decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingInputs {
    /// The number of Pods that is requested now.
    pub current: i32,
    /// `None` if no relay has reported yet.
    pub load: Option<Load>,
    /// True if a request could wake the pool: it lists its models, or has advertised some.
    pub wakeable: bool,
}

/// The number of Pods, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingDecision {
    /// The number of Pods to request.
    pub replicas: i32,
    /// The reason for that number.
    pub why: Why,
    /// The time until the decision could change without new input.
    pub next_decision: Option<Duration>,
}

/// The reason for a number of Pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The load needs this number.
    Load,
    /// Fewer would do, but not for long enough yet.
    Delay,
    /// Fewer have been enough for the whole delay.
    Idle,
    /// The current number was outside of minReplicas and maxReplicas.
    Bounds,
    /// Too little is known to scale down.
    Unknown,
    /// No Pod is needed, but once at zero, no request could wake the pool.
    ModelsUnknown,
}

/// The numbers that were needed recently.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The time since which there is no gap.
    since: Option<Instant>,
    last: Option<Instant>,
    /// Needs that later ones have not exceeded, oldest and greatest first. They strictly decrease, so there are never
    /// more than the range from minReplicas to maxReplicas.
    needs: VecDeque<(Instant, i32)>,
}

impl History {
    /// Decides, and records the current need.
    pub fn decide(&mut self, now: Instant, config: &ScalingConfig, inputs: &ScalingInputs) -> ScalingDecision {
        let bounded = inputs.current.clamp(config.min, config.max);
        let Some(load) = inputs.load else {
            self.note(now, bounded);
            return hold(inputs, bounded, Why::Unknown, None);
        };
        let needed = needed(config, &load);
        let sleepless = needed == 0 && !inputs.wakeable && bounded > 0;
        let needed = if sleepless { 1 } else { needed };
        self.note(now, if load.complete { needed } else { needed.max(bounded) });
        self.expire(now, config.delay);

        if needed > bounded {
            return ScalingDecision { replicas: needed, why: Why::Load, next_decision: None };
        }
        let enough = self.needs.front().map_or(needed, |(_, need)| *need);
        let watched = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        if watched < config.delay && needed < bounded {
            return hold(inputs, bounded, Why::Delay, Some(config.delay - watched));
        }
        if enough < bounded {
            return ScalingDecision { replicas: enough, why: Why::Idle, next_decision: None };
        }
        let why = match (load.complete, sleepless, needed < bounded) {
            (false, _, _) => Why::Unknown,
            (true, true, _) => Why::ModelsUnknown,
            (true, false, true) => Why::Delay,
            (true, false, false) => Why::Load,
        };
        hold(inputs, bounded, why, self.next_expiry(now, config.delay).filter(|_| needed < bounded))
    }

    /// Restarts the delay after another writer chose the number.
    pub fn begin_again(&mut self, now: Instant) {
        self.needs.clear();
        self.since = Some(now);
        self.last = Some(now);
    }

    fn note(&mut self, now: Instant, need: i32) {
        if self.last.is_none_or(|last| now.saturating_duration_since(last) > LONGEST_PAUSE) {
            self.begin_again(now);
        }
        self.last = Some(now);
        while self.needs.back().is_some_and(|(_, before)| *before <= need) {
            self.needs.pop_back();
        }
        self.needs.push_back((now, need));
    }

    fn expire(&mut self, now: Instant, delay: Duration) {
        while self.needs.len() > 1
            && self.needs.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) >= delay)
        {
            self.needs.pop_front();
        }
    }

    fn next_expiry(&self, now: Instant, delay: Duration) -> Option<Duration> {
        let (at, _) = self.needs.front()?;
        Some((*at + delay).saturating_duration_since(now))
    }
}

/// Returns the number of Pods that the load alone requires, within the bounds.
fn needed(config: &ScalingConfig, load: &Load) -> i32 {
    let requests = load.waiting.saturating_add(load.running);
    let pods = requests.div_ceil(u64::from(config.target.max(1)));
    let awake = u64::from(load.ending > 0);
    i32::try_from(pods.max(awake)).unwrap_or(i32::MAX).clamp(config.min, config.max)
}

fn hold(inputs: &ScalingInputs, bounded: i32, why: Why, next_decision: Option<Duration>) -> ScalingDecision {
    let why = if bounded == inputs.current { why } else { Why::Bounds };
    ScalingDecision { replicas: bounded, why, next_decision }
}

#[cfg(test)]
mod tests;
