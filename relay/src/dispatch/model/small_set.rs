//! An ordered set that usually has one element. That one is kept in place: while one key waits for one model, the
//! queue's indexes cost a comparison each, and no allocation.

use std::collections::BTreeSet;

/// An ordered set. Its only element is in `one`; as soon as there are two, all are in `many` until they are gone.
#[derive(Clone, Debug)]
pub(crate) struct SmallSet<T> {
    one: Option<T>,
    many: BTreeSet<T>,
}

impl<T> Default for SmallSet<T> {
    fn default() -> Self {
        Self { one: None, many: BTreeSet::new() }
    }
}

impl<T: Ord> SmallSet<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.one.is_none() && self.many.is_empty()
    }

    pub(crate) fn insert(&mut self, value: T) {
        if !self.many.is_empty() {
            self.many.insert(value);
        } else if let Some(old) = self.one.take_if(|old| *old != value) {
            self.many.extend([old, value]);
        } else {
            self.one = Some(value);
        }
    }

    /// Removes an element; returns true if it was in the set.
    pub(crate) fn remove(&mut self, value: &T) -> bool {
        if self.many.is_empty() { self.one.take_if(|one| one == value).is_some() } else { self.many.remove(value) }
    }

    /// Replaces an element by another one, if there is a new one.
    pub(crate) fn replace(&mut self, old: Option<&T>, new: Option<T>) {
        old.map(|old| self.remove(old));
        if let Some(new) = new {
            self.insert(new);
        }
    }

    pub(crate) fn first(&self) -> Option<&T> {
        self.one.as_ref().or_else(|| self.many.first())
    }

    pub(crate) fn pop_first(&mut self) -> Option<T> {
        self.one.take().or_else(|| self.many.pop_first())
    }

    /// Returns the only element; `None` if there are others, or were since the set was empty.
    pub(crate) fn only(&self) -> Option<&T> {
        self.one.as_ref()
    }

    /// All elements in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.one.iter().chain(&self.many)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_set_behaves_like_ordered_set() {
        let (mut small, mut plain) = (SmallSet::default(), BTreeSet::new());
        // Grows and shrinks again and again, and inserts and removes elements that are there or not.
        for step in 0..20_000_u32 {
            let value = step.wrapping_mul(2_654_435_761) >> 29;
            let grows = step / 50 % 2 == 0;
            if (step.wrapping_mul(40_503) >> 7) % 4 < if grows { 3 } else { 1 } {
                small.insert(value);
                plain.insert(value);
            } else {
                assert_eq!(small.remove(&value), plain.remove(&value));
            }
            assert!(small.iter().eq(&plain), "step {step}");
            assert_eq!((small.first(), small.is_empty()), (plain.first(), plain.is_empty()));
        }
        while let Some(first) = small.pop_first() {
            assert_eq!(Some(first), plain.pop_first());
        }
        assert!(plain.is_empty());
    }
}
