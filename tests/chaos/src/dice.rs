//! Reproducible randomness: everything random in a scenario comes from one printed seed.

use std::{ops::RangeInclusive, time::SystemTime};

/// Sets the seed, to reproduce a failure.
const SEED: &str = "MODELRELAY_CHAOS_SEED";

/// `SplitMix64`.
#[derive(Debug, Clone)]
pub struct Dice {
    seed: u64,
    state: u64,
}

impl Dice {
    /// Takes the seed from `MODELRELAY_CHAOS_SEED`, otherwise from the clock.
    ///
    /// # Panics
    /// If the variable is not a number.
    #[must_use]
    pub fn thrown() -> Self {
        let clock = || SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64 % 1_000_000_007);
        Self::of(std::env::var(SEED).map_or_else(|_| clock(), |seed| seed.parse().expect("a number in the seed")))
    }

    /// Takes this seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        Self { seed, state: seed }
    }

    /// Returns the seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the next number.
    pub fn throw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in the range.
    pub fn between(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.throw() % (range.end() - range.start() + 1)
    }

    /// Returns an index below `count`.
    pub fn below(&mut self, count: usize) -> usize {
        self.throw() as usize % count
    }

    /// True in `percent` of 100 throws.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.throw() % 100 < percent
    }
}
