//! Pseudorandom numbers that can be reproduced.

use std::time::Duration;

/// splitmix64: small, good enough, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_F491_4F6C_DD1D).wrapping_add(0x9E37_79B9))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Between 0 and 1, neither included.
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// The time between independent arrivals.
    pub fn exponential(&mut self, mean: f64) -> Duration {
        Duration::from_secs_f64(-mean * self.unit().ln())
    }

    /// The length of a response or of a pause: mostly short, sometimes long.
    pub fn lognormal(&mut self, mean: f64, sigma: f64) -> Duration {
        let normal = (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        Duration::from_secs_f64(mean * sigma.mul_add(normal, -sigma * sigma / 2.0).exp())
    }

    /// An index, drawn with these weights.
    pub fn weighted(&mut self, weights: &[f64]) -> usize {
        let mut left = self.unit() * weights.iter().sum::<f64>();
        let found = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        found.unwrap_or(weights.len() - 1)
    }
}
