//! The origins of stored responses: worker and API key.
//!
//! A stored response lives in the backend that made it. A request that continues it must reach the same worker process,
//! and no other. Ids are the backends' own, so they apply per provider, and the first worker process that reports an id
//! keeps it while it is connected: no other worker and no other API key can take over a response by its id. Number and
//! age are bounded; the oldest are forgotten first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most responses that are remembered.
const MAX_RESPONSES: usize = 100_000;

/// How long a response is remembered.
const MAX_AGE: Duration = Duration::from_secs(3600);

/// The origin of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The provider's name.
    pub provider: Arc<str>,
    /// The worker process; it may have a new link since then.
    pub instance: Arc<str>,
    /// The model that made it.
    pub model: Arc<str>,
    /// The id of the API key of its request; `None` if no key was required.
    pub key: Option<Arc<str>>,
}

impl Origin {
    /// True if a caller may read or continue the response. If either side has no key, keys are not required.
    pub fn is_open_to(&self, key: Option<&str>) -> bool {
        let (Some(own), Some(key)) = (self.key.as_deref(), key) else { return true };
        own == key
    }

    fn is_same_owner(&self, other: &Self) -> bool {
        self.instance == other.instance && self.key == other.key
    }
}

/// The remembered origins.
#[derive(Debug, Default)]
pub struct Affinity {
    /// Held for one map operation.
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// For each id one origin per provider, the oldest first.
    origins: HashMap<Arc<str>, Vec<(Instant, Origin)>>,
    by_age: VecDeque<(Instant, Arc<str>, Arc<str>)>,
}

impl Affinity {
    /// Remembers that `origin` made the response `id`, unless another owner of the same provider did and `is_alive`.
    pub fn remember(&self, id: &str, origin: Origin, now: Instant, is_alive: impl FnOnce(&Origin) -> bool) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.forget_old(now);
        let id: Arc<str> = id.into();
        let known = inner.origins.entry(Arc::clone(&id)).or_default();
        let place = known.iter().position(|(_, known)| known.provider == origin.provider);
        let provider = Arc::clone(&origin.provider);
        match place {
            Some(place) => {
                let (_, owner) = &known[place];
                if !owner.is_same_owner(&origin) && is_alive(owner) {
                    return;
                }
                known[place] = (now, origin);
            }
            None => known.push((now, origin)),
        }
        inner.by_age.push_back((now, provider, id));
    }

    /// Returns the origin of a provider's response `id`.
    pub fn origin(&self, provider: &str, id: &str, now: Instant) -> Option<Origin> {
        self.origins(id, now).into_iter().find(|origin| &*origin.provider == provider)
    }

    /// Returns the origins of all responses `id`, one per provider, the oldest first.
    pub fn origins(&self, id: &str, now: Instant) -> Vec<Origin> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.forget_old(now);
        let known = inner.origins.get(id).map(Vec::as_slice).unwrap_or_default();
        known.iter().map(|(_, origin)| origin.clone()).collect()
    }
}

impl Inner {
    fn forget_old(&mut self, now: Instant) {
        while let Some((at, provider, id)) = self.by_age.front() {
            let old = now.saturating_duration_since(*at) > MAX_AGE;
            if !old && self.by_age.len() < MAX_RESPONSES {
                break;
            }
            // An id that was remembered again since then has a later entry of its own.
            if let Some(known) = self.origins.get_mut(id) {
                known.retain(|(newest, origin)| newest != at || origin.provider != *provider);
                if known.is_empty() {
                    self.origins.remove(id);
                }
            }
            self.by_age.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(instance: &str) -> Origin {
        Origin { provider: "p".into(), instance: instance.into(), model: "m".into(), key: None }
    }

    fn keyed(instance: &str, key: &str) -> Origin {
        Origin { key: Some(key.into()), ..origin(instance) }
    }

    #[test]
    fn response_is_remembered_for_one_hour() {
        let affinity = Affinity::default();
        let start = Instant::now();
        affinity.remember("r1", origin("a"), start, |_| true);
        assert_eq!(affinity.origin("p", "r1", start + MAX_AGE), Some(origin("a")));
        assert_eq!(affinity.origin("p", "r1", start + MAX_AGE + Duration::from_secs(1)), None);
        assert_eq!(affinity.origin("p", "r2", start), None);
    }

    #[test]
    fn oldest_response_is_forgotten_at_limit() {
        let affinity = Affinity::default();
        let start = Instant::now();
        for n in 0..=MAX_RESPONSES {
            let at = start + Duration::from_micros(n as u64);
            affinity.remember(&n.to_string(), origin("a"), at, |_| true);
        }
        assert_eq!(affinity.origin("p", "0", start), None);
        assert!(affinity.origin("p", &MAX_RESPONSES.to_string(), start).is_some());
    }

    #[test]
    fn repeated_response_id_extends_its_lifetime() {
        let affinity = Affinity::default();
        let start = Instant::now();
        affinity.remember("r", origin("a"), start, |_| true);
        affinity.remember("r", origin("a"), start + MAX_AGE, |_| true);
        assert_eq!(affinity.origin("p", "r", start + MAX_AGE + Duration::from_secs(1)), Some(origin("a")));
    }

    #[test]
    fn connected_owner_keeps_its_response_id() {
        let affinity = Affinity::default();
        let now = Instant::now();
        affinity.remember("r", keyed("a", "k1"), now, |_| true);
        for other in [keyed("b", "k1"), keyed("a", "k2"), origin("a")] {
            affinity.remember("r", other, now, |_| true);
            assert_eq!(affinity.origin("p", "r", now), Some(keyed("a", "k1")));
        }
        affinity.remember("r", keyed("b", "k2"), now, |owner| &*owner.instance != "a");
        assert_eq!(affinity.origin("p", "r", now), Some(keyed("b", "k2")));
    }

    #[test]
    fn response_ids_are_scoped_to_provider() {
        let affinity = Affinity::default();
        let now = Instant::now();
        let other = Origin { provider: "q".into(), ..origin("b") };
        affinity.remember("r", origin("a"), now, |_| true);
        affinity.remember("r", other.clone(), now, |_| true);
        assert_eq!(affinity.origin("p", "r", now), Some(origin("a")));
        assert_eq!(affinity.origin("q", "r", now), Some(other.clone()));
        assert_eq!(affinity.origins("r", now), [origin("a"), other]);
    }

    #[test]
    fn response_is_open_to_its_own_key() {
        assert!(keyed("a", "k1").is_open_to(Some("k1")) && !keyed("a", "k1").is_open_to(Some("k2")));
        assert!(keyed("a", "k1").is_open_to(None) && origin("a").is_open_to(Some("k1")));
    }
}
