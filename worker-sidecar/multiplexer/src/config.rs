//! The settings of a multiplexer and of its slots, as validated values with their defaults.
//!
//! They are few on purpose: anything that can be measured is not a setting. The constants below never needed to be
//! changed.

use std::time::Duration;

use super::Model;
use super::estimate::Priors;

/// A sleeping model that has not woken by then is started cold instead.
pub const WAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// If unloading takes longer, the backend is killed. Also the limit for the kill itself.
pub const EVICT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a driver waits for the memory of an unloaded model to become free.
pub const MEMORY_FREE_TIMEOUT: Duration = Duration::from_secs(10);

/// From cancelling the severed requests to unloading: the backend sees them disconnect before it is put to sleep or
/// killed.
pub const SEVER_GRACE: Duration = Duration::from_secs(2);

/// Between two probes of the backend.
pub const RESYNC_INTERVAL: Duration = Duration::from_secs(5);

/// The back-off after the first failed load; doubled with each further one.
pub const FIRST_BACKOFF: Duration = Duration::from_secs(2);

/// The longest back-off.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

/// A setting beyond this means "never". Settings up to this can be added without overflow.
pub const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Settings that apply to every slot of a worker.
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
    /// How long an idle resident is kept for its next request while requests for others wait.
    pub linger: Linger,
    /// True to load the former resident again when its successor cannot be loaded.
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

/// How long an idle resident is kept while requests for others wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Linger {
    /// As long as its own history predicts a benefit.
    #[default]
    Auto,
    /// Not at all.
    Off,
    /// Always this long.
    Fixed(Duration),
}

/// One slot and the models that it may hold.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotConfig {
    /// Its name.
    pub id: String,
    /// Settings that apply to all slots.
    pub knobs: Knobs,
    /// The slot's memory, in bytes; `None`: not checked.
    pub memory: Option<u64>,
    /// Loaded at start, and again after [`return_to_default_after`](Self::return_to_default_after).
    pub default: Option<Model>,
    /// How long the slot must have been idle before the default is loaded again; `None`: never.
    pub return_to_default_after: Option<Duration>,
    /// The most requests of one relay without `slots1` that run or wait here: the number that the worker registered, so
    /// not a setting.
    pub max_held_per_relay: usize,
    /// The assumed cost of its loads before any was measured. Depends on its driver, so not a setting.
    pub priors: Priors,
    /// The models.
    pub models: Vec<ModelConfig>,
}

impl SlotConfig {
    /// Creates a slot with these models and defaults for everything else.
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

    /// Returns the configuration with durations that can be added up and a capacity of at least one request per model.
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
    /// Further names. They are reported to relays; a request that uses an alias is converted to the id on arrival.
    pub aliases: Vec<Model>,
    /// The number of concurrent requests.
    pub capacity: u32,
    /// The model's memory, in bytes, if the operator declared it.
    pub memory: Option<u64>,
    /// True if it is never unloaded for another.
    pub pin: bool,
    /// Unload it after this time without a request; `None`: keep it.
    pub idle_ttl: Option<Duration>,
}

impl ModelConfig {
    /// Creates a model with this many concurrent requests and defaults for everything else.
    pub fn new(id: impl Into<Model>, capacity: u32) -> Self {
        Self { id: id.into(), aliases: Vec::new(), capacity, memory: None, pin: false, idle_ttl: None }
    }
}
