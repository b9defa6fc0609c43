//! Many of everything, and large ones: what a thousand workers cost, what two thousand uploads may, and whom large bodies
//! may disturb. Figures are per program, read from `/proc`, so that what the tests themselves need does not count.
//!
//! Each of these tests wants the machine for itself: `.config/nextest.toml` runs it alone.

mod idle_workers;
mod large_bodies;
mod open_files;
mod uploads;
