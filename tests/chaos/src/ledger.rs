//! The ledger: every request that was sent, its result, and the summary.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    exchange::{Outcome, Record},
    executions::{Executions, now},
};

/// Marks the human-readable lines, also in a namespace's output.
pub const REPORT: &str = "chaos: ";

/// Records of requests and of faults.
#[derive(Debug, Default)]
pub struct Ledger {
    records: Mutex<Vec<Record>>,
    faults: Mutex<Vec<u64>>,
    counts: watch::Sender<Counts>,
}

/// The numbers so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Requests sent, whether or not they have ended.
    pub sent: usize,
    /// Requests with a complete response.
    pub answered: usize,
    /// Requests that ended in any way.
    pub ended: usize,
}

/// The summary at the end.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Requests sent.
    pub sent: usize,
    /// Complete and correct byte by byte.
    pub answered: usize,
    /// Failed, by stated reason.
    pub failed: BTreeMap<String, usize>,
    /// Cancelled by the client.
    pub cancelled: usize,
    /// Executed again, before their clients had received a byte.
    pub repeated: usize,
    /// Lost, with the reason.
    pub lost: Vec<String>,
    /// Executed again, though their clients had received a byte: how long after it.
    pub doubled: Vec<(u64, Duration)>,
    /// The longest time from a fault to the first successful request sent after it.
    pub served_again: Option<Duration>,
    /// The longest time from a fault to the last failure before the next one.
    pub last_failure: Option<Duration>,
}

impl Ledger {
    /// Records that a request is being sent.
    pub fn sent(&self) {
        self.counts.send_modify(|counts| counts.sent += 1);
    }

    /// Records that a request has ended.
    pub fn ended(&self, record: Record) {
        let answered = usize::from(record.outcome == Outcome::Answered);
        lock(&self.records).push(record);
        self.counts.send_modify(|counts| {
            counts.answered += answered;
            counts.ended += 1;
        });
    }

    /// Records that a fault begins now.
    pub fn fault(&self) {
        lock(&self.faults).push(now());
    }

    /// Returns the numbers so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *self.counts.borrow()
    }

    /// Waits until this number of further requests has succeeded.
    ///
    /// # Panics
    /// If they do not within `patience`.
    pub async fn answers_within(&self, more: usize, patience: Duration) {
        let mut counts = self.counts.subscribe();
        let goal = self.counts().answered + more;
        let waited = tokio::time::timeout(patience, counts.wait_for(|counts| counts.answered >= goal)).await;
        assert!(waited.is_ok(), "timed out after {patience:?} waiting for {more} responses: {:?}", self.counts());
    }

    /// As [`Self::answers_within`], with the longest time that a request may take.
    pub async fn answers(&self, more: usize) {
        self.answers_within(more, Duration::from_secs(60)).await;
    }

    /// Returns all records, for a custom check.
    pub fn records(&self) -> Vec<Record> {
        lock(&self.records).clone()
    }

    /// Returns the summary.
    #[must_use]
    pub fn summary(&self, executions: &Executions) -> Summary {
        let (records, faults) = (lock(&self.records), lock(&self.faults));
        let mut summary = Summary { sent: self.counts().sent, ..Summary::default() };
        for record in records.iter() {
            match &record.outcome {
                Outcome::Answered => summary.answered += 1,
                Outcome::Failed(reason) => *summary.failed.entry(reason.clone()).or_default() += 1,
                Outcome::Cancelled => summary.cancelled += 1,
                Outcome::Broken(how) => summary.lost.push(format!("{}: no reason, {how}", record.nonce)),
                Outcome::Lost(how) => summary.lost.push(format!("{}: {how}", record.nonce)),
            }
            if record.outcome == Outcome::Answered && executions.of(record.nonce) == 0 {
                summary.lost.push(format!("{}: no response", record.nonce));
            }
            summary.repeated += usize::from(executions.of(record.nonce) > 1);
            let late = record.first_byte.and_then(|first_byte| executions.begun_after(record.nonce, first_byte));
            summary.doubled.extend(late.map(|late| (record.nonce, late)));
        }
        let missing = summary.sent - records.len();
        if missing > 0 {
            summary.lost.push(format!("{missing} have not ended"));
        }
        for (number, fault) in faults.iter().enumerate() {
            let next = faults.get(number + 1).copied().unwrap_or(u64::MAX);
            let (served, failed) = after(&records, *fault, next);
            summary.served_again = summary.served_again.max(served);
            summary.last_failure = summary.last_failure.max(failed);
        }
        summary
    }
}

/// Returns the times between a fault and the next: until the first success of a request sent after it, and until the
/// last failure.
fn after(records: &[Record], fault: u64, next: u64) -> (Option<Duration>, Option<Duration>) {
    let within = records.iter().filter(|record| record.ended > fault && record.ended < next);
    let served = |record: &&Record| record.outcome == Outcome::Answered && record.began > fault;
    let failed = |record: &&Record| !matches!(record.outcome, Outcome::Answered | Outcome::Cancelled);
    let since = |record: &Record| Duration::from_nanos(record.ended - fault);
    (within.clone().filter(served).map(since).min(), within.filter(failed).map(since).max())
}

impl Summary {
    /// Prints one line and checks the summary.
    ///
    /// # Panics
    /// If nothing succeeded, or any request was lost or doubled.
    pub fn check(&self, scenario: &str) {
        report_line(&format!("{scenario}: {self}"));
        assert!(self.sent > 0 && self.answered > 0, "{scenario}: no request was answered: {self:?}");
        assert!(self.lost.is_empty(), "{scenario}: lost {:#?}", self.lost);
        assert!(self.doubled.is_empty(), "{scenario}: executed again after the first byte: {:?}", self.doubled);
    }

    /// Returns the number of failures, for any reason.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.failed.values().sum()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons: Vec<String> = self.failed.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        let reasons = if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join(", ")) };
        write!(
            out,
            "sent {}, answered {}, failed {}{reasons}, cancelled {}, repeated {}, lost {}, doubled {}",
            self.sent,
            self.answered,
            self.failures(),
            self.cancelled,
            self.repeated,
            self.lost.len(),
            self.doubled.len(),
        )?;
        if let Some(served) = self.served_again {
            write!(out, ", served again after {served:.0?}")?;
        }
        if let Some(failed) = self.last_failure {
            write!(out, ", last failure after {failed:.0?}")?;
        }
        Ok(())
    }
}

/// Prints a line, bypassing the capture of a test's output.
pub fn report_line(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{REPORT}{line}");
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn record(nonce: u64, began: u64, ended: u64, outcome: Outcome) -> Record {
        let first_byte = Some(began + 1);
        Record { nonce, began, first_byte, ended, outcome, retry_after: false }
    }

    fn executed(lines: &str) -> Executions {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(lines.as_bytes()).expect("written");
        Executions::read(&file.path().to_owned())
    }

    fn ledger(records: Vec<Record>) -> Ledger {
        let ledger = Ledger::default();
        for record in records {
            ledger.sent();
            ledger.ended(record);
        }
        ledger
    }

    #[test]
    fn execution_after_first_byte_is_doubled() {
        let ledger = ledger(vec![record(1, 10, 20, Outcome::Answered), record(2, 10, 20, Outcome::Answered)]);
        let summary = ledger.summary(&executed("9 1\n10 1\n10 2\n15 2\n"));
        assert_eq!((summary.repeated, summary.doubled), (2, vec![(2, Duration::from_nanos(4))]));
    }

    #[test]
    fn unfinished_and_unexecuted_requests_are_lost() {
        let ledger = ledger(vec![record(1, 10, 20, Outcome::Answered)]);
        ledger.sent();
        assert_eq!(ledger.summary(&executed("")).lost.len(), 2);
    }

    #[test]
    fn recovery_is_measured_from_each_fault() {
        let ledger = ledger(vec![
            record(1, 10, 150, Outcome::Failed("502 x".to_owned())),
            record(2, 90, 120, Outcome::Answered),
            record(3, 110, 170, Outcome::Answered),
        ]);
        lock(&ledger.faults).push(100);
        let summary = ledger.summary(&executed("10 1\n90 2\n110 3\n"));
        assert_eq!(summary.served_again, Some(Duration::from_nanos(70)));
        assert_eq!(summary.last_failure, Some(Duration::from_nanos(50)));
    }
}
