//! Where the conversations are: the worker that computed each one's last prompt, and so has it in its cache.
//!
//! The number of homes is bounded. They are kept in two generations: when the younger one holds half of the limit, it
//! becomes the older one, and the homes of the previous older one that were not used since are forgotten. So at least
//! the half of the limit that was used last is remembered, at the cost of one or two look-ups.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::event::{Conversation, WorkerKey};

/// Identifies a worker process, whatever its connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct InstanceKey(u64);

impl InstanceKey {
    /// A process that has not stated an instance is known by its connection alone.
    pub(crate) fn new(instance: Option<&str>, connection: WorkerKey) -> Self {
        let mut hasher = DefaultHasher::new();
        match instance {
            Some(instance) => instance.hash(&mut hasher),
            None => connection.0.hash(&mut hasher),
        }
        Self(hasher.finish())
    }
}

/// Where a conversation was last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Home {
    pub(crate) instance: InstanceKey,
    /// The size of the last body, in bytes.
    pub(crate) bytes: u64,
    /// The number of the last dispatch when it was recorded.
    pub(crate) turn: u64,
}

/// The homes of the conversations that were used last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Homes {
    young: HashMap<Conversation, Home>,
    old: HashMap<Conversation, Home>,
}

impl Homes {
    pub(crate) fn get(&self, conversation: Conversation) -> Option<&Home> {
        self.young.get(&conversation).or_else(|| self.old.get(&conversation))
    }

    /// Records a home; of all homes at most `max` are kept.
    pub(crate) fn set(&mut self, conversation: Conversation, home: Home, max: usize) {
        if max == 0 {
            return;
        }
        self.old.remove(&conversation);
        self.young.insert(conversation, home);
        if self.young.len() >= max.div_ceil(2) {
            self.old = std::mem::take(&mut self.young);
        }
    }

    /// Applies a limit that may be smaller than before: a generation that exceeds its half is forgotten.
    pub(crate) fn limit(&mut self, max: usize) {
        let half = max.div_ceil(2);
        for generation in [&mut self.old, &mut self.young] {
            if generation.len() > half {
                *generation = HashMap::new();
            }
        }
        if self.young.len() == half {
            self.old = std::mem::take(&mut self.young);
        }
    }

    /// Both generations, sorted.
    #[cfg(test)]
    pub(crate) fn canonical(&self) -> [std::collections::BTreeMap<Conversation, Home>; 2] {
        [&self.young, &self.old].map(|generation| generation.iter().map(|(key, home)| (*key, *home)).collect())
    }

    /// The number of conversations with a home.
    pub(crate) fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(turn: u64) -> Home {
        Home { instance: InstanceKey(1), bytes: 10, turn }
    }

    #[test]
    fn homes_stay_within_their_limit() {
        let mut homes = Homes::default();
        for number in 0..1000 {
            homes.set(Conversation(number), home(number), 10);
            assert!(homes.len() <= 10, "{}", homes.len());
        }
    }

    #[test]
    fn half_of_the_homes_used_last_remain() {
        let mut homes = Homes::default();
        for number in 0..1000 {
            homes.set(Conversation(number), home(number), 10);
            let last = number.saturating_sub(4)..=number;
            assert!(last.clone().all(|kept| homes.get(Conversation(kept)) == Some(&home(kept))), "{last:?}");
        }
    }

    #[test]
    fn conversation_used_often_keeps_its_home() {
        let mut homes = Homes::default();
        for number in 0..1000 {
            homes.set(Conversation(number), home(number), 10);
            homes.set(Conversation(5000), home(number), 10);
            assert_eq!(homes.get(Conversation(5000)), Some(&home(number)));
        }
    }

    #[test]
    fn smaller_limit_forgets_homes() {
        for (before, after) in [(10, 0), (10, 1), (10, 2), (10, 9), (100, 7), (7, 6)] {
            for number in 0..before {
                let mut homes = Homes::default();
                (0..number).for_each(|it| homes.set(Conversation(it), home(it), before as usize));
                homes.limit(after);
                for it in 100..120 {
                    assert!(homes.len() <= after, "{} after {number}, {before}, {after}", homes.len());
                    homes.set(Conversation(it), home(it), after);
                }
            }
        }
    }

    #[test]
    fn limit_of_zero_keeps_no_home() {
        let mut homes = Homes::default();
        homes.set(Conversation(1), home(1), 0);
        assert_eq!(homes.len(), 0);
    }
}
