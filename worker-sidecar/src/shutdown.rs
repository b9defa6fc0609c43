//! Draining: accept no new requests, finish running ones, and then exit, stay away, or return.
//!
//! One state for the whole process, watched by every link. A signal's drain is final and ends the process; an admin's
//! is final and does not; a `/drain` is undone when the backend was gone and is healthy again.

use std::time::{Duration, Instant};

use modelrelay_platform::log;
use modelrelay_platform::signals::Signals;
use tokio::sync::watch;

/// The longest drain. A relay may send any number, and a clock has an end.
const MAX_TIMEOUT: Duration = Duration::from_secs(86_400);

/// The originator of a drain. Only a stronger cause replaces an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// A request to `/drain` of the probe server.
    Probe,
    /// An admin, through a relay.
    Admin,
    /// SIGTERM or SIGINT.
    Signal,
}

impl Cause {
    /// The cause, for the wire and the log.
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
pub struct DrainOrder {
    /// The originator.
    pub cause: Cause,
    /// The time at which running requests are ended.
    pub deadline: Instant,
}

/// The drain state of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainState {
    /// It accepts requests.
    Serving,
    /// It accepts no new requests.
    Draining(DrainOrder),
}

/// The drain state of the process.
#[derive(Debug)]
pub struct Drain(watch::Sender<DrainState>);

impl Default for Drain {
    fn default() -> Self {
        Self(watch::channel(DrainState::Serving).0)
    }
}

impl Drain {
    /// Begins a drain, or replaces a weaker one. Returns the order in effect.
    pub fn begin(&self, cause: Cause, timeout: Duration, now: Instant) -> DrainOrder {
        let mut order = DrainOrder { cause, deadline: now + timeout.min(MAX_TIMEOUT) };
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

    /// Undoes a `/drain`; stronger causes stay.
    pub fn undo(&self) {
        self.0.send_if_modified(|state| match state {
            DrainState::Draining(DrainOrder { cause: Cause::Probe, .. }) => {
                *state = DrainState::Serving;
                true
            }
            DrainState::Draining(_) | DrainState::Serving => false,
        });
    }

    /// Returns the state, now and at each change.
    pub fn subscribe(&self) -> watch::Receiver<DrainState> {
        self.0.subscribe()
    }

    /// Returns the state.
    pub fn state(&self) -> DrainState {
        *self.0.borrow()
    }

    /// True if no new requests are accepted.
    pub fn is_draining(&self) -> bool {
        self.state() != DrainState::Serving
    }

    /// True if the backend's return undoes the drain.
    pub fn is_undoable(&self) -> bool {
        self.state().is_undoable()
    }
}

impl DrainState {
    /// True if the backend's return undoes the drain.
    pub fn is_undoable(&self) -> bool {
        matches!(self, Self::Draining(DrainOrder { cause: Cause::Probe, .. }))
    }
}

/// Listens for SIGTERM and SIGINT, or their Windows counterparts, from now on, and returns a future for the first of
/// them. After that, a second one ends the process at once, with a shell's exit code for it.
#[expect(clippy::disallowed_methods, reason = "the second signal ends the process without finishing requests")]
pub fn first_signal() -> std::io::Result<impl Future<Output = &'static str>> {
    let mut signals = Signals::listen()?;
    Ok(async move {
        let first = signals.next().await;
        tokio::spawn(async move {
            let second = signals.next().await;
            tracing::warn!("second signal; exiting immediately");
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
    fn only_stronger_drain_cause_replaces_current_one() {
        let (drain, now) = (Drain::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(drain.begin(Cause::Probe, second, now).cause, Cause::Probe);
        assert_eq!(drain.begin(Cause::Signal, 5 * second, now).deadline, now + 5 * second);
        assert_eq!(drain.begin(Cause::Admin, second, now).cause, Cause::Signal);
    }

    #[test]
    fn only_probe_drain_is_undone() {
        let (drain, now) = (Drain::default(), Instant::now());
        drain.begin(Cause::Probe, Duration::ZERO, now);
        drain.undo();
        assert!(!drain.is_draining());
        drain.begin(Cause::Admin, Duration::ZERO, now);
        drain.undo();
        assert!(drain.is_draining() && !drain.is_undoable());
    }
}
