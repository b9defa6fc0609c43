//! Models whose requests the backend fails, though its health check succeeds: a state machine without I/O. The caller
//! passes in the status of each response and the time.
//!
//! Five server errors in a row eject a model: relays then prefer other workers for it. The first ejection lasts 30 s,
//! each further one 30 s longer, up to 300 s. After that the model is on trial: relays use it again, and the next
//! server error ejects it at once. Any other response ends an ejection or a trial. After 300 s without a server error
//! the count of ejections starts again.
//!
//! A 501 is no outlier: it rejects one kind of request, on every worker alike.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Server errors in a row that eject a model.
const LIMIT: u32 = 5;

/// The duration of the first ejection, and the time by which each further one is longer.
const STEP: Duration = Duration::from_secs(30);

/// The longest ejection, and the time without a server error after which ejections are forgotten.
const LONGEST: Duration = Duration::from_secs(300);

/// The most models with a record: names come from relays.
const MAX_RECORDS: usize = 1000;

/// The models of one worker.
#[derive(Debug, Default)]
pub(super) struct Outliers(BTreeMap<Box<str>, Record>);

/// A model with at least one server error.
#[derive(Debug)]
struct Record {
    state: ModelState,
    /// Ejections since it was last forgotten.
    ejections: u32,
    failed_at: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ModelState {
    /// The number of consecutive server errors.
    Sound(u32),
    Ejected(Instant),
    OnTrial,
}

/// A change to a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// It is ejected for this time.
    Ejected(Duration),
    /// It was ejected or on trial, and the backend responds to its requests again.
    Recovered,
}

impl Outliers {
    /// Applies the status of a response for a model.
    pub(super) fn handle_status(&mut self, model: &str, status: u16, now: Instant) -> Option<Change> {
        match status {
            501 => None,
            500.. => self.handle_failure(model, now),
            _ => self.handle_success(model, now),
        }
    }

    /// Ends the ejections whose time is over. Returns the models that are on trial from now on.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Box<str>> {
        let over = |record: &Record| matches!(record.state, ModelState::Ejected(until) if until <= now);
        let over = self.0.iter_mut().filter(|(_, record)| over(record));
        over.map(|(model, record)| {
            record.state = ModelState::OnTrial;
            model.clone()
        })
        .collect()
    }

    /// The time of the next [`expire`](Self::expire).
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let until = |record: &Record| match record.state {
            ModelState::Ejected(until) => Some(until),
            ModelState::Sound(_) | ModelState::OnTrial => None,
        };
        self.0.values().filter_map(until).min()
    }

    pub(super) fn is_ejected(&self, model: &str) -> bool {
        self.0.get(model).is_some_and(|record| matches!(record.state, ModelState::Ejected(_)))
    }

    pub(super) fn ejected(&self) -> usize {
        self.0.values().filter(|record| matches!(record.state, ModelState::Ejected(_))).count()
    }

    /// Forgets everything: the backend is another one, or was restarted.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    fn handle_failure(&mut self, model: &str, now: Instant) -> Option<Change> {
        if !self.0.contains_key(model) {
            if self.0.len() == MAX_RECORDS {
                return None;
            }
            self.0.insert(model.into(), Record { state: ModelState::Sound(0), ejections: 0, failed_at: now });
        }
        let record = self.0.get_mut(model)?;
        if record.is_forgotten(now) {
            record.ejections = 0;
        }
        record.failed_at = now;
        match &mut record.state {
            ModelState::Sound(failures) if *failures + 1 < LIMIT => *failures += 1,
            ModelState::Sound(_) | ModelState::OnTrial => return Some(record.eject(now)),
            ModelState::Ejected(_) => {}
        }
        None
    }

    fn handle_success(&mut self, model: &str, now: Instant) -> Option<Change> {
        // Usually there is no record, and the lookup is all that happens.
        let record = self.0.get_mut(model)?;
        let state = std::mem::replace(&mut record.state, ModelState::Sound(0));
        if record.ejections == 0 || record.is_forgotten(now) {
            self.0.remove(model);
        }
        (!matches!(state, ModelState::Sound(_))).then_some(Change::Recovered)
    }
}

impl Record {
    fn eject(&mut self, now: Instant) -> Change {
        self.ejections += 1;
        let time = STEP.saturating_mul(self.ejections).min(LONGEST);
        self.state = ModelState::Ejected(now + time);
        Change::Ejected(time)
    }

    /// True if the last server error is so old that ejections before it no longer matter.
    fn is_forgotten(&self, now: Instant) -> bool {
        matches!(self.state, ModelState::Sound(_)) && now.saturating_duration_since(self.failed_at) >= LONGEST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model and a clock.
    struct Served {
        outliers: Outliers,
        now: Instant,
    }

    impl Served {
        fn new() -> Self {
            Self { outliers: Outliers::default(), now: Instant::now() }
        }

        fn status(&mut self, status: u16) -> Option<Change> {
            self.outliers.handle_status("m", status, self.now)
        }

        fn fail(&mut self, times: u32) -> Option<Change> {
            (0..times).fold(None, |_, _| self.status(500))
        }

        /// Advances the clock; returns true if the model is on trial now.
        fn pass(&mut self, secs: u64) -> bool {
            self.now += Duration::from_secs(secs);
            !self.outliers.expire(self.now).is_empty()
        }
    }

    fn ejected(secs: u64) -> Option<Change> {
        Some(Change::Ejected(Duration::from_secs(secs)))
    }

    #[test]
    fn fifth_consecutive_server_error_ejects_model() {
        let mut m = Served::new();
        assert_eq!((m.fail(4), m.outliers.is_ejected("m")), (None, false));
        assert_eq!((m.status(503), m.outliers.is_ejected("m")), (ejected(30), true));
        assert_eq!((m.fail(9), m.outliers.ejected()), (None, 1));
        assert!(!m.outliers.is_ejected("n"));
    }

    #[test]
    fn any_other_response_resets_error_count() {
        for status in [200, 302, 404, 429] {
            let mut m = Served::new();
            m.fail(4);
            assert_eq!(m.status(status), None);
            assert!(m.outliers.0.is_empty());
            assert_eq!(m.fail(4), None);
        }
    }

    #[test]
    fn unsupported_request_keeps_error_count() {
        let mut m = Served::new();
        m.fail(4);
        assert_eq!(m.status(501), None);
        assert_eq!(m.fail(1), ejected(30));
    }

    #[test]
    fn ejection_ends_with_trial() {
        let mut m = Served::new();
        assert_eq!(m.outliers.next_timeout(), None);
        m.fail(5);
        assert_eq!(m.outliers.next_timeout(), Some(m.now + STEP));
        assert!(!m.pass(29) && m.pass(1));
        assert_eq!((m.outliers.is_ejected("m"), m.outliers.next_timeout()), (false, None));
        assert_eq!(m.status(200), Some(Change::Recovered));
        assert_eq!((m.status(200), m.fail(4)), (None, None));
    }

    #[test]
    fn each_failed_trial_ejects_for_longer() {
        let mut m = Served::new();
        m.fail(4);
        for secs in [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300] {
            assert_eq!(m.fail(1), ejected(secs));
            assert!(m.pass(secs));
        }
    }

    #[test]
    fn successful_response_ends_ejection() {
        let mut m = Served::new();
        m.fail(5);
        assert_eq!((m.status(200), m.outliers.is_ejected("m")), (Some(Change::Recovered), false));
        assert_eq!(m.fail(5), ejected(60), "its ejections still count");
    }

    #[test]
    fn ejections_are_forgotten_without_server_errors() {
        for success in [true, false] {
            let mut m = Served::new();
            m.fail(5);
            m.status(200);
            m.pass(300);
            if success {
                m.status(200);
                assert!(m.outliers.0.is_empty());
            }
            assert_eq!(m.fail(5), ejected(30));
        }
    }

    #[test]
    fn records_are_bounded() {
        let mut outliers = Outliers::default();
        for number in 0..=MAX_RECORDS {
            outliers.handle_status(&number.to_string(), 500, Instant::now());
        }
        assert_eq!(outliers.0.len(), MAX_RECORDS);
        outliers.clear();
        assert_eq!(outliers.0.len(), 0);
    }
}
