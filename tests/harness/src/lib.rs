//! Starts the built programs and plays their peers by hand, for the black-box suites.

pub mod fake_backend;
pub mod fake_relay;
