//! The settings of a multiplexer and of its slots, as validated values with their defaults.
//!
//! Few on purpose: whatever can be measured is not a setting. The fixed times below are those nobody needed to change.

use std::time::Duration;

use super::Model;
use super::estimate::Priors;

/// A sleeping model that has not woken by then is started cold instead.
pub const WAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// Unloading takes no longer, or the backend is killed. Also how long the kill itself may take.
pub const EVICT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a driver looks for the memory of an unloaded model to come back.
pub const MEMORY_FREE_TIMEOUT: Duration = Duration::from_secs(10);

/// From telling the severed requests to unloading: the backend sees them hang up before it is put to sleep or killed.
pub const SEVER_GRACE: Duration = Duration::from_secs(2);

/// Between two looks at whether the backend still serves what it should.
pub const RESYNC_INTERVAL: Duration = Duration::from_secs(5);

/// After the first failed load; doubled with each further one.
pub const FIRST_BACKOFF: Duration = Duration::from_secs(2);

/// The doubling ends here.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

/// A setting beyond this means "never". So long ones still add up without overflow.
pub const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// What holds for every slot of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    /// How long running requests may take once their model has to go; zero severs them at once.
    pub drain_timeout: Duration,
    /// How long a cold load may take.
    pub load_timeout: Duration,
    /// How long the worker holds a request of a relay that cannot keep it itself.
    pub hold_budget: Duration,
    /// How long a model should wait at most; `None` lets it grow with the cost of swaps.
    pub max_wait: Option<Duration>,
    /// The least time that a model stays once it is loaded, however cheap swaps are.
    pub min_residency: Duration,
    /// Whether an idle resident is kept a moment for its next request while others wait.
    pub linger: Linger,
    /// Whether the former resident comes back when its successor cannot be loaded.
    pub rollback: bool,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            drain_timeout: Duration::from_secs(300),
            load_timeout: Duration::from_secs(600),
            hold_budget: Duration::from_secs(300),
            max_wait: None,
            min_residency: Duration::from_secs(5),
            linger: Linger::Auto,
            rollback: true,
        }
    }
}

/// How long an idle resident is kept while others wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Linger {
    /// As long as its own history says that it pays.
    #[default]
    Auto,
    /// Not at all.
    Off,
    /// Always so long.
    Fixed(Duration),
}

/// One slot and the models that it may hold.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotConfig {
    /// Its name.
    pub id: String,
    /// What holds for all slots.
    pub knobs: Knobs,
    /// What the slot can hold, in bytes; `None` is not checked.
    pub memory: Option<u64>,
    /// Loaded at start, and again after [`return_to_default_after`](Self::return_to_default_after).
    pub default: Option<Model>,
    /// How long the slot must have been idle before the default comes back; `None`: it does not.
    pub return_to_default_after: Option<Duration>,
    /// Requests of one relay without `slots1` that run or wait here at most: what the worker registered for, so not a
    /// setting.
    pub max_held_per_relay: usize,
    /// What its loads are taken to cost before any was seen: by its driver, so not a setting.
    pub priors: Priors,
    /// The models.
    pub models: Vec<ModelConfig>,
}

impl SlotConfig {
    /// A slot with these models and defaults for all else.
    pub fn new(id: impl Into<String>, models: Vec<ModelConfig>) -> Self {
        Self {
            id: id.into(),
            knobs: Knobs::default(),
            memory: None,
            default: None,
            return_to_default_after: None,
            max_held_per_relay: 1024,
            priors: Priors::USUAL,
            models,
        }
    }

    /// The same with durations that can be added up, and models that take a request at least.
    pub fn within_reason(mut self) -> Self {
        let bounded = |duration: Duration| duration.min(NEVER);
        let knobs = &mut self.knobs;
        for knob in
            [&mut knobs.drain_timeout, &mut knobs.load_timeout, &mut knobs.hold_budget, &mut knobs.min_residency]
        {
            *knob = bounded(*knob);
        }
        knobs.max_wait = knobs.max_wait.map(bounded);
        if let Linger::Fixed(fixed) = &mut knobs.linger {
            *fixed = bounded(*fixed);
        }
        self.return_to_default_after = self.return_to_default_after.map(bounded);
        for model in &mut self.models {
            model.idle_ttl = model.idle_ttl.map(bounded);
            model.capacity = model.capacity.max(1);
        }
        self
    }
}

/// One model of a slot, as far as the machine needs to know it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Its name.
    pub id: Model,
    /// Further names. Relays are told of them; whatever comes in by one goes by the id from there on.
    pub aliases: Vec<Model>,
    /// Requests at once.
    pub capacity: u32,
    /// What it takes, in bytes, if the operator said so.
    pub memory: Option<u64>,
    /// Never unloaded for another.
    pub pin: bool,
    /// Unloaded after so long without a request; `None`: kept.
    pub idle_ttl: Option<Duration>,
}

impl ModelConfig {
    /// A model with this many requests at once and defaults for all else.
    pub fn new(id: impl Into<Model>, capacity: u32) -> Self {
        Self { id: id.into(), aliases: Vec::new(), capacity, memory: None, pin: false, idle_ttl: None }
    }
}
