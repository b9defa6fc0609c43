//! The backends' own records of their executions: one file for all of them, which outlives each.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// Returns the current time in nanoseconds, on the clock that all processes of a machine share.
#[must_use]
pub fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64)
}

/// The writing end, in a backend. A line is one write, so that those of several backends do not mix.
#[derive(Debug)]
pub struct Journal(File);

impl Journal {
    /// Opens the file for appending.
    ///
    /// # Panics
    /// If it cannot be opened.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        Self(OpenOptions::new().create(true).append(true).open(path).expect("the journal can be written"))
    }

    /// Records that a request is executed from now on: its body was read, and its client waits for the response.
    pub fn begins(&self, nonce: u64) {
        let _ = (&self.0).write_all(format!("{} {nonce}\n", now()).as_bytes());
    }
}

/// The executions of each request, with their times.
#[derive(Debug, Default)]
pub struct Executions(HashMap<u64, Vec<u64>>);

impl Executions {
    /// Reads the records of all backends.
    ///
    /// # Panics
    /// If they are invalid.
    #[must_use]
    pub fn read(path: &PathBuf) -> Self {
        let mut all = Self::default();
        // No backend has received a request yet.
        let Ok(text) = std::fs::read_to_string(path) else { return all };
        for line in text.lines() {
            let (at, nonce) = line.split_once(' ').expect("a time and a nonce");
            let at = at.parse().expect("a time");
            all.0.entry(nonce.parse().expect("a nonce")).or_default().push(at);
        }
        all
    }

    /// Returns how often a request was begun.
    #[must_use]
    pub fn of(&self, nonce: u64) -> usize {
        self.0.get(&nonce).map_or(0, Vec::len)
    }

    /// Returns how long after this time, at which its client had received a first byte, it was begun again.
    #[must_use]
    pub fn begun_after(&self, nonce: u64, time: u64) -> Option<Duration> {
        let last = self.0.get(&nonce)?.iter().max()?;
        last.checked_sub(time).filter(|late| *late > 0).map(Duration::from_nanos)
    }
}
