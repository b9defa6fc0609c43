//! How many Pods a pool should have, from what its relays report: pure, with the time handed in.
//!
//! - Up at once: as many Pods as give each its target of queued and running requests.
//! - Down only when fewer were enough for the whole of `scaleDownDelay`: to the greatest number that was needed within it.
//!   A short lull costs nothing, where a model takes minutes to load.
//! - To zero only when nothing waits and nothing runs, and only when it is known which models may wake the pool again.
//! - What is not known never scales down. While a relay does not answer, while the operator has watched for less than one
//!   whole delay (it starts anew with each leader), and after a pause in watching, the number can only rise.

pub mod share;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A pause in looking after which what was seen before proves nothing. Looks are a second apart.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What the pool asks for, validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Pods at least.
    pub min: i32,
    /// Pods at most.
    pub max: i32,
    /// Requests that one Pod should have.
    pub target: u32,
    /// How long fewer Pods must be enough.
    pub delay: Duration,
}

/// What the relays say about the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait and that this pool should serve.
    pub waiting: u64,
    /// Requests that its workers run.
    pub running: u64,
    /// Requests that workers which are leaving still run: no reason for another Pod, but for not being at zero.
    pub ending: u64,
    /// Whether every relay answered. If not, there may be more.
    pub complete: bool,
}

/// What is known at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// Pods that are asked for now.
    pub current: i32,
    /// Nothing where no relay has reported yet.
    pub load: Option<Load>,
    /// Whether a request could wake the pool: it lists its models, or has advertised some.
    pub wakeable: bool,
}

/// How many, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Pods to ask for.
    pub replicas: i32,
    /// Why that many.
    pub why: Why,
    /// When time alone could change the decision.
    pub next_look: Option<Duration>,
}

/// Why so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// As many as the load needs.
    Load,
    /// Fewer would do, but not for long enough yet.
    Delay,
    /// Fewer have been enough for the whole delay.
    Idle,
    /// The present number was outside of minReplicas and maxReplicas.
    Bounds,
    /// Not enough is known to go down.
    Unknown,
    /// Nothing needs it, but once at zero nothing could wake it.
    ModelsUnknown,
}

/// What was needed lately.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Since when there is no gap.
    since: Option<Instant>,
    last: Option<Instant>,
    /// Needs that later ones have not exceeded, oldest and greatest first: strictly falling, so never more than the range
    /// from minReplicas to maxReplicas.
    needs: VecDeque<(Instant, i32)>,
}

impl History {
    /// Decides, and remembers what was needed.
    pub fn decide(&mut self, now: Instant, config: &Config, inputs: &Inputs) -> Decision {
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
            return Decision { replicas: needed, why: Why::Load, next_look: None };
        }
        let enough = self.needs.front().map_or(needed, |(_, need)| *need);
        let watched = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        if watched < config.delay && needed < bounded {
            return hold(inputs, bounded, Why::Delay, Some(config.delay - watched));
        }
        if enough < bounded {
            return Decision { replicas: enough, why: Why::Idle, next_look: None };
        }
        let why = match (load.complete, sleepless, needed < bounded) {
            (false, _, _) => Why::Unknown,
            (true, true, _) => Why::ModelsUnknown,
            (true, false, true) => Why::Delay,
            (true, false, false) => Why::Load,
        };
        hold(inputs, bounded, why, self.next_expiry(now, config.delay).filter(|_| needed < bounded))
    }

    /// Somebody else chose the number: it gets a whole delay.
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

/// Pods that the load alone asks for, within the bounds.
fn needed(config: &Config, load: &Load) -> i32 {
    let requests = load.waiting.saturating_add(load.running);
    let pods = requests.div_ceil(u64::from(config.target.max(1)));
    let awake = u64::from(load.ending > 0);
    i32::try_from(pods.max(awake)).unwrap_or(i32::MAX).clamp(config.min, config.max)
}

fn hold(inputs: &Inputs, bounded: i32, why: Why, next_look: Option<Duration>) -> Decision {
    let why = if bounded == inputs.current { why } else { Why::Bounds };
    Decision { replicas: bounded, why, next_look }
}

#[cfg(test)]
mod tests;
