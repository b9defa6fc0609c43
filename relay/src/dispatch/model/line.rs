//! A line of requests that wait for the same workers: returns the oldest, the next to expire, and removes any of them.
//!
//! Requests arrive in the order of their keys and, while the settings do not change, in that of their deadlines. So a
//! line is a list linked through its seats, and its first is also the first to expire. Insertion and removal touch a
//! seat and its neighbours, however long the line is. A request that does not fit behind the last one, because it
//! returns from a worker or its deadline is nearer, is *late* and kept in trees next to the list: late requests are
//! few; if all were, they would cost as much as trees do.

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

    fn on(&self, axis: Axis) -> Span {
        self.0[axis as usize]
    }

    /// True if no axis ends `self` later than `others`.
    fn all_by(&self, others: &Self) -> bool {
        self.0.iter().zip(&others.0).all(|(due, other)| due <= other)
    }
}

/// A request, reduced to the fields that a line needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiter {
    pub(crate) key: RequestKey,
    pub(crate) arrived: Moment,
    pub(crate) deadlines: Deadlines,
}

/// The place of a request in its line, until it leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SeatId(NonZeroU32);

/// A request and its neighbours.
#[derive(Debug)]
pub(crate) struct Seat {
    waiter: Waiter,
    ahead: Option<SeatId>,
    behind: Option<SeatId>,
}

/// All requests that wait in one lane.
#[derive(Debug, Default)]
pub(crate) struct Line {
    seats: Vec<Seat>,
    /// Unused seats.
    free: Vec<SeatId>,
    first: Option<SeatId>,
    last: Option<SeatId>,
    late: BTreeMap<RequestKey, Waiter>,
    late_dues: [BTreeSet<(Span, RequestKey)>; Axis::ALL.len()],
    /// The sum of all arrivals, in nanoseconds: ages are reported as sums.
    arrivals: i128,
}

impl Line {
    pub(crate) fn insert(&mut self, waiter: Waiter) -> SeatId {
        self.arrivals += waiter.arrived.nanos();
        let last = self.last.map(|last| self[last].waiter);
        let fits = last.is_none_or(|last| last.key < waiter.key && last.deadlines.all_by(&waiter.deadlines));
        let seat = self.take_seat(waiter);
        if fits {
            self.link(seat);
        } else {
            self.insert_late(waiter);
        }
        seat
    }

    pub(crate) fn remove(&mut self, seat: SeatId) {
        let waiter = self[seat].waiter;
        self.arrivals -= waiter.arrived.nanos();
        if !self.remove_late(&waiter) {
            self.unlink(seat);
        }
        self.free.push(seat);
    }

    pub(crate) fn len(&self) -> usize {
        self.seats.len() - self.free.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The oldest request.
    pub(crate) fn first(&self) -> Option<&Waiter> {
        let late = self.late.values().next();
        self.listed().next().into_iter().chain(late).min_by_key(|waiter| waiter.key)
    }

    /// All waiting requests, in no order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.listed().chain(self.late.values()).map(|waiter| waiter.key)
    }

    /// Returns at most twice `count` requests, among them the `count` oldest.
    pub(crate) fn oldest(&self, count: usize) -> impl Iterator<Item = &Waiter> {
        self.listed().take(count).chain(self.late.values().take(count))
    }

    /// Returns the next deadline on an axis, and its request.
    pub(crate) fn next_due(&self, axis: Axis) -> Option<(Span, RequestKey)> {
        let listed = self.listed().next().map(|waiter| (waiter.deadlines.on(axis), waiter.key));
        let late = self.late_dues[axis as usize].first().copied();
        listed.into_iter().chain(late).min().filter(|(due, _)| *due != NEVER)
    }

    pub(crate) fn arrivals(&self) -> i128 {
        self.arrivals
    }

    /// Returns the listed requests from the first to the last, without the late ones.
    fn listed(&self) -> impl Iterator<Item = &Waiter> {
        let seat = |id: Option<SeatId>| id.map(|id| &self[id]);
        std::iter::successors(seat(self.first), move |before| seat(before.behind)).map(|seat| &seat.waiter)
    }

    fn take_seat(&mut self, waiter: Waiter) -> SeatId {
        let new = Seat { waiter, ahead: None, behind: None };
        if let Some(seat) = self.free.pop() {
            self[seat] = new;
            return seat;
        }
        self.seats.push(new);
        let count = u32::try_from(self.seats.len()).ok().and_then(NonZeroU32::new);
        SeatId(count.expect("fewer than four billion wait"))
    }

    fn link(&mut self, seat: SeatId) {
        let last = self.last.replace(seat);
        self[seat].ahead = last;
        match last {
            Some(last) => self[last].behind = Some(seat),
            None => self.first = Some(seat),
        }
    }

    fn unlink(&mut self, seat: SeatId) {
        let Seat { ahead, behind, .. } = self[seat];
        match ahead {
            Some(ahead) => self[ahead].behind = behind,
            None => self.first = behind,
        }
        match behind {
            Some(behind) => self[behind].ahead = ahead,
            None => self.last = ahead,
        }
    }

    fn insert_late(&mut self, waiter: Waiter) {
        for axis in Axis::ALL {
            self.late_dues[axis as usize].insert((waiter.deadlines.on(axis), waiter.key));
        }
        self.late.insert(waiter.key, waiter);
    }

    /// Removes a late request; returns true if it was late.
    fn remove_late(&mut self, waiter: &Waiter) -> bool {
        let was_late = self.late.remove(&waiter.key).is_some();
        if was_late {
            for axis in Axis::ALL {
                self.late_dues[axis as usize].remove(&(waiter.deadlines.on(axis), waiter.key));
            }
        }
        was_late
    }
}

/// A seat's number is held only by the request in it.
impl Index<SeatId> for Line {
    type Output = Seat;

    fn index(&self, SeatId(number): SeatId) -> &Seat {
        &self.seats[number.get() as usize - 1]
    }
}

impl IndexMut<SeatId> for Line {
    fn index_mut(&mut self, SeatId(number): SeatId) -> &mut Seat {
        &mut self.seats[number.get() as usize - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::model::clock::LaneClock;

    fn waiter(key: u64, wall: Span) -> Waiter {
        let moment = |at| Moment::ZERO.plus(at);
        Waiter { key: RequestKey(key), arrived: moment(1), deadlines: Deadlines::new(None, None, Some(moment(wall))) }
    }

    fn front(line: &Line) -> Option<(u64, Span, u64)> {
        let (due, next) = line.next_due(Axis::Wall)?;
        Some((line.first()?.key.0, due, next.0))
    }

    #[test]
    fn requests_arriving_in_order_are_never_late() {
        let mut line = Line::default();
        let mut seats: Vec<_> = (0..1000).map(|key| (key, line.insert(waiter(key, 100 + key as Span)))).collect();
        for step in 0..5000 {
            let (_, seat) = seats.remove(step * 7919 % seats.len());
            line.remove(seat);
            let key = 1000 + step as u64;
            seats.push((key, line.insert(waiter(key, 100 + key as Span))));
            assert!(line.late.is_empty());
            let first = seats[0].0;
            assert_eq!(front(&line), Some((first, 100 + first as Span, first)));
        }
        assert_eq!(line.seats.len(), 1000, "seats are used again");
        assert_eq!((line.len(), line.arrivals()), (1000, 1000));
        assert!(line.keys().eq(seats.iter().map(|(key, _)| RequestKey(*key))), "oldest first");
    }

    #[test]
    fn requeued_or_urgent_request_is_found_in_order() {
        let mut line = Line::default();
        let second = line.insert(waiter(2, 200));
        let back = line.insert(waiter(1, 300));
        let hurried = line.insert(waiter(3, 50));
        assert_eq!(line.late.len(), 2);
        assert_eq!(front(&line), Some((1, 50, 3)));
        line.remove(hurried);
        assert_eq!(front(&line), Some((1, 200, 2)));
        line.remove(back);
        assert_eq!(front(&line), Some((2, 200, 2)));
        line.remove(second);
        assert!(line.is_empty() && front(&line).is_none());
        assert_eq!((line.len(), line.arrivals()), (0, 0));
        assert!(line.late_dues.iter().all(BTreeSet::is_empty));
    }

    #[test]
    fn axis_without_deadline_is_never_due() {
        let mut line = Line::default();
        line.insert(waiter(2, 200));
        line.insert(waiter(1, 100));
        assert_eq!((line.next_due(Axis::Warm), line.next_due(Axis::Cold)), (None, None));
        let clock = LaneClock::new(false, Moment::ZERO);
        let due = line.next_due(Axis::Wall).and_then(|(due, _)| clock.when(Axis::Wall, due, Moment::ZERO));
        assert_eq!(due, Some(Moment::ZERO.plus(100)));
    }
}
