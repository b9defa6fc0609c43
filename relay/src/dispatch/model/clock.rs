//! Time inside the core: whole nanoseconds since the first event, so that sums of deadlines can neither panic nor
//! round.
//!
//! A waiting request has two clocks: one runs while a worker serves its model, the other while it waits for a load.
//! Both are derived from the [`LaneClock`] of the requests that wait for the same workers, which sums up the cold time;
//! warm time is the rest. Each only ever grows, and at any moment exactly one of them does, so a deadline on either
//! axis is one number that never changes while the request waits.

use std::time::Duration;

use super::event::Now;

/// A length of time, or a position on the warm or cold axis of a lane, in nanoseconds.
pub(crate) type Span = i64;

/// Settings beyond this (36 years) mean "never"; a few of them still add up without overflow.
const LONGEST: Span = Span::MAX / 8;

/// The clock of a waiting request's deadline.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Axis {
    /// Runs while a worker serves the model.
    Warm,
    /// Runs while the request waits for a load.
    Cold,
    /// Always runs.
    Wall,
}

impl Axis {
    pub(crate) const ALL: [Self; 3] = [Self::Warm, Self::Cold, Self::Wall];
}

/// A point in time, in nanoseconds since the first event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Moment(Span);

impl Moment {
    /// The moment of the first event.
    pub(crate) const ZERO: Self = Self(0);

    /// The time from `earlier` to here.
    pub(crate) fn since(self, earlier: Self) -> Span {
        self.0 - earlier.0
    }

    /// The moment `span` later.
    pub(crate) fn plus(self, span: Span) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// The last moment before this one.
    pub(crate) fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// The place on the wall axis.
    pub(crate) fn on_wall(self) -> Span {
        self.0
    }

    /// The number itself, for sums over many moments.
    pub(crate) fn nanos(self) -> i128 {
        i128::from(self.0)
    }
}

/// Converts a duration to a span, capped at `LONGEST`.
pub(crate) fn span(duration: Duration) -> Span {
    Span::try_from(duration.as_nanos()).map_or(LONGEST, |nanos| nanos.min(LONGEST))
}

/// Converts a span to a duration; a negative span becomes zero.
pub(crate) fn duration(span: Span) -> Duration {
    Duration::from_nanos(u64::try_from(span).unwrap_or(0))
}

/// Translates the shell's instants and never lets time go back: two tasks may read the clock in one order and acquire
/// the lock in the other.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    epoch: Option<Now>,
    /// The moment of the current event.
    pub(crate) now: Moment,
}

impl Default for Clock {
    fn default() -> Self {
        Self { epoch: None, now: Moment::ZERO }
    }
}

impl Clock {
    /// Advances to the moment of an event.
    pub(crate) fn advance(&mut self, now: Now) {
        self.epoch.get_or_insert(now);
        self.now = self.moment(now);
    }

    /// Returns the moment of a query.
    pub(crate) fn moment(&self, now: Now) -> Moment {
        self.epoch.map_or(self.now, |epoch| Moment(span(now.saturating_duration_since(epoch))).max(self.now))
    }

    /// Converts a moment to an instant. `None` before the first event, when nothing is due.
    pub(crate) fn instant(&self, moment: Moment) -> Option<Now> {
        self.epoch.and_then(|epoch| epoch.checked_add(duration(moment.0)))
    }
}

/// Measures how long the requests of a lane have been cold and warm since the first one arrived.
#[derive(Clone, Debug)]
pub(crate) struct LaneClock {
    cold_before: Span,
    cold_since: Option<Moment>,
}

impl LaneClock {
    /// Creates a clock at zero.
    pub(crate) fn new(cold: bool, now: Moment) -> Self {
        Self { cold_before: 0, cold_since: cold.then_some(now) }
    }

    pub(crate) fn is_cold(&self) -> bool {
        self.cold_since.is_some()
    }

    /// Returns the position on an axis: the total cold time of the lane, the time that was not cold, or all time.
    pub(crate) fn at(&self, axis: Axis, now: Moment) -> Span {
        match axis {
            Axis::Warm => now.0 - self.cold(now),
            Axis::Cold => self.cold(now),
            Axis::Wall => now.0,
        }
    }

    /// Switches to the other axis, if that is a change.
    pub(crate) fn set_cold(&mut self, cold: bool, now: Moment) {
        if cold == self.is_cold() {
            return;
        }
        self.cold_before = self.cold(now);
        self.cold_since = cold.then_some(now);
    }

    /// Returns when an axis reaches `due`: now if it has already, `None` if the axis stands still.
    pub(crate) fn when(&self, axis: Axis, due: Span, now: Moment) -> Option<Moment> {
        if self.at(axis, now) >= due {
            return Some(now);
        }
        match axis {
            Axis::Warm => (!self.is_cold()).then(|| Moment(due.saturating_add(self.cold_before))),
            Axis::Cold => self.cold_since.map(|since| since.plus(due - self.cold_before)),
            Axis::Wall => Some(Moment(due)),
        }
    }

    fn cold(&self, now: Moment) -> Span {
        self.cold_before + self.cold_since.map_or(0, |since| now.since(since))
    }
}
