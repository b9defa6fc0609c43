//! Which worker made which stored response.
//!
//! A Responses answer lives in the backend that made it. A request that continues it must reach the same worker process,
//! and no other. Bounded in number and age; the oldest are forgotten first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Responses remembered at most.
const MAX_RESPONSES: usize = 100_000;

/// How long a response is remembered.
const MAX_AGE: Duration = Duration::from_secs(3600);

/// Where a response lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The provider's name.
    pub provider: Arc<str>,
    /// The worker process; it may be linked anew since.
    pub instance: Arc<str>,
    /// The model that made it.
    pub model: Arc<str>,
}

/// The memory.
#[derive(Debug, Default)]
pub struct Affinity {
    /// Held for one map operation.
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    origins: HashMap<String, (Instant, Origin)>,
    by_age: VecDeque<(Instant, String)>,
}

impl Affinity {
    /// Remembers that `origin` made the response `id`.
    pub fn remember(&self, id: &str, origin: Origin, now: Instant) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.forget_old(now);
        inner.by_age.push_back((now, id.to_owned()));
        inner.origins.insert(id.to_owned(), (now, origin));
    }

    /// Who made the response `id`.
    pub fn origin(&self, id: &str, now: Instant) -> Option<Origin> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.forget_old(now);
        inner.origins.get(id).map(|(_, origin)| origin.clone())
    }
}

impl Inner {
    fn forget_old(&mut self, now: Instant) {
        while let Some((at, id)) = self.by_age.front() {
            let old = now.saturating_duration_since(*at) > MAX_AGE;
            if !old && self.by_age.len() < MAX_RESPONSES {
                break;
            }
            // An id that was remembered again since has a later entry of its own.
            if self.origins.get(id).is_some_and(|(newest, _)| newest == at) {
                self.origins.remove(id);
            }
            self.by_age.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(instance: &str) -> Origin {
        Origin { provider: "p".into(), instance: instance.into(), model: "m".into() }
    }

    #[test]
    fn a_response_is_remembered_for_an_hour() {
        let affinity = Affinity::default();
        let start = Instant::now();
        affinity.remember("r1", origin("a"), start);
        assert_eq!(affinity.origin("r1", start + MAX_AGE), Some(origin("a")));
        assert_eq!(affinity.origin("r1", start + MAX_AGE + Duration::from_secs(1)), None);
        assert_eq!(affinity.origin("r2", start), None);
    }

    #[test]
    fn the_oldest_is_forgotten_when_there_are_too_many() {
        let affinity = Affinity::default();
        let start = Instant::now();
        for n in 0..=MAX_RESPONSES {
            affinity.remember(&n.to_string(), origin("a"), start + Duration::from_micros(n as u64));
        }
        assert_eq!(affinity.origin("0", start), None);
        assert!(affinity.origin(&MAX_RESPONSES.to_string(), start).is_some());
    }

    #[test]
    fn an_id_remembered_again_lives_on() {
        let affinity = Affinity::default();
        let start = Instant::now();
        affinity.remember("r", origin("a"), start);
        affinity.remember("r", origin("b"), start + MAX_AGE);
        assert_eq!(affinity.origin("r", start + MAX_AGE + Duration::from_secs(1)), Some(origin("b")));
    }
}
