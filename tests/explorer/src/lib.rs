//! Explores every state that a small world can reach, breadth first, so that the trace of a violation is a shortest
//! one.
//!
//! A world is a value that can be cloned: the real code of a pure core, and around it what the core talks to. An
//! assertion that fails while it acts, or while a new state is inspected, is a violation. Two worlds are the same state
//! if their fingerprints are equal: [`canonical::Canonical`] makes one from the text of a value, with times relative to
//! now and keys by their order.
//!
//! What the fingerprint leaves out must not matter. So of every [`TWINS`] times that a state is reached again, once the
//! steps are taken from there too, and must lead to the same states as before.
//!
//! The fingerprint has 128 bits. Among ten million states, two different ones share theirs with a probability of
//! 10⁻²⁴; a world may then miss states, but never reports a violation that does not exist.

pub mod canonical;
mod fingerprint;
mod suite;
mod violation;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

pub use fingerprint::fingerprint;
pub use suite::{explore_by_hand, explore_completely, find_bug};
pub use violation::Violation;

use violation::caught;

/// Of this many repetitions of a state, one is examined.
const TWINS: u64 = 8;

/// A world whose states are explored.
pub trait World: Clone {
    /// One step.
    type Action: Clone + fmt::Debug;

    /// Returns the steps that are possible now.
    fn actions(&self) -> Vec<Self::Action>;

    /// Takes a step. A failed assertion is a violation.
    fn act(&mut self, action: &Self::Action);

    /// Returns the fingerprint of this state. Equal states must have the same future.
    fn fingerprint(&self) -> u128;

    /// Checks a state that was reached for the first time, on a copy. A failed assertion is a violation.
    fn inspect(self) {}
}

/// The limits of an exploration.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most states.
    pub states: usize,
    /// The most steps from the start.
    pub depth: u32,
    /// The longest time.
    pub time: Duration,
}

/// The reason why an exploration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Every reachable state was seen.
    Complete,
    /// The limit of states was reached.
    States,
    /// The limit of steps was reached.
    Depth,
    /// The limit of time was reached.
    Time,
    /// An assertion failed.
    Violation,
}

/// The result of an exploration.
#[derive(Debug)]
pub struct Exploration<A> {
    /// The number of different states.
    pub states: usize,
    /// The number of steps taken from them.
    pub transitions: u64,
    /// The largest number of steps on a shortest path to a state.
    pub depth: u32,
    /// Why it ended.
    pub end: End,
    /// How long it took.
    pub took: Duration,
    /// The violation, if there is one.
    pub violation: Option<Violation<A>>,
}

/// Explores the states that a world can reach, until there is a violation or a limit is reached.
pub fn explore<W: World>(start: &W, limits: Limits) -> Exploration<W::Action> {
    let began = Instant::now();
    let mut search = Search::new();
    search.note(start.clone(), start.fingerprint(), None, 0);
    let end = search.run(limits, began);
    let (states, transitions, depth) = (search.steps.len(), search.transitions, search.depth);
    Exploration { states, transitions, depth, end, took: began.elapsed(), violation: search.violation }
}

/// A state whose steps are to be taken.
struct Open<W: World> {
    world: W,
    index: u32,
    depth: u32,
    /// For a state that was reached again: the step by which.
    again: Option<(u32, W::Action)>,
}

struct Search<W: World> {
    seen: HashMap<u128, u32, BuildHasherDefault<Lowest>>,
    /// For each state, its predecessor and the step from there.
    steps: Vec<Option<(u32, W::Action)>>,
    /// For each state whose steps were taken, the fingerprint of what follows.
    futures: Vec<Option<u128>>,
    open: VecDeque<Open<W>>,
    repetitions: u64,
    transitions: u64,
    depth: u32,
    violation: Option<Violation<W::Action>>,
}

impl<W: World> Search<W> {
    fn new() -> Self {
        Self {
            seen: HashMap::default(),
            steps: Vec::new(),
            futures: Vec::new(),
            open: VecDeque::new(),
            repetitions: 0,
            transitions: 0,
            depth: 0,
            violation: None,
        }
    }

    fn run(&mut self, limits: Limits, began: Instant) -> End {
        let mut is_cut = false;
        while let Some(open) = self.open.pop_front() {
            if self.violation.is_some() {
                return End::Violation;
            }
            if began.elapsed() >= limits.time {
                return End::Time;
            }
            if self.steps.len() >= limits.states {
                return End::States;
            }
            if open.depth >= limits.depth {
                is_cut = true;
                continue;
            }
            self.expand(&open);
        }
        match (&self.violation, is_cut) {
            (Some(_), _) => End::Violation,
            (None, true) => End::Depth,
            (None, false) => End::Complete,
        }
    }

    /// Takes every step from a state.
    fn expand(&mut self, open: &Open<W>) {
        let mut next = String::new();
        for action in open.world.actions() {
            self.transitions += u64::from(open.again.is_none());
            let mut world = open.world.clone();
            if let Err(message) = caught(|| world.act(&action)) {
                self.violate(message, Some((open.index, action)));
                return;
            }
            let print = world.fingerprint();
            next.push_str(&format!("{action:?} {print:x}\n"));
            if open.again.is_none() {
                self.note(world, print, Some((open.index, action)), open.depth + 1);
                if self.violation.is_some() {
                    return;
                }
            }
        }
        let future = &mut self.futures[open.index as usize];
        let before = future.replace(fingerprint(next.as_bytes()));
        if before.is_some() && before != *future {
            self.violate("two states with one fingerprint have different futures".to_owned(), open.again.clone());
        }
    }

    /// Adds a state, unless it was seen.
    fn note(&mut self, world: W, print: u128, step: Option<(u32, W::Action)>, depth: u32) {
        if let Some(index) = self.seen.get(&print).copied() {
            self.repetitions += 1;
            if self.repetitions.is_multiple_of(TWINS) {
                self.open.push_back(Open { world, index, depth, again: step });
            }
            return;
        }
        let copy = world.clone();
        if let Err(message) = caught(|| copy.inspect()) {
            self.violate(message, step);
            return;
        }
        let index = u32::try_from(self.steps.len()).unwrap_or(u32::MAX);
        self.seen.insert(print, index);
        self.steps.push(step);
        self.futures.push(None);
        self.depth = self.depth.max(depth);
        self.open.push_back(Open { world, index, depth, again: None });
    }

    fn violate(&mut self, message: String, last: Option<(u32, W::Action)>) {
        let mut trace = Vec::new();
        let mut next = last;
        while let Some((from, action)) = next {
            trace.push(action);
            next = self.steps[from as usize].clone();
        }
        trace.reverse();
        self.violation = Some(Violation { message, trace });
    }
}

impl<A: fmt::Debug> Exploration<A> {
    /// Returns the exploration if nothing was violated.
    ///
    /// # Panics
    ///
    /// Panics with the shortest trace to the violation.
    #[must_use]
    pub fn expect_no_violation(self) -> Self {
        if let Some(violation) = &self.violation {
            panic!("{violation}");
        }
        self
    }
}

impl<A> fmt::Display for Exploration<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = match self.end {
            End::Complete => "complete",
            End::States => "cut at its limit of states",
            End::Depth => "cut at its limit of steps",
            End::Time => "cut at its limit of time",
            End::Violation => "a violation",
        };
        let memory = memory().map_or(String::new(), |mib| format!(", {mib} MiB"));
        let Self { states, transitions, depth, took, .. } = self;
        let seconds = took.as_secs_f64();
        write!(f, "{states} states, {transitions} transitions, depth {depth}, {seconds:.1} s{memory}; {end}")
    }
}

/// Returns the most memory that this process has used, in MiB, where the system reports it.
fn memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib / 1024)
}

/// A fingerprint is a hash already.
#[derive(Default)]
struct Lowest(u64);

impl Hasher for Lowest {
    #[expect(clippy::cast_possible_truncation, reason = "its lowest bits are as random as all others")]
    fn write_u128(&mut self, number: u128) {
        self.0 = number as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests;
