//! The condition of a backend: a state machine without I/O. The caller hands in probe results and the time.
//!
//! | condition | meaning | models advertised |
//! |---|---|---|
//! | unknown | not probed yet, or no result yet | no |
//! | healthy | the last health check with a response succeeded | yes |
//! | not ready | the health check returns an error, such as 503 while a model loads | no |
//! | gone | the connection is refused | no |
//!
//! A probe that times out changes nothing: a backend that computes may be too busy to respond.
//!
//! A probe that began before the last change is stale and is ignored. Otherwise a slow probe would undo what a request
//! has revealed since.

#![warn(clippy::disallowed_types, clippy::iter_over_hash_type)]

use std::time::{Duration, Instant};

use super::health::Health;

/// Interval between probes of a backend that is not healthy, or whose end a drain waits for.
pub(crate) const RECOVERY_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between probes of a healthy backend.
pub(crate) const HEALTHY_INTERVAL: Duration = Duration::from_secs(5);

/// The condition of the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// No probe has had a result.
    #[default]
    Unknown,
    /// It serves requests.
    Healthy,
    /// It accepts connections and fails its health check.
    NotReady,
    /// It refuses connections.
    Gone,
}

impl Condition {
    /// All conditions.
    pub const ALL: [Self; 4] = [Self::Unknown, Self::Healthy, Self::NotReady, Self::Gone];

    /// The name in logs, metrics and `/healthz`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Healthy => "healthy",
            Self::NotReady => "not_ready",
            Self::Gone => "gone",
        }
    }
}

/// The condition, its reason and its age.
#[derive(Clone, Debug)]
pub struct Monitor {
    condition: Condition,
    reason: Option<String>,
    since: Instant,
}

impl Monitor {
    /// A monitor of a backend that has not been probed.
    pub fn new(now: Instant) -> Self {
        Self { condition: Condition::Unknown, reason: None, since: now }
    }

    /// The condition.
    pub fn condition(&self) -> Condition {
        self.condition
    }

    /// True while the backend is advertised.
    pub fn is_healthy(&self) -> bool {
        self.condition == Condition::Healthy
    }

    /// The result of the last probe, unless it succeeded.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// The time of the last change.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Applies the result of a probe that began at `began`.
    pub(crate) fn handle_probe(&mut self, health: &Health, began: Instant, now: Instant) {
        if began < self.since {
            return;
        }
        match health {
            Health::Alive => self.enter(Condition::Healthy, None, now),
            Health::NotReady(why) => self.enter(Condition::NotReady, Some(why), now),
            Health::Silent(why) => self.enter(self.condition, Some(why), now),
            Health::Gone(why) => self.enter(Condition::Gone, Some(why), now),
        }
    }

    /// Applies a request's failure to connect.
    pub fn handle_refused(&mut self, why: &str, now: Instant) {
        self.enter(Condition::Gone, Some(why), now);
    }

    /// Forgets everything: the settings name another backend.
    pub fn handle_replaced(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Returns the time until the next probe. `watched` is true while a drain waits for the backend's end.
    pub fn next_probe(&self, watched: bool) -> Duration {
        if self.is_healthy() && !watched { HEALTHY_INTERVAL } else { RECOVERY_INTERVAL }
    }

    fn enter(&mut self, condition: Condition, reason: Option<&str>, now: Instant) {
        if condition != self.condition {
            self.since = now;
        }
        self.condition = condition;
        self.reason = reason.map(str::to_owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A backend and a clock that advances by a second with each probe.
    struct Probed(Monitor, Instant);

    impl Probed {
        fn new() -> Self {
            let now = Instant::now();
            Self(Monitor::new(now), now)
        }

        fn probe(&mut self, health: &Health) -> Condition {
            let began = self.1;
            self.1 += Duration::from_secs(1);
            self.0.handle_probe(health, began, self.1);
            self.0.condition()
        }
    }

    fn not_ready() -> Health {
        Health::NotReady("503".to_owned())
    }

    fn silent() -> Health {
        Health::Silent("5 s".to_owned())
    }

    fn gone() -> Health {
        Health::Gone("refused".to_owned())
    }

    #[test]
    fn each_probe_result_decides_condition() {
        let mut backend = Probed::new();
        for (health, condition) in [
            (silent(), Condition::Unknown),
            (not_ready(), Condition::NotReady),
            (Health::Alive, Condition::Healthy),
            (not_ready(), Condition::NotReady),
            (gone(), Condition::Gone),
            (not_ready(), Condition::NotReady),
        ] {
            assert_eq!(backend.probe(&health), condition, "{health:?}");
            assert_eq!(backend.0.reason().is_none(), health == Health::Alive);
        }
    }

    #[test]
    fn silent_probe_keeps_condition() {
        for (before, condition) in
            [(Health::Alive, Condition::Healthy), (not_ready(), Condition::NotReady), (gone(), Condition::Gone)]
        {
            let mut backend = Probed::new();
            backend.probe(&before);
            let since = backend.0.since();
            assert_eq!((backend.probe(&silent()), backend.0.since()), (condition, since));
        }
    }

    #[test]
    fn refused_request_outweighs_older_probe() {
        let mut backend = Probed::new();
        backend.probe(&Health::Alive);
        let (began, refused) = (backend.1, backend.1 + Duration::from_secs(1));
        backend.0.handle_refused("refused", refused);
        backend.0.handle_probe(&Health::Alive, began, refused + Duration::from_secs(1));
        assert_eq!((backend.0.condition(), backend.0.since()), (Condition::Gone, refused));
        backend.0.handle_probe(&Health::Alive, refused, refused + Duration::from_secs(1));
        assert!(backend.0.is_healthy());
    }

    #[test]
    fn replaced_backend_is_unknown() {
        let mut backend = Probed::new();
        backend.probe(&Health::Alive);
        backend.0.handle_replaced(backend.1);
        assert_eq!((backend.0.condition(), backend.0.reason()), (Condition::Unknown, None));
    }

    #[test]
    fn healthy_backend_is_probed_less_often() {
        let mut backend = Probed::new();
        assert_eq!(backend.0.next_probe(false), RECOVERY_INTERVAL);
        backend.probe(&Health::Alive);
        assert_eq!(backend.0.next_probe(false), HEALTHY_INTERVAL);
        assert_eq!(backend.0.next_probe(true), RECOVERY_INTERVAL);
    }
}
