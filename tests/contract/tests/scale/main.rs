//! Large numbers and sizes: the cost of a thousand workers, the limits for two thousand uploads, and the effect of
//! large bodies on others. Figures are per program, read from `/proc`, so that the tests' own usage is excluded.
//!
//! Each of these tests needs the machine for itself: `.config/nextest.toml` runs it alone.

mod idle_workers;
mod large_bodies;
mod open_files;
mod uploads;
