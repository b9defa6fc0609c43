//! What the backends did, written down by themselves: one file for all of them, which outlives each.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Now, in nanoseconds of the one clock that all processes of a machine share.
#[must_use]
pub fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64)
}

/// The writing end, in a backend. A line is one write, so that those of several backends do not mix.
#[derive(Debug)]
pub struct Journal(File);

impl Journal {
    /// Goes on with the file.
    ///
    /// # Panics
    /// When it cannot be opened.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        Self(OpenOptions::new().create(true).append(true).open(path).expect("the journal can be written"))
    }

    /// The request is executed from now on: its body was read, and somebody waits for the answer.
    pub fn begins(&self, nonce: u64) {
        let _ = (&self.0).write_all(format!("{} {nonce}\n", now()).as_bytes());
    }
}

/// What was executed, and when.
#[derive(Debug, Default)]
pub struct Executions(HashMap<u64, Vec<u64>>);

impl Executions {
    /// Of all backends that wrote here.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn read(path: &PathBuf) -> Self {
        let mut all = Self::default();
        // No backend was asked anything yet.
        let Ok(text) = std::fs::read_to_string(path) else { return all };
        for line in text.lines() {
            let (at, nonce) = line.split_once(' ').expect("a time and a nonce");
            let at = at.parse().expect("a time");
            all.0.entry(nonce.parse().expect("a nonce")).or_default().push(at);
        }
        all
    }

    /// How often a request was begun.
    #[must_use]
    pub fn of(&self, nonce: u64) -> usize {
        self.0.get(&nonce).map_or(0, Vec::len)
    }

    /// Whether it was begun again after this time, when its client had read a first byte.
    #[must_use]
    pub fn begun_after(&self, nonce: u64, time: u64) -> bool {
        self.0.get(&nonce).is_some_and(|begun| begun.iter().any(|at| *at > time))
    }
}
