//! Draining: no new work, finish what runs, and then exit, stay away, or come back.
//!
//! One state for the whole process, watched by every link. A signal is for good and ends the process; an admin's order is
//! for good and does not; `/drain` is undone when the backend was seen down and is healthy again.

use std::time::{Duration, Instant};

use modelrelay_platform::log;
use modelrelay_platform::signals::Signals;
use tokio::sync::watch;

/// No drain takes longer. A relay may say any number, and a clock has an end.
const MAX_TIMEOUT: Duration = Duration::from_secs(86_400);

/// Who asked. A later cause may only be a stronger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// `/drain` of the probe server.
    Probe,
    /// An admin, through a relay.
    Admin,
    /// SIGTERM or SIGINT.
    Signal,
}

impl Cause {
    /// For the wire and the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Probe => "drain requested",
            Self::Admin => "drained by an admin",
            Self::Signal => "worker shutting down",
        }
    }
}

/// A drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Who asked.
    pub cause: Cause,
    /// Until when running requests may take.
    pub deadline: Instant,
}

/// Whether the worker takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainState {
    /// It does.
    Serving,
    /// It does not.
    Draining(Order),
}

/// The one state.
#[derive(Debug)]
pub struct Drain(watch::Sender<DrainState>);

impl Default for Drain {
    fn default() -> Self {
        Self(watch::channel(DrainState::Serving).0)
    }
}

impl Drain {
    /// Begins a drain, or strengthens the one that is under way. Gives the order in force.
    pub fn begin(&self, cause: Cause, timeout: Duration, now: Instant) -> Order {
        let mut order = Order { cause, deadline: now + timeout.min(MAX_TIMEOUT) };
        self.0.send_if_modified(|state| match state {
            DrainState::Draining(under_way) if under_way.cause >= cause => {
                order = *under_way;
                false
            }
            DrainState::Draining(_) | DrainState::Serving => {
                *state = DrainState::Draining(order);
                true
            }
        });
        order
    }

    /// Takes a `/drain` back; stronger causes stay.
    pub fn undo(&self) {
        self.0.send_if_modified(|state| match state {
            DrainState::Draining(Order { cause: Cause::Probe, .. }) => {
                *state = DrainState::Serving;
                true
            }
            DrainState::Draining(_) | DrainState::Serving => false,
        });
    }

    /// The state now and each change of it.
    pub fn subscribe(&self) -> watch::Receiver<DrainState> {
        self.0.subscribe()
    }

    /// The state now.
    pub fn state(&self) -> DrainState {
        *self.0.borrow()
    }

    /// Whether no new work is taken.
    pub fn is_draining(&self) -> bool {
        self.state() != DrainState::Serving
    }

    /// Whether the drain is one that the backend's return undoes.
    pub fn is_undoable(&self) -> bool {
        self.state().is_undoable()
    }
}

impl DrainState {
    /// Whether the backend's return ends it.
    pub fn is_undoable(&self) -> bool {
        matches!(self, Self::Draining(Order { cause: Cause::Probe, .. }))
    }
}

/// Hears of SIGTERM and SIGINT, or what Windows has in their place, from now on, and waits for the first of them. From then
/// on a second one ends the process at once, with the code that a shell gives for it.
#[expect(clippy::disallowed_methods, reason = "the second signal asks to end without finishing anything")]
pub fn first_signal() -> std::io::Result<impl Future<Output = &'static str>> {
    let mut signals = Signals::listen()?;
    Ok(async move {
        let first = signals.next().await;
        tokio::spawn(async move {
            let second = signals.next().await;
            tracing::warn!("second signal, ending at once");
            log::finish();
            std::process::exit(second.exit_code());
        });
        first.as_str()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stronger_cause_takes_over_and_a_weaker_one_does_not() {
        let (drain, now) = (Drain::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(drain.begin(Cause::Probe, second, now).cause, Cause::Probe);
        assert_eq!(drain.begin(Cause::Signal, 5 * second, now).deadline, now + 5 * second);
        assert_eq!(drain.begin(Cause::Admin, second, now).cause, Cause::Signal);
    }

    #[test]
    fn only_a_probes_drain_is_undone() {
        let (drain, now) = (Drain::default(), Instant::now());
        drain.begin(Cause::Probe, Duration::ZERO, now);
        drain.undo();
        assert!(!drain.is_draining());
        drain.begin(Cause::Admin, Duration::ZERO, now);
        drain.undo();
        assert!(drain.is_draining() && !drain.is_undoable());
    }
}
