//! The requests that wait for the same workers: returns the oldest, the next to expire, and removes any of them.
//!
//! Requests arrive in the order of their keys and, while the settings do not change, in that of their deadlines. So
//! they form a linked list, and its first is also the first to expire. Insertion and removal touch a node and its
//! neighbours, however long the list is. A request that does not fit behind the last one, because it returns from a
//! worker or its deadline is nearer, is *late* and kept in trees next to the list: late requests are few; if all were,
//! they would cost as much as trees do.
//!
//! Measured with 1,000 waiting requests, the default bound of a queue: a request, from its arrival to its completion,
//! costs the core 6,300 instructions, and 9,800 if all are in the trees; with 100,000, 6,300 and 11,000.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::{Index, IndexMut};

use super::clock::{Axis, Moment, Span};
use super::event::RequestKey;

/// No deadline.
pub(crate) const NEVER: Span = Span::MAX;

/// The time at which a waiting request must end on each [`Axis`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Deadlines([Span; Axis::ALL.len()]);

impl Deadlines {
    /// `None`: that axis never ends it.
    pub(crate) fn new(warm: Option<Span>, cold: Option<Span>, wall: Option<Moment>) -> Self {
        let wall = wall.map(Moment::on_wall);
        Self([warm, cold, wall].map(|due| due.unwrap_or(NEVER)))
    }

    /// Returns the time left on each axis, from its position; `None`: that axis never ends it.
    #[cfg(test)]
    pub(crate) fn left(&self, position: impl Fn(Axis) -> Span) -> [Option<Span>; Axis::ALL.len()] {
        Axis::ALL.map(|axis| Some(self.on(axis)).filter(|due| *due != NEVER).map(|due| due - position(axis)))
    }

    fn on(&self, axis: Axis) -> Span {
        self.0[axis as usize]
    }

    /// True if no axis ends `self` later than `others`.
    fn all_by(&self, others: &Self) -> bool {
        self.0.iter().zip(&others.0).all(|(due, other)| due <= other)
    }
}

/// A request, reduced to the fields that its wait list needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueEntry {
    pub(crate) key: RequestKey,
    pub(crate) arrived: Moment,
    pub(crate) deadlines: Deadlines,
}

/// The place of a request in its list, until it leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EntryIndex(NonZeroU32);

/// A request and its neighbours.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    entry: QueueEntry,
    ahead: Option<EntryIndex>,
    behind: Option<EntryIndex>,
}

/// All requests that wait in one lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitList {
    nodes: Vec<Node>,
    /// Unused nodes.
    free: Vec<EntryIndex>,
    first: Option<EntryIndex>,
    last: Option<EntryIndex>,
    late: BTreeMap<RequestKey, QueueEntry>,
    late_dues: [BTreeSet<(Span, RequestKey)>; Axis::ALL.len()],
    /// The sum of all arrivals, in nanoseconds: ages are reported as sums.
    arrivals: i128,
}

impl WaitList {
    pub(crate) fn insert(&mut self, entry: QueueEntry) -> EntryIndex {
        self.arrivals += entry.arrived.nanos();
        let last = self.last.map(|last| self[last].entry);
        let fits = last.is_none_or(|last| last.key < entry.key && last.deadlines.all_by(&entry.deadlines));
        let index = self.allocate(entry);
        if fits {
            self.link(index);
        } else {
            self.insert_late(entry);
        }
        index
    }

    pub(crate) fn remove(&mut self, index: EntryIndex) {
        let entry = self[index].entry;
        self.arrivals -= entry.arrived.nanos();
        if !self.remove_late(&entry) {
            self.unlink(index);
        }
        self.free.push(index);
    }

    /// True if another request is before this one in all orders: it is neither the oldest nor the next to expire.
    pub(crate) fn is_behind(&self, index: EntryIndex) -> bool {
        self[index].ahead.is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The oldest request.
    pub(crate) fn first(&self) -> Option<&QueueEntry> {
        let listed = self.first.map(|first| &self[first].entry);
        if self.late.is_empty() {
            return listed;
        }
        listed.into_iter().chain(self.late.values().next()).min_by_key(|entry| entry.key)
    }

    /// All waiting requests, in no order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.listed().chain(self.late.values()).map(|entry| entry.key)
    }

    /// Returns at most twice `count` requests, among them the `count` oldest.
    pub(crate) fn oldest(&self, count: usize) -> impl Iterator<Item = &QueueEntry> {
        self.listed().take(count).chain(self.late.values().take(count))
    }

    /// All waiting requests, oldest first.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = &QueueEntry> {
        let (mut listed, mut late) = (self.listed().peekable(), self.late.values().peekable());
        std::iter::from_fn(move || match (listed.peek(), late.peek()) {
            (Some(first), Some(other)) if other.key < first.key => late.next(),
            (Some(_), _) => listed.next(),
            (None, _) => late.next(),
        })
    }

    /// Returns the next deadline on an axis, and its request.
    pub(crate) fn next_due(&self, axis: Axis) -> Option<(Span, RequestKey)> {
        let listed = self.first.map(|first| &self[first].entry);
        let listed = listed.map(|entry| (entry.deadlines.on(axis), entry.key));
        let next = if self.late.is_empty() {
            listed
        } else {
            listed.into_iter().chain(self.late_dues[axis as usize].first().copied()).min()
        };
        next.filter(|(due, _)| *due != NEVER)
    }

    pub(crate) fn arrivals(&self) -> i128 {
        self.arrivals
    }

    /// Returns the listed requests from the first to the last, without the late ones.
    fn listed(&self) -> impl Iterator<Item = &QueueEntry> {
        let node = |index: Option<EntryIndex>| index.map(|index| &self[index]);
        std::iter::successors(node(self.first), move |before| node(before.behind)).map(|node| &node.entry)
    }

    fn allocate(&mut self, entry: QueueEntry) -> EntryIndex {
        let new = Node { entry, ahead: None, behind: None };
        if let Some(index) = self.free.pop() {
            self[index] = new;
            return index;
        }
        self.nodes.push(new);
        let count = u32::try_from(self.nodes.len()).ok().and_then(NonZeroU32::new);
        EntryIndex(count.expect("fewer than four billion wait"))
    }

    fn link(&mut self, index: EntryIndex) {
        let last = self.last.replace(index);
        self[index].ahead = last;
        match last {
            Some(last) => self[last].behind = Some(index),
            None => self.first = Some(index),
        }
    }

    fn unlink(&mut self, index: EntryIndex) {
        let Node { ahead, behind, .. } = self[index];
        match ahead {
            Some(ahead) => self[ahead].behind = behind,
            None => self.first = behind,
        }
        match behind {
            Some(behind) => self[behind].ahead = ahead,
            None => self.last = ahead,
        }
    }

    fn insert_late(&mut self, entry: QueueEntry) {
        for axis in Axis::ALL {
            self.late_dues[axis as usize].insert((entry.deadlines.on(axis), entry.key));
        }
        self.late.insert(entry.key, entry);
    }

    /// Removes a late request; returns true if it was late.
    fn remove_late(&mut self, entry: &QueueEntry) -> bool {
        let was_late = self.late.remove(&entry.key).is_some();
        if was_late {
            for axis in Axis::ALL {
                self.late_dues[axis as usize].remove(&(entry.deadlines.on(axis), entry.key));
            }
        }
        was_late
    }
}

/// An index is held only by the request in its node.
impl Index<EntryIndex> for WaitList {
    type Output = Node;

    fn index(&self, EntryIndex(number): EntryIndex) -> &Node {
        &self.nodes[number.get() as usize - 1]
    }
}

impl IndexMut<EntryIndex> for WaitList {
    fn index_mut(&mut self, EntryIndex(number): EntryIndex) -> &mut Node {
        &mut self.nodes[number.get() as usize - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::model::clock::LaneClock;

    fn entry(key: u64, wall: Span) -> QueueEntry {
        let moment = |at| Moment::ZERO.plus(at);
        QueueEntry {
            key: RequestKey(key),
            arrived: moment(1),
            deadlines: Deadlines::new(None, None, Some(moment(wall))),
        }
    }

    fn front(list: &WaitList) -> Option<(u64, Span, u64)> {
        let (due, next) = list.next_due(Axis::Wall)?;
        Some((list.first()?.key.0, due, next.0))
    }

    #[test]
    fn requests_arriving_in_order_are_never_late() {
        let mut list = WaitList::default();
        let mut nodes: Vec<_> = (0..1000).map(|key| (key, list.insert(entry(key, 100 + key as Span)))).collect();
        for step in 0..5000 {
            let (_, index) = nodes.remove(step * 7919 % nodes.len());
            list.remove(index);
            let key = 1000 + step as u64;
            nodes.push((key, list.insert(entry(key, 100 + key as Span))));
            assert!(list.late.is_empty());
            let first = nodes[0].0;
            assert_eq!(front(&list), Some((first, 100 + first as Span, first)));
        }
        assert_eq!(list.nodes.len(), 1000, "nodes are used again");
        assert_eq!((list.len(), list.arrivals()), (1000, 1000));
        assert!(list.keys().eq(nodes.iter().map(|(key, _)| RequestKey(*key))), "oldest first");
    }

    #[test]
    fn requeued_or_urgent_request_is_found_in_order() {
        let mut list = WaitList::default();
        let second = list.insert(entry(2, 200));
        let back = list.insert(entry(1, 300));
        let hurried = list.insert(entry(3, 50));
        assert_eq!(list.late.len(), 2);
        assert_eq!(front(&list), Some((1, 50, 3)));
        assert!(![second, back, hurried].into_iter().any(|index| list.is_behind(index)));
        let third = list.insert(entry(4, 400));
        assert!(list.is_behind(third));
        list.remove(third);
        list.remove(hurried);
        assert_eq!(front(&list), Some((1, 200, 2)));
        list.remove(back);
        assert_eq!(front(&list), Some((2, 200, 2)));
        list.remove(second);
        assert!(list.is_empty() && front(&list).is_none());
        assert_eq!((list.len(), list.arrivals()), (0, 0));
        assert!(list.late_dues.iter().all(BTreeSet::is_empty));
    }

    #[test]
    fn axis_without_deadline_is_never_due() {
        let mut list = WaitList::default();
        list.insert(entry(2, 200));
        list.insert(entry(1, 100));
        assert_eq!((list.next_due(Axis::Warm), list.next_due(Axis::Cold)), (None, None));
        let clock = LaneClock::new(false, Moment::ZERO);
        let due = list.next_due(Axis::Wall).and_then(|(due, _)| clock.when(Axis::Wall, due, Moment::ZERO));
        assert_eq!(due, Some(Moment::ZERO.plus(100)));
    }
}
